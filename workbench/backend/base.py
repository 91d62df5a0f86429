"""The Backend protocol: who executes commands, on what memory. And the device table.

A backend *prepares*: `launch`, `copy`, `record`, `wait` and `sync_*` each return a callable of no
arguments that performs the command when called, as often as wanted, with everything else
(addresses, packed arguments) bound once. `backend/issue.py` strings them together; nothing here
knows programs.

Who may overwrite what, and when: see `program/commands.py`. In particular the callables of an
asynchronous backend return before the work is done, and a copy's source is read late.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from workbench.backend.args import AddressOf
from workbench.errors import DeviceError
from workbench.graph.ir import Node, Tensor
from workbench.program.commands import Capabilities, Space
from workbench.progress import Bar

Issue = Callable[[], Any]


def in_order(issues: Sequence[Issue]) -> Issue:
    """One callable that calls `issues`, first to last."""
    if len(issues) == 1:
        return issues[0]
    calls = tuple(issues)

    def issue() -> None:
        for call in calls:
            call()

    return issue


class Memory(Protocol):
    """A block of memory at a fixed address for as long as the object lives.

    `array` is a uint8 view for host and pinned memory, None for device memory the host cannot read.
    """

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def array(self) -> np.ndarray | None: ...

    def free(self) -> None:
        """Gives the memory back, once; later calls do nothing. Safe in any order at teardown."""


class Backend(Protocol):
    """Memory, streams and events of one device; stream 0 computes, stream 1 copies."""

    name: str  # "host", "embedded", "cuda", "null"
    description: str  # one line for results: what device, how many lanes, which driver
    waiting: str  # how a wait of the host waits, for results
    capabilities: Capabilities

    def allocate(self, nbytes: int, space: Space) -> Memory:
        """Zeroed memory, 256-byte aligned (64 on the CPU); raises DeviceError if there is none."""

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> Memory:
        """Takes a weight from the file's bytes (uint8, read-only map) into this backend's memory.

        The bytes may be repacked; the backend remembers how. `data` may be used in place where the
        backend computes on host memory; it outlives the backend then.
        """

    def scratch_bytes(self, node: Node) -> int:
        """Bytes of scratch `node` needs here, 0 for none."""

    def begins_early(self, node: Node) -> bool:
        """Whether the kernels of `node` wait by themselves for the launch in front of them, before
        they read what it writes and before they write anything: they may then be launched
        programmatically."""

    def make_ready(self, nodes: Sequence[Node], left: Bar) -> None:
        """Compiles what launches of `nodes` need, where no cache has it; tells `left` of each."""

    def launch(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
    ) -> Issue:
        """Computes `node`. programmatic: the launch may begin before the one in front of it has
        ended (only where `Capabilities.programmatic`)."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        """Queues a copy between host and device; with to_host, dst is the host's address."""

    def copy_to_peer(self, peer: Any, dst: int, src: int, nbytes: int, stream: int) -> Issue:
        """A copy from this device's memory to that of `peer`, another of its kind, on a stream of
        this one."""

    def event(self) -> Any:
        """A new event, never recorded. Backends of one kind know each other's."""

    def record(self, event: Any, stream: int) -> Issue: ...

    def wait(self, event: Any, stream: int) -> Issue: ...

    def sync_stream(self, stream: int) -> Issue: ...

    def sync_event(self, event: Any) -> Issue: ...

    def synchronize(self) -> None:
        """Waits for everything queued on every stream; raises DeviceError if any of it failed."""

    def mark(self, stream: int) -> Any:
        """A point in `stream`, now; two of them around a command give its device span. Traced
        runs only."""

    def resolve(self, begin: Any, end: Any) -> tuple[int, int]:
        """Start and end, in ns of the host's clock, of the work queued between two marks. Call it
        after that work was waited for. (0, 0) where the backend has no clock of its own."""

    def close(self) -> None:
        """Waits, then gives everything back. Safe to call twice."""


# The one table of devices: name -> "module:factory". A factory takes `threads` and returns a
# Backend, or raises DeviceError with one line that says what is missing.
DEVICES: dict[str, str] = {
    "host": "workbench.backend.cpu.host:open_backend",
    "embedded": "workbench.backend.cpu.embedded:open_backend",
    "cuda": "workbench.backend.cuda.backend:open_backend",
    "null": "workbench.backend.null:open_backend",
}


def open_backend(name: str, threads: int = 0, **options: Any) -> Backend:
    """The backend called `name`; raises DeviceError where it is unknown or not there."""
    if name not in DEVICES:
        raise DeviceError(f"device {name!r} does not exist; choose one of {', '.join(DEVICES)}")
    module, factory = DEVICES[name].split(":")
    return getattr(importlib.import_module(module), factory)(threads=threads, **options)


def choose_device(wanted: str) -> tuple[str, str]:
    """Which device to use for `wanted` (`auto` picks), and why, in one line."""
    if wanted != "auto":
        return wanted, "as asked"
    try:
        cuda = importlib.import_module("workbench.backend.cuda.backend")
        return "cuda", f"auto: {cuda.probe()}"
    except (ImportError, DeviceError) as error:
        reason = str(error).splitlines()[0].partition(";")[0]
        return "embedded", f"auto; no GPU: {reason}"
