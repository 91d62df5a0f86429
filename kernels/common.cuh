// What every kernel file shares: short type names, conversions, reductions, the Q8_ACT row.
//
// No header of the CUDA toolkit is included: NVRTC needs no include path and compiles each file in
// a fraction of a second. The half-precision conversions are two lines of PTX.
//
// Conventions of all kernels (workbench/backend/issue/args.py gives each one's argument order):
//   * integers arrive as long long, reals as float, addresses as 8 bytes;
//   * every tensor begins on a multiple of 16 bytes (the backend gives 256), and its memory ends on
//     one: bytes between its last byte and that end may be read, and count for nothing;
//   * inputs and outputs never overlap, but for the cache of set_rows and rope_shift;
//   * no floating-point atomics: each result is summed in one fixed order.
//
// Versions of silu_times (gate + up of 128 tokens, tensor_product.cu): expf and a division 69.3 us;
// this one 59.4.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define NEG_INFINITY (-__int_as_float(0x7f800000))
#define INFINITY_F (__int_as_float(0x7f800000))

// conversions ------------------------------------------------------------------------------------

DEVICE float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

DEVICE u16 float_to_half(float f) {  // to nearest, ties to even
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

DEVICE float bfloat_to_float(u16 h) { return __uint_as_float(u32(h) << 16); }

// Eight halves in a 16-byte word, in memory order.
DEVICE void halves_to_floats(uint4 v, float* f) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = half_to_float(u16(words[i]));
        f[2 * i + 1] = half_to_float(u16(words[i] >> 16));
    }
}

// loads of weights: read once, so they are kept out of L1 ---------------------------------------

DEVICE uint4 stream16(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

DEVICE u16 load_u16(const u8* p) { return __ldg(reinterpret_cast<const u16*>(p)); }

// programmatic dependent launch (sm_90 and later; elsewhere nothing) -----------------------------

// Lets the next kernel of the stream start while this one runs.
DEVICE void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended and what they wrote can be read. Before it,
// only weights may be read and nothing may be written. Every thread executes it, also one with no
// work.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// reductions -------------------------------------------------------------------------------------

DEVICE float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

DEVICE float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// Sum over a block of whole warps (at most 32); every thread gets it.
DEVICE float block_sum(float v) {
    __shared__ float part[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    return warp_sum(lane < int(blockDim.x / 32) ? part[lane] : 0.f);
}

// activations ------------------------------------------------------------------------------------

// silu(g) * u, relative error under 2^-18 |g|; 0 where exp(-g) overflows. It has no slow paths,
// because a whole block waits for it.
DEVICE float silu_times(float g, float u) { return __fdividef(g, 1.f + __expf(-g)) * u; }

// A row of Q8_ACT: `cols` int8 quants, cols/32 float scales, cols/16 int16 sums of the quants of
// each half block, padded to a multiple of 64 bytes (workbench/graph/ir.py).
DEVICE i64 act_row_bytes(i64 cols) {
    return (cols + cols / 32 * 4 + cols / 16 * 2 + 63) / 64 * 64;
}
