"""The gap between tokens by the device's clock, and what a wait adds to it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from workbench.benchmarks.times.gaps import Gaps, fit_line, host_gaps, load
from workbench.common.errors import UsageError
from workbench.config import Toggles

KEPT = {"graph_reuse": "set_rows", "copy_stream": "compute"}
ARMS = {sync: Toggles(sync=sync, **KEPT) for sync in ("per_copy", "copy_boundary", "packed")}


@pytest.fixture(scope="module")
def found(loaded, tmp_path_factory) -> Gaps:
    out = tmp_path_factory.mktemp("gaps") / "run"
    made = host_gaps(loaded, ARMS, n_tokens=10, rounds=3, out=out, name="run")
    assert load(out).table().equals(made.table())
    return made


def test_stamps_lie_in_their_step_in_order_and_are_let_go(engine):
    """The collector would destroy the events of the marks that it finds in a cycle."""
    engine.step([1])
    gc.disable()
    try:
        with engine.stamped() as stamps:
            kept = weakref.ref(engine.untraced)
            for token in (5, 7, 9):
                engine.step([token])
        assert kept() is None
    finally:
        gc.enable()
    assert len(stamps) == 3 and (np.diff(np.array(stamps).ravel()) > 0).all()


def test_a_row_for_each_arm_and_a_control(found):
    table = found.table().set_index("arm")
    assert table.index.tolist() == ["per_copy", "copy_boundary", "packed", "per_copy (A/A)"]
    assert table["waits"].tolist() == [13, 3, 3, 13]
    assert table["copies"].tolist() == [7, 7, 2, 7]
    assert (table["gap_us"] > 0).all() and (table["low_us"] <= table["high_us"]).all()
    assert len(found.samples) == 4 * 3 * 9
    orders = found.samples.drop_duplicates("order")["arm"].tolist()
    assert orders[:4] == orders[7:3:-1], "there and back"
    timer = found.run["engine"]["timer"]
    assert timer["error_ns"] == 0 < timer["tick_ns"]


def test_lines_and_steps_are_of_arms_that_copy_alike(found):
    arms, waits = ["per_copy", "copy_boundary", "per_copy (A/A)"], np.array([13.0, 3.0, 13.0])
    rounds = found.samples.pivot_table(
        index="repetition", columns="arm", values="ns", aggfunc="median"
    ) / 1e3  # fmt: skip
    assert found.fits == {"compute": fit_line(waits, rounds[arms].to_numpy())} and len(rounds) == 3
    assert found.verdict in repr(found) and "one wait adds" in found._repr_html_()
    (step,) = found.differences  # of the pairs that are known, this run has one
    assert (step.copy_stream, step.before, step.after) == ("compute", "copy_boundary", "packed")
    assert step.n_waits == 0 and step.what == "copies but one"
    wanted = (rounds["copy_boundary"] - rounds["packed"]).median()
    assert step.us == pytest.approx(wanted) and step.low_us <= step.us <= step.high_us


def test_a_line_is_found_again():
    assert fit_line(np.array([1.0, 3.0]), np.array([[12.0, 16.0]] * 3)).base_us == pytest.approx(10)
    waits, true = np.array([1.0, 3.0, 13.0]), np.array([12.0, 16.0, 36.0])
    assert fit_line(waits, np.stack([true] * 3)) == pytest.approx((2.0, 2.0, 2.0, 10.0))
    slow = true * [1.0, 2.0, 1.0]  # the host slowed down for one turn
    assert fit_line(waits, np.stack([true, slow, true, true])).wait_us == pytest.approx(2.0)


def test_what_leaves_no_gap_is_refused(loaded, tiny_model):
    for asked, says in (
        ({"arms": {}}, "there are no arms"), ({"n_tokens": 1}, "leave no gap"),
        ({"n_tokens": 130}, "132 tokens do not fit the context of 128"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            host_gaps(loaded, **({"arms": ARMS, "rounds": 1} | asked))
    with pytest.raises(UsageError, match="every arm waits as often"):
        fit_line(np.ones(3), np.arange(3.0)[None])
    path, off = tiny_model("tiny-llama", "Q8_0"), Toggles()
    with (
        wb.Engine.load(path, device="host", n_ctx=64, toggles=off) as engine,
        pytest.raises(UsageError, match="computes when it is called"),
    ):
        host_gaps(engine, {"baseline": off})


def test_what_the_machine_cannot_resolve_is_said(found):
    """The same run with gaps that are known: 100 us, with 0.5 us of noise; others by so much."""

    def synthetic(control_us: float, packed_us: float) -> Gaps:
        more = {"per_copy (A/A)": control_us, "packed": packed_us, "copy_boundary": -30.0}
        rounds = [found.samples.assign(repetition=r) for r in range(20)]
        samples = pd.concat(rounds, ignore_index=True).drop_duplicates(["repetition", "arm"])
        noise = 0.5 * np.random.default_rng(1).standard_normal(len(samples))
        us = 100 + samples["arm"].map(more).fillna(0) + noise
        return Gaps(found.run, samples.assign(ns=(1e3 * us).astype(int)))

    assert synthetic(0.0, -60.0).unresolved == ""
    off = synthetic(5.0, -60.0)
    assert off.unresolved.startswith("the A/A control's gap is ")
    assert "What helps: 80 " in off.verdict
    assert "differs from itself. This machine cannot resolve less than 5." in off.unresolved
    small = synthetic(0.0, -30.1)
    assert "and less is copy_boundary -> packed (0." in small.unresolved
    assert "differs from itself" not in small.unresolved
