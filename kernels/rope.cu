// rope: rotary position embedding, both pairings.
//
// A thread has one pair of one token and turns it in HEADS heads, so that the angle is worked out
// once for them. The angle is formed and brought into one turn in double: at position 100,000 a
// float angle would be wrong in the third digit.
//
// Arguments: dst, x, positions, freq_factors (or 0), n_tokens, n_heads, head_dim, n_rot, neox,
// theta_base, freq_scale. Block: 64 threads. Grid: (n_tokens, ceil(n_heads / HEADS)).
#include "common.cuh"

#define HEADS 4  // as in workbench/backend/kernels.py

extern "C" __global__ void rope(float* __restrict__ dst, const float* __restrict__ x,
                                const int* __restrict__ positions,
                                const float* __restrict__ freq_factors, i64 n_tokens, i64 n_heads,
                                i64 head_dim, i64 n_rot, i64 neox, float theta_base,
                                float freq_scale) {
    const double turn = 6.283185307179586476925286766559;
    const i64 token = blockIdx.x;
    const int first = blockIdx.y * HEADS, last = min(first + HEADS, int(n_heads));
    const int dim = int(head_dim), pairs = int(n_rot) / 2;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        double angle = positions[token] * double(freq_scale) *
                       pow(double(theta_base), -2.0 * i / double(n_rot));
        if (freq_factors) angle /= freq_factors[i];
        angle -= turn * rint(angle / turn);
        float sine, cosine;
        sincosf(float(angle), &sine, &cosine);
        const int a = neox ? i : 2 * i, b = neox ? i + pairs : 2 * i + 1;
        for (int h = first; h < last; h++) {
            const i64 at = (token * n_heads + h) * dim;
            const float u = x[at + a], v = x[at + b];
            dst[at + a] = u * cosine - v * sine;
            dst[at + b] = u * sine + v * cosine;
        }
    }
    for (int i = int(n_rot) + threadIdx.x; i < dim; i += blockDim.x) {
        for (int h = first; h < last; h++) {
            const i64 at = (token * n_heads + h) * dim + i;
            dst[at] = x[at];
        }
    }
}
