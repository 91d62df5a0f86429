// What the attention kernels have in common: which rows a block has, and its tile of cells in
// shared memory.
//
// HEAD_DIM is a macro. Inside, a head is DIM columns wide, HEAD_DIM padded with zeros to whole
// steps of 16.
//
// One version of each part; measured as part of the whole (attention.cu).
#pragma once
#include "tensor_core.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "no such head_dim");

constexpr int DIM = (HEAD_DIM + 15) / 16 * 16, STEPS = DIM / 16;
// A cell of a tile in shared memory: an odd number of 16-byte words, so that the 8 rows that
// ldmatrix reads at once lie in different banks.
constexpr int CELL_HALVES = DIM + 8;
constexpr float LOG2_E = 1.44269504f;
constexpr u32 MASKED = 0xfc00;  // -inf as a half

DEVICE float exp2_fast(float x) {  // 2^x, relative error 2^-22; 2^-inf is 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Weight of a running sum under another maximum, both in powers of two; -inf weighs nothing.
DEVICE float rescale(float own, float most) {
    return exp2_fast(own - (most == NEG_INFINITY ? 0.f : most));
}

#ifndef SINKS
#define SINKS 0
#endif

// A head's sink as a score more, without a value: adds its weight to that of a row, and gives the
// factor for what was gathered under the row's own maximum.
DEVICE void add_sink(const float* sinks, int head, float most, float& weight, float& keep) {
    const float sink = sinks[head] * LOG2_E, top = fmaxf(most, sink);
    keep = rescale(most, top);
    weight = fmaf(weight, keep, exp2_fast(sink - top));
}

// which rows -------------------------------------------------------------------------------------

// The query rows of one kv head, token by token, and in each token its `group` heads. A block has
// rows first .. first + count - 1. Their tokens are n_tokens from `token` on.
struct Share {
    int head_kv, group, first, count, token, n_tokens;
    DEVICE Share(int head_kv, int group, int first, int size, int all)
        : head_kv(head_kv), group(group), first(first), count(min(size, all - first)),
          token(first / group), n_tokens((first + count - 1) / group - token + 1) {}
    // past the last row: the last again, computed and never stored
    DEVICE int row(int i) const { return first + min(i, count - 1); }
    DEVICE int token_of(int i) const { return row(i) / group; }
    DEVICE int head_of(int i) const { return head_kv * group + row(i) % group; }
};

// tiles of cells ---------------------------------------------------------------------------------

// CELLS cells of K and V, and of the mask for ROWS tokens at most.
template <int CELLS, int ROWS>
struct __align__(16) Tile {
    static constexpr int MASK_HALVES = CELLS + 8;  // an odd number of 16-byte words, see above
    u16 keys[CELLS][CELL_HALVES];
    u16 values[CELLS][CELL_HALVES];
    u16 mask[ROWS][MASK_HALVES];
};

// Where the cells of one kv head are, and what masks them for the block's tokens.
struct Cells {
    const u16 *k, *v, *mask;  // of this kv head; of the block's first token
    i64 n_kv;
    int stride, n_tokens;     // halves from a cell to the next
    DEVICE Cells(const u16* k, const u16* v, const u16* mask, i64 n_head_kv, i64 n_kv,
                 const Share& share)
        : k(k + share.head_kv * HEAD_DIM), v(v + share.head_kv * HEAD_DIM),
          mask(mask + share.token * n_kv), n_kv(n_kv), stride(int(n_head_kv) * HEAD_DIM),
          n_tokens(share.n_tokens) {}

    // Starts copying the tile whose first cell is `first`; this is thread `i` of THREADS. Cells
    // past n_kv are zeros and masked. A tile that all see whole needs no mask.
    template <int THREADS, int CELLS, int ROWS>
    DEVICE void request(Tile<CELLS, ROWS>& to, i64 first, u32 i, bool masked = true) const {
        const int left = int(min(n_kv - first, i64(CELLS)));
        copy_rows<THREADS, CELLS>(to.keys, k + first * stride, left, i);
        copy_rows<THREADS, CELLS>(to.values, v + first * stride, left, i);
        if (!masked) return;
        const u16* from = mask + first;
        if (n_kv % 8 == 0) {
#pragma unroll 1
            for (u32 n = i; n < n_tokens * (CELLS / 8); n += THREADS) {
                const int token = n / (CELLS / 8), cell = n % (CELLS / 8) * 8;
                u16* into = &to.mask[token][cell];
                if (cell < left) {
                    copy16(into, from + token * n_kv + cell, true);
                } else {
                    const u32 two = MASKED << 16 | MASKED;
                    *reinterpret_cast<uint4*>(into) = make_uint4(two, two, two, two);
                }
            }
        } else {  // rows of the mask are not aligned
#pragma unroll 1
            for (u32 n = i; n < n_tokens * CELLS; n += THREADS) {
                const int token = n / CELLS, cell = n % CELLS;
                to.mask[token][cell] = cell < left ? from[token * n_kv + cell] : u16(MASKED);
            }
        }
    }

    // Starts copying `left` cells from `from` on; zeros to the others and to the padding.
    template <int THREADS, int CELLS>
    DEVICE void copy_rows(u16 (&to)[CELLS][CELL_HALVES], const u16* from, int left, u32 i) const {
        constexpr int words = DIM / 8;  // of 16 bytes, per cell
        if constexpr (THREADS % words == 0 && CELLS % (THREADS / words) == 0) {
            // a thread has the same columns of every `step`-th cell: one addition a copy
            constexpr int step = THREADS / words;
            const int cell = i / words, at = i % words * 8;
            const u16* own = from + (cell * stride + at);
            const bool inside = DIM == HEAD_DIM || at < HEAD_DIM;
            if (left >= CELLS) {
#pragma unroll
                for (int n = 0; n < CELLS; n += step, own += step * stride)
                    copy16(&to[cell + n][at], own, inside);
            } else {
#pragma unroll
                for (int n = 0; n < CELLS; n += step, own += step * stride)
                    copy16(&to[cell + n][at], own, inside && cell + n < left);
            }
        } else {
#pragma unroll
            for (u32 n = i; n < CELLS * words; n += THREADS) {
                const int cell = n / words, at = n % words * 8;
                copy16(&to[cell][at], from + (cell * stride + at), cell < left && at < HEAD_DIM);
            }
        }
    }
};
