// When a launch ran, by %globaltimer: what a compilation with macro NOTING adds to every kernel
// (workbench/backend/cuda/kernels/noting.py). Other compilations never see this file.
//
// A note has SPAN_CELLS cells of two words, all bits set beforehand. Word 0 becomes the earliest
// begin of a block, word 1 the complement of the latest end of a warp: both only ever sink. The
// SMs share the cells out, so that warps that end together do not queue for one word.
//
// Versions: one cell for all SMs (thousands of warps in line at one word of L2: not measured); this
// one.
#pragma once
#include "common.cuh"

#define SPAN_CELLS 64  // as in workbench/backend/clock/launch_notes.py

struct LaunchSpan {
    unsigned long long* const note;

    DEVICE explicit LaunchSpan(unsigned long long* note_) : note(note_) {
        if (threadIdx.x == 0) sink(0, now());
    }

    // At every return of the kernel, behind the last store of the threads that return there. They may
    // be a part of their warp.
    DEVICE ~LaunchSpan() {
        if (threadIdx.x % 32 == __ffs(__activemask()) - 1) sink(1, ~now());
    }

    DEVICE static unsigned long long now() {
        unsigned long long ns;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
        return ns;
    }

    DEVICE void sink(int word, unsigned long long value) const {
        u32 sm;
        asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
        asm volatile("red.global.min.u64 [%0], %1;" ::"l"(note + 2 * (sm % SPAN_CELLS) + word),
                     "l"(value)
                     : "memory");
    }
};
