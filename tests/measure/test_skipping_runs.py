"""Skipping by ubatch size: from the call to the page, without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import workbench as wb
from data.measure import readme, skipping
from data.measure.command import Options
from data.measure.recorded import NOT_MEASURED, PHASES, Recorded
from data.measure.skipping import (
    ALWAYS,
    CLASSES,
    FOLDER,
    IN_LOOP,
    OFF,
    TAIL,
    SkipRun,
    comparisons,
    runs,
    ways,
)
from workbench.benchmarks.compare.arms import arms_of
from workbench.benchmarks.runs import results
from workbench.config import Toggles

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
RUNS = sorted((RESULTS / FOLDER).glob("*/*/run.json"))
MODEL, N_PROMPT, CELLS, TOKENS = "tiny-llama-q8_0", 128, 16, 8


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_models):
    out = tmp_path_factory.mktemp("results")
    skipping.main(
        MODEL, ubatches="1,64", n_prompt=N_PROMPT, n_gen=2, rounds=1,
        options=Options("embedded", out / FOLDER, tiny_models),
    )  # fmt: skip
    return Recorded(out)


def test_every_comparison_has_toggles_of_its_own_and_the_gate_is_said():
    """A set that is the baseline's would be refused only on the GPU."""
    background = Toggles(graph_reuse="set_rows", kv_cache="per_sequence", kv_parts="stream_k")
    every = comparisons(8192, [1 << i for i in range(14)], 32, 5)
    for one in every:
        _, arms = arms_of(" | ".join(one.arms), background)
        assert arms[-1].is_control and len(arms) == len(one.arms) + 1
    assert len({one.folder for one in every}) == len(every) == 14 + 4
    assert ways(1) == ways(8) == [OFF, IN_LOOP, TAIL]
    assert {one.rounds for one in every} == {5}, "none has too few for a verdict"
    assert ways(512)[-2:] == [f"{TAIL} {ALWAYS}", f"{CLASSES} {ALWAYS}"]
    assert ways(1024) == ways(8192) == [OFF, IN_LOOP, TAIL, CLASSES]
    for one in every:
        assert one.n_ctx % (256 * one.n_seqs) == 0
        assert one.n_ctx >= max(test.n_cells for test in one.tests)


def test_each_folder_is_a_comparison_with_its_blocks(measured):
    found = runs(measured, MODEL)
    assert set(found) == {"ub1", "ub64", "together-64", "parts", "depth"}
    for run in found.values():
        assert all(answer["holds"] for answer in run.run["result"]["answers"].values())
        assert set(run.run["result"]["visits"]) == set(run.names)
    n_layer = found["ub64"].run["model"]["n_layer"]
    visits = found["ub64"].run["result"]["visits"]
    n_kv = 256  # the pad
    each = [visits[arm][f"pp{N_PROMPT}"]["prompts"] for arm in ways(64)]
    assert {sum(one) for one in each} == {n_layer * 2 * (64 // TOKENS) * (n_kv // CELLS)}
    assert each[0][1] == 0, "nothing is skipped without skipping"
    # a group of 8 tokens sees up to its last one
    seen = sum(-(-(8 * (i + 1)) // CELLS) for i in range(N_PROMPT // TOKENS))
    assert each[1][0] == n_layer * seen
    assert each[2][1] == 0 and each[3][1] == 0, "the gate is closed below 1024 tokens"
    assert each[5][0] < sum(each[5]), "and open where skip_gate says so"


def test_with_one_region_the_gate_stays_closed(measured):
    run = runs(measured, MODEL)["together-64"]
    (test,) = run.run["tests"]
    for phase in PHASES:
        assert run.skipped(test, phase, f"kv_cache=unified {TAIL}") == 0
        assert run.skipped(test, phase, f"kv_cache=per_sequence {CLASSES}") > 0.5


def test_a_phase_is_its_own_tokens(measured):
    run = runs(measured, MODEL)["together-64"]
    (test,) = run.run["tests"]
    samples = results.load_run(measured.folder / FOLDER / MODEL / "together-64").samples
    arm = run.names[0]
    own = samples[samples["arm"] == arm]
    first, rest = own[own["token"] == 0], own[own["token"] > 0]
    for phase, rows in (("prompts", first), ("generated", rest)):
        wanted = rows["n_tokens"].sum() * 1e9 / rows["ns"].sum()
        assert run.rates(test, phase)[arm].tolist() == [pytest.approx(wanted)]
    assert run.ratio(test, arm, arm, "prompts").value == 1.0
    assert rest["n_tokens"].tolist() == [8, 8]


def test_the_page_is_what_the_runs_say(measured, tmp_path):
    text = " ".join(readme.made("skipping", measured).split())
    assert "| ubatch |" in text and "kv_cache=unified" in text and "kv_parts=stream_k" in text
    for line in skipping.by_ubatch(measured):
        assert f"| {line.values['n']} | {line.values['off']:.0f} |" in text
    nothing = readme.made("skipping", Recorded(tmp_path))
    assert nothing.count(NOT_MEASURED) == 3


def test_one_sequence_with_a_region_of_its_own_is_one_with_all_cells(tiny_model):
    """A cache per sequence of an engine with one sequence: no table of regions is asked for."""
    path = tiny_model("tiny-llama", "Q8_0")
    found = []
    for kind in ("unified", "per_sequence"):
        toggles = Toggles(graph_reuse="set_rows", kv_cache=kind)
        with wb.Engine.load(path, device="embedded", n_seqs=1, toggles=toggles) as engine:
            found.append(np.concatenate([engine.prefill([1, 2, 3]), engine.step([4])]).copy())
    assert np.array_equal(*found)


def test_of_a_model_only_named_folders_are_measured(tmp_path, tiny_models, monkeypatch):
    made = []
    monkeypatch.setattr(skipping, "measured", lambda *given: made.append(given[-1]))
    skipping.main(
        MODEL, ubatches="1,64", n_prompt=N_PROMPT, only="ub",
        options=Options("embedded", tmp_path, tiny_models),
    )  # fmt: skip
    assert made == [tmp_path / MODEL / "ub64", tmp_path / MODEL / "ub1"], "what takes long is last"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_a_recorded_run_is_complete_and_its_answers_hold(path):
    one = SkipRun(results.load_run(path.parent))
    assert one.run["status"] == "complete" and one.run["result"]["visits"]
    assert all(answer["holds"] for answer in one.run["result"]["answers"].values())
