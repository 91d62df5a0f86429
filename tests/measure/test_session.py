"""What a call of `data.measure` takes, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.measure import matrix
from data.measure.__main__ import measure
from data.measure.session import Session, toggles_of
from workbench.bench.results import load_run
from workbench.config import Toggles
from workbench.errors import UsageError


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
    with pytest.raises(UsageError, match="step 'decod' does not exist; choose from plans, reuse, "):
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
    whole = toggles_of("planned", Opened())
    assert whole == toggles_of(f"all plans=ours {matrix.ONE_PLAN}", Opened())


@pytest.mark.slow
def test_every_step_runs_with_tiny_models(tmp_path: Path, tiny_models: Path):
    """On the embedded device; a second call finds all of them there, but what a CPU cannot do."""
    steps = (
        "kernels", "kernels-batches", "fusion", "gaps", "sync", "pipeline", "together", "cpu",
    )  # fmt: skip
    measure(*steps, out=tmp_path, models=tiny_models, device="embedded", quick=True)
    made = {path.name.removeprefix("quick-embedded-") for path in tmp_path.iterdir()}
    wanted = {
        row.folder
        for step in steps
        for row in matrix.rows(step)
        if "pdl" not in row.compared and row.device != "host"
    }
    assert made == wanted
    first = matrix.SYNCED[0]
    assert (tmp_path / f"quick-embedded-sync-own-off-{first}" / "timeline.pftrace.gz").is_file()


@pytest.mark.slow
def test_plans_and_reuse_of_a_model_run_with_a_tiny_one(tmp_path: Path, tiny_models: Path):
    model = matrix.PLANNED[0]
    measure("plans", "reuse", out=tmp_path, models=tiny_models, device="embedded", quick=True,
            only=model)  # fmt: skip
    made = {path.name.removeprefix("quick-embedded-") for path in tmp_path.iterdir()}
    wanted = {r.folder for r in matrix.MATRIX if r.step in ("plans", "reuse") and r.model == model}
    assert made == wanted
    parts = load_run(tmp_path / f"quick-embedded-plans-step-{model}").run["result"]["parts"]
    assert list(parts) == [*Toggles.values("plans"), matrix.OF_KERNELS]
    assert parts["ours"]["calls"] == 1 < parts["ours"]["nodes"] == parts["off"]["calls"]
    assert parts["ours"]["counters"]["plans_replayed"] > 0


def test_rows_can_be_chosen_by_their_folders(tmp_path: Path, capsys):
    measure("plans", out=tmp_path, device="embedded", quick=True, like="nothing,none-*")
    assert not list(tmp_path.iterdir())
