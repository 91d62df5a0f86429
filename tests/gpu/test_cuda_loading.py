"""Loading on the GPU: every byte in its plane, memory given back, and what is refused."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.planes import repacked
from workbench.backend.cuda.device import weights as cuda_weights
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.weights import ENTRY_BYTES, N_ENTRIES, Uploader
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import DTYPES, F16, F32, WEIGHT_DTYPES, DType, Kind, Tensor

pytestmark = pytest.mark.gpu


def weight(name: str, dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    tensor = Tensor(name, dtype, (rows, cols), Kind.WEIGHT)
    rng = np.random.default_rng([rows, cols, DTYPES[dtype.name].block_bytes])
    return tensor, rng.integers(0, 256, tensor.nbytes, np.uint8)


def content(backend: CudaBackend, memory) -> np.ndarray:
    found = np.zeros(memory.nbytes, np.uint8)
    backend.copy(found.ctypes.data, memory.address, memory.nbytes, 0, to_host=True)()
    backend.sync_stream(0)()
    return found


def free_bytes(backend: CudaBackend) -> int:
    backend.synchronize()
    return backend._driver.cupy.cuda.runtime.memGetInfo()[0]


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: d.name)
def test_every_byte_is_in_its_plane(backend: CudaBackend, dtype: DType):
    """One block, odd numbers of them, and more than two entries with a bit; all in one loading."""
    large = 2 * ENTRY_BYTES // dtype.row_bytes(4096) + 3
    shapes = [(1, 256), (3, 768), (33, 1280), (large, 4096), (257, 256)]
    weights = [weight(f"w{i}", dtype, *shape) for i, shape in enumerate(shapes)]
    memory = [backend.load_weight(*w) for w in weights]
    backend.finish_loading()
    for (tensor, data), there in zip(weights, memory, strict=True):
        assert np.array_equal(content(backend, there), repacked(data, dtype)), tensor
        there.free()


def test_all_types_through_a_ring_that_is_used_again(backend: CudaBackend, monkeypatch):
    """Entries of 64 KiB, filled hundreds of times: an entry filled too early would show."""
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 64 << 10)
    monkeypatch.setattr(cuda_weights, "N_ENTRIES", 3)
    weights = [
        weight(f"{dtype.name}.{i}", dtype, rows, 1024)
        for i, rows in enumerate((1, 700, 63, 1500))
        for dtype in WEIGHT_DTYPES
    ]
    memory = [backend.load_weight(*w) for w in weights]
    backend.finish_loading()
    for (tensor, data), there in zip(weights, memory, strict=True):
        assert np.array_equal(content(backend, there), repacked(data, tensor.dtype)), tensor
        there.free()


@pytest.mark.alone
def test_loading_holds_its_buffers_and_gives_them_back(backend: CudaBackend):
    first = backend.load_weight(*weight("w", F16, 8, 64))  # makes the streams
    backend.finish_loading()
    first.free()
    before = free_bytes(backend)
    tensor, data = weight("w", F32, 1 << 14, 4096)
    memory = backend.load_weight(tensor, data)
    assert before - free_bytes(backend) <= tensor.nbytes + N_ENTRIES * ENTRY_BYTES + (4 << 20)
    backend.finish_loading()
    memory.free()
    assert before - free_bytes(backend) <= 4 << 20
    assert not [t for t in threading.enumerate() if t.name.startswith("loading")]


@pytest.mark.alone
def test_interrupted_loading_gives_the_gpu_back(tiny_model, monkeypatch):
    path = tiny_model("tiny-llama", "Q4_0")
    with Engine.load(path, device="cuda", n_ctx=64, toggles=Toggles()) as engine:
        whole = engine.step([1, 2, 3])
        runtime = engine._open.backend._driver.cupy.cuda.runtime
    before, load, n_loads = runtime.memGetInfo()[0], Uploader.load, []

    def interrupted(self: Uploader, tensor: Tensor, data: np.ndarray):
        n_loads.append(tensor.name)
        if len(n_loads) == 9:
            raise KeyboardInterrupt
        return load(self, tensor, data)

    monkeypatch.setattr(Uploader, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Engine.load(path, device="cuda", n_ctx=64, toggles=Toggles())
    monkeypatch.undo()
    assert not [t for t in threading.enumerate() if t.name.startswith("loading")]
    assert before - runtime.memGetInfo()[0] <= 4 << 20
    with Engine.load(path, device="cuda", n_ctx=64, toggles=Toggles()) as engine:
        assert np.array_equal(engine.step([1, 2, 3]), whole)
