// What the backend itself needs for tests: holding a stream, and reading memory as fast as it goes.
#include "common.cuh"

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
