// Loads of several neighbouring elements of a row of the cache, as floats. cells.cuh loads single
// elements; the values are the same, to the bit.
//
//   load8   elements c .. c + 7; c is a multiple of 8
//   load2   elements c and c + 1; c is even
//
// A row begins on a multiple of 16 bytes, except for Q8_0. Its blocks have 34 bytes, so loads there
// are at most 2 bytes wide.
//
// One version. Measured as part of attention_vec.cu and attention_tile.cu.
#pragma once
#include "cells.cuh"

template <class Cell>
struct Loads;

template <>
struct Loads<CellF16> {
    static DEVICE void load8(const u8* row, int c, float (&x)[8]) {
        halves_to_floats(*reinterpret_cast<const uint4*>(row + 2 * c), x);
    }
    static DEVICE float2 load2(const u8* row, int c) {
        const u32 two = *reinterpret_cast<const u32*>(row + 2 * c);
        return make_float2(half_to_float(u16(two)), half_to_float(u16(two >> 16)));
    }
};

template <>
struct Loads<CellBF16> {
    static DEVICE float2 halves(u32 two) {
        return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
    }
    static DEVICE void load8(const u8* row, int c, float (&x)[8]) {
        const uint4 all = *reinterpret_cast<const uint4*>(row + 2 * c);
        const u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = halves(words[i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
    }
    static DEVICE float2 load2(const u8* row, int c) {
        return halves(*reinterpret_cast<const u32*>(row + 2 * c));
    }
};

template <>
struct Loads<CellF32> {
    static DEVICE void load8(const u8* row, int c, float (&x)[8]) {
        const float4* four = reinterpret_cast<const float4*>(row + 4 * c);
        const float4 low = four[0], high = four[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    }
    static DEVICE float2 load2(const u8* row, int c) {
        return *reinterpret_cast<const float2*>(row + 4 * c);
    }
};

template <>
struct Loads<CellQ8_0> {
    static DEVICE float2 scaled(float scale, u32 two) {
        return make_float2(scale * float(i8(two)), scale * float(i8(two >> 8)));
    }
    static DEVICE void load8(const u8* row, int c, float (&x)[8]) {
        const u16* block = reinterpret_cast<const u16*>(row + c / 32 * 34);
        const float scale = half_to_float(block[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = scaled(scale, block[1 + c % 32 / 2 + i]);
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
    }
    static DEVICE float2 load2(const u8* row, int c) {
        const u16* block = reinterpret_cast<const u16*>(row + c / 32 * 34);
        return scaled(half_to_float(block[0]), block[1 + c % 32 / 2]);
    }
};
