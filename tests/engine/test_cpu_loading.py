"""Loading on the CPU devices: the bytes, whatever the workers, and what an interruption leaves."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from workbench.backend.cpu.compile import host_isas
from workbench.backend.cpu.device import embedded, host
from workbench.backend.cpu.device.ring import Ring
from workbench.backend.cpu.kernels import op_table
from workbench.common.errors import DeviceError
from workbench.config import EngineConfig, Toggles
from workbench.engine.engine import Engine
from workbench.engine.load import Loaded
from workbench.graph.ir import F32, I32, QUANTISED, WEIGHT_DTYPES, DType, Kind, Tensor
from workbench.graph.ops import make


def weight(dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    tensor = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    rng = np.random.default_rng(rows)
    return tensor, rng.integers(0, 256, tensor.nbytes, np.uint8)


def content(memory) -> bytes:
    return ctypes.string_at(memory.address, memory.nbytes)


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: d.name)
def test_workers_together_load_what_one_would(dtype: DType, monkeypatch):
    """Parts of one group of rows up to all in one part, on one to three workers."""
    for rows in (1, 16, 17, 100):
        tensor, data = weight(dtype, rows, 512)
        layout = op_table.weight_layout(dtype, rows, 512)
        alone = np.zeros(op_table.repacked_bytes(dtype, rows, 512, layout), np.uint8)
        op_table.repack(alone.ctypes.data, data.ctypes.data, dtype, rows, 512, layout)
        assert (layout == "file") == (dtype not in QUANTISED)
        for workers in (1, 2, 3):
            for part_bytes in (1, 100, 1 << 30):
                monkeypatch.setattr(embedded, "LOAD_PART_BYTES", part_bytes)
                device = embedded.open_backend(threads=workers)
                memory = device.load_weight(tensor, data)
                data_then, data[:] = data.copy(), 0xEE  # loaded is loaded: read no later
                assert content(memory) == alone.tobytes(), (rows, workers, part_bytes)
                data[:] = data_then
                device.close()


def test_a_weight_in_memory_that_another_had_is_whole(two):
    """New memory is not always zero, and a layout belongs to an address only while it lives."""
    for dtype in (*WEIGHT_DTYPES, *WEIGHT_DTYPES):
        tensor, data = weight(dtype, 40, 256)
        memory = two.load_weight(tensor, data)
        layout = op_table.weight_layout(dtype, 40, 256)
        assert two._layouts.get(memory.address, "file") == layout
        memory.free()
    assert not two._layouts


@pytest.mark.parametrize("wrong", [0, 1, 287, 289, 576])
def test_a_weight_of_the_wrong_size_is_refused(two, wrong: int):
    tensor = Tensor("blk.0.w", DType("Q4_0", 32, 18), (8, 64), Kind.WEIGHT)
    with pytest.raises(DeviceError, match=rf"blk\.0\.w.* wants 288 bytes, not {wrong}$"):
        two.load_weight(tensor, np.zeros(wrong, np.uint8))


def test_the_host_uses_the_files_bytes_in_place(tiny_model):
    config = EngineConfig(device="host", n_ctx=64)
    model = Loaded(tiny_model("tiny-llama", "Q4_K"), config).share()
    for buffer, memory in model.memory.items():
        assert memory.address == model.model.file.data(buffer.name).ctypes.data
    model.release()


def test_the_embedding_stays_the_files_beside_a_device(tiny_model):
    config = EngineConfig(device="embedded", n_ctx=64)
    model = Loaded(tiny_model("tiny-llama", "Q4_K"), config).share()
    embedding = model.residents[0][model.model.embedding]
    data = model.model.file.data(model.model.embedding.name)
    assert model.memory[embedding.buffer].address == data.ctypes.data
    assert [t.name for t in model.residents[0]] == ["token_embd.weight"]
    model.release()


def left_behind(path: Path) -> tuple[int, int, int]:
    """Maps of the file, open files, threads."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count(path.name)
    return maps, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("at", [1, 2, 20])
def test_interrupted_while_the_workers_work(tiny_model, monkeypatch, tmp_path, at: int):
    """Ctrl-C in the wait for a weight: the workers end their work on the map before it goes."""
    path = tmp_path / "interrupted.gguf"  # a file that no engine of another test has open
    shutil.copyfile(tiny_model("tiny-llama", "Q8_0"), path)
    before, wait, waits = left_behind(path), Ring.wait, []

    def interrupted(ring: Ring, sequence: int) -> None:
        waits.append(sequence)
        if len(waits) == at:
            raise KeyboardInterrupt
        wait(ring, sequence)

    monkeypatch.setattr(Ring, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Loaded(path, EngineConfig(device="embedded", n_ctx=64))
    monkeypatch.undo()
    assert len(waits) > at, "nobody waited for the workers afterwards"
    assert before[0] == 0 and left_behind(path) == before
    with Engine.load(
        path, device="embedded", n_ctx=64, toggles=Toggles()
    ) as engine:  # and a new one is whole
        assert np.isfinite(engine.step([1, 2, 3])).all()


@pytest.mark.parametrize("opener", [host.open_backend, embedded.open_backend])
def test_the_cpu_refuses_no_type_of_a_model_file(opener):
    """Every type has kernels, for any batch."""
    backend = opener(threads=1)
    for dtype, n_tokens in product(WEIGHT_DTYPES, (1, 9)):
        w, x = Tensor("w", dtype, (8, 256), Kind.WEIGHT), Tensor("x", F32, (n_tokens, 256))
        ids = Tensor("ids", I32, (n_tokens,))
        assert not backend.refuses(make("get_rows", "r", w, ids))
        assert not backend.refuses(make("mul_mat", "m", w, x, activations="float"))
    backend.close()
    isa = host_isas()[0]
    for dtype in WEIGHT_DTYPES:
        for layout in {"file", op_table.weight_layout(dtype, 8, 256)}:
            for op in ("mul_mat", "get_rows", *["mul_mat_float"] * (dtype in QUANTISED)):
                assert callable(op_table._bodies()[op](layout, isa, dtype.name))
