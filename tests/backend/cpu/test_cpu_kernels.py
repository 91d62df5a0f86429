"""Every CPU kernel but products and attention against a slow twin in NumPy, to the bit where the
twin rounds as the kernel does (argument order as backend/issue/args.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import draws
from tests.attention import stored
from tests.backend.cpu.kernel_runs import check_shares, repack, run, run_parts
from tests.draws import Draw
from tests.oracles.dequantize import dequantize
from tests.profiles import examples
from tests.reference import rotated
from workbench.backend.cpu.kernels import op_table
from workbench.graph import ir, ops
from workbench.graph.ir import F16, F32, I32, DType, Node, Tensor
from workbench.model.gguf.quants import quantize_activations, random_blocks
from workbench.model.sampler import Sampling

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def made(op: str, *given: np.ndarray, **params: Any) -> tuple[Node, dict[Tensor, np.ndarray]]:
    """An op on float32 arrays."""
    tensors = {Tensor(f"x{i}", F32, array.shape): array for i, array in enumerate(given)}
    return ops.make(op, "y", *tensors, **params), tensors


def floats(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return out.view(np.float32).reshape(shape)


# elementwise --------------------------------------------------------------------------------------


class Twin(NamedTuple):
    """What an op computes, of float64 arrays. shapes: of what it is given, by its result's. times:
    of normal numbers that it is given."""

    of: Callable[..., np.ndarray]
    rtol: float = 0
    shapes: Callable[[tuple[int, int]], list[tuple[int, ...]]] = lambda s: [s, s]
    times: tuple[float, ...] = (1.0, 1.0)
    params: dict[str, float] = {}  # noqa: RUF012 - never changed


def _rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)


def _scaled(x: np.ndarray, squares: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.abs(squares).sum(axis=-1, keepdims=True) / (32 * squares.shape[1]) + 1e-3)


def _sums(x: np.ndarray) -> np.ndarray:
    return (x**2).reshape(len(x), -1, 32).sum(axis=-1)


TWINS = {
    "add": Twin(np.add),
    "add a row": Twin(np.add, 0, lambda s: [s, s[1:]]),
    "mul": Twin(np.multiply),
    "mul a row": Twin(np.multiply, 0, lambda s: [s, s[1:]]),
    "rms_norm": Twin(_rms, 3e-7, lambda s: [s], (3.0,), {"eps": 1e-5}),
    "rms_scale": Twin(_scaled, 3e-7, lambda s: [s, (s[0], 3)], (3.0, 1.0), {"eps": 1e-3}),
    "swiglu": Twin(lambda g, u: g / (1 + np.exp(-g)) * u, 1e-6, times=(20.0, 1.0)),
    "square_sums": Twin(_sums, 6e-7, lambda s: [(s[0], 32 * s[1])], (3.0,)),
}


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (2, 64), (5, 16), (7, 100), (3, 257)], ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_it_is_its_twin(name: str, shape: tuple[int, int]) -> None:
    twin = TWINS[name]
    given = [k * normal(*s) for k, s in zip(twin.times, twin.shapes(shape), strict=False)]
    if name == "rms_scale":
        given[1] = np.square(given[1]) * 32
    node, arrays = made(name.partition(" ")[0], *given, **twin.params)
    found = floats(run_parts(node, arrays), node.output.shape)
    if shape == (7, 100):
        check_shares(node, arrays, 3, "file")
    if not twin.rtol:
        assert np.array_equal(found, twin.of(*given))
    wide = twin.of(*(a.astype(np.float64) for a in given)).reshape(found.shape)
    np.testing.assert_allclose(found, wide, rtol=twin.rtol or 1e-7, atol=1e-37)


def test_zeros_nans_and_far_out_values_stay_what_they_are() -> None:
    node, arrays = made("rms_norm", np.zeros((2, 40), np.float32), eps=1e-6)
    assert not floats(run(node, arrays), (80,)).any()
    # nothing in a row: the scale is 1 / sqrt(eps), as a norm has it; a NaN stays where it is
    x, squares = normal(3, 40), np.array([[0, 0], [1, np.nan], [32, 32]], np.float32)
    y = floats(run(*made("rms_scale", x, squares, eps=0.25)), x.shape)
    assert np.array_equal(y[0], 2 * x[0]) and np.isnan(y[1]).all()
    np.testing.assert_allclose(y[2], x[2] / np.sqrt(1.25), rtol=3e-7)
    gate = np.array([[-1e4, -200.0, -87.0, -0.0, 0.0, 1e-20, 87.0, 200.0, 1e4, np.inf, np.nan]])
    gate = gate.astype(np.float32)
    y = floats(run(*made("swiglu", gate, np.ones_like(gate))), gate.shape)[0]
    assert np.isnan(y[-1]) and y[-2] == np.inf
    np.testing.assert_allclose(y[3:9], gate[0, 3:9] * [0.5, 0.5, 0.5, 1, 1, 1], rtol=1e-6)
    assert (np.abs(y[:3]) < 1e-33).all()


# quantize -----------------------------------------------------------------------------------------


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.sampled_from([32, 64, 96, 160])),
               elements=st.floats(-(2.0**100), 2.0**100, width=32))
)  # fmt: skip
@settings(max_examples=examples(40))
def test_quantize_gives_the_twins_bytes(x: np.ndarray) -> None:
    out = run_parts(*made("quantize", x))
    assert np.array_equal(out.reshape(len(x), -1), quantize_activations(x))


def test_quantize_rounds_half_to_even_and_keeps_a_nan() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    x[0, 40] = np.nan
    check_shares(*made("quantize", normal(7, 64)), 3, "file")
    out = run(*made("quantize", x))
    assert out[:7].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2]
    assert np.isnan(out[64:72].view(np.float32)).tolist() == [False, True]


# rows ---------------------------------------------------------------------------------------------


def _rows(dtype: DType, raw: np.ndarray, shape: tuple[int, int], ids: list[int], layout="file"):
    table, t = Tensor("table", dtype, shape), Tensor("ids", I32, (len(ids),))
    node = ops.make("get_rows", "y", table, t)
    arrays = {table: raw, t: np.array(ids, np.int32)}
    return floats(run_parts(node, arrays, layout), (len(ids), shape[1]))


@pytest.mark.parametrize("dtype", ir.WEIGHT_DTYPES, ids=lambda d: d.name)
def test_get_rows_gives_the_reference_bits(dtype: DType) -> None:
    """Of either layout. An id outside of the table gives NaN."""
    raw, ids = random_blocks(RNG, dtype, 11, 512, 0.5), [3, 0, 10, 3, 7, -1, 11, 2**31 - 1]
    out = _rows(dtype, raw, (11, 512), ids)
    assert np.isnan(out[5:]).all()
    assert np.array_equal(out[:5], dequantize(raw, dtype, (11, 512))[ids[:5]])
    other = gguf.dequantize(raw, gguf.GGMLQuantizationType[dtype.name]).reshape(11, 512)
    assert np.array_equal(out[:5], other[ids[:5]])
    if dtype in ir.QUANTISED:
        packed = np.zeros(op_table.repacked_bytes(dtype, 11, 512, "rows16"), np.uint8)
        repack(packed.ctypes.data, raw.ctypes.data, dtype, 11, 512, "rows16")
        assert np.array_equal(_rows(dtype, packed, (11, 512), ids, "rows16")[:5], out[:5])


@pytest.mark.parametrize("name", ["MXFP4", "Q6_K"])
def test_get_rows_of_any_bits(name: str) -> None:
    """Blocks of random bytes: every exponent of MXFP4, every sign of a scale."""
    dtype = next(d for d in ir.WEIGHT_DTYPES if d.name == name)
    raw = random_blocks(RNG, dtype, 64, 256, 0.5)
    raw = RNG.integers(0, 256, raw.shape, dtype=np.uint8)
    if name == "Q6_K":
        raw[:, 209] &= 0x3F  # finite
    with np.errstate(over="ignore"):  # the largest exponents give infinities
        twin = dequantize(raw, dtype, (64, 256))
    assert np.array_equal(_rows(dtype, raw, (64, 256), [*range(64)]), twin)


@pytest.mark.parametrize("cols", [1, 16, 40])
def test_stores_round_and_stay_inside(cols: int) -> None:
    """Rows by index, by a table's cell and by a view's: all store alike, in any number of parts;
    what lies outside of 0..n_kv-1 is not stored."""
    cache = RNG.standard_normal((9, cols)).astype(np.float16)
    x = normal(3, cols) * 1000
    x[0, 0] = 1 + 2**-11  # a tie: to even, down
    tc, tx = Tensor("c", F16, cache.shape), Tensor("x", F32, x.shape)
    ti, tt = Tensor("i", ir.I64, (3,)), Tensor("t", ir.I64, (4,))
    by_rows = ops.make("set_rows", "c", tc, tx, ti, n_kv=6)
    by_table = ops.make("copy_by_table", "c", tc, tx, tt, store=2, n_kv=6)
    for first in (0, 3, 4, 6, 7, -1, -3, -4, 2**63 - 1, -(2**63)):
        twin, rows = cache.copy(), [max(min(first + t, 99), -99) for t in range(3)]
        for t, row in enumerate(rows):
            if 0 <= row < 6:
                twin[row] = x[t].astype(np.float16)
        table = np.array([0, 1, first, 2])
        stores = [(by_rows, {tx: x, ti: np.array(rows)}), (by_table, {tx: x, tt: table})]
        if 0 <= first <= 3:
            stores.append((ops.make("copy_to_view", "c", tc, tx, cell=first), {tx: x}))
        for node, arrays in stores:
            for n_parts in (1, 2, 3):
                out = run(node, arrays, n_parts, start=cache)
                assert np.array_equal(out.view(np.float16).reshape(cache.shape), twin), node


def test_a_store_to_bf16_rounds_ties_to_even() -> None:
    x = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8]], np.float32)
    cache, tx = Tensor("c", ir.BF16, (1, 4)), Tensor("x", F32, x.shape)
    node = ops.make("copy_to_view", "c", cache, tx, cell=0)
    out = run(node, {tx: x}).view(np.uint16).astype(np.uint32) << 16
    assert out.view(np.float32).tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1]


# RoPE ---------------------------------------------------------------------------------------------


def _rope(op: str, given: list, with_factors: bool, n_rot: int, **params: Any):
    """The node, and a dict for its factors."""
    factors = RNG.uniform(1, 8, n_rot // 2).astype(np.float32) if with_factors else None
    tf = None if factors is None else Tensor("f", F32, factors.shape)
    params = {"theta_base": 500000.0, "freq_scale": 0.25} | params
    node = ops.make(op, "y", *given, tf, n_rot=n_rot, **params)
    return node, {} if tf is None else {tf: factors}, factors


@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("n,heads,dim,n_rot", [(1, 4, 64, 64), (5, 3, 20, 12), (3, 1, 6, 2)])
def test_rope(neox: bool, n: int, heads: int, dim: int, n_rot: int, with_factors: bool) -> None:
    x, positions = normal(n, heads, dim), RNG.integers(0, 131072, n).astype(np.int32)
    tx, tp = Tensor("x", F32, x.shape), Tensor("p", I32, positions.shape)
    node, arrays, factors = _rope("rope", [tx, tp], with_factors, n_rot, neox=neox)
    arrays |= {tx: x, tp: positions}
    out = floats(run_parts(node, arrays), x.shape)
    if n == 5:
        check_shares(node, arrays, 4, "file")
    pairs = "halves" if neox else "adjacent"
    twin = rotated(x, positions, pairs, n_rot, 500000.0, 0.25, factors)
    np.testing.assert_allclose(out, twin, rtol=0, atol=1e-6)
    assert np.array_equal(out[..., n_rot:], x[..., n_rot:])


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("heads,dim,n_rot", [(4, 64, 64), (3, 96, 34), (1, 32, 2)])
@pytest.mark.parametrize("dtype", ir.CACHE_DTYPES, ids=lambda d: d.name)
def test_a_shift_turns_stored_k(dtype: DType, neox: bool, heads: int, dim: int, n_rot: int) -> None:
    """What a shift leaves is the turned values, stored anew: to the bit but for a few values that
    float32 leaves on another side of a rounding edge. Other blocks and cells keep their bytes."""
    deltas = np.array([0, 3, -7, 0, 90000, -1], np.int32)
    cells, with_factors = len(deltas), heads != 3
    data, numbers = stored(normal(cells + 1, heads * dim), dtype)
    tc, td = Tensor("c", dtype, (cells + 1, heads * dim)), Tensor("d", I32, deltas.shape)
    node, arrays, factors = _rope(
        "rope_shift", [tc, td], with_factors, n_rot, neox=neox, n_head_kv=heads
    )
    outs = [run(node, {td: deltas} | arrays, n_parts, start=data) for n_parts in (1, 4)]
    assert np.array_equal(*outs)
    bytes_of = [x.view(np.uint8).reshape(cells + 1, heads, -1) for x in (data, outs[0])]
    moved = np.append(deltas != 0, False)
    assert np.array_equal(*(x[~moved] for x in bytes_of))
    turned = -(-n_rot // dtype.block) * dtype.block_bytes
    assert np.array_equal(*(x[..., turned:] for x in bytes_of))

    k = numbers.reshape(cells + 1, heads, dim)[moved]
    pairs = "halves" if neox else "adjacent"
    twin = rotated(k, deltas[deltas != 0], pairs, n_rot, 500000.0, 0.25, factors)
    again, _ = stored(twin.reshape(-1, heads * dim).astype(np.float32), dtype)
    found = bytes_of[1][moved]
    if dtype == F32:
        np.testing.assert_allclose(found.view(np.float32), twin, rtol=0, atol=1e-6)
    else:
        assert np.mean(found == again.view(np.uint8).reshape(found.shape)) > 0.99


# draws --------------------------------------------------------------------------------------------


def drawn_alike(asked: list[Draw]) -> list[int]:
    """The tokens that the kernel draws; the host draws the same."""
    node, arrays = draws.as_node(asked)
    found = run(node, arrays).view(np.int32).reshape(-1, 2)[:, 0].tolist()
    assert found == [each.token for each in asked]
    return found


@pytest.mark.long
@settings(max_examples=examples(200))
@given(draws.several(st.integers(1, 60)))
def test_a_draw_is_the_hosts(asked):
    assert len(drawn_alike(asked)) == len(asked)


@pytest.mark.long
def test_whole_vocabularies_and_ties_are_drawn_alike():
    """Ten equal logits: the nearest float32 of 0.3 is above it, so a fourth is kept."""
    rng = np.random.default_rng(0)
    how = [Sampling(0.8, 40, 0.95), Sampling(1, 0, 1.0), Sampling(2, 0, 0.9, 0.01), Sampling(1, 3)]
    drawn_alike([
        Draw(rng.normal(0, 3, 32001).astype(np.float32), s, float(np.float32(rng.random())))
        for s in how for _ in range(4)
    ])  # fmt: skip
    ties = [Draw(np.zeros(10, np.float32), Sampling(1.0, 0, 0.3), u) for u in np.linspace(0, 1, 33)]
    assert set(drawn_alike(ties)) == {0, 1, 2, 3}
    even, best = np.zeros(4, np.float32), np.array([1, 2, 2, 0], np.float32)
    asked = [Draw(even, Sampling(1.0, 0, 1.0), u) for u in (0.25, 0.5, 0.75, 1.0)]
    half = Draw(even, Sampling(1.0, 0, 0.5), 0.99)  # two of the four are the half, to the bit
    assert drawn_alike([*asked, half, Draw(best, Sampling(0.0), 0.5)])[-2:] == [1, 1]
