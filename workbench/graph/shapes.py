"""The shape rules of ops: the type and shape of a result by its inputs, and what does not fit.

A rule takes the op's name, inputs and parameters, and gives the type and the shape of the output.
Where the inputs do not fit, it raises UsageError, which names the op and the inputs. `ops.py` has
the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.common.errors import UsageError
from workbench.graph.ir import (
    CACHE_DTYPES,
    F16,
    F32,
    I32,
    I64,
    Q8_ACT,
    QUANTISED,
    U8,
    DType,
    Tensor,
)

SQUARES = 32  # columns of a sum of squares

Inputs = tuple[Tensor, ...]
Params = Mapping[str, Any]
Shape = tuple[DType, tuple[int, ...]]
Rule = Callable[[str, Inputs, Params], Shape]


def _need(condition: bool, op: str, inputs: Inputs, why: str) -> None:
    if not condition:
        raise UsageError(f"{op}({', '.join(map(repr, inputs))}): {why}")


def get_rows(op: str, inputs: Inputs, params: Params) -> Shape:
    table, ids = inputs
    _need(len(table.shape) == 2 and ids.dtype == I32, op, inputs, "wants (n, cols), I32 ids")
    return F32, (ids.shape[0], table.cols)


def like_first(op: str, inputs: Inputs, params: Params) -> Shape:
    """The shape of the first input, which is F32."""
    _need(inputs[0].dtype == F32, op, inputs, "wants F32")
    return F32, inputs[0].shape


def broadcast(op: str, inputs: Inputs, params: Params) -> Shape:
    """The shape of the first input; the second has the same, or is one row."""
    a, b = inputs
    fits = a.dtype == b.dtype == F32 and b.shape in (a.shape, (a.cols,))
    _need(fits, op, inputs, "wants F32 of one shape, or a row as the second")
    return F32, a.shape


def quantize(op: str, inputs: Inputs, params: Params) -> Shape:
    (x,) = inputs
    _need(x.dtype == F32 and len(x.shape) == 2, op, inputs, "wants (T, cols) F32")
    return Q8_ACT, x.shape


def mul_mat(op: str, inputs: Inputs, params: Params) -> Shape:
    w, x = inputs
    _need(w.cols == x.cols, op, inputs, "columns differ")
    allowed = (F32, Q8_ACT) if w.dtype in QUANTISED else (F32,)
    names = " or ".join(d.name for d in allowed)
    _need(x.dtype in allowed, op, inputs, f"activations must be {names}")
    return F32, (x.shape[0], w.shape[0])


def _need_rotation(op: str, inputs: Inputs, n_rot: int, cols: int) -> None:
    """What RoPE wants of heads of `cols` elements, and of the factors, inputs 2 and on."""
    _need(n_rot <= cols and n_rot % 2 == 0, op, inputs, "bad n_rot")
    fits = all(f.shape == (n_rot // 2,) for f in inputs[2:])
    _need(fits, op, inputs, "wants n_rot/2 frequency factors")


def rope(op: str, inputs: Inputs, params: Params) -> Shape:
    x, positions = inputs[:2]
    fits = x.dtype == F32 and len(x.shape) == 3 and positions.dtype == I32
    _need(fits, op, inputs, "wants (T, heads, head_dim) F32 and I32 positions")
    _need_rotation(op, inputs, params["n_rot"], x.cols)
    return F32, x.shape


def rope_shift(op: str, inputs: Inputs, params: Params) -> Shape:
    cache, deltas = inputs[:2]
    heads = params["n_head_kv"]
    fits = (
        (cache.dtype in CACHE_DTYPES and deltas.dtype == I32)
        and (len(cache.shape), len(deltas.shape)) == (2, 1)
        and deltas.shape[0] <= cache.shape[0]
        and cache.cols % (heads * cache.dtype.block) == 0
    )
    why = "wants (cells, heads * head_dim) of a cache type and at most as many I32 deltas"
    _need(fits, op, inputs, why)
    _need_rotation(op, inputs, params["n_rot"], cache.cols // heads)
    return cache.dtype, cache.shape


def _need_rows(op: str, cache: Tensor, x: Tensor, inputs: Inputs) -> None:
    """What a store wants of the rows, and of the cache that takes them."""
    fits = cache.dtype in CACHE_DTYPES and x.dtype == F32 and cache.cols == x.cols
    _need(fits, op, inputs, "wants F32 rows as wide as a cache of a cache type")


def set_rows(op: str, inputs: Inputs, params: Params) -> Shape:
    cache, x, indices = inputs
    _need_rows(op, cache, x, inputs)
    _need(indices.dtype == I64, op, inputs, "wants I64 indices")
    return cache.dtype, cache.shape


def copy_to_view(op: str, inputs: Inputs, params: Params) -> Shape:
    cache, x = inputs
    _need_rows(op, cache, x, inputs)
    inside = 0 <= params["cell"] <= cache.rows - x.rows
    _need(inside, op, inputs, f"rows from cell {params['cell']} on leave the cache")
    return cache.dtype, cache.shape


def copy_by_table(op: str, inputs: Inputs, params: Params) -> Shape:
    cache, x, table = inputs
    _need_rows(op, cache, x, inputs)
    _need(table.dtype == I64, op, inputs, "wants an I64 table")
    inside = len(table.shape) == 1 and 0 <= params["store"] < table.cols
    _need(inside, op, inputs, f"the table has no entry {params['store']}")
    return cache.dtype, cache.shape


EXTENT_CELLS = 256  # an extent is a multiple of it; the step of llama.cpp's search
CLASS_CELLS = 64  # cells of one class


def kv_extents(op: str, inputs: Inputs, params: Params) -> Shape:
    (mask,) = inputs
    _need(mask.dtype == F16 and len(mask.shape) == 2, op, inputs, "wants a mask (T, n_kv) F16")
    return I32, mask.shape[:1]


def kv_classes(op: str, inputs: Inputs, params: Params) -> Shape:
    (mask,) = inputs
    _need(mask.dtype == F16 and len(mask.shape) == 2, op, inputs, "wants a mask (T, n_kv) F16")
    return U8, (mask.shape[0], -(-mask.shape[1] // CLASS_CELLS))


def _fits_attention(more: Sequence[str], others: Inputs, q: Tensor, n_kv: int) -> bool:
    """Whether the inputs of an attention after its mask are what `more` says."""
    if not more and not others:
        return True
    tokens, heads, _ = q.shape
    wanted = {
        "regions": lambda t: t.dtype == I32 and len(t.shape) == 2 and t.cols == 2,
        "extents": lambda t: (t.dtype, t.shape) == (I32, (tokens,)),
        "classes": lambda t: (t.dtype, t.shape) == (U8, (tokens, -(-n_kv // CLASS_CELLS))),
        "sinks": lambda t: (t.dtype, t.shape) == (F32, (heads,)),
    }
    return [n for n in wanted if n in more] == list(more) and len(more) == len(others) and all(
        wanted[name](t) for name, t in zip(more, others, strict=True)
    )  # fmt: skip


def attention(op: str, inputs: Inputs, params: Params) -> Shape:
    q, k, v, mask, *others = inputs
    fits = (
        _fits_attention(params.get("more", ()), tuple(others), q, params["n_kv"])
        and (q.dtype, mask.dtype) == (F32, F16)
        and k.dtype in CACHE_DTYPES
        and v.dtype in CACHE_DTYPES
        and mask.shape == (q.shape[0], params["n_kv"])
        and k.shape[0] >= params["n_kv"]
        and k.cols == v.cols == params["n_head_kv"] * q.cols
        and q.cols % k.dtype.block == q.cols % v.dtype.block == 0
        and q.shape[1] % params["n_head_kv"] == 0
    )
    _need(fits, op, inputs, "shapes or types do not fit")
    return F32, (q.shape[0], q.shape[1] * q.shape[2])


DRAW_SETTINGS = 5  # temperature, top_k, top_p, log(min_p), and the uniform number of a draw


def feed(op: str, inputs: Inputs, params: Params) -> Shape:
    ids, last = inputs
    fits = ids.dtype == last.dtype == I32 and len(ids.shape) == len(last.shape) == 1
    _need(fits, op, inputs, "wants ids (T,) and last tokens (n,), I32")
    return I32, ids.shape


def draw(op: str, inputs: Inputs, params: Params) -> Shape:
    logits, settings = inputs
    fits = (
        logits.dtype == settings.dtype == F32
        and len(logits.shape) == 2
        and settings.shape == (logits.shape[0], DRAW_SETTINGS)
    )
    _need(fits, op, inputs, f"wants logits (n, n_vocab) and settings (n, {DRAW_SETTINGS}), F32")
    return I32, (logits.shape[0], 2)


def keep_tokens(op: str, inputs: Inputs, params: Params) -> Shape:
    last, ids, rows = inputs
    fits = all(t.dtype == I32 for t in inputs) and ids.shape == (*rows.shape, 2)
    _need(fits, op, inputs, "wants last tokens (n,), ids (rows, 2), and rows, I32")
    return last.dtype, last.shape


def copy_cells(op: str, inputs: Inputs, params: Params) -> Shape:
    cache, pairs = inputs
    fits = cache.dtype in CACHE_DTYPES and pairs.dtype == I64 and pairs.shape[1:] == (2,)
    _need(fits, op, inputs, "wants a cache (cells, cols) and pairs (n, 2) I64")
    return cache.dtype, cache.shape


def square_sums(op: str, inputs: Inputs, params: Params) -> Shape:
    (x,) = inputs
    fits = x.dtype == F32 and len(x.shape) == 2 and x.cols % SQUARES == 0
    _need(fits, op, inputs, f"wants (T, cols) F32, cols a multiple of {SQUARES}")
    return F32, (x.shape[0], x.cols // SQUARES)


def rms_scale(op: str, inputs: Inputs, params: Params) -> Shape:
    x, squares = inputs
    fits = x.dtype == squares.dtype == F32 and len(x.shape) == 2 and x.rows == squares.rows
    _need(fits, op, inputs, "wants (T, cols) F32 and sums of squares of T rows")
    return F32, x.shape
