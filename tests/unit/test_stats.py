"""Ratios, intervals, the A/A band and the verdict: on data whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workbench.benchmarks.compare import answers, stats
from workbench.benchmarks.compare.answers import compare_logits
from workbench.benchmarks.compare.stats import (
    FASTER,
    SAME,
    SLOWER,
    TOO_FEW,
    Band,
    Ratio,
    aa_band,
    speedup,
)


def rounds(rng, n, noise=0.02, drift=0.0):
    """t/s of one arm over n rounds; drift is common to every arm of a round."""
    return 100 * np.exp(noise * rng.standard_normal(n) + drift)


def test_ratio_of_medians():
    ratio = speedup(np.array([10.0, 11, 12, 50, 9]), np.array([22.0, 20, 24, 23, 1]))
    assert ratio.value == pytest.approx(22 / 11)
    assert ratio.low <= ratio.value <= ratio.high and ratio.n == 5
    assert speedup([10.0, 12.0], [11.0, 11.0]).value == pytest.approx(11 / math.sqrt(120))


def test_the_same_seed_gives_the_same_interval():
    rng = np.random.default_rng(0)
    a, b = rounds(rng, 10), rounds(rng, 10)
    assert speedup(a, b, seed=3) == speedup(a, b, seed=3)
    assert speedup(a, b, seed=3) != speedup(a, b, seed=4)


def test_pairing_removes_drift():
    """A machine that slows down by half over the run widens both arms, and not their ratio."""
    rng = np.random.default_rng(1)
    drift = np.linspace(0, -0.7, 20)
    a, b = rounds(rng, 20, 0.002, drift), 1.1 * rounds(rng, 20, 0.002, drift)
    paired = speedup(a, b)
    shuffled = speedup(a, rng.permutation(b))
    assert paired.low < 1.1 < paired.high
    assert math.log(paired.high / paired.low) < 0.5 * math.log(shuffled.high / shuffled.low)


def test_coverage_of_the_interval():
    """The 95 % interval holds the truth nearly always; a percentile interval of 10 falls short."""
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(100):
        r = speedup(rounds(rng, 10), 1.05 * rounds(rng, 10))
        held += r.low <= 1.05 <= r.high
    assert held >= 88


def test_few_and_degenerate_samples():
    one = speedup([100.0], [110.0])
    assert one.value == pytest.approx(1.1) and math.isnan(one.low) and one.n == 1
    same = speedup([5.0] * 6, [10.0] * 6)
    assert same[:3] == (pytest.approx(2.0),) * 3
    for bad in ([], [0.0, 1.0], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="positive"):
            speedup(bad, bad)


def test_the_band_holds_the_controls_interval():
    band = aa_band(Ratio(1.01, 0.99, 1.05, 10))
    assert band.high == pytest.approx(1.05) and band.low == pytest.approx(1 / 1.05)
    band = aa_band(Ratio(0.9, 0.8, 0.95, 10))
    assert band.low == pytest.approx(0.8) and band.high == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (Ratio(1.10, 1.08, 1.12, 10), FASTER),
        (Ratio(0.90, 0.88, 0.92, 10), SLOWER),
        (Ratio(1.04, 1.03, 1.05, 10), SAME),  # significant, but inside the A/A band
        (Ratio(1.10, 0.99, 1.20, 10), SAME),  # outside the band, but the interval holds 1
        (Ratio(1.50, 1.40, 1.60, 4), TOO_FEW),
    ],
)
def test_verdicts(ratio, expected):
    assert stats.verdict(ratio, Band(1 / 1.05, 1.05)) == expected


def test_without_a_band_there_is_no_verdict():
    assert stats.verdict(Ratio(2.0, 1.9, 2.1, 9), aa_band(speedup([1.0], [1.0]))) == TOO_FEW


def test_no_difference_is_rarely_called_one():
    """100 comparisons of a thing with itself, noise of 2 %: the A/A band keeps false calls few."""
    rng = np.random.default_rng(3)
    calls = []
    for i in range(100):
        a, b, control = (rounds(rng, 7) for _ in range(3))
        calls.append(stats.verdict(speedup(a, b, i), aa_band(speedup(a, control, i))))
    assert calls.count(SAME) >= 95


def test_a_real_difference_is_found():
    rng = np.random.default_rng(4)
    calls = []
    for i in range(20):
        a, b, control = (rounds(rng, 10, 0.01) for _ in range(3))
        calls.append(stats.verdict(speedup(a, 1.1 * b, i), aa_band(speedup(a, control, i))))
    assert calls.count(FASTER) == 20


def test_exact_answers_are_bit_equal():
    a = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    assert compare_logits(a, a.copy(), "exact") == ("exact", True, 4, 0, 0.0, True)
    b = a.copy()
    b[2, 3] = np.nextafter(b[2, 3], np.float32(9))
    found = compare_logits(a, b, "exact")
    assert not found.holds and found.n_differ == 1 and "DIFFERENT in 1 of 4" in str(found)
    minus_zero = np.zeros((1, 9), np.float32)
    assert not compare_logits(minus_zero, -minus_zero, "exact").holds  # equal, but not in bits


def test_rounding_answers_are_close_where_it_matters():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((6, 500)).astype(np.float32)
    near = a + 1e-3 * rng.standard_normal(a.shape).astype(np.float32)
    assert compare_logits(a, near, "rounding").holds
    assert not compare_logits(a, near, "exact").holds
    far = a + 0.2 * rng.standard_normal(a.shape).astype(np.float32)
    assert not compare_logits(a, far, "rounding").holds  # nmse 0.04
    flipped = a.copy()
    top = np.argmax(a[1])
    flipped[1, top] = np.sort(a[1])[-2] - 1e-3  # a clear decision, overturned by one logit
    a_clear = a.copy()
    a_clear[1, top] += 1
    found = compare_logits(a_clear, flipped, "rounding", tolerance=1)
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


def test_no_difference_is_said_to_be_bit_equal_whatever_was_allowed():
    a = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    same = compare_logits(a, a.copy(), "rounding")
    assert str(same) == "rounding: bit-equal (4 rows)"
    assert str(answers.Answer.from_dict(same.to_dict())) == str(same)
    old = {"kind": "rounding", "holds": True, "n_rows": 4, "n_differ": 0, "nmse": 0.0}
    assert str(answers.Answer.from_dict(old)) == str(same), "a run recorded before `equal`"
    assert "within tolerance (nmse" in str(compare_logits(a, a * np.float32(1.001), "rounding"))
    zeros = np.zeros((2, 3), np.float32)
    assert "bit-equal" not in str(compare_logits(zeros, -zeros, "rounding")), "equal, not in bits"


def test_answers_merge():
    good = answers.Answer("exact", True, 3, 0, 0.0, True)
    bad = answers.Answer("exact", False, 1, 1, 0.5)
    assert answers.merge([good, good]) == ("exact", True, 6, 0, 0.0, True)
    assert answers.merge([good, bad]) == ("exact", False, 4, 1, 0.5, False)


def test_logits_of_other_shapes_cannot_be_compared():
    with pytest.raises(ValueError, match="shapes"):
        compare_logits(np.zeros((2, 3)), np.zeros((3, 2)), "exact")
