"""Programs on addresses: every command is issued once, in its order, whoever looks on. And what the
null device refuses."""

from __future__ import annotations

from typing import Any

import pytest

import workbench as wb
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.prepared import Prepared
from workbench.backend.null import open_backend
from workbench.common.errors import DeviceError
from workbench.engine.batch import make_batch
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make
from workbench.program import commands as c
from workbench.program.plans import with_plans


@pytest.fixture(scope="module", params=[m for m in wb.Toggles.values("sync") if m != "auto"])
def engine(request, tiny_model):
    stream = "compute" if request.param in ("implicit", "packed_implicit") else "own"
    toggles = wb.Toggles(sync=request.param, copy_stream=stream)
    with wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="null", toggles=toggles) as made:
        yield made


def prepared(engine: wb.Engine, program: c.Program) -> Prepared:
    buffers = {r.buffer for layout in program.layout for r in layout.values()} | {*program.buffers}
    backends = engine._open.backends
    memory = {b: backends[b.backend].allocate(b.nbytes, b.space) for b in buffers}
    return Prepared(program, backends, memory)


def test_every_command_has_a_call_in_its_order(engine):
    """Devices are asked for their work, and the host does the rest. A run issues what it is handed
    and nothing else."""
    made, seen = prepared(engine, engine.program(1)), list[Any]()
    commands = made.program.commands
    assert made.head + made.tail == made.calls and len(made.calls) == len(commands)
    assert len(made.head) == made.program.first_of_tail
    for number, x in enumerate(commands):
        launched = isinstance(x, c.Launch) and x.stream.backend != c.HOST
        assert (number in made.issued) == (launched or isinstance(x, c.Copy | c.Record | c.Wait))
    assert all(made.calls[n] == issued.call for n, issued in made.issued.items())
    work: Any = [(0, [3], "last")]
    inputs = make_batch(work, engine.cache, engine.model.n_vocab, engine.config.n_ubatch).values
    log, logs = engine.backend.log, []
    for look in (list, lambda calls: (seen.append(call) or call for call in calls)):
        log.clear()
        made.run(inputs, look(made.head))
        made.finish(look(made.tail))
        logs.append(list(log))
    assert logs[0] == logs[1] != [] and tuple(seen) == made.calls


@pytest.mark.parametrize("engine", ["event_guarded"], indirect=True)
def test_a_plan_issued_by_parts_begins_and_ends_as_a_whole(engine):
    """Its parts on the copy stream come after what the plan's stream has before. What comes after
    the plan there comes after them."""
    made = prepared(engine, with_plans(engine.program(1), "step"))
    ((number, plan),) = [(n, x) for n, x in enumerate(made.program.commands)
                         if isinstance(x, c.Replay)]  # fmt: skip
    engine.backend.log.clear()
    made.issued[number]()
    did = [(kind, *rest) for _, kind, *rest in engine.backend.log]
    (_, begin, on), (_, waited, by), *parts, (_, end, copies), (_, joined, last) = did
    assert [did[i][0] for i in (0, 1, -2, -1)] == ["record", "wait", "record", "wait"]
    assert (begin, on, by) == (waited, 0, 1) and (end, copies, last) == (joined, 1, 0)
    assert [kind for kind, *_ in parts] == [x.kind for x in plan.parts]


def test_what_the_null_device_cannot_is_refused():
    null: Any = open_backend()
    node = make("add", "sum", *(Tensor(n, F32, (2, 4)) for n in "ab"))
    with pytest.raises(KeyError):  # a tensor that lies nowhere
        null.launch(node, {}.__getitem__, 0, 0)
    for refused in (
        lambda: null.capture(plannable(null, [null.copy(1, 2, 3, 0, True)], 0, (0,))),
        lambda: null.launch_noted(node, lambda t: 0, 0, 0),
        lambda: null.stamp(0, 0, 8, False, 0),
    ):
        with pytest.raises(DeviceError, match="null device"):
            refused()
    with pytest.raises(DeviceError, match="address space"):
        null.allocate(1 << 62, c.Space.HOST)
