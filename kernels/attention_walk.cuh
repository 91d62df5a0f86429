// The tokens of a block, and the tiles of cells that a warp, or a block, goes through.
//
// REGIONS (0 or 1): each sequence has its own cells, and a table lists its first token and cell.
// SKIP: the tiles that are skipped (workbench/engine/cache/extent.py). A skipped tile would not
// have changed a result, so all values give the same bits:
//   0   none
//   1   tiles whose mask is -inf for all tokens of the block
//   2   tiles after the greatest extent of these tokens
//   3   tiles in whose class no token sees a cell
//
// Versions: 1, this one. A share takes every so many tiles, not neighbouring tiles. So the shares
// of short sequences have equal work, and skipping moves no tile to another share.
#pragma once
#include "attention.cuh"

#ifndef REGIONS
#define REGIONS 0
#endif
#ifndef SKIP
#define SKIP 0
#endif

constexpr int CLASS_CELLS = 64;

// Further arguments of a launch.
//   regions       I32 (n_regions, 2): first token and first cell of each sequence
//   known         extents I32 (n_tokens,), or classes U8 (n_tokens, n_classes)
//   sinks         F32 (n_head,), or 0
//   least, most   the launch computes the regions with least .. most tokens
struct More {
    const int* regions;
    const u8* known;
    const float* sinks;
    i64 n_regions, least, most;
};

// The sequence of a block: `count` tokens from `token` on, with cells from `cell` on. tile: the
// number of the block's group of rows in the sequence; -1: the block has no work.
struct Tokens {
    int token, count, tile;
    i64 cell;

    // Without regions: all tokens.
    DEVICE Tokens(int n_tokens, int tile) : token(0), count(n_tokens), tile(tile), cell(0) {}

    // With regions: finds the sequence of tile `number`. Tiles are numbered from sequence to
    // sequence. A tile has `rows` rows, and a token has `group` rows. Whole warps call it.
    DEVICE Tokens(const More& more, int n_tokens, int number, int group, int rows)
        : token(0), count(0), tile(-1), cell(0) {
        const int2* table = reinterpret_cast<const int2*>(more.regions);
        const int n = int(more.n_regions), lane = threadIdx.x % 32;
        if (n == n_tokens) {  // each sequence has one token
            const int each = (group + rows - 1) / rows;
            token = number / each, count = 1, tile = number % each;
            cell = table[token].y;
            return;
        }
        int before = 0;  // tiles of earlier sequences
        for (int first = 0; first < n; first += 32) {
            const int s = first + lane;
            int begin = 0, own = 0;
            if (s < n) {
                begin = table[s].x;
                own = (s + 1 < n ? table[s + 1].x : n_tokens) - begin;
            }
            const bool mine = own >= more.least && own <= more.most;
            const int tiles = mine ? (own * group + rows - 1) / rows : 0;
            int sum = tiles;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const int other = __shfl_up_sync(~0u, sum, o);
                if (lane >= o) sum += other;
            }
            const int last = before + sum;
            const u32 found = __ballot_sync(~0u, number < last);
            if (found) {
                const int at = __ffs(found) - 1;
                token = __shfl_sync(~0u, begin, at);
                count = __shfl_sync(~0u, own, at);
                tile = number - __shfl_sync(~0u, last - tiles, at);
                cell = table[first + at].y;
                return;
            }
            before = __shfl_sync(~0u, last, 31);
        }
    }
};

// Goes through tiles of CELLS cells: first, first + stride, .. below the end. BLOCK: all threads of
// the block go through the same tiles together; otherwise each warp goes alone.
template <int CELLS, bool BLOCK>
struct Walk {
    const Cells& cells;
    const u8* known;   // of the block's first token
    int tile, stride, end;
    u32 some, whole;   // bits of 32 classes: a token sees some cells; all tokens see all cells
    int window;        // the number of these 32 classes
    bool masked;       // whether the latest tile of `next` must be masked

    DEVICE Walk(const Cells& cells, const u8* known, int first, int stride)
        : cells(cells), known(known), tile(first), stride(stride),
          end(int((cells.n_kv + CELLS - 1) / CELLS)), some(0), whole(0), window(-1), masked(true) {
        if (SKIP == 2) {
            const int* extents = reinterpret_cast<const int*>(known);
            u32 most = 0;
            for (int t = threadIdx.x % 32; t < cells.n_tokens; t += 32)
                most = max(most, u32(extents[t]));
            end = min(end, int(__reduce_max_sync(~0u, most) + CELLS - 1) / CELLS);
        }
    }

    // The next tile that is not skipped, or -1. All threads that go together get the same.
    DEVICE int next() {
        for (; tile < end; tile += stride) {
            if (SKIP == 1 && !is_seen()) continue;
            if (SKIP == 3) {
                const int block = tile * CELLS / CLASS_CELLS;
                if (block / 32 != window) look(block / 32);
                if (!(some >> block % 32 & 1)) continue;
                masked = !(whole >> block % 32 & 1);
            }
            const int found = tile;
            tile += stride;
            return found;
        }
        return -1;
    }

  private:
    DEVICE bool is_seen() const {
        const i64 first = i64(tile) * CELLS;
        const int own = int(min(cells.n_kv - first, i64(CELLS)));
        bool any = false;
        const int threads = BLOCK ? blockDim.x : 32;
        for (int i = BLOCK ? threadIdx.x : threadIdx.x % 32; i < cells.n_tokens * CELLS;
             i += threads) {
            const int token = i / CELLS, cell = i % CELLS;
            any |= cell < own && cells.mask[token * cells.n_kv + first + cell] != MASKED;
        }
        return BLOCK ? __syncthreads_or(any) : __any_sync(~0u, any);
    }

    DEVICE void look(int at) {
        const int n = int((cells.n_kv + CLASS_CELLS - 1) / CLASS_CELLS);
        const int block = 32 * at + threadIdx.x % 32;
        u32 any = 0, all = 2;
        for (int t = 0; t < cells.n_tokens; t++) {
            const u32 own = block < n ? known[i64(t) * n + block] : 0;
            any |= own, all = min(all, own);
        }
        some = __ballot_sync(~0u, any != 0);
        whole = __ballot_sync(~0u, all == 2);
        window = at;
    }
};

// Bytes of `known` from a token to the next.
DEVICE i64 known_stride(i64 n_kv) {
    return SKIP == 2 ? 4 : SKIP == 3 ? (n_kv + CLASS_CELLS - 1) / CLASS_CELLS : 0;
}
