"""The compiled code behind every stream of a CPU device: lanes that take entries from a ring.

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

How a wait waits. A `Signal` is a monotonic int64 counter in shared memory:

    word 0   value          raised by `publish`, never lowered
    word 1   wake_at        least value a sleeper wants; NOBODY when none sleeps
    64 B on  a pthread mutex, 128 B on a pthread condition variable

`await_value` spins for about a microsecond, yields for a while, then sleeps. The publisher pays for
a wake-up only where a sleeper asked for a value that is now reached: value and wake_at are
sequentially consistent, so either the sleeper sees the new value or the publisher sees the sleeper.
Yielding lets any thread with work have the core. On two quiet cores, measured against pure spinning
of 10 and 50 us, it was as quick to start and lost least to a busy host (kernels that take one lane
5.5 ms, on two lanes beside a Python loop: 5.6 ms; spinning 50 us: 6.8).

All that is compiled is in this file, for numba's cache looks at no other file than a function's own
when it decides whether it is out of date. A stream's control block and a ring's slot are laid out
by the constants below (bytes; words that different threads write are a cache line apart).
"""

from __future__ import annotations

import sys
import time

from numba import cfunc, njit

from workbench.backend import compiled
from workbench.backend.cpu.atomics import (
    call_kernel,
    clock_gettime,
    cond_broadcast,
    cond_init,
    cond_timedwait,
    cond_wait,
    copy_bytes,
    fetch_add,
    load,
    mutex_init,
    mutex_lock,
    mutex_unlock,
    pause,
    put,
    sched_yield,
    store,
    swap_if,
    two_words,
)

NOBODY = (1 << 63) - 1
FOREVER = -1

SIGNAL_BYTES = 192
WAKE_AT, MUTEX, CONDITION = 8, 64, 128

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
_BEGUN_NS = time.perf_counter_ns()

# The clock of time.perf_counter_ns, and the one pthread_cond_timedwait counts in.
if sys.platform == "darwin":
    HOST_CLOCK = time.CLOCK_UPTIME_RAW
else:
    HOST_CLOCK = time.CLOCK_MONOTONIC
WALL_CLOCK = time.CLOCK_REALTIME


@njit(cache=True, nogil=True)
def now_ns():
    """Nanoseconds of `time.perf_counter_ns`'s clock."""
    time_ = two_words()
    clock_gettime(HOST_CLOCK, time_)
    return load(time_) * 1_000_000_000 + load(time_ + 8)


@njit(cache=True)
def init_signal(signal):
    """Makes the zeroed SIGNAL_BYTES at `signal` a Signal of value 0."""
    mutex_init(signal + MUTEX, 0)
    cond_init(signal + CONDITION, 0)
    store(signal + WAKE_AT, NOBODY)


@njit(cache=True, nogil=True)
def wake(signal):
    """Wakes all that sleep on `signal`; those that want more sleep again."""
    mutex_lock(signal + MUTEX)
    store(signal + WAKE_AT, NOBODY)
    cond_broadcast(signal + CONDITION)
    mutex_unlock(signal + MUTEX)


@njit(cache=True, nogil=True)
def publish(signal, value):
    """Raises `signal` to `value`, and wakes those that wait for it."""
    store(signal, value)
    if load(signal + WAKE_AT) <= value:
        wake(signal)


@njit(cache=True, nogil=True)
def await_value(signal, value, yield_ns, timeout_ns):
    """Waits until `signal` reaches `value`; False where `timeout_ns` passed asleep without it.

    First about 1 us of spinning, for the common case that the other side is about to finish; then
    `yield_ns` of sched_yield, which leaves the core to any thread that has work; then sleep.
    timeout_ns = FOREVER never gives up.
    """
    for _ in range(20):
        if load(signal) >= value:
            return True
        pause()
    until = now_ns() + yield_ns
    while now_ns() < until:
        sched_yield()
        if load(signal) >= value:
            return True
    deadline = two_words()
    if timeout_ns >= 0:
        clock_gettime(WALL_CLOCK, deadline)
        nanoseconds = load(deadline + 8) + timeout_ns
        put(deadline, load(deadline) + nanoseconds // 1_000_000_000)
        put(deadline + 8, nanoseconds % 1_000_000_000)
    mutex_lock(signal + MUTEX)
    while True:
        if value < load(signal + WAKE_AT):
            store(signal + WAKE_AT, value)
        if load(signal) >= value:  # published before it could see us
            break
        if timeout_ns < 0:
            cond_wait(signal + CONDITION, signal + MUTEX)
        elif cond_timedwait(signal + CONDITION, signal + MUTEX, deadline) != 0:
            break
    mutex_unlock(signal + MUTEX)
    return load(signal) >= value


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
    while load(control + COMPLETED) < until:
        claim = load(control + CLAIM)
        entry, part = claim >> PART_BITS, claim & MAX_PARTS
        if entry >= until:
            return  # completed since the test above
        if load(control + ISSUED) <= entry:
            await_value(control + ISSUED, entry + 1, yield_ns, FOREVER)
            continue
        if (
            load(control + STATE) != OPEN
        ):  # after reading ISSUED, which `stop` raises without entries
            return
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

if not await_kernel.cache_hits:  # nor had numba's cache what is above
    compiled.took(_BEGUN_NS, compiled.kept_by(await_kernel))
