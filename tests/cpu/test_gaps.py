"""The gap between tokens by the device's clock, and what a wait adds to it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pandas as pd
import pytest

import workbench as wb
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.times.gaps import Gaps, fit_line, host_gaps, load
from workbench.common.errors import DeviceError, UsageError
from workbench.config import Toggles
from workbench.engine.programs import Key

KEPT = {"graph_reuse": "set_rows", "copy_stream": "compute"}
ARMS = {sync: Toggles(sync=sync, **KEPT) for sync in ("per_copy", "copy_boundary", "packed")}


@pytest.fixture(scope="module")
def engine(tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"),
        device="embedded",
        n_ctx=64,
        threads=2,
        toggles=wb.Toggles(),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def found(engine, tmp_path_factory) -> Gaps:
    out = tmp_path_factory.mktemp("gaps") / "run"
    made = host_gaps(engine, ARMS, n_tokens=10, rounds=3, out=out, name="run")
    assert load(out).table().equals(made.table())
    return made


def test_stamps_lie_inside_their_step_and_in_order(engine):
    engine.reset()
    engine.step([1])
    with engine.stamped() as stamps:
        for token in (5, 7, 9):
            engine.step([token])
    flat = np.array(stamps).ravel()
    assert len(stamps) == 3 and (np.diff(flat) > 0).all()


def test_stamped_steps_compute_what_others_do(engine):
    engine.reset()
    plain = np.concatenate([engine.step([t]) for t in (3, 5, 7)])
    engine.reset()
    with engine.stamped():
        stamped = np.concatenate([engine.step([t]) for t in (3, 5, 7)])
    assert np.array_equal(plain, stamped)


def test_a_row_for_each_arm_and_a_control(found):
    table = found.table().set_index("arm")
    assert table.index.tolist() == ["per_copy", "copy_boundary", "packed", "per_copy (A/A)"]
    assert table["waits"].tolist() == [13, 3, 3, 13]
    assert table["copies"].tolist() == [7, 7, 2, 7]
    assert (table["gap_us"] > 0).all() and (table["low_us"] <= table["high_us"]).all()
    assert len(found.samples) == 4 * 3 * 9
    orders = found.samples.drop_duplicates("order")["arm"].tolist()
    assert orders[:4] == orders[7:3:-1], "there and back"


def test_a_run_says_in_which_steps_its_clock_goes_on(found, engine, monkeypatch):
    timer = found.run["engine"]["timer"]
    assert timer["error_ns"] == 0 < timer["tick_ns"]

    def silent() -> None:
        raise DeviceError("the GPU's clock does not answer")

    monkeypatch.setattr(engine.backend, "clock", silent)
    assert provenance.engine(engine)["timer"] is None


def test_the_lines_are_through_arms_that_copy_alike(found):
    arms, waits = ["per_copy", "copy_boundary", "per_copy (A/A)"], np.array([13.0, 3.0, 13.0])
    gaps = [
        [of_round.loc[of_round["arm"] == arm, "ns"].median() / 1e3 for arm in arms]
        for _, of_round in found.samples.groupby("repetition")
    ]
    assert found.fits == {"compute": fit_line(waits, np.array(gaps))} and len(gaps) == 3
    assert found.verdict in repr(found) and "one wait adds" in found._repr_html_()


def test_a_step_is_the_difference_within_a_round(found):
    rounds = found.samples.pivot_table(
        index="repetition", columns="arm", values="ns", aggfunc="median"
    )
    (step,) = found.differences  # of the pairs that are known, this run has one
    assert (step.copy_stream, step.before, step.after) == ("compute", "copy_boundary", "packed")
    assert step.n_waits == 0 and step.what == "copies but one"
    wanted = ((rounds["copy_boundary"] - rounds["packed"]) / 1e3).median()
    assert step.us == pytest.approx(wanted) and step.low_us <= step.us <= step.high_us


def test_stamps_stand_at_the_same_launches_every_time(engine):
    """A program with stamps is prepared once: to prepare it in a step would be in the gap."""
    engine.reset()
    with engine.variant(ARMS["per_copy"]) as variant, variant.stamped():
        found = []
        for token in (1, 2):
            variant.step([token])
            prepared = variant.steps.programs.get(Key(variant.program(1).shape, variant.turn))
            found.append(variant.bound.stamped(prepared))
        first, again = found
        assert first is again and len(first.head) == len(prepared.head)
        parted = [n for n, issued in first.issued.items()
                  if len(issued.parts) != len(prepared.issued[n].parts)]  # fmt: skip
        assert len(parted) == 2, "the first launch and the last"


def test_stamps_are_let_go_without_the_collector(engine):
    """The collector destroys the events of the marks that it finds in a cycle."""
    engine.reset()
    gc.disable()
    try:
        with engine.stamped():
            engine.step([1])
            stamps = weakref.ref(engine.untraced)
        assert stamps() is None
    finally:
        gc.enable()


def test_a_line_is_found_again():
    assert fit_line(np.array([1.0, 3.0]), np.array([[12.0, 16.0]] * 3)).base_us == pytest.approx(10)
    waits, true = np.array([1.0, 3.0, 13.0]), np.array([12.0, 16.0, 36.0])
    assert fit_line(waits, np.stack([true] * 3)) == pytest.approx((2.0, 2.0, 2.0, 10.0))
    slow = true * [1.0, 2.0, 1.0]  # the host slowed down for one turn
    assert fit_line(waits, np.stack([true, slow, true, true])).wait_us == pytest.approx(2.0)
    with pytest.raises(UsageError, match="every arm waits as often"):
        fit_line(np.ones(3), np.arange(3.0)[None])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"arms": {}}, "there are no arms"),
        ({"n_tokens": 1}, "leave no gap"),
        ({"n_tokens": 66}, "68 tokens do not fit the context of 64"),
    ],
)
def test_what_leaves_no_gap_is_refused(engine, asked, says):
    with pytest.raises(UsageError, match=says):
        host_gaps(engine, **({"arms": ARMS, "rounds": 1} | asked))


def test_the_host_has_none(tiny_model):
    with (
        wb.Engine.load(
            tiny_model("tiny-llama", "Q8_0"), device="host", n_ctx=64, toggles=wb.Toggles()
        ) as engine,
        pytest.raises(UsageError, match="computes when it is called"),
    ):
        host_gaps(engine, {"baseline": Toggles()})


def synthetic(found: Gaps, control_us: float, packed_us: float) -> Gaps:
    """The same run with gaps that are known: 100 us, with 0.5 us of noise; others by so much."""
    rng = np.random.default_rng(1)
    more = {"per_copy (A/A)": control_us, "packed": packed_us, "copy_boundary": -30.0}
    rounds = [found.samples.assign(repetition=r) for r in range(20)]
    samples = pd.concat(rounds, ignore_index=True).drop_duplicates(["repetition", "arm"])
    us = 100 + samples["arm"].map(more).fillna(0) + 0.5 * rng.standard_normal(len(samples))
    return Gaps(found.run, samples.assign(ns=(1e3 * us).astype(int)))


def test_what_the_machine_cannot_resolve_is_said(found):
    assert synthetic(found, 0.0, -60.0).unresolved == ""
    off = synthetic(found, 5.0, -60.0)
    assert (
        off.unresolved.startswith("the A/A control's gap is ") and "What helps: 80 " in off.verdict
    )
    assert "differs from itself. This machine cannot resolve less than 5." in off.unresolved
    assert off.unresolved in off._repr_html_().replace("&#x27;", "'")
    small = synthetic(found, 0.0, -30.1)
    assert "and less is copy_boundary -> packed (0." in small.unresolved
    assert "differs from itself" not in small.unresolved
