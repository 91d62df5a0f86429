// The types of K and V in the cache: conversions of an element of a cell to float, and back.
//
//   load    element c of a row, as a float
//   store   x as element c of a row, where `there`. Whole warps call it with neighbouring columns,
//           so that a warp has a block of Q8_0
//
// An earlier launch wrote the cells, so the compiler must not read them as constants.
#pragma once
#include "common.cuh"

struct CellF16 {
    static DEVICE float load(const u8* row, i64 c) {
        return half_to_float(reinterpret_cast<const u16*>(row)[c]);
    }
    static DEVICE void store(u8* row, i64 c, float x, bool there) {
        if (there) reinterpret_cast<u16*>(row)[c] = float_to_half(x);
    }
    static DEVICE i64 row_bytes(i64 cols) { return 2 * cols; }
};
struct CellBF16 {
    static DEVICE float load(const u8* row, i64 c) {
        return __uint_as_float(u32(reinterpret_cast<const u16*>(row)[c]) << 16);
    }
    static DEVICE void store(u8* row, i64 c, float x, bool there) {
        const u32 bits = __float_as_uint(x);
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        const u32 rounded = nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        if (there) reinterpret_cast<u16*>(row)[c] = u16(rounded);
    }
    static DEVICE i64 row_bytes(i64 cols) { return 2 * cols; }
};
struct CellF32 {
    static DEVICE float load(const u8* row, i64 c) {
        return reinterpret_cast<const float*>(row)[c];
    }
    static DEVICE void store(u8* row, i64 c, float x, bool there) {
        if (there) reinterpret_cast<float*>(row)[c] = x;
    }
    static DEVICE i64 row_bytes(i64 cols) { return 4 * cols; }
};
// ggml's quantize_row_q8_0_ref: scale = max|x| / 127, quants rounded half away from zero.
struct CellQ8_0 {
    static DEVICE float load(const u8* row, i64 c) {
        const u8* block = row + c / 32 * 34;
        const float scale = half_to_float(*reinterpret_cast<const u16*>(block));
        return scale * float(reinterpret_cast<const i8*>(block)[2 + c % 32]);
    }
    static DEVICE void store(u8* row, i64 c, float x, bool there) {
        const float scale = __fdiv_rn(warp_max(there ? fabsf(x) : 0.f), 127.f);
        const float inverse = scale == 0 ? 0.f : __fdiv_rn(1.f, scale);
        if (!there) return;
        u8* block = row + c / 32 * 34;
        if (c % 32 == 0) *reinterpret_cast<u16*>(block) = float_to_half(scale);
        reinterpret_cast<i8*>(block)[2 + c % 32] = i8(roundf(__fmul_rn(x, inverse)));
    }
    static DEVICE i64 row_bytes(i64 cols) { return cols / 32 * 34; }
};
