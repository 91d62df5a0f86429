"""Comparisons whose outcome is known: an engine that takes exactly as long as it is told."""

from __future__ import annotations

import pytest

from tests.benchmarks.fake_engine import timed
from workbench.benchmarks.compare.ab import ab
from workbench.benchmarks.compare.arms import answer_between, arms_of, make_arms
from workbench.benchmarks.compare.comparison import AB
from workbench.common.errors import UsageError
from workbench.config import Toggles

SPEC = "sync=per_copy,copy_boundary"


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


# arms --------------------------------------------------------------------------------------------


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
