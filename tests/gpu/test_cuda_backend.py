"""Clocks, errors and loading of the cuda backend, on a real GPU. What every
device keeps is in test_cuda_conformance.py."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from tests.gates import hold
from tests.gpu.harness import fetched, free_bytes
from tests.planes import repacked
from workbench.backend.cuda.device import weights as cuda_weights
from workbench.backend.cuda.device.backend import CudaBackend, open_backend, probe
from workbench.backend.cuda.device.weights import ENTRY_BYTES, N_ENTRIES, Uploader
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import F16, F32, WEIGHT_DTYPES, DType, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

N = 4096


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
    assert opened - slack < end_ns < after + slack and end_ns - start_ns > 19e6
    for _ in range(3):
        marks = [backend.mark(COMPUTE_STREAM) for _ in range(10)]
        backend.synchronize()
        times = [backend.resolve(a, b) for a, b in pairwise(marks)]
        assert all(start <= end for start, end in times) and times == sorted(times)
        marks.clear()
    assert backend._marks.n_made < 40


def test_errors_say_what_failed(backend: CudaBackend):
    host, device = (backend.allocate(N, space) for space in (Space.PINNED, Space.DEVICE))
    w, x = Tensor("w", F32, (8, 8), Kind.WEIGHT), Tensor("x", F32, (0, 8))
    bad = backend.copy(64, host.address, N, COPY_STREAM, to_host=False)
    for call, words in (
        (lambda: backend.sync_stream(9), "stream 9 does not exist"),
        (lambda: backend.allocate(1 << 50, Space.DEVICE), "cannot allocate"),
        (lambda: open_backend(device=99), "GPU 99 does not exist"),
        (lambda: open_backend(pageable="late"), "no option pageable"),
        (lambda: backend.load_weight(w, np.zeros(60, np.uint8)), "wants 256 bytes, not 60"),
        (bad, "cuMemcpyHtoDAsync failed at copy of 4096 bytes.*VALUE"),
    ):
        with pytest.raises(DeviceError, match=words):
            call()
        backend.finish_loading()
    # and the device still works, also on nothing
    backend.copy(device.address, host.address, N, COPY_STREAM, to_host=False)()
    backend.copy(device.address, host.address, 0, COPY_STREAM, to_host=False)()
    backend.launch(make("mul_mat", "y", w, x), lambda t: 0, 0, 0)()
    backend.synchronize()
    assert probe() == backend.description


# loading ------------------------------------------------------------------------------------------


def weight(dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    tensor = Tensor(f"{dtype.name} {rows}", dtype, (rows, cols), Kind.WEIGHT)
    rng = np.random.default_rng([rows, cols, dtype.block_bytes])
    return tensor, rng.integers(0, 256, tensor.nbytes, np.uint8)


def test_all_types_through_a_ring_that_is_used_again(backend: CudaBackend, monkeypatch):
    """Entries of 64 KiB, filled hundreds of times: an entry filled too early would show. One block
    and odd numbers of them, all in one loading; every byte must be in its plane."""
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 64 << 10)
    monkeypatch.setattr(cuda_weights, "N_ENTRIES", 3)
    shapes = (1, 256), (3, 768), (1, 1024), (700, 1024), (63, 1024), (257, 256), (1500, 1024)
    weights = [weight(dtype, *shape) for shape in shapes for dtype in WEIGHT_DTYPES]
    memory = [backend.load_weight(*w) for w in weights]
    backend.finish_loading()
    for (tensor, data), there in zip(weights, memory, strict=True):
        found = fetched(backend, there.address, there.nbytes)
        assert np.array_equal(found, repacked(data, tensor.dtype)), tensor
        there.free()


def loaders() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("loading")]


def test_loading_holds_its_buffers_and_gives_them_back(backend: CudaBackend):
    first = backend.load_weight(*weight(F16, 8, 64))  # makes the streams
    backend.finish_loading()
    first.free()
    before = free_bytes(backend)
    tensor, data = weight(F32, 1 << 14, 4096)
    memory = backend.load_weight(tensor, data)
    assert before - free_bytes(backend) <= tensor.nbytes + N_ENTRIES * ENTRY_BYTES + (4 << 20)
    backend.finish_loading()
    memory.free()
    assert before - free_bytes(backend) <= 4 << 20 and not loaders()


def test_interrupted_loading_gives_the_gpu_back(backend, tiny_model, monkeypatch):
    load, n_loads = Uploader.load, []

    def interrupted(self: Uploader, tensor: Tensor, data: np.ndarray):
        n_loads.append(tensor.name)
        if len(n_loads) == 9:
            raise KeyboardInterrupt
        return load(self, tensor, data)

    def answer() -> np.ndarray:
        path = tiny_model("tiny-llama", "Q4_0")
        with Engine.load(path, device="cuda", n_ctx=64, toggles=Toggles()) as engine:
            return engine.step([1, 2, 3]).copy()

    whole, before = answer(), free_bytes(backend)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Uploader, "load", interrupted)
        answer()
    assert before - free_bytes(backend) <= 4 << 20 and not loaders()
    assert np.array_equal(answer(), whole)
