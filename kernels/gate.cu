// The first and the last kernel of a plan that is launched before its inputs are ready. The first
// waits at a gate and then copies the inputs. The last writes a word that tells the host of the
// end. workbench/backend/plan/gate.py says why, and who writes which word.
//
//   gate_copy   waits until the host opens the gate, then copies; one block
//   gate_end    reports that all kernels before it have ended; one thread
//
// `control` is pinned memory of the host, in words of 8 bytes: opened, cancelled, .., ran, .., and
// the answers. `opened` and `cancelled` are read together, and `ran` at the same time. So an open
// gate takes one trip over the bus. Volatile accesses bypass L1. The fence orders them with the
// inputs, for the whole system. An open gate answers after all inputs have been read; from then on
// the host may write the next inputs. dst, src and the end of their memory are multiples of 16
// bytes. Block: 1024 threads.
//
// One version.
#include "common.cuh"

#define THREADS 1024
#define DEPTH 4  // loads of a thread that are in flight together

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

DEVICE void answer(volatile i64* control, i64 number, i64 went) {
    control[WENT + number % N_WENT] = went;
    control[RAN] = number;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gate_copy(uint4* dst, const uint4* src, i64 nbytes, i64* control, i64 limit_ns) {
    __shared__ int is_open;
    __shared__ i64 gate;
    pdl_trigger();  // the next kernel requests its weights while the gate is closed
    if (threadIdx.x == 0) {
        Words words = read_words(control + OPENED);
        const i64 number = read_word(control + RAN) + 1, start = now_ns();
        const int bit = int(number % N_CANCELLED);
        while (words.opened < number && !(words.cancelled >> bit & 1) &&
               now_ns() - start < limit_ns)
            words = read_words(control + OPENED);
        // The host has since opened a later gate. It wrote `cancelled` before that, so read again.
        if (words.opened > number) words = read_words(control + OPENED);
        const bool open = words.opened >= number && !(words.cancelled >> bit & 1);
        if (!open) answer(control, number, -number);
        // At an open gate this thread has no write in flight for which the fence would wait.
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

// `counter` is memory of the device, because a read over the bus would cost a microsecond a token.
// The fence makes all results visible before the word, also results in the host's memory.
extern "C" __global__ void gate_end(i64* counter, volatile i64* word) {
    pdl_wait();
    const i64 number = *counter + 1;
    *counter = number;
    __threadfence_system();
    *word = number;
}
