"""What measures kernels on a GPU: memory is read once, and replays of launches are timed."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.backend.cuda.device.replay import (
    READ_WORDS,
)
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.benchmarks.kernels.kernel_bench import KernelMatrix, bench_kernels
from workbench.benchmarks.kernels.kernel_cases import parse_shapes, parse_types
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN
from workbench.program.commands import COMPUTE_STREAM, Space

pytestmark = pytest.mark.gpu


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
