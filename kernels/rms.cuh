// The RMS norm in two halves. The kernel that makes a row sums its squares; the kernel that uses
// the row computes the scale from these sums.
//
// One version, measured as part of product_norm (product.cu).
#pragma once
#include "common.cuh"

#define SQUARES 32        // columns of a sum of squares
#define MOST_SQUARES 512  // the most sums of a row

// The sum of squares of a warp's 32 values, in every lane.
DEVICE float square_sum32(float v) { return warp_sum(__fmul_rn(v, v)); }

// 1 / sqrt(mean of squares + eps) of a row of `cols` columns, from its n sums. A whole warp calls
// it. Lane l adds the sums l, l + 32, ..; then a butterfly adds the lanes.
DEVICE float rms_scale_of(const float* squares, int n, i64 cols, float eps) {
    float sum = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) sum += squares[i];
    return 1.f / sqrtf(warp_sum(sum) / float(cols) + eps);
}
