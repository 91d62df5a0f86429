"""The embedded device keeps a GPU's contract: order, late reads, events, a clean end.

Own small kernels stand in for the real ones where only order matters; the device runs both alike.
"""

from __future__ import annotations

import _thread
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import (
    address,
    append,
    count_parts,
    open_backend,
    rotate,
    spin,
)
from tests.gates import hold
from workbench.backend.cpu.device.embedded import Event
from workbench.backend.cpu.device.loops import MAX_ARGS, RING_SIZE
from workbench.common.errors import DeviceError
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space


def pinned(backend, values) -> tuple:
    """Pinned memory holding float32 `values`, and its view."""
    values = np.asarray(values, np.float32)
    memory = backend.allocate(values.nbytes, Space.PINNED)
    view = memory.array.view(np.float32)
    view[:] = values
    return memory, view


# order -------------------------------------------------------------------------------------------


def test_entries_run_in_order(device):
    log = np.zeros(1001, np.int64)
    for i in range(1000):
        device.streams[0].push(append.address, 1, (address(log), i))
    device.synchronize()
    assert log[0] == 1000
    np.testing.assert_array_equal(log[1:], np.arange(1000))


def test_parts_are_complete_before_the_next_entry_starts(device):
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


def test_soak_of_both_streams(device):
    """100k launches with waits across streams; the copy stream must see every value in turn."""
    log, n = np.zeros(100_001, np.int64), 50_000
    event, back = device.event(), device.event()
    compute, copies, *_ = device.streams
    record, wait = device.record(event, COMPUTE_STREAM), device.wait(event, COPY_STREAM)
    record_back, wait_back = device.record(back, COPY_STREAM), device.wait(back, COMPUTE_STREAM)
    first = compute.prepare(append.address, 1, (address(log), 1))
    second = copies.prepare(append.address, 1, (address(log), 2))
    pace = max(1, n // 50)
    for i in range(n):
        first()
        if i % pace == 0:  # hand over to the other stream and back
            record()
            wait()
            for _ in range(pace):
                second()
            record_back()
            wait_back()
    device.synchronize()
    assert log[0] == 100_000
    turns = log[1:].reshape(50, 2 * pace)
    assert (turns[:, :1] == 1).all() and (turns[:, 1 : pace + 1] == 2).all()
    assert (turns[:, pace + 1 :] == 1).all()


def test_full_ring_makes_the_host_wait(two):
    log, n = np.zeros(RING_SIZE + 1001, np.int64), RING_SIZE + 1000
    with hold(two, 0) as gate:
        threading.Timer(0.1, gate.open).start()
        start = time.perf_counter()
        call = two.streams[0].prepare(append.address, 1, (address(log), 1))
        for _ in range(n):
            call()
        waited = time.perf_counter() - start
    two.synchronize()
    assert log[0] == n and waited > 0.09


def test_too_many_arguments_are_refused(two):
    with pytest.raises(DeviceError, match="arguments"):
        two.streams[0].prepare(append.address, 1, [0] * (MAX_ARGS + 1))


# copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pageable", "space", "expected"),
    [
        ("late", Space.PINNED, 2),
        ("late", Space.HOST, 2),
        ("snapshot", Space.PINNED, 2),
        ("snapshot", Space.HOST, 1),
    ],
)
@pytest.mark.parametrize("stream", [COMPUTE_STREAM, COPY_STREAM])
def test_when_a_copy_reads_its_source(pageable, space, expected, stream):
    backend = open_backend(threads=2, pageable=pageable)
    n = 1 << 20  # large enough for several workers
    source, there, result = (backend.allocate(n, s) for s in (space, Space.DEVICE, Space.PINNED))
    up = backend.copy(there.address, source.address, n, stream, to_host=False)
    down = backend.copy(result.address, there.address, n, stream, to_host=True)
    with hold(backend, stream):
        source.array[:] = 1
        up()
        source.array[:] = 2  # breaks the contract
        down()
    backend.sync_stream(stream)()
    assert (result.array == expected).all()
    backend.close()


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


def test_memory_spaces(two):
    device_memory = two.allocate(100, Space.DEVICE)
    host = two.allocate(100, Space.HOST)
    assert device_memory.array is None
    assert host.array.nbytes == 100 and not host.array.any()
    assert device_memory.address % 64 == 0 and host.address % 64 == 0
    host.free()
    host.free()
    with pytest.raises(DeviceError, match="no memory"):
        two.allocate(1 << 60, Space.DEVICE)


def test_memory_freed_too_early_stays_until_the_work_is_done(two):
    source, _ = pinned(two, [3.0] * 100_000)
    result, view = pinned(two, [0.0] * 100_000)
    with hold(two, COPY_STREAM):
        two.copy(result.address, source.address, source.nbytes, COPY_STREAM, to_host=True)()
        source.free()
        np.zeros(100_000, np.float32)[:] = 5.0  # would take the freed block
    two.sync_stream(COPY_STREAM)()
    assert (view == 3.0).all()


# events ------------------------------------------------------------------------------------------


def test_an_event_never_recorded_is_nothing(device):
    event = device.event()
    with hold(device, COMPUTE_STREAM):
        device.sync_event(event)()
        device.wait(event, COPY_STREAM)()
        device.sync_stream(COPY_STREAM)()
    device.synchronize()


def test_a_wait_holds_the_stream_until_the_record(two):
    log, event = np.zeros(4, np.int64), two.event()
    with hold(two, COMPUTE_STREAM):
        two.streams[0].push(append.address, 1, (address(log), 1))
        two.record(event, COMPUTE_STREAM)()
        two.streams[0].push(append.address, 1, (address(log), 3))
        two.wait(event, COPY_STREAM)()
        two.streams[1].push(append.address, 1, (address(log), 2))
        time.sleep(0.01)
        assert log[0] == 0  # the copy stream waits for the gated one
    two.synchronize()
    assert log[0] == 3 and list(log[1:]).index(1) < list(log[1:]).index(2)


def test_wait_and_sync_mean_the_latest_record_issued(two):
    """Recorded before the gate, then again behind it: a Wait issued between the two means the
    first record, though it may run after the second was issued."""
    event = two.event()
    record = two.record(event, COMPUTE_STREAM)
    record()
    with hold(two, COPY_STREAM) as copies, hold(two, COMPUTE_STREAM) as compute:
        two.wait(event, COPY_STREAM)()
        two.streams[0].push(spin.address, 1, (0,))
        two.record(event, COMPUTE_STREAM)()
        copies.open()
        two.sync_stream(COPY_STREAM)()  # would hang, had it waited for the second record
        behind = threading.Thread(target=two.sync_event(event))
        behind.start()
        behind.join(0.02)
        assert behind.is_alive()  # the second record is what a Sync issued now means
        compute.open()
        behind.join(5)
        assert not behind.is_alive()


def test_a_wait_on_the_own_stream_queues_nothing(two):
    event = two.event()
    two.record(event, COMPUTE_STREAM)()
    before = two.streams[0].issued
    two.wait(event, COMPUTE_STREAM)()
    assert two.streams[0].issued == before


def test_sync_stream_waits_for_what_was_queued(two):
    start = time.perf_counter_ns()
    two.streams[0].push(spin.address, 1, (5_000_000,))
    two.sync_stream(COMPUTE_STREAM)()
    assert time.perf_counter_ns() - start >= 5_000_000


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


def test_close_drains_and_is_idempotent(device):
    log = np.zeros(101, np.int64)
    hold(device, 0)  # closing opens it
    issue = device.streams[0].prepare(append.address, 1, (address(log), 1))
    for _ in range(100):
        issue()
    memory = device.allocate(64, Space.DEVICE)
    device.close()
    assert log[0] == 100
    device.close()
    memory.free()
    with pytest.raises(DeviceError, match="closed"):
        issue()
    device.synchronize()  # nothing was left undone


def test_closing_runs_nothing_twice():
    """Idle workers are woken by the close itself; the ring still holds the old entries then."""
    for n in range(100):
        words = np.zeros(8, np.int64)
        backend = open_backend(threads=3)
        for _ in range(n % 4 + 1):
            backend.streams[0].push(count_parts.address, 8, (address(words),))
        backend.close()
        np.testing.assert_array_equal(words, n % 4 + 1)


def worker_threads() -> int:
    return sum(t.name.startswith("embedded stream") for t in threading.enumerate())


def test_a_device_nobody_closed_ends_with_its_last_reference():
    before = worker_threads()
    backend = open_backend(threads=2)
    call = backend.streams[0].prepare(spin.address, 1, (0,))
    call()
    assert worker_threads() == before + 3
    del backend
    assert worker_threads() == before
    with pytest.raises(DeviceError, match="closed"):
        call()


LEAK = """
import numpy as np
from tests.gates import hold
from workbench.backend.cpu.device.embedded import open_backend
from workbench.program.commands import Space
device = open_backend(threads=2)
m = device.allocate(1 << 20, Space.PINNED)
gate = hold(device, 0)
for _ in range(100):
    device.copy(m.address, m.address + 64, 1000, 0, False)()
print("leaking", flush=True)
{end}
"""


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("device.not_there", 1)])
def test_an_open_device_does_not_hold_up_the_exit(end, status):
    done = subprocess.run(
        [sys.executable, "-c", LEAK.format(end=end)], capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "leaking\n" and done.returncode == status, done.stderr


def test_options():
    with pytest.raises(DeviceError, match="threads"):
        open_backend(threads=100_000)
    with pytest.raises(DeviceError, match="snapshot"):
        open_backend(threads=1, pageable="sometimes")
    backend = open_backend(threads=2)
    assert backend.description.startswith("embedded device, 2 workers, ")
    assert backend.capabilities.n_streams == len(backend.streams)
    assert isinstance(backend.event(), Event)
    backend.close()
