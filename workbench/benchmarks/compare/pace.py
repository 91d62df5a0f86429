"""The pace of the host: how much longer a fixed loop takes now than at its fastest.

The cores of a machine have more than one speed: clocks change, and where two threads share a core,
other work on it, a neighbour's in a virtual machine, too, slows this process for seconds at a time.
A token whose launches the host issues one by one grows with that, and a token of one plan does not.
So what is measured while the host is slow says nothing of the same engine on the same host later,
and interleaving does not help where all rounds are slow. The loop tells this without a look at what
is measured.
"""

from __future__ import annotations

import math
import time

SLOW = 1.25  # times its fastest: from here on the host is slow
_PASSES, _TIMES = 2000, 3


class Pace:
    """The fixed loop, and its fastest time so far."""

    def __init__(self) -> None:
        self._least_ns = math.inf

    def slowdown(self) -> float:
        """How many times as long as at its fastest the loop takes now; at least 1. The shortest of
        three loops of some 0.1 ms counts, so that one interruption does not."""
        now_ns = min(_loop_ns() for _ in range(_TIMES))
        self._least_ns = min(self._least_ns, now_ns)
        return now_ns / self._least_ns


def _loop_ns() -> int:
    begin, total = time.perf_counter_ns(), 0
    for i in range(_PASSES):
        total += i * i % 7
    return time.perf_counter_ns() - begin


HOST = Pace()  # of this process
