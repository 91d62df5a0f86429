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

Activations are converted first, to the start of scratch: F16 in the column order of
kernels/halves.cuh for quantised weights, plain F16 or BF16 for those types; F32 is taken as it is.
F16 and BF16 have places of their own there, so that products of one x, one after another, can leave
out conversions that were made before.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.backend.args import Args
from workbench.backend.cuda_kernel import Gemm, Kernel, Work, blocks
from workbench.graph.ir import DTYPES, QUANTISED


class Shape(NamedTuple):
    """A build of kernels/tensor_product.cu: the macros of its header."""

    n: int  # tokens of a block
    tiles: int  # of 16 rows, of a warp
    wm: int  # warps
    steps: int  # of 128 columns, of a stage
    stages: int  # in shared memory
    blocks: int  # of a multiprocessor

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 16 * self.tiles * self.wm

    def defines(self, dtype: str) -> tuple[str, ...]:
        values = {
            "TYPE": dtype, "TOKENS": self.n, "TILES": self.tiles, "WM": self.wm,
            "STEPS": self.steps, "STAGES": self.stages, "BLOCKS": self.blocks,
        }  # fmt: skip
        return tuple(f"{name}={value}" for name, value in values.items())

    def shared_bytes(self, dtype: str) -> int:
        """Of a block: its stages of activations and of each plane of the weights."""
        words = sum(self._words(dtype, size, per) for size, per in PLANES[dtype])
        return self.stages * (self.n * self.steps * 256 + self.rows * words * 16)

    def at_once(self, dtype: str) -> int:
        """Blocks that a multiprocessor of 227 KB of shared memory has at once."""
        return max(1, min(self.blocks, SHARED // (self.shared_bytes(dtype) + 1280)))

    def _words(self, dtype: str, size: int, per: int) -> int:
        """16-byte words that `size` bytes for every `per` units of a row's part of a stage can be
        in: Plane::CHUNKS of kernels/staged.cuh."""
        units = 4 * self.steps
        grain = min(units, 8) if DTYPES[dtype].block == 256 else 1
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

# The build for each number of tokens: the first whose `n` is enough, the last beyond.
SHAPES = (
    Shape(8, 1, 4, 4, 3, 2),
    Shape(16, 1, 4, 2, 3, 4),
    Shape(32, 1, 4, 1, 4, 4),
    Shape(64, 2, 4, 2, 2, 1),
)

# Types that do not fit the registers three blocks of 64 tokens leave, on some architecture.
MANY_REGISTERS = ("Q8_0", "Q5_K", "Q6_K")

# Most tokens for which way `tile` is taken; 0: always cuBLAS.
TILE_UP_TO = {
    "F32": 0, "F16": 0, "BF16": 0,
    "Q8_0": 128, "Q4_0": 128, "MXFP4": 128, "Q4_K": 128, "Q5_K": 128, "Q6_K": 128,
}  # fmt: skip

MULTIPROCESSORS = 132  # a constant, so that no result depends on the device
LEAST_STAGES = 2  # of a block: fewer cost more to add up than they save
MOST_COUNTERS = 4096
SHARED = 227 << 10  # bytes of a multiprocessor; a block has 1 KB more than it asks for
MOST_SHARED = 99 << 10  # bytes of a block, of devices of compute capability 8.6, 8.9 and 12.0
EXPANDED_BYTES = 64 << 20  # of weights expanded at a time
UNITS_IN_FLIGHT = 2  # of a thread of `dequantise`
_QUANTISED = frozenset(t.name for t in QUANTISED)


def padded(dtype: str, cols: int) -> int:
    """Halves of a row of converted activations, and of expanded weights."""
    return blocks(cols, 128) * 128 if dtype in _QUANTISED else cols


def by_tile(dtype: str, n_tokens: int) -> bool:
    """Whether weights are decoded in the tile."""
    return n_tokens <= TILE_UP_TO[dtype]


def shape_for(dtype: str, n_tokens: int) -> Shape:
    """The build for so many tokens; with stages of fewer columns where those of a type with large
    units leave less than a block may have on every device."""
    wanted = next((shape for shape in SHAPES if n_tokens <= shape.n), SHAPES[-1])
    if wanted.n >= 64 and dtype in MANY_REGISTERS:
        wanted = wanted._replace(blocks=2)
    short = (wanted._replace(steps=1, stages=stages) for stages in (4, 3, 2))
    fits = (s for s in (wanted, *short) if s.shared_bytes(dtype) <= MOST_SHARED)
    return next(fits)


def n_blocks(dtype: str, shape: Shape, rows: int, cols: int, n_tokens: int) -> int:
    """Blocks that share the stages of all tiles: as many as fit a device of MULTIPROCESSORS, fewer
    where there is little to share. Follows from the shapes alone."""
    tiles = blocks(rows, shape.rows) * blocks(n_tokens, shape.n)
    stages = tiles * blocks(cols, shape.steps * 128)
    most = min(MULTIPROCESSORS * shape.at_once(dtype), MOST_COUNTERS)
    return max(1, min(stages // LEAST_STAGES, most))


def _x_bytes(cols: int, n_tokens: int) -> int:
    """Of either place for converted activations."""
    return blocks(n_tokens * blocks(cols, 128) * 128 * 2, 256) * 256


def _rows_at_once(cols: int) -> int:
    """Rows of weights that are expanded together."""
    return max(EXPANDED_BYTES // (padded("Q8_0", cols) * 2) // 256 * 256, 256)


def scratch_bytes(dtype: str, rows: int, cols: int, n_tokens: int) -> int:
    """Bytes of scratch `product` uses: activations in two places, then expanded weights or sums."""
    if by_tile(dtype, n_tokens):
        shape = shape_for(dtype, n_tokens)
        behind = 2 * n_blocks(dtype, shape, rows, cols, n_tokens) * shape.n * shape.rows * 4
    elif dtype in _QUANTISED:
        behind = min(rows, _rows_at_once(cols)) * padded(dtype, cols) * 2
    else:
        behind = 0
    return 2 * _x_bytes(cols, n_tokens) + behind


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
) -> list[Work]:
    """dst (n_tokens, rows) F32 = x (n_tokens, cols) times w (rows, cols) transposed, plus `bias`
    (rows,) F32 unless 0.

    x is F32, or Q8_ACT if `x_quantised`, which only quantised weights take. dst_stride: elements
    from one token's results to the next, 0 for rows. `scratch` has `scratch_bytes`; `counters` has
    MOST_COUNTERS u32, all zero, and has them so again afterwards. The first work converts x; it is
    the same for every product of that x by weights of one kind.
    """
    stride = dst_stride or rows
    converted = scratch + (_x_bytes(cols, n_tokens) if dtype == "BF16" else 0)
    behind = scratch + 2 * _x_bytes(cols, n_tokens)
    works: list[Work] = []
    if dtype == "F32":
        converted = x
    else:
        works.append(_conversion(dtype, converted, x, x_quantised, cols, n_tokens))
    if by_tile(dtype, n_tokens):
        shape = shape_for(dtype, n_tokens)
        shares = n_blocks(dtype, shape, rows, cols, n_tokens)
        works.append(
            tile(
                dtype, shape, shares, w, rows, bias, dst, converted, cols, n_tokens, behind,
                counters, stride,
            )
        )  # fmt: skip
        return works
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


def tile(
    dtype: str,
    shape: Shape,
    grid: int,
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
    """kernels/tensor_product.cu on converted activations, in `grid` blocks, at most one for each
    stage of each tile; `partial`: F32, two tiles of shape.n by shape.rows for each block."""
    args: Args = [dst, w, x, bias, partial, counters, rows, cols, n_tokens, stride]
    return Kernel(
        "tensor_product", "tensor_product", (grid, 1), 32 * shape.wm, args, shape.defines(dtype),
        shape.shared_bytes(dtype), waits=True,
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
