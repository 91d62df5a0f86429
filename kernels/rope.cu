// Rotary position embedding, both pairings.
//
//   rope        dst = x, turned by the token's position
//   rope_shift  cache = cache, turned by the cell's delta: the K that is stored, in place
//
// A thread has one pair of one row (a token or a cell). It works out the angle once and turns the
// pair in HEADS heads (kernels/rope.cuh).
//
// Block: 64 threads. Grid: (rows, ceil(n_heads / HEADS)).
//
// One version of each, not tuned. A fused step rotates in product_qkv.cu or rope_store.cu. Cells
// are shifted between steps, and seldom.
#include "rope.cuh"

#define HEADS 4  // as in workbench/backend/cuda/elementwise.py

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

// Arguments: cache, deltas, freq_factors (or 0), n_cells, n_heads, head_dim, n_rot, neox,
// theta_base, freq_scale. The arithmetic is float32; a result is rounded to a half once. A cell
// with delta 0, and elements past n_rot, are not written.
extern "C" __global__ void rope_shift(u16* cache, const int* deltas, const float* freq_factors,
                                      i64 n_cells, i64 n_heads, i64 head_dim, i64 n_rot, i64 neox,
                                      float theta_base, float freq_scale) {
    pdl_trigger();
    double revolutions = 0;
    const int pairs = int(n_rot) / 2;
    if (threadIdx.x < pairs)
        revolutions = rope_revolutions(threadIdx.x, n_rot, theta_base, freq_scale, freq_factors);
    pdl_wait();
    const i64 cell = blockIdx.x;
    const int delta = deltas[cell];
    if (delta == 0) return;
    const int first = blockIdx.y * HEADS, last = min(first + HEADS, int(n_heads));
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        if (i != threadIdx.x)
            revolutions = rope_revolutions(i, n_rot, theta_base, freq_scale, freq_factors);
        const Rotation rotation(delta, revolutions);
        const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;
        for (int h = first; h < last; h++) {
            u16* head = cache + (cell * n_heads + h) * head_dim;
            const float u = half_to_float(head[a]), v = half_to_float(head[b]);
            head[a] = float_to_half(rotation.first(u, v));
            head[b] = float_to_half(rotation.second(u, v));
        }
    }
}
