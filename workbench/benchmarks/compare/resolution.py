"""Sentences about effects that a comparison cannot resolve: how noisy it was, and what helps.

"No difference" says little on a machine that cannot resolve 30 %. So the report also gives the
smallest effect that would have had a verdict, and how to resolve smaller effects.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.stats import Band, Ratio
from workbench.benchmarks.compare.until import INTERRUPTED, TIME, RepeatEnd

MOST_ROUNDS = 1000  # advice never names more
# what helps a test that ended before the width that was asked for; how it ended has the rounds
MORE = {
    TIME: "more time (--at-most; in Python at_most_s)",
    INTERRUPTED: "the rest of the run (--resume; in Python resume=True)",
}


def lines(summary: pd.DataFrame, ends: Mapping[str, RepeatEnd]) -> Iterator[str]:
    """A line for each test whose control excludes 1, or that has an effect too small to resolve.

    summary: the frame of `AB.summary`.
    ends: how the tests ended that were repeated until an interval was narrow.
    """
    for test, rows in summary.groupby("test", sort=False):
        control = next((_ratio(row) for row in rows[rows["is_control"]].itertuples()), None)
        band = Band(*rows[["band_low", "band_high"]].iloc[0])
        acting = rows[~rows["is_control"] & (rows["verdict"] != stats.SAME_WORK)]
        arms = {row.label: _ratio(row) for row in acting.itertuples()}
        said = sentence(arms, band, control, ends.get(str(test)))
        if said:
            yield f"{test}: {said}"


def _ratio(row: object) -> Ratio:
    return Ratio(*(getattr(row, name) for name in ("speedup", "low", "high", "n")))


def sentence(
    arms: dict[str, Ratio], band: Band, control: Ratio | None, ended: RepeatEnd | None = None
) -> str:
    """The effects that one test cannot resolve, and what helps. Empty where every arm's effect is
    resolved and the control's interval holds 1, and where there are too few repetitions.

    arms: the toggled arms' ratios to the baseline, by label.
    ended: how the test ended, where it was repeated until its intervals were narrow.
    """
    unclear = {a: r for a, r in arms.items() if stats.verdict(r, band) == stats.SAME}
    enough = [r for r in arms.values() if stats.verdict(r, band) != stats.TOO_FEW]
    apart = control is not None and stats.excludes_1(control)
    if not enough or not (unclear or apart):
        return ""
    least = max([band.high - 1, *(stats.resolution(r, band) for r in unclear.values())])
    if least < 1e-6:  # no noise at all: a simulated device with fixed times
        return ""
    said = f"this machine cannot resolve less than {stats.percent(least)} here now"
    if unclear:
        effects = [f"{stats.percent(stats.effect(r))} ({arm})" for arm, r in unclear.items()]
        said += f", and the effect{' is' if len(effects) == 1 else 's are'} {', '.join(effects)}"
    if apart and control is not None:
        said = (
            f"the A/A control's interval {stats.interval(control.low, control.high)} excludes 1: "
            f"the baseline, measured twice, differs from itself. T{said[1:]}"
        )
    return f"{said}. {_advice(least, unclear, enough[0].n, ended)}"


def _advice(least: float, unclear: dict[str, Ratio], n: int, ended: RepeatEnd | None) -> str:
    """How to resolve the largest unclear effect, or half of the effect that is resolved now."""
    if ended is not None and ended.stopped in MORE:
        return f"What helps: {MORE[ended.stopped]}, a longer test, a quiet machine"
    largest = max((stats.effect(r) for r in unclear.values()), default=0.0)
    rounds = stats.rounds_for(n, least, largest)
    if rounds > MOST_ROUNDS or rounds <= n:
        rounds, largest = 4 * n, least / 2
        more = f"{rounds} rounds (by the width, they halve that)"
    else:
        about = stats.two_digits(rounds)
        more = f"about {about} rounds (by the width, they resolve {stats.percent(largest)})"
    asked = math.inf if ended is None else ended.wanted
    until = _one_digit(min(largest, asked) / 2)
    return (
        f"What helps: {more}, a longer test, a quiet machine, "
        f"or --until {until * 100:g}% (in Python until={until:g})"
    )


def _one_digit(share: float) -> float:
    """Rounded down to one digit: 0.0137 -> 0.01."""
    share = max(share, 1e-6)
    size = 10.0 ** math.floor(math.log10(share))
    return float(np.round(math.floor(share / size + 1e-9) * size, 6))
