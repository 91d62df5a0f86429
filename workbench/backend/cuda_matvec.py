"""Products of up to 8 tokens on CUDA: which variant of kernels/product.cu, with which grid.

Pure. A product's kernel is compiled for its weight types and a tuning (`Tuning`), which `tuning`
chooses by type, shape, tokens and epilogue from tables that were measured on an H100. The order in
which an element is summed follows from `Tuning.split` alone, the same for any number of tokens: a
token's result does not depend on its batch. Fused and unfused products may differ in their last
bits, since the table may split their columns differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.backend.args import Args
from workbench.backend.cuda_kernel import Kernel, blocks
from workbench.errors import DeviceError

MOST_TOKENS = 8
MOST_SEGMENTS = 3
WARP = 32
GLU_GROUP = 32  # columns that are quantised together
EPILOGUES = {"plain": 0, "qkv": 1, "glu": 2, "glu_q8": 2}  # name -> EPILOGUE of the source
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


class Tuning(NamedTuple):
    """rows: weight rows of a warp; unroll: units of each in flight per lane; warps: of a block;
    per_sm: blocks that registers are limited for; split: warps that share a row's columns; passes:
    times that a warp takes its rows."""

    rows: int
    unroll: int
    warps: int
    per_sm: int
    split: int
    passes: int = 1

    @property
    def lines(self) -> int:
        """Weight rows of a block."""
        return self.warps // self.split * self.rows * self.passes

    def defines(self) -> tuple[str, ...]:
        return (
            f"ROWS={self.rows}",
            f"UNROLL={self.unroll}",
            f"WARPS={self.warps}",
            f"BLOCKS={self.per_sm}",
            f"SPLIT={self.split}",
            f"PASSES={self.passes}",
        )


# tuning -------------------------------------------------------------------------------------------

# Classes of types whose units ask alike for registers and instructions.
_CLASS = {
    "F32": "F32", "F16": "float", "BF16": "float", "Q8_0": "Q8_0", "Q4_0": "Q4_0",
    "MXFP4": "MXFP4", "Q4_K": "Q4_K", "Q5_K": "K", "Q6_K": "K",
}  # fmt: skip

# One token: rows, unroll, warps, per_sm, split by the size of the weights, which are looked up in
# the first line whose rows (of all segments) and columns are not below theirs. What decides is how
# the blocks of a launch fill the device: all at once, with none left over, while they are few.
_SIZES = (
    (2304, 4095), (2304, None), (3584, 4095), (3584, None), (4608, None),
    (8192, 4095), (8192, None), (40000, 4095), (40000, None), (None, None),
)  # fmt: skip
_Choice = tuple[int, int, int, int, int]
_ONE_TOKEN: dict[str, tuple[_Choice, ...]] = {
    "F32": (
        (1, 2, 8, 2, 1), (2, 2, 8, 2, 2), (1, 2, 8, 2, 1), (2, 2, 8, 2, 2), (2, 2, 8, 2, 2),
        (2, 2, 8, 2, 1), (2, 2, 8, 2, 1), (2, 2, 8, 2, 1), (2, 2, 8, 2, 2), (2, 2, 8, 2, 2),
    ),
    "float": (
        (1, 4, 8, 2, 1), (4, 2, 8, 2, 4), (2, 2, 8, 3, 2), (2, 2, 8, 3, 2), (4, 2, 8, 2, 2),
        (2, 2, 8, 3, 1), (2, 2, 8, 3, 1), (4, 2, 8, 2, 1), (2, 4, 4, 4, 2), (2, 4, 4, 4, 2),
    ),
    "Q8_0": (
        (4, 2, 8, 2, 2), (4, 2, 8, 2, 4), (4, 2, 8, 2, 2), (4, 2, 8, 2, 2), (4, 2, 8, 2, 2),
        (4, 2, 8, 2, 1), (2, 2, 8, 3, 1), (2, 4, 4, 4, 1), (2, 4, 4, 4, 2), (2, 4, 4, 4, 2),
    ),
    "Q4_0": (
        (4, 2, 4, 4, 2), (4, 2, 8, 2, 4), (4, 2, 4, 4, 1), (4, 2, 4, 4, 2), (4, 2, 8, 2, 2),
        (4, 2, 4, 4, 1), (2, 2, 8, 3, 1), (2, 2, 8, 4, 1), (2, 2, 8, 4, 2), (2, 2, 8, 4, 2),
    ),
    "MXFP4": (
        (4, 2, 4, 4, 2), (4, 2, 4, 3, 2), (4, 2, 8, 2, 2), (4, 2, 4, 3, 2), (2, 1, 8, 4, 2),
        (4, 2, 8, 2, 1), (2, 2, 4, 6, 1), (2, 1, 8, 4, 1), (2, 2, 4, 6, 1), (2, 2, 4, 6, 1),
    ),
    "Q4_K": (
        (4, 1, 8, 2, 2), (4, 1, 8, 2, 4), (2, 1, 8, 4, 2), (2, 2, 4, 5, 2), (4, 1, 8, 2, 2),
        (4, 1, 8, 2, 1), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1), (2, 2, 8, 3, 1), (2, 2, 4, 5, 1),
    ),
    "K": (
        (4, 1, 8, 2, 2), (2, 2, 8, 2, 2), (2, 1, 8, 4, 2), (2, 2, 8, 3, 2), (2, 1, 8, 4, 2),
        (2, 2, 8, 3, 1), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1), (2, 2, 4, 5, 2), (2, 2, 4, 5, 1),
    ),
}  # fmt: skip

# A product that quantises its result: a block for each group of columns, so that what is chosen is
# blocks that all run at once: with up to 2, up to 3 or more groups per multiprocessor.
_GROUPS = (2 * 132, 3 * 132)
_GLU_Q8: dict[str, tuple[_Choice, ...]] = {
    "F32": ((2, 2, 8, 2, 1), (2, 2, 8, 2, 1), (2, 2, 8, 2, 1)),
    "float": ((4, 2, 8, 2, 1), (2, 2, 8, 3, 1), (2, 4, 4, 4, 2)),
    "Q8_0": ((4, 2, 8, 2, 2), (4, 1, 8, 2, 2), (4, 2, 8, 2, 1)),
    "Q4_0": ((4, 2, 8, 2, 2), (4, 2, 4, 4, 1), (4, 2, 4, 4, 1)),
    "MXFP4": ((4, 2, 8, 2, 2), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1)),
    "Q4_K": ((2, 1, 16, 2, 1), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1)),
    "K": ((2, 1, 16, 2, 1), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1)),
}

# (class, tokens) -> rows, unroll, warps, per_sm of more tokens, split as for one.
_MORE_TOKENS: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("F32", 2): (2, 2, 8, 1),
    ("F32", 4): (2, 1, 8, 1),
    ("F32", 8): (2, 1, 8, 1),
    ("float", 2): (4, 2, 4, 3),
    ("float", 4): (4, 1, 4, 4),
    ("float", 8): (4, 1, 4, 3),
    ("Q8_0", 2): (4, 1, 8, 2),
    ("Q8_0", 4): (4, 1, 4, 4),
    ("Q8_0", 8): (4, 1, 4, 3),
    ("Q4_0", 2): (4, 1, 8, 2),
    ("Q4_0", 4): (4, 1, 4, 4),
    ("Q4_0", 8): (4, 1, 4, 3),
    ("MXFP4", 2): (4, 1, 8, 2),
    ("MXFP4", 4): (4, 1, 4, 4),
    ("MXFP4", 8): (4, 1, 4, 3),
    ("Q4_K", 2): (4, 1, 8, 2),
    ("Q4_K", 4): (4, 1, 4, 4),
    ("Q4_K", 8): (4, 1, 4, 3),
    ("K", 2): (4, 1, 8, 2),
    ("K", 4): (4, 1, 4, 3),
    ("K", 8): (4, 1, 4, 3),
}
_GLU_Q8_LINES = 2 * GLU_GROUP


def together(n_tokens: int) -> int:
    """Tokens a kernel is compiled for: the power of two that holds n_tokens."""
    return 1 << (n_tokens - 1).bit_length()


def tuning(dtype: str, rows: int, cols: int, n_tokens: int, epilogue: str) -> Tuning:
    """The tuning for weights (rows, cols) of `dtype` (rows: of all segments, gate and up) and an
    epilogue of EPILOGUES."""
    kind, quantised = _CLASS[dtype], epilogue == "glu_q8"
    if quantised:
        groups = rows // _GLU_Q8_LINES
        choice = _GLU_Q8[kind][sum(groups > most for most in _GROUPS)]
    else:
        fits = [
            (most_rows is None or rows <= most_rows) and (most_cols is None or cols <= most_cols)
            for most_rows, most_cols in _SIZES
        ]
        choice = _ONE_TOKEN[kind][fits.index(True)]
    if n_tokens > 1:
        choice = (*_MORE_TOKENS[kind, together(n_tokens)], choice[-1])
    found = Tuning(*choice)
    return found._replace(passes=_GLU_Q8_LINES // found.lines) if quantised else found


def can_glu_quantise(rows: int) -> bool:
    """Whether `glu` can quantise its result: rows are whole groups of 32."""
    return rows % GLU_GROUP == 0


# launches -----------------------------------------------------------------------------------------


def defines(
    dtypes: Sequence[str], cols: int, n_tokens: int, epilogue: str, t: Tuning
) -> tuple[str, ...]:
    """The macros of a variant; dtypes: of the segments."""
    wanted = [f"TYPE_{i}={name}" for i, name in enumerate(dtypes)]
    wanted += [f"EPILOGUE={EPILOGUES[epilogue]}", f"N={together(n_tokens)}", *t.defines()]
    wanted += ["GLU_Q8"] if epilogue == "glu_q8" else []
    wanted += ["NARROW"] if dtypes[0] in _FLOATS and cols % _WIDE else []
    return tuple(wanted)


def plain(
    segments: Sequence[Segment], x: int, cols: int, n_tokens: int, tune: Tuning | None = None
) -> Kernel:
    """The products of one x with 1 to 3 weights, plus biases.

    x: (n_tokens, cols) at its address, F32 for float weights, Q8_ACT for quantised ones. tune: in
    place of `tuning`'s. Raises DeviceError for what no kernel takes.
    """
    t = tune or _tuning(segments, cols, n_tokens, "plain")
    args = _segment_args(segments) + [x, cols, n_tokens]
    return _kernel("plain", segments, cols, n_tokens, _grid(segments, t), args, t)


def qkv(
    segments: Sequence[Segment],
    x: int,
    cols: int,
    n_tokens: int,
    rotate: Rotate,
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
    t = tune or _tuning(segments, cols, n_tokens, "qkv")
    r = rotate
    args = _segment_args(segments) + [
        x, cols, n_tokens, r.positions, r.freq_factors, r.k_indices, r.v_indices, r.n_kv,
        r.head_dim, r.n_rot, int(r.neox), float(r.theta_base), float(r.freq_scale),
    ]  # fmt: skip
    return _kernel("qkv", segments, cols, n_tokens, _grid(segments, t), args, t)


def glu(
    gate: Segment,
    up: Segment,
    x: int,
    cols: int,
    n_tokens: int,
    quantised: bool,
    tune: Tuning | None = None,
) -> Kernel:
    """silu(gate) * up to gate's dst: float32 (n_tokens, rows), or with `quantised` Q8_ACT rows."""
    if (gate.dtype, gate.rows) != (up.dtype, up.rows) or (
        quantised and not can_glu_quantise(gate.rows)
    ):
        raise DeviceError(
            f"gate {gate.dtype} of {gate.rows} rows and up {up.dtype} of {up.rows} cannot be one "
            f"launch on cuda{' that quantises' if quantised else ''}; use fuse_glu=off"
        )
    epilogue = "glu_q8" if quantised else "glu"
    t = tune or _tuning([gate, up], cols, n_tokens, epilogue)
    args: Args = [
        gate.dst, gate.w, gate.bias, up.w, up.bias, gate.rows, x, cols, n_tokens,
    ]  # fmt: skip
    return _kernel(epilogue, [gate], cols, n_tokens, blocks(gate.rows, t.lines // 2), args, t)


def _tuning(segments: Sequence[Segment], cols: int, n_tokens: int, epilogue: str) -> Tuning:
    """For the segments of one launch: that of the type with the most rows."""
    rows: dict[str, int] = {}
    for s in segments:
        rows[s.dtype] = rows.get(s.dtype, 0) + s.rows
    most = max(rows, key=lambda dtype: rows[dtype])
    found = tuning(most, sum(rows.values()), cols, n_tokens, epilogue)
    # types differ in the registers they need: the limit of one would make another spill
    return found if len(rows) == 1 else found._replace(per_sm=1)


def _segment_args(segments: Sequence[Segment]) -> Args:
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
    cols: int,
    n_tokens: int,
    grid: int,
    args: Args,
    t: Tuning,
) -> Kernel:
    dtypes = [s.dtype for s in segments]
    if len({name in _FLOATS for name in dtypes}) != 1 or not 1 <= n_tokens <= MOST_TOKENS:
        raise DeviceError(
            f"weights {', '.join(dtypes)} and {n_tokens} tokens are no product of one launch on "
            f"cuda: all float or all quantised, up to {MOST_TOKENS} tokens"
        )
    macros = defines(dtypes, cols, n_tokens, epilogue, t)
    function = f"product_{epilogue.removesuffix('_q8')}"
    return Kernel("product", function, (grid, 1), WARP * t.warps, args, macros, waits=True)
