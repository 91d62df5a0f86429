// Row-wise and element-wise ops on float activations.
//
//   rms_norm   one block per row: sum of squares, then scale; float4 where cols allows
//   mul, add   with a row for all, or element by element
//   swiglu     silu(gate) * up
//   quantize   to Q8_ACT, 8 lanes per block of 32 columns
//
// Blocks: rms_norm any number of whole warps up to 1024 threads, the others 256 threads.
#include "common.cuh"

// Arguments: dst, x, rows, cols, eps. Grid: rows.
extern "C" __global__ void rms_norm(float* __restrict__ dst, const float* __restrict__ x, i64 rows,
                                    i64 cols, float eps) {
    x += blockIdx.x * cols;
    dst += blockIdx.x * cols;
    const bool wide = cols % 4 == 0;
    float sum = 0;
    if (wide) {
        for (i64 c = threadIdx.x; c < cols / 4; c += blockDim.x) {
            const float4 v = reinterpret_cast<const float4*>(x)[c];
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    } else {
        for (i64 c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c] * x[c];
    }
    const float scale = 1.f / sqrtf(block_sum(sum) / float(cols) + eps);
    if (wide) {
        for (i64 c = threadIdx.x; c < cols / 4; c += blockDim.x) {
            const float4 v = reinterpret_cast<const float4*>(x)[c];
            reinterpret_cast<float4*>(dst)[c] =
                make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
        }
    } else {
        for (i64 c = threadIdx.x; c < cols; c += blockDim.x) dst[c] = x[c] * scale;
    }
}

// Element `c` of row blockIdx.x, for this thread; grid (rows, ceil(cols / 256)).
#define COLUMN (i64(blockIdx.y) * 256 + threadIdx.x)

// Arguments: dst, a, b, rows, cols, b_rows (1: one row for all, else rows).
#define BINARY(NAME, OPERATOR)                                                                   \
    extern "C" __global__ void NAME(float* __restrict__ dst, const float* __restrict__ a,        \
                                    const float* __restrict__ b, i64 rows, i64 cols,             \
                                    i64 b_rows) {                                                \
        const i64 c = COLUMN, row = blockIdx.x;                                                  \
        if (c < cols) {                                                                          \
            const float v = b[(b_rows == 1 ? 0 : row * cols) + c];                               \
            dst[row * cols + c] = a[row * cols + c] OPERATOR v;                                  \
        }                                                                                        \
    }
BINARY(mul, *)
BINARY(add, +)

// Arguments: dst, gate, up, rows, cols. Grid as above.
extern "C" __global__ void swiglu(float* __restrict__ dst, const float* __restrict__ gate,
                                  const float* __restrict__ up, i64 rows, i64 cols) {
    const i64 c = COLUMN, i = blockIdx.x * cols + c;
    if (c < cols) {
        const float g = gate[i];
        dst[i] = g / (1.f + expf(-g)) * up[i];
    }
}

// Arguments: dst, x, rows, cols (a multiple of 32). Grid (rows, ceil(cols / 1024)): a thread has 4
// columns, 8 neighbouring lanes a block of 32. Scale and quants are those of round-to-nearest
// float32 arithmetic, so that every backend quantises alike. The padding is zeroed.
extern "C" __global__ void quantize(u8* __restrict__ dst, const float* __restrict__ x, i64 rows,
                                    i64 cols) {
    const i64 c = i64(blockIdx.y) * 1024 + 4 * threadIdx.x;
    const i64 bytes = act_row_bytes(cols);
    dst += blockIdx.x * bytes;
    const float4 none = make_float4(0, 0, 0, 0);
    const float4 v =
        c < cols ? *reinterpret_cast<const float4*>(x + blockIdx.x * cols + c) : none;
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int o = 4; o; o >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    const float scale = __fdiv_rn(most, 127.f);
    int q[4] = {0, 0, 0, 0};
    if (scale > 0) {
        const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[i] = int(fminf(fmaxf(rintf(__fdiv_rn(f[i], scale)), -127.f), 127.f));
    }
    int sum = q[0] + q[1] + q[2] + q[3];  // of a half block: 4 lanes
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (c < cols) {
        *reinterpret_cast<char4*>(dst + c) = make_char4(q[0], q[1], q[2], q[3]);
        if (c % 32 == 0) *reinterpret_cast<float*>(dst + cols + c / 8) = scale;
        if (c % 16 == 0) *reinterpret_cast<short*>(dst + cols + cols / 8 + c / 8) = short(sum);
    }
    const i64 used = cols + cols / 8 + cols / 8;
    if (blockIdx.y == 0 && threadIdx.x < bytes - used) dst[used + threadIdx.x] = 0;
}
