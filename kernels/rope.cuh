// The rotary position embedding of one pair. All kernels that rotate use it, so they give the same
// bits.
//
// The angle is formed in double and reduced to one revolution: at position 100,000 a float angle
// would be wrong in the third digit. The angle counts revolutions, not radians, so the reduction is
// a subtraction. sincospif then takes a float within -1 .. 1, which needs no further reduction.
// sincosf would need a long reduction, with an array in local memory.
//
// Versions (not measured by themselves; rope_store.cu has the times of the whole launch):
//   1  radians, pow, sincosf       before commit 43147c1
//   2  revolutions, sincospif      kept
#pragma once
#include "common.cuh"

// Revolutions per position of pair i: freq_scale * theta_base^(-2 i / n_rot) / (2 pi) / factor. It
// reads only freq_factors (or 0), a weight, so a kernel calls it before pdl_wait.
DEVICE double rope_revolutions(int i, i64 n_rot, float theta_base, float freq_scale,
                         const float* freq_factors) {
    const double one_turn = 6.283185307179586476925286766559;
    const double power = log2(double(theta_base)) * (-2.0 * i / double(n_rot));
    const double revolutions = exp2(power) * double(freq_scale) / one_turn;
    return freq_factors ? revolutions / double(__ldg(freq_factors + i)) : revolutions;
}

struct Rotation {
    float sine, cosine;
    DEVICE Rotation(float s, float c) : sine(s), cosine(c) {}
    DEVICE Rotation(int position, double revolutions) {
        const double angle = __dmul_rn(double(position), revolutions);  // not to be fused below
        sincospif(float(2.0 * (angle - rint(angle))), &sine, &cosine);
    }
    DEVICE float first(float u, float v) const { return fmaf(u, cosine, -__fmul_rn(v, sine)); }
    DEVICE float second(float u, float v) const { return fmaf(u, sine, __fmul_rn(v, cosine)); }
};
