// The begin and the end of a launch, by %globaltimer. A compilation with macro NOTING adds this
// code to every kernel (workbench/backend/cuda/kernels/noting.py). No other compilation includes
// this file.
//
// A note has SPAN_CELLS cells of two words. All bits are set before the launch. Word 0 becomes the
// earliest begin of a block, word 1 the complement of the latest end of a warp. So both words only
// get smaller, and one kind of atomic serves both. SMs use different cells, so that warps that end
// together do not queue for one word.
//
// Versions: one cell for all SMs (thousands of warps queue for one word of L2: not measured); a
// cell for each SM (modulo SPAN_CELLS): kept.
#pragma once
#include "common.cuh"

#define SPAN_CELLS 64  // as in workbench/backend/clock/launch_notes.py

struct LaunchSpan {
    unsigned long long* const note;

    DEVICE explicit LaunchSpan(unsigned long long* note_) : note(note_) {
        if (threadIdx.x == 0) sink(0, now_ns());
    }

    // Runs at every return of the kernel, after the last store of the threads that return there.
    // These threads may be only a part of their warp.
    DEVICE ~LaunchSpan() {
        if (threadIdx.x % 32 == __ffs(__activemask()) - 1) sink(1, ~now_ns());
    }

    DEVICE void sink(int word, unsigned long long value) const {
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        asm volatile("red.global.min.u64 [%0], %1;" ::"l"(note + 2 * (sm % SPAN_CELLS) + word),
                     "l"(value)
                     : "memory");
    }
};
