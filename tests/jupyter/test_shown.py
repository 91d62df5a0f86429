"""What a terminal and a notebook show of an engine, its toggles, a program, a model, a profile."""

from __future__ import annotations

import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import workbench as wb
from workbench.config import Toggles


def test_toggles_show_what_differs_from_the_baseline():
    page = Toggles(sync="packed", fuse_glu="on")._repr_html_()
    cells = re.sub(" style=[^>]*", "", page)
    rows = re.findall(r"<tr><td>(\w+)</td><td><b>(\w+)</b></td><td>(\w+)</td></tr>", cells)
    assert rows == [("sync", "packed", "per_copy"), ("fuse_glu", "on", "off")]


def test_engines_programs_and_profiles_say_what_they_are(engine):
    engine.prefill([1, 2, 3])
    page, program = engine._repr_html_(), engine.program(n_tokens=4)
    assert engine.toggles._repr_html_() in page
    for shown in (repr(engine), page):
        assert "sync mode per_copy; 3 of 128 cells used" in shown
    for shown in (repr(program), program._repr_html_()):
        assert program.pattern(fold=True) in shown
        for what, number in program.counts().items():
            assert f"{number} {what.replace('_', ' ')}" in shown
    assert "llama, Q8_0, 2 layers, 1.7 M " in repr(engine.model)
    with wb.profile(engine, window=(4, 2)) as traced:
        engine.generate(tokens=[1, 2], max_tokens=8)
    assert f"2 steps, {len(traced.timeline)} spans (traced, not for " in repr(traced)


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
