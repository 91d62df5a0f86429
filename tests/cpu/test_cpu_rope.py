"""RoPE of new heads, and of stored K, against the reference (argument order as
backend/issue/args.py)."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import run, run_parts

from tests.attention import stored
from tests.reference import rotated
from workbench.graph import ops
from workbench.graph.ir import CACHE_DTYPES, F16, F32, I32, DType, Tensor

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def f32(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, F32, array.shape)


def floats(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return out.view(np.float32).reshape(shape)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n_tokens,heads,dim,n_rot", [(1, 4, 64, 64), (5, 3, 20, 12), (3, 1, 6, 2)])
@pytest.mark.parametrize("with_factors", [False, True])
def test_rope(
    neox: bool, n_tokens: int, heads: int, dim: int, n_rot: int, with_factors: bool
) -> None:
    x = normal(n_tokens, heads, dim)
    positions = RNG.integers(0, 131072, n_tokens).astype(np.int32)
    factors = RNG.uniform(1, 8, n_rot // 2).astype(np.float32) if with_factors else None
    tx, tp = f32("x", x), Tensor("p", I32, positions.shape)
    tf = None if factors is None else f32("f", factors)
    node = ops.make(
        "rope", "y", tx, tp, tf, n_rot=n_rot, neox=neox, theta_base=500000.0, freq_scale=0.25
    )
    arrays: dict[Tensor, np.ndarray] = {tx: x, tp: positions}
    if tf is not None and factors is not None:
        arrays[tf] = factors
    out = floats(run_parts(node, arrays), x.shape)

    pairs = np.arange(n_rot // 2)
    angle = positions[:, None] * 0.25 * 500000.0 ** (-2.0 * pairs / n_rot)
    angle = (angle / (1 if factors is None else factors.astype(np.float64)))[:, None, :]
    a, b = (pairs, pairs + n_rot // 2) if neox else (2 * pairs, 2 * pairs + 1)
    twin = x.astype(np.float64)
    twin[..., a] = x[..., a] * np.cos(angle) - x[..., b] * np.sin(angle)
    twin[..., b] = x[..., a] * np.sin(angle) + x[..., b] * np.cos(angle)
    np.testing.assert_allclose(out, twin, rtol=0, atol=1e-6)
    assert np.array_equal(out[..., n_rot:], x[..., n_rot:])


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("heads,dim,n_rot", [(4, 64, 64), (3, 96, 34), (1, 32, 2)])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=lambda d: d.name)
def test_rope_shift_of_every_type_of_cells(
    dtype: DType, neox: bool, heads: int, dim: int, n_rot: int
) -> None:
    """What a shift leaves is the turned values, stored anew: to the bit but for a few values that
    float32 leaves on another side of a rounding edge. Other blocks and cells keep their bytes."""
    cells = 6
    deltas = np.array([0, 3, -7, 0, 90000, -1], np.int32)
    data, numbers = stored(normal(cells + 1, heads * dim), dtype)
    tc, td = Tensor("c", dtype, (cells + 1, heads * dim)), Tensor("d", I32, deltas.shape)
    node = ops.make(
        "rope_shift", "k", tc, td, n_head_kv=heads, n_rot=n_rot, neox=neox, theta_base=10000.0,
        freq_scale=1.0,
    )  # fmt: skip
    outs = [run(node, {td: deltas}, n_parts, start=data) for n_parts in (1, 4)]
    assert np.array_equal(*outs)
    bytes_of = [x.view(np.uint8).reshape(cells + 1, heads, -1) for x in (data, outs[0])]
    moved = np.append(deltas != 0, False)
    assert np.array_equal(*(x[~moved] for x in bytes_of))
    behind = -(-n_rot // dtype.block) * dtype.block_bytes
    assert np.array_equal(*(x[..., behind:] for x in bytes_of))

    k = numbers.reshape(cells + 1, heads, dim)[moved]
    twin = rotated(k, deltas[deltas != 0], "halves" if neox else "adjacent", n_rot, 10000.0)
    again, _ = stored(twin.reshape(-1, heads * dim).astype(np.float32), dtype)
    found = bytes_of[1][moved]
    wanted = again.view(np.uint8).reshape(found.shape)
    if dtype == F32:
        np.testing.assert_allclose(found.view(np.float32), twin, rtol=0, atol=1e-6)
    else:
        assert np.mean(found == wanted) > 0.99


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("cells,heads,dim,n_rot", [(1, 4, 64, 64), (7, 3, 20, 12), (5, 1, 6, 2)])
@pytest.mark.parametrize("with_factors", [False, True])
def test_rope_shift(
    neox: bool, cells: int, heads: int, dim: int, n_rot: int, with_factors: bool
) -> None:
    """Within a rounding to F16 of the reference; a cell that stays keeps its bytes, NaN too."""
    cache = RNG.standard_normal((cells + 2, heads * dim)).astype(np.float16)
    deltas = RNG.integers(-131072, 131072, cells).astype(np.int32)
    factors = RNG.uniform(1, 8, n_rot // 2).astype(np.float32) if with_factors else None
    stays = np.arange(cells + 2) >= cells  # no delta
    if cells > 2:
        deltas[[0, 3]] = 0
        stays[[0, 3]] = True
    cache[stays] = np.array(0xFD5A, np.uint16).view(np.float16)  # a NaN with bits of its own
    tc, td = Tensor("c", F16, cache.shape), Tensor("d", I32, deltas.shape)
    tf = None if factors is None else f32("f", factors)
    node = ops.make(
        "rope_shift", "k", tc, td, tf, n_head_kv=heads, n_rot=n_rot, neox=neox,
        theta_base=500000.0, freq_scale=0.25,
    )  # fmt: skip
    arrays: dict[Tensor, np.ndarray] = {td: deltas}
    if tf is not None and factors is not None:
        arrays[tf] = factors
    outs = [run(node, arrays, n_parts, start=cache) for n_parts in (1, 2, 3)]
    assert all(np.array_equal(out, outs[0]) for out in outs)
    out = outs[0].view(np.float16).reshape(cache.shape)
    assert np.array_equal(out[stays].view(np.uint16), cache[stays].view(np.uint16))

    moved = ~stays[:cells]
    pairs = "halves" if neox else "adjacent"
    k = cache[:cells][moved].reshape(-1, heads, dim)
    twin = rotated(k, deltas[moved], pairs, n_rot, 500000.0, 0.25, factors)
    found = out[:cells][moved].reshape(-1, heads, dim)
    np.testing.assert_allclose(found, twin, rtol=2**-11, atol=1e-6)
    assert np.array_equal(found[..., n_rot:], k[..., n_rot:])
    # rounded once: float32 arithmetic leaves few values on another side of a rounding edge
    assert np.mean(found == twin.astype(np.float16)) > 0.99
