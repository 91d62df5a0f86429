"""Programs on addresses: every command is issued once, in its order, whoever looks on. And the null
device, which logs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.backend.base import Issue
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.prepared import Prepared
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError
from workbench.config import SyncMode, Toggles
from workbench.engine.batch import make_batch
from workbench.engine.engine import Engine
from workbench.graph.ir import F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import HOST, Copy, Launch, Program, Record, Replay, Space, Wait
from workbench.program.plans import with_plans

MODES = [mode for mode in SyncMode if mode != SyncMode.AUTO]
WITHOUT_WAITS = SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT


@pytest.fixture(scope="module")
def loaded(tiny_model):
    with Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null", toggles=Toggles()) as engine:
        yield engine


@pytest.fixture(params=MODES)
def engine(request, loaded) -> Iterator[wb.Engine]:
    stream = "compute" if request.param in WITHOUT_WAITS else "own"
    with loaded.variant(Toggles(sync=request.param, copy_stream=stream)) as made:
        yield made


def prepared(engine: wb.Engine, program: Program | None = None) -> Prepared:
    program = program or engine.program(1)
    buffers = {r.buffer for layout in program.layout for r in layout.values()}
    backends = engine._open.backends
    memory = {b: backends[b.backend].allocate(b.nbytes, b.space)
              for b in {*buffers, *program.buffers}}  # fmt: skip
    return Prepared(program, backends, memory)


def test_every_command_has_a_call_in_its_order(engine):
    """Devices are asked for their work, and the host does the rest. A run issues what it is handed
    and nothing else."""
    made, seen = prepared(engine), list[Issue]()
    commands = made.program.commands
    assert len(made.calls) == len(commands) and made.head + made.tail == made.calls
    assert len(made.head) == made.program.first_of_tail
    for number, command in enumerate(commands):
        asked = isinstance(command, Copy | Record | Wait) or (
            isinstance(command, Launch) and command.stream.backend != HOST
        )
        assert (number in made.issued) == asked, command
    assert all(made.calls[n] == issued.call for n, issued in made.issued.items())
    work: Any = [(0, [3], "last")]
    model, config = engine.model, engine.config
    inputs = make_batch(work, engine.cache, model.n_vocab, config.n_ubatch).values
    log: Any = engine.backend.log

    def looked_at(calls: Sequence[Issue]) -> Iterator[Issue]:
        for call in calls:
            seen.append(call)
            yield call

    logs = []
    for look in (list, looked_at):
        log.clear()
        made.run(inputs, look(made.head))
        made.finish(look(made.tail))
        logs.append(list(log))
    assert logs[0] == logs[1] != [] and tuple(seen) == made.calls


def test_a_plan_issued_by_parts_begins_and_ends_as_a_whole(loaded):
    """Its parts on the copy stream come behind what the plan's stream has in front. What is behind
    the plan there comes behind them."""
    toggles = Toggles(sync="event_guarded", copy_stream="own")
    with loaded.variant(toggles) as engine:
        made = prepared(engine, with_plans(engine.program(1), "step"))
        plans = [(n, c) for n, c in enumerate(made.program.commands) if isinstance(c, Replay)]
        ((number, plan),) = plans
        work, log = made.issued[number], engine.backend.log
        log.clear()
        work()
        did = [(kind, *rest) for _, kind, *rest in log]
    (_, begin, on), (_, waited, by), *parts, (_, end, copies), (_, joined, last) = did
    assert [did[i][0] for i in (0, 1, -2, -1)] == ["record", "wait", "record", "wait"]
    assert (begin, on, by) == (waited, 0, 1) and (end, copies, last) == (joined, 1, 0)
    assert [kind for kind, *_ in parts] == [c.kind for c in plan.parts]


def test_the_null_device_logs_what_is_prepared_and_issued():
    null: Any = open_backend()
    node = make("add", "sum", *(Tensor(n, F32, (2, 4)) for n in "ab"))
    event = null.event()
    commands = [
        null.launch(node, lambda t: 0, 0, 1), null.copy(1, 2, 3, 0, True), null.record(event, 0),
        null.wait(event, 1), null.sync_event(event), null.sync_stream(1),
    ]  # fmt: skip
    details = [
        ("launch", "add", "sum", 1), ("copy", 1, 2, 3, 0, True), ("record", 0, 0), ("wait", 0, 1),
        ("sync_event", 0), ("sync_stream", 1),
    ]  # fmt: skip
    assert null.log == [("prepare", *d) for d in details]
    null.log.clear()
    for command in commands:
        command()
    assert null.log == [("issue", *d) for d in details] and null.event() == event + 1
    with pytest.raises(KeyError):  # a tensor that lies nowhere
        null.launch(node, {}.__getitem__, 0, 0)
    host, device = null.allocate(100, Space.PINNED), null.allocate(1 << 30, Space.DEVICE)
    assert host.array.nbytes == 100 and host.address % 256 == 0 and not host.array.any()
    assert device.array is None and device.nbytes == 1 << 30
    weight = null.load_weight(Tensor("w", F32, (8,), Kind.WEIGHT), np.zeros(32, np.uint8))
    assert weight.nbytes == 32 and null.log[-1] == ("load_weight", "w")
    with pytest.raises(DeviceError, match="address space"):
        null.allocate(1 << 62, Space.HOST)
    for refused in (
        lambda: null.capture(plannable(null, commands[:2], 0, (0, 0))),
        lambda: null.launch_noted(node, lambda t: 0, 0, 0),
        lambda: null.stamp(0, 0, 8, False, 0),
    ):
        with pytest.raises(DeviceError, match="null device"):
            refused()
    assert null.clock() is None and null.resolve(null.mark(0), null.mark(0)) == (0, 0)


def test_capabilities_of_the_null_device_are_as_asked():
    assert not open_backend().capabilities.synchronous
    null = open_backend(asynchronous_copies=False, events=False, one_order=False, n_streams=0)
    assert null.capabilities.synchronous
    assert not (null.capabilities.events or null.capabilities.one_order)
