"""Ratios, their intervals and verdicts; and runs measured apart: what matches, what is history."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.made_runs import gpu, write
from tests.network import network_loads
from workbench.benchmarks.compare import answers, stats
from workbench.benchmarks.compare.answers import compare_logits
from workbench.benchmarks.compare.compare import HISTORY, METHOD, compare
from workbench.benchmarks.compare.matching import Repeated, match
from workbench.benchmarks.compare.resolution import sentence
from workbench.benchmarks.compare.stats import FASTER, SAME, SLOWER, TOO_FEW, Ratio, verdict
from workbench.benchmarks.compare.until import INTERRUPTED, TIME, WIDTH, RepeatEnd
from workbench.common.errors import UsageError
from workbench.config import Toggles


@pytest.fixture
def call(call, tmp_path):
    return lambda *arguments: call("compare", "--out", tmp_path / "page.html", *arguments)


def test_a_row_for_each_test(tmp_path, call):
    old = {k: v for k, v in Toggles().to_dict().items() if k != "pdl"}  # it lacks what is off
    a = write(tmp_path, "a", {"tg8": 100.0, "pp16": 900.0, "tg4": 50.0}, toggles=[old])
    b = write(
        tmp_path, "b", {"tg8": 110.0, "pp16": 900.0, "tg4": 40.0}, run_id="<b>&",
        status="interrupted", commit={"hash": "b" * 40, "number": 2, "dirty": True},
        toggles=[{"sync": "packed"}], model={"name": "tiny", "quant": "Q8_0", "hash": "h2"},
    )  # fmt: skip
    found = compare(a, b)
    assert found.rows[0].sides.differ == [("sync", "per_copy", "packed")]
    for words in ("commit aaaaaaaa -> bbbbbbbb with changes", "another hash", "was interrupted"):
        assert words in "\n".join(found.lines)
    s = found.summary().set_index("test")
    assert s["verdict"].to_dict() == {"tg8": "faster", "pp16": "no difference", "tg4": "slower"}
    assert s["speedup"].tolist() == pytest.approx([1.1, 1.0, 0.8], rel=0.02)
    assert (s["low"] < s["speedup"]).all() and (s["speedup"] < s["high"]).all()
    for row in found.rows:
        alone = stats.independent_ratio(row.sides.before.tps, row.sides.after.tps)
        assert row.ratio == alone and row.least == stats.resolution(alone, stats.Band(1.0, 1.0))
    assert set(METHOD) <= set(found.lines)
    status, _, err = call(a, b)
    text = (tmp_path / "page.html").read_text()
    assert status == 0 and f"page: {tmp_path / 'page.html'}" in err
    assert network_loads(text) == [] and "http" not in text
    assert "<title>Is it faster than a? &lt;b&gt;&amp;</title>" in text and "<b>&" not in text


def test_the_band_of_a_control_counts(tmp_path):
    """1.5 % apart with little noise; but the comparison's own A/A control is 10 % wide."""
    modes = [{"sync": "per_copy"}, {"sync": "packed"}]
    how = {"arms": ("per_copy", "packed"), "kind": "ab", "control": True, "toggles": modes, "n": 30}
    wide = write(tmp_path, "wide", {"tg8": [100.0, 120.0]}, noise=0.1, **how)
    quiet = write(tmp_path, "quiet", {"tg8": [103.0, 123.0]}, noise=0.001, **how)
    found = compare(wide, quiet)
    assert all(row.band.high > 1.02 and row.least >= row.band.high - 1 for row in found.rows)
    assert {row.verdict for row in found.rows} == {"no difference"}


def test_what_is_not_compared_is_told(tmp_path, call):
    """Other tests, other kinds, too few repetitions; wrong usage is one line."""
    a, b = write(tmp_path, "a", {"tg8": 100.0, "pp16": 9.0}), write(tmp_path, "b", {"tg9": 100.0})
    c = write(tmp_path, "c", kind="perplexity")
    assert [call(*wrong)[0] for wrong in ([a], [a, tmp_path / "none"], [a, c])] == [2, 2, 2]
    assert [row[4] for row in compare(a, b).unmatched().to_numpy()] == ["tg8, pp16", "tg9"]
    status, out, _ = call(a, b, c)
    assert status == 0 and "c is not compared: it is of kind perplexity, and ab and bench " in out
    few, less = write(tmp_path, "few", n=4), write(tmp_path, "less", {"tg8": 50.0}, n=4)
    assert [row.verdict for row in compare(few, less).rows] == [stats.TOO_FEW]
    status, _, err = call(few, less, "--fail-below", 0.9)
    assert status == 1 and "nothing to judge" in err
    near = write(tmp_path, "near", {"tg8": 97.0}), write(tmp_path, "base")
    assert call(*near[::-1], "--fail-below", 0.97)[0] == 0, "its interval is around 0.97"


def test_arms_that_are_left_over_are_no_pair(tmp_path):
    """Two comparisons of different toggles share their baseline alone. A control: two runs of one
    arm each are compared, whatever their toggles."""
    off, on, packed = {}, {"fuse": "on"}, {"sync": "packed"}
    one = write(tmp_path, "one", {"tg8": [100.0, 90.0]}, kind="ab", control=True,
                arms=("per_copy", "packed"), toggles=[off, packed])  # fmt: skip
    two = write(tmp_path, "two", {"tg8": [99.0, 120.0]}, kind="ab", control=True,
                arms=("off", "on"), toggles=[off, on])  # fmt: skip
    found = compare(one, two)
    assert [row.sides.differ for row in found.rows] == [[]], "the baselines"
    assert len(found.unmatched()) == 2
    alone = [write(tmp_path, name, toggles=[of]) for name, of in (("a", packed), ("b", on))]
    (row,) = compare(*alone).rows
    assert {name for name, *_ in row.sides.differ} >= {"sync"}
    with pytest.raises(UsageError, match="is no path; give each run by itself"):
        compare([one, two])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"card": "NVIDIA H200"}, "another device (NVIDIA H100 (sm_90), and NVIDIA H200 (sm_90))"),
        ({"number": "2222"}, "another card (1111, and 2222)"),
        ({"driver": "570.2"}, "another driver (580.1, and 570.2)"),
        ({"day": "2026-11-22"}, "another day (2026-11-21, and 2026-11-22)"),
        ({"cpu": "Another CPU"}, "another processor (A CPU, and Another CPU)"),
    ],
)
def test_history_is_shown_without_a_verdict(tmp_path, call, other, why):
    a, b = write(tmp_path, "a", **gpu()), write(tmp_path, "b", {"tg8": 50.0}, **gpu(**other))
    found = compare(a, b)
    assert [row.verdict for row in found.rows] == [HISTORY]
    assert any(line.startswith(f"b is history, and has no verdict: {why}") for line in found.lines)
    assert [row.verdict for row in compare(a, b, across=True).rows] == ["slower"]
    if "card" in other:  # 3 where the whole interval lies below
        status, out, err = call(a, b, "--fail-below", 0.97)
        assert status == 1 and HISTORY in out and "--across judges" in err
        assert call(a, b)[0] == 0 and call(a, b, "--fail-below", 0.97, "--across")[0] == 3


def test_runs_of_one_night_are_judged(tmp_path):
    """Midnight, UTC, may lie between them."""
    late, early = (
        gpu() | {"started": "2026-11-21T23:58:00Z"},
        gpu() | {"started": "2026-11-22T00:03:00Z"},
    )
    a, b = write(tmp_path, "a", **late), write(tmp_path, "b", {"tg8": 50.0}, **early)
    assert [row.verdict for row in compare(a, b).rows] == ["slower"]
    unknown = write(tmp_path, "c", {"tg8": 50.0}, **gpu() | {"started": "2026-11-22"})
    assert [row.verdict for row in compare(a, unknown).rows] == [HISTORY]


SIDES = st.lists(
    st.builds(
        Repeated,
        st.sampled_from(["tg8", "pp4"]),
        st.sampled_from(["engine", "packed"]),
        st.tuples(st.sampled_from([None, "h1", "h2"]), st.sampled_from(["m", "n"]), st.just("Q")),
        st.fixed_dictionaries({"sync": st.sampled_from(["a", "b", "c"])}),
        st.just(np.ones(1)),
        shape=st.just((None, "")),
        foreign=st.just(""),
    ),
    max_size=6,
)


@given(SIDES, SIDES)
def test_everything_matches_once_or_is_listed(before, after):
    found = match(before, after)
    for every, sides in (
        (before, [*(m.before for m in found.matched), *found.only_before]),
        (after, [*(m.after for m in found.matched), *found.only_after]),
    ):
        assert sorted(map(id, sides)) == sorted(map(id, every))
    for a, b, differ in found.matched:
        assert a.test == b.test
        assert a.model[1:] == b.model[1:] or (a.model[0] is not None and a.model[0] == b.model[0])
        wanted = {} if a.toggles == b.toggles else {"sync": (a.toggles["sync"], b.toggles["sync"])}
        assert {name: pair for name, *pair in differ} == {n: [*p] for n, p in wanted.items()}
    for a in found.only_before:  # nothing that is equal in all is left on both sides
        for b in found.only_after:
            assert (a.test, a.model[1:], a.toggles) != (b.test, b.model[1:], b.toggles)
            if a.model[0] is not None:
                assert (a.test, a.model[0], a.toggles) != (b.test, b.model[0], b.toggles)
    distinct = list({(s.test, s.model, s.toggles["sync"]): s for s in before}.values())
    itself = match(distinct, distinct)
    assert not itself.only_before and not itself.only_after
    assert all(not m.differ for m in itself.matched)


def test_of_several_arms_nobody_knows_the_counterpart():
    def side(arm: str, sync: str) -> Repeated:
        return Repeated("tg8", arm, ("h", "m", "Q"), {"sync": sync}, np.ones(1))

    several = [side("one", "b"), side("two", "c")]
    assert match([side("engine", "a")], several).matched == []
    assert len(match([side("engine", "a")], several[:1]).matched) == 1


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
    for low, high in ((0.99, 1.05), (1 / 1.05, 0.99)):
        band = stats.aa_band(Ratio(1.0, low, high, 10))
        assert (band.low, band.high) == pytest.approx((1 / 1.05, 1.05))
        assert verdict(ratio, band) == expected


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


@given(SHARES, st.floats(1e-4, 0.5), st.sampled_from([WIDTH, TIME, INTERRUPTED]))
def test_a_test_repeated_until_a_width_is_told_more_than_that_width(value, wanted, stopped):
    """Another width only where that one was reached; then a lesser one."""
    quiet, ended = ratio_of(1.0, 3.0, 3.0), RepeatEnd(40, wanted, wanted, stopped, 1.0)
    said = sentence({"on": ratio_of(1 + value, 2.0, 2.0)}, stats.aa_band(quiet), quiet, ended)
    advised = re.search(r"--until ([\d.e-]+)%", said)
    assert bool(advised) == (stopped == WIDTH) and "What helps: " in said
    if advised:
        assert 0 < float(advised[1]) / 100 < wanted
    else:
        assert "rounds" not in said.split("What helps: ")[1]


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
