"""Rings of staging memory and several buffers for a device's inputs: each step of a train takes the
next, and a step after a wait of the host the first."""

from __future__ import annotations

import pytest

import workbench as wb
from workbench.program import commands as cmd

RINGS = {"pinned": 1, "pinned_ring_2": 2, "pinned_ring_4": 4}


@pytest.fixture(scope="module")
def engine(tiny_model):
    path, off = tiny_model("tiny-llama", "Q8_0"), wb.Toggles()
    with wb.Engine.load(path, device="null", n_ctx=256, n_ubatch=8, toggles=off) as made:
        yield made


def programs(engine, *of: int, **toggles: str) -> list[cmd.Program]:
    with engine.variant(wb.Toggles(step_wait="outputs", **toggles)) as variant:
        return variant.programs(*of)


@pytest.mark.parametrize("n_copies", ["1", "4"])
@pytest.mark.parametrize("source", RINGS)
def test_rings_come_round_in_a_train(engine, source, n_copies):
    """A train of nine ubatches; tokens after it, and the next train, begin anew."""
    host, device = RINGS[source], int(n_copies)
    toggles = {"sync": "copy_boundary", "host_source": source, "n_copies": n_copies}
    steps = programs(engine, 9 * 8, 2, 2, **toggles)
    for program, turn in zip(steps, [*range(9), 0, 0] * 2, strict=True):
        written = {c.staging.buffer.name for c in program.commands if isinstance(c, cmd.Write)}
        brought = {c.dst.buffer.name for c in program.commands
                   if isinstance(c, cmd.Copy) and c.split != cmd.RESULT}  # fmt: skip
        assert written == {"staging" if host == 1 else f"staging.{turn % host}"}
        assert brought == {"arena.1" if device == 1 else f"inputs.1.{turn % device}"}


def test_a_ring_is_written_after_the_copies_from_it(engine):
    """The host waits for the event that was recorded after the copies of the turn's last step."""
    of = {"sync": "implicit", "copy_stream": "compute", "host_source": "pinned_ring_2"}
    steps = programs(engine, 4 * 8, **of)[:3]
    for program in steps:
        wait, write = program.commands[:2]
        assert isinstance(wait, cmd.Sync) and isinstance(write, cmd.Write)
        copies = [i for i, c in enumerate(program.commands) if isinstance(c, cmd.Copy)]
        record = program.commands[copies[-1] + 1]
        assert isinstance(record, cmd.Record) and record.event == wait.event
    events = [program.commands[0].event for program in steps]
    assert events[0] == events[2] != events[1]


def test_with_several_copies_the_host_waits_for_an_event(engine):
    """As llama.cpp does where it has events: for the graph that read the buffer, four steps ago."""
    for sync, waits in (("per_copy", 5), ("copy_boundary", 1)):
        *steps, _ = programs(engine, 6 * 8, sync=sync, n_copies="4")
        assert steps[0].pattern().endswith("gr")
        before = [[c for c in p.commands if isinstance(c, cmd.Sync) and c.split != cmd.RESULT
                   and c.event is not None] for p in steps]  # fmt: skip
        assert all(len(found) == waits for found in before)
        events = [found[0].event for found in before]
        assert len(set(events[:4])) == 4 and events[4] == events[0]
