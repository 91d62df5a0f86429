// Kernels for tests and measurements: `gate` holds a stream, `nothing` does nothing.
//
// One version. The time of `nothing`: data/results/cuda-launches.json.
#include "common.cuh"

// Holds its stream until *open is not 0, or until `timeout_ns` nanoseconds have passed: a forgotten
// gate cannot hang the device. `open` is pinned memory of the host. One thread.
extern "C" __global__ void gate(const volatile int* open, i64 timeout_ns) {
    const i64 start = now_ns();
    i64 now = start;
    while (!*open && now - start < timeout_ns) {
        __nanosleep(1000);
        now = now_ns();
    }
}

// For the cost of a launch alone. Like every launch it has an argument.
extern "C" __global__ void nothing(i64 unused) {
    pdl_trigger();
    pdl_wait();
}
