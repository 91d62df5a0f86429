// What a plan begins and ends with where it is launched ahead: the copy of a step's inputs behind a
// gate, and the word that tells the host of the end (workbench/backend/plan/gate.py says why, and who
// writes which word).
//
//   gate_copy   waits until the host opens the gate, then copies; one block
//   gate_end    says that everything in front of it has ended; one thread
//
// `control` is pinned memory of the host, words of 8 bytes: opened, cancelled, .., ran, .., and the
// answers. The first two are read together, and beside `ran`: one trip over the bus for an open
// gate. Volatile accesses bypass L1. The fence orders them with the inputs, for the whole system.
// An open gate answers once the inputs have been read: then the host may write the next ones.
// dst and src: multiples of 16 bytes, and memory ends on one. Block: 1024 threads.
//
// One version.
#include "common.cuh"

#define THREADS 1024
#define DEPTH 4  // loads of a thread that are under way together

// words of `control`, as in workbench/backend/plan/gate.py
#define OPENED 0
#define RAN 8
#define WENT 16
#define N_WENT 8
#define N_CANCELLED 32

struct Words {
    i64 opened, cancelled;
};

DEVICE Words read_words(const i64* p) {
    Words w;
    asm volatile("ld.volatile.global.v2.s64 {%0,%1}, [%2];"
                 : "=l"(w.opened), "=l"(w.cancelled)
                 : "l"(p)
                 : "memory");
    return w;
}

DEVICE i64 read_word(const i64* p) {
    i64 v;
    asm volatile("ld.volatile.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE uint4 read_staged(const uint4* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

DEVICE i64 now_ns() {
    i64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

DEVICE void answer(volatile i64* control, i64 number, i64 went) {
    control[WENT + number % N_WENT] = went;
    control[RAN] = number;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_copy(uint4* dst, const uint4* src, i64 nbytes, i64* control, i64 limit_ns) {
    __shared__ int is_open;
    __shared__ i64 gate;
    pdl_trigger();  // the first launch of the step asks for its weights while the gate is closed
    if (threadIdx.x == 0) {
        Words words = read_words(control + OPENED);
        const i64 number = read_word(control + RAN) + 1, start = now_ns();
        const int bit = int(number % N_CANCELLED);
        while (words.opened < number && !(words.cancelled >> bit & 1) &&
               now_ns() - start < limit_ns)
            words = read_words(control + OPENED);
        // The host has gone on since: it said before that whether this one is cancelled.
        if (words.opened > number) words = read_words(control + OPENED);
        const bool open = words.opened >= number && !(words.cancelled >> bit & 1);
        if (!open) answer(control, number, -number);
        // Where it is open, no write of this thread is under way for the fence to wait for.
        __threadfence_system();
        is_open = open;
        gate = number;
    }
    __syncthreads();
    if (!is_open) return;
    const i64 n = (nbytes + 15) / 16;
    for (i64 first = threadIdx.x; first < n; first += THREADS * DEPTH) {
        uint4 v[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
            if (first + k * THREADS < n) v[k] = read_staged(src + first + k * THREADS);
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
            if (first + k * THREADS < n) dst[first + k * THREADS] = v[k];
    }
    __syncthreads();  // every thread has read its share
    if (threadIdx.x == 0) answer(control, gate, gate);
}

// `counter` is memory of the device: a read over the bus would take a microsecond of every token.
// The fence orders the word behind the results, also those that were written to the host's memory.
extern "C" __global__ void gate_end(i64* counter, volatile i64* word) {
    pdl_wait();
    const i64 number = *counter + 1;
    *counter = number;
    __threadfence_system();
    *word = number;
}
