// rope: rotary position embedding, both pairings.
//
// A thread has one pair of one token and turns it in HEADS heads, so that the angle is worked out
// once for them (kernels/rope.cuh).
//
// Arguments: dst, x, positions, freq_factors (or 0), n_tokens, n_heads, head_dim, n_rot, neox,
// theta_base, freq_scale. Block: 64 threads. Grid: (n_tokens, ceil(n_heads / HEADS)).
//
// Not tuned: with everything fused the rotation is part of product_qkv.cu or rope_store.cu, which
// has the figures. Four heads a thread are as in the first version; rope.cuh has what changed.
#include "rope.cuh"

#define HEADS 4  // as in workbench/backend/cuda/elementwise.py

extern "C" __global__ void rope(float* dst, const float* x, const int* positions,
                                const float* freq_factors, i64 n_tokens, i64 n_heads, i64 head_dim,
                                i64 n_rot, i64 neox, float theta_base, float freq_scale) {
    pdl_trigger();
    double turns = 0;
    const int pairs = int(n_rot) / 2;
    if (threadIdx.x < pairs)
        turns = rope_turns(threadIdx.x, n_rot, theta_base, freq_scale, freq_factors);
    pdl_wait();
    const i64 token = blockIdx.x;
    const int first = blockIdx.y * HEADS, last = min(first + HEADS, int(n_heads));
    const int dim = int(head_dim);
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        if (i != threadIdx.x)
            turns = rope_turns(i, n_rot, theta_base, freq_scale, freq_factors);
        const Turn turn(positions[token], turns);
        const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;
        for (int h = first; h < last; h++) {
            const i64 at = (token * n_heads + h) * dim;
            const float u = x[at + a], v = x[at + b];
            dst[at + a] = turn.first(u, v);
            dst[at + b] = turn.second(u, v);
        }
    }
    for (int i = int(n_rot) + threadIdx.x; i < dim; i += blockDim.x) {
        for (int h = first; h < last; h++) {
            const i64 at = (token * n_heads + h) * dim + i;
            dst[at] = x[at];
        }
    }
}
