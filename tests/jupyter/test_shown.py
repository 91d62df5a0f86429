"""What a terminal and a notebook show of an engine, its toggles, a program, a model, a profile."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import workbench as wb
from workbench.config import Toggles
from workbench.model.synth.models import TINY, tiny_name

ROOT = Path(__file__).resolve().parents[2]


def test_toggles_show_what_differs_from_the_baseline_and_its_value():
    page = Toggles(sync="packed", fuse_glu="on")._repr_html_()
    cells = re.sub(" style=[^>]*", "", page)
    rows = re.findall(r"<tr><td>(\w+)</td><td><b>(\w+)</b></td><td>(\w+)</td></tr>", cells)
    assert rows == [("sync", "packed", "per_copy"), ("fuse_glu", "on", "off")]
    assert "everything else off" in page and page.count("<tr>") == 4
    assert Toggles()._repr_html_() == "<p>everything off: the baseline</p>"


def test_an_engine_says_model_device_toggles_and_cells(engine):
    engine.prefill([1, 2, 3])
    shown = repr(engine)
    assert shown.startswith("<Engine: tiny-llama with random weights Q8_0, 2 layers, 1.5 MB of")
    assert engine.backend.description in shown and shown.count("\n") == 1
    assert shown.endswith(
        "\n as given on embedded: everything off; sync mode per_copy; 3 of 128 cells used>"
    )
    page = engine._repr_html_()
    assert "sync mode per_copy; 3 of 128 cells used" in page
    assert engine.toggles._repr_html_() in page
    with engine.variant(Toggles(sync="auto").switched("fuse", "on")) as other:
        mode = other.sync_mode
        assert f": sync=auto ({mode}), fuse=on; sync mode {mode}; 0 of" in repr(other)
    assert repr(other) == "<Engine: a closed engine>"


def test_a_program_says_its_pattern_shape_and_counts(engine):
    program = engine.program(n_tokens=4)
    shown, page = repr(program), program._repr_html_()
    assert shown.startswith(f"<Program: {program.pattern(fold=True)}\n 4 tokens, 1 outputs, n_kv ")
    for number, what in ((v, k) for k, v in program.counts().items()):
        assert f"{number} {what.replace('_', ' ')}" in shown
        assert f"{number} {what.replace('_', ' ')}" in page
    assert f"<code>{program.pattern(fold=True)}</code>" in page and program.sync in page


def test_a_model_says_architecture_type_layers_parameters_and_file(engine):
    shown = repr(engine.model)
    assert shown.startswith("<Model: tiny-llama with random weights: llama, Q8_0, 2 layers, 1.7 M ")
    assert shown.endswith(f" {engine.model.path}>") and "parameters in 1.8 MB" in shown


def test_a_profile_says_steps_spans_collector_and_slowdown(engine):
    with wb.profile(engine, window=(4, 2)) as traced:
        engine.generate(tokens=[1, 2], max_tokens=8)
    shown = repr(traced)
    assert shown.startswith(f"<Profile: 2 steps, {len(traced.timeline)} spans (traced, not for ")
    assert f"\n device spans from {traced.collector}; {traced.slowdown}>" in shown


def test_a_notebook_shows_what_a_user_can_mend_in_one_line_and_where(engine):
    shell = InteractiveShell()
    shell.user_ns["eng"] = engine
    with capture_output() as shown:
        shell.run_cell("eng.step([10**6])")
    assert (
        shown.stdout.startswith("UsageError: token id 1000000 ") and shown.stdout.count("\n") == 1
    )
    with capture_output() as shown:
        shell.run_cell("token = 10**6\neng.step([token])")
    assert shown.stdout.splitlines()[1] == "  in line 2: eng.step([token])"
    shell.user_ns["profile"] = wb.profile  # raises behind a frame of contextlib's
    with capture_output() as shown:
        shell.run_cell("with profile(eng, window=(0, 0)):\n    pass")
    assert shown.stdout.splitlines()[1] == "  in line 1: with profile(eng, window=(0, 0)):"


# make lab ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_names_a_model_that_is_made_as_seen_from_its_folder(path):
    (cell,) = (
        c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])
    )
    named = {
        statement.targets[0].id: statement.value.value for statement in ast.parse(cell.source).body
    }
    made = {ROOT / "data" / "models" / tiny_name(preset, quant) for _, preset, quant in TINY}
    assert (path.parent / named["model"]).resolve() in made
    assert (path.parent / named["runs"]).resolve() == ROOT / "data" / "runs"
