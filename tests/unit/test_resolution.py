"""What a comparison could not have seen is said, with what would help."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.answers import Answer
from workbench.benchmarks.compare.resolution import sentence
from workbench.benchmarks.compare.stats import (
    SAME,
    Band,
    Ratio,
    aa_band,
    effect,
    percent,
    resolution,
    verdict,
)
from workbench.config import Toggles
from workbench.jupyter.pair import Pair

SHARES = st.floats(0.001, 2.0)


def ratio(value: float, below: float, above: float, n: int = 10) -> Ratio:
    return Ratio(value, value / (1 + below), value * (1 + above), n)


@given(st.floats(0.2, 5.0), SHARES, SHARES, st.floats(0.5, 2.0), SHARES)
def test_no_difference_is_what_is_not_resolved(value, below, above, middle, half):
    """The number in the sentence is the one that the verdict is made of."""
    found, band = ratio(value, below, above), aa_band(ratio(middle, half, half))
    least = resolution(found, band)
    if not math.isclose(effect(found), least, rel_tol=1e-9):
        assert (verdict(found, band) == SAME) == (effect(found) < least)


@given(st.floats(0.2, 5.0), SHARES, SHARES, st.floats(0.5, 2.0), SHARES, st.integers(5, 99))
def test_whatever_is_not_resolved_is_said(value, below, above, middle, half, n):
    found, control = ratio(value, below, above, n), ratio(middle, half, half, n)
    band = aa_band(control)
    said = sentence({"on": found}, band, control)
    apart, same = stats.excludes_1(control), verdict(found, band) == SAME
    assert bool(said) == (apart or same)
    assert ("excludes 1" in said) == apart
    assert (percent(effect(found)) + " (on)" in said) == same
    if said:
        assert "his machine cannot resolve less than " in said
        assert "What helps: " in said and f"rounds ({'by the width'}" in said
        assert said.count("--until ") == said.count("(in Python until=") == 1


def test_the_words():
    control = ratio(1.0, 0.3, 0.3)
    said = sentence({"packed": ratio(1.1, 0.02, 0.02)}, aa_band(control), control)
    assert said == (
        "this machine cannot resolve less than 30 % here now, and the effect is 10 % (packed). "
        "What helps: about 90 rounds (by the width, they resolve 10 %), a longer test, "
        "a quiet machine, or --until 5% (in Python until=0.05)"
    )
    both = {"packed": ratio(1.0, 0.02, 0.02), "auto": ratio(1.002, 0.02, 0.02)}
    assert "and the effects are 0 % (packed), 0.2 % (auto). What helps: 40 rounds (by the " in (
        sentence(both, aa_band(control), control)
    )


def test_a_control_apart_is_said_beside_a_clear_effect():
    control = ratio(1.1, 0.05, 0.05)
    said = sentence({"packed": ratio(3.0, 0.02, 0.02)}, aa_band(control), control)
    assert said.startswith(
        "the A/A control's interval 1.048..1.155 excludes 1: the baseline, measured twice, differs "
        "from itself. This machine cannot resolve less than 16 % here now. What helps: 40 rounds"
    )


def test_nothing_is_said_of_too_few_and_of_no_noise():
    assert not sentence({"on": ratio(1.0, 0.1, 0.1, 4)}, Band(0.9, 1.1), None)
    one = Ratio(1.0, math.nan, math.nan, 1)
    assert not sentence({"on": one}, aa_band(one), one)
    none = Ratio(1.0, 1.0, 1.0, 9)
    assert not sentence({"on": none}, aa_band(none), none)


def test_the_panels_result_says_it_too():
    control = ratio(1.0, 0.3, 0.3)
    found = Pair(
        "tg4", Toggles(), Toggles(sync="packed"), ("sync=per_copy", "sync=packed"), (1.0, 2.0),
        ratio(1.1, 0.02, 0.02), aa_band(control), Answer("exact", True, 3, 0, 0.0), 10, None, False,
        control,
    )  # fmt: skip
    said = (
        "this machine cannot resolve less than 30 % here now, and the effect is 10 % (sync=packed)"
    )
    assert said in repr(found).splitlines()[1] and said in found._repr_html_()


@pytest.mark.parametrize(
    ("share", "said"), [(0.3, "30 %"), (0.0097, "0.97 %"), (1.5, "150 %"), (0.104, "10 %")]
)
def test_shares_have_two_digits(share, said):
    assert percent(share) == said
