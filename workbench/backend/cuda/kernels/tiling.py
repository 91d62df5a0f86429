"""How products of more than 8 tokens are cut into tiles, stages and blocks on CUDA.

Pure. `gemm.py` makes the launch; kernels/tensor_product.cu has the macros. For each number of
tokens there are a few shapes. A cost model chooses the shape of a launch, and how many blocks share
the columns of a tile. The cost is the number of steps, one after another, of the multiprocessor
that ends last. The figures were fitted to launches of an 8B model's products on one H100 80GB HBM3
(data/results/tuning/tensor_product-4.json). There the chosen build was within 8 % of the fastest
build tried, mostly within 4 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from workbench.backend.cuda.kernels.kernel import blocks
from workbench.graph.ir import DTYPES

MULTIPROCESSORS = 132  # a constant, so that no result depends on the device
SHARED = 228 << 10  # bytes of a multiprocessor; a block has 1 KB more than it asks for
MOST_SHARED = 99 << 10  # most bytes of a block, with compute capability 8.6, 8.9 and 12.0
HOPPER_SHARED = 227 << 10  # most bytes of a block, with compute capability 9.0
LEAST_STAGES = 3  # where room is short, stages get fewer columns before there are fewer stages
MOST_K_PARTS = 8  # the most blocks of a cluster that every device with clusters accepts
MOST_COUNTERS = 4096
# Blocks of a multiprocessor -> blocks of a cluster -> clusters that run at once. A cluster stays in
# one group of multiprocessors, and not all groups divide by the blocks of a cluster. From
# cuOccupancyMaxActiveClusters, H100 80GB HBM3.
CLUSTERS = {
    1: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},
    2: {2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30},
}

# Costs in steps, of 128 columns of 128 rows, of a multiprocessor: to begin a block (FILL), to add
# blocks up in a cluster, and to add blocks up through memory (tokens of a tile -> cost).
FILL, ADD_IN_CLUSTER = 6, 3
ADD_IN_MEMORY = {8: 4, 16: 4, 32: 5, 64: 8, 128: 14}
PACE = 0.93  # a step of twice the rows takes 2 ** PACE times as long

# The planes of a type in kernels/weights.cuh: bytes, and the units of 32 weights that share them.
PLANES = {
    "Q8_0": ((32, 1), (2, 1)),
    "Q4_0": ((16, 1), (2, 1)),
    "MXFP4": ((16, 1), (1, 1)),
    "Q4_K": ((16, 1), (16, 8)),
    "Q5_K": ((16, 1), (4, 1), (16, 8)),
    "Q6_K": ((16, 1), (8, 1), (2, 1), (2, 8)),
}


class Epilogue(IntEnum):
    """The results of kernels/tensor_product.cu: products, or silu(gate) * up as F32 or Q8_ACT."""

    PLAIN, GLU, GLU_Q8 = range(3)


class TileShape(NamedTuple):
    """The shape of a block of kernels/tensor_product.cu."""

    n: int  # tokens of a block
    wm: int  # warps that multiply, with 16 rows each
    loading: int  # warps that load
    steps: int  # steps of 128 columns in a stage
    stages: int  # stages in shared memory
    blocks: int  # blocks of a multiprocessor

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return 16 * self.wm

    def tiles(self, rows: Sequence[int], n_tokens: int, end: Epilogue = Epilogue.PLAIN) -> int:
        """Tiles of results of a launch. rows: of each weight. Gate and up share their tiles."""
        if end != Epilogue.PLAIN:
            return blocks(rows[0], self.rows // 2) * blocks(n_tokens, self.n)
        return sum(blocks(n, self.rows) for n in rows) * blocks(n_tokens, self.n)

    def shared_bytes(self, dtype: str) -> int:
        """Bytes of shared memory of a block: its stages, of activations and of each plane of the
        weights, and 128 bytes for barriers. Later the sums of a cluster use the same bytes.

        A block asks for at least so much that a multiprocessor holds no more than `blocks` of them.
        Otherwise some multiprocessors would take more blocks, and others fewer.
        """
        words = sum(self._words(size, per, DTYPES[dtype].block) for size, per in PLANES[dtype])
        stage = self.n * self.steps * 256 + self.rows * words * 16
        return max(self.stages * stage + 128, SHARED // (self.blocks + 1) if self.blocks > 1 else 0)

    def at_once(self, dtype: str) -> int:
        """Blocks that a multiprocessor of SHARED bytes holds at once."""
        return max(1, min(self.blocks, SHARED // (self.shared_bytes(dtype) + 1024)))

    def _words(self, size: int, per: int, block: int) -> int:
        """16-byte words of a row in a stage, for a plane with `size` bytes for every `per` units:
        Plane::CHUNKS of kernels/staged.cuh."""
        units = 4 * self.steps
        grain = min(units, 8) if block == 256 else 1
        pitch = size if per > 1 else size * grain
        align = min(pitch & -pitch, 16)
        return (size * max(units // per, 1) + 31 - align) // 16


# Shapes for each number of tokens of a tile, in rising order. The first shape of each serves every
# type, with fewer stages or columns where room is short. The others are used only where at least
# LEAST_STAGES of their stages fit.
SHAPES: tuple[tuple[TileShape, ...], ...] = (
    (TileShape(8, 4, 4, 2, 5, 2),),
    (TileShape(16, 4, 4, 2, 5, 2), TileShape(16, 8, 4, 2, 4, 2)),
    (TileShape(32, 4, 4, 2, 4, 2), TileShape(32, 8, 4, 2, 3, 2)),
    (TileShape(64, 4, 4, 1, 4, 2),),
)
# The shapes for compute capability 9.0, which has warpgroups and 227 KB of shared memory.
HOPPER_SHAPES: tuple[tuple[TileShape, ...], ...] = (
    *SHAPES[:3],
    (TileShape(64, 8, 4, 2, 4, 1), TileShape(64, 4, 4, 1, 4, 2), TileShape(64, 8, 4, 1, 4, 2)),
    (TileShape(128, 8, 4, 1, 5, 1),),
)


class Build(NamedTuple):
    """How one launch is cut.

    shape: of a block.
    k_parts: blocks that share the columns of a tile.
    clustered: whether these blocks form a cluster.
    """

    shape: TileShape
    k_parts: int
    clustered: bool

    def defines(self, dtype: str, end: Epilogue = Epilogue.PLAIN) -> tuple[str, ...]:
        """The macros of kernels/tensor_product.cu."""
        shape = self.shape
        values = {
            "TYPE": dtype, "TOKENS": shape.n, "WM": shape.wm, "LOADING": shape.loading,
            "STEPS": shape.steps, "STAGES": shape.stages, "BLOCKS": shape.blocks,
            "K_PARTS": self.k_parts, "CLUSTERED": int(self.clustered), "EPILOGUE": int(end),
        }  # fmt: skip
        return tuple(f"{name}={value}" for name, value in values.items())


def _at_hand(n_tokens: int, hopper: bool) -> tuple[TileShape, ...]:
    """The shapes of the smallest tile that holds n_tokens, or of the largest tile."""
    found = HOPPER_SHAPES if hopper else SHAPES
    return next((shapes for shapes in found if n_tokens <= shapes[0].n), found[-1])


def tile_tokens(n_tokens: int, hopper: bool) -> int:
    """Tokens of a tile, for weights of any type."""
    return _at_hand(n_tokens, hopper)[0].n


def shapes_for(dtype: str, n_tokens: int, hopper: bool) -> list[TileShape]:
    """The shapes for which a device has room. hopper: whether its compute capability is 9.0."""
    first, *others = _at_hand(n_tokens, hopper)
    found = [_fitted(first, dtype, hopper, ((first.steps, LEAST_STAGES), (1, 2)))]
    found += [_fitted(shape, dtype, hopper, ((shape.steps, LEAST_STAGES),)) for shape in others]
    assert found[0] is not None, f"no build of {dtype} for {n_tokens} tokens"
    return [shape for shape in found if shape is not None]


def _fitted(
    shape: TileShape, dtype: str, hopper: bool, wanted: Sequence[tuple[int, int]]
) -> TileShape | None:
    """`shape` with as many stages as there is room for; None without room.

    wanted: pairs (steps of a stage, least stages); the first pair with room is taken.
    """
    most = min(HOPPER_SHARED, SHARED // shape.blocks - 1024) if hopper else MOST_SHARED
    for steps, least in wanted:
        for stages in range(shape.stages, least - 1, -1):
            fitted = shape._replace(steps=steps, stages=stages)
            if fitted.shared_bytes(dtype) <= most:
                return fitted
    return None


def cost(dtype: str, build: Build, tiles: int, cols: int) -> float:
    """The steps of the multiprocessor that ends last, in the unit of FILL."""
    shape, k_parts, clustered = build
    at_once = shape.at_once(dtype)
    room = MULTIPROCESSORS * at_once
    if clustered and k_parts > 1:
        room = CLUSTERS[at_once][k_parts] * k_parts
    steps = blocks(blocks(cols, shape.steps * 128), k_parts) * shape.steps
    load = shape.rows * at_once / 128
    adding = (ADD_IN_CLUSTER if clustered else ADD_IN_MEMORY[shape.n]) * load * (k_parts > 1)
    return blocks(tiles * k_parts, room) * (steps * load**PACE + FILL) + adding


@cache  # layers have the same shapes, and a program asks several times
def build_for(
    dtype: str, rows: tuple[int, ...], cols: int, n_tokens: int,
    end: Epilogue = Epilogue.PLAIN, hopper: bool = False,
) -> Build:  # fmt: skip
    """The build of a launch with the least cost. Only shapes decide. rows: of each weight."""

    def builds() -> Iterator[tuple[float, Build]]:
        for shape in shapes_for(dtype, n_tokens, hopper):
            tiles = shape.tiles(rows, n_tokens, end)
            most = min(MOST_K_PARTS, blocks(cols, shape.steps * 128))
            for k_parts in range(1, most + 1 if tiles <= MOST_COUNTERS else 2):
                for clustered in (False, True)[:k_parts]:
                    build = Build(shape, k_parts, clustered)
                    yield cost(dtype, build, tiles, cols), build

    return min(builds(), key=lambda found: found[0])[1]
