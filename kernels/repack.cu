// Moves the blocks of a model file into the planes of kernels/weights.cuh, when a weight is loaded.
//
//   repack_<TYPE>   a thread for each unit of 32 weights. It rearranges the unit's nibbles and high
//                   bits, and moves the unit's scales. The thread of a block's first unit also
//                   moves the fields of the whole block.
//
// Arguments: dst (the whole weight), src (blocks first .. first + n - 1 as in the file, at a
// multiple of 16 bytes), first, n, total (blocks of the weight). Block: 256 threads. Grid:
// ceil(units / 256).
//
// Versions (not measured by themselves; loading: data/results/cuda-load-llama-3-8b-q4_0.json):
//   1  a byte a thread, with the layout as arguments   before commit 43147c1
//   2  a unit a thread                                 kept
#include "weights.cuh"

DEVICE u32 pair(const u8* p) {  // 4 bytes from an even address
    return load_u16(p) | u32(load_u16(p + 2)) << 16;
}
DEVICE void store16(u8* p, const u32 (&v)[4]) {
    *reinterpret_cast<uint4*>(p) = make_uint4(v[0], v[1], v[2], v[3]);
}
DEVICE void store_u16(u8* p, u16 v) { *reinterpret_cast<u16*>(p) = v; }

// Each `move` moves unit u of the block at src. It is block b of the n blocks of the weight.
DEVICE void move(Q8_0, u8* dst, const u8* src, i64 n, i64 b, int) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = pair(src + 2 + 16 * half + 4 * i);
        store16(dst + b * 32 + 16 * half, v);
    }
    store_u16(dst + n * 32 + b * 2, load_u16(src));
}

DEVICE void move(Q4_0, u8* dst, const u8* src, i64 n, i64 b, int) {
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = pair(src + 2 + 4 * i);
    store16(dst + b * 16, v);
    store_u16(dst + n * 16 + b * 2, load_u16(src));
}

DEVICE void move(MXFP4, u8* dst, const u8* src, i64 n, i64 b, int) {
    u32 v[4] = {};
#pragma unroll
    for (int j = 0; j < 16; j++) {  // weight j is low, weight j + 16 high
        const u32 q = __ldg(src + 1 + j);
        v[j / 8] |= (q & 15) << (j % 8 * 4);
        v[2 + j / 8] |= (q >> 4) << (j % 8 * 4);
    }
    store16(dst + b * 16, v);
    dst[n * 16 + b] = __ldg(src);
}

// Moves the 32 quants of unit u of Q4_K and Q5_K: the low (u even) or high nibbles of 32 bytes.
DEVICE void nibbles(u8* dst, const u8* src, int u) {
    const u32* from = reinterpret_cast<const u32*>(src + u / 2 * 32);
    u32 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = low_nibbles(__ldg(from + i) >> (u % 2 * 4)) |
               low_nibbles(__ldg(from + 4 + i) >> (u % 2 * 4)) << 4;
    store16(dst + u * 16, v);
}

// Moves the head of a block of Q4_K and Q5_K: 4 bytes with d and dmin, and 12 bytes of scales and
// minima, counted here from 0. For j < 4 the low 6 bits of byte j are scale j, and the low 6 bits
// of byte j + 4 are minimum j. Byte j + 8 has the low 4 bits of scale j + 4 and of minimum j + 4.
// Their high 2 bits are the high 2 bits of bytes j and j + 4.
DEVICE void head(u8* dst, const u8* src) {
    const uint4 h = __ldg(reinterpret_cast<const uint4*>(src));
    u32 v[4] = {h.x, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const u32 s = h.y >> 8 * j & 255, m = h.z >> 8 * j & 255, c = h.w >> 8 * j & 255;
        v[1] |= (s & 15) << 4 * j | (c & 15) << 4 * (j + 4);
        v[2] |= (m & 15) << 4 * j | (c >> 4) << 4 * (j + 4);
        v[3] |= (s >> 4 & 3) << 2 * j | (s >> 6) << 2 * (j + 4);
        v[3] |= (m >> 4 & 3) << (16 + 2 * j) | (m >> 6) << (16 + 2 * (j + 4));
    }
    store16(dst, v);
}

DEVICE void move(Q4_K, u8* dst, const u8* src, i64 n, i64 b, int u) {
    nibbles(dst + b * 128, src + 16, u);
    if (u == 0) head(dst + n * 128 + b * 16, src);
}

DEVICE void move(Q5_K, u8* dst, const u8* src, i64 n, i64 b, int u) {
    nibbles(dst + b * 128, src + 48, u);
    u32 fifth = 0;  // bit u of byte l is the fifth bit of weight l
#pragma unroll
    for (int i = 0; i < 8; i++)
        fifth |= (__ldg(reinterpret_cast<const u32*>(src + 16) + i) >> u & 0x01010101u) << i;
    reinterpret_cast<u32*>(dst + n * 128)[b * 8 + u] = fifth;
    if (u == 0) head(dst + n * 160 + b * 16, src);
}

// With u = 4 a + c, weight l of the unit has as low bits the low (c < 2) or high nibble of byte
// 64 a + 32 (c % 2) + l, and as high bits the bits 2 c and 2 c + 1 of byte 32 a + l of the 64 bytes
// after the low bits.
DEVICE void move(Q6_K, u8* dst, const u8* src, i64 n, i64 b, int u) {
    const int a = u / 4, c = u % 4;
    const u8* low = src + 64 * a + 32 * (c % 2);
    const u8* high = src + 128 + 32 * a;
    u32 v[4], top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = low_nibbles(pair(low + 4 * i) >> (c / 2 * 4)) |
               low_nibbles(pair(low + 16 + 4 * i) >> (c / 2 * 4)) << 4;
        top[0] |= (pair(high + 4 * i) >> 2 * c & 0x03030303u) << 2 * i;
        top[1] |= (pair(high + 16 + 4 * i) >> 2 * c & 0x03030303u) << 2 * i;
    }
    store16(dst + b * 128 + u * 16, v);
    reinterpret_cast<uint2*>(dst + n * 128)[b * 8 + u] = make_uint2(top[0], top[1]);
    store_u16(dst + n * 192 + b * 16 + u * 2, load_u16(src + 192 + 2 * u));
    if (u == 0) store_u16(dst + n * 208 + b * 2, load_u16(src + 208));
}

#define REPACK(TYPE, BYTES)                                                                      \
    extern "C" __global__ void repack_##TYPE(u8* __restrict__ dst, const u8* __restrict__ src,   \
                                             i64 first, i64 n, i64 total) {                      \
        const int units = TYPE::block / 32;                                                      \
        const i64 i = i64(blockIdx.x) * 256 + threadIdx.x, block = i / units;                    \
        if (block < n) move(TYPE(), dst, src + block * BYTES, total, first + block, i % units);  \
    }
REPACK(Q8_0, 34)
REPACK(Q4_0, 18)
REPACK(MXFP4, 17)
REPACK(Q4_K, 144)
REPACK(Q5_K, 176)
REPACK(Q6_K, 210)
