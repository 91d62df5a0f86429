"""What stands at a gate is let go before its device is asked anything else.

The limit of a gate is a minute here. A command that queued behind one would fail its test at once,
and not by a clock: every one looks whether a plan stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.backend.issue.bind import Binding
from workbench.backend.issue.issued import Issued
from workbench.backend.plan import life as plan
from workbench.backend.plan.gate import RAN, Gate
from workbench.benchmarks.workload import draw_tokens, parse, take_sample
from workbench.program import commands as c
from workbench.trace.spans import Recorder

MINUTE_NS = 60 * 10**9
TOGGLES: dict[str, Any] = {
    "sync": "packed_implicit", "plan_scope": "step", "graph_reuse": "set_rows", "plans": "ours",
    "launch_ahead": "on",
}  # fmt: skip
PLANS: dict[str, dict[str, str]] = {
    "today": {"plans": "today"},  # what it has not seen twice is issued part by part
    "train": {"plan_batch": "one", "host_source": "pinned_ring_2", "step_wait": "outputs"},
    "word": {"plan_end": "word"},
}
PROMPT = list(range(1, 21))


class Device:
    """What an engine's device is asked while a plan stands at the gate (`late`), and how often.

    Launches of plans, commands that are issued one by one, marks, waits and allocations.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loaded: wb.Engine):
        self.engine: Any = None
        self.late: list[str] = []
        self.asked = 0
        monkeypatch.setattr(plan, "Gate", partial(Gate, limit_ns=MINUTE_NS))
        issued, queue = Binding.issued, Gate._queue

        def looked_at(binding: Binding, command: c.Command) -> Issued:
            made = issued(binding, command)
            made.call = self.looking(made.call, f"{type(command).__name__} on its own")
            return made

        def queued(gate: Gate, *args: Any) -> None:
            self.look("a launch of a plan")
            queue(gate, *args)

        monkeypatch.setattr(Binding, "issued", looked_at)
        monkeypatch.setattr(Gate, "_queue", queued)
        for name in ("synchronize", "allocate", "mark"):
            asked = getattr(loaded.backend, name)
            monkeypatch.setattr(loaded.backend, name, self.looking(asked, name))

    def looking(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def looks(*args: Any) -> Any:
            self.look(what)
            return call(*args)

        return looks

    def look(self, what: str) -> None:
        self.asked += 1
        if self.is_armed:
            self.late.append(what)
            self.engine.issuer.release()  # or the test would take a minute

    @property
    def is_armed(self) -> bool:
        gate = None if self.engine is None else self.engine.issuer.gate
        return gate is not None and gate._armed is not None

    def arm(self) -> None:
        """A prompt, and tokens until the plan of the next one stands at the gate."""
        begin(self.engine)
        assert self.is_armed and not self.late


def begin(engine: wb.Engine) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    for token in range(12):
        engine.step([token])


@pytest.fixture(scope="module", params=[-1, 1], ids=["device", "output"])
def loaded(request, tiny_model) -> Iterator[wb.Engine]:
    """All of a model on the device; and its output only, where steps without one are the host's."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, n_seqs=2,
        threads=1, n_gpu_layers=request.param, toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(params=PLANS)
def device(request, loaded, monkeypatch) -> Iterator[Device]:
    """An engine whose next plan stands at the gate."""
    made = Device(monkeypatch, loaded)
    with loaded.variant(wb.Toggles(**TOGGLES | PLANS[request.param])) as engine:
        made.engine = engine
        made.arm()
        yield made
        assert not made.late
        engine.issuer.release()
    made.engine = None


def another_step_depth(engine: wb.Engine) -> np.ndarray:
    """The cache is shorter, and then as long as it was."""
    engine.cache.remove(0, 10)
    return np.concatenate([engine.step([i]) for i in range(10)])


def shifted(engine: wb.Engine) -> np.ndarray:
    engine.cache.remove(0, 4, 8)
    engine.cache.shift(0, -4, 8)
    return engine.step([3])


def forked(engine: wb.Engine) -> np.ndarray:
    engine.cache.copy(0, 1)
    return engine.step([3], sequence=1)


def recorded(engine: wb.Engine) -> np.ndarray:
    engine.recorder = Recorder()
    try:
        return engine.step([3])
    finally:
        engine.recorder = None


def stamped(engine: wb.Engine) -> np.ndarray:
    with engine.stamped() as stamps:
        found = engine.step([3])
    assert len(stamps) == 1 and stamps[0][0] < stamps[0][1]
    return found


def waited_for(engine: wb.Engine) -> np.ndarray:
    engine.synchronize()
    return engine.step([3])


OTHERS: tuple[Callable[[wb.Engine], np.ndarray], ...] = (
    lambda engine: engine.prefill(PROMPT, sequence=1),
    lambda engine: engine.step([3, 4], outputs="all"),
    lambda engine: engine.prefill(PROMPT, outputs="all", sequence=1),  # more than there is room for
    lambda engine: engine.step([3], outputs="none"),
    lambda engine: engine.submit([(s, [3 + s], "last") for s in range(2)]).wait(),
    another_step_depth, shifted, forked, recorded, stamped, waited_for,
)  # fmt: skip


def test_nothing_else_queues_behind_a_gate(device, loaded):
    found = []
    for other in OTHERS:
        device.arm()
        before = device.asked
        found.append(other(device.engine).copy())
        assert not device.late, other
        assert device.asked > before or not device.is_armed  # a step can be all of the host's
    device.engine.issuer.release()  # the other engine has the same device
    with loaded.variant(wb.Toggles(graph_reuse="set_rows")) as plain:
        for other, got in zip(OTHERS, found, strict=True):
            begin(plain)
            assert np.array_equal(got, other(plain)), other


def test_the_armed_plan_is_opened_and_else_let_go(device):
    """By its own step; when a trace begins; when a benchmark's sample and the engine end."""
    engine = device.engine
    before = engine.counters
    engine.step([3])
    counts = engine.counters
    assert counts["plans_ahead"] == before["plans_ahead"] + 1
    assert counts["plans_ahead_missed"] == before["plans_ahead_missed"]
    gate = engine.issuer.gate
    with wb.profile(engine) as traced:
        assert gate._words[RAN // 8] == gate._launched
        engine.step([3])
    spans = [span for span in traced.timeline.spans if "step" in span.args]
    assert {span.args["step"] for span in spans} == {engine.n_steps - 1}
    plans = [x for x in engine.program().commands if isinstance(x, c.Replay)]
    parts = {i for i, x in enumerate(plans[0].parts) if not isinstance(x, c.Record | c.Wait)}
    replayed = [span for span in spans if span.category == "device" and "part" in span.args]
    assert {span.args["part"] for span in replayed} == parts  # what tells of the end is no part
    for test in ("tg4", "pp4+tg4@s2"):
        workload = parse(test)
        take_sample(engine, workload, draw_tokens(workload, 500, 0))
        assert not device.late and not device.is_armed
    device.arm()
    engine.close()
    assert not device.late and not device.is_armed
