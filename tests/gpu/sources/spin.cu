// Kernels that take as long as they are told: for tests of what notes when kernels ran.
#include "common.cuh"

DEVICE i64 timer_ns() {
    i64 ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

DEVICE void spin_for(i64 ns) {
    const i64 start = timer_ns();
    while (timer_ns() - start < ns) {
    }
}

extern "C" __global__ void spin(i64 ns) { spin_for(ns); }

// Lets the next launch begin early, and waits for the one in front.
extern "C" __global__ void spin_behind(i64 ns) {
    pdl_trigger();
    pdl_wait();
    spin_for(ns);
}

// The first warp returns at once; the others meet, and the second takes its time.
extern "C" __global__ void spin_without_first_warp(i64 ns) {
    if (threadIdx.x < 32) return;
    __syncthreads();
    if (threadIdx.x < 64) spin_for(ns);
}

// Of each warp the first thread returns at once, and the last one takes its time.
extern "C" __global__ void spin_in_last_lane(i64 ns) {
    if (threadIdx.x % 32 == 0) return;
    if (threadIdx.x % 32 == 31) spin_for(ns);
}

// The last block takes its time; the first one is over long before.
extern "C" __global__ void spin_in_last_block(i64 ns) {
    if (blockIdx.x == gridDim.x - 1) spin_for(ns);
}
