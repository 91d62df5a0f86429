"""Launches of attention on CUDA: grids, tunings and scratch for `kernels/attention.cu`.

Pure: addresses and shapes in, data out. Only shapes and the padded n_kv decide, so a result does
not depend on the cells in which tokens lie. The constants repeat constants of the source.
"""

from typing import NamedTuple

from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.common.errors import DeviceError
from workbench.config import AttnKernel, KVParts, SkipMaskedKV

MAX_HEAD_DIM = 256
MOST_TOKENS = 1 << 30  # of a sequence; no sequence has more
FEW_TOKENS = 8  # up to so many tokens of a step attention_decode computes all
CELLS = 16  # attention_decode: cells of a tile
CELL_PAD = 8  # halves after each row of a tile, against bank conflicts

# These figures are for an H100: 132 multiprocessors, which hold two blocks of these kernels each.
BLOCKS = 264  # attention_decode: the most blocks; all of them run at once
CLUSTER = 8  # the most blocks of a cluster that every device with clusters accepts
LEAST_TILES = 16  # attention_decode: least tiles of a block where several clusters share the cells
SETS = (1, 2, 4)
ENOUGH_BLOCKS = 66  # attention_prefill: with fewer blocks, attention_decode is used instead


class AttentionShape(NamedTuple):
    """The shapes of an attention node (`graph/ops.py`), and how it is computed.

    n_kv: the padded cells of each kv head.
    n_regions: sequences with cells of their own; 0: all sequences share the cells.
    skip, kv_parts, kernel: values of the toggles.
    k_type, v_type: names of the cache's types, for `is_mma`.
    """

    n_tokens: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_kv: int
    n_regions: int = 0
    skip: str = SkipMaskedKV.OFF
    kv_parts: str = KVParts.PARALLEL_BLOCKS
    has_sinks: bool = False
    kernel: str = AttnKernel.AUTO
    k_type: str = "F16"
    v_type: str = "F16"

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.n_head // self.n_head_kv

    @property
    def each_one(self) -> bool:
        """Whether every sequence has one token, and cells of its own."""
        return self.n_regions == self.n_tokens

    @property
    def ragged(self) -> bool:
        """Whether sequences with cells of their own may have any number of tokens."""
        return self.n_regions > 1 and not self.each_one

    def row_groups(self, rows: int) -> int:
        """Groups of `rows` rows of a kv head. Where sequences have cells of their own, no group
        spans two of them; the number is then the most there can be."""
        if self.each_one:
            return self.n_tokens * blocks(self.group, rows)
        if self.ragged:
            return min(self.n_tokens, self.n_regions) + self.rows // rows
        return blocks(self.rows, rows)

    @property
    def rows(self) -> int:
        """Query rows that read the same kv head."""
        return self.n_tokens * self.group

    @property
    def few(self) -> bool:
        """Whether the tokens are so few that attention_decode computes all of them."""
        return self.each_one or self.n_tokens <= FEW_TOKENS


class AttentionAt(NamedTuple):
    """Addresses in bytes.

    dst: (n_tokens, n_head * head_dim), F32 or Q8_ACT.
    q, k, v, mask: as in `graph/ops.py`.
    scratch: of `scratch_bytes`.
    counters: u32, zero before and after a launch; a launch needs groups * cluster, at most BLOCKS.
    """

    dst: int
    q: int
    k: int
    v: int
    mask: int
    scratch: int
    counters: int
    regions: int = 0
    known: int = 0
    sinks: int = 0


class AttentionTuning(NamedTuple):
    """Macros of one compilation.

    sets: sets of 8 rows of a block (decode).
    warps: of a block.
    stages: tiles in shared memory.
    cells: of a tile.
    """

    sets: int
    warps: int
    stages: int
    cells: int


# Many tokens over few cells: blocks of 16 rows and 8 warps, a block a multiprocessor, a tile a
# warp. CLUSTERS: blocks of a cluster -> clusters that run at once (cuOccupancyMaxActiveClusters,
# H100).
MANY, MANY_TILES = AttentionTuning(2, 8, 1, CELLS), 64
CLUSTERS = {8: 15, 4: 30, 2: 66, 1: 132}


class DecodeGrid(NamedTuple):
    """The grid of attention_decode: (groups, kv_parts). With stream_k the grid is (blocks, 1)
    instead (`_cut`), and kv_parts and cluster are 1.

    groups: n_head_kv * row groups.
    kv_parts: parts of the cells, a block for each.
    cluster: so many blocks with neighbouring parts form a cluster.
    """

    tuning: AttentionTuning
    groups: int
    kv_parts: int
    cluster: int


def is_mma(shape: AttentionShape) -> bool:
    """Whether kernels with tensor cores compute attention. Raises DeviceError where they are chosen
    and read no such cache.

    mma        this module: tensor cores; K and V are F16
    vec, tile  `attention_plain.py`: no tensor cores; K and V of any type of the cache
    auto       mma where the types allow it; else vec for few tokens of a sequence, tile for many
    """
    types = dict.fromkeys(t for t in (shape.k_type, shape.v_type) if t != "F16")
    if types and shape.kernel == AttnKernel.MMA:
        raise DeviceError(
            f"attn_kernel=mma reads no cache of {' and '.join(types)}; use attn_kernel=auto, vec "
            "or tile, or a cache of f16"
        )
    return not types and shape.kernel in (AttnKernel.AUTO, AttnKernel.MMA)


def _dim(head_dim: int) -> int:
    return blocks(head_dim, 16) * 16


def check(head_dim: int) -> None:
    """Raises DeviceError for a head_dim that no kernel takes."""
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise DeviceError(
            f"attention: head_dim {head_dim} is not supported on cuda (multiples of 8 up to "
            f"{MAX_HEAD_DIM}); use device=host or embedded"
        )


def decode_tuning(rows: int, head_dim: int) -> AttentionTuning:
    """The tuning of blocks with `rows` query rows: as many sets as the rows need and registers
    allow."""
    dim = _dim(head_dim)
    if dim > 128:
        return AttentionTuning(1, 2, 2, CELLS)
    sets = next((s for s in SETS if rows <= 8 * s), SETS[-1])
    if dim > 64:
        return AttentionTuning(sets, 4, 2, CELLS)
    warps, stages = {1: (8, 2), 2: (4, 4), 4: (4, 3)}[sets]
    return AttentionTuning(sets, warps, stages, CELLS)


def prefill_tuning(head_dim: int) -> AttentionTuning:
    return AttentionTuning(2, 4, 2, 64 if _dim(head_dim) <= 128 else 16)


def kv_parts(shape: AttentionShape, groups: int, warps: int) -> tuple[int, int]:
    """How many blocks share the cells of a group of rows, and how many of them form a cluster;
    (1, 1) where the shape has the toggle kv_parts=off or stream_k.

    One cluster merges in shared memory. It has no more blocks than there are tiles for all their
    warps. Several clusters merge through memory, so each of their blocks has at least LEAST_TILES.
    """
    if shape.kv_parts != KVParts.PARALLEL_BLOCKS:
        return 1, 1
    tiles, most = blocks(shape.n_kv, CELLS), max(1, BLOCKS // groups)
    useful = 1 << (blocks(tiles, warps) - 1).bit_length()
    cluster = min(CLUSTER, useful, 1 << (most.bit_length() - 1))
    if cluster < CLUSTER:
        return cluster, cluster
    clusters = min(most // CLUSTER, tiles // (CLUSTER * LEAST_TILES))
    return CLUSTER * max(1, clusters), CLUSTER


def decode_grid(shape: AttentionShape) -> DecodeGrid:
    """The grid of attention_decode for a shape.

    With few cells, blocks have few sets: more blocks then read the same cells from L2, and would
    have no work otherwise. With many cells, blocks have as many sets as the rows fill.
    """
    rows, dim, tiles = shape.rows, _dim(shape.head_dim), blocks(shape.n_kv, CELLS)
    many = not shape.few and 64 < dim <= 128 and shape.kv_parts == KVParts.PARALLEL_BLOCKS
    groups = shape.n_head_kv * blocks(rows, 8 * MANY.sets)
    if shape.n_regions > 1:
        tuning = decode_tuning(min(shape.group, 8), shape.head_dim)
        groups = shape.n_head_kv * shape.row_groups(8 * tuning.sets)
        return DecodeGrid(tuning, groups, *kv_parts(shape, groups, tuning.warps))
    if many and tiles <= MANY_TILES and groups <= CLUSTERS[1]:
        cluster = next(size for size, room in CLUSTERS.items() if groups <= room)
        return DecodeGrid(MANY, groups, cluster, cluster)
    # the least tiles that a block should have
    each = 4 if shape.few else 16 if many and tiles <= 16 else 8
    for sets in SETS:
        tuning = decode_tuning(min(rows, 8 * sets), shape.head_dim)
        groups = shape.n_head_kv * blocks(rows, 8 * tuning.sets)
        if rows <= 8 * sets or groups * blocks(tiles, each) <= BLOCKS:
            break
    if tuning.sets == 1 and 64 < dim <= 128 and 4 * CLUSTER < tiles <= 8 * CLUSTER:
        tuning = AttentionTuning(1, 8, 1, CELLS)  # a tile a warp
    return DecodeGrid(tuning, groups, *kv_parts(shape, groups, tuning.warps))


def uses_prefill(shape: AttentionShape) -> bool:
    """Whether attention_prefill computes the shape: blocks of 64 rows, each over all cells, are
    enough to fill the device."""
    tall = blocks(shape.rows, 16 * prefill_tuning(shape.head_dim).warps)
    alone = shape.kv_parts != KVParts.PARALLEL_BLOCKS
    enough = shape.n_head_kv * tall >= ENOUGH_BLOCKS or alone
    return not shape.few and (enough or shape.ragged)


def tile_bytes(head_dim: int, cells: int, rows: int) -> int:
    """Bytes of a Tile of attention.cuh: K, V, and the mask of at most `rows` tokens."""
    return 2 * (2 * cells * (_dim(head_dim) + CELL_PAD) + rows * (cells + CELL_PAD))


def _stored_bytes(head_dim: int, sets: int) -> int:
    """Bytes of the queries in shared memory: Rows::STORED_BYTES."""
    steps = _dim(head_dim) // 16
    return steps * sets * 32 * 8 if steps * sets > 16 else 0


def decode_shared(head_dim: int, t: AttentionTuning) -> int:
    tiles = t.warps * t.stages * tile_bytes(head_dim, t.cells, 8 * t.sets)
    return tiles + _stored_bytes(head_dim, t.sets)


def prefill_shared(head_dim: int, t: AttentionTuning) -> int:
    tiles = t.stages * tile_bytes(head_dim, t.cells, 16 * t.warps)
    return tiles + t.warps * _stored_bytes(head_dim, 2)


def scratch_bytes(shape: AttentionShape, grid: DecodeGrid | None = None) -> int:
    """Bytes of the partial results that the last block merges: for each part and row head_dim sums,
    a maximum and a weight. Clusters use only some of these bytes."""
    row = (shape.head_dim + 2) * 4
    if shape.kv_parts == KVParts.STREAM_K:
        # A block leaves at most two parts. attention_prefill has the most rows.
        return BLOCKS * 2 * row * (16 * prefill_tuning(shape.head_dim).warps)
    if uses_prefill(shape) and not shape.ragged:
        return 0
    grid = grid or decode_grid(shape)
    if grid.kv_parts == 1:
        return 0
    return grid.groups * grid.kv_parts * 8 * grid.tuning.sets * row


def can_quantise(shape: AttentionShape) -> bool:
    """Whether `launches` can give its result as Q8_ACT: attention_decode can, where heads consist
    of whole blocks of 32."""
    return shape.head_dim % 32 == 0 and not uses_prefill(shape)


def launches(
    shape: AttentionShape,
    at: AttentionAt,
    scale: float,
    quantised: bool,
    grid: DecodeGrid | None = None,
) -> list[Kernel]:
    """The launches that compute attention.

    quantised: whether dst is Q8_ACT rather than F32; only where `can_quantise`.
    grid: of attention_decode, in place of the usual grid, for measurements.

    Raises DeviceError for a head_dim that no kernel takes.
    """
    check(shape.head_dim)
    if not shape.n_tokens:
        return []
    if not uses_prefill(shape):
        return [_decode(shape, at, scale, quantised, grid or decode_grid(shape), MOST_TOKENS)]
    works = [_prefill(shape, at, scale, prefill_tuning(shape.head_dim))]
    if shape.ragged:  # a second launch, for the sequences of few tokens
        works.append(_decode(shape, at, scale, quantised, grid or decode_grid(shape), FEW_TOKENS))
    return works


def _prefill(shape: AttentionShape, at: AttentionAt, scale: float, t: AttentionTuning) -> Kernel:
    least = FEW_TOKENS + 1 if shape.ragged else 1
    rows = 16 * t.warps
    groups = shape.row_groups(rows)
    if shape.ragged:  # only sequences of at least `least` tokens have groups
        groups = min(shape.n_regions, shape.n_tokens // least) + shape.rows // rows
    defines = (*_defines(shape, t, True), f"TILE_CELLS={t.cells}")
    grid, cut = _cut(shape, (groups, shape.n_head_kv), blocks(shape.n_kv, t.cells), 1)
    return Kernel(
        "attention", "attention_prefill", grid, 32 * t.warps,
        [*at, *_sizes(shape), least, MOST_TOKENS, scale, *cut],
        defines, prefill_shared(shape.head_dim, t), waits=True,
    )  # fmt: skip


def _decode(
    shape: AttentionShape, at: AttentionAt, scale: float, quantised: bool, grid: DecodeGrid,
    most: int,
) -> Kernel:  # fmt: skip
    """most: sequences with more tokens are not computed."""
    t = grid.tuning
    defines = (
        *_defines(shape, t, False), f"ROW_SETS={t.sets}", f"CLUSTER={grid.cluster}",
    )  # fmt: skip
    tiles = blocks(shape.n_kv, CELLS)
    of_kernel, cut = _cut(shape, (grid.groups, grid.kv_parts), tiles, 2 * t.warps)
    return Kernel(
        "attention", "attention_decode", of_kernel, 32 * t.warps,
        [*at, *_sizes(shape), 1, most, scale, int(quantised), *cut],
        defines, decode_shared(shape.head_dim, t), waits=True,
    )  # fmt: skip


def _cut(
    shape: AttentionShape, grid: tuple[int, int], tiles: int, least: int
) -> tuple[tuple[int, int], list[int]]:
    """The grid of a kernel, and its arguments n_groups and piece.

    stream_k cuts the tiles of all row groups, one group after another, into pieces of `piece`
    tiles. A block has a piece, and all blocks run at once.

    grid: the grid without stream_k.
    tiles: of a group.
    least: the least tiles of a piece.
    """
    if shape.kv_parts != KVParts.STREAM_K:
        return grid, [0, 0]
    groups = grid[0] * grid[1]
    piece = max(least, blocks(groups * tiles, BLOCKS))
    return (blocks(groups * tiles, piece), 1), [groups, piece]


def _sizes(shape: AttentionShape) -> list[int]:
    return [shape.n_tokens, shape.n_head, shape.n_head_kv, shape.n_kv, shape.n_regions]


# Macro SKIP.
SKIPS: dict[str, int] = {SkipMaskedKV.IN_LOOP: 1, SkipMaskedKV.TAIL: 2, SkipMaskedKV.CLASSES: 3}


def _defines(shape: AttentionShape, t: AttentionTuning, prefill: bool) -> tuple[str, ...]:
    """Macros of a compilation. A feature that the shape does not use has no macro."""
    regions, skip = shape.n_regions > 0, SKIPS.get(shape.skip)
    stream_k = shape.kv_parts == KVParts.STREAM_K
    return (
        f"PREFILL={int(prefill)}", f"HEAD_DIM={shape.head_dim}", f"WARPS={t.warps}",
        f"STAGES={t.stages}", *(["STREAM=1"] if stream_k else []),
        *(["REGIONS=1"] if regions else []),
        *([f"SKIP={skip}"] if skip else []), *(["SINKS=1"] if shape.has_sinks else []),
    )  # fmt: skip
