"""The embedded device keeps a GPU's contract: order, late reads, events, and no GIL in its workers.

Own small kernels stand in for the real ones where only order matters; the device runs both alike.
"""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from numba import cfunc

from workbench.backend import embedded
from workbench.backend.atomics import fetch_add, load, now_ns, put, store
from workbench.backend.embedded import Event
from workbench.backend.ring import KERNEL, MAX_ARGS, RING_SIZE
from workbench.errors import DeviceError
from workbench.graph.ir import F16, F32, Q8_0, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space


def open_backend(**options) -> Any:
    return embedded.open_backend(**options)


# test kernels ------------------------------------------------------------------------------------


@cfunc(KERNEL, cache=True)
def append(args, lane, n_lanes):
    """args: log, value. log[0] counts the values behind it."""
    log = load(args)
    n = load(log) + 1
    put(log + 8 * n, load(args + 8))
    store(log, n)


@cfunc(KERNEL, cache=True)
def work(args, lane, n_lanes):
    """args: sink, rounds. A chain of integer steps, shared evenly by the lanes."""
    x = load(args) + lane
    for _ in range(load(args + 8) // n_lanes):
        x = x * 6364136223846793005 + 1442695040888963407
        x ^= x >> 29
    put(load(args) + 8 * lane, x)


@cfunc(KERNEL, cache=True)
def spin(args, lane, n_lanes):
    """args: nanoseconds. Occupies its lane that long."""
    end = now_ns() + load(args)
    while now_ns() < end:
        pass


@cfunc(KERNEL, cache=True)
def rotate(args, lane, n_lanes):
    """args: words, shift. words[(lane + shift) % n_lanes] += 1, and not atomically."""
    word = load(args) + 8 * ((lane + load(args + 8)) % n_lanes)
    put(word, load(word) + 1)


@cfunc(KERNEL, cache=True)
def count_parts(args, lane, n_lanes):
    """args: words. words[lane] += 1."""
    fetch_add(load(args) + 8 * lane, 1)


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} lanes")
def device(request):
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


@pytest.fixture
def two():
    backend = open_backend(threads=2)
    yield backend
    backend.close()


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


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
    expected = [4000 * sum(p > lane for p in calls) for lane in range(16)]
    np.testing.assert_array_equal(words, expected)


def test_soak_of_both_streams(device):
    """100k launches with waits across streams; the copy stream must see every value in turn."""
    log, n = np.zeros(100_001, np.int64), 50_000
    event, back = device.event(), device.event()
    compute, copies = device.streams
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
    with two.gate(0) as gate:
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
    n = 1 << 20  # large enough for several lanes
    source, there, result = (backend.allocate(n, s) for s in (space, Space.DEVICE, Space.PINNED))
    up = backend.copy(there.address, source.address, n, stream, to_host=False)
    down = backend.copy(result.address, there.address, n, stream, to_host=True)
    with backend.gate(stream):
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
    with two.gate(COPY_STREAM):
        two.copy(result.address, source.address, source.nbytes, COPY_STREAM, to_host=True)()
        source.free()
        np.zeros(100_000, np.float32)[:] = 5.0  # would take the freed block
    two.sync_stream(COPY_STREAM)()
    assert (view == 3.0).all()


# events ------------------------------------------------------------------------------------------


def test_an_event_never_recorded_is_nothing(device):
    event = device.event()
    with device.gate(COMPUTE_STREAM):
        device.sync_event(event)()
        device.wait(event, COPY_STREAM)()
        device.sync_stream(COPY_STREAM)()
    device.synchronize()


def test_a_wait_holds_the_stream_until_the_record(two):
    log, event = np.zeros(4, np.int64), two.event()
    with two.gate(COMPUTE_STREAM):
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
    with two.gate(COPY_STREAM) as copies, two.gate(COMPUTE_STREAM) as compute:
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


# time --------------------------------------------------------------------------------------------


def test_spans_are_on_the_host_clock(device):
    before = time.perf_counter_ns()
    begin = device.mark(COMPUTE_STREAM)
    device.streams[0].push(spin.address, 1, (1_000_000,))
    device.streams[0].push(spin.address, 2, (1_000_000,))
    end = device.mark(COMPUTE_STREAM)
    device.synchronize()
    after = time.perf_counter_ns()
    start_ns, end_ns = device.resolve(begin, end)
    assert before <= start_ns < end_ns <= after
    assert end_ns - start_ns >= 2_000_000
    assert device.resolve(end, end) == (end_ns, end_ns)


def test_marks_of_unfinished_work_are_refused(two):
    with two.gate(0):
        begin = two.mark(0)
        two.streams[0].push(spin.address, 1, (0,))
        end = two.mark(0)
        with pytest.raises(DeviceError, match="no stamp"):
            two.resolve(begin, end)


def test_two_streams_run_side_by_side(two):
    begin = [two.mark(s) for s in (0, 1)]
    for ring in two.streams:
        ring.push(spin.address, 1, (20_000_000,))
    end = [two.mark(s) for s in (0, 1)]
    two.synchronize()
    (start0, end0), (start1, end1) = map(two.resolve, begin, end)
    assert max(start0, start1) < min(end0, end1)


@pytest.fixture
def no_handover():
    """Python keeps the GIL unless it asks for something that gives it up."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def queue_work(ring, lanes: int, sink: np.ndarray, n: int) -> tuple[int, int]:
    """Queues n kernels that keep one lane busy for about 50 us each: first entry, end."""
    call = ring.prepare(work.address, 4 * lanes, (address(sink), 40_000))
    first = ring.issued
    for _ in range(n):
        call()
    return first, ring.issued


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_device_runs_while_python_has_the_gil(lanes, no_handover):
    """5 ms of kernels are queued; the host then does nothing but Python and never gives the GIL up.

    A worker that needs the GIL would not run one kernel. How fast ours is beside a busy host is
    the next test's matter: where the machine is loaded, the host's 5 ms become as many as the
    device needs.
    """
    backend = open_backend(threads=lanes)
    ring, sink = backend.streams[0], np.zeros(64, np.int64)
    start = time.perf_counter_ns()
    first, end = queue_work(ring, lanes, sink, 100)
    while (now := time.perf_counter_ns()) < start + 5_000_000 or (
        ring.completed < end and now < start + 5_000_000_000
    ):
        pass
    assert ring.completed == end
    assert start <= ring.stamp(first)[0] < ring.stamp(end - 1)[1] <= time.perf_counter_ns()
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_device_is_as_fast_beside_busy_python(lanes, no_handover):
    """The kernels' spans lie within the time one lane needs with the host asleep, and a third more
    (with one core, twice that: host and device share it). The best of up to 200 tries each, for the
    machine may be busy with other things."""
    backend, reference = open_backend(threads=lanes), open_backend(threads=1)
    sink, cores = np.zeros(64, np.int64), len(os.sched_getaffinity(0))
    allowed, tries = 1.35 if cores > 1 else 2.7, []
    alone = best = 1 << 62
    for _ in range(200):
        ring = reference.streams[0]
        first, end = queue_work(ring, 1, sink, 100)
        ring.wait(end)
        alone = min(alone, ring.stamp(end - 1)[1] - ring.stamp(first)[0])
        ring = backend.streams[0]
        start = time.perf_counter_ns()
        first, end = queue_work(ring, lanes, sink, 100)
        while time.perf_counter_ns() < start + allowed * alone:
            pass
        ring.wait(end)
        tries.append(ring.stamp(end - 1)[1] - start)
        best = min(best, tries[-1])
        if best <= allowed * alone:
            break
    backend.close()
    reference.close()
    assert best <= allowed * alone, (alone, tries)


def test_an_idle_device_costs_next_to_nothing(two):
    two.streams[0].push(spin.address, 1, (0,))
    two.synchronize()
    time.sleep(0.02)  # past the time it stays awake
    cpu, wall = time.process_time(), time.perf_counter()
    time.sleep(0.5)
    assert (time.process_time() - cpu) / (time.perf_counter() - wall) < 0.03


def test_a_waiting_host_sleeps(two):
    two.streams[0].push(spin.address, 1, (0,))
    with two.gate(0) as gate:
        threading.Timer(0.3, gate.open).start()
        cpu = time.process_time()
        two.synchronize()
        assert time.process_time() - cpu < 0.05


# ends --------------------------------------------------------------------------------------------


def test_ctrl_c_interrupts_a_wait(two):
    with two.gate(0):
        two.streams[0].push(spin.address, 1, (0,))
        threading.Timer(0.05, _thread.interrupt_main).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            two.synchronize()
        assert time.perf_counter() - start < 2
    two.synchronize()  # and the device is none the worse


def test_close_drains_and_is_idempotent(device):
    log = np.zeros(101, np.int64)
    device.gate(0)  # closing opens it
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


def lane_threads() -> int:
    return sum(t.name.startswith("embedded stream") for t in threading.enumerate())


def test_a_device_nobody_closed_ends_with_its_last_reference():
    before = lane_threads()
    backend = open_backend(threads=2)
    call = backend.streams[0].prepare(spin.address, 1, (0,))
    call()
    assert lane_threads() == before + 3
    del backend
    assert lane_threads() == before
    with pytest.raises(DeviceError, match="closed"):
        call()


LEAK = """
import numpy as np
from workbench.backend.embedded import open_backend
from workbench.program.commands import Space
device = open_backend(threads=2)
m = device.allocate(1 << 20, Space.PINNED)
gate = device.gate(0)
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
    assert backend.description.startswith("embedded device, 2 lanes, ")
    assert backend.capabilities.n_streams == len(backend.streams)
    assert isinstance(backend.event(), Event)
    backend.close()


# real kernels ------------------------------------------------------------------------------------


def forward(backend, rng) -> bytes:
    """A chain that splits: rms_norm, quantize, mul_mat with a Q8_0 weight, attention over it."""
    tokens, cols, heads, n_kv = 5, 1024, 16, 256
    x = Tensor("x", F32, (tokens, cols), Kind.INPUT)
    w = Tensor("w", Q8_0, (cols, cols), Kind.WEIGHT)
    k, v = (Tensor(n, F16, (n_kv, cols // 4), Kind.CACHE) for n in "kv")
    mask = Tensor("mask", F16, (tokens, n_kv), Kind.INPUT)
    norm = make("rms_norm", "norm", x, eps=1e-5)
    quantised = make("quantize", "quantised", norm.output)
    product = make("mul_mat", "product", w, quantised.output)
    attention = make(
        "attention", "attention", product.output.view(tokens, heads, cols // heads), k, v, mask,
        n_kv=n_kv, n_head_kv=heads // 4, scale=0.125,
    )  # fmt: skip
    values = {
        x: rng.standard_normal(x.shape, np.float32),
        k: rng.standard_normal(k.shape, np.float32).astype(np.float16),
        v: rng.standard_normal(v.shape, np.float32).astype(np.float16),
        mask: np.zeros(mask.shape, np.float16),
    }
    blocks = np.zeros((cols * cols // 32, 34), np.uint8)
    blocks[:, :2] = np.full(len(blocks), 0.01, np.float16).view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32), np.uint8)
    memory = {w: backend.load_weight(w, blocks.reshape(-1))}
    for tensor, value in values.items():
        staging = backend.allocate(tensor.nbytes, Space.PINNED)
        memory[tensor] = backend.allocate(tensor.nbytes, Space.DEVICE)
        staging.array[:] = value.view(np.uint8).reshape(-1)
        backend.copy(memory[tensor].address, staging.address, tensor.nbytes, 0, to_host=False)()
    nodes = (norm, quantised, product, attention)
    for node in nodes:
        memory[node.output] = backend.allocate(node.output.nbytes, Space.DEVICE)
        scratch = backend.allocate(max(1, backend.scratch_bytes(node)), Space.DEVICE)
        backend.launch(node, lambda t: memory[t.storage].address, scratch.address, 0)()
    result = backend.allocate(attention.output.nbytes, Space.PINNED)
    last = memory[attention.output].address
    backend.copy(result.address, last, attention.output.nbytes, 0, to_host=True)()
    backend.synchronize()
    return result.array.tobytes()


def test_results_are_the_same_bits_for_any_number_of_lanes():
    from workbench.backend.host import open_backend as open_host

    results = []
    for lanes in (1, 2, 3):
        for open_one in (open_backend, open_host):
            backend = open_one(threads=lanes)
            results.append(forward(backend, np.random.default_rng(0)))
            backend.close()
    assert np.isfinite(np.frombuffer(results[0], np.float32)).all()
    assert np.frombuffer(results[0], np.float32).any()
    assert all(r == results[0] for r in results)


def test_a_weight_of_the_wrong_size_is_refused(two):
    with pytest.raises(DeviceError, match="wants"):
        two.load_weight(Tensor("w", F32, (4, 4), Kind.WEIGHT), np.zeros(60, np.uint8))


def test_a_repacked_weight_has_no_gather(two):
    w, ids = Tensor("w", Q8_0, (64, 64), Kind.WEIGHT), Tensor("ids", F32, (1,))
    memory = two.load_weight(w, np.zeros(w.nbytes, np.uint8))
    node = make("get_rows", "rows", w, Tensor("ids", ids.dtype._replace(name="I32"), (1,)))
    with pytest.raises(DeviceError, match="place that node on the host"):
        two.launch(node, lambda t: memory.address, 0, 0)
