"""The shape rules of ops: the type and shape of a result by its inputs, and what does not fit.

A rule takes inputs and parameters, and gives the type and the shape of the output. It raises
UsageError, which names the op and its inputs, where they do not fit. `ops.py` has the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.errors import UsageError
from workbench.graph.ir import F16, F32, I32, I64, Q8_ACT, QUANTISED, DType, Tensor

SQUARES = 32  # columns of a sum of squares

Inputs = tuple[Tensor, ...]
Params = Mapping[str, Any]
Shape = tuple[DType, tuple[int, ...]]
Rule = Callable[[Inputs, Params], Shape]


def _need(condition: bool, op: str, inputs: Inputs, why: str) -> None:
    if not condition:
        raise UsageError(f"{op}({', '.join(map(repr, inputs))}): {why}")


def get_rows(inputs: Inputs, params: Params) -> Shape:
    table, ids = inputs
    _need(
        len(table.shape) == 2 and ids.dtype == I32, "get_rows", inputs, "wants (n, cols), I32 ids"
    )
    return F32, (ids.shape[0], table.cols)


def like_first(op: str) -> Rule:
    """The shape of the first input, which is F32."""

    def infer(inputs: Inputs, params: Params) -> Shape:
        _need(inputs[0].dtype == F32, op, inputs, "wants F32")
        return F32, inputs[0].shape

    return infer


def broadcast(op: str) -> Rule:
    """The shape of the first input; the second has the same, or is one row."""

    def infer(inputs: Inputs, params: Params) -> Shape:
        a, b = inputs
        _need(
            a.dtype == F32 and b.dtype == F32 and (b.shape == a.shape or b.shape == (a.cols,)),
            op,
            inputs,
            "wants F32 of one shape, or a row as the second",
        )
        return F32, a.shape

    return infer


def quantize(inputs: Inputs, params: Params) -> Shape:
    (x,) = inputs
    _need(x.dtype == F32 and len(x.shape) == 2, "quantize", inputs, "wants (T, cols) F32")
    return Q8_ACT, x.shape


def mul_mat(inputs: Inputs, params: Params) -> Shape:
    w, x = inputs
    _need(w.cols == x.cols, "mul_mat", inputs, "columns differ")
    allowed = (F32, Q8_ACT) if w.dtype in QUANTISED else (F32,)
    names = " or ".join(d.name for d in allowed)
    _need(x.dtype in allowed, "mul_mat", inputs, f"activations must be {names}")
    return F32, (x.shape[0], w.shape[0])


def rope(inputs: Inputs, params: Params) -> Shape:
    x, positions, *factors = inputs
    _need(
        x.dtype == F32 and len(x.shape) == 3 and positions.dtype == I32,
        "rope",
        inputs,
        "wants (T, heads, head_dim) F32 and I32 positions",
    )
    _need(params["n_rot"] <= x.cols and params["n_rot"] % 2 == 0, "rope", inputs, "bad n_rot")
    _need(
        all(f.shape == (params["n_rot"] // 2,) for f in factors),
        "rope",
        inputs,
        "wants n_rot/2 frequency factors",
    )
    return F32, x.shape


def rope_shift(inputs: Inputs, params: Params) -> Shape:
    cache, deltas, *factors = inputs
    heads, n_rot = params["n_head_kv"], params["n_rot"]
    _need(
        cache.dtype == F16
        and len(cache.shape) == 2
        and deltas.dtype == I32
        and len(deltas.shape) == 1
        and deltas.shape[0] <= cache.shape[0]
        and cache.cols % heads == 0,
        "rope_shift",
        inputs,
        "wants (cells, heads * head_dim) F16 and at most as many I32 deltas",
    )
    _need(n_rot <= cache.cols // heads and n_rot % 2 == 0, "rope_shift", inputs, "bad n_rot")
    _need(
        all(f.shape == (n_rot // 2,) for f in factors),
        "rope_shift",
        inputs,
        "wants n_rot/2 frequency factors",
    )
    return cache.dtype, cache.shape


def set_rows(inputs: Inputs, params: Params) -> Shape:
    cache, x, indices = inputs
    _need(
        cache.dtype == F16 and x.dtype == F32 and indices.dtype == I64 and cache.cols == x.cols,
        "set_rows",
        inputs,
        "wants F16 cache, F32 rows, I64 indices",
    )
    return cache.dtype, cache.shape


def attention(inputs: Inputs, params: Params) -> Shape:
    q, k, v, mask = inputs
    _need(
        q.dtype == F32
        and k.dtype == F16
        and v.dtype == F16
        and mask.dtype == F16
        and mask.shape == (q.shape[0], params["n_kv"])
        and k.shape[0] >= params["n_kv"]
        and k.cols == params["n_head_kv"] * q.cols
        and q.shape[1] % params["n_head_kv"] == 0,
        "attention",
        inputs,
        "shapes or types do not fit",
    )
    return F32, (q.shape[0], q.shape[1] * q.shape[2])


def square_sums(inputs: Inputs, params: Params) -> Shape:
    (x,) = inputs
    fits = x.dtype == F32 and len(x.shape) == 2 and x.cols % SQUARES == 0
    _need(fits, "square_sums", inputs, f"wants (T, cols) F32, cols a multiple of {SQUARES}")
    return F32, (x.shape[0], x.cols // SQUARES)


def rms_scale(inputs: Inputs, params: Params) -> Shape:
    x, squares = inputs
    fits = x.dtype == squares.dtype == F32 and len(x.shape) == 2 and x.rows == squares.rows
    _need(fits, "rms_scale", inputs, "wants (T, cols) F32 and sums of squares of T rows")
    return F32, x.shape
