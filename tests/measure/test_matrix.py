"""The matrix: every recorded run has its row, and a row says all that its run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.measure import matrix
from data.measure.mechanisms import MECHANISMS
from data.measure.session import BACKGROUNDS, FILES, RESOLVED, parsed, toggles_of
from data.measure.steps import KINDS
from workbench.backend.null import open_backend
from workbench.benchmarks.compare.arms import arms_of
from workbench.benchmarks.workload import parse_tests
from workbench.config import Toggles
from workbench.engine.choose import settle
from workbench.program.capabilities import Capabilities

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
    assert background in (*BACKGROUNDS, *RESOLVED)
    for name, _, value in (change.partition("=") for change in changes):
        Toggles().switched(name, value)
    if row.model:
        parsed(row.model)
    if row.kind in ("ab", "plans", "fresh", "sweep"):
        toggle, arms = arms_of(row.compared, Toggles(graph_reuse="set_rows"))
        assert not toggle or arms[0].name == Toggles().value_of(toggle)
    if row.kind in ("ab", "bench", "together", "plans", "fresh"):
        assert parse_tests(row.test)


GPU = Capabilities(
    asynchronous_copies=True, events=True, one_order=True, capture=True, n_streams=8,
    programmatic=True,
)  # fmt: skip
OF_PLANS = [row for step in ("plans", "best", "reuse", "grown") for row in matrix.rows(step)]


@pytest.mark.parametrize("row", OF_PLANS, ids=lambda row: row.folder)
def test_a_gpu_can_have_every_arm_of_plans_and_reuse(row):
    """What else is found out there costs the others their time."""

    class Opened:
        backend = open_backend()

    Opened.backend.capabilities = GPU
    background = toggles_of(row.toggles, Opened())
    assert background.pdl == ("off" if "plain" in row.folder else "on")
    _, arms = arms_of(row.compared, background)
    for arm in arms:
        settle(arm.toggles, GPU, "cuda")
    steps = [a for a in arms if a.toggles.plan_scope == "step" and a.toggles.plans != "off"]
    alike = {(a.toggles.sync, a.toggles.copy_stream) for a in (*steps, arms[0])}
    assert row.step == "best" or len(alike) == 1, "one ordering for all that is compared"


def test_mechanisms_stand_in_the_matrix():
    for one in MECHANISMS:
        row = matrix.the(one.folder, one.kind)
        assert row.kind == "gaps" or one.on in row.compared
