"""Copies, events, gates, clocks, memory and errors of the cuda backend, on a real GPU."""

from __future__ import annotations

import gc
import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from tests import gates
from tests.gates import hold
from workbench.backend.cuda.device.backend import CudaBackend, open_backend, probe
from workbench.common.errors import DeviceError
from workbench.graph.ir import F16, F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

N = 4096


class Pair:
    """A pinned buffer and a device buffer of N bytes, and copies between them."""

    def __init__(self, backend: CudaBackend, space: Space = Space.PINNED):
        self.backend = backend
        self.host = backend.allocate(N, space)
        self.device = backend.allocate(N, Space.DEVICE)

    def up(self, stream: int = COPY_STREAM):
        return self.backend.copy(self.device.address, self.host.address, N, stream, to_host=False)

    def read(self) -> np.ndarray:
        """The device buffer's bytes, by a stream of its own that nothing else holds up."""
        landing = np.zeros(N, np.uint8)
        self.backend.copy(landing.ctypes.data, self.device.address, N, 7, to_host=True)()
        self.backend.sync_stream(7)()
        return landing


@pytest.fixture
def pair(backend: CudaBackend) -> Pair:
    return Pair(backend)


def test_a_queued_copy_reads_its_pinned_source_late(backend: CudaBackend, pair: Pair):
    pair.host.array[:] = 1
    with hold(backend, COPY_STREAM):
        pair.up()()
        pair.host.array[:] = 2
    backend.sync_stream(COPY_STREAM)()
    assert (pair.read() == 2).all()


def test_a_wait_before_the_overwrite_keeps_the_value(backend: CudaBackend, pair: Pair):
    pair.host.array[:] = 1
    with hold(backend, COPY_STREAM):
        pair.up()()
    backend.sync_stream(COPY_STREAM)()
    pair.host.array[:] = 2
    assert (pair.read() == 1).all()


def test_streams_run_side_by_side(backend: CudaBackend, pair: Pair):
    pair.host.array[:] = 3
    with hold(backend, COMPUTE_STREAM):
        pair.up(COPY_STREAM)()
        backend.sync_stream(COPY_STREAM)()
        assert (pair.read() == 3).all()


def test_a_stream_waits_for_the_latest_record(backend: CudaBackend, pair: Pair):
    other = Pair(backend)
    event = backend.event()
    backend.record(event, COMPUTE_STREAM)()  # an earlier point, long passed
    pair.host.array[:] = 4
    other.host.array[:] = 5
    backend.sync_stream(COMPUTE_STREAM)()
    with hold(backend, COPY_STREAM):
        pair.up(COPY_STREAM)()
        backend.record(event, COPY_STREAM)()
        backend.wait(event, COMPUTE_STREAM)()
        other.up(COMPUTE_STREAM)()
        time.sleep(0.02)
        assert not other.read().any(), "the compute stream did not wait"
    backend.sync_event(event)()
    assert (pair.read() == 4).all()
    backend.synchronize()
    assert (other.read() == 5).all()


def test_an_event_never_recorded_holds_nobody_up(backend: CudaBackend, pair: Pair):
    event = backend.event()
    pair.host.array[:] = 6
    backend.wait(event, COPY_STREAM)()
    pair.up()()
    backend.sync_event(event)()
    backend.sync_stream(COPY_STREAM)()
    assert (pair.read() == 6).all()


def test_copies_return_before_they_are_done(backend: CudaBackend, pair: Pair):
    copy = pair.up()
    with hold(backend, COPY_STREAM):
        start = time.perf_counter()
        copy()
        assert time.perf_counter() - start < 0.01
    backend.synchronize()


def test_pageable_memory_copies_too(backend: CudaBackend):
    pair = Pair(backend, Space.HOST)
    pair.host.array[:] = np.arange(N) % 251
    pair.up()()
    backend.sync_stream(COPY_STREAM)()
    assert np.array_equal(pair.read(), pair.host.array)


def test_a_copy_of_nothing_does_nothing(backend: CudaBackend, pair: Pair):
    backend.copy(pair.device.address, pair.host.address, 0, COPY_STREAM, to_host=False)()
    backend.synchronize()


def test_a_forgotten_gate_opens_by_itself(backend: CudaBackend, monkeypatch):
    monkeypatch.setattr(gates, "GATE_SECONDS", 0.05)
    start = time.perf_counter()
    hold(backend, COPY_STREAM)
    backend.sync_stream(COPY_STREAM)()
    assert 0.04 < time.perf_counter() - start < 2


@pytest.mark.parametrize("space", list(Space))
def test_memory_is_zeroed_and_aligned(backend: CudaBackend, space: Space):
    for nbytes in (0, 1, 1000, 1 << 20):
        memory = backend.allocate(nbytes, space)
        assert memory.address % 256 == 0
        assert memory.nbytes == nbytes
        if space == Space.DEVICE:
            assert memory.array is None
            landing = np.ones(nbytes, np.uint8)
            backend.copy(landing.ctypes.data, memory.address, nbytes, 0, to_host=True)()
            backend.sync_stream(0)()
            assert not landing.any()
        else:
            assert memory.array.nbytes == nbytes
            assert not memory.array.any()
            memory.array[:] = 1
        memory.free()
        memory.free()


def test_teardown_in_any_order():
    other = open_backend()
    kept, freed = other.allocate(N, Space.DEVICE), other.allocate(N, Space.PINNED)
    event, gate = other.event(), hold(other, COPY_STREAM)
    other.record(event, COPY_STREAM)()
    freed_early = other.allocate(N, Space.DEVICE)
    gate.open()
    freed_early.free()
    mark = other.mark(0)
    other.close()
    other.close()
    del mark, event
    gate.open()
    freed.free()
    kept.free()
    assert freed.array is None


def test_pinned_memory_stays_while_an_array_of_it_is_held():
    """Whatever is freed or closed before; device memory goes at once."""
    other = open_backend()
    memory = other.allocate(N, Space.PINNED)
    held = memory.array[3:].view()
    held[:] = 7
    memory.free()
    other.close()
    del memory, other
    gc.collect()
    assert (held == 7).all()


def test_close_opens_gates():
    other = open_backend()
    hold(other, COMPUTE_STREAM)
    start = time.perf_counter()
    other.close()
    assert time.perf_counter() - start < 2


def test_marks_are_on_the_hosts_clock(backend: CudaBackend):
    backend.synchronize()
    before = time.perf_counter_ns()
    begin = backend.mark(COMPUTE_STREAM)
    with hold(backend, COMPUTE_STREAM):
        end = backend.mark(COMPUTE_STREAM)
        time.sleep(0.02)
        opened = time.perf_counter_ns()
    backend.synchronize()
    after = time.perf_counter_ns()
    start_ns, end_ns = backend.resolve(begin, end)
    slack = 200_000
    assert before - slack < start_ns < opened
    assert opened - slack < end_ns < after + slack
    assert end_ns - start_ns > 19e6


def test_marks_are_reused(backend: CudaBackend):
    for _ in range(3):
        marks = [backend.mark(COMPUTE_STREAM) for _ in range(10)]
        backend.synchronize()
        times = [backend.resolve(a, b) for a, b in pairwise(marks)]
        assert all(start <= end for start, end in times)
        assert times == sorted(times)
        marks.clear()
    assert backend._marks.n_made < 40


def test_another_thread_may_issue_after_attach(backend: CudaBackend, pair: Pair):
    pair.host.array[:] = 9
    failed: list[Exception] = []

    def work() -> None:
        try:
            backend.attach()
            pair.up()()
            backend.sync_stream(COPY_STREAM)()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert (pair.read() == 9).all()


def test_probe_names_the_gpu_and_its_driver(backend: CudaBackend):
    line = probe()
    assert line == backend.description
    assert "sm_" in line and "CUDA" in line and "\n" not in line


def test_errors_say_what_failed(backend: CudaBackend, pair: Pair):
    with pytest.raises(DeviceError, match="stream 9 does not exist"):
        backend.sync_stream(9)
    with pytest.raises(DeviceError, match="cannot allocate"):
        backend.allocate(1 << 50, Space.DEVICE)
    with pytest.raises(DeviceError, match=r"GPU 99 does not exist"):
        open_backend(device=99)
    with pytest.raises(DeviceError, match="no option pageable"):
        open_backend(pageable="late")
    bad = backend.copy(64, pair.host.address, N, COPY_STREAM, to_host=False)
    with pytest.raises(DeviceError, match=r"cuMemcpyHtoDAsync failed at copy of 4096 bytes.*VALUE"):
        bad()
    pair.up()()  # and the device still works
    backend.synchronize()


def test_a_wrong_weight_and_a_strange_head_dim_are_refused(backend: CudaBackend):
    with pytest.raises(DeviceError, match="wants 64 bytes, not 60"):
        backend.load_weight(Tensor("w", F32, (4, 4), Kind.WEIGHT), np.zeros(60, np.uint8))
    q, cache = Tensor("q", F32, (1, 2, 12)), Tensor("k", F16, (32, 24), Kind.CACHE)
    mask = Tensor("m", F16, (1, 32))
    node = make("attention", "y", q, cache, cache, mask, n_kv=32, n_head_kv=2, scale=1.0)
    with pytest.raises(DeviceError, match="head_dim 12 is not supported"):
        backend.launch(node, lambda t: 0, 0, 0)


def test_a_node_without_tokens_launches_nothing(backend: CudaBackend):
    w, x = Tensor("w", F32, (8, 8), Kind.WEIGHT), Tensor("x", F32, (0, 8))
    backend.launch(make("mul_mat", "y", w, x), lambda t: 0, 0, 0)()
    backend.synchronize()
