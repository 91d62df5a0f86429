"""Measuring from the call to the page, with tiny models and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import workbench as wb
from data.measure import (
    attention,
    batched,
    best_table,
    first_requests,
    matrix,
    mechanisms,
    over_http,
    plan_costs,
    random_lengths,
    readme,
    skipping,
    steps,
)
from data.measure.__main__ import measure
from data.measure.batched import BatchedRun
from data.measure.command import Options
from data.measure.recorded import PHASES, Recorded
from data.measure.session import BACKGROUNDS, RESOLVED, Session, parsed, toggles_of
from data.measure.steps import KINDS
from tests.backend.cuda.fake_cuda import fake_backend
from tests.peer import fake_llama_bench
from workbench.benchmarks.compare.arms import arms_of
from workbench.benchmarks.compare.until import Until
from workbench.benchmarks.runs.results import load_run
from workbench.benchmarks.workload import parse_tests
from workbench.common.errors import UsageError
from workbench.config import Toggles

MODEL = "tiny-llama-q8_0"


@pytest.mark.long
def test_sequences_are_measured_beside_llama_cpp(tmp_path, tiny_models):
    """Both sides take every width in turn; rates of all sequences, and the bounds of a step."""
    peer = fake_llama_bench.install(tmp_path / "built").parent
    given = Options("embedded", tmp_path / batched.RUNS.name, tiny_models)
    how = {"peer": peer, "widths": "1,3", "rounds": 2, "n_prompt": 6, "n_gen": 4, "quick": True}
    batched.main(MODEL, ours="serving,best", options=given, **how)
    found = BatchedRun(load_run(tmp_path / batched.RUNS.name / MODEL))
    run, result = found.run, found.run["result"]
    names = ["llama.cpp", "workbench serving", "workbench best", "workbench serving (A/A)"]
    assert [arm["name"] for arm in run["arms"]] == names and run["status"] == "complete"
    assert all(answer["holds"] for answer in result["answers"].values())
    order = found.samples.groupby(["repetition", "arm"], sort=False)["order"].min().unstack()
    assert order.loc[0, names].is_monotonic_increasing
    assert order.loc[1, names].is_monotonic_decreasing
    for n in (1, 3):
        prompts, made = (found.rates(f"pp6+tg4@b{n}", phase)["llama.cpp"] for phase in PHASES)
        assert made.tolist() == [pytest.approx(n / (1e-3 + 1e-4 * n), rel=1e-3)] * 2
        assert prompts.tolist() == [pytest.approx(5e5, rel=1e-3)] * 2
    result["rates"] = {"read_gbps": 2.0, "to_host_gbps": 4.0, "launch_us": 0.5}
    (_, test), arm = found.tests, "workbench serving"
    own, cells = found.bounds(test, arm), 3 * (6 + (1 + 2 + 3 + 4) / 4)  # in use in the mean step
    assert own.weights == pytest.approx(run["model"]["weight_bytes_per_token"] / 2e3)
    assert own.cache == pytest.approx(cells * result["cell_bytes"] / 2e3)
    assert own.logits == pytest.approx(4 * result["n_vocab"] * 3 / 4e3)
    assert own.launches == result["launches"][arm][test.name] / 2 > 5
    assert "2 rounds" in readme.made("batched", Recorded(tmp_path))
    (peer / "fails").write_text("a test is missing")
    with pytest.raises(RuntimeError, match="1 of 2 widths"):
        batched.main(MODEL, options=Options("embedded", tmp_path / "x", tiny_models), **how)


def test_what_cannot_be_measured_is_refused(tmp_path):
    given = Options("embedded", tmp_path / "x")
    for call, says in (
        (lambda: random_lengths.main(MODEL, prompts=0, options=given), "--prompts"),
        (lambda: over_http.main(MODEL, in_flight="0,1", options=given), "--in-flight"),
        (lambda: first_requests.main(MODEL, starts=0, options=given), "--starts"),
        (lambda: attention.main("no-such-model", options=given), "models are"),
        (lambda: plan_costs.measure(out=tmp_path / "x", rounds=0), "--rounds 0 measures nothing"),
        (lambda: measure("decod", out=tmp_path), "step 'decod' does not exist; choose from plans"),
        (lambda: measure("decode", out=tmp_path, only="llama"), "llama: no such model"),
        (lambda: measure("cpu", out=tmp_path), "give --device embedded"),
    ):
        with pytest.raises(UsageError, match=says):
            call()
    assert over_http.front_time(2**22 + 1) is None, "no such process"


def test_each_cost_of_a_plan_is_measured(monkeypatch, tmp_path, tiny_models):
    """On a driver that only notes what it is asked."""
    fake_backend(monkeypatch)
    out = tmp_path / "made" / "costs.json"
    plan_costs.measure(models=tiny_models, out=out, only="llama-3.2-1b-bf16", quick=True)
    step, split = json.loads(out.read_text())["rows"]
    assert (step["scope"], split["scope"]) == ("step", "split")
    assert set(step["costs"]) > set(split["costs"]), "a step copies inputs, too"
    for row in (step, split):
        assert row["nodes"] > 10 and row["edges"] == row["nodes"] - 1
        assert all(row[name]["median"] > 0 for name in row["costs"])
        assert row["programmatic_edges"] > 0 and row["device_us"]["median"] == 250


def test_every_row_of_the_matrix_can_be_measured(tiny_model):
    """Its kind, step, model, toggles, values compared and tests are known; a folder has one."""
    named = [(row.device, row.folder, row.kind) for row in matrix.MATRIX]
    assert len(set(named)) == len(named)
    for row in matrix.MATRIX:
        assert row.kind in KINDS and row.step in (*matrix.STEPS, matrix.CPU_STEP)
        background, *changes = row.toggles.split()
        assert background in (*BACKGROUNDS, *RESOLVED)
        for name, _, value in (change.partition("=") for change in changes):
            Toggles().switched(name, value)
        assert not row.model or parsed(row.model)
        if row.kind in ("ab", "plans", "fresh", "sweep", "energy"):
            toggle, arms = arms_of(row.compared, Toggles(graph_reuse="set_rows"))
            assert not toggle or arms[0].name == Toggles().value_of(toggle)
        assert row.kind not in ("ab", "bench", "plans", "fresh", "energy") or parse_tests(row.test)
    with wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded") as engine:
        made = toggles_of("best plans=off sync=packed fuse=on fuse_glu=off", engine)
    assert (made.plans, made.sync, made.graph_reuse) == ("off", "packed", "set_rows")
    assert (made.fuse_glu, made.fuse_qkv) == ("off", "on")


def test_what_the_first_table_shows_is_repeated_until_its_interval_is_narrow(tmp_path, tiny_models):
    """One slow round of five on a busy host, and an interval holds every answer. The rows of the
    table that are comparisons have a width, and the run says how far it came."""
    rows = [matrix.the(one.folder, one.kind) for one in mechanisms.MECHANISMS if one.kind != "gaps"]
    assert len(rows) > 5 and all(row.until and row.until.half_width == 0.01 for row in rows)
    assert all(row.most_s >= row.until.at_most_s for row in rows), "no call begins it too late"
    compared = skipping.comparisons(8192, [32, 512, 8192], 32, 5)
    assert {one.folder for one in compared if not one.until} == {"ub32"}
    until = Until(0.9, at_most_s=60.0)
    row = matrix.Row("sync", "wide", "ab", MODEL, "tg2", "kept", "sync=per_copy,packed",
                     until=until)  # fmt: skip
    session = Session(tmp_path, tiny_models, "embedded", most_gb=1.0, quick=False)
    assert not steps.run(session, [row])
    ended = load_run(session.at(row)).run["result"]["until"]["tests"]["tg2"]
    assert ended["rounds"] >= 10 and ended["stopped"] == "width" and ended["wanted"] == 0.9


@pytest.mark.slow
def test_every_step_runs_with_tiny_models(tmp_path: Path, tiny_models: Path, capsys):
    """On the embedded device; then tables have rows of it. A second call finds all of them there.
    What a CPU cannot do is left out."""
    model, planned = matrix.PLANNED[0], ("plans", "best", "reuse", "grown")
    given = {"out": tmp_path, "models": tiny_models, "device": "embedded", "quick": True}
    measure(*planned, **given, only=model)
    others = ("kernels", "fusion", "gaps", "sync", "together", "decode", "depth", "load")
    measure(*others, **given)
    assert not list(tmp_path.glob("embedded-*")), "a quick run must not be taken for a real one"
    parts = load_run(tmp_path / f"quick-embedded-plans-{model}").run["result"]["parts"]
    assert parts[matrix.STEP]["calls"] == 1 < parts[matrix.STEP]["nodes"]
    assert parts[matrix.WHOLE]["counters"]["plans_ahead"] > 0
    found = Recorded(tmp_path, "quick-embedded")
    for block in ("plans-cuda", "plans-costs", "plans-fresh", "sets-cuda", "sweep-cuda",
                  "reuse-cuda", "reuse-verdict", "growth-cuda"):  # fmt: skip
        assert "tiny-llama" in readme.made(block, found)
    best_table.made(best_table.folders_in(tmp_path))
    run = found.run("decode-llama-3-8b-q4_0")
    # the last layer goes on with the last token alone once attention is done
    attends, ffn, head = 256 * (256 + 2 * 128) + 256 * 256, 3 * 256 * 512, 256 * 1024
    flops = run.run["result"]["product_flops"]["pp128"]
    assert flops == 2 * (128 * (2 * attends + ffn) + ffn + head)
    capsys.readouterr()
    measure("decode", **given)
    assert "there already" in capsys.readouterr().out
