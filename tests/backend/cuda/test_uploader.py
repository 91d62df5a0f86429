"""Weights on their way to a GPU, without one: bytes, threads and entries, and what is refused."""

from __future__ import annotations

import ctypes
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.planes import planes, repacked
from workbench.backend.cuda.device import weights as cuda_weights
from workbench.backend.cuda.device.weights import KINDS, Uploader, refuses
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.common.errors import DeviceError
from workbench.graph import ir
from workbench.graph.ops import make
from workbench.program.commands import Space

COPIES, REPACKS = 0, 1


class Memory:
    """Host memory that stands for either kind; filled with 0xA5 and guarded after its end."""

    def __init__(self, nbytes: int):
        self.block = np.full(nbytes + 256, 0xA5, np.uint8)
        self.array: np.ndarray | None = self.block[:nbytes]
        self.address, self.nbytes = int(self.block.ctypes.data), nbytes

    def free(self) -> None:
        self.array = None


class LateDriver:
    """Two streams whose commands run when somebody waits for them, and no sooner."""

    def __init__(self) -> None:
        self.queues: list[list[Any]] = [[], []]
        self.done = [0, 0]
        self.calls: list[str] = []
        self.memory: dict[Space, list[Memory]] = {space: [] for space in Space}
        self.fail_at: tuple[str, int] = "", 0

    def event(self) -> Any:
        return SimpleNamespace(handle=[])  # (stream, commands before it), the latest last

    def allocate(self, nbytes: int, space: Space) -> Memory:
        self.memory[space].append(Memory(nbytes))
        return self.memory[space][-1]

    def run(self, stream: int, until: int) -> None:
        while self.done[stream] < until:
            self.queues[stream][self.done[stream]]()
            self.done[stream] += 1

    def call(self, function: str, what: str, *args: Any) -> None:
        self.calls.append(function)
        if self.fail_at == (function, self.calls.count(function)):
            raise KeyboardInterrupt
        match function:
            case "cuMemcpyHtoDAsync":
                dst, src, n, stream = args
                self.queues[stream].append(lambda: ctypes.memmove(dst, src, n))
            case "cuEventRecord":
                args[0].append((args[1], len(self.queues[args[1]])))
            case "cuStreamWaitEvent":
                latest = args[1][-1]
                self.queues[args[0]].append(lambda: self.run(*latest))
            case "cuEventSynchronize":
                self.run(*args[0][-1])
            case "cuStreamSynchronize":
                self.run(args[0], len(self.queues[args[0]]))
            case "cuMemsetD8Async":  # zeroes up to a multiple of 16: this memory has nothing there
                dst, value, n, _ = args
                assert (value, (dst + n) % 16) == (0, 0) and 0 < n < 16

    def prepare(self, kernel: Kernel, stream: int, what: str) -> Any:
        return lambda: self.queues[stream].append(lambda: self.repack(kernel))

    def repack(self, kernel: Kernel) -> None:
        """kernels/repack.cu by tests/planes.py: only bytes of the blocks named are written."""
        dtype = ir.DTYPES[kernel.function.removeprefix("repack_")]
        dst, src, first, n, total = (int(a) for a in kernel.args)
        assert kernel.file == "repack" and src % 16 == 0 and dst % 16 == dst % 256 % 16
        assert kernel.grid[0] * kernel.block >= n * dtype.block // 32 > 0
        blocks = np.frombuffer(ctypes.string_at(src, n * dtype.block_bytes), np.uint8)
        for piece in planes(blocks, dtype):
            width = piece.shape[1]
            ctypes.memmove(dst + first * width, piece.tobytes(), piece.nbytes)
            dst += total * width


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 8192)
    monkeypatch.setattr(cuda_weights, "N_ENTRIES", 3)
    yield LateDriver()
    assert not [t for t in threading.enumerate() if t.name.startswith("loading")]


def uploader(driver: Any) -> Uploader:
    return Uploader(driver, driver.allocate, driver.prepare, COPIES, REPACKS)


def weight(dtype: ir.DType, rows: int, cols: int) -> tuple[ir.Tensor, np.ndarray]:
    tensor = ir.Tensor("w", dtype, (rows, cols), ir.Kind.WEIGHT)
    data = np.random.default_rng(rows).integers(0, 256, tensor.nbytes, np.uint8)
    data.flags.writeable = False
    return tensor, data


def test_every_byte_arrives_in_its_plane(late: LateDriver):
    """Odd sizes of every type, between them small ones; entries are reused many times."""
    kinds = [(kind, rows) for rows in (1, 3, 37) for kind in ir.WEIGHT_DTYPES]
    weights = [w for of in kinds for w in (weight(*of, 768), weight(ir.F32, 1, 5))]
    up = uploader(late)
    memory: list[Any] = [up.load(*w) for w in weights]
    assert "cuStreamSynchronize" not in late.calls, "a wait before the end"
    up.finish()
    for (tensor, data), there in zip(weights, memory, strict=True):
        assert np.array_equal(there.array, repacked(data, tensor.dtype)), tensor
        assert (there.block[tensor.nbytes :] == 0xA5).all(), f"written after {tensor}"
    assert late.calls.count("cuStreamSynchronize") == 2
    assert late.calls.count("cuEventSynchronize") > 3 * cuda_weights.N_ENTRIES
    entries = [m for m in late.memory[Space.PINNED] + late.memory[Space.DEVICE] if m.array is None]
    assert len(entries) == 2 * cuda_weights.N_ENTRIES


def test_a_block_as_large_as_an_entry_fits_and_no_more(late: LateDriver, monkeypatch):
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 256)
    tensor, data = weight(ir.Q6_K, 5, 512)
    up = uploader(late)
    there: Any = up.load(tensor, data)
    up.finish()
    assert np.array_equal(there.array, repacked(data, ir.Q6_K))


@pytest.mark.parametrize("at", ["cuMemcpyHtoDAsync", "cuEventSynchronize", "cuStreamSynchronize"])
def test_interrupted_it_leaves_no_thread_nor_entry(late: LateDriver, at: str):
    late.fail_at = at, 2
    up = uploader(late)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            up.load(*weight(ir.MXFP4, 64, 512))
        up.finish()
    up.close()
    up.close()
    pinned = late.memory[Space.PINNED]
    assert pinned and all(m.array is None for m in pinned)
    # weights are their owner's to free
    freed = [m for m in late.memory[Space.DEVICE] if m.array is None]
    assert [m.nbytes for m in freed] == [cuda_weights.ENTRY_BYTES] * len(pinned)


def test_what_is_wrong_is_refused_and_a_workers_failure(late: LateDriver, monkeypatch):
    up = uploader(late)
    tensor, data = weight(ir.Q4_0, 4, 64)
    for wrong in (data[:-1], np.concatenate([data, data]), data[:0]):
        with pytest.raises(DeviceError, match=r"w:Q4_0\[4, 64\] wants 144 bytes, not \d+"):
            up.load(tensor, wrong)
    assert not late.memory[Space.DEVICE]

    def fail(entry: cuda_weights.Entry) -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise OSError("the disk is gone")

    monkeypatch.setattr(cuda_weights.Entry, "fill", fail)
    up.load(tensor, data)
    with pytest.raises(OSError, match="disk is gone"):
        up.finish()
    assert "cuMemcpyHtoDAsync" not in late.calls
    assert all(m.array is None for m in late.memory[Space.PINNED])


def test_a_type_without_a_kernel_is_refused(monkeypatch):
    def refused(dtype: ir.DType, tokens: int, **said: str) -> str:
        x = ir.Tensor("x", ir.F32, (tokens, 256))
        return refuses(make("mul_mat", "p", weight(dtype, 8, 256)[0], x, **said), lambda node: [])

    for dtype, tokens in itertools.product(ir.WEIGHT_DTYPES, (1, 8, 9, 512)):
        assert refused(dtype, tokens) == refused(dtype, tokens, activations="float") == ""
    fewer = tuple(kind for kind in KINDS if kind != ("mul_mat_float", "Q4_K"))
    monkeypatch.setattr(cuda_weights, "KINDS", fewer)
    why = refused(ir.Q4_K, 1)
    assert "no mul_mat_float kernel for Q4_K weights" in why and "\n" not in why
