"""The packed activations, and random blocks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.dequantize import dequantize
from tests.planes import activation_planes
from workbench.graph.ir import Q8_ACT, WEIGHT_DTYPES
from workbench.model.gguf.quants import quantize_activations, random_blocks, unpack_activations


@pytest.mark.parametrize("cols", [32, 64, 96, 2048])
def test_activations_round_trip(cols):
    x = np.random.default_rng(cols).standard_normal((5, cols), np.float32)
    x *= np.float32(10) ** np.arange(-30, 20, 10)[:, None]  # one magnitude a row
    rows = quantize_activations(x)
    assert rows.shape == (5, Q8_ACT.row_bytes(cols)) and rows.dtype == np.uint8
    assert rows.shape[1] % 64 == 0
    quants, scales, sums = unpack_activations(rows, cols)
    for t in range(5):  # the definition, one block at a time
        for b in range(cols // 32):
            block = x[t, 32 * b : 32 * b + 32]
            scale = np.abs(block).max() / np.float32(127)
            want = np.array([round(float(v / scale)) for v in block])  # half to even
            assert scales[t, b] == scale
            np.testing.assert_array_equal(quants[t, 32 * b : 32 * b + 32], want)
            halves = want.reshape(2, 16).sum(axis=1)
            np.testing.assert_array_equal(sums[t, 2 * b : 2 * b + 2], halves)
    back = quants.reshape(5, -1, 32) * scales[:, :, None]
    assert (np.abs(back.reshape(x.shape) - x) <= 0.501 * scales.repeat(32, axis=1)).all()
    assert not rows[:, activation_planes(cols).sums + cols // 8 :].any()  # padding


def test_activations_at_the_edges():
    x = np.zeros((4, 32), np.float32)
    x[1] = 1e-45  # scale rounds to 0
    x[2] = 2e-43  # scale is subnormal: x / scale rounds to 143
    x[3, :3] = 127, 2.5, -0.5  # scale 1: ties go to even
    quants, scales, sums = unpack_activations(quantize_activations(x), 32)
    assert not quants[:2].any() and not scales[:2].any()
    assert (quants[2] == 127).all() and sums[2].tolist() == [2032, 2032]
    assert quants[3, :3].tolist() == [127, 2, 0]


@pytest.mark.parametrize("std", [1 / 8, 1 / 128])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: d.name)
def test_random_blocks_have_mean_and_std(dtype, std):
    rows, cols = 512, 2048
    data = random_blocks(np.random.default_rng(3), dtype, rows, cols, std)
    assert data.shape == (rows, dtype.row_bytes(cols)) and data.dtype == np.uint8
    x = dequantize(data, dtype, (rows, cols)) / np.float32(std)
    assert np.isfinite(x).all()
    assert abs(x.std() - 1) < 0.01 and abs(x.mean()) < 0.01
    # A row's mean is the mean of 2048 draws, not much wider: blocks do not share an offset.
    assert x.mean(axis=1).std() * np.sqrt(cols) < 1.8
    assert len(np.unique(data, axis=0)) == rows
