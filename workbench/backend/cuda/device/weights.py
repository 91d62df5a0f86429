"""Weights on their way from the model file to the GPU, and which of them its kernels can use.

Worker threads copy bytes from the file's map into the entries of a pinned ring (NumPy copies
without the GIL). From there they go to the device on one stream. For the types of REPACKED a kernel
on another stream lays them out as `kernels/weights.cuh` says:

    worker 0        | read entry 0 | read entry 2 |
    worker 1        | read entry 1 | read entry 3 |
    copy stream                    | copy 0 | copy 1 | copy 2 |
    repack stream                           | repack 0 | repack 1 |

The caller's thread alone talks to the driver. It waits for an entry's repacking before the entry is
filled again, a ring later, and for everything once, in `finish`. A tensor's part of an entry begins
on a multiple of ALIGN: many small tensors travel in one entry.

The limit is the host's memory copy (a thread reaches some 10 GB/s, PCIe 5 some 50), hence several
workers. Registering the map itself as pinned memory would save the copy. But it pins every page of
the file first, and not every system allows it for a read-only map.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.issue.args import variant
from workbench.backend.issue.issued import Issued
from workbench.common.errors import DeviceError
from workbench.common.sizes import round_up
from workbench.graph.ir import CACHE_DTYPES, DTYPES, QUANTISED, WEIGHT_DTYPES, Node, Tensor
from workbench.program.commands import Space

if TYPE_CHECKING:
    from workbench.backend.cuda.device.driver import CudaEvent, CudaMemory, Driver

ENTRY_BYTES = 8 << 20
N_ENTRIES = 8  # so much pinned memory, and as much of the device's, while loading
N_WORKERS = 4
ALIGN = 256
WORD = 16  # bytes of a load: the memory of a weight ends on a multiple of it, with zeros

UNIT, THREADS = 32, 256  # repack: weights of a thread, threads of a block
REPACKED = frozenset(d.name for d in QUANTISED)  # a kernel of kernels/repack.cu each

# What the kernels compute: (op or its variant, weight type) -> most tokens (get_rows: rows) a node
# may have.
ANY = 1 << 31
CACHE_STORES = ("set_rows", "copy_to_view", "copy_by_table")
_PRODUCTS = [d.name for d in WEIGHT_DTYPES]
MOST_TOKENS: dict[tuple[str, ...], int] = {
    **{("mul_mat", name): ANY for name in _PRODUCTS},
    **{("mul_mat_float", name): ANY for name in _PRODUCTS},
    **{("get_rows", name): ANY for name in _PRODUCTS},
    **{(op, d.name): ANY for op in (*CACHE_STORES, "rope_shift") for d in CACHE_DTYPES},
    **{("attention", k.name, v.name): ANY for k, v in product(CACHE_DTYPES, repeat=2)},
}


def refuses(node: Node, launches: Callable[[Node], Any]) -> str:
    """Why the cuda backend cannot compute `node`, in one line, or "".

    launches: makes the node's launches without a device; raises DeviceError where no kernel has its
    shape. Types and numbers of tokens are looked up in MOST_TOKENS. A kernel is chosen by name,
    and a missing one would show only when it is compiled.
    """
    kind = variant(node)
    if len(kind) > 1:
        tokens, most = node.output.rows, MOST_TOKENS.get(kind, 0)
        if tokens > most:
            able = [" and ".join(names) for op, *names in MOST_TOKENS if op == kind[0]]
            why = f"{tokens} tokens" if most else f"any batch (it has {', '.join(able) or 'none'})"
            of_cache = kind[0] in ("attention", *CACHE_STORES)
            what, do = ("cells", "use a cache of another type") if of_cache else (
                "weights", "quantise the model anew"
            )  # fmt: skip
            do = "use a smaller n_ubatch" if most else do
            return (
                f"cuda has no {kind[0]} kernel for {' and '.join(kind[1:])} {what} and {why}; {do},"
                " or use device=host or embedded"
            )
    try:
        launches(node)
    except DeviceError as error:
        return str(error)
    return ""


def repack(dtype: str, dst: int, src: int, first: int, n: int, total: int) -> Kernel:
    """Lays out blocks first .. first + n - 1 of a weight of `total` blocks. src: the n blocks as in
    the file, at a multiple of 16 bytes. dst: where the weight begins."""
    units = n * (DTYPES[dtype].block // UNIT)
    grid = (blocks(units, THREADS), 1)
    return Kernel("repack", f"repack_{dtype}", grid, THREADS, [dst, src, first, n, total])


class Piece(NamedTuple):
    """Bytes of one tensor that travel in an entry."""

    what: str  # for messages
    source: np.ndarray  # uint8 (n,), in the file's map
    at: int  # offset in the entry
    there: int  # device address of these bytes; of a repacked weight where the weight begins
    dtype: str  # "" where the bytes stay as they are
    first: int  # blocks of the weight before these
    n: int  # blocks
    total: int  # blocks of the weight


class Entry:
    """A pinned buffer with the staging memory it is copied to; ENTRY_BYTES each."""

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
        """Copies what the pieces name out of the file's map. Run by a worker."""
        for piece in self.pieces:
            np.copyto(self.array[piece.at : piece.at + piece.source.nbytes], piece.source)


class Uploader:
    """One loading: `load` for every weight, then `finish`; `close` gives up.

    driver: for calls and events. allocate(nbytes, space): device and pinned memory, not zeroed.
    prepare(kernel, stream, what): a callable that launches. copies, repacks: two CUstreams that
    nothing else is queued on. All calls come from one thread. What `load` was given is kept alive
    and read later, at the latest in `finish`; it must not change until then.
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
        n = min(N_WORKERS, os.cpu_count() or 1)
        self._workers = ThreadPoolExecutor(n, thread_name_prefix="loading")
        self._entries: list[Entry] = []
        self._filling: Entry | None = None
        self._reading: deque[Entry] = deque()  # a worker's, or waiting for one
        self._issued: deque[Entry] = deque()  # the device's

    def load(self, tensor: Tensor, data: np.ndarray) -> CudaMemory:
        """Memory for a weight. Its bytes are there at the end of `finish`; the memory is not freed
        before. data: the file's bytes, of any shape and type. Raises DeviceError where their number
        is not the tensor's, or there is no memory."""
        flat = data.reshape(-1).view(np.uint8)
        if flat.nbytes != tensor.nbytes:
            raise DeviceError(f"{tensor!r} wants {tensor.nbytes} bytes, not {flat.nbytes}")
        memory, what = self._allocate(tensor.nbytes, Space.DEVICE), f"loading {tensor.name}"
        if tail := -tensor.nbytes % WORD:  # kernels may read it with the last bytes
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
        """Waits until every weight is where it belongs, and gives threads and entries back."""
        try:
            self._submit()
            while self._reading:
                self._issue_oldest()
            for stream in (self._copies, self._repacks):
                self._driver.call("cuStreamSynchronize", "loading weights", stream)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the threads and gives the entries back. Weights not yet under way stay unloaded."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        for entry in self._entries:  # freeing waits for the device
            entry.pinned.free()
            entry.staging.free()
        self._entries.clear()
        self._filling = None
        self._reading.clear()
        self._issued.clear()

    def _with_room(self, nbytes: int) -> Entry:
        """The entry being filled, with room for nbytes."""
        if self._filling is not None and ENTRY_BYTES - self._filling.used < nbytes:
            self._submit()
        if self._filling is None:
            self._filling = self._empty()
        return self._filling

    def _submit(self) -> None:
        """Hands the entry being filled to the workers."""
        entry, self._filling = self._filling, None
        if entry is not None:
            entry.read = self._workers.submit(entry.fill)
            self._reading.append(entry)

    def _empty(self) -> Entry:
        """An entry nobody uses: a new one, or with N_ENTRIES the one issued longest ago."""
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
        """Queues copies and repacking of the entry submitted longest ago, once it has been read."""
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
