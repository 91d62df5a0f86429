// norm_row: RMS norm, alone or with the ops around it: the residual add before it, the weight and
// the quantisation after it. Every part is optional (address 0, or normalise 0). Each part rounds
// to float32 as a separate launch does, so any choice of parts gives the same bits.
//
//   sum = a + b                                    stored in dst_sum
//   y   = sum / sqrt(mean(sum^2) + eps) * weight   stored in dst, and as Q8_ACT in dst_q8
//
// One block makes one row. A row of up to 16,384 columns, a multiple of 4, is read once: it stays
// in registers between the sum of squares and the scaling.
//
// Arguments: dst_sum, dst, dst_q8, a, b, weight, rows, cols, eps, normalise. Grid: rows; block:
// whole warps, at most 1,024 threads.
//
// Versions (us of a token of llama-3-8b Q4_0; data/results/tuning/norms-1.txt; halves: product.cu):
//   1  the row read twice             before commit 43147c1, not measured by itself
//   2  at most 1024 threads a block   2035: kept
//   2  at most 512, 256               2181, 2254: product.cu says why
#include "quantise.cuh"

#define KEPT 4  // most float4 of a row that a thread keeps

DEVICE float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
DEVICE float square_sum(float4 v, float sum) {
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    return __fmaf_rn(v.w, v.w, sum);
}

extern "C" __global__ void __launch_bounds__(1024)
    norm_row(float* dst_sum, float* dst, u8* dst_q8, const float* a, const float* b,
             const float* __restrict__ weight, i64 rows, i64 cols, float eps, i64 normalise) {
    pdl_trigger();
    const i64 row = blockIdx.x;
    const int n = int(cols / 4), threads = blockDim.x;
    a += row * cols;
    if (b) b += row * cols;
    if (dst_sum) dst_sum += row * cols;
    if (dst) dst += row * cols;
    if (dst_q8) dst_q8 += row * act_row_bytes(cols);

    if (cols % 4 || n > KEPT * threads) {  // element by element
        pdl_wait();
        float sum = 0;
        for (i64 c = threadIdx.x; c < cols; c += threads) {
            const float v = b ? a[c] + b[c] : a[c];
            if (dst_sum) dst_sum[c] = v;
            sum = __fmaf_rn(v, v, sum);
        }
        const float scale = normalise ? 1.f / sqrtf(block_sum(sum) / float(cols) + eps) : 1.f;
        for (i64 base = 0; base < cols; base += threads) {
            const i64 c = base + threadIdx.x;
            float v = 0;
            if (c < cols) {
                v = __fmul_rn(b ? a[c] + b[c] : a[c], scale);
                if (weight) v = __fmul_rn(v, __ldg(weight + c));
                if (dst) dst[c] = v;
            }
            // With dst_q8 cols is a multiple of 32, so a whole warp is inside the row or outside.
            if (dst_q8 && c < cols) quantise32(dst_q8, cols, c - threadIdx.x % 32, v);
        }
        if (dst_q8) zero_padding(dst_q8, cols, threadIdx.x);
        return;
    }

    float4 kept[KEPT], factor[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * threads;
        if (weight && i < n) factor[k] = __ldg(reinterpret_cast<const float4*>(weight) + i);
    }
    pdl_wait();
    float sum = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        const int i = threadIdx.x + k * threads;
        kept[k] = make_float4(0, 0, 0, 0);
        if (i >= n) continue;
        kept[k] = reinterpret_cast<const float4*>(a)[i];
        if (b) kept[k] = add4(kept[k], reinterpret_cast<const float4*>(b)[i]);
        if (dst_sum) reinterpret_cast<float4*>(dst_sum)[i] = kept[k];
        sum = square_sum(kept[k], sum);
    }
    const float scale = normalise ? 1.f / sqrtf(block_sum(sum) / float(cols) + eps) : 1.f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        if (k * threads >= n) break;
        const int i = threadIdx.x + k * threads;
        float4 v = kept[k];
        v = make_float4(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale),
                        __fmul_rn(v.w, scale));
        if (weight && i < n)
            v = make_float4(__fmul_rn(v.x, factor[k].x), __fmul_rn(v.y, factor[k].y),
                            __fmul_rn(v.z, factor[k].z), __fmul_rn(v.w, factor[k].w));
        if (dst && i < n) reinterpret_cast<float4*>(dst)[i] = v;
        if (dst_q8) quantise4(dst_q8, cols, 4 * i64(i), v, i < n);
    }
    if (dst_q8) zero_padding(dst_q8, cols, threadIdx.x);
}
