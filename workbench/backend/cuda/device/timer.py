"""The GPU's clock, `%globaltimer`: the kernels that read it, and how far it is from the host's.

A kernel of one thread waits in turn for each of TRIES words of the host, and answers with the
clock. Question and answer lie in pinned memory. The answer was given between the two moments in
which the host asked and saw it, so the quickest of the answers is off by half its round trip at
most: 1 to 2 us over PCIe. The clocks drift apart by about 1 us a second. Beforehand the kernel
reads the clock again and again: the least difference but 0 is the step in which it goes on.
"""

from __future__ import annotations

import time

import numpy as np

from workbench.backend.base import DeviceClock, Memory
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.common.errors import DeviceError

TRIES, LIMIT_NS = 16, 1_000_000_000
# words of 8 bytes; host and device each write cache lines of their own
ASKED, TICK, ANSWERS = 0, 8, 16
NBYTES = 8 * (ANSWERS + TRIES)


def stamp(counter: int, ring: int, n_pairs: int, is_end: bool) -> Kernel:
    """See `Backend.stamp`."""
    return Kernel("stamp", "stamp", (1, 1), 1, [counter, ring, n_pairs, int(is_end)])


def answer(words: int) -> Kernel:
    """Measures the clock's step, then answers. words: address of NBYTES of pinned memory, zeros."""
    return Kernel("stamp", "answer", (1, 1), 1, [words, TRIES, LIMIT_NS])


def read(memory: Memory) -> DeviceClock:
    """Asks the kernel `answer`, which is launched with `memory`. Raises DeviceError where nobody
    answers."""
    assert memory.array is not None, "pinned memory is the host's too"
    words = memoryview(memory.array.view(np.int64).data)
    deadline = time.perf_counter_ns() + 2 * LIMIT_NS

    def await_word(number: int) -> int:
        while not (found := words[number]):
            if time.perf_counter_ns() > deadline:
                raise DeviceError("the GPU's clock does not answer; try again with nothing else on")
        return found

    try:
        tick = await_word(TICK)
        brackets = []
        for number in range(TRIES):
            before = time.perf_counter_ns()
            words[ASKED] = number + 1
            there = await_word(ANSWERS + number)
            after = time.perf_counter_ns()
            brackets.append((after - before, (before + after) // 2 - there))
    finally:
        words.release()
    width, ahead = min(brackets)
    return DeviceClock(ahead, -(-width // 2) + tick, tick)
