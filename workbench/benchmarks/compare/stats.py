"""Statistics of a comparison: a ratio of medians, its interval, and a verdict that allows for
noise.

The speedup of an arm is (median t/s toggled) / (median t/s baseline). Its interval is a bootstrap
over *rounds*. A round holds one repetition of every arm, taken one after the other. So a drift over
seconds (clocks, neighbours) affects both sides of a resampled pair alike. The interval is the
percentile interval of the log ratio; BCa is not used, since its acceleration comes from a
jackknife, which fails for a median (Efron & Tibshirani, An Introduction to the Bootstrap, ch. 11).

The A/A control is the baseline measured a second time as an arm of its own. Its interval shows how
large an effect noise alone has. The A/A band is the smallest interval around 1, symmetric in the
log, that contains the control's whole interval.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
N_RESAMPLES = 4999
BATCH = 1 << 22  # numbers resampled at once: 32 MB for each sample
MIN_REPETITIONS = 5

FASTER, SLOWER, SAME = "faster", "slower", "no difference"
TOO_FEW = "too few repetitions"
SAME_WORK = "same work"  # of an arm that does what the baseline does: one more control


class Ratio(NamedTuple):
    """A speedup with its confidence interval, from n pairs. The bounds are NaN where n is below
    2."""

    value: float
    low: float
    high: float
    n: int


class Band(NamedTuple):
    """The A/A band: without any change, this machine measures ratios in low..high."""

    low: float
    high: float


def interval(low: float, high: float) -> str:
    """An interval as tables print it: `0.987..1.012`; `-` without an interval."""
    return "-" if math.isnan(low) else f"{low:.3f}..{high:.3f}"


def percent(share: float) -> str:
    """`0.97 %` or `30 %`: a share with two digits."""
    if not math.isfinite(share):
        return "-"
    return np.format_float_positional(100 * share, precision=2, fractional=False, trim="-") + " %"


def two_digits(n: float) -> str:
    """An estimated number, with two digits: `560` or `15,000`."""
    return f"{float(f'{n:.2g}'):,.0f}"


def half_width(low: float, high: float) -> float:
    """The half-width of an interval of positive numbers, as a share of its middle in the log: 0.01
    where the truth is within 1 %. NaN without an interval."""
    return math.sqrt(high / low) - 1


def rounds_for(n: int, reached: float, wanted: float) -> float:
    """How many rounds give an interval of width `wanted`, where n rounds gave `reached`. The width
    falls with the square root of the number of rounds. Infinite where `wanted` is 0."""
    return math.ceil(n * (reached / wanted) ** 2) if wanted > 0 else math.inf


def speedup(baseline: np.ndarray, toggled: np.ndarray, seed: int = 0) -> Ratio:
    """Ratio of medians toggled/baseline with its paired bootstrap interval.

    baseline, toggled: t/s, one per round, float (n,), entry i of both from round i. The same seed
    gives the same interval. One pair gives NaN bounds. Raises ValueError where lengths differ, both
    are empty, or a rate is not a positive number.
    """
    if len(baseline) != len(toggled):
        raise ValueError(f"{len(baseline)} rates cannot be paired with {len(toggled)}")
    return _ratio(baseline, toggled, seed, paired=True)


def independent_ratio(baseline: np.ndarray, toggled: np.ndarray) -> Ratio:
    """Ratio of medians toggled/baseline of rates that were not interleaved, float (n,) and (m,):
    each side is resampled on its own. n of the result is the smaller of the two. Raises
    ValueError where a side is empty or a rate is not a positive number."""
    return _ratio(baseline, toggled, 0, paired=False)


def _ratio(baseline: np.ndarray, toggled: np.ndarray, seed: int, paired: bool) -> Ratio:
    sides = [np.asarray(side, float) for side in (baseline, toggled)]
    if any(not len(s) or not np.all(np.isfinite(s) & (s > 0)) for s in sides):
        raise ValueError("rates must be positive numbers, and at least one on each side")
    logs = (np.log(sides[0]), np.log(sides[1]))
    value, n = float(_log_ratio(*logs)), min(map(len, logs))
    if n < 2:
        return Ratio(math.exp(value), math.nan, math.nan, n)
    if np.ptp(logs[0]) == 0 and np.ptp(logs[1]) == 0:
        return Ratio(math.exp(value), math.exp(value), math.exp(value), n)
    low, high = _bounds(logs, _log_ratio, seed, paired)
    return Ratio(math.exp(value), math.exp(low), math.exp(high), n)


def interaction(
    start: np.ndarray, together: np.ndarray, alone: Sequence[np.ndarray], seed: int = 0
) -> Ratio:
    """The speedup of several switches together over the product of their speedups alone, with its
    paired bootstrap interval. 1: they gain independently of each other.

    start, together, alone: t/s without any switch, with all of them, and with each of them; one per
        round, float (n,), entry i of all from round i. One round gives NaN bounds.
    """
    logs = tuple(np.log(np.asarray(side, float)) for side in (start, together, *alone))
    value, n = float(_log_interaction(*logs)), len(logs[0])
    if n < 2:
        return Ratio(math.exp(value), math.nan, math.nan, n)
    if all(np.ptp(side) == 0 for side in logs):
        return Ratio(math.exp(value), math.exp(value), math.exp(value), n)
    low, high = _bounds(logs, _log_interaction, seed, paired=True)
    return Ratio(math.exp(value), math.exp(low), math.exp(high), n)


def _log_interaction(
    start: np.ndarray, together: np.ndarray, *alone: np.ndarray, axis: int = -1
) -> np.ndarray:
    first = np.median(start, axis=axis)
    gains = sum(np.median(one, axis=axis) - first for one in alone)
    return np.asarray(np.median(together, axis=axis) - first - gains)


def median_interval(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Median of `values`, float (n,), one per round, and its percentile bootstrap interval; the
    bounds are NaN where n is below 2."""
    values = np.asarray(values, float)
    middle = float(np.median(values))
    if len(values) < 2:
        return middle, math.nan, math.nan
    if np.ptp(values) == 0:
        return middle, middle, middle
    return middle, *_bounds((values,), np.median, seed)


def _bounds(
    samples: tuple[np.ndarray, ...],
    statistic: Callable,
    seed: int,
    paired: bool = False,
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic; paired: entry i of every sample is from
    round i."""
    from scipy.stats import bootstrap  # slow to import, and rarely needed

    found = bootstrap(
        samples,
        statistic,
        paired=paired,
        vectorized=True,
        n_resamples=N_RESAMPLES,
        batch=max(1, BATCH // max(map(len, samples))),
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def _log_ratio(baseline: np.ndarray, toggled: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.median(toggled, axis=axis) - np.median(baseline, axis=axis)


def aa_band(control: Ratio) -> Band:
    """The band that the A/A control's interval spans around 1; NaN where the control has none."""
    if math.isnan(control.low):
        return Band(math.nan, math.nan)
    half = max(abs(math.log(control.low)), abs(math.log(control.high)))
    return Band(math.exp(-half), math.exp(half))


def excludes_1(ratio: Ratio) -> bool:
    """Whether the whole interval lies on one side of 1; false without an interval."""
    return ratio.low > 1 or ratio.high < 1


def resolution(ratio: Ratio, band: Band) -> float:
    """The smallest effect that would have had a verdict, as a share: 0.3 for 30 %.

    For a verdict an effect must be outside the A/A band, and its interval must exclude 1. So
    `verdict` is "no difference" exactly where the effect is at most this. NaN without an interval.
    """
    if math.isnan(band.low) or math.isnan(ratio.low):
        return math.nan
    reach = ratio.value / ratio.low if ratio.value >= 1 else ratio.high / ratio.value
    return max(band.high, reach) - 1


def effect(ratio: Ratio) -> float:
    """How far a speedup is from 1, as a share, in either direction: 0.25 for 1.25 and for 0.8."""
    return max(ratio.value, 1 / ratio.value) - 1


def verdict(ratio: Ratio, band: Band) -> str:
    """`faster`, `slower`, `no difference` or `too few repetitions`.

    A difference needs both: the speedup lies outside the A/A band, and its interval excludes 1.
    """
    if ratio.n < MIN_REPETITIONS or math.isnan(band.low):
        return TOO_FEW
    if ratio.value > band.high and ratio.low > 1:
        return FASTER
    if ratio.value < band.low and ratio.high < 1:
        return SLOWER
    return SAME
