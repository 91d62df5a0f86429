"""The pace of the host: how much longer a fixed loop takes now than at its fastest.

The cores of a machine have more than one speed: clocks change, and where two threads share a core,
other work on it, a neighbour's in a virtual machine, too, slows this process for seconds at a time.
A token whose launches the host issues one by one grows with that, and a token of one plan does not.
So what is measured while the host is slow says nothing of the same engine on the same host later.
Interleaving does not help where all rounds are slow, nor where the host changes within a round. The
loop tells this without a look at what is measured.

A comparison on a GPU notes the loop of every round in its run (`pace`). Rounds in which the host
was slow, beside the fastest round of the run, do not count (`counted`). On a CPU the host is the
device, and the loop would compete with its workers: there all rounds count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.benchmarks.compare.stats import MIN_REPETITIONS

SLOW = 1.25  # times its fastest: from here on the host is slow
_PASSES, _TIMES = 2000, 3


class Pace:
    """The fixed loop, and its fastest time so far."""

    def __init__(self) -> None:
        self._least_us = math.inf

    def loop_us(self) -> float:
        """us of the loop now: the shortest of three, of some 0.1 ms, so that one interruption does
        not count."""
        now_us = min(_loop_ns() for _ in range(_TIMES)) / 1e3
        self._least_us = min(self._least_us, now_us)
        return now_us

    def slowdown(self) -> float:
        """How many times as long as at its fastest the loop takes now; at least 1."""
        now_us = self.loop_us()
        return now_us / self._least_us


def _loop_ns() -> int:
    begin, total = time.perf_counter_ns(), 0
    for i in range(_PASSES):
        total += i * i % 7
    return time.perf_counter_ns() - begin


HOST = Pace()  # of this process

HostUs = Mapping[str, Mapping[int, float]]  # us of the loop by test and round, of the slowest arm


def noted(host_us: HostUs) -> dict[str, list[float | None]]:
    """That as `run.json` has it: by test, a number for each round; null: the round is not whole."""
    return {
        test: [rounds.get(n) for n in range(max(rounds, default=-1) + 1)]
        for test, rounds in host_us.items()
    }


def read(run: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """What `noted` wrote into a run; nothing of a run on a CPU, and of older runs."""
    found = run["result"].get("pace") or {}
    return {
        test: {n: us for n, us in enumerate(rounds) if us is not None}
        for test, rounds in found.items()
    }


def slow_rounds(host_us: HostUs) -> dict[str, set[int]]:
    """The rounds of each test that do not count: the host was slow. None where fewer than
    MIN_REPETITIONS of the test's rounds are left without them."""
    every = [us for rounds in host_us.values() for us in rounds.values()]
    most, found = SLOW * min(every, default=0.0), dict[str, set[int]]()
    for test, rounds in host_us.items():
        slow = {n for n, us in rounds.items() if us >= most}
        found[test] = slow if len(rounds) - len(slow) >= MIN_REPETITIONS else set()
    return found


def counted(run: Mapping[str, Any], samples: pd.DataFrame) -> pd.DataFrame:
    """The samples of the rounds that count."""
    slow = {(test, n) for test, rounds in slow_rounds(read(run)).items() for n in rounds}
    if not slow:
        return samples
    of = pd.MultiIndex.from_frame(samples[["test", "repetition"]])
    return samples[~of.isin(slow)]
