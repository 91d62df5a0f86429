"""Programs on addresses: every command is issued once, in its order, whoever looks on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import workbench as wb
from workbench.backend.base import Issue
from workbench.backend.issue.prepared import Prepared
from workbench.config import SyncMode, Toggles
from workbench.engine.engine import Engine
from workbench.program.commands import (
    HOST,
    Copy,
    Launch,
    Program,
    Record,
    Replay,
    Wait,
)
from workbench.program.plans import with_plans

ON_DEVICE = (Copy, Record, Wait)
MODES = [mode for mode in SyncMode if mode != SyncMode.AUTO]
WITHOUT_WAITS = SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null", toggles=Toggles()) as engine:
        yield engine


def prepared(engine: wb.Engine, n_tokens: int = 1, program: Program | None = None) -> Prepared:
    program = program or engine.program(n_tokens)
    backends = engine._open.backends
    memory = {
        buffer: backends[buffer.backend].allocate(buffer.nbytes, buffer.space)
        for buffer in buffers_of(program)
    }
    return Prepared(program, backends, memory)


def buffers_of(program: Program) -> set:
    return {r.buffer for layout in program.layout for r in layout.values()} | set(program.buffers)


def values(engine: wb.Engine) -> dict[str, np.ndarray]:
    from workbench.engine.batch import make_batch

    model, config = engine.model, engine.config
    return make_batch([(0, [3], "last")], engine.cache, model.n_vocab, config.n_ubatch).values


@pytest.fixture(params=MODES)
def engine(request, loaded) -> Iterator[wb.Engine]:
    stream = "compute" if request.param in WITHOUT_WAITS else "own"
    with loaded.variant(Toggles(sync=request.param, copy_stream=stream)) as made:
        yield made


def test_every_command_has_a_call_in_its_order(engine):
    made = prepared(engine)
    commands = made.program.commands
    assert len(made.calls) == len(commands) and made.head + made.tail == made.calls
    assert len(made.head) == made.program.first_of_tail
    assert all(made.calls[n] == issued.call for n, issued in made.issued.items())


def test_devices_are_asked_for_their_work_and_the_host_does_the_rest(engine):
    made = prepared(engine)
    for number, command in enumerate(made.program.commands):
        asked = isinstance(command, ON_DEVICE) or (
            isinstance(command, Launch) and command.stream.backend != HOST
        )
        assert (number in made.issued) == asked, command


def log_of(engine: wb.Engine, run) -> list[tuple]:
    """What the backends were asked while `run` ran."""
    logs = [backend.log for backend in engine._open.backends if backend.name == "null"]
    (log,) = logs
    before = len(log)
    run()
    return [entry for entry in log[before:] if entry[0] == "issue"]


def test_a_run_issues_what_it_is_handed_and_nothing_else(engine):
    """Whoever looks on hands out the calls."""
    seen: list[Issue] = []

    def looked_at(calls: Sequence[Issue]) -> Iterator[Issue]:
        for call in calls:
            seen.append(call)
            yield call

    def plainly() -> None:
        made.run(inputs, made.head)
        made.finish(made.tail)

    def watched() -> None:
        made.run(inputs, looked_at(made.head))
        made.finish(looked_at(made.tail))

    made, inputs = prepared(engine), values(engine)
    assert log_of(engine, plainly) == log_of(engine, watched) != []
    assert tuple(seen) == made.calls


def test_what_devices_are_asked_is_found_by_number(engine):
    made = prepared(engine)
    launches = {
        n for n, c in enumerate(made.program.commands)
        if isinstance(c, Launch) and c.stream.backend > 0
    }  # fmt: skip
    assert launches <= set(made.issued)
    first = made.issued[min(launches)]
    assert first.key == prepared(engine).issued[min(launches)].key  # at other addresses
    other = prepared(engine, n_tokens=2)
    assert first.key != next(i.key for n, i in other.issued.items() if n in launches)


def test_a_plan_that_is_issued_part_by_part_begins_and_ends_as_a_whole(loaded):
    """Its parts on the copy stream come behind what the plan's stream has in front. What is behind
    the plan there comes behind them."""
    toggles = Toggles(sync="event_guarded", copy_stream="own")
    with loaded.variant(toggles) as engine:
        made = prepared(engine, program=with_plans(engine.program(1), "step"))
        (number,) = [n for n, c in enumerate(made.program.commands) if isinstance(c, Replay)]
        work = made.issued[number]
        log = engine.backend.log
        log.clear()
        work()
        did = [(kind, *rest) for _, kind, *rest in log]
    (_, begin, on), (_, waited, by), *parts, (_, end, copies), (_, joined, last) = did
    assert [did[i][0] for i in (0, 1, -2, -1)] == ["record", "wait", "record", "wait"]
    assert (begin, on, by) == (waited, 0, 1) and (end, copies, last) == (joined, 1, 0)
    assert [kind for kind, *_ in parts] == [c.kind for c in made.program.commands[number].parts]
