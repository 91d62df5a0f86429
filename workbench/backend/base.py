"""The Backend protocol: who executes commands, on what memory.

Every member that anyone calls is declared here. A backend overrides what its device has.

A backend *prepares*: `launch`, `copy`, `record` and `wait` return `Issued` commands, and `sync_*`
return plain callables. Addresses and packed arguments are bound once. Each call then performs its
command, as often as wanted. `backend/issue/prepared.py` strings the calls together; nothing here
knows programs.

`program/commands.py` says who may overwrite what, and when. In particular a command of an
asynchronous backend returns before its work is done, and a copy's source is read late.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from workbench.backend.issue.args import AddressOf
from workbench.backend.issue.issued import Issued, Plannable
from workbench.common.devices import AUTO, DEVICES, WITHOUT_GPU
from workbench.common.errors import DeviceError
from workbench.common.progress import Bar
from workbench.graph.ir import Node, Tensor
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Space

Issue = Callable[[], Any]  # a command, or what the host does at once: a wait, a write, a read


def nothing() -> None:
    """What a backend that has nothing to do at a command does."""


class Memory(Protocol):
    """A block of memory at a fixed address for as long as the object lives.

    array: a uint8 view of host or pinned memory; None for device memory the host cannot read.
    """

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def array(self) -> np.ndarray | None: ...

    def free(self) -> None:
        """Gives the memory back, once; later calls do nothing. Safe in any order at teardown."""


class KernelName(NamedTuple):
    """A kernel that a launch is made of. function: None where a library chooses it. waits: it waits
    by itself for the launch in front, before it writes anything or reads what that launch wrote.
    dims: its grid (x, y, z) and its block (x, y, z), empty where nobody says."""

    function: str | None
    waits: bool
    dims: tuple[int, ...] = ()


class DeviceClock(NamedTuple):
    """A device's own clock, read now. ahead_ns: by how much the host's (`time.perf_counter_ns`) is
    ahead. error_ns: the most that this can be off, now. tick_ns: the step in which the device's
    clock goes on."""

    ahead_ns: int
    error_ns: int
    tick_ns: int


NO_PART = -1  # of a node that is of no command


class Captured(ABC):
    """What a device has recorded: the commands of a plan, which one call launches.

    launch: that call. nodes: of each node on the device, in order, the part it belongs to; NO_PART
    for one that tells the host of the end.
    capture_ns, instantiate_ns: host time of the latest capture and of making it launchable.
    launches: how often it was launched; 0 where nobody counts.
    """

    launch: Issue
    nodes: tuple[int, ...]
    capture_ns: int = 0
    instantiate_ns: int = 0
    launches: int = 0

    @abstractmethod
    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        """Makes it launch `work` from now on. changed: the parts that have other addresses, where
        all else is as before; None: anything may differ. False, and nothing has changed, where the
        device refuses because the topology is another. What is queued runs as it was."""

    def twin(self, work: Plannable, changed: Sequence[int]) -> "Captured | None":
        """Another one, that launches `work`, made without a capture; `instantiate_ns` is its time.
        changed: the parts that have other addresses than this one has, where all else is the same.
        None where only a capture does. This one stays as it is, and either may go first."""
        return None

    def spans(self, launch: int | None = None) -> Sequence[tuple[int, int]]:
        """When each node began and ended, in ns of the host's clock: of launch number `launch`, or
        of the latest. Empty where that is not known (any more). Call it after the host has waited
        for that launch."""
        return ()

    @abstractmethod
    def destroy(self) -> None:
        """Gives the recording back when queued launches are over. Twice is fine, also after the
        backend was closed. `launch`, `update` and `twin` raise DeviceError then."""


class Backend(ABC):
    """Memory, streams and events of one device; stream 0 computes, stream 1 copies."""

    name: str  # unique in an engine: "host", "embedded", "cuda 1"
    description: str  # one line for results: what device, how many workers, which driver
    waiting: str  # how a wait of the host waits, for results
    capabilities: Capabilities
    workers = 1  # threads that compute, where the device's work runs on this machine's cores
    note_bytes = 0  # of a kernel in `launch_noted`; 0 where marks tell when each command ran

    @abstractmethod
    def allocate(self, nbytes: int, space: Space) -> Memory:
        """Zeroed memory, 256-byte aligned (64 on the CPU); raises DeviceError if there is none."""

    @abstractmethod
    def load_weight(self, tensor: Tensor, data: np.ndarray) -> Memory:
        """Takes a weight from the file's bytes (uint8, read-only map) into this backend's memory.

        The bytes may be repacked; the backend remembers how. `data` may be used in place where the
        backend computes on host memory; it outlives the backend then. The weight may be used after
        `finish_loading`.
        """

    def finish_loading(self) -> None:  # noqa: B027, most load at once
        """Waits until every weight lies in its memory; what follows may use it."""

    def refuses(self, node: Node) -> str:
        """Why no kernel computes `node`; empty where one does."""
        return ""

    @abstractmethod
    def scratch_bytes(self, node: Node) -> int:
        """Bytes of scratch `node` needs here, 0 for none."""

    def begins_early(self, node: Node) -> bool:
        """Whether `node` may be launched programmatically: its kernels wait by themselves for the
        launch in front, before they write anything or read what that launch wrote."""
        return False

    def kernels_of(self, node: Node) -> Sequence[KernelName] | None:
        """The kernels that `launch` issues for `node`, in order; None where a backend does not tell
        them apart."""
        return None

    @abstractmethod
    def make_ready(self, nodes: Sequence[Node], left: Bar) -> None:
        """Compiles what launches of `nodes` need, where no cache has it; tells `left` of each."""

    def attach(self) -> None:  # noqa: B027, most serve any thread
        """Makes this device the calling thread's.

        Streams, events and kernels belong to the device that is the thread's when they are first
        named, and only their own device may use them. So whoever prepares, marks or issues attaches
        before, wherever another device may be the thread's. `allocate`, `load_weight`, `capture`,
        `clock` and `close` attach by themselves, and so does all that a `Captured` can do.
        """

    @abstractmethod
    def launch(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
    ) -> Issued:
        """Computes `node`; its `parts` are the kernels, in order. programmatic: the launch may
        begin before the one in front of it has ended (only where `Capabilities.programmatic`)."""

    def launch_noted(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
        notes: int = 0,
    ) -> Issued:
        """As `launch`, and every kernel notes when it ran in a note of its own. notes: address of
        the first; the next kernel's is `note_bytes` behind it (`backend/clock/launch_notes.py`)."""
        raise DeviceError(f"kernels of the {self.name} device note nothing; use marks")

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        """Queues a copy between host and device; with to_host, dst is the host's address."""

    def gate_copy(
        self, dst: int, src: int, nbytes: int, control: int, limit_ns: int, stream: int
    ) -> Issued:
        """As `copy` from pinned memory, once the gate at `control` is open
        (`backend/plan/gate.py`). Where it is cancelled or stays closed for limit_ns, nothing is
        copied."""
        raise DeviceError(f"the {self.name} device has no gates; use launch_ahead=off")

    def gate_end(self, counter: int, word: int, stream: int, programmatic: bool) -> Issued:
        """Counts itself in `counter`, an int64 of device memory, and writes the count to `word`, an
        int64 of pinned memory, once all in front of it on `stream` is over and what that wrote can
        be read by the host. programmatic: as of `launch`."""
        raise DeviceError(f"the {self.name} device has no gates; use launch_ahead=off")

    @abstractmethod
    def copy_to_peer(self, peer: Any, dst: int, src: int, nbytes: int, stream: int) -> Issued:
        """A copy from this device's memory to the memory of `peer`, another of its kind, on a
        stream of this one."""

    def capture(self, work: Plannable) -> Captured:
        """Records the parts of `work` and runs nothing. Raises DeviceError where the device cannot
        (`Capabilities.capture`) or refuses; nothing is left behind then."""
        raise DeviceError(f"the {self.name} device cannot capture plans; use plans=off")

    # Where every call returns when its work is done, nothing is ever under way between two calls.

    def event(self) -> Any:
        """A new event, never recorded. Backends of one kind know each other's."""
        return None

    def record(self, event: Any, stream: int) -> Issued:
        return Issued(nothing, ("record",))

    def wait(self, event: Any, stream: int) -> Issued:
        return Issued(nothing, ("wait",))

    def sync_stream(self, stream: int) -> Issue:
        return nothing

    def sync_event(self, event: Any) -> Issue:
        return nothing

    def synchronize(self) -> None:  # noqa: B027, see above
        """Waits for everything queued on every stream; raises DeviceError if any of it failed."""

    def mark(self, stream: int) -> Any:
        """A point in `stream`, now. Two marks around a command give its span on the device."""
        return None

    def resolve(self, begin: Any, end: Any) -> tuple[int, int]:
        """When the work between two marks began and ended, in ns of the host's clock; (0, 0) where
        the backend has no clock: the host's own spans then show when it computed. Call it after
        the host has waited for that work."""
        return 0, 0

    def stamp(self, counter: int, ring: int, n_pairs: int, is_end: bool, stream: int) -> Issued:
        """Writes the device's clock to the next pair of a ring in pinned memory, as its begin or as
        its end, which counts the pair (`backend/clock/stamps.py`). counter: an int64 of device
        memory. The begin is read as late as can be, the end as early."""
        raise DeviceError(f"the {self.name} device has no stamps; measure on another")

    def clock(self) -> DeviceClock | None:
        """The clock of stamps, beside the host's; None where a device has none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Waits, then gives everything back. Safe to call twice."""


def open_backend(name: str, threads: int = 0, number: int = 0, **options: Any) -> Backend:
    """The backend called `name`; raises DeviceError where it is unknown or not there.

    number: of the device, where a machine can have several of its kind.
    """
    if name not in DEVICES:
        raise DeviceError(f"device {name!r} does not exist; choose one of {', '.join(DEVICES)}")
    device = DEVICES[name]
    numbered = {"device": number} if device.numbered else {}
    return importlib.import_module(device.module).open_backend(
        threads=threads, **numbered, **options
    )


def choose_device(wanted: str) -> tuple[str, str]:
    """Which device to use for `wanted` (`auto` picks), and why, in one line."""
    if wanted != AUTO:
        return wanted, "as asked"
    reason = "none in the table"
    for name, device in DEVICES.items():
        if device.automatic:
            try:
                return name, f"{AUTO}: {importlib.import_module(device.module).probe()}"
            except (ImportError, DeviceError) as error:
                reason = str(error).splitlines()[0].partition(";")[0]
    return WITHOUT_GPU, f"{AUTO}; no GPU: {reason}"
