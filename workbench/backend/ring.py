"""The compiled loop behind every stream of a CPU device: lanes that take entries from a ring.

Python fills the ring; lanes (threads in compiled code, without the GIL from start to shutdown)
empty it. An entry is a kernel's address, the number of parts it is split into, and its arguments,
which are copied into the ring by the push, as a GPU's launch copies its parameters.

    host    push 0 | push 1 | push 2 | ... Python ...      | sync ........|
    lane 0         | 0: a  c  | 1 | 2: a  c  e  |
    lane 1         | 0: b  d  |   | 2: b   d    |            completed = 3, the host wakes

Order: an entry starts when the one before is complete, whatever lane ran it. Within an entry lanes
*claim* parts from one atomic word (entry << 16 | next part) until none is left, and whoever
finishes the last part completes the entry. So a lane that the system has put aside delays at most
the one part it holds, and an entry of one part never crosses threads: the lane that completed an
entry claims the first part of the next with the same store. (A static share per lane with a barrier
between entries has neither property: on two cores, with the host on one of them, every barrier
waits for a descheduled lane.) Results do not depend on who runs a part: kernels compute disjoint
rows.

How a wait waits: see `atomics.await_value`; idle lanes and hosts sleep on a condition variable.

Layout of a stream's control block (bytes; words apart by a cache line where different threads write
them) and of a ring slot: the constants below.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numba import cfunc, njit

from workbench.backend.atomics import (
    FOREVER,
    NOBODY,
    SIGNAL_BYTES,
    WAKE_AT,
    await_value,
    call_kernel,
    copy_bytes,
    fetch_add,
    init_signal,
    load,
    now_ns,
    publish,
    put,
    sched_yield,
    store,
    swap_if,
    wake,
)
from workbench.errors import DeviceError

# control block: two signals, then words
ISSUED, COMPLETED = 0, SIGNAL_BYTES
CLAIM, FINISHED = 384, 448
SLOTS, STAMPS, STATE = 512, 520, 528
CONTROL_BYTES = 576
OPEN, STOPPED = 0, 1

RING_SIZE = 4096  # entries; one slot stays empty (see `push`)
STAMP_SIZE = 1 << 16  # entries whose start and end are remembered
SLOT_BYTES, PARTS, ARGS = 256, 8, 16
MAX_ARGS = (SLOT_BYTES - ARGS) // 8
PART_BITS = 16
MAX_PARTS = (1 << PART_BITS) - 1
PUSHED, FULL, CLOSED = 0, 1, 2

LANE_YIELD_NS = 200_000  # an idle lane yields this long before it sleeps
HOST_YIELD_NS = 30_000  # a waiting host likewise
SLICE_NS = 20_000_000  # a waiting host returns to Python this often, for Ctrl-C

KERNEL = "void(int64, int64, int64)"  # args, lane, n_lanes


@njit("int64(int64, int64)", cache=True)
def push(control, command):
    """Queues the command block at `command`: function, parts, number of arguments, arguments.

    Returns PUSHED, FULL or CLOSED. Holds the GIL: Python threads push one after the other.

    A slot is refilled only when the entry *behind* its old one is complete too. That entry's claim
    proves that the claim word had left the old one, so a lane that lags behind can read a refilled
    slot, but never claim from it.
    """
    entry = load(control + ISSUED)
    if load(control + STATE) != OPEN:
        return CLOSED
    if entry - load(control + COMPLETED) >= RING_SIZE - 1:
        return FULL
    slot = load(control + SLOTS) + (entry & (RING_SIZE - 1)) * SLOT_BYTES
    put(slot, load(command))
    put(slot + PARTS, load(command + 8))
    for i in range(load(command + 16)):
        put(slot + ARGS + 8 * i, load(command + 24 + 8 * i))
    publish(control + ISSUED, entry + 1)
    return PUSHED


@njit("void(int64, int64, int64)", cache=True, nogil=True)
def run_lane(control, until, yield_ns):
    """Runs parts of entries until entry `until - 1` is complete, or the stream is stopped."""
    slots, stamps = load(control + SLOTS), load(control + STAMPS)
    while load(control + STATE) == OPEN and load(control + COMPLETED) < until:
        claim = load(control + CLAIM)
        entry, part = claim >> PART_BITS, claim & MAX_PARTS
        if entry >= until:
            return  # completed since the test above
        if load(control + ISSUED) <= entry:
            await_value(control + ISSUED, entry + 1, yield_ns, FOREVER)
            continue
        slot = slots + (entry & (RING_SIZE - 1)) * SLOT_BYTES
        parts = load(slot + PARTS)
        if part >= parts:
            if load(control + COMPLETED) > entry:
                sched_yield()  # complete, but put aside before it could move the claim word
            else:
                await_value(control + COMPLETED, entry + 1, yield_ns, FOREVER)
            continue
        if not swap_if(control + CLAIM, claim, claim + 1):
            continue
        while True:
            stamp = stamps + (entry & (STAMP_SIZE - 1)) * 16
            if part == 0:
                put(stamp, now_ns())
            call_kernel(load(slot), slot + ARGS, part, parts)
            if parts > 1 and fetch_add(control + FINISHED, 1) < parts - 1:
                break
            # every part is done: complete the entry, and keep the next one if it is there
            put(stamp + 8, now_ns())
            put(control + FINISHED, 0)
            entry += 1
            more = (
                entry < until and load(control + ISSUED) > entry and load(control + STATE) == OPEN
            )
            store(control + COMPLETED, entry)
            store(control + CLAIM, entry << PART_BITS | (1 if more else 0))
            if load(control + COMPLETED + WAKE_AT) <= entry:
                wake(control + COMPLETED)
            if not more:
                break
            slot = slots + (entry & (RING_SIZE - 1)) * SLOT_BYTES
            part, parts = 0, load(slot + PARTS)


@njit("boolean(int64, int64, int64, int64)", cache=True, nogil=True)
def wait_slice(signal, value, yield_ns, timeout_ns):
    """`await_value` as the host calls it: without the GIL."""
    return await_value(signal, value, yield_ns, timeout_ns)


@njit("void(int64)", cache=True, nogil=True)
def stop(control):
    """Makes the lanes leave after the parts they hold. No entry that still waits is run."""
    store(control + STATE, STOPPED)
    publish(control + ISSUED, NOBODY - 1)


@njit("void(int64)", cache=True, nogil=True)
def run_inline(command):
    """Runs a command block's kernel here and now, as one part."""
    call_kernel(load(command), command + 24, 0, 1)


@cfunc(KERNEL, cache=True)
def copy_kernel(args, lane, n_lanes):
    """args: dst, src, nbytes. Shares are multiples of 64 bytes."""
    dst, src, nbytes = load(args), load(args + 8), load(args + 16)
    share = ((nbytes + n_lanes - 1) // n_lanes + 63) & ~63
    start = min(lane * share, nbytes)
    copy_bytes(dst + start, src + start, min(share, nbytes - start))


@cfunc(KERNEL, cache=True)
def await_kernel(args, lane, n_lanes):
    """args: signal, value, control of the stream this runs on (given up when that is stopped)."""
    signal, value, control = load(args), load(args + 8), load(args + 16)
    while not await_value(signal, value, LANE_YIELD_NS, SLICE_NS):
        if load(control + STATE) != OPEN:
            return


# their addresses in this process (numba gives every cfunc one)
COPY, AWAIT = (int(kernel.address or 0) for kernel in (copy_kernel, await_kernel))


def aligned_zeros(nbytes: int, alignment: int = 64) -> np.ndarray:
    """A zeroed uint8 array (nbytes,) whose address is a multiple of `alignment`. Pages are touched
    only when used. Raises DeviceError where there is no such memory."""
    try:
        block = np.zeros(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError) as error:
        raise DeviceError(
            f"no memory for {nbytes} bytes; use a smaller model, n_ctx or n_ubatch"
        ) from error
    start = -block.ctypes.data % alignment
    return block[start : start + nbytes]


def command_block(function: int, parts: int, args: Sequence[int | float]) -> np.ndarray:
    """What `push` takes, int64: function, parts, count of arguments, arguments (floats as bits)."""
    if len(args) > MAX_ARGS:
        raise DeviceError(f"a kernel with {len(args)} arguments; the ring takes {MAX_ARGS}")
    words = (
        struct.unpack("<q", struct.pack("<d", a))[0] if isinstance(a, float) else a for a in args
    )
    return np.array([function, parts, len(args), *words], np.int64)


class Signal:
    """A counter in shared memory that compiled code and the host can wait for. Starts at 0."""

    def __init__(self) -> None:
        self.memory = aligned_zeros(SIGNAL_BYTES)
        self.address = int(self.memory.ctypes.data)
        init_signal(self.address)

    def publish(self, value: int) -> None:
        publish(self.address, value)


class Ring:
    """A FIFO of kernels with `n_lanes` threads that run it. Sequence numbers count its entries.

    Nothing runs before `start`. Safe to push from several Python threads.
    """

    def __init__(self, name: str, n_lanes: int, yield_ns: int = LANE_YIELD_NS):
        self.name = name
        self.n_lanes = n_lanes
        self.yield_ns = yield_ns
        self.control = aligned_zeros(CONTROL_BYTES)
        self.slots = aligned_zeros(RING_SIZE * SLOT_BYTES)
        self.stamps = aligned_zeros(STAMP_SIZE * 16)
        self.address = int(self.control.ctypes.data)
        words = self.control.view(np.int64)
        words[SLOTS // 8] = self.slots.ctypes.data
        words[STAMPS // 8] = self.stamps.ctypes.data
        init_signal(self.address + ISSUED)
        init_signal(self.address + COMPLETED)
        self.words = memoryview(words.data)
        self._threads: list[threading.Thread] = []
        self.closed = False

    def start(self) -> None:
        """Starts the lanes. Daemon threads: a device that nobody closed never holds up an exit."""
        memory = (self.control, self.slots, self.stamps)  # lives as long as a lane may touch it
        for lane in range(self.n_lanes):
            thread = threading.Thread(
                target=_lane,
                args=(self.address, self.yield_ns, memory),
                name=f"{self.name} lane {lane}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    @property
    def issued(self) -> int:
        """Entries pushed so far: the sequence number of the next one."""
        return self.words[ISSUED // 8]

    @property
    def completed(self) -> int:
        return self.words[COMPLETED // 8]

    def prepare(self, function: int, parts: int, args: Sequence[int | float]) -> Callable[[], None]:
        """A callable that queues this kernel, as often as it is called. Arguments are bound now."""
        block = command_block(function, parts, args)
        control, address, slow = self.address, int(block.ctypes.data), self.push_slowly

        def issue(_block: np.ndarray = block) -> None:
            if push(control, address):
                slow(address)

        return issue

    def push(self, function: int, parts: int, args: Sequence[int | float]) -> None:
        """Queues a kernel once."""
        self.prepare(function, parts, args)()

    def push_slowly(self, command: int) -> None:
        """A push that found the ring full: waits for room, a slice at a time."""
        while True:
            self._check()
            self.wait(self.issued - RING_SIZE + 2)
            if push(self.address, command) == PUSHED:
                return

    def wait(self, sequence: int) -> None:
        """The host waits until `sequence` entries are complete. Ctrl-C is heeded within 20 ms.

        Raises DeviceError where that can no longer happen.
        """
        signal = self.address + COMPLETED
        while not wait_slice(signal, sequence, HOST_YIELD_NS, SLICE_NS):
            self._check()

    def _check(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name} is closed; open a new backend")
        if not all(t.is_alive() for t in self._threads):
            raise DeviceError(
                f"{self.name} has lost its threads; open the backend after a fork, not before"
            )

    def stamp(self, sequence: int) -> tuple[int, int]:
        """Start and end of a completed entry, ns of time.perf_counter_ns.

        Raises DeviceError where the entry is not complete or more than STAMP_SIZE entries old.
        """
        if not self.issued - STAMP_SIZE <= sequence < self.completed:
            raise DeviceError(
                f"{self.name}: entry {sequence} has no stamp; resolve marks after waiting for the "
                f"work between them and within {STAMP_SIZE} entries"
            )
        row = self.stamps.view(np.int64).reshape(STAMP_SIZE, 2)[sequence % STAMP_SIZE]
        return int(row[0]), int(row[1])

    def close(self, drain: bool = True) -> None:
        """Waits for what is queued (drain), then ends and joins the lanes. Idempotent."""
        if self.closed:
            return
        try:
            if drain:
                self.wait(self.issued)
        finally:
            self.closed = True
            issued = self.issued
            stop(self.address)
            for thread in self._threads:
                thread.join()
            self.words[ISSUED // 8] = issued  # `stop` raised it to wake the lanes


def _lane(control: int, yield_ns: int, memory: tuple[np.ndarray, ...]) -> None:
    """A lane's thread: one call into compiled code, until shutdown. It holds `memory`."""
    run_lane(control, NOBODY, yield_ns)
