"""Comparisons whose outcome is known: an engine that takes exactly as long as it is told."""

from __future__ import annotations

import numpy as np
import pytest
from fake_engine import Clock, FakeEngine

from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.arms import answer_between, arms_of, make_arms, parse_toggle_spec
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.rounds import order_of
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import DeviceError, UsageError
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
    assert s["test"].tolist() == ["tg8", "tg8", "pp8", "pp8"]
    toggled = s[~s["is_control"]]
    assert toggled["verdict"].tolist() == [verdict] * 2
    assert toggled["speedup"].tolist() == pytest.approx([faster] * 2, rel=0.02)
    assert s[s["is_control"]]["speedup"].tolist() == pytest.approx([1.0] * 2, rel=0.02)
    assert s["n"].tolist() == [8] * 4
    assert found.verdict.splitlines()[0].startswith(
        f"tg8: sync per_copy -> copy_boundary: {verdict}, "
    )
    assert "exact: bit-equal" in found.verdict


def test_the_table(monkeypatch):
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
    evidence = found.evidence()
    assert evidence["waits"].tolist() == [9, 2] and evidence["Arm"].tolist()[0] == "per_copy"


def test_the_order_is_a_rotating_palindrome(monkeypatch):
    found = ab(engine_of(monkeypatch), SPEC, tests="tg2", rounds=6)
    cells = found.samples.drop_duplicates("order")
    letters = {"per_copy": "A", "copy_boundary": "B", "per_copy (A/A)": "C"}
    order = "".join(cells["arm"].map(letters))
    assert order == "ABCCBABCAACBCABBAC"
    assert cells["order"].tolist() == list(range(18)) and found.interleaved
    one_sided = found.samples.sort_values(["arm", "order"], ignore_index=True)
    one_sided["order"] = range(len(one_sided))
    assert not AB(found.run, one_sided).interleaved
    for k in (2, 3, 5):  # every arm has every position equally often
        positions = [order_of(r, k).index(0) for r in range(2 * k)]
        assert sorted(positions) == sorted(list(range(k)) * 2)


def test_every_arm_of_a_round_gets_the_same_tokens(monkeypatch):
    engine = engine_of(monkeypatch)
    ab(engine, SPEC, tests="tg3@d5", rounds=5)
    a, b, control = engine.shared.variants
    assert sorted(a.calls) == sorted(b.calls) == sorted(control.calls)
    assert engine.calls == [] and all(v.closed for v in engine.shared.variants)


def test_the_control_is_an_engine_of_its_own(monkeypatch):
    engine = engine_of(monkeypatch)
    found = ab(engine, SPEC, tests="tg2", rounds=5)
    assert [v.toggles.sync for v in engine.shared.variants] == [
        "per_copy", "copy_boundary", "per_copy",
    ]  # fmt: skip
    assert [arm["is_control"] for arm in found.run["arms"]] == [False, False, True]
    assert [arm["counters"]["steps"] for arm in found.run["arms"]] == [10, 10, 10]


def test_a_wrong_answer_is_seen(monkeypatch):
    found = ab(
        engine_of(monkeypatch, 2.0, wrong={"copy_boundary": 1e-3}), SPEC, tests="tg2", rounds=5
    )
    assert not found.answer("copy_boundary").holds
    assert found.answer("per_copy (A/A)").holds
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


def test_a_noisy_machine_sees_no_difference(monkeypatch):
    """5 % faster amid noise of a factor 2: inside the A/A band."""
    found = ab(engine_of(monkeypatch, 1.05, noise=1.0), SPEC, tests="tg1", rounds=10)
    assert found.summary()["verdict"][0] == "no difference"


def test_what_a_noisy_machine_cannot_resolve_is_said(monkeypatch):
    """In the verdict, and so in what `ab` prints and a notebook shows."""
    found = ab(engine_of(monkeypatch, 1.05, noise=1.0), SPEC, tests="tg1", rounds=10)
    row, control = found.summary().to_dict("records")
    ratio = stats.Ratio(*(row[k] for k in ("speedup", "low", "high", "n")))
    least = stats.resolution(ratio, stats.Band(row["band_low"], row["band_high"]))
    assert least > stats.effect(ratio) and control["is_control"]
    line = (
        f"tg1: this machine cannot resolve less than {stats.percent(least)} here now, and the "
        f"effect is {stats.percent(stats.effect(ratio))} (copy_boundary). What helps: "
    )
    assert line in found.verdict and line in found._repr_html_() and line in repr(found)
    for advice in (" rounds (by the width, they ", "a longer test", "a quiet machine", "--until "):
        assert advice in found.verdict
    quiet = ab(engine_of(monkeypatch, 1.05, noise=0.001), SPEC, tests="tg1", rounds=10)
    assert "cannot resolve" not in quiet.verdict


def test_percentiles(monkeypatch):
    table = ab(engine_of(monkeypatch, 2.0), SPEC, tests="tg4,pp8+tg2", rounds=5).percentiles()
    assert table["arm"].tolist() == ["per_copy", "copy_boundary", "per_copy (A/A)"] * 2
    assert table["n_tokens"].tolist() == [20] * 3 + [10] * 3
    assert table["p50_us"].tolist() == table["p99_us"].tolist() == [1000.0, 500.0, 1000.0] * 2
    assert table["ttft_us"].tolist() == [1000.0, 500.0, 1000.0, 8000.0, 4000.0, 8000.0]


def test_too_few_rounds(monkeypatch):
    engine = engine_of(monkeypatch, 3.0)
    with pytest.raises(UsageError, match="too few"):
        ab(engine, SPEC, rounds=4)
    with pytest.raises(UsageError, match="too few"):
        ab(engine, SPEC, rounds=0, smoke=True)
    found = ab(engine, SPEC, tests="tg2", rounds=1, smoke=True)
    assert found.summary()["verdict"][0] == "too few repetitions"
    assert found.table()["95% CI"].tolist() == ["-", "-"]


def test_specs():
    assert parse_toggle_spec("sync = per_copy , auto") == ("sync", ["per_copy", "auto"])
    for spec, message in [
        ("sync", "has no values"),
        ("sink=a,b", "'sink' does not exist"),
        ("sync=per_copy,never", "'never' does not exist"),
        ("sync=auto,auto", "twice"),
    ]:
        with pytest.raises(UsageError, match=message):
            parse_toggle_spec(spec)


def test_arms_and_backgrounds():
    on = Toggles(copy_stream="compute", graph_reuse="set_rows")
    arms = make_arms("sync", ["implicit"], on)
    assert [arm.name for arm in arms] == ["per_copy", "implicit", "per_copy (A/A)"]
    assert all(arm.toggles.graph_reuse == "set_rows" for arm in arms)
    with pytest.raises(UsageError, match="clash"):
        make_arms("sync", ["per_copy", "event_guarded"], on)
    with pytest.raises(UsageError, match="what the background has"):
        make_arms("sync", ["per_copy"], Toggles())


def test_ways_of_reuse_are_exact_but_where_one_side_alone_joins_rope_and_store():
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
    assert [(arm.toggles.pdl, arm.toggles.sync) for arm in arms[:2]] == [
        ("off", "per_copy"), ("on", "copy_boundary"),
    ]  # fmt: skip
    assert (arms[2].toggles.fuse_qkv, arms[2].toggles.fuse_glu) == ("on", "off")
    found = ab(engine_of(monkeypatch, 2.0), spec, tests="tg4", rounds=5, background=on)
    assert found.summary()["verdict"].tolist()[:2] == ["faster", "no difference"]
    said = found.verdict.splitlines()[0]
    assert said.startswith("tg4: pdl=off -> sync=copy_boundary copy_stream=compute: faster, 2.000x")
    assert "baseline pdl=off, background graph_reuse=set_rows, all else off" in found.caption


@pytest.mark.parametrize(
    ("spec", "message"),
    [("plans=off | plans=off", "twice"), ("plans=off | pdl=off", "are the same toggles"),
     ("plans=off | plan=ours", "'plan' does not exist"), ("plans=off | plans", "has no value"),
     ("plans=off | plans=no", "'no' does not exist"),
     ("pdl=off | sync=event_guarded copy_stream=compute", "clash")],
)  # fmt: skip
def test_sets_of_toggles_that_cannot_be_compared(spec, message):
    with pytest.raises(UsageError, match=message):
        arms_of(spec, Toggles())


def test_several_values_and_auto(monkeypatch):
    found = ab(engine_of(monkeypatch), "sync", ["per_copy", "copy_boundary", "auto"], "tg2", 5)
    assert found.summary()["label"].tolist() == [
        "copy_boundary", "auto (copy_boundary)", "per_copy (A/A)",
    ]  # fmt: skip


def test_traced_engines_and_long_tests_are_refused(monkeypatch):
    engine = engine_of(monkeypatch)
    with pytest.raises(UsageError, match="n_ctx"):
        ab(engine, SPEC, tests="tg300")
    engine.recorder = object()
    with pytest.raises(UsageError, match="recorder"):
        ab(engine, SPEC)
    assert engine.shared.variants == []


def test_saved_and_loaded_again(monkeypatch, tmp_path):
    found = ab(engine_of(monkeypatch, 1.3, 0.02), SPEC, tests="tg4", rounds=5, out=tmp_path / "r")
    again = AB.load(tmp_path / "r")
    assert again.table().equals(found.table()) and again.verdict == found.verdict
    assert found.run["run_id"] == "r" and set(found.samples["run_id"]) == {"r"}
    with pytest.raises(UsageError, match="exists already"):
        ab(engine_of(monkeypatch), SPEC, tests="tg4", rounds=5, out=tmp_path / "r")
    assert ab(engine_of(monkeypatch), SPEC, tests="tg2", rounds=5).save(tmp_path / "s").is_dir()


class TestInterruption:
    # 13 forced steps for each of 3 arms, 2 warm-up rounds of 2 tokens each, then the repetitions
    FIRST_TIMED = 3 * 14 + 3 * 2 * 2

    def interrupted(self, monkeypatch, folder, error, after=9, **options):
        engine = engine_of(monkeypatch, 1.5)
        engine.shared.stop_at = self.FIRST_TIMED + after
        engine.shared.error = error
        return ab(engine, SPEC, tests="tg2", rounds=5, out=folder, **options)

    def test_ctrl_c_keeps_every_finished_sample(self, monkeypatch, tmp_path):
        found = self.interrupted(monkeypatch, tmp_path / "r", KeyboardInterrupt())
        assert found.interrupted and found.run["status"] == "interrupted"
        assert len(found.samples) == 2 * 4  # the fifth repetition was cut in its first token
        assert "interrupted" in found.verdict
        assert found.summary()["verdict"][0] == "too few repetitions"
        assert load_run(tmp_path / "r").samples.equals(found.samples)

    def test_resume_does_the_rest(self, monkeypatch, tmp_path):
        cut = self.interrupted(monkeypatch, tmp_path / "r", KeyboardInterrupt())
        engine = engine_of(monkeypatch, 1.5)
        whole = ab(engine, SPEC, tests="tg2", rounds=5, out=tmp_path / "r", resume=True)
        assert not whole.interrupted and whole.interleaved
        assert whole.run["started"] == cut.run["started"]
        assert whole.samples.iloc[:8].equals(cut.samples)
        cells = whole.samples[["arm", "repetition"]].drop_duplicates()
        assert len(cells) == 15 and len(whole.samples) == 30
        assert whole.samples["order"].tolist() == [i // 2 for i in range(30)]
        straight = ab(engine_of(monkeypatch, 1.5), SPEC, tests="tg2", rounds=5)
        assert whole.samples["arm"].tolist() == straight.samples["arm"].tolist()
        assert len(whole.run["result"]["sessions"]) == 2
        assert [a["counters"]["steps"] for a in whole.run["arms"]] == [10, 10, 10]
        assert whole.summary()["verdict"][0] == "faster"
        assert whole.answer("copy_boundary").n_rows > cut.answer("copy_boundary").n_rows > 13

    def test_a_finished_run_is_not_measured_again(self, monkeypatch, tmp_path):
        done = ab(engine_of(monkeypatch), SPEC, tests="tg2", rounds=5, out=tmp_path / "r")
        engine = engine_of(monkeypatch)
        again = ab(engine, SPEC, tests="tg2", rounds=5, out=tmp_path / "r", resume=True)
        assert again.samples.equals(done.samples)
        assert again.run["result"]["warm_up"] == done.run["result"]["warm_up"] != {}

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"toggle": "sync=per_copy,auto"}, "arms"),
            ({"tests": "tg3"}, "tests"),
            ({"seed": 1}, "seed"),
            ({"background": Toggles(copy_stream="compute")}, "arms"),
        ],
    )
    def test_only_the_same_experiment_is_resumed(self, monkeypatch, tmp_path, change, key):
        self.interrupted(monkeypatch, tmp_path / "r", KeyboardInterrupt())
        same = {"toggle": SPEC, "tests": "tg2", "rounds": 5, "out": tmp_path / "r", "resume": True}
        with pytest.raises(UsageError, match=f"its {key} is"):
            ab(engine_of(monkeypatch), **(same | change))
        with pytest.raises(UsageError, match="is no run folder"):
            ab(engine_of(monkeypatch), **(same | {"out": tmp_path / "none"}))
        with pytest.raises(UsageError, match="give it as out"):
            ab(engine_of(monkeypatch), **(same | {"out": None}))

    def test_a_failing_device_saves_and_raises(self, monkeypatch, tmp_path):
        with pytest.raises(DeviceError, match="gone"):
            self.interrupted(monkeypatch, tmp_path / "r", DeviceError("gone"))
        assert len(load_run(tmp_path / "r").samples) == 8

    def test_with_nothing_measured_nothing_is_written(self, monkeypatch, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            self.interrupted(monkeypatch, tmp_path / "r", KeyboardInterrupt(), after=0)
        assert not (tmp_path / "r").exists()


def test_progress_and_checkpoints(monkeypatch, tmp_path):
    monkeypatch.setattr("workbench.benchmarks.runs.results.CHECKPOINT_SECONDS", -1.0)
    seen = []

    def progress(done, total, what):
        seen.append((done, total))
        if done == 3:  # one round is done and was written
            assert len(load_run(tmp_path / "r").samples) == 3 * 2

    ab(engine_of(monkeypatch), SPEC, None, "tg2", 5, out=tmp_path / "r", progress=progress)
    assert seen == [(i, 15) for i in range(16)]
