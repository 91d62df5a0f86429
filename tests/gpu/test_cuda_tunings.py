"""Every tuning that `cuda_tuning` may choose for the shapes of real models, against float64.

Weights as small as a test's get few of them. So each is given by name to weights of odd shapes:
three with biases in one launch, and gate and up as Q8_ACT, the very bytes of `quantize` of the
floats that the same tuning makes.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.gpu.debug_arena import Block
from tests.gpu.harness import Guards, Wanted, distance
from tests.gpu.test_cuda_products import EXACT
from tests.gpu.test_cuda_tiles import Several
from workbench.backend.cuda.kernels import matvec
from workbench.backend.cuda.kernels.matvec import Segment, X
from workbench.backend.cuda.kernels.tuning import Tuning, tuning
from workbench.benchmarks.kernels.kernel_cases import SHAPES
from workbench.graph.ir import QUANTISED, WEIGHT_DTYPES

pytestmark = pytest.mark.gpu

TYPES = [dtype.name for dtype in WEIGHT_DTYPES if dtype in QUANTISED]
TOKENS = (1, 2, 3, 8)
COLS = 1280  # one round of a warp, and part of another
# Rows of the weights of one launch, no multiples of a block's; gate and up have whole groups.
SEGMENTS, GATED = (130, 7, 193), (416, 416)


def tunings(name: str, n_tokens: int, epilogue: str) -> list[Tuning]:
    """Those that weights of the models' shapes get, each once, together and (plain) alone."""
    gated = epilogue == "glu_q8"
    found = [(sum(s.rows), s.cols) for s in SHAPES.values() if (s.how == "glu") == gated]
    if not gated:
        found += [(rows, s.cols) for s in SHAPES.values() for rows in s.rows]
    made = (tuning(name, rows, cols, n_tokens, epilogue) for rows, cols in found)
    return list(dict.fromkeys(made))


def kernels(sm: int) -> Wanted:
    wanted: Wanted = set()
    for name, n in itertools.product(TYPES, TOKENS):
        segments = [Segment(name, 0, rows, 0, 0) for rows in SEGMENTS]
        gate, up = (Segment(name, 0, rows, 0, 0) for rows in GATED)
        x = X(0, True, COLS, n)
        made = [matvec.plain(segments, x, tune=t) for t in tunings(name, n, "plain")]
        made += [matvec.glu(gate, up, x, to_q8, tune=t)
                 for t in tunings(name, n, "glu_q8") for to_q8 in (False, True)]  # fmt: skip
        wanted |= {(kernel.file, kernel.defines) for kernel in made}
    return wanted


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TYPES)
def test_every_tuning(guards: Guards, name: str, tokens: int):
    several = Several(guards, name, SEGMENTS, tokens, COLS)
    for t in tunings(name, tokens, "plain"):
        issues = guards.issues([matvec.plain(several.segments, several.x, tune=t)])
        for raw, wanted in zip(guards.twice(several.dst, issues), several.expected, strict=True):
            assert distance(raw.view(np.float32), wanted) < EXACT, t
    several = Several(guards, name, GATED, tokens, COLS)

    def glu(t: Tuning, to_q8: bool, dst: Block) -> np.ndarray:
        gate, up = (s._replace(dst=dst.address) for s in several.segments)
        works = [matvec.glu(gate, up, several.x, to_q8, tune=t)]
        return guards.twice([dst], guards.issues(works))[0]

    for t in tunings(name, tokens, "glu_q8"):
        floats = glu(t, False, several.dst[0])
        assert distance(floats.view(np.float32), several.glu) < 2 * EXACT, t
        rows = guards.quantised(floats, tokens)
        assert np.array_equal(glu(t, True, guards.room(rows.nbytes)), rows), t
