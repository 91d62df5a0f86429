"""Programs as segments: what goes to an executor together, and that every command is issued once,
in its order, whoever executes and whoever looks on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import workbench as wb
from workbench.backend.base import Issue
from workbench.backend.issue import Executed, HostCalls, Prepared, SplitWork, Unwatched, eager
from workbench.config import SyncMode, Toggles
from workbench.engine.engine import Engine
from workbench.program.commands import (
    RESULT,
    Copy,
    Launch,
    Program,
    Read,
    Record,
    Replay,
    Sync,
    Wait,
    Write,
)
from workbench.program.plans import with_plans

ON_DEVICE = (Copy, Record, Wait)
MODES = [mode for mode in SyncMode if mode != SyncMode.AUTO]
WITHOUT_WAITS = SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null", toggles=Toggles()) as engine:
        yield engine


def prepared(
    engine: wb.Engine, execute=eager, n_tokens: int = 1, program: Program | None = None
) -> Prepared:
    program = program or engine.program(n_tokens)
    backends = engine._open.backends
    memory = {
        buffer: backends[buffer.backend].allocate(buffer.nbytes, buffer.space)
        for buffer in buffers_of(program)
    }
    return Prepared(program, backends, memory, execute=execute)


def buffers_of(program: Program) -> set:
    return {r.buffer for layout in program.layout for r in layout.values()} | set(program.buffers)


def values(engine: wb.Engine) -> dict[str, np.ndarray]:
    from workbench.engine.batch import make_batch

    model, config = engine.model, engine.config
    return make_batch([(0, [3], "last")], engine.cache, model.n_vocab, config.n_ubatch).values


def commands_of(made: Prepared) -> list[int]:
    found = []
    for segment in made.segments:
        made = segment.issued if isinstance(segment, SplitWork) else segment.calls
        assert len(segment.commands) == len(made)
        found += segment.commands
    return found


@pytest.fixture(params=MODES)
def engine(request, loaded) -> Iterator[wb.Engine]:
    stream = "compute" if request.param in WITHOUT_WAITS else "own"
    with loaded.variant(Toggles(sync=request.param, copy_stream=stream)) as made:
        yield made


def test_segments_hold_every_command_once_in_its_order(engine):
    made = prepared(engine)
    assert commands_of(made) == list(range(len(made.program.commands)))
    kinds = [type(segment) for segment in made.segments]
    assert all(a is not b for a, b in pairwise(kinds))  # one device: no two


def test_work_is_what_a_device_is_asked_and_calls_are_the_host_s(engine):
    made = prepared(engine)
    for segment in made.segments:
        if isinstance(segment, SplitWork):
            found = [made.program.commands[n] for n in segment.commands]
            assert all(isinstance(c, (*ON_DEVICE, Launch)) for c in found)
            assert {c.split for c in found} <= {segment.split, RESULT}
        else:
            found = [made.program.commands[n] for n in segment.commands]
            hosts = (Write, Read, Sync)
            assert all(isinstance(c, hosts) or c.stream.backend == 0 for c in found)


def test_a_split_s_launches_and_the_result_s_copy_are_one_work(engine):
    works = [s for s in prepared(engine).segments if isinstance(s, SplitWork)]
    program = engine.program()
    launches = [n for n, c in enumerate(program.commands) if isinstance(c, Launch) and c.split == 1]
    (work,) = [w for w in works if launches[0] in w.commands]
    assert set(launches) <= set(work.commands) and work is works[-1]
    assert isinstance(program.commands[work.commands[-1]], Record)  # behind the result's copy


def test_without_waits_of_the_host_a_split_is_one_work_with_its_copies(loaded):
    with loaded.variant(Toggles(sync="implicit", copy_stream="compute")) as engine:
        made = prepared(engine)
        (work,) = [s for s in made.segments if isinstance(s, SplitWork)]
        assert isinstance(made.program.commands[work.commands[0]], Copy)
        assert [type(s) for s in made.segments] == [HostCalls, SplitWork, HostCalls]


def log_of(engine: wb.Engine, run) -> list[tuple]:
    """What the backends were asked while `run` ran."""
    logs = [backend.log for backend in engine._open.backends if backend.name == "null"]
    (log,) = logs
    before = len(log)
    run()
    return [entry for entry in log[before:] if entry[0] == "issue"]


def step(made: Prepared, inputs: dict[str, np.ndarray], watch: Unwatched | None = None) -> None:
    made.run(inputs, watch or Unwatched())
    made.finish(watch or Unwatched())


def test_another_executor_does_the_same_work(engine):
    """It is given whole works, makes one call of them, and nobody else has to know."""
    given: list[list[SplitWork]] = []

    def whole(works: Sequence[SplitWork]) -> Executed:
        given.append(list(works))
        issued = [i for work in works for i in work.issued]

        def replay() -> None:
            for command in issued:
                command()

        return [replay], [len(issued)]

    one_by_one, at_once, inputs = prepared(engine), prepared(engine, whole), values(engine)
    logs = []
    for made in (one_by_one, at_once):
        logs.append(
            log_of(
                engine, lambda made=made: (made.run(inputs, Unwatched()), made.finish(Unwatched()))
            )
        )
    assert [entry[1] for entry in logs[0]] == [entry[1] for entry in logs[1]] != []
    assert [work for works in given for work in works] == [
        s for s in at_once.segments if isinstance(s, SplitWork)
    ]
    assert len(at_once.head) < len(one_by_one.head)


def test_whoever_looks_on_is_given_every_call(engine):
    seen: list[Issue] = []

    class Counting(Unwatched):
        def head(self, prepared: Prepared) -> Iterator[Issue]:
            for call in prepared.head:
                seen.append(call)
                yield call

    made, inputs = prepared(engine), values(engine)
    plain = log_of(engine, partial(step, made, inputs))
    watched = log_of(engine, partial(step, made, inputs, Counting()))
    assert watched == plain
    assert tuple(seen) == made.head


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


def test_neighbours_of_several_devices_go_to_one_executor_together(tiny_model):
    given: list[int] = []

    def counting(works: Sequence[SplitWork]) -> Executed:
        given.append(len(works))
        return eager(works)

    toggles = Toggles(sync="implicit", copy_stream="compute")
    path = tiny_model("tiny-llama", "Q8_0")
    with Engine.load(path, device="null", n_devices=2, toggles=toggles) as engine:
        made = prepared(engine, counting)
    works = [s for s in made.segments if isinstance(s, SplitWork)]
    assert [w.split for w in works] == [1, 2] and given == [2]


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
