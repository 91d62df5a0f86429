// Element-wise ops on float activations.
//
//   mul, add         with one row for all rows, or element by element
//   swiglu           silu(gate) * up
//   quantize         to Q8_ACT; 8 lanes have a block of 32 columns
//   swiglu_quantize  swiglu and quantize, with the product in registers
//   square_sums      the sum of squares of each 32 columns
//   rms_scale        a row divided by the root of the mean of its squares, given these sums
//
// Blocks of 256 threads.
//
// No pointer is __restrict__. Otherwise the compiler could take the data for constant, and move a
// load above pdl_wait.
//
// One version, not tuned, because in a fused step these ops are part of products and norms. Steps
// with a launch for each op: data/results/cuda-decode-*-unfused.
#include "quantise.cuh"
#include "rms.cuh"

// This thread's column of row blockIdx.x. Grid: (rows, ceil(cols / 256)).
#define COLUMN (i64(blockIdx.y) * 256 + threadIdx.x)

// Arguments: dst, a, b, rows, cols, b_rows (1: one row for all, else rows).
#define BINARY(NAME, OPERATOR)                                                                   \
    extern "C" __global__ void NAME(float* dst, const float* a,        \
                                    const float* b, i64 rows, i64 cols,             \
                                    i64 b_rows) {                                                \
        pdl_trigger();                                                                           \
        pdl_wait();                                                                              \
        const i64 c = COLUMN, row = blockIdx.x;                                                  \
        if (c < cols) {                                                                          \
            const float v = b[(b_rows == 1 ? 0 : row * cols) + c];                               \
            dst[row * cols + c] = a[row * cols + c] OPERATOR v;                                  \
        }                                                                                        \
    }
BINARY(mul, *)
BINARY(add, +)

// Arguments: dst, gate, up, rows, cols. Grid as above.
extern "C" __global__ void swiglu(float* dst, const float* gate,
                                  const float* up, i64 rows, i64 cols) {
    pdl_trigger();
    pdl_wait();
    const i64 c = COLUMN, i = blockIdx.x * cols + c;
    if (c < cols) dst[i] = silu_times(gate[i], up[i]);
}

// For the next two kernels cols is a multiple of 32. Grid: (rows, ceil(cols / 1024)). A thread has
// 4 columns, and 8 neighbouring lanes have a block of 32.

// Arguments: dst, x, rows, cols.
extern "C" __global__ void quantize(u8* dst, const float* x, i64 rows,
                                    i64 cols) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 1024 + 4 * threadIdx.x;
    u8* row = dst + blockIdx.x * act_row_bytes(cols);
    float4 v = make_float4(0, 0, 0, 0);
    if (c < cols) v = *reinterpret_cast<const float4*>(x + blockIdx.x * cols + c);
    quantise4(row, cols, c, v, c < cols);
    if (blockIdx.y == 0) zero_padding(row, cols, threadIdx.x);
}

// Arguments: dst, gate, up, rows, cols.
extern "C" __global__ void swiglu_quantize(u8* dst, const float* gate,
                                           const float* up, i64 rows, i64 cols) {
    pdl_trigger();
    pdl_wait();
    const i64 c = i64(blockIdx.y) * 1024 + 4 * threadIdx.x, i = blockIdx.x * cols + c;
    u8* row = dst + blockIdx.x * act_row_bytes(cols);
    float4 v = make_float4(0, 0, 0, 0);
    if (c < cols) {
        const float4 g = *reinterpret_cast<const float4*>(gate + i);
        const float4 u = *reinterpret_cast<const float4*>(up + i);
        v = make_float4(silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z),
                        silu_times(g.w, u.w));
    }
    quantise4(row, cols, c, v, c < cols);
    if (blockIdx.y == 0) zero_padding(row, cols, threadIdx.x);
}

// Arguments: dst (rows, cols / 32), x, rows, cols (a multiple of 32). Grid (rows,
// ceil(cols / 256)).
extern "C" __global__ void square_sums(float* dst, const float* x, i64 rows, i64 cols) {
    pdl_trigger();
    pdl_wait();
    const i64 c = COLUMN, row = blockIdx.x;
    if (c >= cols) return;  // whole warps
    const float sum = square_sum32(x[row * cols + c]);
    if (c % SQUARES == 0) dst[row * (cols / SQUARES) + c / SQUARES] = sum;
}

// Arguments: dst, x, squares (rows, n), rows, cols, n, normed (the columns of which the sums are),
// eps. Grid (rows, ceil(cols / 256)).
extern "C" __global__ void rms_scale(float* dst, const float* x, const float* squares, i64 rows,
                                     i64 cols, i64 n, i64 normed, float eps) {
    pdl_trigger();
    pdl_wait();
    const i64 c = COLUMN, row = blockIdx.x;
    const float scale = rms_scale_of(squares + row * n, int(n), normed, eps);
    if (c < cols) dst[row * cols + c] = __fmul_rn(x[row * cols + c], scale);
}
