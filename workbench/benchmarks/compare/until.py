"""Repetition until it is known: when is an interval narrow enough to stop?

The rule looks at the interval's width and at the clock, never at the ratio itself. Whoever stops
as soon as an interval excludes 1 finds a difference in nothing, given time; whoever stops at a
width has the same chance of a false verdict as at a number of rounds fixed before.

    rounds   0 1 | 2 3 | ... | 8 9 | 10 11 | 12 13 | ...        a block: an order and its reverse
    looks                        ^       ^             ^        from the 10th, then 10 % apart

The interval is a bootstrap over rounds (`stats`): the repetitions of one round stay together. That
the looks cost nothing is measured. `tests/benchmarks/test_compare_until.py` runs 1,000 comparisons
of a thing with itself through this rule and the verdict. Their noise drifts, lasts, jumps and has
outliers; at most 5 % of the verdicts may be false.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.benchmarks.compare import stats
from workbench.common.errors import UsageError
from workbench.common.progress import duration

LEAST_ROUNDS = 10
BLOCK = 2  # rounds: an order of the arms, and the same backwards
LOOK = 1.1  # the next look, once there are so many times the rounds of this one
AT_MOST_S = 600.0

WIDTH, TIME, INTERRUPTED = "width", "time", "interrupted"  # why a test was repeated no further

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Until(NamedTuple):
    """What is asked for. half_width: of the interval, as a share of the ratio (0.01 for 1 %).
    at_most_s: when to give up, seconds of measuring over all tests."""

    half_width: float
    at_most_s: float = AT_MOST_S


def make_until(half_width: float | None, at_most_s: float = AT_MOST_S) -> Until | None:
    """None where no width is asked for. Raises UsageError for a width that is no share between 0
    and 1, and for a time that is not above 0."""
    if half_width is None:
        return None
    if not 0 < half_width < 1:
        raise UsageError(f"until={half_width} is no share; give one between 0 and 1, such as 0.01")
    if not 0 < at_most_s < math.inf:
        raise UsageError(f"at_most_s={at_most_s} must be above 0 seconds")
    return Until(float(half_width), float(at_most_s))


def parse_share(flag: str, text: str) -> float:
    """`1%` or `0.01` -> 0.01. Raises UsageError for anything that is no share between 0 and 1."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text, re.ASCII)
    share = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 < share < 1:
        raise UsageError(f"{flag} {text!r} is no share between 0 and 1; write it as 1% or 0.01")
    return share


def parse_duration(flag: str, text: str) -> float:
    """`30s`, `10m` or `1.5h` -> seconds. Raises UsageError for anything else, and for 0."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smh])\s*", text, re.ASCII)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"{flag} {text!r} is no length of time; write it as 30s, 10m or 1h")
    return seconds


Rates = Sequence[Sequence[float]] | np.ndarray  # t/s, (rounds, arms)


def half_width(tps: Rates, seed: int = 0) -> float:
    """How closely a test is known, as a share; NaN with one round.

    tps: t/s, float (rounds, arms), the first arm the baseline: the half-width of the widest ratio,
    the A/A control's included. With one arm: of its median.
    """
    first, *others = np.asarray(tps, float).T
    if not others:
        return stats.half_width(*stats.median_interval(first, seed)[1:])
    ratios = (stats.speedup(first, other, seed) for other in others)
    return max(stats.half_width(ratio.low, ratio.high) for ratio in ratios)


class Stopping:
    """Says after each round whether a test is repeated further; one for each test.

    width: the half-width at the last look, NaN before the first.
    """

    def __init__(self, until: Until, seed: int = 0, least: int = LEAST_ROUNDS):
        self.until, self.seed = until, seed
        self.width = math.nan
        self._n, self._looked = 0, 0
        self._next = max(least, LEAST_ROUNDS)

    def reason(self, tps: Rates, spent_s: float, round_s: float = 0.0) -> str | None:
        """`width` or `time` where the test ends here, None where it goes on.

        tps: of all whole rounds so far, float (rounds, arms). spent_s: of this test's time;
        round_s: what one round takes. A block that would end too late is not begun.
        """
        self._n = len(tps)
        if self._n == 0 or self._n % BLOCK:
            return None
        late = spent_s + BLOCK * round_s > self.until.at_most_s
        if self._n >= self._next or (late and self._n > self._looked):
            self.width, self._looked = half_width(tps, self.seed), self._n
        if self._n >= self._next:
            if self.width <= self.until.half_width:
                return WIDTH
            self._next = max(self._n + BLOCK, math.ceil(LOOK * self._n))
        return TIME if late else None

    def expected_rounds(self, spent_s: float, round_s: float) -> int:
        """How many rounds there will be in the end, by the width and by the clock."""
        wanted = self._next if math.isnan(self.width) else self.needed()
        if round_s > 0:
            left = (self.until.at_most_s - spent_s) / round_s
            wanted = min(wanted, self._n + max(0, math.floor(left)))
        return max(self._n + 1, wanted)

    def needed(self) -> int:
        """How many rounds the width asks for: it shrinks with the square root of their number."""
        return int(stats.rounds_for(self._looked, self.width, self.until.half_width))


class RepeatEnd(NamedTuple):
    """How the repeating of a test ended, as `run.json` has it under `result.until.tests`.

    rounds: made; half_width: of the interval at the last look, null before the first; wanted: what
    was asked for; stopped: `width`, `time` or `interrupted`; seconds: spent on this test, over all
    sessions.
    """

    rounds: int
    half_width: float | None
    wanted: float
    stopped: str
    seconds: float

    def line(self, rounds: str = "rounds", of: str = "the interval's") -> str:
        """One sentence: how well the test is known, and what would do where that is not enough.
        rounds: what they are called; of: what the half-width belongs to."""
        wanted, known = stats.percent(self.wanted), self.half_width
        made = f"after {self.rounds} {rounds}"
        if known is None:
            return f"{of} half-width is unknown {made}; {wanted} was asked for"
        said = f"{of} half-width is {stats.percent(known)} {made}"
        if self.stopped == WIDTH:
            return f"{said}; {wanted} was asked for"
        needed = stats.rounds_for(self.rounds, known, self.wanted)
        seconds = self.seconds / self.rounds * needed
        return (
            f"{wanted} was not reached: {said} and {duration(self.seconds)}. "
            f"About {stats.two_digits(needed)} {rounds} would do, in {duration(seconds)}"
        )


def rounds_of(
    until: Until,
    whole: Callable[[], Rates],
    note: Callable[[RepeatEnd], None],
    *,
    prepare: Callable[[], None] = lambda: None,
    seed: int = 0,
    least: int = LEAST_ROUNDS,
    seconds_before: float = 0.0,
) -> Iterator[tuple[int, int]]:
    """The rounds of one test, each with the number that there will probably be, until it is known.

    whole(): t/s of the rounds that were run, float (rounds, arms), asked for before each round.
    note(ended): how it would end now, told before each round and at the end. prepare(): called once
    before the first round, where there is one; its time is not counted. seconds_before: spent on
    this test by earlier sessions; they do not count for `until.at_most_s`.
    """
    stopping, begun, round_s = Stopping(until, seed, least), time.monotonic(), 0.0
    prepared = False
    while True:
        tps, spent = whole(), time.monotonic() - begun
        stopped = stopping.reason(tps, spent, round_s)
        width = None if math.isnan(stopping.width) else stopping.width
        seconds = round(seconds_before + spent, 3)
        note(RepeatEnd(len(tps), width, until.half_width, stopped or INTERRUPTED, seconds))
        if stopped is not None:
            return
        if not prepared:
            prepare()
            prepared, begun = True, time.monotonic()
        before = time.monotonic()
        yield len(tps), stopping.expected_rounds(spent, round_s)
        round_s = time.monotonic() - before


def share_of(until: Until, spent_s: float, tests_left: int) -> Until:
    """The same for the next test: it has its share of the time that is left."""
    return until._replace(at_most_s=max(until.at_most_s - spent_s, 0.0) / tests_left)


def reached(ended: Mapping[str, Any] | None) -> str:
    """What a progress bar says: `half-width 1.8 %, 1 % asked`; empty before the first look."""
    if not ended or ended["half_width"] is None:
        return ""
    return (
        f"half-width {stats.percent(ended['half_width'])}, {stats.percent(ended['wanted'])} asked"
    )
