// The common part of all attention kernels: the rows of a block, and its tile of cells in shared
// memory.
//
// HEAD_DIM is a macro. In shared memory a head has DIM columns: HEAD_DIM, padded with zeros to
// whole steps of 16. SINKS (0 or 1): whether heads have sinks.
//
// One version of each part; measured as part of the whole (attention.cu).
#pragma once
#include "tensor_core.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM <= 256, "no such head_dim");

constexpr int DIM = (HEAD_DIM + 15) / 16 * 16, STEPS = DIM / 16;
// Halves of a cell in shared memory. A cell has an odd number of 16-byte words, so that the 8 rows
// that ldmatrix reads at once lie in different banks.
constexpr int CELL_HALVES = DIM + 8;
constexpr float LOG2_E = 1.44269504f;
constexpr u32 MASKED = 0xfc00;  // -inf as a half

DEVICE float exp2_fast(float x) {  // 2^x, relative error 2^-22; 2^-inf is 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The factor of a running sum when its maximum changes from `own` to `most`, both in powers of two.
// It is 0 for own = -inf.
DEVICE float rescale(float own, float most) {
    return exp2_fast(own - (most == NEG_INFINITY ? 0.f : most));
}

#ifndef SINKS
#define SINKS 0
#endif

// A head's sink is one more score, without a value. Adds its weight to the weight of a row. `keep`
// becomes the factor of the row's sums, which are relative to the row's own maximum.
DEVICE void add_sink(const float* sinks, int head, float most, float& weight, float& keep) {
    const float sink = sinks[head] * LOG2_E, top = fmaxf(most, sink);
    keep = rescale(most, top);
    weight = fmaf(weight, keep, exp2_fast(sink - top));
}

// which rows -------------------------------------------------------------------------------------

// A block's share of the query rows of one kv head. Rows are ordered by token, and in each token by
// its `group` heads. The block has rows first .. first + count - 1. These belong to n_tokens
// tokens, from `token` on.
struct Share {
    int head_kv, group, first, count, token, n_tokens;
    DEVICE Share(int head_kv, int group, int first, int size, int all)
        : head_kv(head_kv), group(group), first(first), count(min(size, all - first)),
          token(first / group), n_tokens((first + count - 1) / group - token + 1) {}
    // Rows past the last repeat the last row; they are computed and never stored.
    DEVICE int row(int i) const { return first + min(i, count - 1); }
    DEVICE int token_of(int i) const { return row(i) / group; }
    DEVICE int head_of(int i) const { return head_kv * group + row(i) % group; }
};

// tiles of cells ---------------------------------------------------------------------------------

// CELLS cells of K and of V, and of the mask of at most ROWS tokens.
template <int CELLS, int ROWS>
struct __align__(16) Tile {
    static constexpr int MASK_HALVES = CELLS + 8;  // as CELL_HALVES
    u16 keys[CELLS][CELL_HALVES];
    u16 values[CELLS][CELL_HALVES];
    u16 mask[ROWS][MASK_HALVES];
};

// The cells of one kv head, and their mask for the block's tokens.
struct Cells {
    const u16 *k, *v;      // of this kv head
    const u16* mask;       // of the block's first token
    i64 n_kv;
    int stride, n_tokens;  // stride: halves from a cell to the next
    DEVICE Cells(const u16* k, const u16* v, const u16* mask, i64 n_head_kv, i64 n_kv,
                 const Share& share)
        : k(k + share.head_kv * HEAD_DIM), v(v + share.head_kv * HEAD_DIM),
          mask(mask + share.token * n_kv), n_kv(n_kv), stride(int(n_head_kv) * HEAD_DIM),
          n_tokens(share.n_tokens) {}

    // Starts the copy of the tile whose first cell is `first`. This thread is thread `i` of
    // THREADS. Cells past n_kv become zeros, and masked. A tile of which all tokens see every cell
    // needs no mask (`masked` false).
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

    // Starts the copy of `left` cells from `from` on. The other cells and the padding become zeros.
    template <int THREADS, int CELLS>
    DEVICE void copy_rows(u16 (&to)[CELLS][CELL_HALVES], const u16* from, int left, u32 i) const {
        constexpr int words = DIM / 8;  // of 16 bytes, per cell
        if constexpr (THREADS % words == 0 && CELLS % (THREADS / words) == 0) {
            // A thread has the same columns of every `step`-th cell, so a copy takes one addition.
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
