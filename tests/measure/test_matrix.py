"""The matrix: every recorded run has its row, and a row says all that its run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.measure import matrix
from data.measure.blocks import MECHANISMS
from data.measure.session import BACKGROUNDS, FILES, parsed
from data.measure.steps import KINDS
from workbench.bench.arms import arms_of
from workbench.bench.workload import parse_tests
from workbench.config import Toggles

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"


def test_every_recorded_run_is_a_row_of_the_matrix():
    """Those of notebooks apart: `tests.notebooks.record` makes them."""
    recorded = {path.parent.name for path in RESULTS.glob("*/run.json")}
    named = {f"{row.device}-{row.folder}" for row in matrix.MATRIX if row.kind not in FILES}
    assert {name for name in recorded - named if not name.startswith("notebook-")} == set()


def test_a_folder_is_named_once():
    named = [(row.device, row.folder, row.kind) for row in matrix.MATRIX]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("row", matrix.MATRIX, ids=lambda row: f"{row.kind}-{row.folder}")
def test_a_row_can_be_measured(row):
    """Its kind, step, model, toggles, values compared and tests are known."""
    assert row.kind in KINDS and row.step in (*matrix.STEPS, matrix.CPU_STEP)
    background, *changes = row.toggles.split()
    assert background in BACKGROUNDS
    for name, _, value in (change.partition("=") for change in changes):
        Toggles().switched(name, value)
    if row.model:
        parsed(row.model)
    if row.kind in ("ab", "plans", "fresh", "sweep"):
        toggle, arms = arms_of(row.compared, Toggles(graph_reuse="set_rows"))
        assert not toggle or arms[0].name == Toggles().value_of(toggle)
    if row.kind in ("ab", "bench", "together", "plans", "fresh"):
        assert parse_tests(row.test)


def test_mechanisms_stand_in_the_matrix():
    for one in MECHANISMS:
        row = matrix.the(one.folder, one.kind)
        assert row.kind == "gaps" or one.on in row.compared
