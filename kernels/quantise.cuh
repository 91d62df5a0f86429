// The quantisation of activations to 8 bits. Every kernel that quantises uses it, and so gives the
// same bytes as `quantize`.
//
// Both functions are in use (us of the launch of gate + up, 128 tokens, tensor_product.cu; not
// compared in other kernels):
//   quantise32   a warp has 32 columns       86.7
//   quantise4    a thread has four columns   69.3
#pragma once
#include "common.cuh"

// Stores four columns c .. c + 3 (c a multiple of 4) of a row of Q8_ACT that begins at `row`. A
// full warp calls it. Eight lanes share a block of 32 columns: lane i of them has columns 4 i .. 4
// i + 3. Lanes past the row's end pass `there` false, and store nothing. Scale and quants come from
// float32 arithmetic with rounding to nearest, as on every backend.
DEVICE void quantise4(u8* row, i64 cols, i64 c, float4 v, bool there) {
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
    int sum = q[0] + q[1] + q[2] + q[3];  // then of a half block, 4 lanes
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (there) {
        *reinterpret_cast<char4*>(row + c) = make_char4(q[0], q[1], q[2], q[3]);
        if (c % 32 == 0) *reinterpret_cast<float*>(row + cols + c / 8) = scale;
        if (c % 16 == 0) *reinterpret_cast<short*>(row + cols + cols / 8 + c / 8) = short(sum);
    }
}

// As quantise4, with one column a lane: a warp has the 32 columns c0 .. c0 + 31 of a block.
DEVICE void quantise32(u8* row, i64 cols, i64 c0, float v) {
    const int lane = threadIdx.x % 32;
    const float scale = __fdiv_rn(warp_max(fabsf(v)), 127.f);
    int q = 0;
    if (scale > 0) q = int(fminf(fmaxf(rintf(__fdiv_rn(v, scale)), -127.f), 127.f));
    int sum = q;
#pragma unroll
    for (int o = 8; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    row[c0 + lane] = u8(i8(q));
    if (lane == 0) *reinterpret_cast<float*>(row + cols + c0 / 8) = scale;
    if (lane % 16 == 0)
        *reinterpret_cast<short*>(row + cols + cols / 8 + (c0 + lane) / 8) = short(sum);
}

// Zeroes the padding of a row. At least 64 consecutive threads of a block call it; i: the thread.
DEVICE void zero_padding(u8* row, i64 cols, i64 i) {
    const i64 used = cols + cols / 4;
    if (i < act_row_bytes(cols) - used) row[used + i] = 0;
}
