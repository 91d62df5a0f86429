"""Sequences side by side beside llama.cpp: from the call to the page, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.measure import batched, readme
from data.measure.batched import RUNS, BatchedRun, Bounds, bounds
from data.measure.command import Options
from data.measure.recorded import NOT_MEASURED, PHASES, Recorded
from tests.peer import fake_llama_bench
from workbench.benchmarks.compare.stats import MIN_REPETITIONS
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
RECORDED = sorted((RESULTS / RUNS.name).glob("*/run.json"))
MODEL = "tiny-llama-q8_0"


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_models):
    """A run of two widths beside a program that only says times, and its folder of results."""
    out = tmp_path_factory.mktemp("results")
    program = fake_llama_bench.install(tmp_path_factory.mktemp("built"))
    batched.main(
        MODEL, peer=program.parent, widths="1,3", rounds=2, ours="serving,best", n_prompt=6,
        n_gen=4, quick=True, options=Options("embedded", out / RUNS.name, tiny_models),
    )  # fmt: skip
    return out, program


@pytest.fixture
def found(measured) -> BatchedRun:
    return BatchedRun(results.load_run(measured[0] / RUNS.name / MODEL))


def test_both_sides_take_every_width_in_turn(found, measured):
    run = found.run
    names = ["llama.cpp", "workbench serving", "workbench best", "workbench serving (A/A)"]
    assert [arm["name"] for arm in run["arms"]] == names and run["status"] == "complete"
    assert run["tests"] == ["pp6+tg4@b1", "pp6+tg4@b3"] and run["repetitions"] == 2
    assert run["arms"][1]["toggles"]["kv_cache"] == "per_sequence"
    assert all(answer["holds"] for answer in run["result"]["answers"].values())
    (_, samples) = found.run, results.load_run(measured[0] / "batched" / MODEL).samples
    order = samples.groupby(["repetition", "arm"], sort=False)["order"].min().unstack()
    assert order.loc[0, names].is_monotonic_increasing
    assert order.loc[1, names].is_monotonic_decreasing
    calls = (measured[1].parent / "calls.jsonl").read_text().splitlines()
    given = json.loads(calls[-1])["given"]
    assert len(calls) == 2 and given["-npl"] == "1,3" and given["-ub"] == "512"
    assert int(given["-c"]) == 3 * 256 == run["engine"]["config"]["n_ctx"]


def test_rates_are_of_all_sequences_and_apart_for_prompts(found):
    for n in (1, 3):
        test = f"pp6+tg4@b{n}"
        prompts, made = (found.rates(test, phase) for phase in PHASES)
        assert made["llama.cpp"].tolist() == [pytest.approx(n / (1e-3 + 1e-4 * n), rel=1e-3)] * 2
        assert prompts["llama.cpp"].tolist() == [pytest.approx(5e5, rel=1e-3)] * 2
    arm = found.best("pp6+tg4@b3")
    ratio = found.ratio("pp6+tg4@b3", "llama.cpp", arm, PHASES[1])
    rates = found.rates("pp6+tg4@b3", PHASES[1])
    pairs = rates[arm] / rates["llama.cpp"]
    assert pairs.min() <= ratio.value <= pairs.max()


def test_the_bounds_of_a_step_are_its_bytes_and_launches(found):
    result = found.run["result"]
    result["rates"] = {"read_gbps": 2.0, "to_host_gbps": 4.0, "launch_us": 0.5}
    (_, test), arm = found.tests, "workbench serving"
    weights = found.run["model"]["weight_bytes_per_token"]
    n_launches = result["launches"][arm][test.name]
    own = found.bounds(test, arm)
    cells = 3 * (6 + (1 + 2 + 3 + 4) / 4)  # in use in the mean step, its own among them
    assert own.weights == pytest.approx(weights / 2e3)
    assert own.cache == pytest.approx(cells * result["cell_bytes"] / 2e3)
    assert own.logits == pytest.approx(4 * result["n_vocab"] * 3 / 4e3)
    assert own.launches == n_launches / 2 and n_launches > 10
    assert own.total == sum(own) and isinstance(own, Bounds)
    assert bounds(result["rates"], 0, 0, 0, 0).total == 0


def test_the_page_is_what_the_run_says(measured, found):
    text = readme.made("batched", Recorded(measured[0]))
    for line in found.lines():
        v = line.values
        cells = f"| {v['pp_theirs']:.0f} | {v['pp']:.0f} | {v['pp_ratio']:.2f} |"
        assert cells in " ".join(text.split())
        assert f"{v['tg']:.0f} | {v['ratio']}" in " ".join(text.split())
    assert "llama.cpp 0.5.0-fake (build 7, commit fade)" in text and "2 rounds" in text
    short = " ".join(readme.made("batched-short", Recorded(measured[0])).split())
    widths = [line.values for line in found.lines()]
    assert f"{found.model}, sequences | " + " | ".join(str(v["n"]) for v in widths) in short
    for name, cell in (("workbench, t/s", "{tg:.0f}"), ("ratio", "{ratio}")):
        cells = " | ".join(cell.format_map(v) for v in widths)
        assert f"| {name} | {cells} |" in short
    nothing = readme.made("batched", Recorded(measured[0] / "nowhere"))
    assert nothing == f"Sequences side by side on a GPU: {NOT_MEASURED}."


def test_ours_alone_have_no_ratio(tmp_path, tiny_models, capsys):
    batched.main(
        MODEL, widths="2", rounds=1, n_prompt=4, n_gen=2, quick=True,
        options=Options("embedded", tmp_path, tiny_models),
    )  # fmt: skip
    alone = BatchedRun(results.load_run(tmp_path / MODEL))
    (line,) = alone.lines()
    assert line.values["ratio"] is None and line.values["tg_theirs"] is None
    assert "| tiny-llama Q8_0 |" in " ".join(capsys.readouterr().out.split())


def test_a_bench_that_says_too_little_is_refused(tmp_path, tiny_models):
    program = fake_llama_bench.install(tmp_path / "built")
    (program.parent / "fails").write_text("a test is missing")
    with pytest.raises(RuntimeError, match="1 of 2 widths"):
        batched.main(
            MODEL, peer=program.parent, widths="1,2", rounds=1, n_prompt=4, n_gen=2,
            quick=True, options=Options("embedded", tmp_path, tiny_models),
        )  # fmt: skip
    program.with_name("llama-batched-bench").unlink()
    with pytest.raises(UsageError, match="no llama-batched-bench beside llama-bench"):
        batched.main(MODEL, peer=program.parent, options=Options("embedded", tmp_path))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_recorded_run_is_complete_and_its_answers_hold(path):
    one = BatchedRun(results.load_run(path.parent))
    assert one.run["status"] == "complete" and path.parent.name in batched.MODELS
    assert all(answer["holds"] for answer in one.run["result"]["answers"].values())
    assert one.run["repetitions"] >= MIN_REPETITIONS - 2 and one.side("llama.cpp")
