"""Every CUDA kernel against a plain NumPy twin, with poisoned outputs and guarded memory."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tests import attention, reference
from tests.backend.cpu.test_cpu_kernels import TWINS, made
from tests.gpu.harness import Compute, distance
from tests.oracles.dequantize import dequantize
from workbench.graph.ir import (
    CACHE_DTYPES,
    DTYPES,
    F16,
    F32,
    I32,
    I64,
    WEIGHT_DTYPES,
    DType,
    Kind,
    Tensor,
)
from workbench.graph.ops import make
from workbench.model.gguf.quants import quantize_activations, random_blocks

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-6  # float32 sums of some thousand terms, relative to the norm of the result
TYPES = [d.name for d in WEIGHT_DTYPES]


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def weight(rng: np.random.Generator, dtype: DType, rows: int, cols: int):
    """A random weight tensor, its file bytes and its values (float64)."""
    data = random_blocks(rng, dtype, rows, cols, cols**-0.5).reshape(-1)
    tensor = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    return tensor, data, dequantize(data, dtype, (rows, cols)).astype(np.float64)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


# rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_get_rows(compute: Compute, name: str):
    dtype, rows, cols = DTYPES[name], 19, 768
    w, data, values = weight(generator(name), dtype, rows, cols)
    ids = np.array([0, 18, 7, 7, 19, -1, 3], np.int32)  # two of them outside
    node = make("get_rows", "y", w, Tensor("ids", I32, ids.shape))
    found = compute(node, {w: data, node.inputs[1]: ids}).view(np.float32).reshape(-1, cols)
    expected = np.where(((ids >= 0) & (ids < rows))[:, None], values[ids % rows], 0.0)
    assert distance(found, expected) < 1e-7
    if dtype.block < 256:  # one product of two floats, or none
        assert np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("first", [0, 4, 10, 12, 13, -1, -5, -6, 1 << 62, -(1 << 63)])
def test_stores_round_and_stay_inside(compute: Compute, first: int):
    """Rows by index, by a table's cell and by a view's: all alike, none outside 0..n_kv-1."""
    rng = generator("copies")
    cells, n_kv, cols, tokens = 20, 13, 300, 6
    cache = Tensor("cache", F16, (cells, cols), Kind.CACHE)
    before = rng.standard_normal((cells, cols)).astype(np.float16)
    x = normal(rng, tokens, cols) * 1000
    rows = Tensor("x", F32, x.shape)
    node = make("copy_by_table", "k", cache, rows, Tensor("t", I64, (5,)), store=3, n_kv=n_kv)
    table = np.array([1, 2, 3, first, 5], np.int64)
    found = compute(node, {cache: before, rows: x, node.inputs[2]: table})
    expected = before.copy()
    for token in range(tokens):
        if 0 <= first + token < n_kv:
            expected[first + token] = x[token].astype(np.float16)
    assert np.array_equal(found.view(np.float16).reshape(cells, cols), expected)
    to = Tensor("i", I64, (tokens,))
    indices = np.array([min(first, (1 << 62)) + token for token in range(tokens)], np.int64)
    by_rows = make("set_rows", "k", cache, rows, to, n_kv=n_kv)
    found = compute(by_rows, {cache: before, rows: x, to: indices})
    assert np.array_equal(found.view(np.float16).reshape(cells, cols), expected)
    if 0 <= first <= n_kv - tokens:
        view = make("copy_to_view", "k", cache, rows, cell=first)
        found = compute(view, {cache: before, rows: x})
        assert np.array_equal(found.view(np.float16).reshape(cells, cols), expected)


# element-wise -----------------------------------------------------------------------------------

SHAPES = [(1, 1), (3, 33), (1, 4096), (5, 5001), (70, 128), (2, 8192)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["add", "add a row", "mul", "mul a row", "rms_norm", "swiglu"])
def test_it_is_its_twin(compute: Compute, name: str, shape: tuple[int, int]):
    """exp(-g) is off by 2^-22 |g|, which counts where g is below zero and silu next to nothing."""
    twin, rng = TWINS[name], generator(name, shape)
    given = [k * normal(rng, *s) for k, s in zip(twin.times, twin.shapes(shape), strict=False)]
    node, arrays = made(name.partition(" ")[0], *given, **twin.params)
    found = compute(node, arrays).view(np.float32).reshape(shape)
    wide = twin.of(*(x.astype(np.float64) for x in given))
    if not twin.rtol:
        assert np.array_equal(found, twin.of(*given))
    assert distance(found, wide) < TOLERANCE
    assert name != "swiglu" or np.allclose(found, wide, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (1, 4096), (4, 1120), (33, 14336)])
def test_quantize_is_bit_equal(compute: Compute, shape: tuple[int, int]):
    x = normal(generator(shape), *shape)
    x[0, :32] = 0
    x[-1, -32:] *= np.float32(1e-38)  # quants of a subnormal scale
    x[:, 5] = 127.0  # ties: scale 1 exactly
    x[:, 6:9] = [0.5, 1.5, -2.5]
    node = make("quantize", "q", Tensor("x", F32, shape))
    found = compute(node, {node.inputs[0]: x})
    assert np.array_equal(found.reshape(shape[0], -1), quantize_activations(x))


# rope -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize(
    ("heads", "head_dim", "n_rot"), [(1, 64, 64), (6, 80, 32), (32, 128, 128), (5, 256, 256)]
)
def test_rope(compute: Compute, neox, with_factors, heads, head_dim, n_rot):
    rng = generator(neox, with_factors, heads)
    positions = np.array([0, 1, 77, 8191, 131071], np.int32)
    x = normal(rng, len(positions), heads, head_dim)
    factors = rng.uniform(1, 32, n_rot // 2).astype(np.float32) if with_factors else None
    given = [] if factors is None else [Tensor("f", F32, factors.shape, Kind.WEIGHT)]
    scale = 0.25 if with_factors else 1.0
    node = make(
        "rope", "y", Tensor("x", F32, x.shape), Tensor("p", I32, positions.shape), *given,
        n_rot=n_rot, neox=neox, theta_base=500000.0, freq_scale=scale,
    )  # fmt: skip
    arrays = {node.inputs[0]: x, node.inputs[1]: positions}
    arrays |= dict.fromkeys(given, factors)
    found = compute(node, arrays).view(np.float32)
    pairs = "halves" if neox else "adjacent"
    expected = reference.rotated(x, positions, pairs, n_rot, 500000.0, scale, factors)
    assert distance(found, expected) < 3e-7


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "n_rot"), [(1, 64, 64), (6, 96, 34), (5, 256, 256)])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=lambda d: d.name)
def test_rope_shift_of_every_type_of_cells(compute: Compute, dtype, neox, heads, head_dim, n_rot):
    """What a shift leaves is the turned values, stored anew; other blocks and cells keep theirs."""
    rng = generator("shift", dtype.name, neox, heads)
    cells, n = 7, 6
    deltas = np.array([0, 1, -1, 0, -8191, 131071], np.int32)
    moved = np.append(deltas != 0, [False] * (cells - n))
    values = rng.standard_normal((cells, heads * head_dim)).astype(np.float32)
    data, numbers = attention.stored(values, dtype)
    cache = Tensor("c", dtype, values.shape, Kind.CACHE)
    factors = rng.uniform(1, 32, n_rot // 2).astype(np.float32) if heads != 6 else None
    more = [] if factors is None else [Tensor("f", F32, factors.shape, Kind.WEIGHT)]
    node = make(
        "rope_shift", "k", cache, Tensor("d", I32, deltas.shape), *more, n_head_kv=heads,
        n_rot=n_rot, neox=neox, theta_base=500000.0, freq_scale=0.25,
    )  # fmt: skip
    arrays = {cache: data, node.inputs[1]: deltas} | dict.fromkeys(more, factors)
    found = compute(node, arrays).view(np.uint8)
    before, after = (x.view(np.uint8).reshape(cells, heads, -1) for x in (data, found))
    assert np.array_equal(after[~moved], before[~moved])
    behind = -(-n_rot // dtype.block) * dtype.block_bytes
    assert np.array_equal(after[..., behind:], before[..., behind:])

    k, pairs = numbers.reshape(cells, heads, head_dim)[moved], "halves" if neox else "adjacent"
    twin = reference.rotated(k, deltas[deltas != 0], pairs, n_rot, 500000.0, 0.25, factors)
    if dtype == F32:
        turned = after.view(np.float32)[moved]
        np.testing.assert_allclose(turned, twin, rtol=0, atol=1e-6)
        return
    again, _ = attention.stored(twin.reshape(-1, heads * head_dim).astype(np.float32), dtype)
    wanted = again.view(np.uint8).reshape(after[moved].shape)
    assert np.mean(after[moved] == wanted) > 0.99
