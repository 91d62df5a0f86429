"""The GPU's clock, `%globaltimer`: the kernels that read it, and its distance from the host's
clock.

A kernel of one thread answers each of TRIES questions of the host with the time. Question and
answer are words of pinned memory. The kernel read its clock after the host asked and before the
host saw the answer. So the quickest answer is off by at most half its round trip: 1 to 2 us over
PCIe. The clocks drift apart by about 1 us a second.

Before the first answer the kernel reads its clock again and again. The least difference above 0 is
the step in which the clock advances.
"""

from __future__ import annotations

import time

import numpy as np

from workbench.backend.base import DeviceClock, Memory
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.common.errors import DeviceError

TRIES, LIMIT_NS = 16, 1_000_000_000
# indices of words of 8 bytes; host and device write separate cache lines
ASKED, TICK, ANSWERS = 0, 8, 16
NBYTES = 8 * (ANSWERS + TRIES)


def stamp(counter: int, ring: int, n_pairs: int, is_end: bool) -> Kernel:
    """See `Backend.stamp`."""
    return Kernel("stamp", "stamp", (1, 1), 1, [counter, ring, n_pairs, int(is_end)])


def answer(words: int) -> Kernel:
    """The launch that measures the clock's step, and then answers.

    words: the address of NBYTES of zeroed pinned memory.
    """
    return Kernel("stamp", "answer", (1, 1), 1, [words, TRIES, LIMIT_NS])


def read(memory: Memory) -> DeviceClock:
    """Asks the kernel `answer`, which has been launched with `memory`. Raises DeviceError where no
    answer comes."""
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
