// What the backend itself needs: splitting weights into planes, and holding a stream for a test.
#include "common.cuh"

// Splits blocks of a weight into planes (kernels/weights.cuh). src holds n_blocks blocks of
// block_bytes bytes, which are blocks number first .. first + n_blocks - 1 of the tensor. A block
// has four fields, each from bytes at_i on, bytes_i long (0: no such field), whose plane begins
// plane_i bytes into dst. Block: 256 threads; grid: ceil(n_blocks * block_bytes / 256).
extern "C" __global__ void repack(u8* __restrict__ dst, const u8* __restrict__ src, i64 first,
                                  i64 n_blocks, i64 block_bytes,
                                  i64 at_0, i64 bytes_0, i64 plane_0,
                                  i64 at_1, i64 bytes_1, i64 plane_1,
                                  i64 at_2, i64 bytes_2, i64 plane_2,
                                  i64 at_3, i64 bytes_3, i64 plane_3) {
    const i64 i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= n_blocks * block_bytes) return;
    const i64 block = i / block_bytes, at = i % block_bytes;
    const i64 from[4] = {at_0, at_1, at_2, at_3};
    const i64 bytes[4] = {bytes_0, bytes_1, bytes_2, bytes_3};
    const i64 plane[4] = {plane_0, plane_1, plane_2, plane_3};
#pragma unroll
    for (int f = 0; f < 4; f++) {
        if (at >= from[f] && at < from[f] + bytes[f])
            dst[plane[f] + (first + block) * bytes[f] + at - from[f]] = src[i];
    }
}

// Holds its stream until *open is not 0, or until `timeout_ns` nanoseconds have passed, so that a
// forgotten gate cannot hang the device. `open` is pinned memory of the host. One thread.
extern "C" __global__ void gate(const volatile int* open, i64 timeout_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    now = start;
    while (!*open && i64(now - start) < timeout_ns) {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    }
}

// Reads `n` 16-byte words once, with 4 loads in flight per thread: what reading memory can reach.
// `sink` is written only if the words add up to `never`. Block: 256 threads.
extern "C" __global__ void read_memory(const uint4* __restrict__ words, i64 n, i64 never,
                                       int* sink) {
    const i64 stride = i64(gridDim.x) * blockDim.x;
    u32 sum = 0;
    i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = stream16(words + i + k * stride);
#pragma unroll
        for (int k = 0; k < 4; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < n; i += stride) {
        const uint4 v = stream16(words + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    if (i64(sum) == never) *sink = 1;
}
