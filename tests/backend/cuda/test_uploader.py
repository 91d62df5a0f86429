"""Weights on their way to a GPU, without one: bytes, threads and entries, and what is refused."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any, cast

import numpy as np
import pytest

from tests.planes import planes, repacked
from workbench.backend.cuda.device import weights as cuda_weights
from workbench.backend.cuda.device.weights import MOST_TOKENS, Uploader, refuses
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.common.errors import DeviceError
from workbench.graph.ir import (
    DTYPES,
    F16,
    F32,
    MXFP4,
    Q4_0,
    Q4_K,
    Q6_K,
    WEIGHT_DTYPES,
    DType,
    Kind,
    Node,
    Tensor,
)
from workbench.graph.ops import make
from workbench.program.commands import Space

COPIES, REPACKS = 0, 1


class Memory:
    """Host memory that stands for either kind; filled with 0xA5 and guarded behind its end."""

    def __init__(self, nbytes: int):
        self.block = np.full(nbytes + 256, 0xA5, np.uint8)
        self.array: np.ndarray | None = self.block[:nbytes]
        self.address, self.nbytes = int(self.block.ctypes.data), nbytes
        self.freed = False

    @property
    def content(self) -> np.ndarray:
        return self.block[: self.nbytes]

    def free(self) -> None:
        self.freed = True
        self.array = None


class Event:
    def __init__(self) -> None:
        self.handle: list[tuple[int, int]] = []  # (stream, commands before it), the latest last


class LateDriver:
    """Two streams whose commands run when somebody waits for them, and no sooner."""

    def __init__(self) -> None:
        self.queues: dict[int, list[Any]] = {COPIES: [], REPACKS: []}
        self.done = {COPIES: 0, REPACKS: 0}
        self.calls: list[str] = []
        self.memory: dict[Space, list[Memory]] = {space: [] for space in Space}
        self.fail_at: tuple[str, int, BaseException] | None = None

    event = staticmethod(Event)

    def allocate(self, nbytes: int, space: Space) -> Memory:
        self.memory[space].append(Memory(nbytes))
        return self.memory[space][-1]

    def run(self, stream: int, until: int) -> None:
        while self.done[stream] < until:
            command = self.queues[stream][self.done[stream]]
            command()
            self.done[stream] += 1

    def call(self, function: str, what: str, *args: Any) -> None:
        self.calls.append(function)
        if self.fail_at and self.fail_at[:2] == (function, self.calls.count(function)):
            raise self.fail_at[2]
        getattr(self, function)(*args)

    def cuMemcpyHtoDAsync(self, dst: int, src: int, n: int, stream: int) -> None:
        self.queues[stream].append(lambda: ctypes.memmove(dst, src, n))

    def cuEventRecord(self, handle: list[tuple[int, int]], stream: int) -> None:
        handle.append((stream, len(self.queues[stream])))

    def cuMemsetD8Async(self, dst: int, value: int, n: int, stream: int) -> None:
        """Zeroes behind a weight, up to a multiple of 16, where this memory has nothing."""
        assert (value, (dst + n) % 16) == (0, 0) and 0 < n < 16

    def cuStreamWaitEvent(self, stream: int, handle: Any, flags: int) -> None:
        other, until = handle[-1]
        self.queues[stream].append(lambda: self.run(other, until))

    def cuEventSynchronize(self, handle: list[tuple[int, int]]) -> None:
        self.run(*handle[-1])

    def cuStreamSynchronize(self, stream: int) -> None:
        self.run(stream, len(self.queues[stream]))

    def prepare(self, kernel: Kernel, stream: int, what: str) -> Any:
        return lambda: self.queues[stream].append(lambda: self.repack(kernel))

    def repack(self, kernel: Kernel) -> None:
        """kernels/repack.cu by tests/planes.py: only bytes of the blocks named are written."""
        dtype = DTYPES[kernel.function.removeprefix("repack_")]
        dst, src, first, n, total = (int(a) for a in kernel.args)
        assert kernel.file == "repack" and src % 16 == 0 and dst % 16 == dst % 256 % 16
        assert kernel.grid[0] * kernel.block >= n * dtype.block // 32 > 0
        blocks = np.frombuffer(ctypes.string_at(src, n * dtype.block_bytes), np.uint8)
        plane = dst
        for piece in planes(blocks, dtype):
            width = piece.shape[1]
            ctypes.memmove(plane + first * width, piece.tobytes(), piece.nbytes)
            plane += total * width


@pytest.fixture
def late() -> LateDriver:
    return LateDriver()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("loading")]


@pytest.fixture
def small_entries(monkeypatch) -> None:
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 8192)
    monkeypatch.setattr(cuda_weights, "N_ENTRIES", 3)


def uploader(driver: LateDriver) -> Uploader:
    anything = cast(Any, driver)
    return Uploader(anything, anything.allocate, anything.prepare, COPIES, REPACKS)


def weight(name: str, dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    tensor = Tensor(name, dtype, (rows, cols), Kind.WEIGHT)
    rng = np.random.default_rng(len(name) + rows)
    data = rng.integers(0, 256, tensor.nbytes, np.uint8)
    data.flags.writeable = False
    return tensor, data


# the uploader -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_entries")
def test_every_byte_arrives_in_its_plane(late: LateDriver):
    """Odd sizes of every type, between them small ones; entries are reused many times."""
    weights = []
    for rows in (1, 3, 37):
        for dtype in WEIGHT_DTYPES:
            weights.append(weight(f"{dtype.name}.{rows}", dtype, rows, 768))
            weights.append(weight(f"norm.{dtype.name}.{rows}", F32, 1, 5))
    up = uploader(late)
    memory = [cast(Memory, up.load(*w)) for w in weights]
    assert "cuStreamSynchronize" not in late.calls, "a wait before the end"
    up.finish()
    for (tensor, data), there in zip(weights, memory, strict=True):
        assert np.array_equal(there.content, repacked(data, tensor.dtype)), tensor
        assert (there.block[tensor.nbytes :] == 0xA5).all(), f"written behind {tensor}"
        assert not there.freed
    assert late.calls.count("cuStreamSynchronize") == 2
    assert late.calls.count("cuEventSynchronize") > 3 * cuda_weights.N_ENTRIES
    entries = [m for m in late.memory[Space.PINNED] + late.memory[Space.DEVICE] if m.freed]
    assert len(entries) == 2 * cuda_weights.N_ENTRIES


def test_a_block_as_large_as_an_entry_fits_and_no_more(late: LateDriver, monkeypatch):
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 256)
    tensor, data = weight("w", Q6_K, 5, 512)
    up = uploader(late)
    there = cast(Memory, up.load(tensor, data))
    up.finish()
    assert np.array_equal(there.content, repacked(data, Q6_K))


@pytest.mark.usefixtures("small_entries")
@pytest.mark.parametrize(
    "where", ["cuMemcpyHtoDAsync", "cuEventSynchronize", "cuStreamSynchronize"]
)
def test_interrupted_it_leaves_no_thread_nor_entry(late: LateDriver, where: str):
    late.fail_at = (where, 2, KeyboardInterrupt())
    up = uploader(late)
    with pytest.raises(KeyboardInterrupt):
        for i in range(9):
            up.load(*weight(f"w{i}", MXFP4, 64, 512))
        up.finish()
    up.close()
    up.close()
    of_weights = [m for m in late.memory[Space.DEVICE] if m.nbytes != cuda_weights.ENTRY_BYTES]
    assert all(m.freed for m in late.memory[Space.PINNED]) and late.memory[Space.PINNED]
    assert sum(m.freed for m in late.memory[Space.DEVICE]) == len(late.memory[Space.PINNED])
    assert not any(m.freed for m in of_weights), "weights are their owner's to free"


def test_what_is_wrong_is_refused_and_a_workers_failure(late: LateDriver, monkeypatch):
    up = uploader(late)
    tensor, data = weight("w", Q4_0, 4, 64)
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
    assert all(m.freed for m in late.memory[Space.PINNED])


# refusals ---------------------------------------------------------------------------------------


def product(dtype: DType, tokens: int, **said) -> Node:
    w = Tensor("w", dtype, (8, 256), Kind.WEIGHT)
    return make("mul_mat", "p", w, Tensor("x", F32, (tokens, 256)), **said)


def test_a_type_without_a_kernel_is_refused(monkeypatch):
    for dtype in WEIGHT_DTYPES:
        for tokens, said in itertools.product((1, 8, 9, 512), ({}, {"activations": "float"})):
            assert refuses(product(dtype, tokens, **said), lambda node: []) == ""
    monkeypatch.setitem(MOST_TOKENS, ("mul_mat", "F16"), 8)
    assert refuses(product(F16, 8), lambda node: []) == ""
    why = refuses(product(F16, 9), lambda node: [])
    assert "no mul_mat kernel for F16 weights and 9 tokens; use a smaller n_ubatch" in why
    monkeypatch.delitem(MOST_TOKENS, ("mul_mat_float", "Q4_K"))
    why = refuses(product(Q4_K, 1), lambda node: [])
    assert "no mul_mat_float kernel for Q4_K weights" in why and "\n" not in why
