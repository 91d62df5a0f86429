// The nine weight types: where their bytes lie, and how they are decoded.
//
// Values are ggml's (ggml-common.h names the blocks). Bytes lie as the backend's load_weight leaves
// them. F32, F16, BF16, Q4_K and Q5_K are as in the file: their rows or blocks are multiples of 16
// bytes (float rows that are not take scalar loads). Q8_0, Q4_0, MXFP4 and Q6_K, whose blocks have
// odd sizes, are split into planes, each holding one field of every block in file order:
//
//   Q8_0    32 B quants | 2 B scale                       per 32 weights
//   Q4_0    16 B quants | 2 B scale
//   MXFP4   16 B quants | 1 B exponent
//   Q6_K   128 B low 4 bits | 64 B high 2 bits | 16 B scales | 2 B scale       per 256 weights
//
// so that quants are read 16 bytes at a time; the bytes are as many as before. `n` below is the
// number of blocks in the whole tensor, which says where the later planes begin.
//
// Every quantised type gives
//   value(w, n, i)      weight number i of the tensor, as float: the readable form, for get_rows;
//   Raw, load, decode   a *unit* of 32 weights for mul_mat: 16 weights `lo` and 16 `hi`, from two
//                       half blocks (of 16 weights) of a row, as int8 in eight 32-bit words.
// A weight of a unit is f * q + m, with one f and one m per half.
#pragma once
#include "common.cuh"

struct Unit {
    int lo[4], hi[4];
    float f_lo, f_hi, m_lo, m_hi;
};

// Four 4-bit numbers from the low, or high, halves of four bytes.
DEVICE u32 low_nibbles(u32 v) { return v & 0x0f0f0f0fu; }
DEVICE u32 high_nibbles(u32 v) { return (v >> 4) & 0x0f0f0f0fu; }
DEVICE u32 word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

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

// types with blocks of 32: one scale, the unit is the block --------------------------------------

struct Q8_0 {
    static constexpr int block = 32;
    static constexpr bool one_block = true, has_min = false;
    struct Raw {
        uint4 a, b;
        u16 d;
    };
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        return half_to_float(load_u16(w + n * 32 + i / 32 * 2)) * i8(__ldg(w + i));
    }
    static DEVICE Raw load(const u8* w, i64 n, i64 u) {
        return {stream16(w + u * 32), stream16(w + u * 32 + 16), load_u16(w + n * 32 + u * 2)};
    }
    static DEVICE Unit decode(const Raw& r, int) {
        Unit unit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unit.lo[i] = word(r.a, i);
            unit.hi[i] = word(r.b, i);
        }
        unit.f_lo = half_to_float(r.d);
        return unit;
    }
};

struct Q4_0 {  // (q - 8) * d; byte j holds weights j (low) and j + 16 (high)
    static constexpr int block = 32;
    static constexpr bool one_block = true, has_min = true;
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
    static DEVICE Raw load(const u8* w, i64 n, i64 u) {
        return {stream16(w + u * 16), load_u16(w + n * 16 + u * 2)};
    }
    static DEVICE Unit decode(const Raw& r, int) {
        Unit unit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unit.lo[i] = low_nibbles(word(r.q, i));
            unit.hi[i] = high_nibbles(word(r.q, i));
        }
        unit.f_lo = half_to_float(r.d);
        unit.m_lo = -8.f * unit.f_lo;
        return unit;
    }
};

struct MXFP4 {  // twice the E2M1 values as int8, scale 2^(e - 128)
    static constexpr int block = 32;
    static constexpr bool one_block = true, has_min = false;
    struct Raw {
        uint4 q;
        u8 e;
    };
    static DEVICE float scale(u8 e) {  // 2^(e - 128); the two smallest are subnormal
        return __uint_as_float(e < 2 ? 0x00200000u << e : u32(e - 1) << 23);
    }
    // Four E2M1 codes, one in the low nibble of each byte, to int8: looked up by byte permutation
    // among 0 1 2 3 4 6 8 12 and among their negatives, then chosen by the sign bit.
    static DEVICE u32 codes(u32 v) {
        const u32 index = v & 0x07070707u;
        const u32 pairs = (index | index >> 4) & 0x00ff00ffu;
        const u32 select = (pairs | pairs >> 8) & 0xffffu;
        const u32 plus = __byte_perm(0x03020100u, 0x0c080604u, select);
        const u32 minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, select);
        const u32 negative = ((v >> 3) & 0x01010101u) * 0xffu;
        return (plus & ~negative) | (minus & negative);
    }
    static DEVICE float value(const u8* w, i64 n, i64 i) {
        const i64 b = i / 32;
        const int j = i % 32;
        const u32 q = (__ldg(w + b * 16 + j % 16) >> (j / 16 * 4)) & 15;
        return scale(__ldg(w + n * 16 + b)) * i8(codes(q));
    }
    static DEVICE Raw load(const u8* w, i64 n, i64 u) {
        return {stream16(w + u * 16), __ldg(w + n * 16 + u)};
    }
    static DEVICE Unit decode(const Raw& r, int) {
        Unit unit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unit.lo[i] = codes(low_nibbles(word(r.q, i)));
            unit.hi[i] = codes(high_nibbles(word(r.q, i)));
        }
        unit.f_lo = scale(r.e);
        return unit;
    }
};

// types with blocks of 256 ------------------------------------------------------------------------

// The 6-bit scale and minimum of sub-block j (of 32 weights) of Q4_K and Q5_K, from the 12 packed
// bytes that are words y, z, w of a block's first 16 bytes (word x: fp16 d and dmin).
// j < 4: low 6 bits of bytes j and j + 4; else 4 bits of byte j + 4 (scale low, minimum high
// nibble) and above them the top 2 bits of bytes j - 4 and j.
DEVICE void scale_and_min(uint4 head, int j, int* scale, int* minimum) {
    const int shift = 8 * (j & 3);
    const u32 a = head.y >> shift, b = head.z >> shift, c = head.w >> shift;
    *scale = j < 4 ? a & 63 : (c & 15) | ((a >> 2) & 48);
    *minimum = j < 4 ? b & 63 : ((c >> 4) & 15) | ((b >> 2) & 48);
}

// What a unit of Q4_K or Q5_K shares: unit g (0..7) of a block is half g % 2 of the sub-blocks
// 2 (g / 2), in the low nibbles, and 2 (g / 2) + 1, in the high ones.
struct K45 {
    static constexpr int block = 256;
    static constexpr bool one_block = false, has_min = true;
    static DEVICE int lo_at(int g) { return 64 * (g / 2) + 16 * (g % 2); }
    static DEVICE int hi_at(int g) { return lo_at(g) + 32; }
    static DEVICE void factors(uint4 head, int g, Unit& unit) {
        const float d = half_to_float(u16(head.x)), dmin = half_to_float(u16(head.x >> 16));
        int s, m;
        scale_and_min(head, g / 2 * 2, &s, &m);
        unit.f_lo = d * s, unit.m_lo = -dmin * m;
        scale_and_min(head, g / 2 * 2 + 1, &s, &m);
        unit.f_hi = d * s, unit.m_hi = -dmin * m;
    }
    static DEVICE float affine(const u8* block, int i, int q) {  // weight i of a block, its quant
        const uint4 head = __ldg(reinterpret_cast<const uint4*>(block));
        int s, m;
        scale_and_min(head, i / 32, &s, &m);
        return half_to_float(u16(head.x)) * s * q - half_to_float(u16(head.x >> 16)) * m;
    }
};

struct Q4_K : K45 {  // 16 B head, 128 B quants
    struct Raw {
        uint4 head, q;
    };
    static DEVICE float value(const u8* w, i64, i64 at) {
        const u8* block = w + at / 256 * 144;
        const int i = at % 256;
        const int byte = __ldg(block + 16 + i / 64 * 32 + i % 32);
        return affine(block, i, (byte >> (i / 32 % 2 * 4)) & 15);
    }
    static DEVICE Raw load(const u8* w, i64, i64 u) {
        const u8* block = w + u / 8 * 144;
        return {__ldg(reinterpret_cast<const uint4*>(block)), stream16(block + 16 + u % 8 * 16)};
    }
    static DEVICE Unit decode(const Raw& r, int g) {
        Unit unit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            unit.lo[i] = low_nibbles(word(r.q, i));
            unit.hi[i] = high_nibbles(word(r.q, i));
        }
        factors(r.head, g, unit);
        return unit;
    }
};

struct Q5_K : K45 {  // 16 B head, 32 B fifth bits (bit j of byte l: weight l of sub-block j), 128 B
    struct Raw {
        uint4 head, high, q;
    };
    static DEVICE float value(const u8* w, i64, i64 at) {
        const u8* block = w + at / 256 * 176;
        const int i = at % 256;
        const int low = (__ldg(block + 48 + i / 64 * 32 + i % 32) >> (i / 32 % 2 * 4)) & 15;
        return affine(block, i, low + ((__ldg(block + 16 + i % 32) >> (i / 32)) & 1) * 16);
    }
    static DEVICE Raw load(const u8* w, i64, i64 u) {
        const u8* block = w + u / 8 * 176;
        return {__ldg(reinterpret_cast<const uint4*>(block)),
                __ldg(reinterpret_cast<const uint4*>(block + 16) + u % 2),
                stream16(block + 48 + u % 8 * 16)};
    }
    static DEVICE Unit decode(const Raw& r, int g) {
        Unit unit;
        const int j = g / 2 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 fifth = word(r.high, i) >> j;
            unit.lo[i] = low_nibbles(word(r.q, i)) | (fifth & 0x01010101u) << 4;
            unit.hi[i] = high_nibbles(word(r.q, i)) | (fifth & 0x02020202u) << 3;
        }
        factors(r.head, g, unit);
        return unit;
    }
};

// (q - 32) * scale * d, scales int8 per 16 weights. With i = 128 a + 32 b + l, l in 0..31: the low
// bits are the low (b < 2) or high nibble of byte 64 a + 32 (b % 2) + l, the high two bits are bits
// 2 b and 2 b + 1 of byte 32 a + l.
struct Q6_K {
    static constexpr int block = 256;
    static constexpr bool one_block = false, has_min = true;
    struct Raw {
        uint4 low, high;
        i8 s_lo, s_hi;
        u16 d;
    };
    // Unit g (0..7): 16 bytes of low bits, g = 4 a + 2 (b % 2) + half.
    static DEVICE int lo_at(int g) { return 128 * (g / 4) + 16 * (g % 4); }
    static DEVICE int hi_at(int g) { return lo_at(g) + 64; }
    static DEVICE float value(const u8* w, i64 n, i64 at) {
        const i64 k = at / 256;
        const int i = at % 256, a = i / 128, b = i / 32 % 4, l = i % 32;
        const int low = (__ldg(w + k * 128 + a * 64 + b % 2 * 32 + l) >> (b / 2 * 4)) & 15;
        const int high = (__ldg(w + n * 128 + k * 64 + a * 32 + l) >> (2 * b)) & 3;
        const i8 s = i8(__ldg(w + n * 192 + k * 16 + i / 16));
        return half_to_float(load_u16(w + n * 208 + k * 2)) * s * ((low | high << 4) - 32);
    }
    static DEVICE Raw load(const u8* w, i64 n, i64 u) {
        const i64 k = u / 8;
        const int g = u % 8;
        const u8* s = w + n * 192 + k * 16;
        return {stream16(w + u * 16),
                __ldg(reinterpret_cast<const uint4*>(w + n * 128) + k * 4 + g / 4 * 2 + g % 2),
                i8(__ldg(s + lo_at(g) / 16)), i8(__ldg(s + hi_at(g) / 16)),
                load_u16(w + n * 208 + k * 2)};
    }
    static DEVICE Unit decode(const Raw& r, int g) {
        Unit unit;
        const int shift = g / 2 % 2 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 high = word(r.high, i) >> shift;
            unit.lo[i] = low_nibbles(word(r.low, i)) | (high & 0x03030303u) << 4;
            unit.hi[i] = high_nibbles(word(r.low, i)) | (high & 0x30303030u);
        }
        const float d = half_to_float(r.d);
        unit.f_lo = d * r.s_lo, unit.m_lo = -32.f * unit.f_lo;
        unit.f_hi = d * r.s_hi, unit.m_hi = -32.f * unit.f_hi;
        return unit;
    }
};
