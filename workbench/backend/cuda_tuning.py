"""How the products of up to 8 tokens are cut into blocks and warps on CUDA: tables, by type, shape,
tokens and epilogue, that were measured on an H100.

Pure. `cuda_matvec.py` says what a launch is given; the macros are those of kernels/multiply.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

GROUP = 32  # columns that are quantised together, or squared


class Tuning(NamedTuple):
    """rows: weight rows of a warp; unroll: units of each in flight per lane; warps: of a block;
    per_sm: blocks that registers are limited for; split: warps that share a row's columns; passes:
    times that a warp takes its rows; ahead: KB of a block that L2 is asked for early."""

    rows: int
    unroll: int
    warps: int
    per_sm: int
    split: int
    passes: int = 1
    ahead: int = 0

    @property
    def lines(self) -> int:
        """Weight rows of a block."""
        return self.warps // self.split * self.rows * self.passes

    def defines(self) -> tuple[str, ...]:
        """The macros of kernels/multiply.cuh."""
        return (
            f"ROWS={self.rows}",
            f"UNROLL={self.unroll}",
            f"WARPS={self.warps}",
            f"BLOCKS={self.per_sm}",
            f"SPLIT={self.split}",
            f"PASSES={self.passes}",
            f"AHEAD={self.ahead}",
        )


# Classes of types whose units ask alike for registers and instructions.
_CLASS = {
    "F32": "F32", "F16": "float", "BF16": "float", "Q8_0": "Q8_0", "Q4_0": "Q4_0",
    "MXFP4": "MXFP4", "Q4_K": "Q4_K", "Q5_K": "K", "Q6_K": "K",
}  # fmt: skip

# One token: rows, unroll, warps, per_sm, split by the size of the weights, which are looked up in
# the first line whose rows (of all segments) and columns are not below theirs. What decides is how
# the blocks of a launch fill the device: all at once, with none left over, while they are few.
_SIZES = (
    (2304, 4095), (2304, None), (3584, 4095), (3584, None), (4608, 4608), (4608, None),
    (8192, 4095), (8192, None), (40000, 4095), (40000, None), (None, None),
)  # fmt: skip
_Choice = tuple[int, int, int, int, int]
_ONE_TOKEN: dict[str, tuple[_Choice, ...]] = {
    "F32": (
        (1, 2, 8, 2, 1), (2, 2, 8, 2, 2), (1, 2, 8, 2, 1), (2, 2, 8, 2, 2), (2, 2, 8, 2, 2),
        (2, 2, 8, 2, 2), (2, 2, 8, 2, 1), (2, 2, 8, 2, 1), (2, 2, 8, 2, 1), (2, 2, 8, 2, 2),
        (2, 2, 8, 2, 2),
    ),
    "float": (
        (1, 4, 8, 2, 1), (4, 2, 8, 2, 4), (2, 2, 8, 3, 2), (2, 2, 8, 3, 2), (4, 2, 8, 2, 2),
        (4, 2, 8, 2, 2), (2, 2, 8, 3, 1), (2, 2, 8, 3, 1), (4, 2, 8, 2, 1), (2, 4, 4, 4, 2),
        (2, 4, 4, 4, 2),
    ),
    "Q8_0": (
        (4, 2, 8, 2, 2), (4, 2, 8, 2, 4), (4, 2, 8, 2, 2), (4, 2, 8, 2, 2), (4, 2, 8, 2, 2),
        (4, 2, 8, 2, 2), (4, 2, 8, 2, 1), (2, 2, 8, 3, 1), (2, 4, 4, 4, 1), (2, 4, 4, 4, 2),
        (2, 4, 4, 4, 2),
    ),
    "Q4_0": (
        (4, 2, 4, 4, 2), (4, 2, 8, 2, 4), (4, 2, 4, 4, 1), (4, 2, 4, 4, 2), (4, 1, 4, 4, 2),
        (4, 2, 8, 2, 2), (4, 2, 4, 4, 1), (4, 1, 8, 2, 1), (2, 2, 8, 4, 1), (2, 2, 8, 4, 2),
        (2, 2, 8, 4, 2),
    ),
    "MXFP4": (
        (4, 2, 4, 4, 2), (4, 2, 4, 3, 2), (4, 2, 8, 2, 2), (4, 2, 4, 3, 2), (4, 1, 4, 4, 2),
        (2, 1, 8, 4, 2), (4, 2, 8, 2, 1), (4, 1, 8, 2, 1), (2, 1, 8, 4, 1), (2, 1, 8, 4, 1),
        (2, 2, 4, 6, 1),
    ),
    "Q4_K": (
        (4, 1, 8, 2, 2), (4, 1, 8, 2, 4), (2, 1, 8, 4, 2), (2, 2, 4, 5, 2), (4, 1, 4, 4, 2),
        (4, 1, 8, 2, 2), (4, 1, 8, 2, 1), (4, 1, 8, 2, 1), (2, 1, 8, 4, 1), (2, 4, 4, 4, 1),
        (2, 2, 4, 5, 1),
    ),
    "K": (
        (4, 1, 8, 2, 2), (2, 2, 8, 2, 2), (2, 1, 8, 4, 2), (2, 2, 8, 3, 2), (2, 1, 8, 4, 2),
        (2, 1, 8, 4, 2), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1), (2, 1, 8, 4, 1), (2, 1, 8, 4, 1),
        (2, 2, 4, 5, 1),
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
    "Q4_K": ((2, 1, 16, 2, 1), (8, 1, 4, 3, 1), (2, 1, 8, 4, 1)),
    "K": ((2, 1, 16, 2, 1), (2, 2, 8, 3, 1), (2, 1, 8, 4, 1)),
}

# A product behind which a row is normed: a block has groups of 32 rows. By columns: to 4608, more.
_NORM_COLS = 4608
_NORM: dict[str, tuple[_Choice, ...]] = {
    "F32": ((2, 1, 16, 1, 1), (2, 1, 16, 1, 1)),
    "float": ((4, 1, 16, 1, 2), (4, 1, 16, 1, 2)),
    "Q8_0": ((4, 2, 16, 1, 2), (4, 2, 16, 1, 2)),
    "Q4_0": ((4, 4, 8, 1, 1), (4, 4, 8, 1, 1)),
    "MXFP4": ((4, 2, 16, 1, 2), (4, 2, 16, 1, 2)),
    "Q4_K": ((2, 3, 16, 1, 1), (2, 3, 16, 1, 1)),
    "K": ((4, 1, 16, 1, 2), (4, 1, 16, 1, 2)),
}
_NORM_MORE = (4, 1, 8, 1)  # rows, unroll, warps, per_sm of more tokens, split as for one

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
_GLU_Q8_LINES = 2 * GROUP

# What a block asks L2 for beyond its first loads, KB: not for small weights, whose first loads are
# most of them, and not much, or others' loads wait. llama-3-8b, us a token with 0, 4, 8, 16 and 32:
# F16 5500, 5384, 5408, 5456, 5474; Q4_0 2193, 2151, 2153, 2144, 2164.
_AHEAD_ROWS = 4608
_AHEAD = {"F32": 4, "float": 4, "Q8_0": 4, "Q4_0": 8, "MXFP4": 8, "Q4_K": 8, "K": 8}


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
    elif epilogue in ("norm", "norm_q8"):
        choice = _NORM[kind][cols > _NORM_COLS]
    else:
        fits = [
            (most_rows is None or rows <= most_rows) and (most_cols is None or cols <= most_cols)
            for most_rows, most_cols in _SIZES
        ]
        choice = _ONE_TOKEN[kind][fits.index(True)]
    normed = epilogue in ("norm", "norm_q8")
    if n_tokens > 1:
        more = _NORM_MORE if normed else _MORE_TOKENS[kind, together(n_tokens)]
        choice = (*more, choice[-1])
    small = rows <= _AHEAD_ROWS and not normed
    found = Tuning(*choice, ahead=0 if small else _AHEAD[kind])
    lines = _GLU_Q8_LINES if quantised else GROUP if normed else found.lines
    return found._replace(passes=max(1, lines // found.lines))
