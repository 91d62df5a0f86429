"""The tables of graph plans and of graph reuse, from small made-up run folders: every figure is
computed again here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.measure import plan_tables, readme, targets
from data.measure.matrix import OFF, SETS, STEP, WHOLE
from data.measure.recorded import Recorded
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.runs import results
from workbench.config import Toggles
from workbench.engine.look.phases import PHASES

MODEL = "llama-3.2-1b-bf16"
COUNTED = [f"{phase}_{what}" for phase in PHASES for what in ("ns", "n")]
COUNTERS = {"steps": 10, "untraced_steps": 10, **dict.fromkeys(COUNTED, 0)}
WARM = {"plans_captured": 2, "plans_updated": 3, "plans_reinstantiated": 1, "plans_replayed": 40,
        "plans_capture_ns": 6_000_000, "plans_instantiate_ns": 3_000_000,
        "plans_update_ns": 2_000_000}  # fmt: skip
BLOCKS = ("reuse-cuda", "reuse-verdict", "growth-cuda", "plans-cuda", "plans-costs", "plans-fresh",
          "sets-cuda", "sweep-cuda")  # fmt: skip


def arm(name: str, toggles: Toggles, is_control: bool = False, **us: float) -> dict[str, Any]:
    """us: of a phase, a token."""
    counters = COUNTERS | {f"{phase}_ns": int(10_000 * each) for phase, each in us.items()}
    return {"name": name, "is_control": is_control, "toggles": toggles.to_dict(),
            "sync_mode": "implicit", "program": {}, "counters": counters}  # fmt: skip


def record(
    folder: Path, name: str, kind: str, arms: list[dict], us: dict[str, dict[str, float]],
    rounds: int = 6, **result: Any,
) -> None:  # fmt: skip
    """A made-up comparison. us: of a repetition, by test and arm; its token counts as in the name
    of the test. A repetition is off by some tenths of a percent, alike in all arms."""
    table = results.SampleTable(name)
    for test, of in us.items():
        n = int(test.partition("@")[0][2:])
        for round_ in range(rounds):
            for one in arms:
                ns = np.array([1e3 * of[one["name"]] * (1 + round_ / 1e3)])
                table.add(one["name"], one["is_control"], test, round_, ns, np.array([n]))
    run = {
        "schema": 1, "run_id": name, "kind": kind, "name": name, "status": "complete",
        "started": "2026-01-02T03:04:05Z", "duration_s": 1.0, "command": [], "versions": {},
        "commit": {"hash": "0" * 40, "number": 1, "dirty": False}, "machine": {},
        "engine": {"device_description": "a GPU", "timer": {"tick_ns": 32, "error_ns": 900}},
        "seed": 0, "tests": list(us),
        "repetitions": rounds, "model": {"name": "llama-3.2-1b with random weights",
                                         "quant": "BF16"},
        "arms": arms, "result": {"answers": {}, "warm_up": {}, "smoke": False} | result,
    }  # fmt: skip
    results.write_run(folder / f"cuda-{name}", run, table.frame())


def lines(folder: Path, block: str) -> list[dict[str, str]]:
    """The rows of the first table of a block, by column."""
    text = readme.made(block, Recorded(folder)).splitlines()
    head, _, *rest = [line for line in text if line.startswith("|")]
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    return [
        dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in rest
        if line.count("|") == head.count("|")
    ]


def target(folder: Path, start: str) -> targets.Result:
    (found,) = [t for t in targets.targets(Recorded(folder)) if t.what.startswith(start)]
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_what_was_not_measured_is_a_line_for_each_table(tmp_path, block):
    said = readme.made(block, Recorded(tmp_path)).split("\n\n")
    assert all(line.endswith(": not measured.") for line in said)


# plans --------------------------------------------------------------------------------------------


ON = Toggles(graph_reuse="set_rows", sync="packed_implicit", copy_stream="compute", pdl="on")


def sets(*arms: str) -> list[dict]:
    """Arms that are sets of toggles, and the first one's control."""
    made = [arm(name, switched(ON, name)) for name in arms]
    return [*made, arm(f"{arms[0]} (A/A)", switched(ON, arms[0]), True)]


def parts(token: float, device: float, gap: float, host: float, **more: Any) -> dict[str, Any]:
    found = {"token": token, "device": device, "gap": gap, "host": host, "plain": token - 3}
    return {part: [us] * 3 for part, us in found.items()} | more


SPLIT, PLAIN = "plans=ours plan_scope=split", f"{STEP} pdl=off"


def plans_run(folder: Path, gap: float = 20.0, model: str = MODEL) -> None:
    """A token takes 900 us without plans, 860 with a plan for each split, and 820 + gap with a plan
    of the whole step, which gains 10 where results are direct and launches ahead. Without pdl it
    takes 950."""
    us = {OFF: 900, SPLIT: 860, STEP: 820 + gap, WHOLE: 810 + gap, PLAIN: 950, f"{OFF} (A/A)": 901}
    none = {"counters": COUNTERS, "calls": 160, "nodes": 160}
    ours = {"counters": COUNTERS | WARM, "calls": 1, "nodes": 160}
    record(
        folder, f"plans-{model}", "ab", sets(OFF, SPLIT, STEP, WHOLE, PLAIN),
        {"tg128": {name: 128 * each for name, each in us.items()}}, toggle="",
        parts={OFF: parts(900, 840, 60, 50, **none), SPLIT: parts(860, 810, 50, 45, **ours),
               STEP: parts(820 + gap, 820, gap, 30, **ours),
               WHOLE: parts(810 + gap, 818, gap - 8, 4, **ours),
               PLAIN: parts(950, 905, 45, 30, **ours)},
    )  # fmt: skip


def test_an_arm_of_plans_says_what_is_in_them_and_what_is_added(tmp_path):
    plans_run(tmp_path)
    off, split, step, whole, plain = lines(tmp_path, "plans-cuda")[:5]
    assert (off["plans"], off["a plan is"], off["calls"], off["gap us"], off["device us"]) == (
        "off", "", "160", "60", "840",
    )  # fmt: skip
    assert [one["a plan is"] for one in (split, step, whole, plain)] == [
        "a split", "a step", "a step, direct, ahead", "a step",
    ]  # fmt: skip
    assert (step["pdl"], step["plans"], step["calls"], step["nodes"]) == ("on", "ours", "1", "160")
    assert (step["gap us"], step["device us"], step["host us"]) == ("20", "820", "30")
    assert step["stamps us"] == "3.0"
    made = readme.made("plans-cuda", Recorded(tmp_path))
    assert "us: medians, by a clock in steps of 32 ns; what was" in made
    assert step["Speedup"].startswith(f"{900 / 840:.3f} (") and step["verdict"] == "faster"
    assert float(step["t/s"]) == pytest.approx(1e6 / 840, rel=0.01)
    assert step["t/s off"] == off["t/s"] and off["t/s off"] == plain["t/s off"] == ""
    assert [step[name] for name in ("captured", "updated", "reinstantiated", "replayed")] == [
        "2", "3", "1", "40",
    ]  # fmt: skip
    assert (plain["pdl"], plain["Speedup"], plain["verdict"]) == ("off", "", ""), "another pdl"


def test_what_is_added_to_a_plan_stands_beside_it(tmp_path):
    plans_run(tmp_path)
    text = readme.made("plans-cuda", Recorded(tmp_path)).partition("What direct results")[2]
    (line,) = [line for line in text.splitlines() if "a step, direct, ahead" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:5] == ["842", "832"]  # with the noise of `record`
    assert cells[5].startswith(f"{840 / 830:.3f} (") and cells[6] == "faster"


def test_a_run_that_was_cut_off_before_the_parts_is_not_shown(tmp_path):
    plans_run(tmp_path)
    path = tmp_path / f"cuda-plans-{MODEL}" / "run.json"
    run = json.loads(path.read_text())
    del run["result"]["parts"]
    path.write_text(json.dumps(run))
    assert readme.made("plans-cuda", Recorded(tmp_path)).startswith("Graph plans: not measured.")
    assert target(tmp_path, "plans=ours, pdl=on").met == "not measured"


def test_costs_are_for_each_capture_and_each_update(tmp_path):
    plans_run(tmp_path)
    assert len(lines(tmp_path, "plans-costs")) == 4
    ours = lines(tmp_path, "plans-costs")[1]
    assert (ours["a plan is"], ours["nodes"]) == ("a step", "160")
    assert (ours["captures"], ours["us to capture"], ours["us to instantiate"]) == (
        "3", "2000", "1000",
    )  # fmt: skip
    assert (ours["updates"], ours["us to update"]) == ("4", "500")


def test_calls_for_a_plan_are_those_of_its_own_measurement(tmp_path):
    costs = {name: {"median": float(i)} for i, name in enumerate(plan_tables.TIMED)}
    row = {"model": MODEL, "scope": "split", "nodes": 7, "edges": 6, "programmatic_edges": 5}
    found = {"device_description": "a GPU", "date": "2026-01-02", "rows": [row | costs],
             "commit": {"hash": "0" * 40}}  # fmt: skip
    (tmp_path / "cuda-plan-costs.json").write_text(json.dumps(found))
    text = readme.made("plans-costs", Recorded(tmp_path))
    assert "Costs of plans: not measured." in text and "a GPU; us, medians" in text
    (line,) = lines(tmp_path, "plans-costs")
    assert (line["nodes"], line["programmatic"], line["capture"]) == ("7", "5", "1.0")
    assert (line["launch, busy"], line["on the device"]) == ("9.0", "10.0")
    replayed = target(tmp_path, "a token's launches replayed")
    assert replayed.measured == f"{MODEL} 10 (809)" and "missed" not in replayed.met


@pytest.mark.parametrize("gap", [20.0, 50.0])
def test_gap_host_and_kernels_are_held_against_their_bounds(tmp_path, gap):
    """Of each kind of plan by its worst row; a figure that misses is shown as missed."""
    plans_run(tmp_path, gap)
    worst = "2 of 2 rows above, the most 50 us (llama-3.2-1b BF16, pdl on)"
    if gap < 45:  # what it is without pdl
        worst = "1 of 2 rows above, the most 45 us (llama-3.2-1b BF16, pdl off)"
    found = target(tmp_path, "plans=ours, gap")
    assert f"; a step: {worst}; " in found.measured
    over = int(gap - 8 > 25)
    assert f"a step, direct, ahead: {over} of 1 rows above, the most {gap - 8:.0f} us (" in (
        found.measured
    )
    missed = "a split; a step" + ("; a step, direct, ahead" if over else "")
    left = "not measured: a step, direct; a step, ahead; a step, direct, ahead, word"
    assert found.met == f"**missed**: {missed}; {left}"
    host = target(tmp_path, "plans=ours, host")
    assert host.met == f"**missed**: a split; {left}"
    kernels = target(tmp_path, "plans=ours, pdl=on")
    assert kernels.measured == f"{MODEL} 820 (809)" and f"**missed**: {MODEL}" in kernels.met
    assert target(tmp_path, "plans=ours, pdl=off").measured == f"{MODEL} 905 (904)"


def test_kernels_of_models_that_are_compared_have_both_bounds(tmp_path):
    plans_run(tmp_path, model="qwen3-4b-q4_k_m")
    for pdl, said in (("on", "820 (1415)"), ("off", "905 (1587)")):
        found = target(tmp_path, f"plans=ours, pdl={pdl}")
        assert found.measured == f"qwen3-4b-q4_k_m {said}" and "missed" not in found.met


@pytest.mark.parametrize(("ours", "verdict"), [(60.0, "faster"), (64.0, "no difference"),
                                               (80.0, "slower")])  # fmt: skip
def test_the_first_tokens_of_an_engine_are_not_to_cost(tmp_path, ours, verdict):
    us = {OFF: 64e3, STEP: ours * 1e3, WHOLE: 50e3, f"{OFF} (A/A)": 63.9e3}
    counters = {name: {"tg64": COUNTERS | WARM} for name in us}
    record(tmp_path, f"fresh-{MODEL}", "fresh", sets(OFF, STEP, WHOLE), {"tg64": us}, toggle="",
           counters=counters)  # fmt: skip
    step, whole = lines(tmp_path, "plans-fresh")
    assert (step["ms before"], step["ms then"]) == ("64.2", f"{ours * 1.0025:.1f}")
    assert (step["verdict"], step["captured"], step["ms to capture"]) == (verdict, "2", "9.0")
    assert (whole["a plan is"], whole["verdict"]) == ("a step, direct, ahead", "faster")
    found = target(tmp_path, "plans never cost")
    assert ("**missed**" in found.met) == (verdict == "slower")
    assert f"{MODEL} {64 / ours:.3f} (a step, {verdict}), 1.280 (a step, direct" in found.measured


def test_sets_for_best_stand_beside_what_won_one_by_one(tmp_path):
    first, *others = SETS["cuda"]
    names = (first, *others, f"{first} (A/A)")
    us = {"tg64": 64e3, "pp512": 10e3}
    each = {test: {name: of * (1 - 0.1 * ("plan_batch=one" in name)) for name in names}
            for test, of in us.items()}  # fmt: skip
    counters = {name: dict.fromkeys(us, COUNTERS | WARM) for name in names}
    for kind, name in (("fresh", f"best-fresh-{MODEL}"), ("ab", f"best-{MODEL}")):
        record(tmp_path, name, kind, sets(first, *others), each, toggle="", counters=counters)
    found = lines(tmp_path, "sets-cuda")
    assert len(found) == 2 * 2 * len(others)
    assert [line["engines"] for line in found[:: 2 * len(others)]] == ["made anew", "warm"]
    train = "`step_wait=outputs` `host_source=pinned_ring_2`"
    assert {line["set"]: line["verdict"] for line in found} == {
        "`launch_ahead=on` `plan_batch=one`": "faster",
        f"`launch_ahead=on` `plan_batch=one` {train}": "faster",
        f"`plan_batch=one` {train}": "faster",
        f"`launch_ahead=on` `plan_batch=any` {train}": "no difference",
        f"`launch_ahead=on` `plan_batch=any` {train} `plan_warmup=2`": "no difference",
        f"`launch_ahead=on` `plan_batch=any` {train} `plan_end=word`": "no difference",
    }
    assert "each set has `plans=ours`, `plan_scope=step`" in readme.made(
        "sets-cuda", Recorded(tmp_path)
    )


def test_a_sweep_has_the_columns_of_sweep_bench(tmp_path):
    us = {"pp512": 40e3, "tg32": 32e3, "pp512@d1024": 50e3, "tg32@d1024": 40e3}
    every = {test: {OFF: of, WHOLE: of / 2, f"{OFF} (A/A)": of} for test, of in us.items()}
    record(tmp_path, f"sweep-{MODEL}", "sweep", sets(OFF, WHOLE), every, toggle="")
    found = lines(tmp_path, "sweep-cuda")
    columns = ["PP", "TG", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s"]
    assert [list(line)[2:9] for line in found] == [columns] * 4
    last = found[-1]
    assert [last["plans"], last["N_KV"]] == ["ours", "1024"]
    assert float(last["T_TG s"]) == pytest.approx(0.02005, abs=1e-4)
    assert float(last["S_PP t/s"]) == pytest.approx(512 / (25e-3 * 1.0025), rel=1e-3)
    assert last["Speedup of TG"].startswith("2.000 (")


# reuse --------------------------------------------------------------------------------------------


def ways_run(folder: Path) -> None:
    """A token takes 1000 us with a kept graph, and 5000 us of building more without."""
    build = {"graph": 1000, "fuse": 500, "split": 500, "layout": 500, "lower": 500, "prepare": 2000}
    arms = [arm("rebuild", Toggles(), batch=30, **build),
            arm("set_rows", Toggles(graph_reuse="set_rows"), batch=20, reuse=2),
            arm("rebuild (A/A)", Toggles(), True)]  # fmt: skip
    us = {"rebuild": 32 * 6500.0, "set_rows": 32 * 1000.0, "rebuild (A/A)": 32 * 6500.0}
    record(folder, f"reuse-ways-{MODEL}", "ab", arms, {"tg32": us}, toggle="graph_reuse")


def test_ways_to_keep_a_graph_have_us_by_phase(tmp_path):
    ways_run(tmp_path)
    rebuilt, kept = lines(tmp_path, "reuse-cuda")
    assert (rebuilt["graph_reuse"], rebuilt["prepare"], rebuilt["Speedup"]) == (
        "rebuild", "2000.0", "",
    )  # fmt: skip
    assert (kept["graph_reuse"], kept["prepare"], kept["batch"]) == ("set_rows", "0.0", "20.0")
    assert kept["Speedup"].startswith("6.50 (") and kept["verdict"] == "faster"


def test_a_layer_of_reuse_that_is_disabled_says_what_it_saves(tmp_path):
    arms = sets("redo=off", "redo_lower=on", "redo_bind=on")
    arms[1] = arm("redo_lower=on", switched(ON, "redo_lower=on"), lower=700)
    us = {"redo=off": 1000.0, "redo_lower=on": 1700.0, "redo_bind=on": 1100.0,
          "redo=off (A/A)": 1000.0}  # fmt: skip
    ways_run(tmp_path)
    record(tmp_path, f"reuse-layers-{MODEL}", "ab", arms,
           {"tg128": {name: 128 * each for name, each in us.items()}}, toggle="")  # fmt: skip
    text = readme.made("reuse-cuda", Recorded(tmp_path))
    row = next(line for line in text.splitlines() if "| lower " in line and "0.59" in line)
    assert "slower" in row and "700.0" in row
    assert float(row.split("|")[5]) == pytest.approx(702, abs=1)
    assert any("| bind " in line and "0.91" in line for line in text.splitlines())


def test_the_verdict_on_8366_is_at_what_a_build_costs(tmp_path):
    ways_run(tmp_path)
    (line,) = lines(tmp_path, "reuse-verdict")
    us = 1002.5  # with the noise of `record`
    assert line["us a token"] == "1002" and line["0 us"] == "1.000"
    assert line["100 us"] == f"{(us + 100) / us:.3f}"
    assert line["this engine's build, us"] == "5000"
    assert line["measured here (Python)"].startswith("6.50 (")
    assert line["at this engine's"] == f"{(us + 5000) / us:.2f}"
    assert line["3 to 7 % is a build of"] == "30 to 70 us"
    assert "its own was not measured" in readme.made("reuse-verdict", Recorded(tmp_path))


def test_llama_cpp_s_build_comes_from_the_peer_run(tmp_path):
    ways_run(tmp_path)
    names = ("llama.cpp", "llama.cpp reuse=off", "workbench best", "workbench best (A/A)")
    arms = [arm(name, Toggles(), "A/A" in name) for name in names]
    us = dict(zip(names, (128e3, 128 * 1040.0, 128e3, 128e3), strict=True))
    record(tmp_path, "peer", "peer", arms, {"tg128": us}, peer={"version": "1"})
    (tmp_path / "peer-cuda").mkdir()
    (tmp_path / "cuda-peer").rename(tmp_path / "peer-cuda" / MODEL)
    (line,) = lines(tmp_path, "reuse-verdict")
    assert line["llama.cpp's build, us"] == "40 (40..40)"
    assert line["at llama.cpp's"] == "1.04 (1.04..1.04)"
    said = readme.made("reuse-verdict", Recorded(tmp_path))
    assert "llama-3.2-1b BF16 40 us beside a token of 1002, 1.04 (1.04..1.04) (of its own" in said


def test_growth_is_compared_with_plans_and_without(tmp_path):
    names = [f"kv_growth={how} {plans}" for plans in (OFF, WHOLE) for how in ("step", "full")]
    us = dict(zip((*names, f"{names[0]} (A/A)"), (64e3, 80e3, 32e3, 64e3, 64e3), strict=True))
    record(tmp_path, f"growth-{MODEL}", "ab", sets(*names), {"tg64": us, "tg64@d8192": us},
           toggle="")  # fmt: skip
    found = lines(tmp_path, "growth-cuda")
    assert [(line["Test"], line["plans"]) for line in found] == [
        ("tg64", "off"), ("tg64", "ours"), ("tg64@d8192", "off"), ("tg64@d8192", "ours"),
    ]  # fmt: skip
    assert [line["Speedup"][:5] for line in found[:2]] == ["0.800", "0.500"]
    assert all(line["verdict"] == "slower" for line in found)


def test_graph_work_is_the_most_of_its_benchmarks(tmp_path):
    every = {"[set_rows-idle]": 40.0, "[set_rows-busy]": 70.0, "[patch_pointers-idle]": 50.0}
    named = {f"test_bench_reuse.py::test_graph_work_of_a_token{k}": {"median_us": us}
             for k, us in every.items()}  # fmt: skip
    (tmp_path / "benchmarks.json").write_text(json.dumps({"benchmarks": named}))
    found = target(tmp_path, "graph work")
    assert "40 us idle, 70 us busy" in found.measured and "**missed**" in found.met
    alone = {"test_bench_reuse.py::test_graph_work": {"median_us": 41.0}}
    (tmp_path / "benchmarks.json").write_text(json.dumps({"benchmarks": alone}))
    assert "41 us" in target(tmp_path, "graph work").measured


def test_twins_are_said_beside_captures():
    assert plan_tables.captured({}) == ""
    assert plan_tables.captured({"plans_captured": 3}) == "3"  # a run from before twins
    assert plan_tables.captured({"plans_captured": 3, "plans_twinned": 0}) == "3"
    assert plan_tables.captured({"plans_captured": 1, "plans_twinned": 2}) == "1 and 2 twinned"
