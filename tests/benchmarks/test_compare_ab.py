"""Comparisons whose outcome is known: an engine that takes exactly as long as it is told."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.fake_engine import Clock, FakeEngine
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.arms import answer_between, arms_of, make_arms, parse_toggle_spec
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.rounds import order_of
from workbench.benchmarks.runs.results import load_run, rates
from workbench.common.errors import UsageError
from workbench.config import Toggles

SPEC = "sync=per_copy,copy_boundary"


def engine_of(monkeypatch, faster=1.0, noise=0.0, **options):
    """An engine whose copy_boundary is `faster` times the baseline's speed."""
    rng = np.random.default_rng(0)

    def ns_of(toggles, n_tokens, nth):
        base = 1_000_000 * n_tokens * (1 + noise * rng.random())
        return base / (faster if toggles.sync == "copy_boundary" else 1)

    return FakeEngine(Clock().install(monkeypatch), ns_of=ns_of, **options)


@pytest.mark.parametrize(
    ("faster", "verdict"), [(1.5, "faster"), (0.8, "slower"), (1.0, "no difference")]
)
def test_planted_speedups_are_found(monkeypatch, faster, verdict):
    found = ab(engine_of(monkeypatch, faster, noise=0.02), SPEC, tests="tg8,pp8", rounds=8)
    s = found.summary()
    assert s["test"].tolist() == ["tg8", "tg8", "pp8", "pp8"] and s["n"].tolist() == [8] * 4
    toggled = s[~s["is_control"]]
    assert toggled["verdict"].tolist() == [verdict] * 2
    assert toggled["speedup"].tolist() == pytest.approx([faster] * 2, rel=0.02)
    assert s[s["is_control"]]["speedup"].tolist() == pytest.approx([1.0] * 2, rel=0.02)
    line = found.verdict.splitlines()[0]
    assert line.startswith(f"tg8: sync per_copy -> copy_boundary: {verdict}, ")
    assert "exact: bit-equal" in found.verdict


def test_the_table_and_what_stands_beside_it(monkeypatch):
    found = ab(engine_of(monkeypatch, 1.25), SPEC, tests="tg4", rounds=5)
    table = found.table()
    assert table.columns.tolist() == [
        "Model", "Test", "Toggled", "t/s baseline", "t/s toggled", "Speedup", "95% CI", "n",
        "verdict", "answer",
    ]  # fmt: skip
    assert table.iloc[0].tolist() == [
        "fake Q4_0", "tg4", "copy_boundary", 1000.0, 1250.0, 1.25, "1.250..1.250", 5, "faster",
        "exact: bit-equal (18 rows)",
    ]  # fmt: skip
    assert table.iloc[1]["verdict"] == "A/A control"
    assert "copy_boundary" in found._repr_html_() and "not of a GPU" in found.caption
    assert "baseline sync=per_copy, background everything off; " in found.caption
    assert found.evidence()["waits"].tolist() == [9, 2]


def test_the_order_is_a_rotating_palindrome(monkeypatch):
    engine = engine_of(monkeypatch)
    found = ab(engine, SPEC, tests="tg3@d5", rounds=6)
    cells = found.samples.drop_duplicates("order")
    letters = {"per_copy": "A", "copy_boundary": "B", "per_copy (A/A)": "C"}
    assert "".join(cells["arm"].map(letters)) == "ABCCBABCAACBCABBAC"
    assert cells["order"].tolist() == list(range(18)) and found.interleaved
    one_sided = found.samples.sort_values(["arm", "order"], ignore_index=True)
    one_sided["order"] = range(len(one_sided))
    assert not AB(found.run, one_sided).interleaved
    for k in (2, 3, 5):  # every arm has every position equally often
        positions = [order_of(r, k).index(0) for r in range(2 * k)]
        assert sorted(positions) == sorted(list(range(k)) * 2)
    a, b, control = engine.shared.variants  # and every arm the same tokens, on its own engine
    assert [v.toggles.sync for v in (a, b, control)] == ["per_copy", "copy_boundary", "per_copy"]
    assert sorted(a.calls) == sorted(b.calls) == sorted(control.calls)
    assert engine.calls == [] and all(v.closed for v in engine.shared.variants)
    assert [arm["is_control"] for arm in found.run["arms"]] == [False, False, True]
    assert [arm["counters"]["steps"] for arm in found.run["arms"]] == [6 * 4] * 3


def test_a_wrong_answer_is_seen(monkeypatch):
    engine = engine_of(monkeypatch, 2.0, wrong={"copy_boundary": 1e-3})
    found = ab(engine, SPEC, tests="tg2", rounds=5)
    assert not found.answer("copy_boundary").holds and found.answer("per_copy (A/A)").holds
    assert "DIFFERENT in 18 of 18 rows" in found.verdict  # 13 forced, 5 timed
    assert "not repeatable" not in found.verdict


def test_an_engine_that_is_not_repeatable_is_called_that(monkeypatch):
    engine = engine_of(monkeypatch)
    make = engine.variant

    def variant(toggles):
        made = make(toggles)
        if len(engine.shared.variants) == 3:  # the A/A control
            made.wrong = {"per_copy": 1e-3}
        return made

    monkeypatch.setattr(engine, "variant", variant)
    assert "the engine is not repeatable" in ab(engine, SPEC, tests="tg2", rounds=5).verdict


def test_what_a_noisy_machine_cannot_resolve_is_said(monkeypatch):
    """5 % faster amid noise of a factor 2 is inside the A/A band; `ab` and a notebook say so."""
    found = ab(engine_of(monkeypatch, 1.05, noise=1.0), SPEC, tests="tg1", rounds=10)
    row, control = found.summary().to_dict("records")
    ratio = stats.Ratio(*(row[k] for k in ("speedup", "low", "high", "n")))
    least = stats.resolution(ratio, stats.Band(row["band_low"], row["band_high"]))
    assert least > stats.effect(ratio) and control["is_control"]
    assert row["verdict"] == "no difference"
    line = f"tg1: this machine cannot resolve less than {stats.percent(least)} here now, and the "
    assert line in found.verdict and line in found._repr_html_() and line in repr(found)
    quiet = ab(engine_of(monkeypatch, 1.05, noise=0.001), SPEC, tests="tg1", rounds=10)
    assert "cannot resolve" not in quiet.verdict


def test_traced_engines_and_long_tests_are_refused(monkeypatch):
    engine = engine_of(monkeypatch, 3.0)
    with pytest.raises(UsageError, match="n_ctx"):
        ab(engine, SPEC, tests="tg300")
    for how in ({"rounds": 4}, {"rounds": 0, "smoke": True}):
        with pytest.raises(UsageError, match="too few"):
            ab(engine, SPEC, **how)
    engine.recorder = object()
    with pytest.raises(UsageError, match="recorder"):
        ab(engine, SPEC)
    assert engine.shared.variants == []
    engine.recorder = None
    found = ab(engine, SPEC, tests="tg2", rounds=1, smoke=True)
    assert found.summary()["verdict"][0] == "too few repetitions"
    assert found.table()["95% CI"].tolist() == ["-", "-"]


# arms --------------------------------------------------------------------------------------------


def test_arms_are_values_of_a_toggle_on_a_background():
    assert parse_toggle_spec("sync = per_copy , auto") == ("sync", ["per_copy", "auto"])
    on = Toggles(copy_stream="compute", graph_reuse="set_rows")
    arms = make_arms("sync", ["implicit"], on)
    assert [arm.name for arm in arms] == ["per_copy", "implicit", "per_copy (A/A)"]
    assert all(arm.toggles.graph_reuse == "set_rows" for arm in arms)
    with pytest.raises(UsageError, match="clash"):
        make_arms("sync", ["per_copy", "event_guarded"], on)


def test_copies_are_exact_but_where_one_side_joins_rope():
    """Rows are joined with RoPE where fuse_rope_store is on, copies never."""
    ways = Toggles.values("graph_reuse")
    assert ways == ["rebuild", "patch_pointers", "pointer_table", "set_rows"]
    for fused in ({}, {"fuse": "on", "fuse_rope_store": "off"}):
        arms = make_arms("graph_reuse", ways, Toggles(defer_norm="on", **fused))
        assert {arm.answer for arm in arms} == {"exact"}
    joined = Toggles(fuse_rope_store="on")
    arms = make_arms("graph_reuse", ways, joined)
    assert [arm.answer for arm in arms] == ["exact", "rounding", "rounding", "exact", "exact"]
    copies = [joined.switched("graph_reuse", way) for way in ways[1:3]]
    assert answer_between(*copies) == answer_between(*copies[::-1]) == "exact"
    assert answer_between(copies[0], joined.switched("plans", "ours")) == "rounding"
    assert answer_between(copies[0], copies[0].switched("fuse_rope_store", "off")) == "rounding"


def test_sets_of_toggles_are_arms(monkeypatch):
    """Several toggles can differ; what all arms share is the background."""
    on = Toggles(graph_reuse="set_rows", pdl="on")
    spec = "pdl=off | sync=copy_boundary  copy_stream=compute | fuse=on fuse_glu=off pdl=off"
    toggle, arms = arms_of(spec, on)
    assert toggle == "" and [arm.name for arm in arms] == [
        "pdl=off", "sync=copy_boundary copy_stream=compute", "fuse=on fuse_glu=off pdl=off",
        "pdl=off (A/A)",
    ]  # fmt: skip
    assert [arm.answer for arm in arms] == ["exact", "exact", "rounding", "exact"]
    assert [(arm.toggles.pdl, arm.toggles.sync, arm.toggles.fuse_qkv) for arm in arms[:3]] == [
        ("off", "per_copy", "off"), ("on", "copy_boundary", "off"), ("off", "per_copy", "on"),
    ]  # fmt: skip
    found = ab(engine_of(monkeypatch, 2.0), spec, tests="tg4", rounds=5, background=on)
    assert found.summary()["verdict"].tolist()[:2] == ["faster", "no difference"]
    assert "baseline pdl=off, background graph_reuse=set_rows, all else off" in found.caption


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
        ab(engine_of(monkeypatch), spec)


# saved, cut and resumed --------------------------------------------------------------------------


def test_a_comparison_is_saved_and_loaded_again(monkeypatch, tmp_path):
    monkeypatch.setattr("workbench.benchmarks.runs.results.CHECKPOINT_SECONDS", -1.0)
    seen, out = [], tmp_path / "r"

    def progress(done, total, what):
        seen.append((done, total))
        if done == 3:  # one round is done and was written
            assert len(load_run(out).samples) == 3 * 4

    found = ab(engine_of(monkeypatch, 1.3, 0.02), SPEC, None, "tg4", 5, out=out, progress=progress)
    assert seen == [(i, 15) for i in range(16)]
    again = AB.load(out)
    assert again.table().equals(found.table()) and again.verdict == found.verdict
    assert found.run["run_id"] == "r" and set(found.samples["run_id"]) == {"r"}
    with pytest.raises(UsageError, match="exists already"):
        ab(engine_of(monkeypatch), SPEC, tests="tg4", rounds=5, out=out)


def cut(monkeypatch, out):
    """13 forced steps for each of 3 arms, 2 warm-up rounds of 2 tokens, then repetitions: the
    fifth is cut in its first token."""
    engine = engine_of(monkeypatch, 1.5)
    engine.shared.stop_at, engine.shared.error = 3 * 14 + 3 * 2 * 2 + 9, KeyboardInterrupt()
    return ab(engine, SPEC, tests="tg2", rounds=5, out=out)


def test_ctrl_c_keeps_finished_samples_and_the_rest_follows(monkeypatch, tmp_path):
    before, how = cut(monkeypatch, tmp_path / "r"), {"tests": "tg2", "rounds": 5}
    assert before.interrupted and before.run["status"] == "interrupted"
    assert len(before.samples) == 2 * 4 and "interrupted" in before.verdict
    assert before.summary()["verdict"][0] == "too few repetitions"
    assert load_run(tmp_path / "r").samples.equals(before.samples)
    how |= {"out": tmp_path / "r", "resume": True}
    whole = ab(engine_of(monkeypatch, 1.5), SPEC, **how)
    assert not whole.interrupted and whole.interleaved
    assert whole.run["started"] == before.run["started"]
    assert whole.samples.iloc[:8].equals(before.samples)
    assert len(whole.samples[["arm", "repetition"]].drop_duplicates()) == 15
    assert whole.samples["order"].tolist() == [i // 2 for i in range(30)]
    straight = ab(engine_of(monkeypatch, 1.5), SPEC, tests="tg2", rounds=5)
    assert whole.samples["arm"].tolist() == straight.samples["arm"].tolist()
    assert len(whole.run["result"]["sessions"]) == 2
    assert [a["counters"]["steps"] for a in whole.run["arms"]] == [10, 10, 10]
    assert whole.summary()["verdict"][0] == "faster"
    assert whole.answer("copy_boundary").n_rows > before.answer("copy_boundary").n_rows > 13
    again = ab(engine_of(monkeypatch), SPEC, **how)  # finished: nothing is measured
    assert again.samples.equals(whole.samples)
    assert again.run["result"]["warm_up"] == whole.run["result"]["warm_up"] != {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"toggle": "sync=per_copy,auto"}, "its arms is"),
        ({"tests": "tg3"}, "its tests is"),
        ({"seed": 1}, "its seed is"),
        ({"background": Toggles(copy_stream="compute")}, "its arms is"),
    ],
)
def test_only_the_same_experiment_is_resumed(monkeypatch, tmp_path, change, says):
    cut(monkeypatch, tmp_path / "r")
    same = {"toggle": SPEC, "tests": "tg2", "rounds": 5, "out": tmp_path / "r", "resume": True}
    with pytest.raises(UsageError, match=says):
        ab(engine_of(monkeypatch), **(same | change))


def test_a_real_comparison_is_a_whole_run(engine, tmp_path):
    modes = ["per_copy", "copy_boundary", "auto"]
    found = ab(engine, "sync", modes, "pp24+tg6@d40", 5, out=tmp_path / "r")
    assert [found.answer(arm["name"]).holds for arm in found.run["arms"][1:]] == [True] * 3
    waits = found.evidence().set_index("Arm")["waits"]
    assert waits["per_copy"] > waits["copy_boundary"] > 0
    assert found.summary()["label"].str.contains(r"auto \(\w+\)").sum() == 1
    s = found.samples
    assert len(s) == 4 * 5 * 7 and (s["ns"] > 0).all()
    assert s.groupby("order")["n_tokens"].sum().eq(30).all()
    assert np.allclose(rates(s)["tps"], 30e9 / s.groupby("order")["ns"].sum().to_numpy())
    assert engine.n_past == 0  # the engine itself was left alone
    run = load_run(tmp_path / "r").run
    assert run["model"]["hash"] == engine.model.hash and run["engine"]["device"] == "embedded"
    assert run["engine"]["config"]["n_ctx"] == engine.config.n_ctx and run["status"] == "complete"
    with pytest.raises(UsageError, match="race on the embedded device"):
        ab(engine, "sync=per_copy,implicit", background=Toggles(copy_stream="own"))
