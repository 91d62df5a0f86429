"""The compiled code that every stream of a CPU device runs: workers take entries from a ring.

Python fills the ring. Workers empty it: threads in compiled code, without the GIL from start to
shutdown. An entry is a kernel's address, its number of parts, and its arguments. A push copies
the arguments into the ring, as a GPU's launch copies its parameters. An entry without a kernel is
a *walk*: workers go through a list of entries elsewhere (a plan's, `recorded.py`), first to last,
before they come back to the ring. The host has no part in a walk.

    ring      | entry | entry | walk              | entry | ...
    numbers   | 0     | 1     | 2    3    4    5  | 6     |
    list                      ` node node node node '

Every kernel has a number, in the order in which the stream runs them. A walk has as many numbers
as its list has nodes. Signals, events, marks and stamps count these numbers.

    host      push 0 | push 1 | push 2 | ... Python ...      | sync ........|
    worker 0         | 0: a  c  | 1 | 2: a  c  e  |
    worker 1         | 0: b  d  |   | 2: b   d    |            completed = 3, the host wakes

Order: a kernel starts when the kernel before it is complete, whichever worker ran it. Within a
kernel, workers *claim* parts from one atomic word (number << 16 | next part) until none is left.
The worker that finishes the last part completes the kernel, finds the next one, and claims the
first part with the same store. Two things follow. A worker that the system has put aside delays at
most the one part it holds. A kernel of one part never crosses threads. (A fixed share per worker
with a barrier between kernels has neither property: on two cores, with the host on one of them,
every barrier waits for a descheduled worker.) Results do not depend on which worker runs a part,
because parts are disjoint rows.

The constants below lay out a stream's control block and an entry of its ring, in bytes. Words that
different threads write are a cache line apart.
"""

from __future__ import annotations

from numba import cfunc, njit

from workbench.backend import compiled
from workbench.backend.clock import stamps
from workbench.backend.cpu import kept  # noqa: F401 - where the loops are kept
from workbench.backend.cpu.device.atomics import (
    call_kernel,
    copy_bytes,
    fetch_add,
    load,
    put,
    sched_yield,
    store,
    swap_if,
)
from workbench.backend.cpu.device.signals import (
    BEGUN_NS,
    FOREVER,
    NOBODY,
    SIGNAL_BYTES,
    SLICE_NS,
    WAKE_AT,
    WORKER_YIELD_NS,
    await_value,
    now_ns,
    publish,
    wake,
)
from workbench.backend.plan import gate

# control block: two signals, then words
ISSUED, COMPLETED = 0, SIGNAL_BYTES
CLAIM, FINISHED = 384, 448
NOW, AT, LEFT, OVER = 512, 520, 528, 536  # of workers: see `run_worker`
ENTRIES, STAMPS, STATE = 576, 584, 592
FILLED = 640  # entries pushed so far; OVER: entries whose kernels are complete
CONTROL_BYTES = 704
OPEN, STOPPED = 0, 1

RING_SIZE = 4096  # entries
STAMP_SIZE = 1 << 16  # numbers whose start and end are remembered
ENTRY_BYTES, PARTS, ARGS = 256, 8, 16
MAX_ARGS = (ENTRY_BYTES - ARGS) // 8
PART_BITS = 16
MAX_PARTS = (1 << PART_BITS) - 1
PUSHED, FULL, CLOSED = 0, 1, 2

KERNEL = "void(int64, int64, int64)"  # args, part, n_parts


@njit("void(int64, int64)", cache=True)
def fill(at, command):
    """Fills the entry at `at` from the command block: function, parts, number of arguments,
    arguments."""
    put(at, load(command))
    put(at + PARTS, load(command + 8))
    for i in range(load(command + 16)):
        put(at + ARGS + 8 * i, load(command + 24 + 8 * i))


@njit("int64(int64, int64)", cache=True)
def push(control, command):
    """Queues the command block at `command`. Returns PUSHED, FULL or CLOSED. Holds the GIL: Python
    threads push one after the other."""
    if load(control + STATE) != OPEN:
        return CLOSED
    filled = load(control + FILLED)
    if filled - load(control + OVER) >= RING_SIZE:
        return FULL
    fill(load(control + ENTRIES) + (filled & (RING_SIZE - 1)) * ENTRY_BYTES, command)
    put(control + FILLED, filled + 1)
    publish(control + ISSUED, load(control + ISSUED) + 1)
    return PUSHED


# the block that launches a plan: words, then LIST_BYTES for each of its lists
DESTROYED, N_LISTS, LAUNCHES, LISTS = 0, 8, 16, 24
LIST_CONTROL, LIST_NODES, LIST_LENGTH, LIST_WALKS, LIST_FIRSTS = 0, 8, 16, 24, 32
N_FIRSTS = 64  # launches whose first numbers are remembered
LIST_BYTES = LIST_FIRSTS + 8 * N_FIRSTS


@njit("int64(int64)", cache=True)
def push_walks(plan):
    """Queues a walk of each list of a plan on the list's stream, or none. Returns as `push` does.

    An entry of the ring for a walk: no function, no parts, the list's nodes, their number, and the
    word that counts its walks.
    """
    if load(plan + DESTROYED):
        return CLOSED
    launch = load(plan + LAUNCHES) & (N_FIRSTS - 1)
    lists, end = plan + LISTS, plan + LISTS + load(plan + N_LISTS) * LIST_BYTES
    for one in range(lists, end, LIST_BYTES):
        control = load(one + LIST_CONTROL)
        if load(control + STATE) != OPEN:
            return CLOSED
        if load(control + FILLED) - load(control + OVER) >= RING_SIZE:
            return FULL
    for one in range(lists, end, LIST_BYTES):
        control, n = load(one + LIST_CONTROL), load(one + LIST_LENGTH)
        filled, number = load(control + FILLED), load(control + ISSUED)
        at = load(control + ENTRIES) + (filled & (RING_SIZE - 1)) * ENTRY_BYTES
        put(at, 0)
        put(at + ARGS, load(one + LIST_NODES))
        put(at + ARGS + 8, n)
        put(at + ARGS + 16, load(one + LIST_WALKS))
        put(one + LIST_FIRSTS + 8 * launch, number)
        put(control + FILLED, filled + 1)
        publish(control + ISSUED, number + n)
    put(plan + LAUNCHES, load(plan + LAUNCHES) + 1)
    return PUSHED


@njit("void(int64, int64)", cache=True)
def record(control, block):
    """Makes an event the point after every entry queued so far. The event's address stands at
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


@njit(cache=True, nogil=True)
def next_entry(control):
    """The address of the ring's next entry, or of the first node of a walk. The caller knows that
    the ring holds an entry."""
    over = load(control + OVER)
    at = load(control + ENTRIES) + (over & (RING_SIZE - 1)) * ENTRY_BYTES
    if load(at) != 0:
        return at
    walks = load(at + ARGS + 16)
    put(walks, load(walks) + 1)
    put(control + LEFT, load(at + ARGS + 8) - 1)
    return load(at + ARGS)


@njit("void(int64, int64, int64)", cache=True, nogil=True)
def run_worker(control, until, yield_ns):
    """Runs parts of kernels until number `until - 1` is complete, or the stream is stopped.

    NOW: the number of the kernel that runs, and its parts (number << 16 | parts). AT: its entry or
    node. LEFT: the nodes that follow in its list. The worker that claims a kernel's first part sets
    the three. Other workers read NOW before they claim a part, and AT after that. So no worker
    reads the memory of a kernel that is complete.
    """
    stamps = load(control + STAMPS)
    while load(control + COMPLETED) < until:
        claim = load(control + CLAIM)
        number, part = claim >> PART_BITS, claim & MAX_PARTS
        if number >= until:
            return  # complete since the test above
        if part == 0:  # no worker has begun the kernel
            if load(control + ISSUED) <= number:
                await_value(control + ISSUED, number + 1, yield_ns, FOREVER)
                continue
            if load(control + STATE) != OPEN:  # read after ISSUED: `stop` raises both
                return
            if not swap_if(control + CLAIM, claim, claim + 1):
                continue
            at = next_entry(control)
            parts = load(at + PARTS)
            put(control + AT, at)
            store(control + NOW, number << PART_BITS | parts)
        else:
            now = load(control + NOW)
            parts = now & MAX_PARTS
            if now >> PART_BITS != number:
                sched_yield()  # its worker was put aside before it set NOW, or before it claimed
                continue
            if part >= parts:
                if load(control + COMPLETED) > number:
                    sched_yield()  # complete, and its worker was put aside before it claimed
                else:
                    await_value(control + COMPLETED, number + 1, yield_ns, FOREVER)
                continue
            if not swap_if(control + CLAIM, claim, claim + 1):
                continue
            at = load(control + AT)
        while True:
            stamp = stamps + (number & (STAMP_SIZE - 1)) * 16
            if part == 0:
                put(stamp, now_ns())
            call_kernel(load(at), at + ARGS, part, parts)
            if parts > 1 and fetch_add(control + FINISHED, 1) < parts - 1:
                break
            # every part is done: complete the kernel, and begin the next one if it is there
            put(stamp + 8, now_ns())
            put(control + FINISHED, 0)
            number += 1
            left = load(control + LEFT)
            if left > 0:
                put(control + LEFT, left - 1)
            else:
                put(control + OVER, load(control + OVER) + 1)
            more = (
                number < until and load(control + ISSUED) > number and load(control + STATE) == OPEN
            )
            if more:
                at = at + ENTRY_BYTES if left > 0 else next_entry(control)
                part, parts = 0, load(at + PARTS)
                put(control + AT, at)
                put(control + NOW, number << PART_BITS | parts)
            store(control + COMPLETED, number)
            store(control + CLAIM, number << PART_BITS | (1 if more else 0))
            if load(control + COMPLETED + WAKE_AT) <= number:
                wake(control + COMPLETED)
            if not more:
                break


@njit("void(int64)", cache=True, nogil=True)
def stop(control):
    """Makes the workers leave after the parts they hold. Entries that still wait never run."""
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
def gate_copy_kernel(args, part, n_parts):
    """args: dst, src, nbytes, control block of the gate, ns of its limit, control block of this
    kernel's own stream."""
    control, until = load(args + 24), now_ns() + load(args + 32)
    number = load(control + gate.RAN) + 1
    while True:
        is_open = load(control + gate.OPENED) >= number
        if load(control + gate.CANCELLED) >> number % gate.N_CANCELLED & 1:  # read after OPENED
            is_open = False
            break
        if is_open or now_ns() >= until or load(load(args + 40) + STATE) != OPEN:
            break
        sched_yield()
    if is_open:
        copy_bytes(load(args), load(args + 8), load(args + 16))
    went = number if is_open else -number
    store(control + gate.WENT + number % gate.N_WENT * 8, went)
    store(control + gate.RAN, number)


@cfunc(KERNEL, cache=True)
def gate_end_kernel(args, part, n_parts):
    """args: address of the counter of ends, and of the word that the host looks at."""
    number = load(load(args)) + 1
    store(load(args), number)
    store(load(args + 8), number)


@cfunc(KERNEL, cache=True)
def stamp_kernel(args, part, n_parts):
    """args: address of the counter of pairs, memory of the ring, its pairs, 0 for a begin and 1 for
    an end."""
    now, ring, is_end = now_ns(), load(args + 8), load(args + 24)
    number = load(load(args))
    at = ring + stamps.PAIRS + number % load(args + 16) * stamps.PAIR_BYTES
    put(at + 8 * is_end, now)
    if is_end:
        store(load(args), number + 1)
        store(ring + stamps.WRITTEN, number + 1)


@njit(cache=True, nogil=True)
def await_or_stop(signal, value, control):
    """Waits until `signal` reaches `value`, or until the stream of `control` is stopped."""
    while not await_value(signal, value, WORKER_YIELD_NS, SLICE_NS):
        if load(control + STATE) != OPEN:
            return


@cfunc(KERNEL, cache=True)
def await_kernel(args, part, n_parts):
    """args: signal, value, control block of this kernel's own stream."""
    await_or_stop(load(args), load(args + 8), load(args + 16))


# In lists of a plan. A signal counts launches: it is raised to how often its list was walked.


@cfunc(KERNEL, cache=True)
def await_list_kernel(args, part, n_parts):
    """args: signal, number of walks of this kernel's own list, control block of its own stream."""
    await_or_stop(load(args), load(load(args + 8)), load(args + 16))


@cfunc(KERNEL, cache=True)
def raise_kernel(args, part, n_parts):
    """args: signal, number of walks of this kernel's own list."""
    publish(load(args), load(load(args + 8)))


# their addresses in this process (numba gives every cfunc one)
COPY, AWAIT, AWAIT_LIST, RAISE, GATE_COPY, GATE_END, STAMP = (
    int(kernel.address or 0)
    for kernel in (
        copy_kernel, await_kernel, await_list_kernel, raise_kernel, gate_copy_kernel,
        gate_end_kernel, stamp_kernel,
    )
)  # fmt: skip

if not await_kernel.cache_hits:  # then all of this file was compiled
    compiled.took(BEGUN_NS, compiled.cache_dir())
