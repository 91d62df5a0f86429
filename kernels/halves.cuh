// Quantised weights as halves, for the tensor cores.
//
// Columns are permuted. A 4-byte word i of a unit (i = 0 .. 3) decodes to the eight weights of
// columns 4 i + 0 .. 3 and 4 i + 16 .. 19 of the unit. One mask and one addition decode a pair of
// weights whose bits lie 16 bits apart in the word. So the pairs are (0, 2), (1, 3), (16, 18) and
// (17, 19), plus 4 i. The sum of a dot product does not depend on the order of the columns, if
// weights and activations have the same order. So the weights keep the order in which they are
// decoded, and dequantise.cu stores the activations in this order.
//
// There are two orders. Both permute each 128 columns: four units t = 0 .. 3, with columns 32 t ..
// 32 t + 31. A lane decodes one unit, and four neighbouring lanes have the four units. The 128
// columns fill four pieces of 32 positions, one for each word i. Piece i holds the columns below
// plus 4 i.
//
// Order of rows, for cuBLAS (`dequantise_*`, `half_rows_F32`, `half_rows_Q8`). The eight halves of
// a lane are 16 neighbouring bytes, so four lanes write 64 neighbouring bytes:
//
//   position   0                  8                    16                   24
//   lane       0                  1                    2                    3
//   column     0 2 1 3            32 34 33 35          64 66 65 67          96 98 97 99
//              16 18 17 19        48 50 49 51          80 82 81 83          112 114 113 115
//
// Order of tiles, for tensor_product.cu (`half_tiles_F32`, `half_tiles_Q8`). A piece serves two
// mma.m16n8k16, and an mma takes two pairs of each lane. The figure has the 16 x 32 weights of a
// piece. Lane 4 g + t has one unit of row g and one of row g + 8 (tensor_core.cuh has the layout of
// a[]):
//
//                   first mma                             second mma
//   position        0     2     4     6                   16    18    20     22
//   lane (row 0)    0     1     2     3                   0     1     2      3
//   column          0 2   32 34 64 66 96 98     a[0]      16 18 48 50 80 82  112 114
//   position        8     10    12    14                  24    26    28     30
//   column          1 3   33 35 65 67 97 99     a[2]      17 19 49 51 81 83  113 115
//   rows 1 .. 7     the same columns, lanes 4 g + t
//   rows 8 .. 15    the same columns, the same lanes    a[1] and a[3]
//
// The activations of a token, a column of the mma's b, have the same columns at these positions.
// Rows whose columns are no multiple of 128 are padded with zeros.
//
// A weight is f * q + m in half precision: q is exact, f and m are rounded from float and saturate.
// The error is less than 2^-10 of |f q| + |m| while f is a normal half, above 6e-5.
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
DEVICE float within_half(float f) { return fminf(fmaxf(f, -65504.f), 65504.f); }
DEVICE u32 halves(float low, float high) {  // saturating
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(within_half(high)), "f"(within_half(low)));
    return v;
}
DEVICE u32 both(float f) { return halves(f, f); }

// The bits of an integer n of up to 10 bits, below the exponent of 1024, are the half 1024 + n.
#define ABOVE_1024 0x64006400u
#define MINUS_1024 0xe400e400u
#define SIXTEENTH 0x2c002c00u

// Masks of the low and of the high nibbles of bytes 0 and 2. A constant mask would need a move
// before every use, a quarter of the decoding. The compiler does not know that `zero` is zero, and
// so keeps the masks in registers.
struct Masks {
    u32 low, high;
    DEVICE explicit Masks(u32 zero = 0) : low(0x000f000fu + zero), high(0x00f000f0u + zero) {}
};

// A word of 8 nibbles, counted from the low bits, as pairs (0, 4), (2, 6), (1, 5), (3, 7), each
// less OFFSET (0 or 8). A low nibble n becomes 1024 + n. A high nibble n becomes 1024 + 16 n, and a
// division by 16 makes it 64 + n. The addition then subtracts 1024 or 64, and OFFSET.
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

// Two words of 4 unsigned bytes as the pairs (0, 2), (1, 3) of `lo`, then of `hi`. A byte n becomes
// 1024 + n, to which `minus` is added.
DEVICE void byte_pairs(u32 lo, u32 hi, u32 minus, u32 (&q)[4]) {
    q[0] = add2(permute(lo, 0x64646464u, 0x4240), minus);
    q[1] = add2(permute(lo, 0x64646464u, 0x4341), minus);
    q[2] = add2(permute(hi, 0x64646464u, 0x4240), minus);
    q[3] = add2(permute(hi, 0x64646464u, 0x4341), minus);
}

// weights ----------------------------------------------------------------------------------------

// For each type: the Factors of a unit, and pairs(raw, u, factors, i, h), which decodes word i of
// the unit to the pairs above. Every caller has a constant i.
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
    static DEVICE Factors factors(const Q4_0::Raw& r, int) { return {permute(r.d, 0, 0x1010)}; }
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
    static DEVICE Factors factors(const Q8_0::Raw& r, int) { return {permute(r.d, 0, 0x1010)}; }
    static DEVICE void pairs(const Q8_0::Raw& r, int, const Factors& by, int i, u32 (&h)[4],
                             Masks = Masks()) {
        byte_pairs(word(r.a, i) ^ 0x80808080u, word(r.b, i) ^ 0x80808080u,
                   0xe480e480u, h);  // -1152
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = mul2(h[k], by.f);
    }
};

// The three bits of an E2M1 magnitude are put where a half has the last two bits of its exponent
// and the first bit of its fraction. There they are 2^-14 times the magnitude, also for the
// subnormal magnitude.
template <>
struct Halves<MXFP4> {
    using Factors = OneFactor;
    static DEVICE Factors factors(const MXFP4::Raw& r, int) {
        return {both(2.f * MXFP4::scale(r.e))};
    }
    // The four codes of 16 bits as pairs (0, 2) and (1, 3). They lie in bytes 1 and 3 of `v`.
    static DEVICE void four(u32 v, u32 f, u32& even, u32& odd) {
        even = ((v << 1) & 0x0e000e00u) | ((v << 4) & 0x80008000u);
        odd = ((v >> 3) & 0x0e000e00u) | (v & 0x80008000u);
        even = mul2(mul2(even, 0x74007400u), f);  // 2^14 first: 2^14 f could overflow
        odd = mul2(mul2(odd, 0x74007400u), f);
    }
    static DEVICE void pairs(const MXFP4::Raw& r, int, const Factors& by, int i, u32 (&h)[4],
                             Masks = Masks()) {
        const u32 select = i % 2 ? 0x3424 : 0x1404;  // puts two bytes above a zero each
        four(permute(word(r.q, i / 2), 0, select), by.f, h[0], h[1]);
        four(permute(word(r.q, 2 + i / 2), 0, select), by.f, h[2], h[3]);
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
    using Factors = TwoFactors;  // f: of the first 16 weights; m: of the last 16
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
