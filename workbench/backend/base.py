"""The Backend protocol: who executes commands, on what memory.

Every member that anyone calls is declared here. A backend overrides what its device has.

A backend *prepares*: `launch`, `copy`, `record` and `wait` return `Issued` commands, and `sync_*`
return plain callables. Addresses and packed arguments are bound once. Each call then performs its
command, as often as wanted. `backend/issue/prepared.py` puts the calls in order. A backend knows no
programs.

`program/commands.py` says who may overwrite which bytes, and when. In particular a command of an
asynchronous backend returns before its work is done, and the source of a copy is read late.
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
    """The call of a command at which a backend has nothing to do."""


class Memory(Protocol):
    """A block of memory at a fixed address for as long as the object lives.

    array: a uint8 view of host or pinned memory; None for device memory that the host cannot read.
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
    """A kernel of a launch.

    function: its name; None where a library chooses the kernel.
    waits: the kernel waits by itself for the launch before it, before it writes anything or reads
        what that launch wrote.
    dims: its grid (x, y, z) and its block (x, y, z); empty where they are not known.
    """

    function: str | None
    waits: bool
    dims: tuple[int, ...] = ()


class DeviceClock(NamedTuple):
    """A device's own clock, read now.

    ahead_ns: how far the host's clock (`time.perf_counter_ns`) is ahead of it.
    error_ns: the largest error that `ahead_ns` can have now.
    tick_ns: the step in which the device's clock advances.
    """

    ahead_ns: int
    error_ns: int
    tick_ns: int


NO_PART = -1  # in place of a part: the node belongs to no command


class Captured(ABC):
    """The commands of a plan as a device has recorded them. One call launches them.

    launch: that call.
    nodes: the part that each node on the device belongs to, in the order of the nodes; NO_PART for
        a node that tells the host of the end.
    capture_ns, instantiate_ns: host time of the latest capture, and of making it launchable.
    launches: how often the recording was launched; 0 where nobody counts.
    """

    launch: Issue
    nodes: tuple[int, ...]
    capture_ns: int = 0
    instantiate_ns: int = 0
    launches: int = 0

    @abstractmethod
    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        """Changes the recording, so that it launches `work` from now on. Queued launches run as
        they were.

        changed: the parts that have other addresses, where nothing else differs; None: anything may
            differ.

        Returns False, with nothing changed, where the device refuses because the topology differs.
        """

    def twin(self, work: Plannable, changed: Sequence[int]) -> "Captured | None":
        """Another recording, which launches `work`, made from this one without a capture.
        `instantiate_ns` is the time that it took. Either recording may be destroyed first.

        changed: the parts that have other addresses than here, where nothing else differs.

        Returns None where the device can only capture.
        """
        return None

    def spans(self, launch: int | None = None) -> Sequence[tuple[int, int]]:
        """When each node began and ended in launch number `launch`, or in the latest launch, in ns
        of the host's clock. Empty where that is not known (any more). Call it after the host has
        waited for that launch."""
        return ()

    @abstractmethod
    def destroy(self) -> None:
        """Gives the recording back when queued launches are over. Later calls do nothing, also
        after the backend was closed. `launch`, `update` and `twin` then raise DeviceError."""


class Backend(ABC):
    """Memory, streams and events of one device; stream 0 computes, stream 1 copies."""

    name: str  # unique in an engine: "host", "embedded", "cuda 1"
    description: str  # one line for results: the device, its workers, its driver
    waiting: str  # in results: how the host waits
    capabilities: Capabilities
    workers = 1  # threads that compute, where the device's work runs on this machine's cores
    note_bytes = 0  # bytes of a kernel's note (`launch_noted`); 0 where marks time each command

    @abstractmethod
    def allocate(self, nbytes: int, space: Space) -> Memory:
        """Zeroed memory, 256-byte aligned (64 on the CPU). Raises DeviceError where there is not
        enough."""

    @abstractmethod
    def load_weight(self, tensor: Tensor, data: np.ndarray) -> Memory:
        """Takes a weight from the file's bytes (uint8, read-only map) into this backend's memory.

        The bytes may be repacked; the backend remembers how. A backend that computes on host memory
        may use `data` in place; `data` then outlives the backend. The weight may be used after
        `finish_loading`.
        """

    def finish_loading(self) -> None:  # noqa: B027, most load at once
        """Waits until every weight lies in its memory. Later work may use them."""

    def refuses(self, node: Node) -> str:
        """Why no kernel computes `node`; empty where a kernel does."""
        return ""

    @abstractmethod
    def scratch_bytes(self, node: Node) -> int:
        """Bytes of scratch that `node` needs here; 0 for none."""

    def begins_early(self, node: Node) -> bool:
        """Whether `node` may be launched programmatically: its kernels wait by themselves for the
        launch before them, before they write anything or read what that launch wrote."""
        return False

    def kernels_of(self, node: Node) -> Sequence[KernelName] | None:
        """The kernels that `launch` issues for `node`, in order; None where a backend does not know
        them."""
        return None

    @abstractmethod
    def make_ready(self, nodes: Sequence[Node], left: Bar, noted: bool = False) -> None:
        """Compiles the kernels that launches of `nodes` need and no cache has. left: told of each
        kernel. noted: those of `launch_noted`, where `note_bytes` is not 0."""

    def attach(self) -> None:  # noqa: B027, most serve any thread
        """Makes this device the calling thread's current device.

        A stream, an event or a kernel belongs to the device that is the thread's current one when
        it is first named. Only that device may use it. So whoever prepares, marks or issues
        attaches first, wherever another device may be current. `allocate`, `load_weight`,
        `capture`, `clock` and `close` attach by themselves, and so does every method of a
        `Captured`.
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
        """Computes `node`. The `parts` of the command are the kernels, in order.

        programmatic: the launch may begin before the launch before it has ended (only where
            `Capabilities.programmatic`).
        """

    def launch_noted(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
        notes: int = 0,
    ) -> Issued:
        """As `launch`, but every kernel writes to a note of its own when it ran
        (`backend/clock/launch_notes.py`). notes: the address of the first kernel's note; each note
        has `note_bytes`."""
        raise DeviceError(f"kernels of the {self.name} device note nothing; use marks")

    @abstractmethod
    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        """Queues a copy between host and device; with to_host, dst is the host's address."""

    def gate_copy(
        self, dst: int, src: int, nbytes: int, control: int, limit_ns: int, stream: int
    ) -> Issued:
        """As `copy` from pinned memory, once the gate at `control` is open
        (`backend/plan/gate.py`). Where the gate is cancelled, or stays closed for limit_ns, nothing
        is copied."""
        raise DeviceError(f"the {self.name} device has no gates; use launch_ahead=off")

    def gate_end(self, counter: int, word: int, stream: int, programmatic: bool) -> Issued:
        """A kernel that counts its runs in `counter`, an int64 of device memory. It writes the
        count to `word`, an int64 of pinned memory, once all earlier work on `stream` is over and
        the host can read what that work wrote. programmatic: as of `launch`."""
        raise DeviceError(f"the {self.name} device has no gates; use launch_ahead=off")

    @abstractmethod
    def copy_to_peer(self, peer: Any, dst: int, src: int, nbytes: int, stream: int) -> Issued:
        """A copy from this device's memory to the memory of `peer`, another device of its kind, on
        a stream of this device."""

    def capture(self, work: Plannable) -> Captured:
        """Records the parts of `work`, and runs nothing. Raises DeviceError where the device cannot
        capture (`Capabilities.capture`) or refuses; then nothing is left of it."""
        raise DeviceError(f"the {self.name} device cannot capture plans; use plans=off")

    # The defaults are for a backend whose calls return when their work is done.

    def event(self) -> Any:
        """A new event that was never recorded. Backends of one kind can use each other's events."""
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
        """When the work between two marks began and ended, in ns of the host's clock. (0, 0) where
        the backend has no clock: the spans of the host's own calls then show when it computed. Call
        it after the host has waited for that work."""
        return 0, 0

    def stamp(self, counter: int, ring: int, n_pairs: int, is_end: bool, stream: int) -> Issued:
        """Writes the device's clock to the next pair of a ring in pinned memory
        (`backend/clock/stamps.py`): as the pair's begin, or as its end, which counts the pair. The
        clock is read as late as possible for a begin, as early as possible for an end.

        counter: an int64 of device memory.
        """
        raise DeviceError(f"the {self.name} device has no stamps; measure on another")

    def clock(self) -> DeviceClock | None:
        """The clock that stamps are read from, compared with the host's; None where a device has no
        such clock."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Waits for all work, then gives everything back. Safe to call twice."""


def open_backend(name: str, threads: int = 0, number: int = 0, **options: Any) -> Backend:
    """The backend called `name`. Raises DeviceError where it is unknown, or not on this machine.

    number: which device, where a machine can have several of the kind.
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
