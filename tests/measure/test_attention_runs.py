"""Attention alone: from the call to the page, without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.measure import attention, readme
from data.measure.attention import RUNS, Shape, arms_of, step
from data.measure.command import Options
from data.measure.recorded import NOT_MEASURED, Recorded
from workbench.benchmarks.runs import results
from workbench.common.errors import UsageError

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    attention.main(
        "tiny-llama", widths="2", depth=128, rounds=3, quick=True,
        options=Options("embedded", out / RUNS.name / "made"),
    )  # fmt: skip
    return Recorded(out)


def test_a_step_finds_masked_cells_once_and_attends_in_every_layer():
    shape = Shape.of("llama-3.2-1b", 32, 8192)
    nodes = step(shape, "stream_k", "tail")
    assert [n.op for n in nodes] == ["kv_extents"] + ["attention"] * attention.LAYERS
    assert {n.params["kv_parts"] for n in nodes[1:]} == {"stream_k"}
    assert len(step(shape, "off", "off")) == attention.LAYERS
    assert shape.cell_bytes * 8192 * 32 == 2 * nodes[1].inputs[1].nbytes
    whole, half = shape.lengths("full", 0), shape.lengths("half", 0)
    assert (whole == 8192).all() and half.min() >= 1 and 0.3 < half.mean() / 8192 < 0.7


def test_each_way_is_held_against_reading_all():
    arms = arms_of(["parallel_blocks", "off"], ["off", "tail"])
    assert list(arms) == ["parallel_blocks off", "parallel_blocks tail", "off off"]


def test_the_run_says_how_long_and_how_much(measured):
    (found,) = RUNS.runs(measured)
    lines = [line.values for line in found.lines()]
    assert len(lines) == 2 * len(found.arms) and found.arms[-1] == "parallel_blocks off (A/A)"
    run = found.run
    for values in lines:
        nbytes = run["result"]["bytes"][f"{values['shape']} {values['mask']}"]
        assert values["gbps"] == pytest.approx(nbytes / values["us"] / 1e3)
        assert np.isfinite(values["share"]) and values["us"] > 0
    shape = Shape.of("tiny-llama", 2, 128)
    assert run["result"]["bytes"]["tiny-llama b2@d128 full"] == 2 * 128 * shape.cell_bytes
    assert lines[0]["times"] == 1


def test_the_page_has_it(measured):
    assert "| us a layer |" in readme.made("attention", measured)
    assert NOT_MEASURED in readme.made("attention", Recorded(measured.folder / "none"))


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="models are"):
        attention.main("no-such-model", options=Options("embedded", tmp_path / "x"))


@pytest.mark.parametrize("path", sorted((RESULTS / RUNS.name).glob("*/run.json")), ids=str)
def test_a_recorded_run_is_complete(path):
    run = results.load_run(path.parent)
    assert run.run["status"] == results.COMPLETE and not run.run["result"]["void"]
    assert not run.run["commit"]["dirty"]
    assert set(run.samples["test"]) == set(run.run["tests"])
