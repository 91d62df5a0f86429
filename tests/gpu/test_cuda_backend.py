"""Gates, clocks, memory, threads and errors of the cuda backend, on a real GPU. The clauses that
every device keeps are in test_cuda_conformance.py."""

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
from workbench.graph.ir import F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

N = 4096


def test_a_gate_opens_by_itself_and_when_its_device_closes(backend: CudaBackend, monkeypatch):
    other = open_backend()
    hold(other, COMPUTE_STREAM)
    start = time.perf_counter()
    other.close()
    assert time.perf_counter() - start < 2
    monkeypatch.setattr(gates, "GATE_SECONDS", 0.05)
    start = time.perf_counter()
    hold(backend, COPY_STREAM)
    backend.sync_stream(COPY_STREAM)()
    assert 0.04 < time.perf_counter() - start < 2


@pytest.mark.parametrize("space", list(Space))
def test_memory_is_zeroed_and_aligned(backend: CudaBackend, space: Space):
    for nbytes in (0, 1, 1000, 1 << 20):
        memory = backend.allocate(nbytes, space)
        assert memory.address % 256 == 0 and memory.nbytes == nbytes
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
    """Pinned memory stays while an array of it is held, whatever is freed or closed before."""
    other = open_backend()
    kept, freed = other.allocate(N, Space.DEVICE), other.allocate(N, Space.PINNED)
    held = freed.array[3:].view()
    held[:] = 7
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
    del freed, kept, other
    gc.collect()
    assert (held == 7).all()


def test_marks_are_on_the_hosts_clock_and_reused(backend: CudaBackend):
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
    for _ in range(3):
        marks = [backend.mark(COMPUTE_STREAM) for _ in range(10)]
        backend.synchronize()
        times = [backend.resolve(a, b) for a, b in pairwise(marks)]
        assert all(start <= end for start, end in times) and times == sorted(times)
        marks.clear()
    assert backend._marks.n_made < 40


def test_another_thread_may_issue_after_attach(backend: CudaBackend):
    host, device = backend.allocate(N, Space.PINNED), backend.allocate(N, Space.DEVICE)
    host.array[:] = 9
    failed: list[Exception] = []

    def work() -> None:
        try:
            backend.attach()
            backend.copy(device.address, host.address, N, COPY_STREAM, to_host=False)()
            backend.sync_stream(COPY_STREAM)()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    landing = np.zeros(N, np.uint8)
    backend.copy(landing.ctypes.data, device.address, N, 0, to_host=True)()
    backend.sync_stream(0)()
    assert (landing == 9).all()


def test_probe_names_the_gpu_and_its_driver(backend: CudaBackend):
    line = probe()
    assert line == backend.description
    assert "sm_" in line and "CUDA" in line and "\n" not in line


def test_errors_say_what_failed(backend: CudaBackend):
    host, device = backend.allocate(N, Space.PINNED), backend.allocate(N, Space.DEVICE)
    with pytest.raises(DeviceError, match="stream 9 does not exist"):
        backend.sync_stream(9)
    with pytest.raises(DeviceError, match="cannot allocate"):
        backend.allocate(1 << 50, Space.DEVICE)
    with pytest.raises(DeviceError, match=r"GPU 99 does not exist"):
        open_backend(device=99)
    with pytest.raises(DeviceError, match="no option pageable"):
        open_backend(pageable="late")
    with pytest.raises(DeviceError, match="wants 64 bytes, not 60"):
        backend.load_weight(Tensor("w", F32, (4, 4), Kind.WEIGHT), np.zeros(60, np.uint8))
    backend.finish_loading()
    bad = backend.copy(64, host.address, N, COPY_STREAM, to_host=False)
    with pytest.raises(DeviceError, match=r"cuMemcpyHtoDAsync failed at copy of 4096 bytes.*VALUE"):
        bad()
    # and the device still works, also on nothing
    backend.copy(device.address, host.address, N, COPY_STREAM, to_host=False)()
    backend.copy(device.address, host.address, 0, COPY_STREAM, to_host=False)()
    w, x = Tensor("w", F32, (8, 8), Kind.WEIGHT), Tensor("x", F32, (0, 8))
    backend.launch(make("mul_mat", "y", w, x), lambda t: 0, 0, 0)()
    backend.synchronize()
