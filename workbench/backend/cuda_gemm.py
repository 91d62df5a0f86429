"""Products of several tokens on the cuda backend: which kernels, or which cuBLAS products.

Pure. Two ways, both on tensor cores with sums in float32:

* `cublas`: quantised weights are expanded to F16 in scratch, some rows at a time, then multiplied
  by cuBLAS. Float weights need no expanding.
* `tile`: kernels/tensor_product.cu decodes quantised weights in registers; they are read once.

Expanding writes and reads 2 bytes a weight where a Q4_0 file has 0.56, so the first way pays once
tensor cores, not the memory, take most of the time; `TILE_UP_TO` says from where. Measured for the
products of a step of an 8B model (one H100 80GB HBM3): the first way takes 11 to 12 ms at 16 to 128
tokens for every quantised type, 13.6 at 256, 16.9 at 512; float weights reach 79 to 83 % of what
memory allows at 16 to 128 tokens, so they have no tile.

Activations are converted first, to the start of scratch: for quantised weights to F16, in the order
of kernels/halves.cuh or the tiles of kernels/tensor_product.cu, for F16 and BF16 to plain rows of
those; F32 is taken as it is. F16 and BF16 have places of their own there, so that products of one
x, one after another, can leave out conversions that were made before.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.backend.args import Args
from workbench.backend.cuda_kernel import Gemm, Kernel, Work, blocks
from workbench.graph.ir import DTYPES, QUANTISED


class Shape(NamedTuple):
    """A build of kernels/tensor_product.cu: the macros of its header but SPLIT."""

    n: int  # tokens of a block
    wm: int  # warps that multiply, of 16 rows each
    loading: int  # warps that load
    steps: int  # of 128 columns, of a stage
    stages: int  # in shared memory
    blocks: int  # of a multiprocessor
    clustered: bool = False  # blocks that share a tile are a cluster

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 * self.wm

    def defines(self, dtype: str, split: int) -> tuple[str, ...]:
        values = {
            "TYPE": dtype, "TOKENS": self.n, "WM": self.wm, "LOADING": self.loading,
            "STEPS": self.steps, "STAGES": self.stages, "BLOCKS": self.blocks,
            "SPLIT": split, "CLUSTERED": int(self.clustered),
        }  # fmt: skip
        return tuple(f"{name}={value}" for name, value in values.items())

    def shared_bytes(self, dtype: str) -> int:
        """Of a block: its stages of activations and of each plane of the weights, and barriers;
        what blocks of a cluster add up takes their place. So much that no multiprocessor takes more
        than `blocks`: some would, and others fewer."""
        words = sum(self._words(size, per, DTYPES[dtype].block) for size, per in PLANES[dtype])
        stage = self.n * self.steps * 256 + self.rows * words * 16
        return max(self.stages * stage + 128, SHARED // (self.blocks + 1) if self.blocks > 1 else 0)

    def at_once(self, dtype: str) -> int:
        """Blocks that a multiprocessor of SHARED bytes has at once."""
        return max(1, min(self.blocks, SHARED // (self.shared_bytes(dtype) + 1024)))

    def _words(self, size: int, per: int, block: int) -> int:
        """16-byte words that `size` bytes for every `per` units of a row's part of a stage can be
        in: Plane::CHUNKS of kernels/staged.cuh."""
        units = 4 * self.steps
        grain = min(units, 8) if block == 256 else 1
        pitch = size if per > 1 else size * grain
        align = min(pitch & -pitch, 16)
        return (size * max(units // per, 1) + 31 - align) // 16


# The planes of a type, as kernels/weights.cuh has them: bytes, for how many units of 32 weights.
PLANES = {
    "Q8_0": ((32, 1), (2, 1)),
    "Q4_0": ((16, 1), (2, 1)),
    "MXFP4": ((16, 1), (1, 1)),
    "Q4_K": ((16, 1), (16, 8)),
    "Q5_K": ((16, 1), (4, 1), (16, 8)),
    "Q6_K": ((16, 1), (8, 1), (2, 1), (2, 8)),
}

# The build for each number of tokens: the first whose `n` is enough, the last beyond. What a type
# has no room for, `shape_for` takes away.
SHAPES = (
    Shape(8, 4, 4, 2, 5, 2),
    Shape(16, 4, 4, 2, 5, 2),
    Shape(32, 4, 4, 2, 4, 2),
    Shape(64, 4, 4, 1, 4, 2, clustered=True),
)
# Instead, with warpgroups and 227 KB of shared memory (compute capability 9.0).
HOPPER_SHAPES = (
    *SHAPES[:3],
    Shape(64, 8, 4, 2, 4, 1, clustered=True),
    Shape(128, 8, 4, 1, 5, 1, clustered=True),
)

# Most tokens for which way `tile` is taken; 0: always cuBLAS.
TILE_UP_TO = {
    "F32": 0, "F16": 0, "BF16": 0,
    "Q8_0": 128, "Q4_0": 128, "MXFP4": 128, "Q4_K": 128, "Q5_K": 128, "Q6_K": 128,
}  # fmt: skip

MOST_TILED = max(TILE_UP_TO.values())

MULTIPROCESSORS = 132  # a constant, so that no result depends on the device
MOST_SPLIT = 8  # blocks of a cluster on every device that has clusters
# Clusters of so many blocks that those multiprocessors have at once, one or two blocks each: their
# groups do not all divide by it. What cuOccupancyMaxActiveClusters says of an H100 80GB HBM3.
CLUSTERS = {
    1: {2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},
    2: {2: 132, 3: 79, 4: 62, 5: 47, 6: 39, 7: 32, 8: 30},
}
FILL_STEPS, ADD_STEPS = 6, 3  # what it costs to begin a block, to add blocks up, in steps
MOST_COUNTERS = 4096
SHARED = 228 << 10  # bytes of a multiprocessor; a block has 1 KB more than it asks for
MOST_SHARED = 99 << 10  # bytes of a block, of devices of compute capability 8.6, 8.9 and 12.0
HOPPER_SHARED = 227 << 10  # of 9.0
LEAST_STAGES = 3  # of shared memory: fewer columns a stage rather than fewer stages
EXPANDED_BYTES = 64 << 20  # of weights expanded at a time
UNITS_IN_FLIGHT = 2  # of a thread of `dequantise`
_QUANTISED = frozenset(t.name for t in QUANTISED)


def padded(dtype: str, cols: int) -> int:
    """Halves of a row of converted activations, and of expanded weights."""
    return blocks(cols, 128) * 128 if dtype in _QUANTISED else cols


def by_tile(dtype: str, n_tokens: int) -> bool:
    """Whether weights are decoded in the tile."""
    return n_tokens <= TILE_UP_TO[dtype]


def shape_for(dtype: str, n_tokens: int, hopper: bool = False) -> Shape:
    """The build for so many tokens, with as many of its stages as the device has room for; `hopper`
    says that it is of compute capability 9.0."""
    shapes = HOPPER_SHAPES if hopper else SHAPES
    wanted = next((shape for shape in shapes if n_tokens <= shape.n), shapes[-1])
    most = min(HOPPER_SHARED, SHARED // wanted.blocks - 1024) if hopper else MOST_SHARED
    for steps, least in ((wanted.steps, LEAST_STAGES), (1, 2)):
        for stages in range(wanted.stages, least - 1, -1):
            shape = wanted._replace(steps=steps, stages=stages)
            if shape.shared_bytes(dtype) <= most:
                return shape
    raise AssertionError(f"no build of {dtype} for {n_tokens} tokens")


def split_for(dtype: str, shape: Shape, rows: int, cols: int, n_tokens: int) -> int:
    """Blocks that share the columns of a tile: as many as make the last of them end soonest on a
    device of MULTIPROCESSORS. Follows from the shapes alone."""
    tiles = blocks(rows, shape.rows) * blocks(n_tokens, shape.n)
    stages = blocks(cols, shape.steps * 128)
    at_once = shape.at_once(dtype)

    def cost(split: int) -> int:
        room = MULTIPROCESSORS * at_once
        if shape.clustered and split > 1:
            room = CLUSTERS[at_once][split] * split
        turns = blocks(tiles * split, room)
        return turns * (blocks(stages, split) * shape.steps + FILL_STEPS) + ADD_STEPS * (split > 1)

    most = min(MOST_SPLIT, stages) if tiles <= MOST_COUNTERS else 1
    return min(range(1, most + 1), key=cost)


def _tiles_tokens(dtype: str, n_tokens: int, hopper: bool) -> int:
    """Tokens that whole tiles have place for."""
    n = shape_for(dtype, n_tokens, hopper).n
    return blocks(n_tokens, n) * n


def _x_bytes(cols: int, n_tokens: int, hopper: bool) -> int:
    """Of either place for converted activations, whatever the weights' type: in tiles, too."""
    tokens = _tiles_tokens("Q8_0", n_tokens, hopper) if n_tokens <= MOST_TILED else n_tokens
    return blocks(tokens * blocks(cols, 512) * 512 * 2, 256) * 256


def _rows_at_once(cols: int) -> int:
    """Rows of weights that are expanded together."""
    return max(EXPANDED_BYTES // (padded("Q8_0", cols) * 2) // 256 * 256, 256)


def scratch_bytes(dtype: str, rows: int, cols: int, n_tokens: int) -> int:
    """Bytes of scratch `product` uses on any device: activations in two places, then expanded
    weights or sums."""
    return max(_scratch_bytes(dtype, rows, cols, n_tokens, hopper) for hopper in (False, True))


def _scratch_bytes(dtype: str, rows: int, cols: int, n_tokens: int, hopper: bool) -> int:
    if by_tile(dtype, n_tokens):
        shape = shape_for(dtype, n_tokens, hopper)
        split = split_for(dtype, shape, rows, cols, n_tokens)
        tiles = blocks(rows, shape.rows) * blocks(n_tokens, shape.n)
        behind = tiles * split * shape.n * shape.rows * 4 if split > 1 else 0
    elif dtype in _QUANTISED:
        behind = min(rows, _rows_at_once(cols)) * padded(dtype, cols) * 2
    else:
        behind = 0
    return 2 * _x_bytes(cols, n_tokens, hopper) + behind


def product(
    dtype: str,
    w: int,
    rows: int,
    bias: int,
    dst: int,
    x: int,
    x_quantised: bool,
    cols: int,
    n_tokens: int,
    scratch: int,
    counters: int,
    dst_stride: int = 0,
    hopper: bool = False,
) -> list[Work]:
    """dst (n_tokens, rows) F32 = x (n_tokens, cols) times w (rows, cols) transposed, plus `bias`
    (rows,) F32 unless 0.

    x is F32, or Q8_ACT if `x_quantised`, which only quantised weights take. dst_stride: elements
    from one token's results to the next, 0 for rows. `scratch` has `scratch_bytes`; `counters` has
    MOST_COUNTERS u32, all zero, and has them so again afterwards. hopper: whether the device is of
    compute capability 9.0. The first work converts x; it is the same for every product of that x by
    weights of one kind.
    """
    stride = dst_stride or rows
    x_bytes = _x_bytes(cols, n_tokens, hopper)
    converted = scratch + (x_bytes if dtype == "BF16" else 0)
    behind = scratch + 2 * x_bytes
    if by_tile(dtype, n_tokens):
        shape = shape_for(dtype, n_tokens, hopper)
        split = split_for(dtype, shape, rows, cols, n_tokens)
        return [
            tiles(shape, converted, x, x_quantised, cols, n_tokens),
            tile(
                dtype, shape, split, w, rows, bias, dst, converted, cols, n_tokens, behind,
                counters, stride,
            ),
        ]  # fmt: skip
    works: list[Work] = []
    if dtype == "F32":
        converted = x
    else:
        works.append(_conversion(dtype, converted, x, x_quantised, cols, n_tokens))
    works += _blas(dtype, w, rows, dst, converted, cols, n_tokens, behind, stride)
    if bias:
        grid = (n_tokens, blocks(rows, 256))
        works.append(
            Kernel("dequantise", "add_bias", grid, 256, [dst, bias, rows, stride], waits=True)
        )
    return works


def _conversion(
    dtype: str, dst: int, x: int, x_quantised: bool, cols: int, n_tokens: int
) -> Kernel:
    if dtype not in _QUANTISED:
        n = n_tokens * cols
        name = "half_rows" if dtype == "F16" else "bfloat_rows"
        return Kernel("dequantise", name, (blocks(n, 1024), 1), 256, [dst, x, n], waits=True)
    name = "half_rows_Q8" if x_quantised else "half_rows_F32"
    grid = (n_tokens, blocks(padded(dtype, cols), 2048))
    return Kernel("dequantise", name, grid, 256, [dst, x, cols], waits=True)


def tiles(shape: Shape, dst: int, x: int, x_quantised: bool, cols: int, n_tokens: int) -> Kernel:
    """Activations as `tile` takes them: the same for every type and build of one `n`."""
    name = "half_tiles_Q8" if x_quantised else "half_tiles_F32"
    grid = (blocks(n_tokens, shape.n) * shape.n, blocks(blocks(cols, 512) * 32, 256))
    return Kernel("dequantise", name, grid, 256, [dst, x, cols, n_tokens, shape.n], waits=True)


def tile(
    dtype: str,
    shape: Shape,
    split: int,
    w: int,
    rows: int,
    bias: int,
    dst: int,
    x: int,
    cols: int,
    n_tokens: int,
    partial: int,
    counters: int,
    stride: int,
) -> Kernel:
    """kernels/tensor_product.cu on activations in tiles, `split` blocks for each tile of results;
    `partial`: F32, shape.n by shape.rows for each block if there are several."""
    args: Args = [dst, w, x, bias, partial, counters, rows, cols, n_tokens, stride]
    grid = (blocks(rows, shape.rows) * blocks(n_tokens, shape.n) * split, 1)
    return Kernel(
        "tensor_product", "tensor_product", grid, 32 * (shape.wm + shape.loading), args,
        shape.defines(dtype, split), shape.shared_bytes(dtype), waits=True,
    )  # fmt: skip


def _blas(
    dtype: str, w: int, rows: int, dst: int, x: int, cols: int, n_tokens: int, expanded: int,
    stride: int,
) -> list[Work]:  # fmt: skip
    """cuBLAS on weights as they are, or as F16, `_rows_at_once` rows after another."""
    if dtype not in _QUANTISED:
        return [Gemm(dtype, dst, w, x, rows, cols, n_tokens, stride)]
    works: list[Work] = []
    columns = padded(dtype, cols)
    step = _rows_at_once(cols)
    for first in range(0, rows, step):
        n = min(step, rows - first)
        works.append(dequantise(dtype, expanded, w, first, n, rows, cols))
        works.append(Gemm("F16", dst + 4 * first, expanded, x, n, columns, n_tokens, stride))
    return works


def dequantise(dtype: str, dst: int, w: int, first: int, n: int, rows: int, cols: int) -> Kernel:
    """Rows first .. first + n - 1 of a weight of `rows` rows to F16 (n, padded cols)."""
    grid = (blocks(n * padded(dtype, cols) // 32, 256 * UNITS_IN_FLIGHT), 1)
    args: Args = [dst, w, first, n, rows, cols]
    return Kernel("dequantise", f"dequantise_{dtype}", grid, 256, args, waits=True)
