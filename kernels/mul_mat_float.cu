// mul_mat_float: dst (n_tokens, rows) = x (n_tokens, cols) times w (rows, cols) transposed, with
// float32 activations and weights of any type. This is the float path (toggle activations=float),
// with which all other products are compared.
//
// value(), the readable form in weights.cuh, decodes every weight to float32. The product with an
// activation that was never rounded is formed and added in float32. The fast kernels decode whole
// units and multiply integers, or round activations to halves for tensor cores. So a mistake in a
// fast kernel cannot be on both sides of the comparison.
//
// One warp makes one row of the result for TOKENS tokens. Its lanes have neighbouring columns, so
// weights, scales and activations are read as one or a few neighbouring sectors each. A weight is
// decoded once for all tokens of a tile. Tiles of one group of rows are neighbours in the grid, so
// all tiles but the first find the weights in L2. The order of a sum depends only on cols: each
// lane along the row, then a butterfly over the lanes. So a token's results have the same bits in a
// batch of any size.
//
// Versions (one H100 80GB HBM3; data/results/cuda-perplexity-*; the float path is kept readable,
// not tuned):
//   1  64-bit addresses of x      five more instructions for every load
//   2  32-bit offsets in a tile   512 tokens of 1B: 185 to 270 ms more than the fast path: kept
//
// Arguments: dst, w, x, w_rows, cols, n_tokens. Block: 256 threads. Grid (one-dimensional):
// ceil(w_rows / 8) * ceil(n_tokens / 8). cols is a multiple of the type's block; float types take
// any cols.
#include "weights.cuh"

#define WARPS 8
#define TOKENS 8

// BLOCK: weights of a block of the file; 1 for float types.
template <class W, int BLOCK>
DEVICE void multiply_floats(float* dst, const u8* w, const float* x, i64 rows, i64 cols,
                            i64 n_tokens) {
    pdl_trigger();
    const u32 tiles = u32((n_tokens + TOKENS - 1) / TOKENS);
    const i64 row = i64(blockIdx.x / tiles) * WARPS + threadIdx.x / 32;
    const i64 token = i64(blockIdx.x % tiles) * TOKENS;
    const int lane = threadIdx.x % 32;
    pdl_wait();
    if (row >= rows) return;  // whole warps

    const i64 n_blocks = rows * cols / BLOCK, line = row * cols;
    // Tokens past the last repeat the last token, and are not stored. Offsets in a tile fit 32
    // bits.
    const int last = int(min(n_tokens - 1 - token, i64(TOKENS - 1)));
    int from[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) from[t] = min(t, last) * int(cols);
    const float* act = x + token * cols;
    float acc[TOKENS] = {};
#pragma unroll 4
    for (int c = lane; c < int(cols); c += 32) {
        const i64 i = line + c;
        __builtin_assume(i >= 0);  // divisions by powers of two become shifts
        const float weight = W::value(w, n_blocks, i);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) acc[t] = __fmaf_rn(weight, act[from[t] + c], acc[t]);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float sum = warp_sum(acc[t]);
        if (lane == 0 && token + t < n_tokens) dst[(token + t) * rows + row] = sum;
    }
}

// x is not __restrict__, because another kernel wrote it: the compiler must not read it through the
// non-coherent cache, nor before pdl_wait.
#define FLOAT_PRODUCT(TYPE, BLOCK)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) mul_mat_float_##TYPE(              \
        float* dst, const u8* __restrict__ w, const float* x, i64 rows, i64 cols,               \
        i64 n_tokens) {                                                                         \
        multiply_floats<TYPE, BLOCK>(dst, w, x, rows, cols, n_tokens);                          \
    }

FLOAT_PRODUCT(F32, 1)
FLOAT_PRODUCT(F16, 1)
FLOAT_PRODUCT(BF16, 1)
FLOAT_PRODUCT(Q8_0, Q8_0::block)
FLOAT_PRODUCT(Q4_0, Q4_0::block)
FLOAT_PRODUCT(MXFP4, MXFP4::block)
FLOAT_PRODUCT(Q4_K, Q4_K::block)
FLOAT_PRODUCT(Q5_K, Q5_K::block)
FLOAT_PRODUCT(Q6_K, Q6_K::block)
