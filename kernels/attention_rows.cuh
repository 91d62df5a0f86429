// The query rows of a warp, in registers or shared memory, and their running sums. Method:
// FlashAttention-2 (Dao 2023), online softmax (Milakov and Gimelshein 2018).
//
// One version since attention runs on tensor cores: versions 2 and 3 of attention.cu.
#pragma once
#include "attention.cuh"

// 8 * SETS query rows of a warp, with their running sums. Scores are formed as K q (cells by rows),
// and results as V^T p (columns by rows). So a product takes at least 8 rows, not 16: a single
// token with a group of up to 8 heads needs one set.
//
// Of set s a lane has rows 8 s + 2 (lane % 4) + j, with j = 0 and 1. For these it keeps
//   most[s][j]     the running maximum, in powers of two
//   weight[s][j]   the sum of the weights of the lane's own cells
//   sums[d][s]     columns 16 d + lane / 4 of rows j = 0, 1, then columns 16 d + lane / 4 + 8
//
// Queries that need many registers lie in shared memory instead, [STEPS][SETS][32] uint2: for each
// lane its operand b of `mma`.
template <int SETS>
struct Rows {
    static constexpr bool STORED = STEPS * SETS > 16;
    static constexpr int STORED_BYTES = STORED ? STEPS * SETS * 32 * 8 : 0;
    u32 query[STORED ? 1 : STEPS][SETS][2];
    const uint2* stored;
    float sums[STEPS][SETS][4];
    float most[SETS][2], weight[SETS][2];

    // The addresses of this lane's columns in its rows of q.
    static DEVICE void locate(const float* (&row)[SETS], const float* q, const Share& share, int at,
                              int n_head) {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            const int i = at + 8 * s + threadIdx.x % 32 / 4;
            row[s] = q + (i64(share.token_of(i)) * n_head + share.head_of(i)) * HEAD_DIM +
                     threadIdx.x % 4 * 2;
        }
    }

    // Loads the queries. q is (n_tokens, n_head, HEAD_DIM); the warp's rows begin at row `at` of
    // the block. They are scaled in float, also by log2(e), because weights are powers of two.
    // SHARERS warps share queries in shared memory, at `room`. Each of them loads every SHARERS-th
    // step; this warp begins with `first_step`. Afterwards these warps need a barrier.
    template <int SHARERS>
    DEVICE void load(const float* q, const Share& share, int at, int n_head, float scale,
                     uint2* room, int first_step) {
        const int lane = threadIdx.x % 32;
        scale *= LOG2_E;
        stored = room + lane;
        const float* row[SETS];
        locate(row, q, share, at, n_head);
        if constexpr (STORED) {
            // All loads of a batch stand before its first store, because the compiler would not
            // move a load before a store.
            constexpr int rounds = (STEPS + SHARERS - 1) / SHARERS, batch = rounds < 4 ? rounds : 4;
#pragma unroll 1
            for (int first = 0; first < rounds; first += batch) {
                uint2 two[batch][SETS];
#pragma unroll
                for (int n = 0; n < batch; n++) {
                    const int d = first_step + (first + n) * SHARERS;
#pragma unroll
                    for (int s = 0; s < SETS; s++)
                        two[n][s] = make_uint2(two_columns(row[s], 16 * d, scale),
                                               two_columns(row[s], 16 * d + 8, scale));
                }
#pragma unroll
                for (int n = 0; n < batch; n++) {
                    const int d = first_step + (first + n) * SHARERS;
#pragma unroll
                    for (int s = 0; s < SETS; s++) {
                        if (d < STEPS) room[(d * SETS + s) * 32 + lane] = two[n][s];
                    }
                }
            }
        } else {
            float2 wide[STEPS][SETS][2];
            request(row, wide);
            convert(wide, scale);
        }
    }

    // `load` in two parts, for queries in registers. Other loads can be requested between them.
    static DEVICE void request(const float* const (&row)[SETS], float2 (&wide)[STEPS][SETS][2]) {
#pragma unroll
        for (int i = 0; i < STEPS * SETS * 2; i++) {
            const int d = i / (SETS * 2), s = i / 2 % SETS, c = 16 * d + i % 2 * 8;
            wide[d][s][i % 2] = make_float2(0, 0);
            if (c < HEAD_DIM) wide[d][s][i % 2] = *reinterpret_cast<const float2*>(row[s] + c);
        }
    }
    DEVICE void convert(const float2 (&wide)[STEPS][SETS][2], float scale_log2) {
#pragma unroll
        for (int i = 0; i < STEPS * SETS * 2; i++) {
            const int d = i / (SETS * 2), s = i / 2 % SETS;
            const float2 two = wide[d][s][i % 2];
            query[d][s][i % 2] = pack_halves(two.x * scale_log2, two.y * scale_log2);
        }
    }

    static DEVICE u32 two_columns(const float* row, int c, float scale) {
        float2 two = make_float2(0, 0);
        if (c < HEAD_DIM) two = *reinterpret_cast<const float2*>(row + c);
        return pack_halves(two.x * scale, two.y * scale);
    }

    DEVICE void clear() {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
#pragma unroll
            for (int j = 0; j < 2; j++) most[s][j] = NEG_INFINITY, weight[s][j] = 0;
#pragma unroll
            for (int d = 0; d < STEPS; d++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[d][s][i] = 0;
            }
        }
    }

    // Adds the cells of a tile. mask_row[s]: the row of the tile's mask whose address this lane
    // gives to load_transposed for set s. With CAREFUL a cell of weight zero adds nothing, whatever
    // V holds; otherwise V must be finite. Both give the same bits for finite values.
    template <bool CAREFUL, int CELLS, int TOKENS>
    DEVICE void add(const Tile<CELLS, TOKENS>& tile, const int (&mask_row)[SETS],
                    bool masked = true) {
        constexpr int parts = CELLS / 16;
        // A product waits for the product before it in its chain, so there are at least two chains.
        constexpr int chains = parts * SETS == 1 ? 2 : 1;
        const int lane = threadIdx.x % 32;
        float score[chains][parts][SETS][4] = {};
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
            u32 own[SETS][2];
#pragma unroll
            for (int s = 0; s < SETS; s++) {
                if constexpr (STORED) {
                    const uint2 two = stored[(d * SETS + s) * 32];
                    own[s][0] = two.x, own[s][1] = two.y;
                } else {
                    own[s][0] = query[d][s][0], own[s][1] = query[d][s][1];
                }
            }
#pragma unroll
            for (int c = 0; c < parts; c++) {
                u32 keys[4];
                load_matrices(keys, &tile.keys[16 * c + lane % 16][16 * d + lane / 16 * 8]);
#pragma unroll
                for (int s = 0; s < SETS; s++) mma(score[d % chains][c][s], keys, own[s]);
            }
        }
#pragma unroll
        for (int c = 0; c < parts * (chains - 1); c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) score[0][c][0][i] += score[chains - 1][c][0][i];
        }
        if (masked) apply_mask(score[0], tile, mask_row);

        u32 p[parts][SETS][2];
        float keep[SETS][2];
        weigh(score[0], p, keep);
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            if (__any_sync(~0u, keep[s][0] != 1.f || keep[s][1] != 1.f)) {
#pragma unroll
                for (int d = 0; d < STEPS; d++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[d][s][i] *= keep[s][i % 2];
                }
            }
        }
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
#pragma unroll
            for (int c = 0; c < parts; c++) {
                u32 values[4];
                const int cell = 16 * c + lane % 8 + lane / 16 * 8;
                load_transposed(values, &tile.values[cell][16 * d + lane / 8 % 2 * 8]);
#pragma unroll
                for (int s = 0; s < SETS; s++) {
                    if (CAREFUL) {
                        mma_rows(sums[d][s], values, p[c][s]);
                    } else {
                        mma(sums[d][s], values, p[c][s]);
                    }
                }
            }
        }
    }

    // Adds the mask to the scores (cells by rows), in powers of two. The score of a masked cell
    // becomes -inf, whatever it was.
    template <int PARTS, int CELLS, int TOKENS>
    static DEVICE void apply_mask(float (&score)[PARTS][SETS][4], const Tile<CELLS, TOKENS>& tile,
                                  const int (&mask_row)[SETS]) {
        const int lane = threadIdx.x % 32;
        constexpr int pairs = (SETS + 1) / 2;
        u32 bias[PARTS][pairs][4], any = 0;  // sets 2 i, 2 i + 1; of each cells 0 .. 7, 8 .. 15
#pragma unroll
        for (int c = 0; c < PARTS; c++) {
#pragma unroll
            for (int i = 0; i < pairs; i++) {
                const int second = min(2 * i + 1, SETS - 1);
                const int row = lane < 16 ? mask_row[2 * i] : mask_row[second];
                load_transposed(bias[c][i], &tile.mask[row][16 * c + lane / 8 % 2 * 8]);
                any |= bias[c][i][0] | bias[c][i][1] | bias[c][i][2] | bias[c][i][3];
            }
        }
        if (!__any_sync(~0u, any)) return;
#pragma unroll
        for (int c = 0; c < PARTS; c++) {
#pragma unroll
            for (int s = 0; s < SETS; s++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 two = bias[c][s / 2][s % 2 * 2 + i / 2];
                    const u16 half = u16(i % 2 ? two >> 16 : two);
                    const float sum = score[c][s][i] + half_to_float(half) * LOG2_E;
                    score[c][s][i] = half == MASKED ? NEG_INFINITY : sum;
                }
            }
        }
    }

    // Turns scores into weights, relative to the new maximum. p: the weights as halves, as operand
    // b of `mma`. keep: the factor of sums that are relative to the old maximum.
    template <int PARTS>
    DEVICE void weigh(float (&score)[PARTS][SETS][4], u32 (&p)[PARTS][SETS][2],
                      float (&keep)[SETS][2]) {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
            float base[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float next = most[s][j];
#pragma unroll
                for (int c = 0; c < PARTS; c++)
                    next = fmaxf(next, fmaxf(score[c][s][j], score[c][s][j + 2]));
#pragma unroll
                for (int o = 4; o < 32; o *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, o));
                keep[s][j] = rescale(most[s][j], next);
                weight[s][j] *= keep[s][j];
                most[s][j] = next;
                base[j] = next == NEG_INFINITY ? 0.f : next;
            }
#pragma unroll
            for (int c = 0; c < PARTS; c++) {
                float w[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    w[i] = exp2_fast(score[c][s][i] - base[i % 2]);
                    weight[s][i % 2] += w[i];
                }
                p[c][s][0] = transposed(pack_halves(w[0], w[1]));
                p[c][s][1] = transposed(pack_halves(w[2], w[3]));
            }
        }
    }

    // As `mma`, but one of the 8 rows at a time, with V set to zero where the row's weight is zero.
    static DEVICE void mma_rows(float (&c)[4], const u32 (&values)[4], const u32 (&p)[2]) {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int row = 0; row < 8; row++) {
            u32 kept[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 w = __shfl_sync(~0u, p[half], row * 4 + lane % 4);
                const u32 mask = (w & 0xffff ? 0xffffu : 0u) | (w >> 16 ? 0xffff0000u : 0u);
                kept[2 * half] = values[2 * half] & mask;
                kept[2 * half + 1] = values[2 * half + 1] & mask;
            }
            float own[4] = {c[0], c[1], c[2], c[3]};
            mma(own, kept, p);
#pragma unroll
            for (int i = 0; i < 4; i++) c[i] = lane % 4 * 2 + i % 2 == row ? own[i] : c[i];
        }
    }

    // Whether a sum of the warp is not finite. Then V was not finite, perhaps in a masked cell.
    DEVICE bool suspicious() const {
        float zero[4] = {};  // four chains
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
#pragma unroll
            for (int s = 0; s < SETS; s++) {
#pragma unroll
                for (int i = 0; i < 4; i++) zero[i] = fmaf(sums[d][s][i], 0.f, zero[i]);
            }
        }
        return __any_sync(~0u, (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0.f);
    }

    // Adds the weights of all lanes of a row. Every lane gets the sum.
    DEVICE void add_weights() {
#pragma unroll
        for (int s = 0; s < SETS; s++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int o = 4; o < 32; o *= 2)
                    weight[s][j] += __shfl_xor_sync(~0u, weight[s][j], o);
            }
        }
    }
};
