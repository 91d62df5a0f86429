// The nine weight types: the layout of their bytes, and how they are decoded.
//
// Values are those of ggml (ggml-common.h names the blocks). kernels/repack.cu makes the layout
// when a weight is loaded. F32, F16 and BF16 stay as in the file. Blocks of the quantised types
// have odd sizes, so they are taken apart into planes. A plane has one field of every block, in
// file order:
//
//   Q8_0    32 B quants | 2 B scale                              per 32 weights
//   Q4_0    16 B quants | 2 B scale
//   MXFP4   16 B quants | 1 B exponent
//   Q4_K   128 B quants | 16 B head                              per 256 weights
//   Q5_K   128 B quants | 32 B fifth bits | 16 B head
//   Q6_K   128 B low 4 bits | 64 B high 2 bits | 16 B scales | 2 B scale
//
// So neighbouring lanes of a warp read neighbouring quants, 16 bytes at a time. The planes have as
// many bytes as the blocks. A *unit* is 32 neighbouring weights. Every plane has the units of a
// block in order. A unit takes one 16-byte load (Q8_0: two), and a few bytes of the other planes.
//
//   Q4_0, Q4_K, Q5_K, Q6_K   byte j of the 16: weight j low, weight j + 16 high
//   MXFP4                    byte j: weight 2 j low, weight 2 j + 1 high
//   fifth bits (u32)         bit 8 b + i: weight 4 i + b; bit 8 b + 4 + i: weight 16 + 4 i + b
//   high bits (2 x u32)      bits 8 b + 2 i and + 1 of word h: weight 16 h + 4 i + b
//   head (4 x u32)           fp16 d and dmin | low 4 bits of 8 scales | low 4 bits of 8 minima |
//                            high 2 bits: of the scales in the low half, of the minima above
//   scales of Q6_K           the two int8 of the unit's 16 weights each
//
// Every quantised type has these members. `n` is the number of blocks of the whole tensor, which
// decides where the later planes begin.
//   value(w, n, i)         weight number i of the tensor as a float, in readable code, for get_rows
//   Planes, planes(w, n)   the addresses of the planes
//   Raw, fetch(p, u, v)    the bytes of unit u + v of the tensor. v is a multiple of 8; a constant
//                          v becomes an offset in the instruction
//   Ints, expand(raw, u)   the unit as int8 in eight 32-bit words, with its scales
//   add(ints, acts, sum)   sum + the product with 32 columns of activations. Its rounding is fixed,
//                          so a product has the same result in every kernel
//   load, decode           the unit in the form of the slow twin mul_mat: 16 weights `lo` and 16
//                          weights `hi`, each half with a factor f and an addend m. A weight is
//                          f * q + m
//
// Versions of Q4_K and Q5_K (counted, not timed by themselves; the products: multiply.cuh):
//   1  nibbles 32 or 64 weights apart, as in the file   a unit needs two scales and two minima
//   2  nibbles 16 weights apart                         a unit needs one of each: kept
#pragma once
#include "common.cuh"

struct Unit {
    int lo[4], hi[4];
    float f_lo, f_hi, m_lo, m_hi;
};

// 32 quantised activations: quants, scale, and the sum of the quants of each half.
struct Acts {
    int4 lo, hi;
    float scale;
    short2 sums;
};

// Four 4-bit numbers: the low, or the high, halves of four bytes.
DEVICE u32 low_nibbles(u32 v) { return v & 0x0f0f0f0fu; }
DEVICE u32 high_nibbles(u32 v) { return (v >> 4) & 0x0f0f0f0fu; }
// Four bytes of the eight of a and b. Each of the four nibbles of select's low 16 bits chooses one.
DEVICE u32 permute(u32 a, u32 b, u32 select) {
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(select));
    return v;
}
DEVICE u32 word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

DEVICE int dot_half(const int* q, int4 x, int sum) {
    sum = __dp4a(q[0], x.x, sum);
    sum = __dp4a(q[1], x.y, sum);
    sum = __dp4a(q[2], x.z, sum);
    return __dp4a(q[3], x.w, sum);
}
DEVICE int dot_unit(const int* q, const Acts& x, int sum) {
    return dot_half(q + 4, x.hi, dot_half(q, x.lo, sum));
}

// float types -------------------------------------------------------------------------------------

struct F32 {
    static constexpr int bytes = 4;
    struct Raw {
        uint4 a, b;
    };
    static DEVICE float value(const u8* w, i64, i64 i) {
        return __ldg(reinterpret_cast<const float*>(w) + i);
    }
    static DEVICE Raw load8(const u8* p) { return {stream16(p), stream16(p + 16)}; }
    static DEVICE void decode8(const Raw& r, float* f) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[i] = __uint_as_float(word(r.a, i));
            f[4 + i] = __uint_as_float(word(r.b, i));
        }
    }
};

struct F16 {
    static constexpr int bytes = 2;
    using Raw = uint4;
    static DEVICE float value(const u8* w, i64, i64 i) {
        return half_to_float(load_u16(w + 2 * i));
    }
    static DEVICE Raw load8(const u8* p) { return stream16(p); }
    static DEVICE void decode8(const Raw& r, float* f) { halves_to_floats(r, f); }
};

struct BF16 {
    static constexpr int bytes = 2;
    using Raw = uint4;
    static DEVICE float value(const u8* w, i64, i64 i) {
        return bfloat_to_float(load_u16(w + 2 * i));
    }
    static DEVICE Raw load8(const u8* p) { return stream16(p); }
    static DEVICE void decode8(const Raw& r, float* f) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[2 * i] = __uint_as_float(word(r, i) << 16);
            f[2 * i + 1] = __uint_as_float(word(r, i) & 0xffff0000u);
        }
    }
};

// quantised types --------------------------------------------------------------------------------

// The base of all quantised types: a unit, by its number in the tensor, in the form of mul_mat.
template <class W, int BLOCK>
struct Quantised {
    static constexpr int block = BLOCK;
    static DEVICE auto load(const u8* w, i64 n, i64 u) {
        return W::fetch(W::planes(w, n), int(u), 0);
    }
    template <class Raw>
    static DEVICE Unit decode(const Raw& raw, int u) {
        const auto ints = W::expand(raw, u);
        Unit unit;
#pragma unroll
        for (int i = 0; i < 4; i++) unit.lo[i] = ints.q[i], unit.hi[i] = ints.q[4 + i];
        W::factors(ints, unit);
        return unit;
    }
};

// Units with one scale and no minimum. A weight is (q + OFFSET) * scale.
template <class W, int OFFSET>
struct Scaled : Quantised<W, 32> {
    static constexpr bool one_block = true, has_min = OFFSET != 0;
    struct Planes {
        const u8 *q, *s;
    };
    struct Ints {
        int q[8];
        float d;
    };
    static DEVICE void factors(const Ints& w, Unit& unit) {
        unit.f_lo = w.d, unit.m_lo = OFFSET * w.d;
    }
    static DEVICE float add(const Ints& w, const Acts& x, float sum) {
        const int start = OFFSET ? OFFSET * (x.sums.x + x.sums.y) : 0;
        return fmaf(__fmul_rn(w.d, x.scale), float(dot_unit(w.q, x, start)), sum);
    }
};

struct Q8_0 : Scaled<Q8_0, 0> {
    struct Raw {
        uint4 a, b;
        u16 d;
    };
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        return half_to_float(load_u16(w + n * 32 + i / 32 * 2)) * i8(__ldg(w + i));
    }
    static DEVICE Planes planes(const u8* w, i64 n) { return {w, w + n * 32}; }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        const u8* q = p.q + i64(u + v) * 32;
        return {stream16(q), stream16(q + 16), load_u16(p.s + i64(u + v) * 2)};
    }
    static DEVICE Ints expand(const Raw& r, int) {
        Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) w.q[i] = word(r.a, i), w.q[4 + i] = word(r.b, i);
        w.d = half_to_float(r.d);
        return w;
    }
};

struct Q4_0 : Scaled<Q4_0, -8> {  // (q - 8) * d
    struct Raw {
        uint4 q;
        u16 d;
    };
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        const i64 b = i / 32;
        const int j = i % 32;
        const int q = (__ldg(w + b * 16 + j % 16) >> (j / 16 * 4)) & 15;
        return half_to_float(load_u16(w + n * 16 + b * 2)) * (q - 8);
    }
    static DEVICE Planes planes(const u8* w, i64 n) { return {w, w + n * 16}; }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return {stream16(p.q + i64(u + v) * 16), load_u16(p.s + i64(u + v) * 2)};
    }
    static DEVICE Ints expand(const Raw& r, int) {
        Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = low_nibbles(word(r.q, i));
            w.q[4 + i] = high_nibbles(word(r.q, i));
        }
        w.d = half_to_float(r.d);
        return w;
    }
};

struct MXFP4 : Scaled<MXFP4, 0> {  // quants are twice the E2M1 values; the scale is 2^(e - 128)
    struct Raw {
        uint4 q;
        u8 e;
    };
    static DEVICE float scale(u8 e) {  // 2^(e - 128); the two smallest are subnormal
        return __uint_as_float(e < 2 ? 0x00200000u << e : u32(e - 1) << 23);
    }
    // The low four of eight E2M1 codes, as int8. One byte permutation looks the magnitudes up among
    // 0 1 2 3 4 6 8 12, a second looks them up among the negatives, and a third chooses by the sign
    // bits. `magnitudes` are the codes without sign bits. `choice` is 0x3210 with the sign bits
    // shifted right by one.
    static DEVICE int four(u32 magnitudes, u32 choice) {
        const u32 plus = permute(0x03020100u, 0x0c080604u, magnitudes);
        const u32 minus = permute(0xfdfeff00u, 0xf4f8fafcu, magnitudes);
        return permute(plus, minus, choice);
    }
    static DEVICE void eight(u32 codes, int* q) {
        const u32 magnitudes = codes & 0x77777777u;
        const u32 choice = ((codes >> 1) & 0x44444444u) | 0x32103210u;
        q[0] = four(magnitudes, choice);
        q[1] = four(magnitudes >> 16, choice >> 16);
    }
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        int q[2];
        eight(__ldg(w + i / 2) >> (i % 2 * 4), q);
        return scale(__ldg(w + n * 16 + i / 32)) * i8(q[0]);
    }
    static DEVICE Planes planes(const u8* w, i64 n) { return {w, w + n * 16}; }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return {stream16(p.q + i64(u + v) * 16), __ldg(p.s + (u + v))};
    }
    static DEVICE Ints expand(const Raw& r, int) {
        Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) eight(word(r.q, i), w.q + 2 * i);
        w.d = scale(r.e);
        return w;
    }
};

// Q4_K and Q5_K: d * scale * q - dmin * minimum. Each unit has a 6-bit scale and a 6-bit minimum.
template <class W>
struct K45 : Quantised<W, 256> {
    static constexpr bool one_block = true, has_min = true;
    struct Ints {
        int q[8];
        float f, m;
    };
    static DEVICE void head(uint4 h, int u, Ints& w) {
        const u32 s = h.y >> 4 * (u & 7), m = h.z >> 4 * (u & 7), top = h.w >> 2 * (u & 7);
        w.f = half_to_float(u16(h.x)) * float((s & 15) | (top & 3) << 4);
        w.m = half_to_float(u16(h.x >> 16)) * float((m & 15) | ((top >> 12) & 48));
    }
    static DEVICE void factors(const Ints& w, Unit& unit) { unit.f_lo = w.f, unit.m_lo = -w.m; }
    static DEVICE float add(const Ints& w, const Acts& x, float sum) {
        const float minima = __fmul_rn(w.m, float(x.sums.x + x.sums.y));
        return fmaf(x.scale, fmaf(w.f, float(dot_unit(w.q, x, 0)), -minima), sum);
    }
    static DEVICE float affine(const u8* h, i64 i, int q) {  // weight i: its head, its quant
        Ints w;
        head(__ldg(reinterpret_cast<const uint4*>(h)), i / 32 % 8, w);
        return __fsub_rn(__fmul_rn(w.f, float(q)), w.m);
    }
};

struct Q4_K : K45<Q4_K> {
    struct Planes {
        const u8 *q, *head;
    };
    struct Raw {
        uint4 q, head;
    };
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        const int q = __ldg(w + i / 32 * 16 + i % 16) >> (i / 16 % 2 * 4);
        return affine(w + n * 128 + i / 256 * 16, i, q & 15);
    }
    static DEVICE Planes planes(const u8* w, i64 n) { return {w, w + n * 128}; }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return {stream16(p.q + i64(u + v) * 16),
                __ldg(reinterpret_cast<const uint4*>(p.head + i64((u >> 3) + v / 8) * 16))};
    }
    static DEVICE Ints expand(const Raw& r, int u) {
        Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = low_nibbles(word(r.q, i));
            w.q[4 + i] = high_nibbles(word(r.q, i));
        }
        head(r.head, u, w);
        return w;
    }
};

struct Q5_K : K45<Q5_K> {
    struct Planes {
        const u8 *q, *high, *head;
    };
    struct Raw {
        uint4 q, head;
        u32 high;
    };
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        const int j = i % 16, half = i / 16 % 2;
        const u32 high = __ldg(reinterpret_cast<const u32*>(w + n * 128) + i / 32);
        const int q = (__ldg(w + i / 32 * 16 + j) >> (4 * half)) & 15;
        const int fifth = (high >> (j % 4 * 8 + 4 * half + j / 4)) & 1;
        return affine(w + n * 160 + i / 256 * 16, i, q | fifth << 4);
    }
    static DEVICE Planes planes(const u8* w, i64 n) { return {w, w + n * 128, w + n * 160}; }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return {stream16(p.q + i64(u + v) * 16),
                __ldg(reinterpret_cast<const uint4*>(p.head + i64((u >> 3) + v / 8) * 16)),
                __ldg(reinterpret_cast<const u32*>(p.high + i64(u + v) * 4))};
    }
    static DEVICE Ints expand(const Raw& r, int u) {
        Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = low_nibbles(word(r.q, i)) | (r.high << (4 - i) & 0x10101010u);
            w.q[4 + i] = high_nibbles(word(r.q, i)) | (r.high >> i & 0x10101010u);
        }
        head(r.head, u, w);
        return w;
    }
};

struct Q6_K : Quantised<Q6_K, 256> {  // (q - 32) * scale * d, with an int8 scale for 16 weights
    static constexpr bool one_block = false, has_min = true;
    struct Planes {
        const u8 *q, *high, *scales, *d;
    };
    struct Raw {
        uint4 low;
        uint2 high;
        u16 scales, d;
    };
    struct Ints {
        int q[8], s_lo, s_hi;
        float d;
    };
    static DEVICE int lo_at(int g) { return 32 * g; }
    static DEVICE int hi_at(int g) { return 32 * g + 16; }
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        const int j = i % 16, half = i / 16 % 2;
        const int low = (__ldg(w + i / 32 * 16 + j) >> (4 * half)) & 15;
        const u32 high = __ldg(reinterpret_cast<const u32*>(w + n * 128) + i / 16);
        const int top = (high >> (j % 4 * 8 + j / 4 * 2)) & 3;
        const i8 s = i8(__ldg(w + n * 192 + i / 16));
        return half_to_float(load_u16(w + n * 208 + i / 256 * 2)) * s * ((low | top << 4) - 32);
    }
    static DEVICE Planes planes(const u8* w, i64 n) {
        return {w, w + n * 128, w + n * 192, w + n * 208};
    }
    static DEVICE Raw fetch(const Planes& p, int u, int v) {
        return {stream16(p.q + i64(u + v) * 16),
                __ldg(reinterpret_cast<const uint2*>(p.high + i64(u + v) * 8)),
                load_u16(p.scales + i64(u + v) * 2), load_u16(p.d + i64((u >> 3) + v / 8) * 2)};
    }
    static DEVICE u32 above(u32 high, int i) {  // bits 4 and 5 of each byte of word i
        return (i < 2 ? high << (4 - 2 * i) : high >> (2 * i - 4)) & 0x30303030u;
    }
    static DEVICE Ints expand(const Raw& r, int) {
        Ints w;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.q[i] = low_nibbles(word(r.low, i)) | above(r.high.x, i);
            w.q[4 + i] = high_nibbles(word(r.low, i)) | above(r.high.y, i);
        }
        w.s_lo = i8(r.scales), w.s_hi = i8(r.scales >> 8);
        w.d = half_to_float(r.d);
        return w;
    }
    static DEVICE void factors(const Ints& w, Unit& unit) {
        unit.f_lo = w.d * w.s_lo, unit.m_lo = -32.f * unit.f_lo;
        unit.f_hi = w.d * w.s_hi, unit.m_hi = -32.f * unit.f_hi;
    }
    static DEVICE float add(const Ints& w, const Acts& x, float sum) {  // below 2^25
        const int lo = dot_half(w.q, x.lo, -32 * x.sums.x);
        const int hi = dot_half(w.q + 4, x.hi, -32 * x.sums.y);
        return fmaf(__fmul_rn(w.d, x.scale), float(lo * w.s_lo + hi * w.s_hi), sum);
    }
};
