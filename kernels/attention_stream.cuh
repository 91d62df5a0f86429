// Deals the tiles of cells of all row groups out to blocks.
//
// STREAM 0: a block has one group of rows. It shares the tiles of the group with other blocks, and
// takes every `shares`-th tile. STREAM 1 (stream-k; Osama et al. 2023, arXiv 2301.03598): the tiles
// of all groups stand in one row, and each block has `piece` of them. So a block may end one group,
// have some whole groups, and begin another group. A group that has several blocks is merged by the
// block that ends last, in the order of the cells.
//
// Versions: 1, this one.
#pragma once
#include "attention_merge.cuh"

#ifndef STREAM
#define STREAM 0
#endif

// A block's part of a group: tiles first .. end - 1, which are number `share` of the group's
// `shares` shares. `block` is the first block with tiles of the group.
struct Piece {
    int group, first, end, share, shares, block;
};

#if STREAM
// The pieces of this block, in order.
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
        return {group, first, min(tiles, first + last - at), int(blockIdx.x) - block, shares,
                block};
    }
};
#endif

// Scratch with the partial results of a group, which its last block merges: sums float4
// [entries][ROWS][QUADS], then maxima and weights float2 [entries][ROWS]. Each `part` of a group,
// from a block or a cluster, has an entry. With STREAM a block has two entries: for a group that it
// begins, and for a group that an earlier block began. All blocks with columns of a row store the
// same maximum of the row.
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
        if (item.quad == 0 || threadIdx.x % 32 == 0)
            weights[row] = make_float2(own.most, own.weight);
    }
    DEVICE Partial load(int part, const Item& item) const {
        const i64 row = entry(part) * ROWS + item.row;
        const float2 own = weights[row];
        return {sums[row * QUADS + item.quad], own.x, own.y};
    }
};
