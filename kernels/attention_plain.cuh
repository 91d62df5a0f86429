// The common part of the attention kernels without tensor cores (attention_vec.cu,
// attention_tile.cu): the rows and tiles of a block, the store of results, and the merge of the
// partial results of a group of rows.
//
// A group has at most GROUP_ROWS query rows of one kv head. Its cells are `tiles` tiles of CELLS
// cells. One block has all of them, or several blocks share them (toggle kv_parts):
//
//   piece 0       grid (groups, shares): share i has tiles i, i + shares, ..
//   piece > 0     grid (pieces), stream_k: the tiles of all groups stand in one row. Block i has
//                 `piece` of them, from i * piece on, of one or several groups
//
// Where a group has several blocks, each block leaves its partial result in an entry of scratch, in
// the order of the shares or pieces. A second launch, attention_combine, merges the entries in this
// order. So a result does not depend on which block ends first.
//
// Compiled for each use (workbench/backend/cuda/kernels/attention_plain.py chooses):
//   HEAD_DIM                        columns of a head
//   K_CELL, V_CELL                  types of cells.cuh
//   GROUP_ROWS, TILE_CELLS, WARPS   most rows of a group, cells of a tile, warps of a block
//   REGIONS, SKIP, SINKS            as in attention.cu
//   ONE_TOKEN (by the .cu file)     whether all rows of a group belong to one token
//
// One version. Measured as part of the kernels.
#pragma once
#include "attention_walk.cuh"
#include "cell_loads.cuh"

#ifndef K_CELL
#define K_CELL CellF16
#endif
#ifndef V_CELL
#define V_CELL CellF16
#endif

using LoadsK = Loads<K_CELL>;
using LoadsV = Loads<V_CELL>;

constexpr int CELLS = TILE_CELLS, THREADS = 32 * WARPS;
constexpr int PAIRS = (HEAD_DIM / 2 + 31) / 32;  // pairs of neighbouring columns of a lane

// The arguments of a launch, without the addresses of K and V. groups: of all kv heads; the kv
// heads of the same rows are neighbours. entries: of a group in scratch.
struct Call {
    float* dst;
    const float* q;
    const u16* mask;
    float* scratch;
    More more;
    i64 n_tokens, n_head, n_head_kv, n_kv, groups, entries, piece;
    float scale;
    DEVICE int tiles() const { return int((n_kv + CELLS - 1) / CELLS); }
    DEVICE i64 kv_row_bytes(i64 of_head) const { return n_head_kv * of_head; }
};

// The rows of a group. The tokens of `share` are counted from `token` on. The cells of their
// sequence begin at `cell`. there: whether the launch computes the group.
struct Group {
    int token;
    i64 cell;
    bool there;
    Share share;
};

#if ONE_TOKEN

DEVICE Group group_of(const Call& c, int number) {
    const int head_kv = number % int(c.n_head_kv), group = int(c.n_head / c.n_head_kv);
    number /= int(c.n_head_kv);
    const int each = (group + GROUP_ROWS - 1) / GROUP_ROWS, token = number / each;
    const int first = token * group + number % each * GROUP_ROWS;
    const Share share(head_kv, group, first, GROUP_ROWS, (token + 1) * group);
#if REGIONS
    // The last sequence that begins at the token or before it.
    const int2* table = reinterpret_cast<const int2*>(c.more.regions);
    const int n = int(c.more.n_regions);
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table[middle].x <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const int own = (low + 1 < n ? table[low + 1].x : int(c.n_tokens)) - table[low].x;
    return {0, table[low].y, c.more.least <= own && own <= c.more.most, share};
#else
    return {0, 0, true, share};
#endif
}

#else

// Whole warps call it.
DEVICE Group group_of(const Call& c, int number) {
    const int head_kv = number % int(c.n_head_kv), group = int(c.n_head / c.n_head_kv);
    number /= int(c.n_head_kv);
#if REGIONS
    const Tokens own(c.more, int(c.n_tokens), number, group, GROUP_ROWS);
#else
    const Tokens own(int(c.n_tokens), number);
#endif
    const bool there = own.tile >= 0;
    const Share share(head_kv, group, there ? own.tile * GROUP_ROWS : 0, GROUP_ROWS,
                      there ? own.count * group : 1);
    return {own.token, own.cell, there, share};
}

#endif

// Tiles begin, begin + step, .. below `end` of a group. Their partial result is entry `entry` of
// `entries`.
struct Segment {
    int group, begin, end, step, entry, entries;
};

// The first piece with tiles of a group, and the number of pieces (or shares) with such tiles.
DEVICE i64 first_piece(const Call& c, i64 group) { return group * c.tiles() / c.piece; }
DEVICE int n_entries(const Call& c, i64 group) {
    if (c.piece == 0) return int(c.entries);
    return int(((group + 1) * c.tiles() - 1) / c.piece - first_piece(c, group)) + 1;
}

// Calls `compute` for each segment of the block, one after another.
template <class Compute>
DEVICE void each_segment(const Call& c, Compute compute) {
    const int tiles = c.tiles();
    if (c.piece == 0) {
        const int shares = int(gridDim.y), share = int(blockIdx.y);
        compute(Segment{int(blockIdx.x), share, tiles, shares, share, shares});
        return;
    }
    const i64 low = blockIdx.x * c.piece, high = min(low + c.piece, c.groups * tiles);
    for (i64 at = low; at < high;) {
        const i64 group = at / tiles;
        const int begin = int(at - group * tiles), end = int(min(i64(tiles), begin + high - at));
        const int entry = int(blockIdx.x - first_piece(c, group));
        compute(Segment{int(group), begin, end, 1, entry, n_entries(c, group)});
        at += end - begin;
    }
}

// Scratch: sums [groups][entries][GROUP_ROWS][HEAD_DIM], then maxima and weights
// [groups][entries][GROUP_ROWS].
struct Entry {
    float* sums;
    float2* parts;
    DEVICE Entry(const Call& c, i64 group, int entry) {
        const i64 number = group * c.entries + entry;
        parts = reinterpret_cast<float2*>(c.scratch + c.groups * c.entries * GROUP_ROWS * HEAD_DIM);
        parts += number * GROUP_ROWS, sums = c.scratch + number * GROUP_ROWS * HEAD_DIM;
    }
};

// Stores a column of a row of a group. `sum` (of its weighted values) and `weight` (of its cells)
// are relative to 2^most.
DEVICE void store_result(const Call& c, const Group& own, int row, int col, float sum, float most,
                         float weight) {
    float keep = 1;
    const int head = own.share.head_of(row);
    if (SINKS) add_sink(c.more.sinks, head, most, weight, keep);
    const i64 token = own.token + own.share.token_of(row);
    // + 0 turns -0 into 0
    c.dst[(token * c.n_head + head) * HEAD_DIM + col] =
        weight == 0 ? 0.f : __fdiv_rn(sum * keep, weight) + 0.f;
}

// Stores a column of a row: as a result, or in an entry where the group has several.
DEVICE void store_column(const Call& c, const Group& own, const Segment& s, int row, int col,
                         float sum, float most, float weight) {
    if (s.entries == 1) {
        store_result(c, own, row, col, sum, most, weight);
        return;
    }
    const Entry entry(c, s.group, s.entry);
    entry.sums[row * HEAD_DIM + col] = sum;
    if (col == 0) entry.parts[row] = make_float2(most, weight);
}

constexpr int COMBINE_THREADS = 128;

// Merges the partial results of a group.
DEVICE void combine(const Call& c) {
    const int group = int(blockIdx.x), n = n_entries(c, group);
    const Group own = group_of(c, group);
    if (!own.there || n == 1) return;
    for (int i = threadIdx.x; i < own.share.count * HEAD_DIM; i += COMBINE_THREADS) {
        const int row = i / HEAD_DIM, col = i % HEAD_DIM;
        float top = NEG_INFINITY, sum = 0, weight = 0;
        for (int s = 0; s < n; s++) top = fmaxf(top, Entry(c, group, s).parts[row].x);
        for (int s = 0; s < n; s++) {
            const Entry entry(c, group, s);
            const float2 part = entry.parts[row];
            const float f = rescale(part.x, top);
            sum = fmaf(entry.sums[row * HEAD_DIM + col], f, sum);
            weight = fmaf(part.y, f, weight);
        }
        store_result(c, own, row, col, sum, top, weight);
    }
}

// The second launch, where several blocks share a group. Grid: a block for each group. Block:
// COMBINE_THREADS threads.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    attention_combine(float* dst, float* scratch, const int* regions, const float* sinks,
                      i64 n_tokens, i64 n_head, i64 n_head_kv, i64 n_kv, i64 n_regions, i64 least,
                      i64 most, i64 groups, i64 entries, i64 piece) {
    pdl_trigger();
    pdl_wait();
    combine({dst, nullptr, nullptr, scratch, {regions, nullptr, sinks, n_regions, least, most},
             n_tokens, n_head, n_head_kv, n_kv, groups, entries, piece, 0.f});
}
