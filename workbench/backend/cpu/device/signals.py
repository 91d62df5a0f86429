"""How the host and the workers of a CPU device wait for each other, in compiled code.

A `Signal` is a monotonic int64 counter in shared memory:

    word 0   value          raised by `publish`, never lowered
    word 1   wake_at        least value a sleeper waits for; NOBODY when none sleeps
    64 B on  a pthread mutex, 128 B on a pthread condition variable

`await_value` spins for about a microsecond, yields for a while, then sleeps. The publisher pays for
a wake-up only where a sleeper asked for a value that is now reached. Value and wake_at are
sequentially consistent: either the sleeper sees the new value, or the publisher sees the sleeper.
Yielding gives the core to any thread with work. On two quiet cores, against pure spinning of 10 and
50 us, yielding was as quick to start and lost least to a busy host. (Kernels that take one worker
5.5 ms, on two workers beside a Python loop: 5.6 ms; with 50 us of spinning: 6.8 ms.)
"""

from __future__ import annotations

import sys
import time

from numba import njit

from workbench.backend.cpu import kept  # noqa: F401 - where the loops are kept
from workbench.backend.cpu.device.atomics import (
    clock_gettime,
    cond_broadcast,
    cond_init,
    cond_timedwait,
    cond_wait,
    load,
    mutex_init,
    mutex_lock,
    mutex_unlock,
    pause,
    put,
    sched_yield,
    store,
    two_words,
)

NOBODY = (1 << 63) - 1
FOREVER = -1

SIGNAL_BYTES = 192
WAKE_AT, MUTEX, CONDITION = 8, 64, 128

WORKER_YIELD_NS = 200_000  # an idle worker yields this long before it sleeps
HOST_YIELD_NS = 30_000  # a waiting host likewise
SLICE_NS = 20_000_000  # a waiting host returns to Python this often, for Ctrl-C
LOOKS = 128  # at a word, before the core is offered to others

BEGUN_NS = time.perf_counter_ns()  # this file and `loops.py` are compiled at import

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
    """Wakes every sleeper on `signal`; a sleeper that waits for a larger value sleeps again."""
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
def set_word(address, value):
    """Sets the word at `address`, ordered after all earlier stores of the caller."""
    store(address, value)


@njit("boolean(int64, int64, int64)", cache=True, nogil=True)
def await_word(address, value, timeout_ns):
    """Polls the word at `address` until it is at least `value`; False where timeout_ns passed
    first. A plain word wakes no sleeper. Between two looks the core goes to any thread with
    work."""
    until = now_ns() + timeout_ns
    while True:
        for _ in range(LOOKS):
            if load(address) >= value:
                return True
            pause()
        sched_yield()
        if now_ns() >= until:
            return load(address) >= value


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


@njit("boolean(int64, int64, int64, int64)", cache=True, nogil=True)
def wait_slice(signal, value, yield_ns, timeout_ns):
    """`await_value` as the host calls it: without the GIL."""
    return await_value(signal, value, yield_ns, timeout_ns)
