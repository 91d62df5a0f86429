// The base of every kernel file: short type names, conversions, reductions, the Q8_ACT row.
//
// No header of the CUDA toolkit is included. So NVRTC needs no include path, and compiles each file
// in a fraction of a second. The half-precision conversions are two lines of PTX.
//
// Conventions of all kernels (workbench/backend/issue/args.py gives the argument order of an op):
//   * integers arrive as long long, reals as float, addresses as 8 bytes;
//   * every tensor begins on a multiple of 16 bytes (the backend gives 256);
//   * its memory also ends on a multiple of 16. Kernels may read the bytes between the tensor's
//     last byte and that end. These bytes never change a result;
//   * inputs and outputs never overlap, except for the cache of set_rows and rope_shift;
//   * no floating-point atomics: each result is summed in one fixed order.
//
// Versions of silu_times (us of the launch of gate + up, 128 tokens, tensor_product.cu):
//   expf and a division   69.3
//   this version          59.4: kept
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

// loads of weights, past L1 because each is read only once ----------------------------------------

DEVICE uint4 stream16(const void* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(p));
    return v;
}

DEVICE u16 load_u16(const u8* p) { return __ldg(reinterpret_cast<const u16*>(p)); }

// The device's time, %globaltimer, in ns.
DEVICE i64 now_ns() {
    i64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

// programmatic dependent launch (sm_90 and later; elsewhere nothing) -----------------------------

// Lets the next kernel of the stream start while this kernel runs.
DEVICE void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this kernel have ended and their results can be read. Before this
// wait a kernel may read only weights, and may write nothing. Every thread executes the wait, also
// a thread without work.
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

// The sum over a block of whole warps (at most 32), in every thread.
DEVICE float block_sum(float v) {
    __shared__ float part[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) part[warp] = v;
    __syncthreads();
    return warp_sum(lane < int(blockDim.x / 32) ? part[lane] : 0.f);
}

// activations ------------------------------------------------------------------------------------

// silu(g) * u with a relative error under 2^-18 |g|; 0 where exp(-g) overflows. It has no slow
// path, because a whole block would wait for it.
DEVICE float silu_times(float g, float u) { return __fdividef(g, 1.f + __expf(-g)) * u; }

// Bytes of a row of Q8_ACT: `cols` int8 quants, cols/32 float scales, cols/16 int16 sums of the
// quants of each half block, and padding to a multiple of 64 bytes (workbench/graph/ir.py).
DEVICE i64 act_row_bytes(i64 cols) {
    return (cols + cols / 32 * 4 + cols / 16 * 2 + 63) / 64 * 64;
}
