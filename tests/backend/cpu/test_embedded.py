"""The embedded device keeps a GPU's contract: order, late reads, events, times, a clean end.

The clauses that every device keeps are in tests/contract; here is what this device alone has: parts
of a kernel, rings, and threads of nine streams. Small
kernels stand in for the real ones where only order matters; the device runs both alike.
"""

from __future__ import annotations

import _thread
import random
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import (
    address,
    append,
    count_parts,
    open_backend,
    queue_work,
    rotate,
    spin,
)
from tests.backend.plan.plannable import Log, spins
from tests.gates import hold
from workbench.backend.cpu.device.embedded import SHARE
from workbench.backend.cpu.device.loops import MAX_ARGS, RING_SIZE
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Kind, Tensor
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space, compute_stream

SIDE = [compute_stream(k) for k in range(1, 8)]
ALL = [COMPUTE_STREAM, *SIDE, COPY_STREAM]


@pytest.fixture
def one():
    """The embedded device with one worker."""
    backend = open_backend(threads=1)
    yield backend
    backend.close()


def n_threads() -> int:
    return sum(t.name.startswith("embedded stream") for t in threading.enumerate())


# order -------------------------------------------------------------------------------------------


def test_parts_are_complete_before_the_next_kernel_starts(device):
    """Each part adds to a word another part added to before, without atomics: a lost addition would
    be an overlap. 3 x the ring's size, so that it wraps."""
    words, n = np.zeros(8, np.int64), 3 * RING_SIZE
    calls = [device.streams[0].prepare(rotate.address, 8, (address(words), s)) for s in range(8)]
    for i in range(n):
        calls[i % 8]()
    device.synchronize()
    np.testing.assert_array_equal(words, n)


def test_every_part_runs_once(device):
    words = np.zeros(16, np.int64)
    calls = {p: device.streams[0].prepare(count_parts.address, p, (address(words),)) for p in
             (1, 2, 3, 7, 16)}  # fmt: skip
    for _ in range(4000):
        for call in calls.values():
            call()
    device.sync_stream(0)()
    expected = [4000 * sum(p > part for p in calls) for part in range(16)]
    np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize("seed", range(6))
def test_streams_that_wait_in_circles_never_deadlock(one, seed):
    """Each of nine waits for the one before it in an order that changes from round to round. The
    first is held, so everything is queued by then."""
    chance, log = random.Random(seed), Log(one)
    made = {stream: one.event() for stream in ALL}
    before, n = None, 0
    with hold(one, ALL[0]):
        for number in range(20):
            order = [ALL[0], *chance.sample(ALL[1:], 8)] if number == 0 else chance.sample(ALL, 9)
            for stream in order:
                if before is not None:
                    one.wait(made[before], stream)()
                log(n, stream)
                one.record(made[stream], stream)()
                before, n = stream, n + 1
        assert log.values == []
    one.synchronize()
    assert log.values == [*range(n)]


def test_a_full_ring_makes_the_host_wait(two):
    log, n = np.zeros(RING_SIZE + 1001, np.int64), RING_SIZE + 1000
    with hold(two, 0) as gate:
        timer = threading.Timer(0.05, gate.open)
        timer.start()
        call = two.streams[0].prepare(append.address, 1, (address(log), 1))
        for _ in range(n):
            call()
        assert timer.finished.is_set()
    two.synchronize()
    assert log[0] == n


def test_what_the_device_cannot_do_is_refused(two):
    with pytest.raises(DeviceError, match="arguments"):
        two.streams[0].prepare(append.address, 1, [0] * (MAX_ARGS + 1))
    with pytest.raises(DeviceError, match="threads"):
        open_backend(threads=100_000)
    with pytest.raises(DeviceError, match="snapshot"):
        open_backend(threads=1, pageable="sometimes")
    with pytest.raises(DeviceError, match="wants"):
        two.load_weight(Tensor("w", F32, (4, 4), Kind.WEIGHT), np.zeros(60, np.uint8))
    with pytest.raises(DeviceError, match="no memory"):
        two.allocate(1 << 60, Space.DEVICE)


# copies and memory -------------------------------------------------------------------------------


def test_copies_of_any_length(device):
    rng = np.random.default_rng(0)
    source, result = device.allocate(1 << 21, Space.PINNED), device.allocate(1 << 21, Space.PINNED)
    source.array[:] = rng.integers(0, 256, source.nbytes, np.uint8)
    for n in (1, 63, 64, 65, 1 << 18, (1 << 19) + 1, (1 << 20) + 77):
        result.array[:] = 0
        device.copy(result.address + 3, source.address + 1, n, 0, to_host=True)()
        device.sync_stream(0)()
        np.testing.assert_array_equal(result.array[3 : 3 + n], source.array[1 : 1 + n])
        assert not result.array[:3].any() and not result.array[3 + n : 3 + n + 64].any()


@pytest.mark.parametrize("stream", [COPY_STREAM, SIDE[0], SIDE[-1]])
def test_memory_freed_too_early_stays_until_a_stream_is_done(two, stream):
    source, result = (two.allocate(400_000, Space.PINNED) for _ in range(2))
    source.array[:] = 3
    with hold(two, stream):
        two.copy(result.address, source.address, source.nbytes, stream, to_host=True)()
        source.free()
        np.zeros(400_000, np.uint8)[:] = 5  # would take the freed block
        two._keep(None)  # looks what is over
        assert two._retired
    two.sync_stream(stream)()
    assert (result.array == 3).all()
    two._keep(None)
    assert not two._retired


# threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_nobody_pays_for_a_stream_that_no_program_uses(workers):
    others = n_threads()
    device, share = open_backend(threads=workers), max(1, workers // SHARE)
    before = workers + 1
    assert n_threads() - others == before
    event = device.event()
    device.record(event, SIDE[0])()
    device.sync_stream(SIDE[1])()
    device.sync_event(event)()
    assert n_threads() - others == before, "nothing is to be done on them"
    for n, stream in enumerate(SIDE, start=1):
        for _ in range(2):
            spins(device, 0, stream)[0]()
        assert n_threads() - others == before + n * share
    device.close()
    assert n_threads() == others


def test_streams_that_wait_for_an_event_hold_no_worker(one):
    event, log = one.event(), Log(one)
    with hold(one, SIDE[0]):
        one.record(event, SIDE[0])()
        for stream in [COPY_STREAM, *SIDE[1:6]]:
            one.wait(event, stream)()
            log(1, stream)
        log(0)
        log(0, SIDE[6])
        one.sync_stream(0)()
        one.sync_stream(SIDE[6])()
        assert log.values == [0, 0]
    one.synchronize()
    assert log.values == [0, 0, *[1] * 6]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_device_runs_while_python_has_the_gil(workers, no_handover):
    """5 ms of kernels are queued; the host then does nothing but Python and never gives the GIL up.
    A worker that needs the GIL would not run one kernel."""
    backend = open_backend(threads=workers)
    ring, sink = backend.streams[0], np.zeros(64, np.int64)
    start = time.perf_counter_ns()
    first, end = queue_work(ring, workers, sink, 100)
    while ring.completed < end and time.perf_counter_ns() < start + 5_000_000_000:
        pass
    assert ring.completed == end
    assert start <= ring.stamp(first)[0] < ring.stamp(end - 1)[1] <= time.perf_counter_ns()
    backend.close()


# times -------------------------------------------------------------------------------------------


def test_marks_of_unfinished_work_are_refused(two):
    with hold(two, 0):
        begin = two.mark(0)
        two.streams[0].push(spin.address, 1, (0,))
        end = two.mark(0)
        with pytest.raises(DeviceError, match="no stamp"):
            two.resolve(begin, end)


# ends --------------------------------------------------------------------------------------------


def test_ctrl_c_interrupts_a_wait(two):
    with hold(two, 0):
        two.streams[0].push(spin.address, 1, (0,))
        threading.Timer(0.05, _thread.interrupt_main).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            two.synchronize()
        assert time.perf_counter() - start < 2
    two.synchronize()  # and the device is none the worse


def test_closing_drains_streams_that_wait_for_each_other(device):
    log, made = Log(device), {stream: device.event() for stream in ALL}
    memory = device.allocate(64, Space.DEVICE)
    for stream in reversed(ALL):
        hold(device, stream)  # closing opens them
    for before, stream in pairwise(reversed(ALL)):
        device.record(made[before], before)()
        device.wait(made[before], stream)()
        log(stream, stream)
    device.close()
    assert log.values == [*reversed(ALL)][1:]
    device.close()
    memory.free()
    with pytest.raises(DeviceError, match=r"^embedded stream 5 is closed; open a new backend$"):
        log(1, 5)
    device.synchronize()  # nothing was left undone


def test_an_interrupted_close_ends_every_stream(two):
    """The gate stays shut: only its stream's end lets the kernel there go."""
    close, log, others = two.close, Log(two), n_threads() - 3
    hold(two, SIDE[2])
    event = two.event()
    two.record(event, SIDE[2])()
    for stream in (0, COPY_STREAM, SIDE[0], SIDE[6]):
        two.wait(event, stream)()
        log(stream, stream)
    threading.Timer(0.1, _thread.interrupt_main).start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        close()
    assert time.perf_counter() - start < 5 and log.values == []
    assert n_threads() == others
    close()


def test_closing_runs_nothing_twice():
    """Idle workers are woken by the close itself; the ring still holds the old entries then."""
    for n in range(100):
        words = np.zeros(8, np.int64)
        backend = open_backend(threads=3)
        for _ in range(n % 4 + 1):
            backend.streams[0].push(count_parts.address, 8, (address(words),))
        backend.close()
        np.testing.assert_array_equal(words, n % 4 + 1)


def test_a_device_nobody_closed_ends_with_its_last_reference():
    """Also with side streams that wait for a gate."""
    before = n_threads()
    device = open_backend(threads=2)
    call = device.streams[0].prepare(spin.address, 1, (0,))
    call()
    assert n_threads() == before + 3
    del device
    assert n_threads() == before
    with pytest.raises(DeviceError, match="closed"):
        call()


APART = """
import os, signal
import numpy as np
from tests.gates import hold
from workbench.backend.cpu.device.embedded import open_backend
from workbench.common.errors import DeviceError
from workbench.program.commands import Space
device = open_backend(threads=1)
"""
LEAK = """
m = device.allocate(1 << 20, Space.PINNED)
gate = hold(device, 0)
for _ in range(100):
    device.copy(m.address, m.address + 64, 1000, 0, False)()
print("leaking", flush=True)
"""
FORKED = """
device.synchronize()
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    signal.alarm(20)
    for stream in (0, 3):  # one that was used before, one that was not
        try:
            hold(device, stream)
            device.sync_stream(stream)()
        except DeviceError as error:
            print(error, flush=True)
    os._exit(7)
"""
LOST = "embedded stream {} has lost its threads; open the backend after a fork, not before"


@pytest.mark.parametrize(("code", "said", "status"), [
    (LEAK, ["leaking"], 0), (LEAK + "device.not_there", ["leaking"], 1),
    (FORKED, [LOST.format(0), LOST.format(3), "7"], 0),
], ids=["left open", "left by an error", "forked"])  # fmt: skip
def test_a_process_ends_whatever_its_device_does(code, said, status):
    command = [sys.executable, "-W", "ignore", "-c", APART + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == said and done.returncode == status, done.stderr
