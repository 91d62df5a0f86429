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


def test_toggles_show_what_differs_from_the_baseline():
    page = Toggles(sync="packed", fuse_glu="on")._repr_html_()
    cells = re.sub(" style=[^>]*", "", page)
    rows = re.findall(r"<tr><td>(\w+)</td><td><b>(\w+)</b></td><td>(\w+)</td></tr>", cells)
    assert rows == [("sync", "packed", "per_copy"), ("fuse_glu", "on", "off")]
    assert "everything else off" in page and page.count("<tr>") == 4
    assert Toggles()._repr_html_() == "<p>everything off: the baseline</p>"


def test_engines_programs_and_profiles_say_what_they_are(engine):
    engine.prefill([1, 2, 3])
    shown, page = repr(engine), engine._repr_html_()
    for said in ("tiny-llama with random weights Q8_0, 2 layers", engine.backend.description,
                 "as given on embedded: everything off"):  # fmt: skip
        assert said in shown
    for said in (shown, page):
        assert "sync mode per_copy; 3 of 128 cells used" in said
    assert engine.toggles._repr_html_() in page
    with engine.variant(Toggles(sync="auto").switched("fuse", "on")) as other:
        mode = other.sync_mode
        assert f": sync=auto ({mode}), fuse=on; sync mode {mode}; 0 of" in repr(other)
    assert repr(other) == "<Engine: a closed engine>"
    program = engine.program(n_tokens=4)
    shown, page = repr(program), program._repr_html_()
    assert shown.startswith(f"<Program: {program.pattern(fold=True)}\n 4 tokens, 1 outputs, n_kv ")
    assert f"<code>{program.pattern(fold=True)}</code>" in page and program.sync in page
    for what, number in program.counts().items():
        assert all(f"{number} {what.replace('_', ' ')}" in said for said in (shown, page))
    shown = repr(engine.model)
    for said in ("llama, Q8_0, 2 layers, 1.7 M ", "parameters in 1.8 MB", str(engine.model.path)):
        assert said in shown
    with wb.profile(engine, window=(4, 2)) as traced:
        engine.generate(tokens=[1, 2], max_tokens=8)
    shown = repr(traced)
    assert f"2 steps, {len(traced.timeline)} spans (traced, not for " in shown
    assert f"\n device spans from {traced.collector}; {traced.slowdown}>" in shown


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("eng.step([10**6])", ["UsageError: token id 1000000 "]),
        ("token = 10**6\neng.step([token])", ["UsageError: ", "  in line 2: eng.step([token])"]),
        # raises below a frame of contextlib's
        ("with profile(eng, window=(0, 0)):\n    pass",
         ["UsageError: ", "  in line 1: with profile(eng, window=(0, 0)):"]),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_shown_in_one_line(engine, cell, lines):
    shell = InteractiveShell()
    shell.user_ns |= {"eng": engine, "profile": wb.profile}
    with capture_output() as shown:
        shell.run_cell(cell)
    said = shown.stdout.splitlines()
    assert len(said) == len(lines)
    assert all(line.startswith(wanted) for line, wanted in zip(said, lines, strict=True))


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_names_a_model_that_is_made(path):
    """As seen from its folder, where `make lab` opens it."""
    cells = nbformat.read(path, 4).cells
    (cell,) = (c for c in cells if "parameters" in c.metadata.get("tags", []))
    named = {line.targets[0].id: line.value.value for line in ast.parse(cell.source).body}
    made = {ROOT / "data" / "models" / tiny_name(preset, quant) for _, preset, quant in TINY}
    assert (path.parent / named["model"]).resolve() in made
    assert (path.parent / named["runs"]).resolve() == ROOT / "data" / "runs"
