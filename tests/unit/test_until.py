"""Repetition until it is known: parsing, the rule, its false verdicts, and what a run records."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_engine import Clock, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from synthetic import N_ARMS, NOISES, rates

from workbench.benchmarks.compare import stats, until
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.until import (
    BLOCK,
    LEAST_ROUNDS,
    TIME,
    WIDTH,
    RepeatEnd,
    Stopping,
    Until,
)
from workbench.benchmarks.llama.llama_bench import bench
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import UsageError

SPEC = "sync=per_copy,copy_boundary"
SPACES = st.sampled_from(["", " ", "  "])
NUMBERS = st.decimals("0.01", "99", places=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Intervals from few resamples: wider and rougher than a user's, and soon there."""
    monkeypatch.setattr(stats, "N_RESAMPLES", 199)


@settings(max_examples=40)
@given(NUMBERS, SPACES, SPACES)
def test_shares(number, before, after):
    share = float(number) / 100
    assert until.parse_share("--until", f"{before}{number}{after}%{after}") == pytest.approx(share)
    if share < 1:
        assert until.parse_share("--until", f"{before}{share:.6f}") == pytest.approx(share)


@settings(max_examples=40)
@given(NUMBERS, st.sampled_from("smh"), SPACES)
def test_durations(number, unit, space):
    seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    assert until.parse_duration("--at-most", f"{number}{space}{unit}") == pytest.approx(seconds)


@settings(max_examples=40)
@given(st.text(max_size=8))
def test_anything_else_is_refused_in_a_line(text):
    for parse in (until.parse_share, until.parse_duration):
        try:
            assert 0 < parse("--flag", text) < math.inf
        except UsageError as error:
            assert str(error).startswith("--flag ") and "write it as" in str(error)


@pytest.mark.parametrize(
    "text", ["1", "100%", "0%", "0", "-1%", "1 percent", "1%%", "nan", "", "٣%"]
)
def test_what_is_no_share(text):
    with pytest.raises(UsageError, match=r"write it as 1% or 0\.01"):
        until.parse_share("--until", text)


@pytest.mark.parametrize("text", ["10", "0s", "-3m", "10 minutes", "1h30m", "ms", "inf s", ""])
def test_what_is_no_duration(text):
    with pytest.raises(UsageError, match="write it as 30s, 10m or 1h"):
        until.parse_duration("--at-most", text)


def test_what_python_is_given():
    assert until.make_until(None) is None and until.make_until(0.01, 5) == Until(0.01, 5.0)
    for half_width, at_most_s in [(0.0, 5.0), (1.0, 5.0), (math.nan, 5.0)]:
        with pytest.raises(UsageError, match="no share"):
            until.make_until(half_width, at_most_s)
    for at_most_s in (0.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="above 0 seconds"):
            until.make_until(0.01, at_most_s)


# the rule -----------------------------------------------------------------------------------------


def stopped(tps: np.ndarray, asked: Until) -> tuple[int, str]:
    """Through the rule, one round a second: how many rounds, and why no more."""
    rule = Stopping(asked)
    for n in range(len(tps) + 1):
        reason = rule.reason(tps[:n], float(n))
        if reason is not None:
            return n, reason
    return len(tps), TIME


@settings(max_examples=10, deadline=None)
@given(
    noise=st.floats(0.001, 0.2), seed=st.integers(0, 99), factor=st.floats(0.1, 10),
    n_arms=st.integers(1, 4), asked=st.floats(0.002, 0.2),
)  # fmt: skip
def test_it_stops_on_width_alone(noise, seed, factor, n_arms, asked):
    """At the end of a block, after at least 10 rounds, and wherever the interval lies: a toggled
    arm that is `factor` times as fast is measured exactly as long as one that is not."""
    rng = np.random.default_rng(seed)
    tps = 100 * np.exp(noise * rng.standard_normal((24, n_arms)))
    n, reason = stopped(tps, Until(asked, 24.0))
    assert n % BLOCK == 0 and n >= LEAST_ROUNDS
    assert reason == TIME or until.half_width(tps[:n]) <= asked
    tps[:, 1:] *= factor
    assert stopped(tps, Until(asked, 24.0)) == (n, reason)


def test_the_clock_ends_it_before_a_block_that_would_be_late():
    tps = rates("white", 0, 20)
    rule = Stopping(Until(0.0001, 100.0))
    assert rule.reason(tps[:0], 0.0, 0.0) is None
    assert rule.reason(tps[:4], 50.0, 10.0) is None
    assert rule.reason(tps[:5], 99.0, 10.0) is None  # in the middle of a block
    assert rule.reason(tps[:6], 81.0, 10.0) == TIME  # two more rounds would end at 101 s
    assert rule.width == until.half_width(tps[:6])


def test_the_estimate_of_what_is_left():
    tps = rates("white", 0, 20)
    rule = Stopping(Until(0.001, 100.0))
    rule.reason(tps[:2], 2.0, 1.0)
    assert rule.expected_rounds(2.0, 1.0) == LEAST_ROUNDS
    rule.reason(tps[:10], 10.0, 1.0)
    assert rule.expected_rounds(10.0, 1.0) == 100  # the width asks for more than there is time for
    assert rule.expected_rounds(10.0, 0.0) == rule.needed() > 200
    assert rule.needed() == math.ceil(10 * (until.half_width(tps[:10]) / 0.001) ** 2)


def false_verdicts(n_trials: int, n_rounds: int, widths: tuple[float, ...]) -> int:
    """Comparisons of a thing with itself, each kind of noise and width in turn, through the rule
    and the verdict: how many are called a difference."""
    found = 0
    for trial in range(n_trials):
        kind = list(NOISES)[trial % len(NOISES)]
        asked = Until(widths[trial // len(NOISES) % len(widths)], float(n_rounds))
        tps = rates(kind, trial, n_rounds)
        n, _ = stopped(tps, asked)
        ratio, control = (stats.speedup(tps[:n, 0], tps[:n, arm]) for arm in (1, 2))
        found += stats.verdict(ratio, stats.aa_band(control)) != stats.SAME
    return found


def test_few_false_verdicts():
    """200 trials: with 95 % confidence fewer than 5 % of verdicts on nothing are false."""
    assert N_ARMS == 3
    found = false_verdicts(200, 30, (0.02, 0.05))
    assert binomtest(found, 200, alternative="less").proportion_ci(0.95).high < 0.05, found


@pytest.mark.slow
def test_few_false_verdicts_in_a_thousand(monkeypatch):
    """1,000 trials, up to 120 rounds: at most 5 % false, where 5 % of the intervals exclude 1."""
    monkeypatch.setattr(stats, "N_RESAMPLES", 999)
    found = false_verdicts(1000, 120, (0.01, 0.02, 0.05))
    assert binomtest(found, 1000, alternative="less").proportion_ci(0.95).high < 0.05, found


def test_stopping_at_an_interval_that_excludes_1_would_not_do():
    """What the rule must not do: even on noise without memory, more than 15 in 100 comparisons of a
    thing with itself come to such an interval."""
    found = 0
    for trial in range(60):
        tps = rates("white", trial, 60)
        looks = (stats.speedup(tps[:n, 0], tps[:n, 1]) for n in range(LEAST_ROUNDS, 61, 5))
        found += any(map(stats.excludes_1, looks))
    assert found / 60 > 0.15


# what is measured and recorded --------------------------------------------------------------------


def engine_of(monkeypatch, faster=1.0, noise=0.02):
    rng = np.random.default_rng(0)

    def ns_of(toggles, n_tokens, nth):
        ns = 1_000_000 * n_tokens * (1 + noise * rng.random())
        return ns / (faster if toggles.sync == "copy_boundary" else 1)

    return FakeEngine(Clock().install(monkeypatch), ns_of=ns_of)


def test_ab_until_it_is_known(monkeypatch, tmp_path):
    found = ab(engine_of(monkeypatch, 1.1), SPEC, tests="tg4,pp4", rounds=5, until=0.005,
               out=tmp_path / "r")  # fmt: skip
    asked = load_run(tmp_path / "r").run["result"]["until"]
    assert (asked["half_width"], asked["at_most_s"]) == (0.005, 600.0)
    for test, n in found.summary().groupby("test")["n"]:
        ended = asked["tests"][test]
        assert set(n) == {ended["rounds"]} and ended["rounds"] >= LEAST_ROUNDS
        assert ended["stopped"] == WIDTH and ended["half_width"] <= ended["wanted"] == 0.005
        assert f"{test}: the interval's half-width is {stats.percent(ended['half_width'])} " in (
            found.verdict
        )
    widths = found.summary().groupby("test").apply(
        lambda s: max(stats.half_width(a, b) for a, b in zip(s["low"], s["high"], strict=True))
    )  # fmt: skip
    assert widths.to_dict() == {t: e["half_width"] for t, e in asked["tests"].items()}
    assert found.run["repetitions"] == max(e["rounds"] for e in asked["tests"].values())
    assert found.interleaved and found.summary()["verdict"][0] == "faster"


def test_ab_at_most(monkeypatch):
    found = ab(engine_of(monkeypatch, noise=0.5), SPEC, tests="tg4,tg2", until=0.001, at_most_s=0.2)
    for ended in found.run["result"]["until"]["tests"].values():
        assert ended["stopped"] == TIME and ended["rounds"] % BLOCK == 0
        assert ended["seconds"] < 0.2 and ended["half_width"] > 0.001
    assert "tg4: 0.1 % was not reached: the interval's half-width is " in found.verdict
    assert " rounds would do, in " in found.verdict


def test_a_wider_interval_takes_fewer_rounds(monkeypatch):
    rounds = [
        ab(engine_of(monkeypatch, noise=0.1), SPEC, tests="tg1", until=width).run["repetitions"]
        for width in (0.1, 0.02)
    ]
    assert rounds[0] == LEAST_ROUNDS < rounds[1]


def test_rounds_are_the_least(monkeypatch):
    found = ab(engine_of(monkeypatch, noise=0), SPEC, tests="tg1", rounds=16, until=0.1)
    assert found.run["repetitions"] == 16


def test_progress_knows_about_how_many(monkeypatch):
    seen = []
    ab(engine_of(monkeypatch, noise=0.1), SPEC, None, "tg1", until=0.02,
       progress=lambda done, total, what: seen.append((done, total)))  # fmt: skip
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert all(done < total for done, total in seen[:-1]) and seen[-1][0] == seen[-1][1]


def test_an_interrupted_run_goes_on(monkeypatch, tmp_path):
    spec = {"toggle": SPEC, "tests": "tg1", "out": tmp_path / "r"}

    def stop(done, total, what):
        if done == 20:
            raise KeyboardInterrupt

    cut = ab(engine_of(monkeypatch), **spec, until=0.0005, progress=stop)
    ended = cut.run["result"]["until"]["tests"]["tg1"]
    assert cut.interrupted and ended["stopped"] == "interrupted" and ended["rounds"] == 6
    assert "interrupted: before 0.05 % was reached" in cut.verdict
    whole = ab(engine_of(monkeypatch), **spec, until=0.005, resume=True)
    ended = whole.run["result"]["until"]["tests"]["tg1"]
    assert ended["stopped"] == WIDTH and whole.samples.iloc[:20].equals(cut.samples)
    assert whole.interleaved and set(whole.summary()["n"]) == {ended["rounds"]}
    again = ab(engine_of(monkeypatch), **spec, until=0.005, resume=True)
    assert again.samples.equals(whole.samples)  # known already: nothing is measured
    further = ab(engine_of(monkeypatch), **spec, until=0.002, resume=True)
    assert further.run["repetitions"] > ended["rounds"]
    assert AB.load(tmp_path / "r").verdict == further.verdict


def test_smoke_has_no_until(monkeypatch):
    with pytest.raises(UsageError, match="leave out until, or smoke"):
        ab(engine_of(monkeypatch), SPEC, rounds=1, smoke=True, until=0.01)


def test_bench_until_its_median_is_known(monkeypatch, tmp_path):
    rows = bench(engine_of(monkeypatch), [4], [2], repetitions=1, until=0.004, out=tmp_path / "r")
    run = load_run(tmp_path / "r").run
    assert run["result"]["until"]["tests"] == {row.workload.name: row.ended for row in rows}
    for row in rows:
        median = stats.median_interval(np.array(row.samples_ts))
        assert row.ended["stopped"] == WIDTH and len(row.samples) == row.ended["rounds"] >= 10
        assert row.ended["half_width"] == stats.half_width(*median[1:]) <= 0.004
        assert row.line().endswith("; 0.4 % was asked for")
    assert run["repetitions"] == max(len(row.samples) for row in rows)


def test_bench_at_most(monkeypatch):
    (row,) = bench(engine_of(monkeypatch, noise=0.5), [], [2], until=0.0001, at_most_s=0.05)
    assert row.ended["stopped"] == TIME
    assert row.line().startswith("tg2: ") and "0.01 % was not reached: " in row.line()


def test_how_it_ended_in_words():
    assert RepeatEnd(1, None, 0.01, TIME, 3.0).line() == (
        "the interval's half-width is unknown after 1 rounds; 1 % was asked for"
    )
    assert RepeatEnd(40, 0.02, 0.01, TIME, 600.0).line() == (
        "1 % was not reached: the interval's half-width is 2 % after 40 rounds and 10 min. "
        "About 160 rounds would do, in 40 min"
    )
    assert not until.reached(None)
    assert not until.reached(RepeatEnd(1, None, 0.01, TIME, 3.0)._asdict())
    assert until.reached(RepeatEnd(40, 0.018, 0.01, TIME, 600.0)._asdict()) == (
        "half-width 1.8 %, 1 % asked"
    )
