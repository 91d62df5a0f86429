// mul_mat_float: dst (n_tokens, rows) = x (n_tokens, cols) times w (rows, cols) transposed, with
// float32 activations and weights of any type. This is the float path: all other products are
// judged against it (toggle activations=float).
//
// value(), the readable form in weights.cuh, decodes every weight to the float32 it stands for. It
// is multiplied in float32 by an activation that was never rounded, and added in float32. The fast
// kernels decode whole units and multiply integers, or round activations to halves for tensor
// cores. So a mistake of theirs cannot hide on both sides of the comparison.
//
// One warp makes one row of the result for TOKENS tokens. Its lanes stand side by side in a row:
// weights, their scales and the activations are each read as one or a few neighbouring sectors. A
// weight is decoded once for all tokens of a tile. Tiles of one group of rows are neighbours in the
// grid, and all but the first find the weights in L2. The order of a sum depends only on cols: by
// lane along the row, then the butterfly over lanes. So a token's results are the same bits in a
// batch of any size.
//
// Versions (one H100 80GB HBM3; data/results/cuda-perplexity-*; a yardstick is read, and not
// tuned):
//   1  64-bit addresses of x      five instructions more for every load
//   2  32-bit offsets in a tile   512 tokens of 1B: 185 to 270 ms more than the fast path
//
// Arguments: dst, w, x, w_rows, cols, n_tokens. Block: 256 threads. Grid (one-dimensional):
// ceil(w_rows / 8) * ceil(n_tokens / 8). cols is a multiple of the type's block; float types take
// any cols.
#include "weights.cuh"

#define WARPS 8
#define TOKENS 8

// BLOCK: weights of a block of the file, 1 of float types.
template <class W, int BLOCK>
DEVICE void multiply(float* dst, const u8* w, const float* x, i64 rows, i64 cols, i64 n_tokens) {
    pdl_trigger();
    const u32 tiles = u32((n_tokens + TOKENS - 1) / TOKENS);
    const i64 row = i64(blockIdx.x / tiles) * WARPS + threadIdx.x / 32;
    const i64 token = i64(blockIdx.x % tiles) * TOKENS;
    const int lane = threadIdx.x % 32;
    pdl_wait();
    if (row >= rows) return;  // whole warps

    const i64 n_blocks = rows * cols / BLOCK, line = row * cols;
    // Tokens past the end repeat the last one and are not stored. In a tile 32 bits are enough.
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

// x is not __restrict__: the compiler must read it neither through the non-coherent cache nor
// before pdl_wait, because another kernel wrote it.
#define FLOAT_PRODUCT(TYPE, BLOCK)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) mul_mat_float_##TYPE(              \
        float* dst, const u8* __restrict__ w, const float* x, i64 rows, i64 cols,               \
        i64 n_tokens) {                                                                         \
        multiply<TYPE, BLOCK>(dst, w, x, rows, cols, n_tokens);                                 \
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
