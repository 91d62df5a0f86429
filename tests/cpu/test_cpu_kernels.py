"""Every CPU kernel but mul_mat against a slow twin in NumPy (argument order as
backend/issue/args.py)."""

from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_runs import run, run_parts, written_by

from tests.oracles.dequantize import dequantize
from tests.profiles import examples
from workbench.backend.cpu.kernels import op_table
from workbench.backend.issue import args
from workbench.graph import ops
from workbench.graph.ir import F16, F32, I32, I64, QUANTISED, WEIGHT_DTYPES, Node, Tensor
from workbench.model.gguf.quants import quantize_activations, random_blocks

RNG = np.random.default_rng(7)
SHAPES = [(1, 1), (1, 33), (2, 64), (5, 16), (7, 100), (3, 257)]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def f32(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, F32, array.shape)


def floats(out: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return out.view(np.float32).reshape(shape)


# elementwise


@pytest.mark.parametrize("op,twin", [("mul", np.multiply), ("add", np.add)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("one_row", [False, True])
def test_binary(op: str, twin: np.ufunc, shape: tuple[int, int], one_row: bool) -> None:
    a, b = normal(*shape), normal(*(shape[1:] if one_row else shape))
    ta, tb = f32("a", a), f32("b", b)
    out = run_parts(ops.make(op, "y", ta, tb), {ta: a, tb: b})
    assert np.array_equal(floats(out, shape), twin(a, b))


@pytest.mark.parametrize("shape", [*SHAPES, (4, 3, 16)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x = normal(*shape) * 3
    t = f32("x", x)
    out = run_parts(ops.make("rms_norm", "y", t, eps=1e-5), {t: x})
    wide = x.astype(np.float64)
    twin = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(floats(out, shape), twin, rtol=3e-7, atol=0)


def test_rms_norm_of_zeros_is_zeros() -> None:
    x = np.zeros((2, 40), np.float32)
    t = f32("x", x)
    assert not floats(run(ops.make("rms_norm", "y", t, eps=1e-6), {t: x}), (80,)).any()


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (8, 64), (5, 1056)])
def test_square_sums(shape: tuple[int, int]) -> None:
    x = normal(*shape) * 3
    t = f32("x", x)
    out = floats(run_parts(ops.make("square_sums", "s", t), {t: x}), (shape[0], shape[1] // 32))
    twin = (x.astype(np.float64) ** 2).reshape(*out.shape, 32).sum(axis=-1)
    np.testing.assert_allclose(out, twin, rtol=6e-7, atol=0)


@pytest.mark.parametrize("sums", [1, 3, 33])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_scale(shape: tuple[int, int], sums: int) -> None:
    """Rows of any length, by the sums of squares of rows of another."""
    x, squares = normal(*shape) * 3, np.square(normal(shape[0], sums)) * 32
    tx, ts = f32("x", x), f32("s", squares)
    out = run_parts(ops.make("rms_scale", "y", tx, ts, eps=1e-3), {tx: x, ts: squares})
    mean = squares.astype(np.float64).sum(axis=-1, keepdims=True) / (32 * sums)
    twin = x / np.sqrt(mean + 1e-3)
    np.testing.assert_allclose(floats(out, shape), twin, rtol=3e-7, atol=0)


@pytest.mark.parametrize("shape", [(1, 32), (4, 160)])
def test_two_halves_are_a_norm(shape: tuple[int, int]) -> None:
    x = normal(*shape) * 3
    t = f32("x", x)
    sums = floats(run(ops.make("square_sums", "s", t), {t: x}), (shape[0], shape[1] // 32))
    ts = f32("s", sums)
    halves = run(ops.make("rms_scale", "y", t, ts, eps=1e-5), {t: x, ts: sums})
    whole = run(ops.make("rms_norm", "n", t, eps=1e-5), {t: x})
    np.testing.assert_allclose(floats(halves, shape), floats(whole, shape), rtol=6e-7, atol=0)


def test_scale_of_zeros_and_of_a_nan() -> None:
    """Nothing in a row: the scale is 1 / sqrt(eps), as a norm has it; a NaN stays where it is."""
    x = normal(3, 40)
    squares = np.array([[0, 0], [1, np.nan], [32, 32]], np.float32)
    tx, ts = f32("x", x), f32("s", squares)
    out = run(ops.make("rms_scale", "y", tx, ts, eps=0.25), {tx: x, ts: squares})
    y = floats(out, x.shape)
    assert np.array_equal(y[0], 2 * x[0]) and np.isnan(y[1]).all()
    np.testing.assert_allclose(y[2], x[2] / np.sqrt(1.25), rtol=3e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, int]) -> None:
    gate, up = normal(*shape) * 20, normal(*shape)
    tg, tu = f32("gate", gate), f32("up", up)
    out = run_parts(ops.make("swiglu", "y", tg, tu), {tg: gate, tu: up})
    wide = gate.astype(np.float64)
    twin = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(floats(out, shape), twin, rtol=1e-6, atol=1e-37)


def test_swiglu_far_out() -> None:
    gate = np.array([[-1e4, -200.0, -87.0, -0.0, 0.0, 1e-20, 87.0, 200.0, 1e4, np.inf, np.nan]])
    gate = gate.astype(np.float32)
    up = np.ones_like(gate)
    tg, tu = f32("gate", gate), f32("up", up)
    y = floats(run(ops.make("swiglu", "y", tg, tu), {tg: gate, tu: up}), gate.shape)[0]
    assert np.isnan(y[-1]) and y[-2] == np.inf
    np.testing.assert_allclose(y[3:9], gate[0, 3:9] * [0.5, 0.5, 0.5, 1, 1, 1], rtol=1e-6)
    assert (np.abs(y[:3]) < 1e-33).all()


# quantize


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.sampled_from([32, 64, 96, 160])),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    )
)
@settings(max_examples=examples(60))
def test_quantize_gives_the_twins_bytes(x: np.ndarray) -> None:
    t = f32("x", x)
    out = run_parts(ops.make("quantize", "q", t), {t: x})
    assert np.array_equal(out.reshape(len(x), -1), quantize_activations(x))


def test_quantize_rounds_half_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    t = f32("x", x)
    out = run(ops.make("quantize", "q", t), {t: x})
    assert out[:7].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_quantize_keeps_a_nan_visible() -> None:
    x = normal(1, 64)
    x[0, 40] = np.nan
    t = f32("x", x)
    out = run(ops.make("quantize", "q", t), {t: x})
    assert np.isnan(out[64:72].view(np.float32)).tolist() == [False, True]


# rows


def _table(name: str, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    dtype = next(d for d in WEIGHT_DTYPES if d.name == name)
    return Tensor("table", dtype, (rows, cols)), random_blocks(RNG, dtype, rows, cols, 0.5)


@pytest.mark.parametrize("name", [d.name for d in WEIGHT_DTYPES])
def test_get_rows_gives_the_reference_bits(name: str) -> None:
    table, raw = _table(name, 11, 512)
    ids = np.array([3, 0, 10, 3, 7], np.int32)
    t = Tensor("ids", I32, ids.shape)
    out = run_parts(ops.make("get_rows", "y", table, t), {table: raw, t: ids})
    twin = dequantize(raw, table.dtype, (11, 512))[ids]
    assert np.array_equal(out, twin.view(np.uint8).reshape(-1))
    if table.dtype in QUANTISED:
        packed = np.zeros(op_table.repacked_bytes(table.dtype, 11, 512, "rows16"), np.uint8)
        op_table.repack(packed.ctypes.data, raw.ctypes.data, table.dtype, 11, 512, "rows16")
        node = ops.make("get_rows", "y", table, t)
        assert np.array_equal(run(node, {table: packed, t: ids}, layout="rows16"), out)
    other = gguf.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(11, 512)[ids]
    assert np.array_equal(floats(out, (5, 512)), other)


@pytest.mark.parametrize("name", ["MXFP4", "Q6_K"])
def test_get_rows_of_any_bits(name: str) -> None:
    """Blocks of random bytes: every exponent of MXFP4, every sign of a scale."""
    table, raw = _table(name, 64, 256)
    raw = RNG.integers(0, 256, raw.shape, dtype=np.uint8)
    if name == "Q6_K":
        raw[:, 209] &= 0x3F  # finite
    ids = np.arange(64, dtype=np.int32)
    t = Tensor("ids", I32, ids.shape)
    out = run(ops.make("get_rows", "y", table, t), {table: raw, t: ids})
    with np.errstate(over="ignore"):  # the largest exponents give infinities
        twin = dequantize(raw, table.dtype, (64, 256))
    assert np.array_equal(floats(out, (64, 256)), twin)


def test_get_rows_outside_the_table_is_nan() -> None:
    table, raw = _table("Q8_0", 4, 32)
    ids = np.array([-1, 3, 4, 2**31 - 1], np.int32)
    t = Tensor("ids", I32, ids.shape)
    out = floats(run(ops.make("get_rows", "y", table, t), {table: raw, t: ids}), (4, 32))
    assert np.isnan(out).all(axis=1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("cols", [1, 16, 40])
def test_set_rows_rounds_and_stores_only_inside(cols: int) -> None:
    cache = RNG.standard_normal((9, cols)).astype(np.float16)
    x = normal(4, cols) * 1000
    x[0, 0] = 1 + 2**-11  # a tie: to even, down
    indices = np.array([5, -1, 6, 2], np.int64)  # n_kv is 6: only 5 and 2 are stored
    tc, tx, ti = Tensor("c", F16, cache.shape), f32("x", x), Tensor("i", I64, indices.shape)
    node = ops.make("set_rows", "c", tc, tx, ti, n_kv=6)
    twin = cache.copy()
    twin[5], twin[2] = x[0].astype(np.float16), x[3].astype(np.float16)
    for n_parts in (1, 2, 3):
        out = run(node, {tx: x, ti: indices}, n_parts, start=cache)
        assert np.array_equal(out.view(np.float16).reshape(cache.shape), twin)


@pytest.mark.parametrize("cols", [1, 16, 40])
def test_copies_to_cells_in_a_row_store_as_set_rows_does(cols: int) -> None:
    """To the bit, in any number of parts; a table's rows outside 0..n_kv-1 are not stored."""
    cache = RNG.standard_normal((9, cols)).astype(np.float16)
    x = normal(3, cols) * 1000
    x[0, 0] = 1 + 2**-11  # a tie: to even, down
    tc, tx = Tensor("c", F16, cache.shape), f32("x", x)
    ti, tt = Tensor("i", I64, (3,)), Tensor("t", I64, (4,))
    by_rows = ops.make("set_rows", "c", tc, tx, ti, n_kv=6)
    by_table = ops.make("copy_by_table", "c", tc, tx, tt, store=2, n_kv=6)
    for first in (0, 3, 4, 5, 6, 7, -1, -2, -3, -4, 2**63 - 1, -(2**63)):
        rows = np.array([max(min(first + t, 99), -99) for t in range(3)])
        twin = run(by_rows, {tx: x, ti: rows}, start=cache)
        table = np.array([0, 1, first, 2])
        for n_parts in (1, 2, 3):
            found = run(by_table, {tx: x, tt: table}, n_parts, start=cache)
            assert np.array_equal(found, twin), first
            if 0 <= first <= 3:
                by_view = ops.make("copy_to_view", "c", tc, tx, cell=first)
                assert np.array_equal(run(by_view, {tx: x}, n_parts, start=cache), twin)


# attention


def attention_case(
    n_tokens: int, heads: int, kv_heads: int, dim: int, n_kv: int, mask: np.ndarray, seed: int = 0
) -> tuple[Node, dict[Tensor, np.ndarray], np.ndarray]:
    """The node, its arrays, and its twin in float64. Masked cells hold infinities and NaN."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n_tokens, heads, dim)).astype(np.float32) * 2
    k, v = (rng.standard_normal((n_kv + 3, kv_heads * dim)).astype(np.float16) for _ in range(2))
    dead = [*np.flatnonzero(np.isinf(mask).all(axis=0)), n_kv, n_kv + 1, n_kv + 2]
    k[dead], v[dead] = np.nan, np.inf
    tq, tk, tv = f32("q", q), Tensor("k", F16, k.shape), Tensor("v", F16, v.shape)
    tm = Tensor("mask", F16, mask.shape)
    scale = dim**-0.5
    node = ops.make("attention", "y", tq, tk, tv, tm, n_kv=n_kv, n_head_kv=kv_heads, scale=scale)
    twin = np.zeros((n_tokens, heads, dim))
    wide_k, wide_v = (a.astype(np.float64).reshape(-1, kv_heads, dim) for a in (k, v))
    for t in range(n_tokens):
        live = np.flatnonzero(mask[t] == 0)
        for h in range(heads if len(live) else 0):
            scores = scale * wide_k[live, h // (heads // kv_heads)] @ q[t, h].astype(np.float64)
            p = np.exp(scores - scores.max())
            twin[t, h] = p @ wide_v[live, h // (heads // kv_heads)] / p.sum()
    return node, {tq: q, tk: k, tv: v, tm: mask}, twin.reshape(n_tokens, -1)


def causal(n_tokens: int, n_kv: int, past: int) -> np.ndarray:
    """Token t sees cells 0..past+t."""
    return np.where(np.arange(n_kv) <= past + np.arange(n_tokens)[:, None], 0, -np.inf).astype(
        np.float16
    )


@pytest.mark.parametrize(
    "n_tokens,heads,kv_heads,dim,n_kv",
    [
        (1, 8, 2, 64, 256), (1, 4, 4, 16, 32), (3, 6, 3, 8, 17), (9, 4, 1, 80, 48),
        (19, 4, 2, 32, 64), (2, 5, 5, 20, 1), (1, 2, 1, 128, 300),
    ],
)  # fmt: skip
def test_attention(n_tokens: int, heads: int, kv_heads: int, dim: int, n_kv: int) -> None:
    mask = causal(n_tokens, n_kv, max(0, n_kv - n_tokens - 5))
    node, arrays, twin = attention_case(n_tokens, heads, kv_heads, dim, n_kv, mask)
    out = floats(run_parts(node, arrays), twin.shape)
    np.testing.assert_allclose(out, twin, rtol=0, atol=2e-6)


@given(st.data())
@settings(max_examples=examples(40))
def test_attention_under_any_mask(data: st.DataObject) -> None:
    """Any cells hidden, whole rows too: those give zeros."""
    n_tokens, n_kv = data.draw(st.integers(1, 10)), data.draw(st.integers(1, 70))
    seen = data.draw(hnp.arrays(bool, (n_tokens, n_kv)))
    mask = np.where(seen, 0, -np.inf).astype(np.float16)
    node, arrays, twin = attention_case(n_tokens, 4, 2, 16, n_kv, mask, seed=n_kv)
    out = floats(run_parts(node, arrays), twin.shape)
    np.testing.assert_allclose(out, twin, rtol=0, atol=2e-6)
    assert not out[~seen.any(axis=1)].any()


def test_attention_of_a_token_does_not_depend_on_its_batch_or_padding() -> None:
    node, arrays, twin = attention_case(11, 4, 2, 32, 64, causal(11, 64, 20))
    q, k, v, mask = (arrays[t] for t in node.inputs if t is not None)
    batch = floats(run(node, arrays), twin.shape)
    for t in (0, 7, 10):
        one = {f32("q", q[t : t + 1]): q[t : t + 1]}
        wider = np.full((1, 128), -np.inf, np.float16)
        wider[0, :64] = mask[t]
        more = np.zeros((64, k.shape[1]), np.float16)
        tk, tv = Tensor("k", F16, (128, k.shape[1])), Tensor("v", F16, (128, k.shape[1]))
        tm = Tensor("mask", F16, wider.shape)
        one |= {tk: np.concatenate([k[:64], more]), tv: np.concatenate([v[:64], more]), tm: wider}
        alone = ops.make("attention", "y", *one, n_kv=128, n_head_kv=2, scale=32**-0.5)
        assert np.array_equal(floats(run(alone, one), (1, 128))[0], batch[t])


# parts


def _shared_cases() -> dict[str, tuple[Node, dict[Tensor, np.ndarray]]]:
    x, p = normal(7, 64), np.arange(7, dtype=np.int32)
    tx, tp = f32("x", x), Tensor("p", I32, p.shape)
    heads = f32("heads", x.reshape(7, 4, 16))
    attention, arrays, _ = attention_case(9, 4, 2, 16, 32, causal(9, 32, 3))
    squares = np.square(normal(7, 2))
    ts = f32("s", squares)
    return {
        "add": (ops.make("add", "y", tx, tx), {tx: x}),
        "square_sums": (ops.make("square_sums", "y", tx), {tx: x}),
        "rms_scale": (ops.make("rms_scale", "y", tx, ts, eps=1e-5), {tx: x, ts: squares}),
        "rms_norm": (ops.make("rms_norm", "y", tx, eps=1e-5), {tx: x}),
        "swiglu": (ops.make("swiglu", "y", tx, tx), {tx: x}),
        "quantize": (ops.make("quantize", "y", tx), {tx: x}),
        "rope": (
            ops.make(
                "rope", "y", heads, tp, None, n_rot=16, neox=True, theta_base=1e4, freq_scale=1.0
            ),
            {heads: x.reshape(7, 4, 16), tp: p},
        ),
        "attention": (attention, arrays),
    }


@pytest.mark.parametrize("op", _shared_cases())
def test_parts_write_disjoint_bytes_and_all_of_them(op: str) -> None:
    node, arrays = _shared_cases()[op]
    written = written_by(node, arrays, 3, "file")
    assert (written.sum(axis=0) == 1).all()
    assert written.any(axis=1).all()


def test_every_op_has_a_kernel() -> None:
    assert set(args.ARGS) == set(ops.OPS)
    for op in ops.OPS:
        typed = ("get_rows", "mul_mat", "set_rows", "copy_to_view", "copy_by_table", "rope_shift")
        suffix = ("F16",) if op in typed else ("F16", "F16") if op == "attention" else ()
        assert op_table.kernel_address((op, *suffix)) != 0
    with pytest.raises(KeyError):
        op_table.kernel_address(("softmax",))


def test_importing_the_package_loads_no_compiler() -> None:
    code = (
        "import sys, workbench.backend.cpu; "
        "sys.exit('numba' in sys.modules or 'llvmlite' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
