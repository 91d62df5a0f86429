// Quantised weights as halves, for the tensor cores.
//
// Columns are taken 128 at a time, in an order of their own: with 128 b + 32 t + j (unit t of four)
//
//   position 128 b + 32 i + 8 t + e   holds column
//            128 b + 32 t + 4 i + {0, 2, 1, 3, 16, 18, 17, 19}[e]
//
// So a word of a unit decodes to eight halves in 16 neighbouring bytes, and four lanes with a unit
// each write, or read, 64 neighbouring bytes. Within a word the halves of a pair are 16 bits apart:
// a mask, an addition and a multiplication make a pair of weights. Rows whose columns are no
// multiple of 128 are padded with zeros. A dot product does not depend on the order, if activations
// have it too: `half_rows_F32` and `half_rows_Q8` of dequantise.cu give it to them.
// tensor_product.cu wants the pairs of one mma together. Its activations lie, instead, in
//
//   position 128 b + 32 i + 8 p + 2 t + e   column 128 b + 32 t + 4 i + {0, 1, 16, 17}[p] + 2 e
//
// (pair p, e 0 or 1): `half_tiles_F32` and `half_tiles_Q8`.
//
// A weight is f * q + m in half precision, q exact, f and m rounded from float. It is off by less
// than 2^-10 of |f q| + |m| while f is a normal half, above 6e-5. f and m saturate.
//
// Versions (instructions for 16 x 32 weights and 16 tokens; times: tensor_product.cu):
//   masks as constants, a move before every use   58
//   masks in registers                            45: kept
#pragma once
#include "weights.cuh"

// arithmetic on pairs of halves ------------------------------------------------------------------

DEVICE u32 add2(u32 a, u32 b) {
    u32 v;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
DEVICE u32 mul2(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 v;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}
DEVICE u32 pick(u32 a, u32 b, u32 select) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(select));
    return v;
}
DEVICE float within_half(float f) { return fminf(fmaxf(f, -65504.f), 65504.f); }
DEVICE u32 halves(float low, float high) {  // saturating
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(within_half(high)), "f"(within_half(low)));
    return v;
}
DEVICE u32 both(float f) { return halves(f, f); }

// An integer of up to 10 bits below the exponent of 1024 is 1024 + itself, as a half.
#define ABOVE_1024 0x64006400u
#define MINUS_1024 0xe400e400u
#define SIXTEENTH 0x2c002c00u

// Which bits of a word are the low, and the high, nibbles of its bytes. A constant mask would go
// through a move before every use, a quarter of the decoding. The compiler does not know that
// `zero` is zero, and keeps the masks in registers.
struct Masks {
    u32 low, high;
    DEVICE explicit Masks(u32 zero = 0) : low(0x000f000fu + zero), high(0x00f000f0u + zero) {}
};

// A word of 8 nibbles as pairs (0, 4), (2, 6), (1, 5), (3, 7), less `offset` (0 or 8). The low
// nibbles are added to 1024; the high ones, worth 16 each, to 64 after a division by 16.
template <int OFFSET>
DEVICE void nibble_pairs(u32 v, const Masks& by, u32 (&q)[4]) {
    const u32 low = OFFSET ? 0xe408e408u : MINUS_1024;         // -1032, -1024
    const u32 high = OFFSET ? 0xd480d480u : 0xd400d400u;       // -72, -64
    const u32 next = v >> 8;
    q[0] = add2((v & by.low) | ABOVE_1024, low);
    q[1] = add2((next & by.low) | ABOVE_1024, low);
    q[2] = fma2((v & by.high) | ABOVE_1024, SIXTEENTH, high);
    q[3] = fma2((next & by.high) | ABOVE_1024, SIXTEENTH, high);
}

// Two words of 4 unsigned bytes as pairs (0, 2), (1, 3) of either, less 1024 + what is in `minus`.
DEVICE void byte_pairs(u32 lo, u32 hi, u32 minus, u32 (&q)[4]) {
    q[0] = add2(pick(lo, 0x64646464u, 0x4240), minus);
    q[1] = add2(pick(lo, 0x64646464u, 0x4341), minus);
    q[2] = add2(pick(hi, 0x64646464u, 0x4240), minus);
    q[3] = add2(pick(hi, 0x64646464u, 0x4341), minus);
}

// weights ----------------------------------------------------------------------------------------

// For each type: Factors of a unit, and pairs(raw, u, factors, i, h): halves 8 i .. 8 i + 7 of the
// unit in the order above. i is a constant wherever this is called.
template <class W>
struct Halves;

struct OneFactor {
    u32 f;
};
struct TwoFactors {
    u32 f, m;
};

template <>
struct Halves<Q4_0> {
    using Factors = OneFactor;
    static DEVICE Factors factors(const Q4_0::Raw& r, int) { return {pick(r.d, 0, 0x1010)}; }
    static DEVICE void pairs(const Q4_0::Raw& r, int, const Factors& by, int i, u32 (&h)[4],
                             Masks masks = Masks()) {
        nibble_pairs<8>(word(r.q, i), masks, h);
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = mul2(h[k], by.f);
    }
};

template <>
struct Halves<Q8_0> {
    using Factors = OneFactor;
    static DEVICE Factors factors(const Q8_0::Raw& r, int) { return {pick(r.d, 0, 0x1010)}; }
    static DEVICE void pairs(const Q8_0::Raw& r, int, const Factors& by, int i, u32 (&h)[4],
                             Masks = Masks()) {
        byte_pairs(word(r.a, i) ^ 0x80808080u, word(r.b, i) ^ 0x80808080u,
                   0xe480e480u, h);  // -1152
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = mul2(h[k], by.f);
    }
};

// The three bits of an E2M1 magnitude go where a half has the last two bits of its exponent and the
// first of its fraction. There they are 2^-14 times the magnitude, the subnormal one too.
template <>
struct Halves<MXFP4> {
    using Factors = OneFactor;
    static DEVICE Factors factors(const MXFP4::Raw& r, int) {
        return {both(2.f * MXFP4::scale(r.e))};
    }
    // Codes 0 .. 3 of 16 bits as (0, 2) and (1, 3): `v` has them in its bytes 1 and 3.
    static DEVICE void four(u32 v, u32 f, u32& even, u32& odd) {
        even = ((v << 1) & 0x0e000e00u) | ((v << 4) & 0x80008000u);
        odd = ((v >> 3) & 0x0e000e00u) | (v & 0x80008000u);
        even = mul2(mul2(even, 0x74007400u), f);  // 2^14: alone, f could leave the halves
        odd = mul2(mul2(odd, 0x74007400u), f);
    }
    static DEVICE void pairs(const MXFP4::Raw& r, int, const Factors& by, int i, u32 (&h)[4],
                             Masks = Masks()) {
        const u32 select = i % 2 ? 0x3424 : 0x1404;  // two bytes, each above a zero
        four(pick(word(r.q, i / 2), 0, select), by.f, h[0], h[1]);
        four(pick(word(r.q, 2 + i / 2), 0, select), by.f, h[2], h[3]);
    }
};

template <class W>
struct HalvesK45 {
    using Factors = TwoFactors;
    static DEVICE Factors factors(const typename W::Raw& r, int u) {
        typename W::Ints w;
        W::head(r.head, u, w);
        return {both(w.f), both(-w.m)};
    }
};

template <>
struct Halves<Q4_K> : HalvesK45<Q4_K> {
    static DEVICE void pairs(const Q4_K::Raw& r, int, const Factors& by, int i, u32 (&h)[4],
                             Masks masks = Masks()) {
        nibble_pairs<0>(word(r.q, i), masks, h);
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = fma2(h[k], by.f, by.m);
    }
};

template <>
struct Halves<Q5_K> : HalvesK45<Q5_K> {
    static DEVICE void pairs(const Q5_K::Raw& r, int u, const Factors& by, int i, u32 (&h)[4],
                             Masks = Masks()) {
        const Q5_K::Ints w = Q5_K::expand(r, u);
        byte_pairs(w.q[i], w.q[4 + i], MINUS_1024, h);
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = fma2(h[k], by.f, by.m);
    }
};

template <>
struct Halves<Q6_K> {
    using Factors = TwoFactors;  // of the first, the last 16
    static DEVICE Factors factors(const Q6_K::Raw& r, int u) {
        const Q6_K::Ints w = Q6_K::expand(r, u);
        return {both(w.d * w.s_lo), both(w.d * w.s_hi)};
    }
    static DEVICE void pairs(const Q6_K::Raw& r, int u, const Factors& by, int i, u32 (&h)[4],
                             Masks = Masks()) {
        const Q6_K::Ints w = Q6_K::expand(r, u);
        byte_pairs(w.q[i], w.q[4 + i], 0xe420e420u, h);  // -1056
        h[0] = mul2(h[0], by.f), h[1] = mul2(h[1], by.f);
        h[2] = mul2(h[2], by.m), h[3] = mul2(h[3], by.m);
    }
};
