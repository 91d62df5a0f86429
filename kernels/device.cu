// What the backend itself needs for tests and measurements: holding a stream, and doing nothing.
//
// One version. What `nothing` takes: data/results/cuda-launches.json.
#include "common.cuh"

// Holds its stream until *open is not 0, or until `timeout_ns` nanoseconds have passed: a forgotten
// gate cannot hang the device. `open` is pinned memory of the host. One thread.
extern "C" __global__ void gate(const volatile int* open, i64 timeout_ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    now = start;
    while (!*open && i64(now - start) < timeout_ns) {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    }
}

// What a launch costs by itself. It has one argument, because every launch has some.
extern "C" __global__ void nothing(i64 unused) {
    pdl_trigger();
    pdl_wait();
}
