// mul_mat: dst (n_tokens, rows) = x (n_tokens, cols) times w (rows, cols) transposed.
//
// One warp makes ROWS rows of the result for N tokens. Its lanes stride over the columns in units
// (8 floats; 32 quantised weights), with UNROLL units of every row requested before the first is
// used: what limits these kernels is how many bytes are in flight. Activations are read through L1
// and serve all ROWS rows of the warp; weights pass L1 by.
//
//   mul_mat_<TYPE>_n1, _n4, _n8    N = 1, 4, 8 tokens together
//
// More than 8 tokens run as tiles of 8: blocks of one group of rows lie next to each other in the
// grid, so that the second tile finds the weights in L2.
//
// Float weights take float activations and multiply in float. Quantised weights take Q8_ACT and
// multiply in integers (dp4a), exact up to the scales: a half block contributes
//   scale_x * (f * dot(q, q_x) + m * sum(q_x))
// where sum(q_x) comes with the activations. Every element is summed in an order that depends only
// on cols: lane, unit, then the butterfly over lanes.
//
// Arguments: dst, w, x, w_rows, cols, n_tokens. Block: 128 threads. Grid (one-dimensional):
// ceil(w_rows / (4 ROWS)) * ceil(n_tokens / N). cols must suit the type's block; float types take
// any cols (those that are no multiple of 8 go one weight at a time).
//
// The backend never launches this file. It is the slow twin that tests compare the fast products
// with (product.py), and is not tuned. It was the engine's product before commit 43147c1: a step of
// one token of llama-3-8b Q4_0 took 4.12 ms, and takes 2.9 with multiply.cuh's, nothing fused
// (data/results/cuda-bench-*, cuda-decode-*-unfused).
#include "weights.cuh"

#define WARPS 4
#define LIMITS __launch_bounds__(32 * WARPS)

// Where this warp works: its first row and first token.
template <int N, int ROWS>
struct Tile {
    i64 row;
    int token, lane;
    DEVICE Tile(i64 n_tokens) {
        const u32 tiles = u32((n_tokens + N - 1) / N);
        row = (i64(blockIdx.x / tiles) * WARPS + threadIdx.x / 32) * ROWS;
        token = int(blockIdx.x % tiles) * N;
        lane = threadIdx.x % 32;
    }
};

template <int N, int ROWS>
DEVICE void store(float (&acc)[ROWS][N], float* dst, const Tile<N, ROWS>& at, i64 rows,
                  i64 n_tokens) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int t = 0; t < N; t++) {
            const float v = warp_sum(acc[r][t]);
            if (at.lane == 0 && at.row + r < rows && at.token + t < n_tokens)
                dst[(at.token + t) * rows + at.row + r] = v;
        }
    }
}

// float weights -----------------------------------------------------------------------------------

template <class W, int N, int ROWS, int UNROLL>
DEVICE void multiply_float(float* dst, const u8* w, const float* x, i64 rows, i64 cols,
                           i64 n_tokens) {
    const Tile<N, ROWS> at(n_tokens);
    if (at.row >= rows) return;
    float acc[ROWS][N] = {};
    // Rows and tokens past the end repeat the last one; their results are not stored.
    const u8* line[ROWS];
    const float* act[N];
#pragma unroll
    for (int r = 0; r < ROWS; r++) line[r] = w + min(at.row + r, rows - 1) * cols * W::bytes;
#pragma unroll
    for (int t = 0; t < N; t++) act[t] = x + min(i64(at.token + t), n_tokens - 1) * cols;

    if (cols % 8) {
        for (i64 c = at.lane; c < cols; c += 32) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float weight = W::value(line[r], 0, c);
#pragma unroll
                for (int t = 0; t < N; t++) acc[r][t] += weight * act[t][c];
            }
        }
        return store(acc, dst, at, rows, n_tokens);
    }
    const int units = int(cols / 8);
    for (int base = at.lane; base < units; base += 32 * UNROLL) {
        typename W::Raw raw[UNROLL][ROWS];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int u = base + 32 * i;
            if (u < units) {
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    raw[i][r] = W::load8(line[r] + i64(u) * 8 * W::bytes);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int u = base + 32 * i;
            if (u >= units) continue;
            float weight[ROWS][8];
#pragma unroll
            for (int r = 0; r < ROWS; r++) W::decode8(raw[i][r], weight[r]);
#pragma unroll
            for (int t = 0; t < N; t++) {
                const float4 a = reinterpret_cast<const float4*>(act[t])[2 * u];
                const float4 b = reinterpret_cast<const float4*>(act[t])[2 * u + 1];
                const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
#pragma unroll
                    for (int k = 0; k < 8; k++) acc[r][t] += weight[r][k] * v[k];
                }
            }
        }
    }
    store(acc, dst, at, rows, n_tokens);
}

// quantised weights -------------------------------------------------------------------------------

DEVICE int dot16(const int (&q)[4], int4 x, int sum) {
    sum = __dp4a(q[0], x.x, sum);
    sum = __dp4a(q[1], x.y, sum);
    sum = __dp4a(q[2], x.z, sum);
    return __dp4a(q[3], x.w, sum);
}

// Adds to acc[r] what a unit's two half blocks, of one block of activations, contribute.
template <class W, int ROWS>
DEVICE void add_block(const Unit (&unit)[ROWS], const u8* x, i64 cols, int at, float* acc,
                      int stride) {
    const int4 lo = *reinterpret_cast<const int4*>(x + at);
    const int4 hi = *reinterpret_cast<const int4*>(x + at + 16);
    const float scale = *reinterpret_cast<const float*>(x + cols + at / 8);
    float sum = 0;
    if (W::has_min) {
        const short2 s = *reinterpret_cast<const short2*>(x + cols + cols / 8 + at / 8);
        sum = float(s.x + s.y);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float v = unit[r].f_lo * float(dot16(unit[r].hi, hi, dot16(unit[r].lo, lo, 0)));
        if (W::has_min) v += unit[r].m_lo * sum;
        acc[r * stride] += scale * v;
    }
}

// As add_block, for halves of two blocks of activations at columns `at_lo` and `at_hi`.
template <int ROWS>
DEVICE void add_halves(const Unit (&unit)[ROWS], const u8* x, i64 cols, int at_lo, int at_hi,
                       float* acc, int stride) {
    const int4 lo = *reinterpret_cast<const int4*>(x + at_lo);
    const int4 hi = *reinterpret_cast<const int4*>(x + at_hi);
    const float* scales = reinterpret_cast<const float*>(x + cols);
    const short* sums = reinterpret_cast<const short*>(x + cols + cols / 8);
    const float scale_lo = scales[at_lo / 32], scale_hi = scales[at_hi / 32];
    const float sum_lo = sums[at_lo / 16], sum_hi = sums[at_hi / 16];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float a = unit[r].f_lo * float(dot16(unit[r].lo, lo, 0)) + unit[r].m_lo * sum_lo;
        const float b = unit[r].f_hi * float(dot16(unit[r].hi, hi, 0)) + unit[r].m_hi * sum_hi;
        acc[r * stride] += scale_lo * a + scale_hi * b;
    }
}

template <class W, int N, int ROWS, int UNROLL>
DEVICE void multiply_quantised(float* dst, const u8* w, const u8* x, i64 rows, i64 cols,
                               i64 n_tokens) {
    const Tile<N, ROWS> at(n_tokens);
    if (at.row >= rows) return;
    float acc[ROWS][N] = {};
    const int units = int(cols / 32);
    const i64 blocks = rows * cols / W::block;
    i64 line[ROWS];  // the first unit of each row
    const u8* act[N];
#pragma unroll
    for (int r = 0; r < ROWS; r++) line[r] = min(at.row + r, rows - 1) * units;
#pragma unroll
    for (int t = 0; t < N; t++)
        act[t] = x + min(i64(at.token + t), n_tokens - 1) * act_row_bytes(cols);

    for (int base = at.lane; base < units; base += 32 * UNROLL) {
        typename W::Raw raw[UNROLL][ROWS];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int u = base + 32 * i;
            if (u < units) {
#pragma unroll
                for (int r = 0; r < ROWS; r++) raw[i][r] = W::load(w, blocks, line[r] + u);
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int u = base + 32 * i;
            if (u >= units) continue;
            Unit unit[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) unit[r] = W::decode(raw[i][r], u % 8);
#pragma unroll
            for (int t = 0; t < N; t++) {
                if constexpr (W::one_block) {
                    add_block<W, ROWS>(unit, act[t], cols, u * 32, &acc[0][t], N);
                } else {
                    const int start = u / 8 * 256;
                    add_halves<ROWS>(unit, act[t], cols, start + W::lo_at(u % 8),
                                     start + W::hi_at(u % 8), &acc[0][t], N);
                }
            }
        }
    }
    store(acc, dst, at, rows, n_tokens);
}

// the kernels (product.py has the same ROWS and N) --------------------------------------------

#define FLOAT(TYPE, N, ROWS, UNROLL)                                                            \
    extern "C" __global__ void LIMITS mul_mat_##TYPE##_n##N(                                    \
        float* __restrict__ dst, const u8* __restrict__ w, const float* __restrict__ x,         \
        i64 rows, i64 cols, i64 n_tokens) {                                                     \
        multiply_float<TYPE, N, ROWS, UNROLL>(dst, w, x, rows, cols, n_tokens);                 \
    }
#define QUANTISED(TYPE, N, ROWS, UNROLL)                                                        \
    extern "C" __global__ void LIMITS mul_mat_##TYPE##_n##N(                                    \
        float* __restrict__ dst, const u8* __restrict__ w, const u8* __restrict__ x, i64 rows,  \
        i64 cols, i64 n_tokens) {                                                               \
        multiply_quantised<TYPE, N, ROWS, UNROLL>(dst, w, x, rows, cols, n_tokens);             \
    }
#define ALL(KIND, TYPE, UNROLL, ROWS_8)                                                         \
    KIND(TYPE, 1, 2, UNROLL) KIND(TYPE, 4, 2, 1) KIND(TYPE, 8, ROWS_8, 1)

ALL(FLOAT, F32, 2, 4)
ALL(FLOAT, F16, 4, 4)
ALL(FLOAT, BF16, 4, 4)
ALL(QUANTISED, Q8_0, 2, 4)
ALL(QUANTISED, Q4_0, 4, 4)
ALL(QUANTISED, MXFP4, 4, 4)
ALL(QUANTISED, Q4_K, 2, 2)
ALL(QUANTISED, Q5_K, 2, 2)
ALL(QUANTISED, Q6_K, 2, 2)
