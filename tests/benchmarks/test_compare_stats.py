"""Ratios, intervals, the A/A band, the verdict, equal answers, and what could not be seen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.benchmarks.compare import answers, stats
from workbench.benchmarks.compare.answers import compare_logits
from workbench.benchmarks.compare.resolution import sentence
from workbench.benchmarks.compare.stats import FASTER, SAME, SLOWER, TOO_FEW, Band, Ratio, verdict


def rounds(rng, n, noise=0.02, drift=0.0):
    """t/s of one arm over n rounds; drift is common to every arm of a round."""
    return 100 * np.exp(noise * rng.standard_normal(n) + drift)


def test_a_speedup_is_the_ratio_of_medians():
    ratio = stats.speedup(np.array([10.0, 11, 12, 50, 9]), np.array([22.0, 20, 24, 23, 1]))
    assert ratio.value == pytest.approx(22 / 11)
    assert ratio.low <= ratio.value <= ratio.high and ratio.n == 5
    assert stats.speedup([10.0, 12.0], [11.0, 11.0]).value == pytest.approx(11 / math.sqrt(120))
    one = stats.speedup([100.0], [110.0])
    assert one.value == pytest.approx(1.1) and math.isnan(one.low) and one.n == 1
    for bad in ([], [0.0, 1.0], [math.nan, 1.0]):
        for of in (stats.speedup, stats.independent_ratio):
            with pytest.raises(ValueError, match="positive"):
                of(np.array(bad), np.array(bad))


def test_pairing_removes_drift_and_a_seed_repeats_itself():
    """A machine that slows down by half over the run widens both arms, and not their ratio."""
    rng = np.random.default_rng(1)
    drift = np.linspace(0, -0.7, 20)
    a, b = rounds(rng, 20, 0.002, drift), 1.1 * rounds(rng, 20, 0.002, drift)
    paired = stats.speedup(a, b)
    shuffled = stats.speedup(a, rng.permutation(b))
    assert paired.low < 1.1 < paired.high
    assert math.log(paired.high / paired.low) < 0.5 * math.log(shuffled.high / shuffled.low)
    a, b = rounds(rng, 10), rounds(rng, 10)
    assert stats.speedup(a, b, seed=3) == stats.speedup(a, b, seed=3) != stats.speedup(a, b, seed=4)


def test_the_band_holds_the_controls_interval():
    for low, high, wide in ((0.99, 1.05, 1.05), (0.8, 0.95, 1.25)):
        band = stats.aa_band(Ratio(1.0, low, high, 10))
        assert (band.low, band.high) == pytest.approx((1 / wide, wide))


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(1.10, 1.08, 1.12, 10), FASTER), (Ratio(0.90, 0.88, 0.92, 10), SLOWER),
        (Ratio(1.04, 1.03, 1.05, 10), SAME),  # significant, but inside the A/A band
        (Ratio(0.96, 0.95, 0.97, 10), SAME),
        (Ratio(1.10, 0.99, 1.20, 10), SAME),  # outside the band, but the interval holds 1
        (Ratio(1.50, 1.40, 1.60, 4), TOO_FEW),
    ],
)  # fmt: skip
def test_verdicts(ratio, expected):
    assert verdict(ratio, Band(1 / 1.05, 1.05)) == expected


# what could not have been seen -------------------------------------------------------------------

SHARES = st.floats(0.001, 2.0)


def ratio_of(value: float, below: float, above: float, n: int = 10) -> Ratio:
    return Ratio(value, value / (1 + below), value * (1 + above), n)


@given(st.floats(0.2, 5.0), SHARES, SHARES, st.floats(0.5, 2.0), SHARES, st.integers(5, 99))
def test_whatever_is_not_resolved_is_said(value, below, above, middle, half, n):
    """The number in the sentence is the one that the verdict is made of."""
    found, control = ratio_of(value, below, above, n), ratio_of(middle, half, half, n)
    band = stats.aa_band(control)
    least = stats.resolution(found, band)
    apart, same = stats.excludes_1(control), verdict(found, band) == SAME
    if not math.isclose(stats.effect(found), least, rel_tol=1e-9):
        assert same == (stats.effect(found) < least)
    said = sentence({"on": found}, band, control)
    assert bool(said) == (apart or same) and ("excludes 1" in said) == apart
    assert (stats.percent(stats.effect(found)) + " (on)" in said) == same
    if said:
        assert "his machine cannot resolve less than " in said and "What helps: " in said
        assert said.count("--until ") == said.count("(in Python until=") == 1
    quiet = ratio_of(1.0, 0.3, 0.3)
    said = sentence({"packed": ratio_of(1.1, 0.02, 0.02)}, stats.aa_band(quiet), quiet)
    assert said.endswith("or --until 5% (in Python until=0.05)"), "half of the effect"


# answers -----------------------------------------------------------------------------------------


def test_exact_answers_are_bit_equal():
    a = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    same = compare_logits(a, a.copy(), "exact")
    assert same == ("exact", True, 4, 0, 0.0, True) == answers.Answer.from_dict(same.to_dict())
    b = a.copy()
    b[2, 3] = np.nextafter(b[2, 3], np.float32(9))
    found = compare_logits(a, b, "exact")
    assert not found.holds and found.n_differ == 1 and "DIFFERENT in 1 of 4" in str(found)
    zeros = np.zeros((1, 9), np.float32)  # equal, but not in bits
    assert not compare_logits(zeros, -zeros, "exact").holds
    assert "bit-equal" not in str(compare_logits(zeros, -zeros, "rounding"))
    with pytest.raises(ValueError, match="shapes"):
        compare_logits(np.zeros((2, 3)), np.zeros((3, 2)), "exact")
    assert answers.merge([same, same]) == ("exact", True, 8, 0, 0.0, True)
    assert answers.merge([same, found]) == ("exact", False, 8, 1, found.nmse, False)


def test_rounding_answers_are_close_where_it_matters():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((6, 500)).astype(np.float32)
    near = a + 1e-3 * rng.standard_normal(a.shape).astype(np.float32)
    assert compare_logits(a, near, "rounding").holds
    assert not compare_logits(a, near, "exact").holds
    far = a + 0.2 * rng.standard_normal(a.shape).astype(np.float32)
    assert not compare_logits(a, far, "rounding").holds  # nmse 0.04
    clear, top = a.copy(), np.argmax(a[1])
    clear[1, top] += 1
    flipped = a.copy()
    flipped[1, top] = np.sort(a[1])[-2] - 1e-3  # a clear decision, overturned by one logit
    found = compare_logits(clear, flipped, "rounding", tolerance=1)
    assert not found.holds and found.n_differ == 1
    tie = a.copy()
    tie[0, :2] = a[0].max() + 5, a[0].max() + 5 + 1e-4
    swapped = tie + 1e-3 * rng.standard_normal(a.shape).astype(np.float32)
    swapped[0, :2] = tie[0, 1], tie[0, 0]
    assert compare_logits(tie, swapped, "rounding").holds  # within the margin: no decision


@pytest.mark.parametrize("kind", ["exact", "rounding"])
def test_a_logit_that_is_no_number_never_passes(kind):
    a = np.ones((2, 5), np.float32)
    a[1, 2] = np.nan
    found = compare_logits(a, a.copy(), kind)
    assert not found.holds and found.n_differ == 1
    nothing = compare_logits(a[1:], a[1:], kind)  # no finite row at all
    assert nothing.nmse == np.inf and nothing.to_dict()["nmse"] is None
    assert answers.Answer.from_dict(nothing.to_dict()) == nothing
