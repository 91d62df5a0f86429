"""Every build of kernels/tensor_product.cu that `cuda_tiling` may choose, against float64.

Weights as small as a test's never get the wide ones, nor blocks that add up through memory where a
cluster will do. So they are launched here by name: three weights with biases in one launch, and
gate and up as floats and as Q8_ACT.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from tests.gpu.debug_arena import Block
from tests.gpu.harness import Guards, Wanted, assert_counters_are_zero, distance, operands
from tests.gpu.test_cuda_products import QUANTISED_TOLERANCE
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import gemm
from workbench.backend.cuda.kernels.kernel import blocks
from workbench.backend.cuda.kernels.matvec import Segment
from workbench.backend.cuda.kernels.tiling import PLANES, Build, Epilogue, shapes_for

pytestmark = pytest.mark.gpu

TILES = (8, 16, 32, 64, 128)  # tokens
# Stages of 128 or 256 columns: an odd number, more than the ring has, and than 8 blocks want.
COLS = 11 * 256
# Rows of weights of one launch, none a multiple of a tile; gate and up have multiples of blocks.
SEGMENTS, GATED = (130, 7, 193), (96, 96)
# Blocks that share a tile, in clusters or not: of every other shape.
WAYS = ((1, False), (3, True), (8, False)), ((1, False), (8, True), (2, False))
# These have every shape in every way; the other types each shape in one way after another.
THOROUGH = ("Q4_0", "Q4_K")


class Several:
    """Weights of a type and some rows, all but the second with biases, x, and room for results."""

    def __init__(self, guards: Guards, name: str, rows: tuple[int, ...], tokens: int, cols: int):
        given = [operands(name, n, cols) for n in rows]
        biases = [None if i == 1 else np.linspace(-1, 1, n, dtype=np.float32)
                  for i, n in enumerate(rows)]  # fmt: skip
        x = given[0].x_values[:tokens]
        added = [0 if bias is None else bias for bias in biases]
        self.expected = [x @ g.values.T + bias for g, bias in zip(given, added, strict=True)]
        self.dst = [guards.room(4 * tokens * n) for n in rows]
        self.segments = [
            Segment(name, guards.load(g.weight, g.data), n,
                    0 if bias is None else guards.put(bias).address, dst.address)
            for n, g, bias, dst in zip(rows, given, biases, self.dst, strict=True)
        ]  # fmt: skip
        self.rows = rows
        self.x = gemm.X(guards.put(given[0].x[:tokens]).address, True, cols, tokens)

    @property
    def glu(self) -> np.ndarray:
        gate, up = self.expected
        return gate / (1 + np.exp(-gate)) * up


class Case(NamedTuple):
    build: Build
    gated: bool
    hopper: bool  # for compute capability 9.0 alone

    @property
    def ends(self) -> tuple[Epilogue, ...]:
        return (Epilogue.GLU, Epilogue.GLU_Q8) if self.gated else (Epilogue.PLAIN,)


def cases(name: str, tokens: int, sm: int = 90) -> list[Case]:
    """Builds of tiles of so many tokens that a device has."""
    found = []
    shift = list(PLANES).index(name) + TILES.index(tokens)
    anywhere, hopper = (
        [s for s in shapes_for(name, tokens, on) if s.n == tokens] for on in (False, True)
    )
    for i, shape in enumerate([*hopper, *(s for s in anywhere if s not in hopper)]):
        every = [
            Case(Build(shape, *way), gated, shape not in anywhere)
            for way, gated in itertools.product(WAYS[i % 2], (False, True))
        ]
        thorough = name in THOROUGH and shape in hopper
        found += every if thorough else [every[(shift + i) % 6]]
    return [case for case in found if sm == 90 or not case.hopper]


def kernels(sm: int) -> Wanted:
    tiles = {
        ("tensor_product", case.build.defines(name, end))
        for name, tokens in itertools.product(PLANES, TILES)
        for case in cases(name, tokens, sm)
        for end in case.ends
    }
    return {("dequantise", ()), *tiles}


def run(guards: Guards, several: Several, build: Build, end: Epilogue, into: list[Block]) -> list:
    """What `build` leaves in `into`, converted activations and sums in guarded, poisoned scratch of
    just their size."""
    shape, x = build.shape, several.x
    x_bytes = blocks(x.n_tokens, shape.n) * shape.n * blocks(x.cols, 512) * 512 * 2
    tiles = shape.tiles(several.rows, x.n_tokens, end)
    sums = tiles * build.k_parts * shape.n * shape.rows * 4 if build.k_parts > 1 else 0
    segments = [s._replace(dst=into[min(i, len(into) - 1)].address)
                for i, s in enumerate(several.segments)]  # fmt: skip
    scratch = guards.room(x_bytes + sums)
    works = [
        gemm.tiles(shape.n, scratch.address, x),
        gemm.tile(build, segments, x._replace(at=scratch.address), scratch.address + x_bytes,
                  guards.backend._counters_of(0), end),
    ]  # fmt: skip
    return guards.twice(into, guards.issues(works), scratch)


@pytest.mark.parametrize("n", TILES)
@pytest.mark.parametrize("name", PLANES)
def test_every_build(backend: CudaBackend, name: str, n: int):
    """On a full tile of tokens and part of another, side by side."""
    tokens = n + n // 2 + 1
    for case in cases(name, n, backend._sm):
        with Guards(backend) as guards:
            several = Several(guards, name, GATED if case.gated else SEGMENTS, tokens, COLS)
            into = several.dst[:1] if case.gated else several.dst
            wanted = [several.glu] if case.gated else several.expected
            found = run(guards, several, case.build, case.ends[0], into)
            for raw, expected in zip(found, wanted, strict=True):
                apart = distance(raw.view(np.float32), expected)
                assert apart < (1 + case.gated) * QUANTISED_TOLERANCE, (case, apart)
            if case.gated:
                rows = guards.quantised(found[0], tokens)
                dst = guards.room(rows.nbytes)
                (raw,) = run(guards, several, case.build, Epilogue.GLU_Q8, [dst])
                assert np.array_equal(raw, rows), case
    assert_counters_are_zero(backend)
