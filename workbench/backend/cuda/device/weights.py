"""Loading of weights from the model file to the GPU, and the weight types that its kernels take.

Worker threads copy bytes from the file's map into the entries of a pinned ring (NumPy copies
without the GIL). One stream copies the entries to the device. Weights of the types in REPACKED are
then repacked, by a kernel on another stream, into the layout of `kernels/weights.cuh`:

    worker 0        | read entry 0 | read entry 2 |
    worker 1        | read entry 1 | read entry 3 |
    copy stream                    | copy 0 | copy 1 | copy 2 |
    repack stream                           | repack 0 | repack 1 |

Only the caller's thread calls the driver. Before it fills an entry again, it waits until that entry
was repacked. `finish` waits for all entries. Many small tensors can share an entry; the bytes of
each tensor begin on a multiple of ALIGN.

The host's memory copy is the bottleneck: a thread reaches some 10 GB/s, PCIe 5 some 50. So there
are several workers. Registering the map as pinned memory would save the copy, but it pins every
page of the file first, and not every system allows it for a read-only map.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.issue.args import variant
from workbench.backend.issue.issued import Issued
from workbench.common.cores import usable_cores
from workbench.common.errors import DeviceError
from workbench.common.sizes import round_up
from workbench.graph.ir import CACHE_DTYPES, DTYPES, QUANTISED, WEIGHT_DTYPES, Node, Tensor
from workbench.program.commands import Space

if TYPE_CHECKING:
    from workbench.backend.cuda.device.driver import CudaEvent, CudaMemory, Driver

ENTRY_BYTES = 8 << 20
N_ENTRIES = 8  # each has ENTRY_BYTES of pinned memory and as much device memory while loading
N_WORKERS = 4
ALIGN = 256
WORD = 16  # bytes that kernels load at once; zeros fill a weight's memory up to a multiple of it

UNIT, THREADS = 32, 256  # repack: weights of a thread, threads of a block
REPACKED = frozenset(d.name for d in QUANTISED)  # kernels/repack.cu has a kernel for each

CACHE_STORES = ("set_rows", "copy_to_view", "copy_by_table")
# What kernels compute: an op or its variant, and types. Each has kernels for any number of tokens.
KINDS: tuple[tuple[str, ...], ...] = (
    *product(("mul_mat", "mul_mat_float", "get_rows"), [d.name for d in WEIGHT_DTYPES]),
    *product((*CACHE_STORES, "rope_shift"), [d.name for d in CACHE_DTYPES]),
    *(("attention", k.name, v.name) for k, v in product(CACHE_DTYPES, repeat=2)),
)


def refuses(node: Node, launches: Callable[[Node], Any]) -> str:
    """Why the cuda backend cannot compute `node`, in one line; empty where it can.

    launches: makes the node's launches without a device. Raises DeviceError where no kernel takes
        the shape.

    Types are looked up in KINDS: launches name their kernel, and a missing kernel would show only
    in its compilation.
    """
    kind = variant(node)
    if len(kind) > 1 and node.output.rows and kind not in KINDS:
        able = [" and ".join(names) for op, *names in KINDS if op == kind[0]]
        of_cache = kind[0] in ("attention", *CACHE_STORES)
        what, do = ("cells", "use a cache of another type") if of_cache else (
            "weights", "quantise the model anew"
        )  # fmt: skip
        return (
            f"cuda has no {kind[0]} kernel for {' and '.join(kind[1:])} {what} and any batch (it "
            f"has {', '.join(able) or 'none'}); {do}, or use device=host or embedded"
        )
    try:
        launches(node)
    except DeviceError as error:
        return str(error)
    return ""


def repack(dtype: str, dst: int, src: int, first: int, n: int, total: int) -> Kernel:
    """The launch that repacks blocks first .. first + n - 1 of a weight of `total` blocks.

    src: the n blocks as in the file, at a multiple of 16 bytes.
    dst: the address at which the weight begins.
    """
    units = n * (DTYPES[dtype].block // UNIT)
    grid = (blocks(units, THREADS), 1)
    return Kernel("repack", f"repack_{dtype}", grid, THREADS, [dst, src, first, n, total])


class Piece(NamedTuple):
    """Bytes of one tensor in an entry."""

    what: str  # the piece's name in messages
    source: np.ndarray  # uint8 (n,), in the file's map
    at: int  # offset in the entry
    there: int  # device address of these bytes; where they are repacked, of the whole weight
    dtype: str  # "" where the bytes are not repacked
    first: int  # blocks of the weight before this piece
    n: int  # blocks of this piece
    total: int  # blocks of the weight


class Entry:
    """A pinned buffer, and the device memory to which it is copied, of ENTRY_BYTES each."""

    def __init__(self, pinned: CudaMemory, staging: CudaMemory, event: Callable[[], CudaEvent]):
        assert pinned.array is not None
        self.pinned = pinned
        self.array = pinned.array
        self.staging = staging
        self.arrived, self.free = event(), event()
        self.pieces: list[Piece] = []
        self.used = 0
        self.read = Future[None]()

    def fill(self) -> None:
        """Copies the bytes of the pieces out of the file's map. A worker runs it."""
        for piece in self.pieces:
            np.copyto(self.array[piece.at : piece.at + piece.source.nbytes], piece.source)


class Uploader:
    """Loads weights: call `load` for every weight, then `finish`. `close` gives up.

    driver: for calls and events.
    allocate(nbytes, space): device and pinned memory, not zeroed.
    prepare(kernel, stream, what): a command that launches `kernel`.
    copies, repacks: two CUstreams for this object alone.

    All calls come from one thread. The data of `load` is kept alive and read later, at the latest
    in `finish`. It must not change before.
    """

    def __init__(
        self,
        driver: Driver,
        allocate: Callable[[int, Space], CudaMemory],
        prepare: Callable[[Kernel, Any, str], Issued],
        copies: Any,
        repacks: Any,
    ):
        self._driver, self._allocate, self._prepare = driver, allocate, prepare
        self._copies, self._repacks = copies, repacks
        n = min(N_WORKERS, usable_cores())
        self._workers = ThreadPoolExecutor(n, thread_name_prefix="loading")
        self._entries: list[Entry] = []
        self._filling: Entry | None = None
        self._reading: deque[Entry] = deque()  # a worker reads them, or will
        self._issued: deque[Entry] = deque()  # the device copies and repacks them, or will

    def load(self, tensor: Tensor, data: np.ndarray) -> CudaMemory:
        """Memory for a weight. It holds the weight once `finish` has returned, and must not be
        freed before.

        data: the file's bytes, of any shape and type.

        Raises DeviceError where `data` has another size than the tensor, or memory is short.
        """
        flat = data.reshape(-1).view(np.uint8)
        if flat.nbytes != tensor.nbytes:
            raise DeviceError(f"{tensor!r} wants {tensor.nbytes} bytes, not {flat.nbytes}")
        memory, what = self._allocate(tensor.nbytes, Space.DEVICE), f"loading {tensor.name}"
        if tail := -tensor.nbytes % WORD:  # kernels may read them with the last bytes
            end = memory.address + tensor.nbytes
            self._driver.call("cuMemsetD8Async", what, end, 0, tail, self._copies)
        repacked = tensor.dtype.name in REPACKED
        grain = tensor.dtype.block_bytes
        begin, total = 0, flat.nbytes // grain
        while begin < flat.nbytes:
            entry = self._with_room(grain)
            n = min((ENTRY_BYTES - entry.used) // grain, total - begin // grain)
            source = flat[begin : begin + n * grain]
            there = memory.address + (0 if repacked else begin)
            dtype = tensor.dtype.name if repacked else ""
            first = begin // grain
            entry.pieces.append(Piece(what, source, entry.used, there, dtype, first, n, total))
            entry.used += round_up(source.nbytes, ALIGN)
            begin += source.nbytes
        return memory

    def finish(self) -> None:
        """Waits until every weight lies in its memory, and gives threads and entries back."""
        try:
            self._submit()
            while self._reading:
                self._issue_oldest()
            for stream in (self._copies, self._repacks):
                self._driver.call("cuStreamSynchronize", "loading weights", stream)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the threads and gives the entries back. Weights that no worker has begun to read are
        not loaded."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        for entry in self._entries:  # freeing waits for the device
            entry.pinned.free()
            entry.staging.free()
        self._entries.clear()
        self._filling = None
        self._reading.clear()
        self._issued.clear()

    def _with_room(self, nbytes: int) -> Entry:
        """The entry that is being filled, with room for nbytes."""
        if self._filling is not None and ENTRY_BYTES - self._filling.used < nbytes:
            self._submit()
        if self._filling is None:
            self._filling = self._empty()
        return self._filling

    def _submit(self) -> None:
        """Gives the entry that is being filled to the workers."""
        entry, self._filling = self._filling, None
        if entry is not None:
            entry.read = self._workers.submit(entry.fill)
            self._reading.append(entry)

    def _empty(self) -> Entry:
        """A free entry: a new entry, or, where there are N_ENTRIES, the entry issued longest
        ago."""
        while self._reading and self._reading[0].read.done():
            self._issue_oldest()
        if len(self._entries) < N_ENTRIES:
            pinned = self._allocate(ENTRY_BYTES, Space.PINNED)
            staging = self._allocate(ENTRY_BYTES, Space.DEVICE)
            self._entries.append(Entry(pinned, staging, self._driver.event))
            return self._entries[-1]
        if not self._issued:
            self._issue_oldest()
        entry = self._issued.popleft()
        self._driver.call("cuEventSynchronize", "loading weights", entry.free.handle)
        entry.pieces, entry.used = [], 0
        return entry

    def _issue_oldest(self) -> None:
        """Waits until the entry submitted longest ago has been read, and queues its copies and its
        repacking."""
        entry = self._reading[0]
        entry.read.result()
        call, copies, repacks = self._driver.call, self._copies, self._repacks
        for p in entry.pieces:
            there = entry.staging.address + p.at if p.dtype else p.there
            here = entry.pinned.address + p.at
            call("cuMemcpyHtoDAsync", p.what, there, here, p.source.nbytes, copies)
        what = entry.pieces[-1].what
        call("cuEventRecord", what, entry.arrived.handle, copies)
        call("cuStreamWaitEvent", what, repacks, entry.arrived.handle, 0)
        for p in entry.pieces:
            if p.dtype:
                there = entry.staging.address + p.at
                kernel = repack(p.dtype, p.there, there, p.first, p.n, p.total)
                self._prepare(kernel, repacks, p.what)()
        call("cuEventRecord", what, entry.free.handle, repacks)
        self._issued.append(self._reading.popleft())
