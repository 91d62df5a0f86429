"""Every build of kernels/tensor_product.cu that `cuda_tiling` may choose, against float64.

Which of them a launch gets follows from what it takes, and weights as small as a test's never get
the wide ones, nor blocks that add up through memory where a cluster will do. So they are launched
here by name: each shape of `shapes_for`, alone and shared by 2, 3 and 8 blocks, in clusters and
not; three weights with biases in one launch, and gate and up as floats and as Q8_ACT.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest

from tests.gpu.harness import POISON, Guarded, Wanted, compile_side_by_side, distance
from tests.gpu.test_cuda_products import QUANTISED_TOLERANCE, assert_counters_are_zero, operands
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import gemm
from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.cuda.kernels.matvec import Segment
from workbench.backend.cuda.kernels.tiling import (
    HOPPER_SHAPES,
    PLANES,
    SHAPES,
    Build,
    Epilogue,
    TileShape,
    shapes_for,
)
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make

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
    """Weights of some types and rows with biases, x of the first and room for results, all of it
    between guards."""

    def __init__(self, backend: CudaBackend, held: list, types: list[str], rows: tuple[int, ...],
                 tokens: int, cols: int):  # fmt: skip
        self.backend, self.rows = backend, rows
        given = [operands(name, n, cols) for name, n in zip(types, rows, strict=True)]
        biases = [np.linspace(-1, 1, n, dtype=np.float32) if i != 1 else None
                  for i, n in enumerate(rows)]  # fmt: skip
        self.expected = [
            given[0].x_values[:tokens] @ g.values.T + (0 if bias is None else bias)
            for g, bias in zip(given, biases, strict=True)
        ]
        loaded = [backend.load_weight(g.weight, g.data) for g in given]
        held += loaded
        self.x = self.guarded(given[0].x[:tokens])
        self.dst = [self.guarded(np.full((tokens, n), np.nan, np.float32)) for n in rows]
        kept = [None if bias is None else self.guarded(bias) for bias in biases]
        self.segments = [
            Segment(name, memory.address, n, bias.address if bias else 0, dst.address)
            for name, memory, n, bias, dst in zip(types, loaded, rows, kept, self.dst, strict=True)
        ]
        self.all = [self.x, *self.dst, *(bias for bias in kept if bias)]
        self.given = gemm.X(self.x.address, True, cols, tokens)
        self.counters = backend._counters_of(0)

    def guarded(self, content: np.ndarray) -> Guarded:
        bytes_of = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        return Guarded(self.backend, bytes_of)

    def run(
        self, need: int, into: list[Guarded], works: Callable[[int], list[Kernel]]
    ) -> list[np.ndarray]:
        """What lies in `into` after the works, which are told where scratch is: twice the same."""
        scratch = Guarded(self.backend, np.full(need, POISON, np.uint8))
        calls = [self.backend._prepare(work, self.backend._stream(0), work.file)
                 for work in works(scratch.address)]  # fmt: skip
        results = []
        for _ in range(2):
            for guarded in (*into, scratch):
                guarded.upload()
            for call in calls:
                call()
            results.append([guarded.download() for guarded in into])
        for first, second in zip(*results, strict=True):
            assert np.array_equal(first, second), "two runs differ"
        scratch.download()
        scratch.memory.free()
        return results[0]

    def close(self) -> None:
        for guarded in self.all:
            guarded.download()
            guarded.memory.free()


@contextmanager
def quantised(
    backend: CudaBackend, floats: np.ndarray, tokens: int
) -> Iterator[tuple[Guarded, np.ndarray]]:
    """Room for the Q8_ACT rows of `floats`, poisoned, and what `quantize` makes of them."""
    rows = floats.nbytes // 4 // tokens
    node = make("quantize", "q", Tensor("y", F32, (tokens, rows)))
    dst = Guarded(backend, np.full(node.output.nbytes, POISON, np.uint8))
    x = Guarded(backend, floats)
    at = {node.inputs[0]: x.address, node.output: dst.address}
    backend.launch(node, at.__getitem__, 0, stream=0)()
    yield dst, dst.download()
    x.memory.free()
    dst.memory.free()


def builds(sm: int) -> list[bool]:
    """Those of any device, and those for compute capability 9.0 alone where this is one."""
    return [False, True] if sm == 90 else [False]


class Case(NamedTuple):
    build: Build
    gated: bool
    hopper: bool  # for compute capability 9.0 alone

    @property
    def ends(self) -> tuple[Epilogue, ...]:
        return (Epilogue.GLU, Epilogue.GLU_Q8) if self.gated else (Epilogue.PLAIN,)


def shapes_at_hand(name: str, tokens: int, hopper: bool) -> list[TileShape]:
    """Those of tiles of so many tokens."""
    return [shape for shape in shapes_for(name, tokens, hopper) if shape.n == tokens]


def cases(name: str, tokens: int) -> list[Case]:
    found = []
    shift = list(PLANES).index(name) + TILES.index(tokens)
    anywhere, hopper = (shapes_at_hand(name, tokens, on) for on in (False, True))
    for i, shape in enumerate([*hopper, *(shape for shape in anywhere if shape not in hopper)]):
        every = [
            Case(Build(shape, *way), gated, shape not in anywhere)
            for way, gated in itertools.product(WAYS[i % 2], (False, True))
        ]
        thorough = name in THOROUGH and shape in hopper
        found += every if thorough else [every[(shift + i) % 6]]
    return found


def kernels(sm: int) -> Wanted:
    tiles = {
        ("tensor_product", case.build.defines(name, end))
        for name, tokens in itertools.product(PLANES, TILES)
        for case in cases(name, tokens)
        for end in case.ends
        if case.hopper in builds(sm)
    }
    return {("dequantise", ()), *tiles}


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


def run(several: Several, build: Build, end: Epilogue, into: list[Guarded]) -> list[np.ndarray]:
    """What `build` leaves in `into`, twice the same, converted activations and sums in guarded,
    poisoned scratch of just their size."""
    shape, x = build.shape, several.given
    x_bytes = blocks(x.n_tokens, shape.n) * shape.n * blocks(x.cols, 512) * 512 * 2
    tiles = shape.tiles(several.rows, x.n_tokens, end)
    sums = tiles * build.k_parts * shape.n * shape.rows * 4 if build.k_parts > 1 else 0
    segments = [s._replace(dst=into[min(i, len(into) - 1)].address)
                for i, s in enumerate(several.segments)]  # fmt: skip
    return several.run(x_bytes + sums, into, lambda scratch: [
        gemm.tiles(shape.n, scratch, x),
        gemm.tile(build, segments, x._replace(at=scratch), scratch + x_bytes,
                       several.counters, end),
    ])  # fmt: skip


def compare(backend: CudaBackend, held: list, name: str, tokens: int, case: Case) -> None:
    rows = GATED if case.gated else SEGMENTS
    several = Several(backend, held, [name] * len(rows), rows, tokens, COLS)
    if not case.gated:
        found = run(several, case.build, Epilogue.PLAIN, several.dst)
        for i, raw in enumerate(found):
            apart = distance(raw.view(np.float32), several.expected[i])
            assert apart < QUANTISED_TOLERANCE, (case, i, apart)
    else:
        (floats,) = run(several, case.build, Epilogue.GLU, several.dst[:1])
        gate, up = several.expected
        apart = distance(floats.view(np.float32), gate / (1 + np.exp(-gate)) * up)
        assert apart < 2 * QUANTISED_TOLERANCE, (case, apart)
        with quantised(backend, floats, tokens) as (dst, expected):
            (raw,) = run(several, case.build, Epilogue.GLU_Q8, [dst])
            assert np.array_equal(raw, expected), case
    several.close()


@pytest.mark.parametrize("n", TILES)
@pytest.mark.parametrize("name", PLANES)
def test_every_build(backend: CudaBackend, weights: list, name: str, n: int):
    """On a full tile of tokens and part of another, side by side."""
    for case in cases(name, n):
        if case.hopper in builds(backend._sm):
            compare(backend, weights, name, n + n // 2 + 1, case)
    assert_counters_are_zero(backend)


def test_every_shape_is_run_in_every_way():
    """For two types: each shape there is for 9.0, alone, in clusters and not, with each end. For
    the others and elsewhere: each shape."""

    def kind(shape: TileShape) -> tuple[int, int, int]:
        return shape.n, shape.wm, shape.blocks

    there = {kind(shape) for group in HOPPER_SHAPES for shape in group}
    for name in THOROUGH:
        found = {
            (kind(case.build.shape), case.build.k_parts > 1, case.build.clustered, end)
            for tokens in TILES
            for case in cases(name, tokens)
            if case.build.shape in shapes_at_hand(name, tokens, True)
            for end in case.ends
        }
        ways = ((False, False), (True, False), (True, True))
        assert found == {(s, *way, end) for s in there for way in ways for end in Epilogue}
    for name, tokens in itertools.product(PLANES, TILES):
        shapes = {s for on in (False, True) for s in shapes_at_hand(name, tokens, on)}
        assert {case.build.shape for case in cases(name, tokens)} == shapes
    assert {kind(s) for group in SHAPES for s in group} <= there
