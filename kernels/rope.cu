// Rotary position embedding, both pairings.
//
//   rope               dst = x, rotated by the token's position
//   rope_shift_<TYPE>  rotates the stored K in place, by the delta of each cell
//
// A thread has one pair of one row (a token or a cell). It computes the angle once, and rotates the
// pair in HEADS heads (kernels/rope.cuh).
//
// Block: 64 threads. Grid: (rows, ceil(n_heads / HEADS)).
//
// One version of each, not tuned. A fused step rotates in product_qkv.cu or rope_store.cu. Cells
// are shifted between steps, and rarely.
#include "cells.cuh"
#include "rope.cuh"

#define HEADS 4       // as in workbench/backend/cuda/kernels/elementwise.py
#define MOST_DIM 256  // of a head, as in workbench/backend/cuda/kernels/attention.py

// Arguments: dst, x, positions, freq_factors (or 0), n_tokens, n_heads, head_dim, n_rot, neox,
// theta_base, freq_scale.
extern "C" __global__ void rope(float* dst, const float* x, const int* positions,
                                const float* freq_factors, i64 n_tokens, i64 n_heads, i64 head_dim,
                                i64 n_rot, i64 neox, float theta_base, float freq_scale) {
    pdl_trigger();
    double revolutions = 0;
    const int pairs = int(n_rot) / 2;
    if (threadIdx.x < pairs)
        revolutions = rope_revolutions(threadIdx.x, n_rot, theta_base, freq_scale, freq_factors);
    pdl_wait();
    const i64 token = blockIdx.x;
    const int first = blockIdx.y * HEADS, last = min(first + HEADS, int(n_heads));
    const int dim = int(head_dim);
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        if (i != threadIdx.x)
            revolutions = rope_revolutions(i, n_rot, theta_base, freq_scale, freq_factors);
        const Rotation rotation(positions[token], revolutions);
        const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;
        for (int h = first; h < last; h++) {
            const i64 at = (token * n_heads + h) * dim;
            const float u = x[at + a], v = x[at + b];
            dst[at + a] = rotation.first(u, v);
            dst[at + b] = rotation.second(u, v);
        }
    }
    for (int i = int(n_rot) + threadIdx.x; i < dim; i += blockDim.x) {
        for (int h = first; h < last; h++) {
            const i64 at = (token * n_heads + h) * dim + i;
            dst[at] = x[at];
        }
    }
}

// Arguments of rope_shift_<TYPE>: cache, deltas, freq_factors (or 0), n_cells, n_heads, head_dim,
// n_rot, neox, theta_base, freq_scale. The arithmetic is float32; each result is rounded once, to
// the cache's type. Cells with delta 0, and blocks past n_rot, are not written.
#define SHIFT_ARGUMENTS                                                                          \
    u8 *cache, const int *deltas, const float *freq_factors, i64 n_cells, i64 n_heads,           \
        i64 head_dim, i64 n_rot, i64 neox, float theta_base, float freq_scale

#define ROPE_SHIFT(TYPE)                                                                         \
    extern "C" __global__ void rope_shift_##TYPE(SHIFT_ARGUMENTS) {                              \
        pdl_trigger();                                                                           \
        double revolutions = 0;                                                                  \
        const int pairs = int(n_rot) / 2;                                                        \
        if (threadIdx.x < pairs)                                                                 \
            revolutions =                                                                        \
                rope_revolutions(threadIdx.x, n_rot, theta_base, freq_scale, freq_factors);      \
        pdl_wait();                                                                              \
        const int delta = deltas[blockIdx.x];                                                    \
        if (delta == 0) return;                                                                  \
        const int first = blockIdx.y * HEADS, last = min(first + HEADS, int(n_heads));           \
        u8* row = cache + blockIdx.x * Cell##TYPE::row_bytes(n_heads * head_dim);                \
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {                                  \
            if (i != threadIdx.x)                                                                \
                revolutions =                                                                    \
                    rope_revolutions(i, n_rot, theta_base, freq_scale, freq_factors);            \
            const Rotation rotation(delta, revolutions);                                         \
            const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;                    \
            for (int h = first; h < last; h++) {                                                 \
                const i64 at = h * head_dim;                                                     \
                const float u = Cell##TYPE::load(row, at + a), v = Cell##TYPE::load(row, at + b);\
                Cell##TYPE::store(row, at + a, rotation.first(u, v), true);                      \
                Cell##TYPE::store(row, at + b, rotation.second(u, v), true);                     \
            }                                                                                    \
        }                                                                                        \
    }
ROPE_SHIFT(F16)
ROPE_SHIFT(BF16)
ROPE_SHIFT(F32)

// A block of Q8_0 is rounded as a whole, so the elements of a head stay in shared memory until all
// of them are rotated. Each head computes its angles again.
extern "C" __global__ void rope_shift_Q8_0(SHIFT_ARGUMENTS) {
    __shared__ float values[MOST_DIM];
    pdl_trigger();
    pdl_wait();
    const int delta = deltas[blockIdx.x];
    if (delta == 0) return;
    const int first = blockIdx.y * HEADS, last = min(first + HEADS, int(n_heads));
    const int pairs = int(n_rot) / 2, whole = (int(n_rot) + 31) / 32 * 32;
    u8* row = cache + blockIdx.x * CellQ8_0::row_bytes(n_heads * head_dim);
    for (int h = first; h < last; h++) {
        const i64 at = h * head_dim;
        for (int i = threadIdx.x; i < whole; i += blockDim.x)
            values[i] = CellQ8_0::load(row, at + i);
        __syncthreads();
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const Rotation rotation(
                delta, rope_revolutions(i, n_rot, theta_base, freq_scale, freq_factors));
            const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;
            const float u = values[a], v = values[b];
            values[a] = rotation.first(u, v);
            values[b] = rotation.second(u, v);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < whole; i += blockDim.x)  // whole warps
            CellQ8_0::store(row, at + i, values[i], true);
        __syncthreads();
    }
}
