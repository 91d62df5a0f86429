"""Captured programs on every placement of layers: as safe, and as right, as programs without plans.
And a bug that is planted in one: the checker names it, and the device computes something else."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from workbench.program import commands as cmd
from workbench.program.check.hazards import check_cycle

PROMPT = list(range(1, 25))


@pytest.mark.parametrize(
    ("plans", "n_copies", "back"),
    [("split", "1", None), ("step", "1", 1), ("step", "4", 4)],
)
def test_what_plans_of_several_devices_wait_for(tiny_model, plans, n_copies, back):
    """back: how many steps back the last device's plan is that the first device's waits for. A plan
    of launches waits for none; a copy after it does."""
    toggles = wb.Toggles(
        sync="implicit", step_wait="outputs", host_source="pinned_ring_4", graph_reuse="set_rows",
        plans="ours", plan_scope=plans, n_copies=n_copies,
    )  # fmt: skip
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, n_ubatch=8, threads=1,
        n_devices=2, toggles=toggles,
    ) as engine:  # fmt: skip
        steps = engine.programs(6 * 8)
    recorded = [{c.event for c in step.commands if isinstance(c, cmd.Record)} for step in steps]
    first = next(n for n, c in enumerate(steps[-1].commands) if isinstance(c, cmd.Replay))
    waits = [c.event for c in steps[-1].commands[:first] if isinstance(c, cmd.Wait)]
    found = [next(n for n in range(1, 6) if event in recorded[5 - n]) for event in waits]
    assert found == ([] if back is None else [back])


def first_copy_elsewhere(program: cmd.Program) -> cmd.Program:
    """The first copy in a plan is recorded on the copy stream. No launch waits for it there."""
    (number,) = [n for n, c in enumerate(program.commands) if isinstance(c, cmd.Replay)]
    whole: Any = program.commands[number]
    parts = list(whole.parts)
    first = next(n for n, part in enumerate(parts) if isinstance(part, cmd.Copy))
    parts[first] = replace(parts[first], stream=cmd.Stream(whole.stream.backend, cmd.COPY_STREAM))
    program.commands[number] = replace(whole, parts=tuple(parts))
    return program


@pytest.mark.parametrize("planted", [False, True], ids=["sound", "planted"])
def test_a_copy_recorded_on_the_wrong_stream_is_found(tiny_model, monkeypatch, planted):
    """A gate holds the copy stream, as work in flight would."""
    toggles = wb.Toggles(plans="ours", plan_scope="step", sync="implicit", copy_stream="compute")
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=64, threads=2, toggles=toggles
    ) as engine:
        engine.prefill(PROMPT)
        with engine.variant(wb.Toggles()) as other:
            other.prefill(PROMPT)
            wanted = other.step([5])
        made = engine._step_programs
        whole = made.of
        if planted:
            monkeypatch.setattr(made, "of", lambda *a, **k: first_copy_elsewhere(whole(*a, **k)))
        found = check_cycle(engine.programs(1))
        gate = hold(engine.backend, cmd.COPY_STREAM)
        timer = threading.Timer(0.05, gate.open)
        timer.start()
        got = engine.step([5])
        timer.join()
    assert found.safe == (not planted)
    assert np.allclose(got, wanted, rtol=0, atol=1e-3) == (not planted)
    for race in found.races[:1]:
        assert race.missing.startswith("nothing orders copy inp_embd on embedded:1 before")
        assert "in a plan: record an event after the copy" in race.missing
