"""Rings of staging memory and several buffers for a device's inputs: each step of a train takes the
next, and a step after a wait of the host the first."""

from __future__ import annotations

import pytest

import workbench as wb
from workbench.config import Toggles
from workbench.program import commands as cmd

PROMPT = [5, 900, 17, 403, 77, 12, 99, 3] * 12  # twelve ubatches
RINGS = {"pinned": 1, "pinned_ring_2": 2, "pinned_ring_4": 4}


@pytest.fixture(scope="module")
def engine(tiny_model):
    path = tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(
        path, device="embedded", n_ctx=256, n_ubatch=8, threads=2, toggles=wb.Toggles()
    ) as made:
        yield made


def buffers(program: cmd.Program) -> tuple[set[str], set[str]]:
    """The buffers that values are written to, and those that copies bring inputs to."""
    written = {c.staging.buffer.name for c in program.commands if isinstance(c, cmd.Write)}
    brought = {c.dst.buffer.name for c in program.commands
               if isinstance(c, cmd.Copy) and c.split != cmd.RESULT}  # fmt: skip
    return written, brought


@pytest.mark.parametrize("n_copies", ["1", "4"])
@pytest.mark.parametrize("source", RINGS)
def test_rings_come_round_in_a_train(engine, source, n_copies):
    """A train of nine ubatches; tokens after it, and the next train, begin anew."""
    toggles = Toggles(
        sync="copy_boundary", host_source=source, n_copies=n_copies, step_wait="outputs"
    )
    with engine.variant(toggles) as variant:
        found = [buffers(program) for program in variant.programs(9 * 8, 2, laps=2)]
    host, device = RINGS[source], int(n_copies)
    wanted = [
        ({"staging"} if host == 1 else {f"staging.{turn % host}"},
         {"arena.1"} if device == 1 else {f"inputs.1.{turn % device}"})
        for turn in (*range(9), 0, 0)
    ]  # fmt: skip
    assert found == wanted * 2


def test_a_ring_is_written_after_the_copies_from_it(engine):
    """The host waits for the event that was recorded after the copies of the turn's last step."""
    with engine.variant(Toggles(sync="implicit", copy_stream="compute", step_wait="outputs",
                                host_source="pinned_ring_2")) as variant:  # fmt: skip
        first, second, third, _ = variant.programs(4 * 8)
    for program in (first, second, third):
        wait, write = program.commands[:2]
        assert isinstance(wait, cmd.Sync) and isinstance(write, cmd.Write)
        copies = [i for i, c in enumerate(program.commands) if isinstance(c, cmd.Copy)]
        record = program.commands[copies[-1] + 1]
        assert isinstance(record, cmd.Record) and record.event == wait.event
    events = [program.commands[0].event for program in (first, second, third)]
    assert events[0] == events[2] != events[1]


def test_with_several_copies_the_host_waits_for_an_event(engine):
    """As llama.cpp does where it has events: for the graph that read the buffer, four steps ago."""
    for sync, waits in (("per_copy", 5), ("copy_boundary", 1)):
        with engine.variant(Toggles(sync=sync, n_copies="4", step_wait="outputs")) as variant:
            *programs, _ = variant.programs(6 * 8)
        assert programs[0].pattern().endswith("gr")
        before = [[c for c in p.commands if isinstance(c, cmd.Sync) and c.split != cmd.RESULT
                   and c.event is not None] for p in programs]  # fmt: skip
        assert all(len(found) == waits for found in before)
        events = [found[0].event for found in before]
        assert len(set(events[:4])) == 4 and events[4] == events[0]
