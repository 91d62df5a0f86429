"""Launches of attention on CUDA: grids, tunings and scratch for `kernels/attention.cu`.

Pure: addresses and shapes in, data out. Everything follows from shapes and the padded n_kv, so that
a step's result does not depend on where its tokens lie. Constants repeat those of the source.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.backend.cuda.kernel import Kernel, blocks
from workbench.errors import DeviceError

MAX_HEAD_DIM = 256
FEW_TOKENS = 8  # attention_decode alone up to here
CELLS = 16  # attention_decode: cells of a tile
CELL_PAD = 8  # halves behind each row of a tile, against bank conflicts

# What the figures below are measured against: an H100 has 132 multiprocessors, and each holds two
# blocks of these kernels.
BLOCKS = 264  # attention_decode: most blocks, all of them running at once
CLUSTER = 8  # most blocks of a cluster that every device with clusters accepts
LEAST_TILES = 16  # attention_decode: tiles of a block where several clusters share the cells
SETS = (1, 2, 4)
ENOUGH_BLOCKS = 66  # attention_prefill: with fewer, attention_decode splits the cells as well


class Tuning(NamedTuple):
    """Macros of one compilation. sets: 8 rows each, of a block (decode). warps of a block; stages:
    tiles in shared memory; cells of a tile."""

    sets: int
    warps: int
    stages: int
    cells: int


# Many tokens over few cells: blocks of 16 rows and 8 warps, one a multiprocessor, one tile a warp;
# blocks of a cluster -> clusters that a device has room for (cuOccupancyMaxActiveClusters, H100).
MANY, MANY_TILES = Tuning(2, 8, 1, CELLS), 64
CLUSTERS = {8: 15, 4: 30, 2: 66, 1: 132}


class Plan(NamedTuple):
    """attention_decode's grid: (n_head_kv * row groups, shares); each `cluster` blocks whose shares
    follow each other are a cluster."""

    tuning: Tuning
    groups: int
    shares: int
    cluster: int


def _dim(head_dim: int) -> int:
    return blocks(head_dim, 16) * 16


def check(head_dim: int) -> None:
    """Raises DeviceError for a head_dim that no kernel has."""
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise DeviceError(
            f"attention: head_dim {head_dim} is not supported on cuda (multiples of 8 up to "
            f"{MAX_HEAD_DIM}); use device=host or embedded"
        )


def decode_tuning(rows: int, head_dim: int) -> Tuning:
    """For blocks that hold `rows` query rows: as many sets as that takes and registers allow."""
    dim = _dim(head_dim)
    if dim > 128:
        return Tuning(1, 2, 2, CELLS)
    sets = next((s for s in SETS if rows <= 8 * s), SETS[-1])
    if dim > 64:
        return Tuning(sets, 4, 2, CELLS)
    warps, stages = {1: (8, 2), 2: (4, 4), 4: (4, 3)}[sets]
    return Tuning(sets, warps, stages, CELLS)


def prefill_tuning(head_dim: int) -> Tuning:
    return Tuning(2, 4, 2, 64 if _dim(head_dim) <= 128 else 16)


def n_shares(groups: int, n_kv: int, warps: int) -> tuple[int, int]:
    """Blocks that share the cells of one kv head and group of rows, and how many are a cluster.

    One cluster, of no more blocks than have a tile for each warp, merges without leaving the chip's
    multiprocessors; several, where every block still has LEAST_TILES, merge through memory."""
    tiles, most = blocks(n_kv, CELLS), max(1, BLOCKS // groups)
    useful = 1 << (blocks(tiles, warps) - 1).bit_length()
    cluster = min(CLUSTER, useful, 1 << (most.bit_length() - 1))
    if cluster < CLUSTER:
        return cluster, cluster
    clusters = min(most // CLUSTER, tiles // (CLUSTER * LEAST_TILES))
    return CLUSTER * max(1, clusters), CLUSTER


def decode_plan(n_tokens: int, n_head: int, n_head_kv: int, head_dim: int, n_kv: int) -> Plan:
    """Few sets while the cells are so few that other blocks, reading them again, find them in L2
    and would have no work of their own; else as many as the rows fill."""
    rows, tiles = n_tokens * (n_head // n_head_kv), blocks(n_kv, CELLS)
    many = n_tokens > FEW_TOKENS and 64 < _dim(head_dim) <= 128
    groups = n_head_kv * blocks(rows, 8 * MANY.sets)
    if many and tiles <= MANY_TILES and groups <= CLUSTERS[1]:
        cluster = next(size for size, room in CLUSTERS.items() if groups <= room)
        return Plan(MANY, groups, cluster, cluster)
    # tiles a block should have left
    each = 4 if n_tokens <= FEW_TOKENS else 16 if many and tiles <= 16 else 8
    for sets in SETS:
        tuning = decode_tuning(min(rows, 8 * sets), head_dim)
        groups = n_head_kv * blocks(rows, 8 * tuning.sets)
        if rows <= 8 * sets or groups * blocks(tiles, each) <= BLOCKS:
            break
    if tuning.sets == 1 and 64 < _dim(head_dim) <= 128 and 4 * CLUSTER < tiles <= 8 * CLUSTER:
        tuning = Tuning(1, 8, 1, CELLS)  # one tile a warp
    return Plan(tuning, groups, *n_shares(groups, n_kv, tuning.warps))


def uses_prefill(n_tokens: int, n_head: int, n_head_kv: int, head_dim: int) -> bool:
    """Whether the tokens are so many that blocks of 64 rows over all cells fill the device."""
    rows = n_tokens * (n_head // n_head_kv)
    tall = blocks(rows, 16 * prefill_tuning(head_dim).warps)
    return n_tokens > FEW_TOKENS and n_head_kv * tall >= ENOUGH_BLOCKS


def tile_bytes(head_dim: int, cells: int, rows: int) -> int:
    """A Tile of attention.cuh: K and V, and the mask for as many tokens as there can be."""
    return 2 * (2 * cells * (_dim(head_dim) + CELL_PAD) + rows * (cells + CELL_PAD))


def _stored_bytes(head_dim: int, sets: int) -> int:
    """Rows::STORED_BYTES: queries that lie in shared memory."""
    steps = _dim(head_dim) // 16
    return steps * sets * 32 * 8 if steps * sets > 16 else 0


def decode_shared(head_dim: int, t: Tuning) -> int:
    tiles = t.warps * t.stages * tile_bytes(head_dim, t.cells, 8 * t.sets)
    return tiles + _stored_bytes(head_dim, t.sets)


def prefill_shared(head_dim: int, t: Tuning) -> int:
    tiles = t.stages * tile_bytes(head_dim, t.cells, 16 * t.warps)
    return tiles + t.warps * _stored_bytes(head_dim, 2)


def scratch_bytes(
    n_tokens: int, n_head: int, n_head_kv: int, head_dim: int, n_kv: int, plan: Plan | None = None
) -> int:
    """Bytes for what the shares of attention_decode leave to the last block: per share and row,
    head_dim sums, a maximum and a weight. With clusters only a part of it is used."""
    if uses_prefill(n_tokens, n_head, n_head_kv, head_dim):
        return 0
    plan = plan or decode_plan(n_tokens, n_head, n_head_kv, head_dim, n_kv)
    if plan.shares == 1:
        return 0
    return plan.groups * plan.shares * 8 * plan.tuning.sets * (head_dim + 2) * 4


def n_counters(n_tokens: int, n_head: int, n_head_kv: int, head_dim: int, n_kv: int) -> int:
    """Counters (u32) the launch wants: zero before it, and zero again after; at most BLOCKS."""
    if uses_prefill(n_tokens, n_head, n_head_kv, head_dim):
        return 0
    plan = decode_plan(n_tokens, n_head, n_head_kv, head_dim, n_kv)
    return plan.groups * plan.cluster if plan.shares > 1 else 0


def can_quantise(n_tokens: int, n_head: int, n_head_kv: int, head_dim: int) -> bool:
    """Whether `launches` can give its result as Q8_ACT: attention_decode does, where a block of 32
    lies in one head."""
    return head_dim % 32 == 0 and not uses_prefill(n_tokens, n_head, n_head_kv, head_dim)


def launches(
    dst: int,
    q: int,
    k: int,
    v: int,
    mask: int,
    scratch: int,
    counters: int,
    n_tokens: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_kv: int,
    scale: float,
    quantised: bool,
    tuning: Tuning | None = None,
    plan: Plan | None = None,
) -> list[Kernel]:
    """The launch that computes attention; types and shapes as in graph/ops.py, addresses in bytes.

    dst (n_tokens, n_head * head_dim) is F32, or with `quantised` (where `can_quantise`) Q8_ACT.
    scratch and counters: as `scratch_bytes` and `n_counters` say. tuning (prefill) and plan
    (decode): instead of the usual ones, for measuring. Raises DeviceError for a head_dim that no
    kernel has.
    """
    check(head_dim)
    if not n_tokens:
        return []
    sizes = [n_tokens, n_head, n_head_kv, n_kv, scale]
    if uses_prefill(n_tokens, n_head, n_head_kv, head_dim):
        t = tuning or prefill_tuning(head_dim)
        rows = n_tokens * (n_head // n_head_kv)
        defines = (*_defines(head_dim, t, True), f"TILE_CELLS={t.cells}")
        grid = (blocks(rows, 16 * t.warps), n_head_kv)
        return [
            Kernel(
                "attention", "attention_prefill", grid, 32 * t.warps, [dst, q, k, v, mask, *sizes],
                defines, prefill_shared(head_dim, t), waits=True,
            )
        ]  # fmt: skip
    plan = plan or decode_plan(n_tokens, n_head, n_head_kv, head_dim, n_kv)
    t = plan.tuning
    defines = (
        *_defines(head_dim, t, False), f"ROW_SETS={t.sets}", f"CLUSTER={plan.cluster}",
    )  # fmt: skip
    return [
        Kernel(
            "attention", "attention_decode", (plan.groups, plan.shares), 32 * t.warps,
            [dst, q, k, v, mask, scratch, counters, *sizes, int(quantised)],
            defines, decode_shared(head_dim, t), waits=True,
        )
    ]  # fmt: skip


def _defines(head_dim: int, t: Tuning, prefill: bool) -> tuple[str, ...]:
    return (
        f"PREFILL={int(prefill)}", f"HEAD_DIM={head_dim}", f"WARPS={t.warps}", f"STAGES={t.stages}",
    )  # fmt: skip
