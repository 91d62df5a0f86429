"""Products of up to 8 tokens on CUDA: launches of kernels/product.cu and kernels/product_qkv.cu.

Pure. A kernel is compiled for its weight types and a tuning. `tuning.py` chooses the tuning by
type, shape, tokens and epilogue. Only `Tuning.row_warps` decides the order in which an element is
summed. It is the same for any number of tokens, so a token's result does not depend on its batch.
Fused and unfused products may differ in their last bits, because the tables may give them different
`row_warps`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.cuda.kernels.tuning import GROUP, Tuning, together, tuning
from workbench.backend.issue.args import Args
from workbench.common.errors import DeviceError

MOST_TOKENS = 8
MOST_SEGMENTS = 3
MOST_CLUSTER = 8  # the most blocks of a cluster that every device with clusters accepts
MOST_SCALED = 16384  # the most columns of x with half a norm: MOST_SQUARES of kernels/rms.cuh
WARP = 32
_QUANTISE = {"glu_q8": "GLU_Q8", "norm_q8": "NORM_Q8"}  # epilogue with a quantised result -> macro
# name -> source file, kernel, macro EPILOGUE
EPILOGUES = {
    "plain": ("product", "product_plain", 0),
    "qkv": ("product_qkv", "product_qkv", 1),
    "glu": ("product", "product_glu", 2),
    "glu_q8": ("product", "product_glu", 2),
    "norm": ("product", "product_norm", 3),
    "norm_q8": ("product", "product_norm", 3),
}
_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of an element
_WIDE = 8  # float weights of a unit


class Segment(NamedTuple):
    """One weight of a launch, and its results. Addresses in bytes.

    dtype, w, rows: the weight (rows, cols).
    bias: float32 (rows,); 0 without a bias.
    dst: float32 (n_tokens, rows), unless the function of the launch names another type.
    """

    dtype: str
    w: int
    rows: int
    bias: int
    dst: int


class X(NamedTuple):
    """The activations of a product, (n_tokens, cols). Here quantised weights need Q8_ACT, and float
    weights need F32; `gemm.py` also takes others.

    at: address in bytes.
    quantised: Q8_ACT, rather than F32.
    """

    at: int
    quantised: bool
    cols: int
    n_tokens: int


class HeadNorm(NamedTuple):
    """The norm of the query and key heads before they are rotated.

    q_factors, k_factors: float32 (head_dim,), the weights of the norm.
    """

    q_factors: int
    k_factors: int
    eps: float


class Rotate(NamedTuple):
    """How Q and K are rotated, and the cells in which K and V are stored.

    positions: int32 (n_tokens,).
    freq_factors: float32 (n_rot / 2,); 0 without factors.
    k_indices, v_indices: int64 (n_tokens,), rows of the caches. A row outside 0 .. n_kv - 1 is not
        stored.
    norm: of the heads; None without a norm.
    """

    positions: int
    freq_factors: int
    head_dim: int
    n_rot: int
    neox: int
    theta_base: float
    freq_scale: float
    k_indices: int
    v_indices: int
    n_kv: int
    norm: HeadNorm | None = None


class Scale(NamedTuple):
    """The second half of a norm: results are scaled by 1 / sqrt(mean of squares + eps) of their row
    of x.

    squares: float32 (n_tokens, cols / 32), the sum of squares of each 32 columns before x was
        multiplied by the norm's weight.
    """

    squares: int
    eps: float


class Norm(NamedTuple):
    """The first half of a norm, after a product and a residual add. Rows have segment.rows columns.

    sum: float32 (n_tokens, rows): residual + product.
    squares: float32 (n_tokens, rows / 32): the sum of squares of each 32 columns of `sum`.
    residual: float32 (n_tokens, rows).
    factors: float32 (rows,): the norm's weight.
    quantised: whether segment.dst, the sum times the factors, is Q8_ACT rather than float32.
    """

    sum: int
    squares: int
    residual: int
    factors: int
    quantised: bool


def whole_groups(rows: int) -> bool:
    """Whether a weight has whole groups of 32 rows. `normed` needs them, and so does `glu` with a
    quantised result."""
    return rows % GROUP == 0


# launches -----------------------------------------------------------------------------------------


@functools.cache
def defines(
    dtypes: tuple[str, ...],
    cols: int,
    n_tokens: int,
    epilogue: str,
    t: Tuning,
    scaled: bool = False,
) -> tuple[str, ...]:
    """The macros of a compilation. dtypes: of the segments."""
    wanted = [f"TYPE_{i}={name}" for i, name in enumerate(dtypes)]
    wanted += [f"EPILOGUE={EPILOGUES[epilogue][2]}", f"N={together(n_tokens)}", *t.defines()]
    wanted += [_QUANTISE[epilogue]] if epilogue in _QUANTISE else []
    wanted += ["SCALED"] if scaled else []
    wanted += ["NARROW"] if dtypes[0] in _FLOATS and cols % _WIDE else []
    return tuple(wanted)


def plain(
    segments: Sequence[Segment], x: X, scale: Scale | None = None, tune: Tuning | None = None
) -> Kernel:
    """The products of one x with 1 to 3 weights, plus biases.

    tune: in place of the tuning in the tables.

    Raises DeviceError for types, tokens or columns that no kernel takes.
    """
    t = tune or _tuning(segments, x, "plain")
    args, grid = segment_args(segments), _grid(segments, t)
    return _kernel("plain", segments, x, scale, t, grid, args)


def qkv(segments: Sequence[Segment], x: X, rotate: Rotate, scale: Scale | None = None) -> Kernel:
    """The products Q, K and V, the norm of the heads (where `rotate.norm`), RoPE of Q and K, and
    the stores of K and V.

    segments: Q with dst float32 (n_tokens, rows); K and V with an F16 cache (cells, rows) as dst.
    """
    heads = all(s.rows % rotate.head_dim == 0 for s in segments)
    if len(segments) != MOST_SEGMENTS or rotate.head_dim % 2 or rotate.n_rot % 2 or not heads:
        raise DeviceError(
            f"q, k, v of {[s.rows for s in segments]} rows are no whole heads that one launch can "
            f"rotate on cuda (head_dim {rotate.head_dim}, n_rot {rotate.n_rot}, both to be even); "
            "use fuse_rope_store=off"
        )
    r = rotate
    t = _heads_tuning(segments, x, r.head_dim) if r.norm else _tuning(segments, x, "qkv")
    rest: Args = [
        r.positions, r.freq_factors, r.k_indices, r.v_indices, r.n_kv, r.head_dim, r.n_rot,
        int(r.neox), float(r.theta_base), float(r.freq_scale), *(r.norm or HeadNorm(0, 0, 0.0)),
    ]  # fmt: skip
    args, grid = segment_args(segments), _grid(segments, t)
    made = _kernel("qkv", segments, x, scale, t, grid, args, rest)
    if r.norm is None:
        return made
    return made._replace(defines=(*made.defines, f"HEAD_BLOCKS={r.head_dim // t.lines}"))


def can_norm_heads(
    dtypes: Sequence[str], rows: Sequence[int], cols: int, n_tokens: int, head_dim: int
) -> bool:
    """Whether `qkv` can norm the heads of Q, K, V of these types and rows, on a device with
    clusters. A head must be made by whole blocks, at most a cluster of them. The pairs of lines of
    a block must fit a warp."""
    segments = [Segment(dtype, 0, n, 0, 0) for dtype, n in zip(dtypes, rows, strict=True)]
    lines = _heads_tuning(segments, X(0, True, cols, n_tokens), head_dim).lines
    whole = all(n % head_dim == 0 for n in rows) and head_dim % lines == 0
    pairs = lines // 2
    return whole and head_dim // lines <= MOST_CLUSTER and pairs <= WARP and not pairs & (pairs - 1)


def glu(
    gate: Segment,
    up: Segment,
    x: X,
    quantised: bool,
    scale: Scale | None = None,
    tune: Tuning | None = None,
) -> Kernel:
    """silu(gate) * up, stored at gate's dst: float32 (n_tokens, rows), or with `quantised` Q8_ACT
    rows."""
    if (gate.dtype, gate.rows) != (up.dtype, up.rows) or (
        quantised and not whole_groups(gate.rows)
    ):
        raise DeviceError(
            f"gate {gate.dtype} of {gate.rows} rows and up {up.dtype} of {up.rows} cannot be one "
            f"launch on cuda{' that quantises' if quantised else ''}; use fuse_glu=off"
        )
    epilogue = "glu_q8" if quantised else "glu"
    t = tune or _tuning([gate, up], x, epilogue)
    args: Args = [gate.dst, gate.w, gate.bias, up.w, up.bias, gate.rows]
    grid = blocks(gate.rows, t.lines // 2)
    return _kernel(epilogue, [gate], x, scale, t, grid, args)


def normed(segment: Segment, x: X, norm: Norm, scale: Scale | None = None) -> Kernel:
    """A product, its bias, the residual add and the first half of a norm."""
    epilogue = "norm_q8" if norm.quantised else "norm"
    t = _tuning([segment], x, epilogue)
    args: Args = [
        segment.dst, segment.w, segment.bias, segment.rows, norm.sum, norm.squares,
        norm.residual, norm.factors,
    ]  # fmt: skip
    grid = blocks(segment.rows, t.lines)
    return _kernel(epilogue, [segment], x, scale, t, grid, args)


def _heads_tuning(segments: Sequence[Segment], x: X, head_dim: int) -> Tuning:
    """As `_tuning`, but with enough passes for a cluster of blocks to make a whole head."""
    t = _tuning(segments, x, "qkv")
    return t._replace(passes=max(t.passes, head_dim // (MOST_CLUSTER * t.lines)))


def _tuning(segments: Sequence[Segment], x: X, epilogue: str) -> Tuning:
    """The tuning of a launch: that of the weight type with the most rows."""
    rows: dict[str, int] = {}
    for s in segments:
        rows[s.dtype] = rows.get(s.dtype, 0) + s.rows
    most = max(rows, key=lambda dtype: rows[dtype])
    found = tuning(most, sum(rows.values()), x.cols, x.n_tokens, epilogue)
    # Types differ in the registers that they need: one type's limit would make another type spill.
    return found if len(rows) == 1 else found._replace(per_sm=1)


def segment_args(segments: Sequence[Segment]) -> Args:
    """dst, w, bias and rows of MOST_SEGMENTS segments; zeros for missing segments."""
    args: Args = []
    for s in segments:
        args += [s.dst, s.w, s.bias, s.rows]
    return args + [0] * (4 * (MOST_SEGMENTS - len(segments)))


def _grid(segments: Sequence[Segment], t: Tuning) -> int:
    """Blocks of a launch in which a block has lines of one segment."""
    return sum(blocks(s.rows, t.lines) for s in segments)


def _kernel(
    epilogue: str,
    segments: Sequence[Segment],
    x: X,
    scale: Scale | None,
    t: Tuning,
    grid: int,
    args: Args,
    rest: Sequence[int | float] = (),
) -> Kernel:
    """args: the arguments before x. rest: the arguments after the scale."""
    cols, n_tokens, dtypes = x.cols, x.n_tokens, tuple([s.dtype for s in segments])
    if len({name in _FLOATS for name in dtypes}) != 1 or not 1 <= n_tokens <= MOST_TOKENS:
        raise DeviceError(
            f"weights {', '.join(dtypes)} and {n_tokens} tokens are no product of one launch on "
            f"cuda: all float or all quantised, up to {MOST_TOKENS} tokens"
        )
    if scale is not None and cols > MOST_SCALED:
        raise DeviceError(
            f"rows of {cols} columns are too long for half a norm on cuda (at most {MOST_SCALED}); "
            "use fuse_product_norm=off"
        )
    macros = defines(dtypes, cols, n_tokens, epilogue, t, scale is not None)
    given: Args = [x.at, cols, n_tokens, scale.squares if scale else 0, scale.eps if scale else 0.0]
    file, function, _ = EPILOGUES[epilogue]
    everything = [*args, *given, *rest]
    return Kernel(file, function, (grid, 1), WARP * t.warps, everything, macros, waits=True)
