// The device's clock, %globaltimer: stamps of a plan, and a comparison with the host's clock.
//
//   stamp    writes the time to a ring (workbench/backend/clock/stamps.py); one thread
//   answer   measures the step of the clock, then answers each question of the host with the time
//            (workbench/backend/cuda/device/timer.py); one thread
//
// Both write to pinned memory of the host, in words of 8 bytes. Volatile accesses bypass L1. The
// counter of a ring's pairs is memory of the device, because a read over the bus would cost a
// microsecond a token. The host waits before it reads a ring, so the words need no fence.
//
// One version.
#include "common.cuh"

// words of a ring, as in workbench/backend/clock/stamps.py
#define WRITTEN 0
#define PAIRS 8

// words of `answer`, as in workbench/backend/cuda/device/timer.py
#define ASKED 0
#define TICK 8
#define ANSWERS 16
#define CHANGES 256       // changes of the clock from which its step is taken
#define MOST_READS (1 << 20)

extern "C" __global__ void stamp(volatile i64* counter, volatile i64* ring, i64 n_pairs,
                                 i64 is_end) {
    const i64 early = now_ns();
    const i64 number = *counter;
    if (number < 0) return;  // never true; makes the second reading below wait for `number`
    const i64 now = is_end ? early : now_ns();
    ring[PAIRS + 2 * (number & (n_pairs - 1)) + is_end] = now;
    if (is_end) {
        *counter = number + 1;
        ring[WRITTEN] = number + 1;
    }
}

extern "C" __global__ void answer(volatile i64* words, i64 n, i64 limit_ns) {
    const i64 start = now_ns();
    i64 last = start, tick = limit_ns;
    for (int reads = 0, changes = 0; reads < MOST_READS && changes < CHANGES; reads++) {
        const i64 now = now_ns();
        if (now <= last) continue;
        if (now - last < tick) tick = now - last;
        last = now;
        changes++;
    }
    words[TICK] = tick;
    __threadfence_system();
    for (i64 k = 0; k < n; k++) {
        while (words[ASKED] <= k)
            if (now_ns() - start > limit_ns) return;
        words[ANSWERS + k] = now_ns();
        __threadfence_system();
    }
}
