"""The tables of graph plans and of graph reuse, from small made-up run folders: every figure is
computed again here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.measure import binds, plan_tables, readme
from data.measure.matrix import OFF, SETS, STEP, WHOLE
from data.measure.recorded import Recorded
from tests.measure.made import COUNTERS, MODEL, arm, lines, record, sets, target
from tests.profiles import long
from workbench.answers import kept
from workbench.config import Toggles

WARM = {"plans_captured": 2, "plans_updated": 3, "plans_reinstantiated": 1, "plans_replayed": 40,
        "plans_capture_ns": 6_000_000, "plans_instantiate_ns": 3_000_000,
        "plans_update_ns": 2_000_000}  # fmt: skip
SPLIT, PLAIN = "plans=ours plan_scope=split", f"{STEP} pdl=off"


def parts(token: float, device: float, gap: float, host: float, **more: Any) -> dict[str, Any]:
    found = {"token": token, "device": device, "gap": gap, "host": host, "plain": token - 3}
    return {part: [us] * 3 for part, us in found.items()} | more


def plans_run(folder: Path, gap: float = 20.0, **warm: int) -> None:
    """A token takes 900 us without plans, 860 with a plan for each split, and 820 + gap with a plan
    of the whole step, which gains 10 where results are direct and launches ahead. Without pdl it
    takes 950."""
    us = {OFF: 900, SPLIT: 860, STEP: 820 + gap, WHOLE: 810 + gap, PLAIN: 950, f"{OFF} (A/A)": 901}
    none = {"counters": COUNTERS, "calls": 160, "nodes": 160}
    ours = {"counters": COUNTERS | WARM | warm, "calls": 1, "nodes": 160}
    record(
        folder, f"plans-{MODEL}", "ab", {"tg128": {name: 128 * each for name, each in us.items()}},
        sets(OFF, SPLIT, STEP, WHOLE, PLAIN), toggle="",
        parts={OFF: parts(900, 840, 60, 50, **none), SPLIT: parts(860, 810, 50, 45, **ours),
               STEP: parts(820 + gap, 820, gap, 30, **ours),
               WHOLE: parts(810 + gap, 818, gap - 8, 4, **ours),
               PLAIN: parts(950, 905, 45, 30, **ours)},
    )  # fmt: skip


def test_an_arm_says_what_is_in_its_plans_and_added(tmp_path):
    plans_run(tmp_path)
    off, _, step, whole, plain = lines(tmp_path, "plans-cuda")[:5]
    names = ("plans", "a plan is", "calls", "nodes", "gap us", "device us", "host us", "stamps us")
    assert [off[n] for n in names] == ["off", "", "160", "160", "60", "840", "50", "3.0"]
    assert [step[n] for n in names] == ["ours", "a step", "1", "160", "20", "820", "30", "3.0"]
    assert whole["a plan is"] == "a step, direct, ahead"
    assert step["Speedup"].startswith(f"{900 / 840:.3f} (") and step["verdict"] == "faster"
    assert float(step["t/s"]) == pytest.approx(1e6 / 840, rel=0.01)
    assert step["t/s off"] == off["t/s"] and off["t/s off"] == plain["t/s off"] == ""
    counted = ("captured", "updated", "reinstantiated", "replayed")
    assert [step[name] for name in counted] == ["2", "3", "1", "40"]
    assert (plain["pdl"], plain["Speedup"], plain["verdict"]) == ("off", "", ""), "another pdl"
    text = readme.made("plans-cuda", Recorded(tmp_path)).partition("What direct results")[2]
    (line,) = [line for line in text.splitlines() if "a step, direct, ahead" in line]
    assert f"{840 / 830:.3f} (" in line and "faster" in line
    path = tmp_path / f"cuda-plans-{MODEL}" / "run.json"
    run = json.loads(path.read_text())
    del run["result"]["parts"]  # cut off before
    path.write_text(json.dumps(run))
    assert readme.made("plans-cuda", Recorded(tmp_path)).startswith("Graph plans: not measured.")
    assert target(tmp_path, "plans=ours, pdl=on").met == "not measured"


def test_costs_are_for_each_capture_and_each_update(tmp_path):
    """Twins are instantiated, and not captured."""
    names = ("captures", "us to capture", "us to instantiate", "updates", "us to update")
    for n_twins, us_instantiate in ((0, "1000"), (3, "500")):
        plans_run(tmp_path, plans_twinned=n_twins)
        ours = lines(tmp_path, "plans-costs")[1]
        assert [ours[name] for name in names][1:] == ["2000", us_instantiate, "4", "500"]
    costs = {name: {"median": float(i)} for i, name in enumerate(plan_tables.TIMED)}
    row = {"model": MODEL, "scope": "split", "nodes": 7, "edges": 6, "programmatic_edges": 5}
    found = {"device_description": "a GPU", "date": "2026-01-02", "rows": [row | costs],
             "commit": {"hash": "0" * 40}}  # fmt: skip
    (tmp_path / "cuda-plan-costs.json").write_text(json.dumps(found))
    assert "us, medians, everything on: one call each" in readme.made(
        "plans-costs", Recorded(tmp_path)
    )
    assert target(tmp_path, "a token's launches replayed").measured == f"{MODEL} 10 (809)"
    assert plan_tables.captured({"plans_captured": 1, "plans_twinned": 2}) == "1 and 2 twinned"


@pytest.mark.parametrize(("ours", "verdict"), [(60.0, "faster"), (64.0, "no difference"),
                                               (80.0, "slower")])  # fmt: skip
def test_first_tokens_of_an_engine_are_not_to_cost(tmp_path, ours, verdict):
    us = {OFF: 64e3, STEP: ours * 1e3, WHOLE: 50e3, f"{OFF} (A/A)": 63.9e3}
    counters = {name: {"tg64": COUNTERS | WARM} for name in us}
    record(tmp_path, f"fresh-{MODEL}", "fresh", {"tg64": us}, sets(OFF, STEP, WHOLE), toggle="",
           counters=counters)  # fmt: skip
    step, whole = lines(tmp_path, "plans-fresh")
    assert (step["ms before"], step["ms then"]) == ("64.2", f"{ours * 1.0025:.1f}")
    assert (step["verdict"], step["captured"], step["ms to capture"]) == (verdict, "2", "9.0")
    assert (whole["a plan is"], whole["verdict"]) == ("a step, direct, ahead", "faster")
    found = target(tmp_path, "plans never cost")
    assert ("**missed**" in found.met) == (verdict == "slower")
    if verdict == "slower":
        (bound,) = binds.first_tokens(Recorded(tmp_path))
        assert bound.binds[0].startswith("captured: 2; tokens 0 take 16.0 ms more than without")
        assert bound.binds[1].startswith("capturing and making launchable take 9.0 ms of it")


@pytest.mark.parametrize("faster", [True, long(False)])
def test_sets_for_best_stand_beside_what_won_singly(tmp_path, faster):
    """Where none is faster, none has won."""
    first, *others = SETS["cuda"]
    names = (first, *others, f"{first} (A/A)")
    us = {"tg64": 64e3, "pp512": 10e3}
    each = {test: {name: of * (1 - 0.1 * (faster and "plan_batch=one" in name)) for name in names}
            for test, of in us.items()}  # fmt: skip
    counters = {name: dict.fromkeys(us, COUNTERS | WARM) for name in names}
    for kind, name in (("fresh", f"best-fresh-{MODEL}"), ("ab", f"best-{MODEL}")):
        record(tmp_path, name, kind, each, sets(first, *others), toggle="", counters=counters)
    found = lines(tmp_path, "sets-cuda")
    assert len(found) == 2 * 2 * len(others)
    verdicts = {line["set"]: line["verdict"] for line in found}
    assert {("plan_batch=one" in name) and faster for name in verdicts} == {faster, False}
    for name, verdict in verdicts.items():
        wins = faster and "plan_batch=one" in name
        assert verdict == ("faster" if wins else "no difference"), name
    said = plan_tables.won(Recorded(tmp_path))
    assert (": won; " in said) == faster == ("None did" not in said)


def test_reuse_has_us_by_phase_and_a_verdict(tmp_path):
    """A token takes 1000 us with a kept graph, and 5000 us of building more without. llama.cpp's
    build comes from the peer run."""
    build = {"graph": 1000, "fuse": 500, "split": 500, "layout": 500, "lower": 500, "prepare": 2000}
    arms = [arm("rebuild", Toggles(), batch=30, **build),
            arm("set_rows", Toggles(graph_reuse="set_rows"), batch=20, reuse=2),
            arm("rebuild (A/A)", Toggles())]  # fmt: skip
    us = {"rebuild": 32 * 6500.0, "set_rows": 32 * 1000.0, "rebuild (A/A)": 32 * 6500.0}
    record(tmp_path, f"reuse-ways-{MODEL}", "ab", {"tg32": us}, arms, toggle="graph_reuse")
    rebuilt, reused = lines(tmp_path, "reuse-cuda")
    assert (rebuilt["graph_reuse"], rebuilt["prepare"]) == ("rebuild", "2000.0")
    assert (reused["prepare"], reused["batch"], reused["verdict"]) == ("0.0", "20.0", "faster")
    assert reused["Speedup"].startswith("6.50 (")
    (line,) = lines(tmp_path, "reuse-verdict")
    us_token = 1002.5  # with the noise of `record`
    assert line["us a token"] == "1002" and line["0 us"] == "1.000"
    assert line["100 us"] == f"{(us_token + 100) / us_token:.3f}"
    assert line["this engine's build, us"] == "5000"
    assert line["at this engine's"] == f"{(us_token + 5000) / us_token:.2f}"
    names = ("llama.cpp", "llama.cpp reuse=off", "workbench best", "workbench best (A/A)")
    us = dict(zip(names, (128e3, 128 * 1040.0, 128e3, 128e3), strict=True))
    record(tmp_path, "peer", "peer", {"tg128": us}, [arm(name) for name in names],
           peer={"version": "1"})  # fmt: skip
    (tmp_path / "peer-cuda").mkdir()
    (tmp_path / "cuda-peer").rename(tmp_path / "peer-cuda" / MODEL)
    (line,) = lines(tmp_path, "reuse-verdict")
    assert line["llama.cpp's build, us"] == "40 (40..40)"
    assert line["its own speedup"] == "1.04" and line["at llama.cpp's"] == "1.04 (1.04..1.04)"
    said = plan_tables.verdict(Recorded(tmp_path))
    assert kept.theirs(said) == (1.04, 1.04, 1, "a GPU")
    assert "On the same card, beside this " in said
    run = tmp_path / "peer-cuda" / MODEL / "run.json"
    found = json.loads(run.read_text())
    found["engine"]["device_description"] = "another GPU (of many)"
    run.write_text(json.dumps(found))
    (line,) = lines(tmp_path, "reuse-verdict")
    assert line["its own speedup"] == "1.04" and line["at llama.cpp's"] == "", "of another card"
    said = plan_tables.verdict(Recorded(tmp_path))
    assert kept.theirs(said) == (1.04, 1.04, 1, "another GPU") and "On the same card" not in said
