"""When to stop repeating a test: as soon as its interval is narrow enough.

The rule looks at the interval's width and at the clock, never at the ratio itself. A rule that
stops as soon as an interval excludes 1 finds a difference sooner or later, even without one. A rule
that stops at a width has the same chance of a false verdict as a number of rounds fixed beforehand.

    rounds   0 1 | 2 3 | ... | 8 9 | 10 11 | 12 13 | ...        a block: an order and its reverse
    looks                        ^       ^             ^        from the 10th, then 10 % apart

The interval is a bootstrap over rounds (`stats`): the repetitions of one round stay together.
A test shows that the looks add no false verdicts. `tests/benchmarks/test_compare_until.py` runs
1,000 comparisons of equal arms through this rule and the verdict. Their noise has drifts,
correlations, jumps and outliers; at most 5 % of the verdicts may be false.
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
LOOK = 1.1  # the next look comes after this many times the rounds
AT_MOST_S = 600.0

WIDTH, TIME, INTERRUPTED = "width", "time", "interrupted"  # why repeating a test ended

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Until(NamedTuple):
    """When to stop repeating.

    half_width: of the interval, as a share of the ratio (0.01 for 1 %).
    at_most_s: when to give up, in seconds of measuring over all tests.
    """

    half_width: float
    at_most_s: float = AT_MOST_S


def make_until(half_width: float | str | None, at_most_s: float | str = AT_MOST_S) -> Until | None:
    """The arguments as an `Until`; None where half_width is None. A width can be written as `1%`,
    and a time as `30s`, as the command takes them. Raises UsageError for a width that is not
    between 0 and 1, and for a time that is not above 0."""
    if half_width is None:
        return None
    if isinstance(half_width, str):
        half_width = parse_share("until", half_width)
    if isinstance(at_most_s, str):
        at_most_s = parse_duration("at_most_s", at_most_s)
    if not 0 < half_width < 1:
        raise UsageError(f"until={half_width} is no share; give one between 0 and 1, such as 0.01")
    if not 0 < at_most_s < math.inf:
        raise UsageError(f"at_most_s={at_most_s} must be above 0 seconds")
    return Until(float(half_width), float(at_most_s))


def optional_until(
    half_width: float | str | None, at_most_s: float | str = AT_MOST_S
) -> Until | None:
    """As `make_until`. Raises UsageError, too, for a time without a width."""
    if half_width is None and at_most_s != AT_MOST_S:
        raise UsageError(
            f"at_most_s={at_most_s!r} needs until: it is the time after which until gives up; "
            "give until='1%', or leave at_most_s out"
        )
    return make_until(half_width, at_most_s)


def parse_share(flag: str, text: str) -> float:
    """`1%` or `0.01` -> 0.01. Raises UsageError for any text but a share between 0 and 1."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text, re.ASCII)
    share = float(found[1]) / (100 if found[2] else 1) if found else math.nan
    if not 0 < share < 1:
        raise UsageError(f"{flag} {text!r} is no share between 0 and 1; write it as 1% or 0.01")
    return share


def parse_duration(flag: str, text: str) -> float:
    """`30s`, `10m` or `1.5h` -> seconds. Raises UsageError for any other text, and for 0."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smh])\s*", text, re.ASCII)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"{flag} {text!r} is no length of time; write it as 30s, 10m or 1h")
    return seconds


Rates = Sequence[Sequence[float]] | np.ndarray  # t/s, (rounds, arms)


def half_width(tps: Rates, seed: int = 0) -> float:
    """The half-width of the interval of a test, as a share; NaN with one round.

    tps: t/s, float (rounds, arms); the first arm is the baseline. With several arms the interval is
        the widest of the ratios', the A/A control's included. With one arm it is the median's.
    """
    first, *others = np.asarray(tps, float).T
    if not others:
        return stats.half_width(*stats.median_interval(first, seed)[1:])
    ratios = (stats.speedup(first, other, seed) for other in others)
    return max(stats.half_width(ratio.low, ratio.high) for ratio in ratios)


class Stopping:
    """Decides after each round whether a test is repeated further. Each test has its own
    `Stopping`.

    width: the half-width at the last look, NaN before the first look.
    """

    def __init__(self, until: Until, seed: int = 0, least: int = LEAST_ROUNDS):
        self.until, self.seed = until, seed
        self.width = math.nan
        self._n, self._looked = 0, 0
        self._next = max(least, LEAST_ROUNDS)

    def reason(
        self,
        tps: Rates,
        spent_s: float,
        round_s: float = 0.0,
        counted: Callable[[], Rates] | None = None,
    ) -> str | None:
        """`width` or `time` where the test ends now, None where it goes on.

        tps: t/s of all whole rounds so far, float (rounds, arms). counted(): of those that count;
            None: all of them.
        spent_s: seconds of measuring this test.
        round_s: seconds of one round. A block that would end too late is not begun.
        """
        self._n = len(tps)
        if self._n == 0 or self._n % BLOCK:
            return None
        late = spent_s + BLOCK * round_s > self.until.at_most_s
        if self._n >= self._next or (late and self._n > self._looked):
            looked_at = tps if counted is None else counted()
            self.width, self._looked = half_width(looked_at, self.seed), self._n
        if self._n >= self._next:
            if self.width <= self.until.half_width:
                return WIDTH
            self._next = max(self._n + BLOCK, math.ceil(LOOK * self._n))
        return TIME if late else None

    def expected_rounds(self, spent_s: float, round_s: float) -> int:
        """The expected number of rounds at the end, by the width and by the clock."""
        wanted = self._next if math.isnan(self.width) else self.needed()
        if round_s > 0:
            left = (self.until.at_most_s - spent_s) / round_s
            wanted = min(wanted, self._n + max(0, math.floor(left)))
        return max(self._n + 1, wanted)

    def needed(self) -> int:
        """The number of rounds for the wanted width, by the width at the last look."""
        return int(stats.rounds_for(self._looked, self.width, self.until.half_width))


class RepeatEnd(NamedTuple):
    """How repeating a test ended, as in `run.json` under `result.until.tests`.

    rounds: how many were run.
    half_width: of the interval at the last look, null before the first look.
    wanted: the half-width that was asked for.
    stopped: `width`, `time` or `interrupted`.
    seconds: of measuring this test, over all sessions.
    """

    rounds: int
    half_width: float | None
    wanted: float
    stopped: str
    seconds: float

    def line(self, rounds: str = "rounds", of: str = "the interval's") -> str:
        """One sentence: the half-width that was reached, and the effort for the wanted half-width
        where it was not reached.

        rounds: the word for rounds.
        of: the owner of the half-width.
        """
        wanted, known = stats.percent(self.wanted), self.half_width
        made = f"after {self.rounds} {rounds}"
        if known is None:
            return f"{of} half-width is unknown {made}; {wanted} was asked for"
        said = f"{of} half-width is {stats.percent(known)} {made}"
        if self.stopped == WIDTH:
            return f"{said}; {wanted} was asked for"
        needed = stats.rounds_for(self.rounds, known, self.wanted)
        seconds = self.seconds / self.rounds * needed
        if seconds > 7 * 24 * 3600:
            advice = f"No number of {rounds} that fits in a week would do"
        else:
            advice = f"About {stats.two_digits(needed)} {rounds} would do, in {duration(seconds)}"
        return f"{wanted} was not reached: {said} and {duration(self.seconds)}. {advice}"


def rounds_of(
    until: Until,
    whole: Callable[[], Rates],
    note: Callable[[RepeatEnd], None],
    *,
    counted: Callable[[], Rates] | None = None,
    prepare: Callable[[], None] = lambda: None,
    seed: int = 0,
    least: int = LEAST_ROUNDS,
    seconds_before: float = 0.0,
) -> Iterator[tuple[int, int]]:
    """The rounds of one test, each with the expected number of rounds, until `until` is fulfilled.

    whole(): t/s of the rounds that were run, float (rounds, arms); called before each round.
    note(ended): called before each round and at the end, with the `RepeatEnd` of this moment.
    counted(): t/s of the rounds that count, for the width; None: all of them.
    prepare(): called once before the first round, if any round is run; its time does not count.
    seconds_before: seconds of earlier sessions; they do not count for `until.at_most_s`.
    """
    stopping, begun, round_s = Stopping(until, seed, least), time.monotonic(), 0.0
    prepared = False
    while True:
        tps, spent = whole(), time.monotonic() - begun
        stopped = stopping.reason(tps, spent, round_s, counted)
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
    """`until` for the next test, with its share of the time that is left."""
    return until._replace(at_most_s=max(until.at_most_s - spent_s, 0.0) / tests_left)


def reached(ended: Mapping[str, Any] | None) -> str:
    """Text for a progress bar: `half-width 1.8 %, 1 % asked`; empty before the first look."""
    if not ended or ended["half_width"] is None:
        return ""
    return (
        f"half-width {stats.percent(ended['half_width'])}, {stats.percent(ended['wanted'])} asked"
    )
