"""What a call of `data.measure` takes, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.measure import best_table, matrix, readme, targets
from data.measure.__main__ import measure
from data.measure.recorded import NOT_MEASURED, Recorded
from data.measure.session import FILES, Session, toggles_of
from tests.backend.cuda.fake_cuda import fake_backend
from workbench.benchmarks.runs.results import load_run
from workbench.common.errors import UsageError, WorkbenchError
from workbench.config import Toggles


def session(tmp_path: Path, **given) -> Session:
    return Session(tmp_path, tmp_path, "cuda", 10.0, False, **given)


def test_one_model_alone_is_taken_where_one_is_named(tmp_path: Path):
    every, one = session(tmp_path), session(tmp_path, only="llama-3-8b-q8_0")
    for quant, wanted in (("q8_0", True), ("q4_0", False)):
        assert every.takes(f"llama-3-8b-{quant}")
        assert one.takes(f"llama-3-8b-{quant}") == wanted


def test_models_above_the_limit_are_left_out_and_named(tmp_path: Path, capsys):
    assert not session(tmp_path).takes("llama-3-8b-f16")
    assert "llama-3-8b F16: left out, 16.1 GB is above the limit" in capsys.readouterr().out


def test_what_does_not_exist_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(UsageError, match="step 'decod' does not exist; choose from plans, best, "):
        measure("decod", out=tmp_path)
    with pytest.raises(UsageError, match="--only llama: no such model"):
        measure("decode", out=tmp_path, only="llama")
    with pytest.raises(UsageError, match="step cpu is of a CPU's devices; give --device embedded"):
        measure("cpu", out=tmp_path)


def test_toggles_of_a_row_are_a_background_and_changes():
    from workbench.backend.null import open_backend

    class Opened:
        backend = open_backend()

    made = toggles_of("kept sync=packed fuse=on fuse_glu=off", Opened())
    assert (made.graph_reuse, made.sync, made.fuse_glu, made.fuse_qkv) == (
        "set_rows", "packed", "off", "on",
    )  # fmt: skip
    assert toggles_of("baseline", Opened()) == Toggles()
    assert toggles_of("all", Opened()).defer_norm == "on"
    whole = toggles_of(f"all {matrix.EARLY}", Opened())
    assert (whole.plans, whole.sync, whole.launch_ahead) == ("ours", "packed_implicit", "on")


def test_best_of_a_row_is_resolved_with_its_changes(tiny_model):
    from workbench.engine.engine import Engine

    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="embedded") as engine:
        assert toggles_of("best", engine) == engine.resolve("best")
        off = toggles_of("best plans=off sync=per_copy", engine)
        assert (off.plans, off.sync, off.graph_reuse) == ("off", "per_copy", "set_rows")


def test_what_would_end_behind_the_deadline_is_left_for_the_next_call(tmp_path: Path, capsys):
    measure("plans", out=tmp_path, models=tmp_path, device="embedded", quick=True, at_most_s=1)
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().out
    assert all(
        f"quick-embedded-{row.folder}: left, {row.seconds} s are too many; call again" in said
        for row in matrix.rows("plans")
    )


def test_a_row_that_fails_costs_the_others_nothing(tmp_path, tiny_models, monkeypatch, capsys):
    def fails(engine, arms, *rounds):
        raise RuntimeError("no clock")

    monkeypatch.setattr("data.measure.planned.token_parts", fails)
    model = matrix.COMPARED[0]
    given = {"models": tiny_models, "device": "embedded", "quick": True, "only": model}
    with pytest.raises(WorkbenchError, match=f"1 failed: quick-embedded-plans-{model}$"):
        measure("plans", "reuse", out=tmp_path, **given)
    monkeypatch.undo()
    assert "no clock" in capsys.readouterr().err
    measure("plans", out=tmp_path, **given)  # it is not there, so it is made
    assert "parts" in load_run(tmp_path / f"quick-embedded-plans-{model}").run["result"]


def test_rows_of_plans_and_reuse_fit_the_time_that_there_is():
    """Of one session with a GPU, beside llama.cpp's runs, the tests and the notebooks."""
    each = {step: sum(row.seconds for row in matrix.rows(step))
            for step in ("plans", "best", "reuse", "grown")}  # fmt: skip
    assert all(row.seconds for step in each for row in matrix.rows(step))
    assert each == pytest.approx({step: matrix.STEPS[step] for step in each}, rel=0.1)
    assert sum(each.values()) < 660


@pytest.mark.slow
def test_every_step_runs_with_tiny_models(tmp_path: Path, tiny_models: Path):
    """On the embedded device; a second call finds all of them there, but what a CPU cannot do."""
    steps = (
        "kernels", "kernels-batches", "fusion", "gaps", "sync", "pipeline", "together", "cpu",
    )  # fmt: skip
    measure(*steps, out=tmp_path, models=tiny_models, device="embedded", quick=True)
    made = {path.name.removeprefix("quick-embedded-") for path in tmp_path.iterdir()}
    wanted = {
        f"{row.folder}.json" if row.kind in FILES else row.folder
        for step in steps
        for row in matrix.rows(step)
        if "pdl" not in row.compared and row.device != "host"
    }
    assert made == wanted
    first = matrix.SYNCED[0]
    assert (tmp_path / f"quick-embedded-sync-own-off-{first}" / "timeline.pftrace.gz").is_file()


@pytest.mark.slow
def test_plans_and_reuse_of_a_model_run_with_a_tiny_one(tmp_path: Path, tiny_models: Path, capsys):
    """Then every table has rows of it, and preset `best` would have a set, or none."""
    model, steps = matrix.PLANNED[0], ("plans", "best", "reuse", "grown")
    measure(*steps, out=tmp_path, models=tiny_models, device="embedded", quick=True, only=model)
    made = {path.name.removeprefix("quick-embedded-") for path in tmp_path.iterdir()}
    wanted = {row.folder: row for step in steps for row in matrix.rows(step) if row.model == model}
    assert made == wanted.keys()
    said = capsys.readouterr().out
    assert all(f"== quick-embedded-{folder}: " in said for folder in made)
    parts = load_run(tmp_path / f"quick-embedded-plans-{model}").run["result"]["parts"]
    assert list(parts) == [*map(str.strip, wanted[f"plans-{model}"].compared.split("|"))]
    step = parts[matrix.STEP]
    assert step["calls"] == 1 < step["nodes"] == parts[matrix.OFF]["calls"]
    assert all(
        of["counters"]["plans_replayed"] > 0 for arm, of in parts.items() if arm != matrix.OFF
    )
    assert parts[matrix.WHOLE]["counters"]["plans_ahead"] > 0
    recorded = Recorded(tmp_path, "quick-embedded")
    for block in ("plans-cuda", "plans-costs", "plans-fresh", "sets-cuda", "sweep-cuda",
                  "reuse-cuda", "reuse-verdict", "growth-cuda"):  # fmt: skip
        assert "tiny-llama" in readme.made(block, recorded)
    found = {one.what: one.measured for one in targets.targets(recorded)}
    told = [measured for what, measured in found.items() if what.startswith("plans")]
    assert len(told) == 5 and told.count(NOT_MEASURED) == 1, "of pdl, which no CPU has"
    best_table.made(best_table.folders_in(tmp_path))


@pytest.mark.slow
def test_plans_and_reuse_of_a_model_run_on_a_faked_gpu(tmp_path, tiny_models, monkeypatch):
    """What the host does there, with dependent launches; its clock is not faked."""

    def stamped(engine, tokens):
        ends = [engine.step([token]) is None or 1000 * i for i, token in enumerate(tokens)]
        return ends, [(end + 100, end + 900) for end in ends]

    fake_backend(monkeypatch)
    monkeypatch.setattr("workbench.benchmarks.times.token_parts.stamped_steps", stamped)
    model, steps = matrix.PLANNED[0], ("plans", "best", "reuse", "grown")
    measure(*steps, out=tmp_path, models=tiny_models, device="cuda", quick=True, only=model)
    parts = load_run(tmp_path / f"quick-cuda-plans-{model}").run["result"]["parts"]
    assert parts[matrix.STEP]["calls"] == 1 and parts[matrix.WHOLE]["device"] == [0.8, 0.8]
    arms = load_run(tmp_path / f"quick-cuda-plans-{model}").run["arms"]
    assert {arm["toggles"]["pdl"] for arm in arms} == {"on"}


def test_rows_can_be_chosen_by_their_folders(tmp_path: Path, capsys):
    measure("plans", out=tmp_path, device="embedded", quick=True, like="nothing,none-*")
    assert not list(tmp_path.iterdir())
