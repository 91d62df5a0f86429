"""Launches of attention without tensor cores: grids and scratch for `kernels/attention_vec.cu` and
`kernels/attention_tile.cu`, which read K and V of any type of the cache.

Pure, as `attention.py`. The cells of a group of query rows are cut into tiles. The toggle kv_parts
deals the tiles out to blocks. With `off` a block has all tiles of a group. With `parallel_blocks`
several blocks share them. With `stream_k` the tiles of all groups are cut into equal pieces. Where
a group has several blocks, a second launch combines their results.
"""

from collections.abc import Callable
from typing import NamedTuple

from workbench.backend.cuda.kernels.attention import (
    FEW_TOKENS,
    MOST_TOKENS,
    SKIPS,
    AttentionAt,
    AttentionShape,
    check,
)
from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.common.errors import DeviceError
from workbench.config import AttnKernel, KVParts
from workbench.graph.ir import DTYPES

# attention_vec: warps of a block, cells of a tile, most rows of a block
VEC_WARPS, VEC_CELLS, VEC_ROWS = 4, 32, (1, 2, 4, 8)
# attention_tile: warps of a block, rows of a group; large heads have fewer cells in a tile
TILE_WARPS, TILE_ROWS = 8, 32
COMBINE_THREADS = 128
BLOCKS = 528  # the most blocks with work where blocks share cells: 4 an H100's multiprocessor
MOST_PARTS = 8192  # the most groups times shares, also where many groups have no work
LEAST_TILES = 4  # least tiles of a piece (stream_k)


class TokenCounts(NamedTuple):
    """The sequences that a launch computes, where sequences have cells of their own: all that have
    `least` to `most` tokens in the step."""

    least: int = 1
    most: int = MOST_TOKENS


class PlainGrid(NamedTuple):
    """Groups of query rows, and the blocks that compute them.

    rows: the most rows of a group.
    cells: cells of a tile.
    groups: how many groups there are.
    entries: the most partial results of a group, one for each block that has some of its tiles.
    piece: with stream_k the tiles of a block, else 0.
    n_pieces: with stream_k the number of blocks.
    """

    rows: int
    cells: int
    groups: int
    entries: int
    piece: int = 0
    n_pieces: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        return (self.n_pieces, 1) if self.piece else (self.groups, self.entries)


def _check(shape: AttentionShape) -> None:
    """Raises DeviceError for heads that no kernel takes."""
    check(shape.head_dim)
    for name in (shape.k_type, shape.v_type):
        if shape.head_dim % (block := DTYPES[name].block):
            raise DeviceError(
                f"attention: heads of {shape.head_dim} elements are no whole blocks of {name} "
                f"({block}); use a cache of another type"
            )


def kernels_of(shape: AttentionShape) -> list[tuple[str, TokenCounts]]:
    """The kernels that compute attention, and the sequences of each. Without a choice the number of
    tokens decides."""
    if shape.kernel in (AttnKernel.VEC, AttnKernel.TILE):
        return [(shape.kernel, TokenCounts())]
    if shape.ragged:
        tall, few = TokenCounts(least=FEW_TOKENS + 1), TokenCounts(most=FEW_TOKENS)
        return [(AttnKernel.TILE, tall), (AttnKernel.VEC, few)]
    return [(AttnKernel.VEC if shape.few else AttnKernel.TILE, TokenCounts())]


def vec_grid(shape: AttentionShape, tokens: TokenCounts) -> PlainGrid:
    rows = next((n for n in VEC_ROWS if n >= shape.group), VEC_ROWS[-1])
    each = shape.n_head_kv * blocks(shape.group, rows)
    # the most tokens that this launch computes; the other tokens have groups without work
    n = min(shape.n_tokens, max(1, shape.n_regions) * tokens.most)
    return _shared(shape, rows, VEC_CELLS, shape.n_tokens * each, n * each, VEC_WARPS)


def tile_grid(shape: AttentionShape, tokens: TokenCounts) -> PlainGrid:
    groups = shape.row_groups(TILE_ROWS)
    if shape.ragged:
        groups = min(shape.n_regions, shape.n_tokens // tokens.least) + shape.rows // TILE_ROWS
    groups *= shape.n_head_kv
    cells = 64 if shape.head_dim <= 128 else 32
    return _shared(shape, TILE_ROWS, cells, groups, groups, 1)


def _shared(
    shape: AttentionShape, rows: int, cells: int, groups: int, busy: int, warps: int
) -> PlainGrid:
    """busy: groups that have work. warps: of a block, where warps have tiles of their own; else
    1."""
    tiles = blocks(shape.n_kv, cells)
    if shape.kv_parts == KVParts.OFF:
        return PlainGrid(rows, cells, groups, 1)
    if shape.kv_parts == KVParts.PARALLEL_BLOCKS:
        shares = min(BLOCKS // max(busy, 1), MOST_PARTS // max(groups, 1), blocks(tiles, warps))
        return PlainGrid(rows, cells, groups, max(1, shares))
    total = groups * tiles
    piece = max(1, blocks(total, max(1, min(BLOCKS, blocks(total, LEAST_TILES)))))
    return PlainGrid(rows, cells, groups, blocks(tiles, piece) + 1, piece, blocks(total, piece))


_GRIDS: dict[str, Callable[[AttentionShape, TokenCounts], PlainGrid]] = {
    AttnKernel.VEC: vec_grid,
    AttnKernel.TILE: tile_grid,
}


def shared_bytes(kernel: str, head_dim: int, grid: PlainGrid) -> int:
    """Bytes of the struct Memory of a kernel."""
    if kernel == AttnKernel.VEC:
        of_warp = grid.rows * (grid.cells + head_dim + 2)
        return 4 * (grid.rows * head_dim + VEC_WARPS * of_warp)
    tile = (grid.rows + grid.cells) * (head_dim + 4)
    return 4 * (tile + grid.rows * (grid.cells + 8 + 1 + 2))


def scratch_bytes(shape: AttentionShape) -> int:
    """Bytes of the partial results that the second launch combines: for each group, entry and row
    head_dim sums, a maximum and a weight. The launches of a node use the same bytes one after
    another."""
    most = 0
    for kernel, tokens in kernels_of(shape):
        grid = _GRIDS[kernel](shape, tokens)
        if grid.entries > 1:
            most = max(most, grid.groups * grid.entries * grid.rows * (shape.head_dim + 2) * 4)
    return most


def launches(shape: AttentionShape, at: AttentionAt, scale: float) -> list[Kernel]:
    """The launches that compute attention, with results in F32. Raises DeviceError for heads that
    no kernel takes."""
    _check(shape)
    works: list[Kernel] = []
    for kernel, tokens in kernels_of(shape):
        grid = _GRIDS[kernel](shape, tokens)
        if shape.n_tokens and grid.groups:
            works += _launched(shape, at, scale, kernel, tokens, grid)
    return works


def _launched(
    shape: AttentionShape, at: AttentionAt, scale: float, kernel: str, tokens: TokenCounts,
    grid: PlainGrid,
) -> list[Kernel]:  # fmt: skip
    file, warps = f"attention_{kernel}", VEC_WARPS if kernel == AttnKernel.VEC else TILE_WARPS
    defines = _defines(shape, kernel, grid)
    sizes = [shape.n_tokens, shape.n_head, shape.n_head_kv, shape.n_kv, shape.n_regions, *tokens,
             grid.groups, grid.entries, grid.piece]  # fmt: skip
    works = [
        Kernel(
            file, file, grid.grid, 32 * warps,
            [at.dst, at.q, at.k, at.v, at.mask, at.scratch, at.regions, at.known, at.sinks, *sizes,
             scale],
            defines, shared_bytes(kernel, shape.head_dim, grid), waits=True,
        )
    ]  # fmt: skip
    if grid.entries > 1:
        works.append(
            Kernel(
                file, "attention_combine", (grid.groups, 1), COMBINE_THREADS,
                [at.dst, at.scratch, at.regions, at.sinks, *sizes], defines, waits=True,
            )
        )  # fmt: skip
    return works


def _defines(shape: AttentionShape, kernel: str, grid: PlainGrid) -> tuple[str, ...]:
    """Macros of a compilation. A feature that the shape does not use has no macro."""
    tiling = f"GROUP_ROWS={grid.rows}" if kernel == AttnKernel.VEC else f"TILE_CELLS={grid.cells}"
    skip = SKIPS.get(shape.skip)
    return (
        f"HEAD_DIM={shape.head_dim}", f"K_CELL=Cell{shape.k_type}", f"V_CELL=Cell{shape.v_type}",
        tiling, *(["REGIONS=1"] if shape.n_regions else []), *([f"SKIP={skip}"] if skip else []),
        *(["SINKS=1"] if shape.has_sinks else []),
    )  # fmt: skip
