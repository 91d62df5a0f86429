"""The embedded device: a real asynchronous device on this machine's cores.

It keeps a GPU's contract. A program that breaks the contract gets wrong numbers, as on a GPU:

* The device has memory of its own. The host sees it through copies only.
* There are nine streams, each a FIFO with its own threads (`loops.py`). Stream 0 computes on
  `workers` threads. Stream 1 copies on one thread. Streams 2 to 8 compute, too, each on a quarter
  of as many threads as stream 0. Their threads start when a program first uses the stream. So a
  stream that waits holds no thread of another stream; more threads than cores take turns. A launch
  or a copy returns when it is queued.
* A plan is a list of nodes for each stream. Its launch queues a walk of each list, and the streams'
  threads go through the lists without the host (`recorded.py`).
* A copy reads its source when it runs. With `pageable="snapshot"`, a copy out of memory that is
  not pinned takes its bytes at the call instead. CUDA may do either, so `late` is the default.
* An event is a point in a stream: the number of kernels queued before it. Wait and Sync take the
  latest Record in host order, and mean nothing where there is none.

A ring takes 4096 entries; a push into a full ring waits for room, as on a GPU. Every kernel is
stamped with its start and end, also in a plan, on the clock of `time.perf_counter_ns`.
"""

from __future__ import annotations

import ctypes
import operator
import threading
import time
import weakref
from array import array
from collections import deque
from typing import Any

import numpy as np

from workbench.backend.base import Captured, DeviceClock, Issue
from workbench.backend.cpu.device import base, loops, signals
from workbench.backend.cpu.device.loops import record
from workbench.backend.cpu.device.recorded import EmbeddedPlan
from workbench.backend.cpu.device.ring import MemoryBlock, Ring, aligned_zeros, command_words
from workbench.backend.cpu.kernels import op_table
from workbench.backend.issue.args import AddressOf
from workbench.backend.issue.issued import Issued, Plannable, Words, together
from workbench.common.errors import DeviceError
from workbench.graph.ir import Node, Tensor
from workbench.program.capabilities import Capabilities
from workbench.program.commands import COMPUTE_STREAM, Space

COPY_PART_BYTES = 1 << 18  # a shorter part of a copy is not worth a second worker
LOAD_PART_BYTES = 2 << 20  # of a weight: a huge page, because a load is the first touch of memory
COPY_YIELD_NS = 20_000  # the copy stream's thread sleeps early: a worker needs the same core
PAGEABLE = ("late", "snapshot")
SIDE_STREAMS, SHARE = range(2, 9), 4  # compute streams beside the first; workers for each thread


class SideRing(Ring):
    """A stream whose threads are started when a program first has a command for it."""

    def prepare(self, *kernel: Any, **named: Any) -> Issued:
        self.start()
        return super().prepare(*kernel, **named)


Point = tuple[Ring, int]  # a stream, and the number of its kernels before the point


class Event:
    """A point in a stream, in memory that compiled code shares (`loops.record`).

    words[0]: address of the signal `completed` of the stream's ring, 0 until recorded. words[1]:
    number of the ring's kernels before the point. rings: every ring that may record the event, by
    the address of its signal.
    """

    __slots__ = ("address", "rings", "words")

    def __init__(self) -> None:
        self.words = array("q", (0, 0))
        self.address = self.words.buffer_info()[0]
        self.rings: dict[int, Ring] = {}


class DeviceMemory:
    """Memory of the embedded device. `free` keeps the bytes until all work queued so far is done: a
    careless free gives wrong numbers and never a crash."""

    def __init__(self, device: EmbeddedDevice, block: np.ndarray, space: Space):
        self._device = device
        self._block: np.ndarray | None = block
        self.address = int(block.ctypes.data)
        self.nbytes = block.nbytes
        self.array = None if space == Space.DEVICE else block

    def free(self) -> None:
        if self._block is not None:
            self._device._retire(self.address, self._block)
            self._block = self.array = None

    def __del__(self) -> None:
        self.free()


class EmbeddedDevice(base.CpuBackend):
    """See the module. Any thread may call; one program is run by one thread at a time.

    threads: workers (0: every core this process may use). pageable: when a copy reads a source that
    is not pinned, `late` or `snapshot`. Raises DeviceError for a wrong option.
    """

    name = "embedded"
    capabilities = Capabilities(
        asynchronous_copies=True, events=True, one_order=True, capture=True, n_streams=9
    )

    def __init__(self, threads: int = 0, pageable: str = "late"):
        if pageable not in PAGEABLE:
            raise DeviceError(f"pageable={pageable!r}; choose one of {', '.join(PAGEABLE)}")
        self.workers = base.n_workers(threads)
        self.description = f"embedded device, {self.workers} workers, {base.cpu_name()}"
        self.waiting = (
            f"yields for {signals.HOST_YIELD_NS // 1000} us, then sleeps on a condition variable; "
            f"idle workers yield for {signals.WORKER_YIELD_NS // 1000} us, a stream that waits for "
            f"another likewise, idle copy and side streams for {COPY_YIELD_NS // 1000} us"
        )
        self.pageable = pageable
        self.streams = (
            Ring("embedded stream 0", self.workers),
            Ring("embedded stream 1", 1, COPY_YIELD_NS),
            *(
                SideRing(f"embedded stream {n}", max(1, self.workers // SHARE), COPY_YIELD_NS)
                for n in SIDE_STREAMS
            ),
        )
        self._layouts: dict[int, str] = {}  # weight address -> layout, of repacked weights only
        self._pinned: dict[int, int] = {}  # address -> bytes
        self._retired: deque[tuple[object, tuple[int, ...]]] = deque()
        self._reaping = threading.Lock()
        # runs at interpreter exit too, without a close before: it never waits for a stuck stream
        self._end = weakref.finalize(self, _shut_down, self.streams)
        for ring in self.streams[: SIDE_STREAMS[0]]:
            ring.start()

    # memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, space: Space) -> DeviceMemory:
        """Zeroed, 64-byte aligned; DEVICE memory has no `array`. Raises DeviceError."""
        memory = DeviceMemory(self, aligned_zeros(nbytes), space)
        if space == Space.PINNED:
            self._pinned[memory.address] = nbytes
        return memory

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> DeviceMemory:
        """Copies a weight into device memory, in the layout its kernel prefers. All workers of
        stream 0 copy, and the host waits for them: nothing on stream 0 may wait for the host."""
        if data.nbytes != tensor.nbytes:
            raise DeviceError(f"weight {tensor!r} wants {tensor.nbytes} bytes, not {data.nbytes}")
        rows, cols = tensor.rows, tensor.cols
        layout = self.layout_of(tensor)
        nbytes = op_table.repacked_bytes(tensor.dtype, rows, cols, layout)
        memory, source = self.allocate(nbytes, Space.DEVICE), int(data.ctypes.data)
        ring = self.streams[COMPUTE_STREAM]
        # More parts than workers: the first touch of new memory takes some workers longer.
        parts = max(1, min(nbytes // LOAD_PART_BYTES, loops.MAX_PARTS))
        if layout == "file":
            ring.push(loops.COPY, parts, (memory.address, source, nbytes))
        else:
            kernel = op_table.kernel_address(("repack", tensor.dtype.name))
            ring.push(kernel, parts, (memory.address, source, rows, cols))
            self._layouts[memory.address] = layout
        try:
            ring.wait(ring.issued)
        except BaseException:
            self._keep(data)  # interrupted: the workers still read it
            raise
        return memory

    def layout_of(self, weight: Tensor) -> str:
        return op_table.weight_layout(weight.dtype)

    def _retire(self, address: int, block: np.ndarray) -> None:
        """Forgets the memory at `address`; keeps `block` until all work queued so far is done."""
        self._layouts.pop(address, None)
        self._pinned.pop(address, None)
        self._keep(block)

    def _keep(self, thing: object) -> None:
        """Keeps `thing` until all work queued so far is done. A finalizer may call this at any
        moment, even inside another call. So a call appends first, and one at a time removes."""
        self._retired.append((thing, tuple(ring.issued for ring in self.streams)))
        if self._reaping.acquire(blocking=False):
            done = tuple(ring.completed for ring in self.streams)
            while self._retired and all(map(operator.ge, done, self._retired[0][1])):
                self._retired.popleft()
            self._reaping.release()

    # commands --------------------------------------------------------------------------------

    def launch_op(self, node: Node, address_of: AddressOf, scratch: int, stream: int) -> Issued:
        """Queues `node` as one entry of the ring."""
        layout = self._layouts.get(address_of(node.inputs[0]), "file")
        ring = self.streams[stream]
        calls = base.bind(node, address_of, scratch, layout, ring.n_workers)
        return together([ring.prepare(*call) for call in calls])

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        ring = self.streams[stream]
        if self.pageable == "snapshot" and not to_host and not self._is_pinned(src):
            return self._copy_snapshot(dst, src, nbytes, ring)
        parts = max(1, min(nbytes // COPY_PART_BYTES, ring.n_workers, loops.MAX_PARTS))
        return ring.prepare(loops.COPY, parts, (dst, src, nbytes), pointers=(0, 1))

    def gate_copy(
        self, dst: int, src: int, nbytes: int, control: int, limit_ns: int, stream: int
    ) -> Issued:
        ring = self.streams[stream]
        args = (dst, src, nbytes, control, limit_ns, ring.address)
        return ring.prepare(loops.GATE_COPY, 1, args, pointers=(0, 1))

    def gate_end(self, counter: int, word: int, stream: int, programmatic: bool) -> Issued:
        return self.streams[stream].prepare(loops.GATE_END, 1, (counter, word), pointers=(0, 1))

    def _is_pinned(self, address: int) -> bool:
        return any(start <= address < start + n for start, n in self._pinned.items())

    def _copy_snapshot(self, dst: int, src: int, nbytes: int, ring: Ring) -> Issued:
        args = [dst, src, nbytes]  # no MemoryBlock: taking the bytes is the host's work

        def issue() -> None:
            to, source, size = args
            taken = np.empty(size, np.uint8)
            ctypes.memmove(taken.ctypes.data, source, size)
            ring.push(loops.COPY, 1, (to, int(taken.ctypes.data), size))
            self._keep(taken)

        return Issued(issue, ("snapshot",), Words(args, (0, 1)))

    def capture(self, work: Plannable) -> Captured:
        for ring in self.streams:
            ring.check()
        for stream in set(work.streams):  # also one that only records an event
            self.streams[stream].start()
        return EmbeddedPlan(work, self.streams, self._keep)

    def event(self) -> Event:
        return Event()

    def record(self, event: Event, stream: int) -> Issued:
        ring = self.streams[stream]
        event.rings[ring.address + loops.COMPLETED] = ring
        block = MemoryBlock(array("q", (event.address,)), (0,), 0, 1)
        control, address = ring.address, block.address

        def issue(_kept: object = (event, block)) -> None:
            record(control, address)

        return Issued(issue, ("record", stream), block)

    def wait(self, event: Event, stream: int) -> Issued:
        ring = self.streams[stream]
        ring.start()
        command = command_words(loops.AWAIT, 1, (0, 0, ring.address))
        block = MemoryBlock(array("q", (event.address, *command)), (0,), 0, 1)
        control, address, slow = ring.address, block.address, ring.push_slowly

        def issue(_kept: object = (event, block)) -> None:
            if loops.push_wait(control, address):
                slow(address + 8)

        return Issued(issue, ("wait", stream), block)

    def sync_stream(self, stream: int) -> Issue:
        ring = self.streams[stream]
        words, wait = ring.words, ring.wait

        def issue() -> None:
            wait(words[0])

        return issue

    def sync_event(self, event: Event) -> Issue:
        words, rings = event.words, event.rings

        def issue() -> None:
            if words[0]:
                rings[words[0]].wait(words[1])

        return issue

    def synchronize(self) -> None:
        for ring in self.streams:
            ring.wait(ring.issued)

    # time ------------------------------------------------------------------------------------

    def mark(self, stream: int) -> Point:
        ring = self.streams[stream]
        return ring, ring.issued

    def resolve(self, begin: Point, end: Point) -> tuple[int, int]:
        """First start and last end of the kernels between two marks of one stream. Where no kernel
        lies between the marks: the end of the kernel before, twice, or (0, 0) for an empty
        stream."""
        ring, first = begin
        last = end[1] - 1
        if last >= first:
            return ring.stamp(first)[0], ring.stamp(last)[1]
        before = ring.stamp(last)[1] if last >= 0 else 0
        return before, before

    def stamp(self, counter: int, ring: int, n_pairs: int, is_end: bool, stream: int) -> Issued:
        args = (counter, ring, n_pairs, int(is_end))
        return self.streams[stream].prepare(loops.STAMP, 1, args, pointers=(0, 1))

    def clock(self) -> DeviceClock:
        """The host's clock, with the step that the system states."""
        resolution = time.get_clock_info("perf_counter").resolution
        return DeviceClock(0, 0, max(1, round(1e9 * resolution)))

    def close(self) -> None:
        """Waits for all that is queued, and ends the threads. Idempotent."""
        try:
            if self._end.alive:
                self.synchronize()
        finally:
            self._end()
            self._retired.clear()


def _shut_down(streams: tuple[Ring, ...]) -> None:
    """Ends all streams, whatever is queued. A kernel that waits is over when its stream is closed:
    on no other stream may anything begin then."""
    for ring in streams:
        ring.halt()
    for ring in streams:
        ring.close()


open_backend = EmbeddedDevice
