"""The pace of the host: how long a fixed loop takes now, beside its fastest.

The cores of a machine have more than one speed: clocks change, and where two threads share a core,
other work on it, a neighbour's in a virtual machine, too, slows this process for seconds at a time.
A token whose launches the host issues one by one grows with that, and a token of one plan does not.
So what is measured while the host is slow says nothing of the same engine on the same host later.
Interleaving does not help where the host changes within a round, nor where all rounds are slow. The
loop tells this without a look at what is measured.

A comparison notes the loop of every round in its run (`pace`). Rounds in which the host was slow,
beside the fastest loop of the process, do not count (`counted`), where enough others are left. This
is done where a GPU computes everything (`tells`). Elsewhere the host computes, too, and the loop
would compete with its workers: there all rounds count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.common.devices import is_gpu

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

SLOW = 1.25  # times its fastest: from here on the host is slow
AS_LONG = "times as long as at its best"
_PASSES, _TIMES = 2000, 3


def tells(engine: Engine) -> bool:
    """Whether the host only issues work for this engine: a GPU computes all layers."""
    config = engine.config
    return is_gpu(engine.device) and config.n_gpu_layers < 0 and not config.override_tensor


class Pace:
    """The fixed loop. least_us: its fastest time so far."""

    def __init__(self) -> None:
        self.least_us = math.inf

    def loop_us(self) -> float:
        """us of the loop now: the shortest of three, of some 0.1 ms, so that one interruption does
        not count."""
        now_us = min(_loop_ns() for _ in range(_TIMES)) / 1e3
        self.least_us = min(self.least_us, now_us)
        return now_us


def _loop_ns() -> int:
    begin, total = time.perf_counter_ns(), 0
    for i in range(_PASSES):
        total += i * i % 7
    return time.perf_counter_ns() - begin


HOST = Pace()  # of this process


class Noted(NamedTuple):
    """What a comparison has noted of its host.

    least_us: the fastest loop of the process; infinite before the first.
    rounds: us of the loop by test and whole round, after the slowest arm.
    """

    least_us: float
    rounds: Mapping[str, Mapping[int, float]]

    def to_dict(self) -> dict[str, Any]:
        """As `run.json` has it: `tests` has a number for each round of a test; null: the round is
        not whole. Empty where nothing was noted."""
        if not any(self.rounds.values()):
            return {}
        tests = {
            test: [rounds.get(n) for n in range(max(rounds, default=-1) + 1)]
            for test, rounds in self.rounds.items()
        }
        return {"least_us": self.least_us, "tests": tests}

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Noted:
        """What a run has; nothing in older runs, and where the host computes."""
        found = run["result"].get("pace") or {"least_us": math.inf, "tests": {}}
        rounds = {
            test: {n: us for n, us in enumerate(every) if us is not None}
            for test, every in found["tests"].items()
        }
        return cls(found["least_us"], rounds)

    def slow(self, test: str) -> set[int]:
        """The rounds of a test in which the host was slow."""
        most = SLOW * self.least_us
        return {n for n, us in self.rounds.get(test, {}).items() if us >= most}

    def uncounted(self, test: str) -> set[int]:
        """Those of them that do not count: none where fewer than MIN_REPETITIONS others are
        left."""
        slow = self.slow(test)
        return slow if len(self.rounds.get(test, ())) - len(slow) >= MIN_REPETITIONS else set()

    def lines(self) -> Iterator[str]:
        """A sentence for each test with slow rounds: whether they count."""
        for test, rounds in self.rounds.items():
            slow = self.slow(test)
            if not slow:
                continue
            said = f"{test}: the host was slow in {len(slow)} of {len(rounds)} rounds"
            if self.uncounted(test):
                yield f"{said}, which do not count"
                continue
            long = statistics.median(rounds.values()) / self.least_us
            yield (
                f"{said}, which count all the same, since fewer than {MIN_REPETITIONS} others are "
                f"left: a fixed loop took {long:.2f} {AS_LONG}"
            )


def counted(run: Mapping[str, Any], samples: pd.DataFrame) -> pd.DataFrame:
    """The samples of the rounds that count."""
    noted = Noted.of(run)
    slow = {(test, n) for test in noted.rounds for n in noted.uncounted(test)}
    if not slow:
        return samples
    of = pd.MultiIndex.from_frame(samples[["test", "repetition"]])
    return samples[~of.isin(slow)]
