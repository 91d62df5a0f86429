"""How the products of up to 8 tokens are cut into blocks and warps on CUDA: tables by type, shape,
tokens and epilogue, measured on an H100 (`tuning.json`).

Pure. `matvec.py` says what a launch is given; kernels/multiply.cuh has the macros.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

GROUP = 32  # columns that are quantised together, or squared


class Tuning(NamedTuple):
    """rows: weight rows of a warp; unroll: units of each row in flight per thread; warps: of a
    block; per_sm: blocks that registers are limited for; row_warps: warps that share a row's
    columns; passes: times that a warp takes its rows; ahead: KB of a block that L2 is asked for
    early."""

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


# of the fields of Tuning
_MACROS = ("ROWS", "UNROLL", "WARPS", "BLOCKS", "ROW_WARPS", "PASSES", "AHEAD")

# Classes of types whose units ask alike for registers and instructions.
_CLASS = {
    "F32": "F32", "F16": "float", "BF16": "float", "Q8_0": "Q8_0", "Q4_0": "Q4_0",
    "MXFP4": "MXFP4", "Q4_K": "Q4_K", "Q5_K": "K", "Q6_K": "K",
}  # fmt: skip

# One token: rows, unroll, warps, per_sm, row_warps by the size of the weights. Weights have the
# choice of the first line whose rows (of all segments) and columns are not below theirs. What
# decides is how the blocks of a launch fill the device: all at once, with none left over, while
# they are few.
_SIZES = (
    (2304, 4095), (2304, None), (3584, 4095), (3584, None), (4608, 4608), (4608, None),
    (8192, 4095), (8192, None), (40000, 4095), (40000, None), (None, None),
)  # fmt: skip
# The measured choices: one_token, gate, glu_q8, norm, more_tokens.
_MEASURED: dict[str, Any] = json.loads(Path(__file__).with_name("tuning.json").read_text("utf-8"))

# A plain product of gate or up of an 8B model: blocks of 14 warps, 56 lines each, run all at once
# with none left over. % of 3195 GB/s alone and with dependent launch, for the table above
# (data/results/tuning/product-5.csv): Q4_0 75.7, 86.4 for 75.5, 84.8; MXFP4 73.9, 87.2 for 70.1,
# 82.0; Q4_K 73.6, 84.7 for 71.0, 83.3; no gain for the others.
_GATE_ROWS, _GATE_COLS = 14336, 4096

# A product that quantises its result: blocks have whole groups of columns, and all blocks run at
# once. Choices for up to 2, up to 3 or more groups per multiprocessor. A block has one group. With
# more than 3, a choice with passes has one block of 16 warps a multiprocessor, and as many groups
# as the passes make. % as above, 28672 x 4096, for blocks of one group: Q4_0 79.7, 85.9 for 78.5,
# 82.5; MXFP4 79.4, 83.7 for 73.4, 75.4; Q4_K 77.0, 82.2 for 75.1, 78.2; Q5_K 78.1, 82.7 for 75.9,
# 78.7; Q6_K 81.9, 85.1 for 80.0, 80.8. Not Q8_0: 90.5, 91.5 for 87.6, 91.0 there, but 93.5 with
# dependent launch for 99.8 in data/results/cuda-kernels (of commits 992bec8 and 995f655).
_GROUPS = (2 * 132, 3 * 132)

# A product behind which a row is normed: a block has groups of 32 rows. By columns: to 4608, more.
_NORM_COLS = 4608
# more tokens have rows, unroll, warps and per_sm of their own, and the row_warps of one
_NORM_MORE = (4, 1, 8, 1)
_GLU_Q8_LINES = 2 * GROUP

# KB that a block asks L2 for beyond its first loads. The first loads are most of a small weight,
# and asking for much makes others' loads wait. llama-3-8b, us a token with 0, 4, 8, 16 and 32: F16
# 5500, 5384, 5408, 5456, 5474; Q4_0 2193, 2151, 2153, 2144, 2164.
_AHEAD_ROWS = 4608
_AHEAD = {"F32": 4, "float": 4, "Q8_0": 4, "Q4_0": 8, "MXFP4": 8, "Q4_K": 8, "K": 8}


def together(n_tokens: int) -> int:
    """Tokens a kernel is compiled for: the power of two that holds n_tokens."""
    return 1 << (n_tokens - 1).bit_length()


def tuning(dtype: str, rows: int, cols: int, n_tokens: int, epilogue: str) -> Tuning:
    """The tuning for weights (rows, cols) of `dtype` (rows: of all segments, gate and up) and an
    epilogue of EPILOGUES."""
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
