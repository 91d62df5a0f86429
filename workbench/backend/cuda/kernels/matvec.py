"""Products of up to 8 tokens on CUDA: which variant of kernels/product.cu or product_qkv.cu, with
which grid.

Pure. A product's kernel is compiled for its weight types and a tuning. `tuning.py` chooses the
tuning by type, shape, tokens and epilogue. The order in which an element is summed follows from
`Tuning.row_warps` alone, for any number of tokens: a token's result does not depend on its batch.
Fused and unfused products may differ in their last bits, because the table may give their columns
to different numbers of warps.
"""

from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.cuda.kernels.tuning import GROUP, Tuning, together, tuning
from workbench.backend.issue.args import Args
from workbench.common.errors import DeviceError

MOST_TOKENS = 8
MOST_SEGMENTS = 3
MOST_CLUSTER = 8  # blocks that every device with clusters runs together
MOST_SCALED = 16384  # columns of x, with half a norm: MOST_SQUARES of kernels/rms.cuh
WARP = 32
_QUANTISE = {"glu_q8": "GLU_Q8", "norm_q8": "NORM_Q8"}  # results that are quantised: the macro
# name -> source file, kernel, its EPILOGUE
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
    """One weight (rows, cols) of `dtype` at `w`, and where its products go. Addresses in bytes.

    bias: float32 (rows,), 0 for none. dst: float32 (n_tokens, rows) unless the launch says else.
    """

    dtype: str
    w: int
    rows: int
    bias: int
    dst: int


class X(NamedTuple):
    """What is multiplied: (n_tokens, cols) at its address, F32, or Q8_ACT if `quantised`. Up to
    MOST_TOKENS tokens, quantised weights want Q8_ACT and float weights F32; see also `gemm.py`."""

    at: int
    quantised: bool
    cols: int
    n_tokens: int


class HeadNorm(NamedTuple):
    """The norm of the query and key heads before they are rotated; factors: float32 (head_dim,)."""

    q_factors: int
    k_factors: int
    eps: float


class Rotate(NamedTuple):
    """How Q and K are rotated and where K and V are stored.

    positions: int32 (n_tokens,); freq_factors: float32 (n_rot / 2,), 0 for none; k_indices,
    v_indices: int64 (n_tokens,), rows of the caches, stored where 0 <= index < n_kv.
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
    """Half a norm: results are scaled by 1 / sqrt(mean of squares + eps) of their row of x.
    squares: float32 (n_tokens, cols / 32), the sums of squares of each 32 columns of x."""

    squares: int
    eps: float


class Norm(NamedTuple):
    """What follows a product if its sum with a residual is normed. All rows have segment.rows
    columns.

    sum: float32, residual + product; squares: float32, the sums of squares of `sum`; residual:
    float32; factors: float32 (rows,), the norm's weight. quantised: whether segment.dst, the sum
    times the factors, is Q8_ACT rather than float32.
    """

    sum: int
    squares: int
    residual: int
    factors: int
    quantised: bool


def whole_groups(rows: int) -> bool:
    """Whether `glu` can quantise its result, and `normed` takes a weight of so many rows."""
    return rows % GROUP == 0


# launches -----------------------------------------------------------------------------------------


def defines(
    dtypes: Sequence[str], cols: int, n_tokens: int, epilogue: str, t: Tuning, scaled: bool = False
) -> tuple[str, ...]:
    """The macros of a variant; dtypes: of the segments."""
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

    tune: in place of the tuning in the tables. Raises DeviceError for what no kernel takes.
    """
    t = tune or _tuning(segments, x, "plain")
    args, grid = segment_args(segments), _grid(segments, t)
    return _kernel("plain", segments, x, scale, t, grid, args)


def qkv(
    segments: Sequence[Segment],
    x: X,
    rotate: Rotate,
    scale: Scale | None = None,
    tune: Tuning | None = None,
) -> Kernel:
    """Q, K, V; RoPE of Q and K; K and V to the cache.

    segments: Q with dst float32 (n_tokens, rows), K and V with caches F16 (cells, rows) as dst.
    """
    heads = all(s.rows % rotate.head_dim == 0 for s in segments)
    if len(segments) != MOST_SEGMENTS or rotate.head_dim % 2 or rotate.n_rot % 2 or not heads:
        raise DeviceError(
            f"q, k, v of {[s.rows for s in segments]} rows are no heads of {rotate.head_dim} with "
            f"{rotate.n_rot} rotated that one launch can turn on cuda (both even); use "
            "fuse_rope_store=off"
        )
    t = tune or _tuning(segments, x, "qkv")
    if rotate.norm is not None and tune is None:
        t = _heads_tuning(segments, x, rotate.head_dim)
    r = rotate
    behind: Args = [
        r.positions, r.freq_factors, r.k_indices, r.v_indices, r.n_kv, r.head_dim, r.n_rot,
        int(r.neox), float(r.theta_base), float(r.freq_scale), *(r.norm or HeadNorm(0, 0, 0.0)),
    ]  # fmt: skip
    args, grid = segment_args(segments), _grid(segments, t)
    made = _kernel("qkv", segments, x, scale, t, grid, args, behind)
    if r.norm is None:
        return made
    return made._replace(defines=(*made.defines, f"HEAD_BLOCKS={r.head_dim // t.lines}"))


def can_norm_heads(
    dtypes: Sequence[str], rows: Sequence[int], cols: int, n_tokens: int, head_dim: int
) -> bool:
    """Whether `qkv` can norm the heads of Q, K, V of these types and rows, on a device with
    clusters. A few whole blocks must make each head, and their pairs of lines must fit a warp."""
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
    """silu(gate) * up to gate's dst: float32 (n_tokens, rows), or with `quantised` Q8_ACT rows."""
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


def normed(
    segment: Segment, x: X, norm: Norm, scale: Scale | None = None, tune: Tuning | None = None
) -> Kernel:
    """A product, its bias, the residual add and half a norm."""
    epilogue = "norm_q8" if norm.quantised else "norm"
    t = tune or _tuning([segment], x, epilogue)
    args: Args = [
        segment.dst, segment.w, segment.bias, segment.rows, norm.sum, norm.squares,
        norm.residual, norm.factors,
    ]  # fmt: skip
    grid = blocks(segment.rows, t.lines)
    return _kernel(epilogue, [segment], x, scale, t, grid, args)


def _heads_tuning(segments: Sequence[Segment], x: X, head_dim: int) -> Tuning:
    """As `_tuning`, with so many passes that a head is no more blocks than a cluster has."""
    t = _tuning(segments, x, "qkv")
    return t._replace(passes=max(t.passes, head_dim // (MOST_CLUSTER * t.lines)))


def _tuning(segments: Sequence[Segment], x: X, epilogue: str) -> Tuning:
    """For the segments of one launch: the tuning of the type with the most rows."""
    rows: dict[str, int] = {}
    for s in segments:
        rows[s.dtype] = rows.get(s.dtype, 0) + s.rows
    most = max(rows, key=lambda dtype: rows[dtype])
    found = tuning(most, sum(rows.values()), x.cols, x.n_tokens, epilogue)
    # types differ in the registers they need: the limit of one would make another spill
    return found if len(rows) == 1 else found._replace(per_sm=1)


def segment_args(segments: Sequence[Segment]) -> Args:
    """dst, w, bias, rows of up to MOST_SEGMENTS segments; zeros for those there are not."""
    args: Args = []
    for s in segments:
        args += [s.dst, s.w, s.bias, s.rows]
    return args + [0] * (4 * (MOST_SEGMENTS - len(segments)))


def _grid(segments: Sequence[Segment], t: Tuning) -> int:
    """Blocks of a launch whose segments have blocks of their own."""
    return sum(blocks(s.rows, t.lines) for s in segments)


def _kernel(
    epilogue: str,
    segments: Sequence[Segment],
    x: X,
    scale: Scale | None,
    t: Tuning,
    grid: int,
    args: Args,
    behind: Sequence[int | float] = (),
) -> Kernel:
    """args: what stands before x among the arguments; behind: what stands behind the scale."""
    cols, n_tokens, dtypes = x.cols, x.n_tokens, [s.dtype for s in segments]
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
    everything = [*args, *given, *behind]
    return Kernel(file, function, (grid, 1), WARP * t.warps, everything, macros, waits=True)
