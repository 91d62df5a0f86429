"""The compiled code behind every stream of a CPU device: workers that take entries from a ring.

Python fills the ring. Workers empty it: threads in compiled code, without the GIL from start to
shutdown. An entry is a kernel's address, its number of parts, and its arguments. A push copies
the arguments into the ring, as a GPU's launch copies its parameters.

    host      push 0 | push 1 | push 2 | ... Python ...      | sync ........|
    worker 0         | 0: a  c  | 1 | 2: a  c  e  |
    worker 1         | 0: b  d  |   | 2: b   d    |            completed = 3, the host wakes

Order: an entry starts when the entry before it is complete, whichever worker ran it. Within an
entry, workers *claim* parts from one atomic word (entry << 16 | next part) until none is left. The
worker that finishes the last part completes the entry, and claims the first part of the next entry
with the same store. Two things follow. A worker that the system has put aside delays at most the
one part it holds. An entry of one part never crosses threads. (A fixed share per worker with a
barrier between entries has neither property: on two cores, with the host on one of them, every
barrier waits for a descheduled worker.) Results do not depend on which worker runs a part, because
parts are disjoint rows.

How the host and a worker wait. A `Signal` is a monotonic int64 counter in shared memory:

    word 0   value          raised by `publish`, never lowered
    word 1   wake_at        least value a sleeper wants; NOBODY when none sleeps
    64 B on  a pthread mutex, 128 B on a pthread condition variable

`await_value` spins for about a microsecond, yields for a while, then sleeps. The publisher pays for
a wake-up only where a sleeper asked for a value that is now reached. Value and wake_at are
sequentially consistent: either the sleeper sees the new value, or the publisher sees the sleeper.
Yielding gives the core to any thread with work. On two quiet cores, against pure spinning of 10 and
50 us, yielding was as quick to start and lost least to a busy host. (Kernels that take one worker
5.5 ms, on two workers beside a Python loop: 5.6 ms; with 50 us of spinning: 6.8 ms.)

All compiled code is in this file. numba's cache looks only at a function's own file to decide
whether the function is out of date. The constants below lay out a stream's control block and
an entry of its ring, in bytes. Words that different threads write are a cache line apart.
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
ENTRIES, STAMPS, STATE = 512, 520, 528
CONTROL_BYTES = 576
OPEN, STOPPED = 0, 1

RING_SIZE = 4096  # entries; one stays empty (see `push`)
STAMP_SIZE = 1 << 16  # entries whose start and end are remembered
ENTRY_BYTES, PARTS, ARGS = 256, 8, 16
MAX_ARGS = (ENTRY_BYTES - ARGS) // 8
PART_BITS = 16
MAX_PARTS = (1 << PART_BITS) - 1
PUSHED, FULL, CLOSED = 0, 1, 2

WORKER_YIELD_NS = 200_000  # an idle worker yields this long before it sleeps
HOST_YIELD_NS = 30_000  # a waiting host likewise
SLICE_NS = 20_000_000  # a waiting host returns to Python this often, for Ctrl-C

KERNEL = "void(int64, int64, int64)"  # args, part, n_parts
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
    """Turns the zeroed SIGNAL_BYTES at `signal` into a Signal of value 0."""
    mutex_init(signal + MUTEX, 0)
    cond_init(signal + CONDITION, 0)
    store(signal + WAKE_AT, NOBODY)


@njit(cache=True, nogil=True)
def wake(signal):
    """Wakes every sleeper on `signal`; a sleeper that wants a larger value sleeps again."""
    mutex_lock(signal + MUTEX)
    store(signal + WAKE_AT, NOBODY)
    cond_broadcast(signal + CONDITION)
    mutex_unlock(signal + MUTEX)


@njit(cache=True, nogil=True)
def publish(signal, value):
    """Raises `signal` to `value`, and wakes the sleepers that wait for it."""
    store(signal, value)
    if load(signal + WAKE_AT) <= value:
        wake(signal)


@njit(cache=True, nogil=True)
def await_value(signal, value, yield_ns, timeout_ns):
    """Waits until `signal` reaches `value`; False where `timeout_ns` passed asleep without it.

    First about 1 us of spinning: often the other side is about to finish. Then `yield_ns` of
    sched_yield, which leaves the core to any thread with work. Then sleep. timeout_ns = FOREVER
    never gives up.
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
        if load(signal) >= value:  # published before the publisher could see this sleeper
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

    An entry's memory is filled again only when the entry *behind* the old one is complete, too.
    By then the claim word has left the old entry. A worker that lags behind may read the new
    entry, but never claims a part of it.
    """
    entry = load(control + ISSUED)
    if load(control + STATE) != OPEN:
        return CLOSED
    if entry - load(control + COMPLETED) >= RING_SIZE - 1:
        return FULL
    at = load(control + ENTRIES) + (entry & (RING_SIZE - 1)) * ENTRY_BYTES
    put(at, load(command))
    put(at + PARTS, load(command + 8))
    for i in range(load(command + 16)):
        put(at + ARGS + 8 * i, load(command + 24 + 8 * i))
    publish(control + ISSUED, entry + 1)
    return PUSHED


@njit("void(int64, int64)", cache=True)
def record(control, block):
    """Makes an event the point behind every entry queued so far. The event's address stands at
    `block`; an event is two words: address of a stream's signal (0: never recorded), and value."""
    event = load(block)
    put(event + 8, load(control + ISSUED))
    put(event, control + COMPLETED)


@njit("int64(int64, int64)", cache=True)
def push_wait(control, block):
    """Queues a wait for an event's latest Record. At `block`: the event's address, then a command
    of `await_kernel`, whose signal and value are filled in here. Returns as `push` does.

    Queues nothing for an event without a Record, or with one on this stream, which is in order.
    """
    event = load(block)
    signal = load(event)
    if signal == 0 or signal == control + COMPLETED:
        return PUSHED
    put(block + 32, signal)
    put(block + 40, load(event + 8))
    return push(control, block + 8)


@njit("void(int64, int64, int64)", cache=True, nogil=True)
def run_worker(control, until, yield_ns):
    """Runs parts of entries until entry `until - 1` is complete, or the stream is stopped."""
    entries, stamps = load(control + ENTRIES), load(control + STAMPS)
    while load(control + COMPLETED) < until:
        claim = load(control + CLAIM)
        entry, part = claim >> PART_BITS, claim & MAX_PARTS
        if entry >= until:
            return  # complete since the test above
        if load(control + ISSUED) <= entry:
            await_value(control + ISSUED, entry + 1, yield_ns, FOREVER)
            continue
        if load(control + STATE) != OPEN:  # read after ISSUED: `stop` raises both
            return
        at = entries + (entry & (RING_SIZE - 1)) * ENTRY_BYTES
        parts = load(at + PARTS)
        if part >= parts:
            if load(control + COMPLETED) > entry:
                sched_yield()  # complete, but its worker was put aside before the claim word moved
            else:
                await_value(control + COMPLETED, entry + 1, yield_ns, FOREVER)
            continue
        if not swap_if(control + CLAIM, claim, claim + 1):
            continue
        while True:
            stamp = stamps + (entry & (STAMP_SIZE - 1)) * 16
            if part == 0:
                put(stamp, now_ns())
            call_kernel(load(at), at + ARGS, part, parts)
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
            at = entries + (entry & (RING_SIZE - 1)) * ENTRY_BYTES
            part, parts = 0, load(at + PARTS)


@njit("boolean(int64, int64, int64, int64)", cache=True, nogil=True)
def wait_slice(signal, value, yield_ns, timeout_ns):
    """`await_value` as the host calls it: without the GIL."""
    return await_value(signal, value, yield_ns, timeout_ns)


@njit("void(int64)", cache=True, nogil=True)
def stop(control):
    """Makes the workers leave after the parts they hold. No entry that still waits is run."""
    store(control + STATE, STOPPED)
    publish(control + ISSUED, NOBODY - 1)


@njit("void(int64)", cache=True, nogil=True)
def run_inline(command):
    """Runs the kernel of a command block in the calling thread, as one part."""
    call_kernel(load(command), command + 24, 0, 1)


@cfunc(KERNEL, cache=True)
def copy_kernel(args, part, n_parts):
    """args: dst, src, nbytes. Parts are multiples of 64 bytes."""
    dst, src, nbytes = load(args), load(args + 8), load(args + 16)
    share = ((nbytes + n_parts - 1) // n_parts + 63) & ~63
    start = min(part * share, nbytes)
    copy_bytes(dst + start, src + start, min(share, nbytes - start))


@cfunc(KERNEL, cache=True)
def await_kernel(args, part, n_parts):
    """args: signal, value, control block of this kernel's own stream. Ends without the value where
    the own stream is stopped."""
    signal, value, control = load(args), load(args + 8), load(args + 16)
    while not await_value(signal, value, WORKER_YIELD_NS, SLICE_NS):
        if load(control + STATE) != OPEN:
            return


# their addresses in this process (numba gives every cfunc one)
COPY, AWAIT = (int(kernel.address or 0) for kernel in (copy_kernel, await_kernel))

if not await_kernel.cache_hits:  # then all of this file was compiled
    compiled.took(_BEGUN_NS, compiled.kept_by(await_kernel))
