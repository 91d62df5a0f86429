"""Captured launches are replayed as they were issued, timed, and given back; memory is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from workbench.backend.base import Issue
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.replay import (
    READ_WORDS,
    TimedReplay,
)
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import parse_shapes, parse_types
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, Space

pytestmark = pytest.mark.gpu

N = 1000


class Counting:
    """Two launches that together add 2 to every element of `a`, so that replays can be counted."""

    def __init__(self, backend: CudaBackend):
        self.backend = backend
        self.memory = [backend.allocate(4 * N, Space.DEVICE) for _ in range(3)]
        self.host = backend.allocate(4 * N, Space.PINNED)
        assert self.host.array is not None
        self.array = self.host.array.view(np.float32)
        self.array[:] = 1.0
        self._copy(2, to_host=False)
        a, b, one = (Tensor(name, F32, (1, N)) for name in ("a", "b", "one"))
        addresses = dict(zip((a, b, one), (m.address for m in self.memory), strict=True))
        forth, back = make("add", "b", a, one), make("add", "a", b, one)
        addresses |= {forth.output: addresses[b], back.output: addresses[a]}
        self.issues: list[Issue] = [
            backend.launch(node, addresses.__getitem__, 0, COMPUTE_STREAM) for node in (forth, back)
        ]

    def _copy(self, i: int, to_host: bool) -> None:
        there, here = self.memory[i].address, self.host.address
        ends = (here, there) if to_host else (there, here)
        self.backend.copy(*ends, 4 * N, COMPUTE_STREAM, to_host)()
        self.backend.sync_stream(COMPUTE_STREAM)()

    @property
    def value(self) -> float:
        """What every element of `a` is."""
        self._copy(0, to_host=True)
        assert (self.array == self.array[0]).all()
        return float(self.array[0])


@pytest.fixture
def counting(backend: CudaBackend) -> Iterator[Counting]:
    made = Counting(backend)
    yield made
    for memory in (*made.memory, made.host):
        memory.free()


def test_replays_compute_as_often_as_they_run(backend, counting):
    with TimedReplay(backend, counting.issues) as replay:
        assert counting.value == 2  # once as they are, before the capture
        replay.run()
        assert counting.value == 4
        replay.run(5)
        assert counting.value == 14
        assert len(replay.time_us(3)) == 3
        assert counting.value == 14 + 2 * 4  # one untimed


@pytest.mark.parametrize("words", READ_WORDS)
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_every_word_is_read_once(backend, words, grid):
    """One word of many is 1: a thread adds up to 1 if and only if that word was read once."""
    n = 256 * words * 7 + 19
    data = backend.allocate(16 * n, Space.PINNED)
    device, sink = backend.allocate(16 * n, Space.DEVICE), backend.allocate(4, Space.DEVICE)
    found = backend.allocate(4, Space.PINNED)
    values = data.array.view(np.uint32).reshape(n, 4)
    kernel = Kernel(
        "read", f"read_{words}", (grid, 1), 256, [device.address, n, 1, sink.address], waits=True
    )
    read = backend._prepare(kernel, backend._stream(COMPUTE_STREAM), "read")
    rng = np.random.default_rng(0)
    picks = [0, 255, 256, 256 * words, n - 20, n - 19, n - 1, *rng.integers(0, n, 20)]
    for pick in [*picks, None]:
        values[:] = 0
        if pick is not None:
            values[pick, int(pick) % 4] = 1
        found.array[:] = 0
        backend.copy(sink.address, found.address, 4, COMPUTE_STREAM, to_host=False)()
        backend.copy(device.address, data.address, 16 * n, COMPUTE_STREAM, to_host=False)()
        read()
        backend.copy(found.address, sink.address, 4, COMPUTE_STREAM, to_host=True)()
        backend.sync_stream(COMPUTE_STREAM)()
        assert found.array.view(np.int32)[0] == (pick is not None), pick
    for memory in (data, device, sink, found):
        memory.free()


@pytest.mark.alone
def test_kernels_are_measured_plain_and_early(backend, tmp_path):
    matrix = KernelMatrix(
        parse_types("Q4_0,F16"), parse_shapes("1b.o,1b.glu,1b.qkv"), [1, 3], quick=True
    )
    made = bench_kernels(backend, matrix, tmp_path / "run")
    kinds = {PLAIN, PDL} if backend.capabilities.programmatic else {PLAIN}
    assert {row.launch for row in made.rows} == kinds
    assert len(made.rows) == 2 * 3 * 2 * len(kinds) and not made.interrupted
    for row in made.rows:
        assert 0.01 < row.share < 1.5, row  # quick: the cache keeps part of the weights
        assert row.launches * row.per_replay >= 20
