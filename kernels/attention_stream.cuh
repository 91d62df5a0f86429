// Which tiles of cells a block has, of which group of rows.
//
// STREAM 0: a block has one group of rows, and with other blocks a share of its cells: every so
// many tiles. STREAM 1 (stream-k; Osama et al. 2023, arXiv 2301.03598): the tiles of all groups
// stand one behind the other, and each block has `piece` of them. So a block may end one group,
// have some whole ones, and begin another. A group that no block has alone is merged by the last of
// its blocks to be done, in the order of the cells.
//
// Versions: 1, this one.
#pragma once
#include "attention_merge.cuh"

#ifndef STREAM
#define STREAM 0
#endif

// What a block has of a group: tiles first .. end - 1, and which of the group's `shares` that is.
// `block` is the first block with tiles of the group.
struct Piece {
    int group, first, end, share, shares, block;
};

#if STREAM
// The pieces of this block, in their order.
struct Pieces {
    int tiles, size, at, last;
    DEVICE Pieces(i64 n_groups, int tiles, i64 size)
        : tiles(tiles), size(int(size)), at(blockIdx.x * int(size)),
          last(min(at + int(size), int(n_groups) * tiles)) {}
    DEVICE bool there() const { return at < last; }
    DEVICE void next() { at = min(last, (at / tiles + 1) * tiles); }
    DEVICE Piece own() const {
        const int group = at / tiles, first = at % tiles, block = group * tiles / size;
        const int shares = ((group + 1) * tiles - 1) / size - block + 1;
        return {group, first, min(tiles, first + last - at), int(blockIdx.x) - block, shares, block};
    }
};
#endif

// Where blocks leave what the last of a group merges: sums float4 [entries][ROWS][QUADS], then
// maxima and weights float2 [entries][ROWS]. An entry is a share's, or a cluster's: a `part` of the
// group. A block of STREAM has two: of a group that it begins, and of one that it goes on with.
// Every block with columns of a row stores the same maximum of it.
template <int ROWS>
struct Parts {
    float4* sums;
    float2* weights;
    int first;
    DEVICE Parts(u8* scratch, const Piece& piece, int parts)
        : sums(reinterpret_cast<float4*>(scratch)),
          first(STREAM ? piece.block : piece.group * parts) {
        const i64 entries = STREAM ? 2 * gridDim.x : i64(gridDim.x) * parts;
        weights = reinterpret_cast<float2*>(sums + entries * ROWS * QUADS);
    }
    DEVICE i64 entry(int part) const {
        return STREAM ? 2 * (first + part) + (part == 0) : first + part;
    }
    DEVICE void store(int part, const Item& item, const Partial& own) const {
        if (!item.there) return;
        const i64 row = entry(part) * ROWS + item.row;
        sums[row * QUADS + item.quad] = own.sum;
        if (item.quad == 0 || threadIdx.x % 32 == 0) weights[row] = make_float2(own.most, own.weight);
    }
    DEVICE Partial load(int part, const Item& item) const {
        const i64 row = entry(part) * ROWS + item.row;
        const float2 own = weights[row];
        return {sums[row * QUADS + item.quad], own.x, own.y};
    }
};
