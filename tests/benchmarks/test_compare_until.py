"""Comparisons whose outcome is known, by an engine that takes exactly as long as it is told; and
repetition until it is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from tests.benchmarks.fake_engine import SPEC, timed
from tests.profiles import exhaustive, long
from workbench.benchmarks.compare import pace, stats, until
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.arms import answer_between, arms_of, make_arms
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.rounds import order_of
from workbench.benchmarks.compare.until import (
    BLOCK,
    LEAST_ROUNDS,
    TIME,
    WIDTH,
    RepeatEnd,
    Stopping,
    Until,
    make_until,
)
from workbench.benchmarks.llama.llama_bench import measured, workloads
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import UsageError
from workbench.config import Toggles


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Intervals from few resamples: wider and rougher than a user's, and soon there."""
    monkeypatch.setattr(stats, "N_RESAMPLES", 199)


@given(st.decimals("0.01", "99", places=2), st.sampled_from("smh"), st.sampled_from(["", " "]))
def test_shares_and_durations_are_read(number, unit, space):
    share, scale = float(number) / 100, {"s": 1, "m": 60, "h": 3600}[unit]
    assert until.parse_share("--until", f"{space}{number}{space}%") == pytest.approx(share)
    assert until.parse_share("--until", f"{share:.6f}{space}") == pytest.approx(share)
    found = until.parse_duration("--at-most", f"{number}{space}{unit}")
    assert found == pytest.approx(float(number) * scale)


def test_anything_else_is_refused():
    for text in ("1", "100%", "0%", "0", "-1%", "1 percent", "1%%", "nan", "", "٣%"):
        with pytest.raises(UsageError, match=r"^--flag .*write it as 1% or 0\.01"):
            until.parse_share("--flag", text)
    for text in ("10", "0s", "-3m", "10 minutes", "1h30m", "ms", "inf s", ""):
        with pytest.raises(UsageError, match=r"^--flag .*write it as 30s, 10m or 1h"):
            until.parse_duration("--flag", text)
    assert until.make_until(None) is None and until.make_until(0.01, 5) == Until(0.01, 5.0)
    for wrong in ((0.0, 5.0), (1.0, 5.0), (math.nan, 5.0), (0.01, 0.0), (0.01, math.inf)):
        with pytest.raises(UsageError, match=r"no share|above 0 seconds"):
            until.make_until(*wrong)


# machines whose truth is known: no arm is faster than another, whatever the noise says
N_ARMS = 3  # baseline, toggled, A/A control: all the same


def _white(rng, n):
    return 0.02 * rng.standard_normal(n)


def _ar1(rng, n, rho, size):
    """Noise that lasts: each value keeps the share rho of the one before."""
    out, last = np.empty(n), size * rng.standard_normal()
    for i, step in enumerate(rng.standard_normal(n) * size * np.sqrt(1 - rho**2)):
        out[i] = last = rho * last + step
    return out


def _drift(rng, n):
    """A card that warms up: 30 % slower over the run, in a straight line or a wave."""
    t = np.linspace(0, 1, n)
    wave = 0.1 * np.sin(2 * np.pi * (3 * t + rng.random()))
    return _white(rng, n) - 0.3 * t * (rng.random() < 0.5) + wave * (rng.random() < 0.5)


NOISES = {
    "white": _white,
    "drift": _drift,
    # neighbours that come and go over some ten repetitions
    "lasting": lambda rng, n: 0.5 * _white(rng, n) + _ar1(rng, n, 0.9, 0.05),
    # noise of whole rounds, which every arm of a round shares
    "rounds": lambda rng, n: (
        0.5 * _white(rng, n) + np.repeat(_ar1(rng, n // N_ARMS, 0.5, 0.1), N_ARMS)
    ),
    # one repetition in twelve takes up to three times as long
    "outliers": lambda rng, n: (
        0.5 * _white(rng, n) - (rng.random(n) < 1 / 12) * np.log(1 + 2 * rng.random(n))
    ),
    # a clock that jumps between two frequencies, a quarter apart, and stays there for a while
    "two speeds": lambda rng, n: (
        0.5 * _white(rng, n) - 0.25 * (np.cumsum(rng.random(n) < 0.08) % 2)
    ),
}


def rates(kind: str, seed: int, n_rounds: int) -> np.ndarray:
    """t/s of arms that are the same, float (n_rounds, N_ARMS), taken in the order of `ab`."""
    rng = np.random.default_rng([list(NOISES).index(kind), seed])
    in_time = 100 * np.exp(NOISES[kind](rng, n_rounds * N_ARMS)).reshape(n_rounds, N_ARMS)
    out = np.empty_like(in_time)
    for round_ in range(n_rounds):
        out[round_, order_of(round_, N_ARMS)] = in_time[round_]
    return out


def stopped(tps: np.ndarray, asked: Until) -> tuple[int, str]:
    """Through the rule, one round a second: how many rounds, and why no more."""
    rule = Stopping(asked)
    for n in range(len(tps) + 1):
        reason = rule.reason(tps[:n], float(n))
        if reason is not None:
            return n, reason
    return len(tps), TIME


@settings(max_examples=10)
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


def test_the_clock_ends_it_before_a_late_block():
    tps = rates("white", 0, 20)
    rule = Stopping(Until(0.0001, 100.0))
    assert rule.reason(tps[:0], 0.0, 0.0) is None
    assert rule.reason(tps[:5], 99.0, 10.0) is None  # in the middle of a block
    assert rule.reason(tps[:6], 81.0, 10.0) == TIME  # two more rounds would end at 101 s
    rule = Stopping(Until(0.001, 100.0))
    rule.reason(tps[:10], 10.0, 1.0)
    assert rule.expected_rounds(10.0, 1.0) == 100  # the width asks for more than there is time for
    assert rule.expected_rounds(10.0, 0.0) == rule.needed() > 200
    assert until.share_of(Until(0.001, 100.0), 40.0, 2) == Until(0.001, 30.0)


@pytest.mark.parametrize(("n_trials", "n_rounds", "widths"), [
    long(150, 30, (0.02, 0.05)), exhaustive(1000, 120, (0.01, 0.02, 0.05)),
])  # fmt: skip
def test_few_verdicts_on_nothing_are_false(n_trials, n_rounds, widths):
    """Comparisons of a thing with itself, each kind of noise and width in turn, through the rule
    and the verdict: with 95 % confidence fewer than 5 % are called a difference."""
    found = 0
    for trial in range(n_trials):
        kind = list(NOISES)[trial % len(NOISES)]
        asked = Until(widths[trial // len(NOISES) % len(widths)], float(n_rounds))
        tps = rates(kind, trial, n_rounds)
        n, _ = stopped(tps, asked)
        ratio, control = (stats.speedup(tps[:n, 0], tps[:n, arm]) for arm in (1, 2))
        found += stats.verdict(ratio, stats.aa_band(control)) != stats.SAME
    assert binomtest(found, n_trials, alternative="less").proportion_ci(0.95).high < 0.05, found


@pytest.mark.long
def test_ab_repeats_until_it_is_known(monkeypatch, tmp_path):
    """Each test to the width asked for; a run that was cut goes on, also to a lesser one."""
    how = {"tests": "tg4,pp4", "until": 0.005, "out": tmp_path / "r"}

    def stop(done, total, what):
        if done == 20:
            raise KeyboardInterrupt

    cut = ab(timed(monkeypatch, 1.1, 0.02), SPEC, **how, progress=stop)
    assert cut.run["result"]["until"]["tests"]["tg4"]["stopped"] == "interrupted"
    assert "interrupted: before 0.5 % was reached" in cut.verdict
    found = ab(timed(monkeypatch, 1.1, 0.02), SPEC, **how, resume=True)
    asked = load_run(tmp_path / "r").run["result"]["until"]
    assert (asked["half_width"], asked["at_most_s"]) == (0.005, 600.0)
    for test, s in found.summary().groupby("test"):
        ended = asked["tests"][test]
        assert set(s["n"]) == {ended["rounds"]} and ended["rounds"] >= LEAST_ROUNDS
        assert ended["stopped"] == WIDTH and ended["half_width"] <= ended["wanted"] == 0.005
        widths = [stats.half_width(a, b) for a, b in zip(s["low"], s["high"], strict=True)]
        assert max(widths) == ended["half_width"]
    assert found.interleaved and found.summary()["verdict"][0] == "faster"
    further = ab(timed(monkeypatch, 1.1, 0.02), SPEC, **how | {"until": 0.003}, resume=True)
    assert further.run["repetitions"] > found.run["repetitions"]
    assert AB.load(tmp_path / "r").verdict == further.verdict


def test_rounds_on_a_slow_host_do_not_count(monkeypatch, tmp_path):
    """Where a GPU computes everything. No host is slow on demand, so the loop is made up: it is
    looked at after each of three arms."""
    looks = iter(range(1000))
    monkeypatch.setattr(pace, "tells", lambda engine: True)
    monkeypatch.setattr(pace.HOST, "least_us", 100.0)
    monkeypatch.setattr(
        pace.HOST, "loop_us", lambda: 180.0 if next(looks) // 3 in (2, 5) else 100.0
    )
    made = ab(timed(monkeypatch, 1.1), SPEC, tests="tg4", rounds=8, out=tmp_path / "r")
    for found in (made, AB.load(tmp_path / "r")):
        noted = {"least_us": 100.0, "tests": {"tg4": [100, 100, 180, 100, 100, 180, 100, 100]}}
        assert found.run["result"]["pace"] == noted
        assert set(found.samples["repetition"]) == {0, 1, 3, 4, 6, 7} and found.interleaved
        assert set(found.every["repetition"]) == set(range(8)), "nothing is lost"
        assert set(found.summary()["n"]) == {6}
        assert "tg4: the host was slow in 2 of 8 rounds, which do not count" in found.verdict
    alone = measured(timed(monkeypatch), workloads([4], []), 8)
    assert len(alone[0].samples) == 8 and next(looks) == 8 * 3, "one arm alone is not compared"
    made.save(tmp_path / "again")
    assert AB.load(tmp_path / "again").every.equals(made.every)


@pytest.mark.parametrize(
    ("tests", "n", "says"),
    [
        ([180, 100, 100, 100, 100, 100], 5, "slow in 1 of 6 rounds, which do not count"),
        ([180, 180, 100, 100, 100, 100], 6, "count all the same, since fewer than 5 others"),
        ([180, 100, 100, 100, 100, None], 6, "slow in 1 of 5 rounds, which count all the same"),
        ([183, 183, 183, 183, 183, 183], 6, "a fixed loop took 1.83 times as long as at its best"),
        ([100, 100, 100, 100, 100, 100], 6, ""),
    ],
)
def test_slow_rounds_count_where_too_few_others_are_left(monkeypatch, tests, n, says):
    made = ab(timed(monkeypatch, 1.1), SPEC, tests="tg4", rounds=6)
    assert made.run["result"]["pace"] == {}, "the host computes here"
    result = made.run["result"] | {"pace": {"least_us": 100.0, "tests": {"tg4": tests}}}
    found = AB(made.run | {"result": result}, made.every)
    assert set(found.summary()["n"]) == {n} and says in found.verdict
    assert ("the host was slow" in found.verdict) == bool(says)


def test_the_width_is_that_of_rounds_that_count():
    rng = np.random.default_rng(3)
    tps = 100 + rng.random((20, 2))
    tps[::2, 1] *= 2
    slow = Stopping(Until(0.05, 1e9))
    assert slow.reason(tps, 1.0) is None and slow.width > 0.05
    assert Stopping(Until(0.05, 1e9)).reason(tps, 1.0, counted=lambda: tps[1::2]) == WIDTH


def test_time_ends_what_is_not_known(monkeypatch):
    """Each test has its share of the time; `bench` stops by the width of its median."""
    found = ab(timed(monkeypatch, noise=0.5), SPEC, tests="tg4,tg2", until=0.001, at_most_s=0.2)
    for ended in found.run["result"]["until"]["tests"].values():
        assert ended["stopped"] == TIME and ended["rounds"] % BLOCK == 0
        assert ended["half_width"] > 0.001
    said = found.verdict
    more = "What helps: more time (--at-most; in Python at_most_s), a longer test"
    assert "--until" not in said and said.count("What helps") == said.count(more)
    assert "tg4: 0.1 % was not reached: the interval's half-width is " in found.verdict
    for row in measured(timed(monkeypatch, noise=0.02), workloads([4], [2]), 1, until=0.004):
        median = stats.median_interval(np.array(row.samples_ts))
        assert row.ended["stopped"] == WIDTH and len(row.samples) == row.ended["rounds"] >= 10
        assert row.ended["half_width"] == stats.half_width(*median[1:]) <= 0.004
    noisy = timed(monkeypatch, noise=0.5)
    (row,) = measured(noisy, workloads([], [2]), 5, until=0.0001, at_most_s=0.05)
    assert row.ended["stopped"] == TIME and "0.01 % was not reached: " in row.line()


@pytest.mark.parametrize(("wanted", "advice"), [
    (0.001, "About 1,000 rounds would do, in 17 min"),
    (1e-6, "No number of rounds that fits in a week would do"),
    (0.0, "No number of rounds that fits in a week would do"),
])  # fmt: skip
def test_what_would_reach_a_width_is_told_where_it_can_be_waited_for(wanted, advice):
    assert RepeatEnd(10, 0.01, wanted, TIME, 10.0).line().endswith(f"10 s. {advice}")


def test_a_width_and_a_time_are_written_as_for_the_command():
    assert make_until("1%", "30s") == make_until(0.01, 30.0) == Until(0.01, 30.0)
    assert make_until(None, "30s") is None
    for width, most, said in (("often", 9, "until 'often' is no share"), ("1%", "9", "at_most_s")):
        with pytest.raises(UsageError, match=said):
            make_until(width, most)


@pytest.mark.parametrize(
    ("faster", "verdict"), [(1.5, "faster"), (0.8, "slower"), (1.0, "no difference")]
)
def test_planted_speedups_are_found(monkeypatch, faster, verdict):
    found = ab(timed(monkeypatch, faster, noise=0.02), SPEC, tests="tg8,pp8", rounds=8)
    s = found.summary()
    assert s["test"].tolist() == ["tg8", "tg8", "pp8", "pp8"] and s["n"].tolist() == [8] * 4
    toggled = s[~s["is_control"]]
    assert toggled["verdict"].tolist() == [verdict] * 2
    assert toggled["speedup"].tolist() == pytest.approx([faster] * 2, rel=0.02)
    assert s[s["is_control"]]["speedup"].tolist() == pytest.approx([1.0] * 2, rel=0.02)
    assert found.verdict.startswith(f"tg8: sync per_copy -> copy_boundary: {verdict}, ")
    assert found.evidence()["waits"].tolist() == [9, 2] * 2
    noisy = ab(timed(monkeypatch, 1.05, noise=1.0), SPEC, tests="tg1", rounds=8)
    line = "tg1: this machine cannot resolve less than "
    assert line in noisy.verdict and line in noisy._repr_html_() and line not in found.verdict
    result = noisy.run["result"] | {"idle": {"tg1": {"copy_boundary": "it copies nothing"}}}
    idle = AB(noisy.run | {"result": result}, noisy.samples).verdict
    assert "copy_boundary: same work, " in idle and line not in idle, "no effect is looked for"


def test_the_order_is_a_rotating_palindrome(monkeypatch):
    """Every arm has an engine and the same tokens, and counts what its repetitions did alone."""
    engine = timed(monkeypatch)
    found = ab(engine, SPEC, tests="tg3@d5", rounds=6)
    cells = found.samples.drop_duplicates("order")
    letters = {"per_copy": "A", "copy_boundary": "B", "per_copy (A/A)": "C"}
    assert "".join(cells["arm"].map(letters)) == "ABCCBABCAACBCABBAC" and found.interleaved
    one_sided = found.samples.sort_values(["arm", "order"], ignore_index=True)
    assert not AB(found.run, one_sided.assign(order=one_sided.index)).interleaved
    a, b, control = engine.shared.variants
    assert sorted(a.calls) == sorted(b.calls) == sorted(control.calls) and engine.calls == []
    assert all(v.closed for v in engine.shared.variants)
    assert [arm["counters"]["steps"] for arm in found.run["arms"]] == [6 * 4] * 3


def test_wrong_answers_and_unrepeatable_engines_are_told(monkeypatch):
    found = ab(timed(monkeypatch, 2.0, wrong={"copy_boundary": 1e-3}), SPEC, tests="tg2", rounds=5)
    assert not found.answer("copy_boundary").holds and found.answer("per_copy (A/A)").holds
    assert "DIFFERENT in 18 of 18 rows" in found.verdict  # 13 forced, 5 timed
    assert "not repeatable" not in found.verdict
    engine = timed(monkeypatch)
    make = engine.variant

    def variant(toggles):
        made = make(toggles)
        made.wrong = {"per_copy": 1e-3 * (len(engine.shared.variants) == 3)}  # the A/A control
        return made

    monkeypatch.setattr(engine, "variant", variant)
    assert "the engine is not repeatable" in ab(engine, SPEC, tests="tg2", rounds=5).verdict


def test_traced_engines_and_long_tests_are_refused(monkeypatch):
    engine = timed(monkeypatch, 3.0)
    for how, says in (
        ({"tests": "tg2,tg300"}, "n_ctx"), ({"rounds": 4}, "too few"),
        ({"rounds": 0, "smoke": True}, "too few"), ({"rounds": 1, "smoke": True, "until": 0.01},
                                                    "leave out until, or smoke"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            ab(engine, SPEC, **how)
    engine.recorder = object()
    with pytest.raises(UsageError, match="recorder"):
        ab(engine, SPEC)
    assert engine.shared.variants == [], "before anything was measured"
    engine.recorder = None
    found = ab(engine, SPEC, tests="tg2", rounds=1, smoke=True)
    assert found.summary()["verdict"][0] == "too few repetitions"


def test_sets_of_toggles_are_arms(monkeypatch):
    """Several toggles can differ; what all arms share is the background."""
    on = Toggles(graph_reuse="set_rows", pdl="on")
    names = ["pdl=off", "sync=copy_boundary copy_stream=compute", "fuse=on fuse_glu=off pdl=off"]
    spec = " | ".join(names).replace(" copy", "  copy")
    toggle, arms = arms_of(spec, on)
    assert toggle == "" and [arm.name for arm in arms] == [*names, "pdl=off (A/A)"]
    assert [arm.answer for arm in arms] == ["exact", "exact", "rounding", "exact"]
    assert [(arm.toggles.pdl, arm.toggles.sync, arm.toggles.fuse_qkv) for arm in arms[:3]] == [
        ("off", "per_copy", "off"), ("on", "copy_boundary", "off"), ("off", "per_copy", "on"),
    ]  # fmt: skip
    found = ab(timed(monkeypatch, 2.0), spec, tests="tg4", rounds=5, background=on)
    assert found.summary()["verdict"].tolist()[:2] == ["faster", "no difference"]
    assert "baseline pdl=off, background graph_reuse=set_rows, all else off" in found.caption


def test_answers_are_exact_where_launches_are_the_same():
    """Rows are joined with RoPE where fuse_rope_store is on, copies never; what may fork decides
    which fused nodes are kept."""
    ways, joined = Toggles.values("graph_reuse"), Toggles(fuse_rope_store="on")
    off = Toggles(defer_norm="on", fuse="on", fuse_rope_store="off")
    assert {arm.answer for arm in make_arms("graph_reuse", ways, off)} == {"exact"}
    arms = make_arms("graph_reuse", ways, joined)
    assert [arm.answer for arm in arms] == ["exact", "rounding", "rounding", "exact", "exact"]
    copies = [joined.switched("graph_reuse", way) for way in ways[1:3]]
    assert answer_between(*copies) == answer_between(*copies[::-1]) == "exact"
    assert answer_between(copies[0], joined.switched("plans", "ours")) == "rounding"
    for fused, answer in ((joined, "rounding"), (Toggles(), "exact")):
        for name, value in (("streams", "3"), ("fork", "any")):
            made = fused.switched("branch_fusion", "auto")
            assert answer_between(made, made.switched(name, value)) == answer


@pytest.mark.parametrize(("spec", "message"), [
    ("plans=off | plans=off", "twice"), ("plans=off | pdl=off", "are the same toggles"),
    ("plans=off | plan=ours", "'plan' does not exist"), ("plans=off | plans", "has no value"),
    ("plans=off | plans=no", "'no' does not exist"), ("sync", "has no values"),
    ("pdl=off | sync=event_guarded copy_stream=compute", "clash"), ("sync=auto,auto", "twice"),
    ("sink=a,b", "'sink' does not exist"), ("sync=per_copy,never", "'never' does not exist"),
    ("sync=per_copy", "what the background has"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(monkeypatch, spec, message):
    with pytest.raises(UsageError, match=message):
        ab(timed(monkeypatch), spec)
