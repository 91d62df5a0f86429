"""How products of up to 8 tokens are cut into blocks and warps on CUDA.

Pure. The choices were measured on an H100 (`tuning.json`), by type, shape, tokens and epilogue.
`matvec.py` makes the launch; kernels/multiply.cuh has the macros.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

GROUP = 32  # columns that share a scale of Q8_ACT, or a sum of squares


class Tuning(NamedTuple):
    """The macros of a product's kernel.

    rows: weight rows of a warp.
    unroll: units of each row that a thread has in flight.
    warps: of a block.
    per_sm: blocks of a multiprocessor; they limit the registers of a thread.
    row_warps: warps that share a row's columns.
    passes: how often a warp takes `rows` rows.
    ahead: KB of a block that are requested early into L2.
    """

    rows: int
    unroll: int
    warps: int
    per_sm: int
    row_warps: int
    passes: int = 1
    ahead: int = 0

    @property
    def lines(self) -> int:
        """Weight rows of a block."""
        return self.warps // self.row_warps * self.rows * self.passes

    def defines(self) -> tuple[str, ...]:
        """The macros of kernels/multiply.cuh."""
        return tuple(f"{name}={value}" for name, value in zip(_MACROS, self, strict=True))


# The macros of the fields of Tuning.
_MACROS = ("ROWS", "UNROLL", "WARPS", "BLOCKS", "ROW_WARPS", "PASSES", "AHEAD")

# Types of one class need about the same registers and instructions for a unit.
_CLASS = {
    "F32": "F32", "F16": "float", "BF16": "float", "Q8_0": "Q8_0", "Q4_0": "Q4_0",
    "MXFP4": "MXFP4", "Q4_K": "Q4_K", "Q5_K": "K", "Q6_K": "K",
}  # fmt: skip

# Sizes (rows of all segments, columns) for which one_token of tuning.json has rows, unroll, warps,
# per_sm, row_warps. The first size that is not below the weights' size counts; None: no limit.
# While a launch has few blocks, the best choice makes all blocks run at once, with none left over.
_SIZES = (
    (2304, 4095), (2304, None), (3584, 4095), (3584, None), (4608, 4608), (4608, None),
    (8192, 4095), (8192, None), (40000, 4095), (40000, None), (None, None),
)  # fmt: skip
# The measured choices, with keys one_token, gate, glu_q8, norm, more_tokens.
_MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("tuning.json").read_text("utf-8"))

# A plain product of gate or up of an 8B model has blocks of 14 warps with 56 lines: all blocks run
# at once, with none left over. In % of 3195 GB/s, launched alone and with dependent launch
# (data/results/tuning/product-5.csv); other types gain nothing:
#
#             one_token     these blocks
#     Q4_0    75.5  84.8    75.7  86.4
#     MXFP4   70.1  82.0    73.9  87.2
#     Q4_K    71.0  83.3    73.6  84.7
_GATE_ROWS, _GATE_COLS = 14336, 4096

# A product that quantises its result has blocks with whole groups of columns, and all blocks run at
# once. glu_q8 has a choice for up to 2 groups per multiprocessor, up to 3, and more. A block has
# one group, except with more than 3: then a choice with passes has one block of 16 warps for each
# multiprocessor, with a group for every so many passes. In % as above, 28672 x 4096:
#
#             one group a block    with passes
#     Q4_0    78.5  82.5           79.7  85.9
#     MXFP4   73.4  75.4           79.4  83.7
#     Q4_K    75.1  78.2           77.0  82.2
#     Q5_K    75.9  78.7           78.1  82.7
#     Q6_K    80.0  80.8           81.9  85.1
#     Q8_0    87.6  91.0           90.5  91.5
#
# Q8_0 has no passes all the same: in data/results/cuda-kernels (commits 992bec8 and 995f655) passes
# have 93.5 with dependent launch, one group a block has 99.8.
_GROUPS = (2 * 132, 3 * 132)

# A product before half a norm has blocks with whole groups of 32 rows. norm has a choice for up to
# 4608 columns, and for more.
_NORM_COLS = 4608
# More than one token: rows, unroll, warps and per_sm. row_warps is that of one token.
_NORM_MORE = (4, 1, 8, 1)
_GLU_Q8_LINES = 2 * GROUP

# KB that a block requests into L2 beyond its first loads. Small weights have none, because the
# first loads already read most of them. More KB make the loads of other blocks wait. us of a token
# of llama-3-8b:
#
#     KB      0     4     8    16    32
#     F16  5500  5384  5408  5456  5474
#     Q4_0 2193  2151  2153  2144  2164
_AHEAD_ROWS = 4608
_AHEAD = {"F32": 4, "float": 4, "Q8_0": 4, "Q4_0": 8, "MXFP4": 8, "Q4_K": 8, "K": 8}


def together(n_tokens: int) -> int:
    """The number of tokens for which a kernel is compiled: n_tokens, rounded up to a power of
    two."""
    return 1 << (n_tokens - 1).bit_length()


@functools.cache
def tuning(dtype: str, rows: int, cols: int, n_tokens: int, epilogue: str) -> Tuning:
    """The tuning of a launch.

    rows: of all weights of the launch together.
    epilogue: a key of `matvec.EPILOGUES`.
    """
    kind, quantised = _CLASS[dtype], epilogue == "glu_q8"
    normed = epilogue in ("norm", "norm_q8")
    gate = _MEASURED["gate"]
    if quantised:
        groups = rows // _GLU_Q8_LINES
        choice = _MEASURED["glu_q8"][kind][sum(groups > most for most in _GROUPS)]
    elif normed:
        choice = _MEASURED["norm"][kind][cols > _NORM_COLS]
    elif (epilogue, rows, kind in gate) == ("plain", _GATE_ROWS, True) and cols >= _GATE_COLS:
        choice = gate[kind]
    else:
        fits = [
            (most_rows is None or rows <= most_rows) and (most_cols is None or cols <= most_cols)
            for most_rows, most_cols in _SIZES
        ]
        choice = _MEASURED["one_token"][kind][fits.index(True)]
    if n_tokens > 1:
        more = _NORM_MORE if normed else _MEASURED["more_tokens"][kind][str(together(n_tokens))]
        choice = (*more, choice[4])
    small = rows <= _AHEAD_ROWS and not normed
    found = Tuning(*choice)._replace(ahead=0 if small else _AHEAD[kind])
    lines = _GLU_Q8_LINES if quantised else GROUP if normed else found.lines
    return found._replace(passes=max(found.passes, lines // found.lines))
