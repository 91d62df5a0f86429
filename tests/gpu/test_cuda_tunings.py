"""Every tuning that `cuda_tuning` may choose for the shapes of real models, against float64.

Weights as small as a test's get few of them. So each is given by name to weights of odd shapes:
three with biases in one launch, and gate and up as Q8_ACT, the very bytes of `quantize` of the
floats that the same tuning makes.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.harness import Wanted, compile_side_by_side, distance
from tests.gpu.test_cuda_products import EXACT
from tests.gpu.test_cuda_tiles import Several, quantised
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import matvec
from workbench.backend.cuda.kernels.kernel import Kernel
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
    """Those that weights of the models' shapes get, each once."""
    gated = epilogue == "glu_q8"
    found = [
        tuning(name, sum(shape.rows), shape.cols, n_tokens, epilogue)
        for shape in SHAPES.values()
        if (shape.how == "glu") == gated
    ]
    if not gated:  # one of several weights, launched alone
        found += [
            tuning(name, rows, shape.cols, n_tokens, epilogue)
            for shape in SHAPES.values()
            for rows in shape.rows
        ]
    return list(dict.fromkeys(found))


def plain(several: Several, t: Tuning) -> Kernel:
    x = several.given
    return matvec.plain(several.segments, x, tune=t)


def glu(several: Several, dst: int, to_q8: bool, t: Tuning) -> Kernel:
    gate, up = (s._replace(dst=dst) for s in several.segments)
    x = several.given
    return matvec.glu(gate, up, x, to_q8, tune=t)


def kernels(sm: int) -> Wanted:
    wanted: Wanted = set()
    for name in TYPES:
        segments = [Segment(name, 0, n, 0, 0) for n in SEGMENTS]
        gate, up = segments[0]._replace(rows=GATED[0]), segments[1]._replace(rows=GATED[1])
        for n in TOKENS:
            made = [matvec.plain(segments, X(0, True, COLS, n), tune=t)
                    for t in tunings(name, n, "plain")]  # fmt: skip
            made += [matvec.glu(gate, up, X(0, True, COLS, n), to_q8, tune=t)
                     for t in tunings(name, n, "glu_q8") for to_q8 in (False, True)]  # fmt: skip
            wanted |= {(kernel.file, kernel.defines) for kernel in made}
    return wanted


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TYPES)
def test_products(backend: CudaBackend, weights: list, name: str, tokens: int):
    several = Several(backend, weights, [name] * 3, SEGMENTS, tokens, COLS)
    for t in tunings(name, tokens, "plain"):
        found = several.run(0, several.dst, lambda _, t=t: [plain(several, t)])
        for i, raw in enumerate(found):
            assert distance(raw.view(np.float32), several.expected[i].ravel()) < EXACT, (t, i)
    several.close()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TYPES)
def test_gate_and_up(backend: CudaBackend, weights: list, name: str, tokens: int):
    several = Several(backend, weights, [name] * 2, GATED, tokens, COLS)
    into = several.dst[0]
    gate, up = several.expected
    wanted = (gate / (1 + np.exp(-gate)) * up).ravel()
    for t in tunings(name, tokens, "glu_q8"):
        (floats,) = several.run(0, [into], lambda _, t=t: [glu(several, into.address, False, t)])
        assert distance(floats.view(np.float32), wanted) < 2 * EXACT, t
        with quantised(backend, floats, tokens) as (dst, expected):
            (raw,) = several.run(0, [dst], lambda _, t=t, dst=dst: [
                glu(several, dst.address, True, t)
            ])  # fmt: skip
            assert np.array_equal(raw, expected), t
    several.close()
