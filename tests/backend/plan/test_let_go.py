"""What stands at a gate is let go before its device is asked anything else. A gate's limit is a
minute here, and every command looks whether a plan stands there: no clock decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import workbench as wb
from tests.backend.issue.test_next_step import AHEAD, DOES, KEPT, do
from workbench.backend.issue.bind import Binding
from workbench.backend.plan import life
from workbench.backend.plan.gate import Gate
from workbench.benchmarks.workload import draw_tokens, parse, take_sample

PLANS: dict[str, dict[str, str]] = {
    "pr": {"plans": "pr"},  # a program of another kind clears all plans
    "today": {"plans": "today"},  # what it has not seen twice is issued part by part
    "train": {"plan_batch": "one", "host_source": "pinned_ring_2", "step_wait": "outputs"},
    "word": {"plan_end": "word"},
}


@pytest.fixture(scope="module", params=[-1, 1], ids=["device", "output"])
def loaded(request, tiny_model) -> Iterator[wb.Engine]:
    """All of a model on the device; and its output only, where steps without one are the host's."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, n_seqs=2,
        threads=1, n_gpu_layers=request.param, toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
def asked(monkeypatch, loaded) -> list[str]:
    """What the device is asked: launches of plans, commands that are issued alone, marks, waits and
    allocations. It fails where a plan stands at a gate meanwhile."""
    found, gates, issued = list[str](), list[Gate](), Binding.issued

    def looking(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def looks(*args: Any) -> Any:
            found.append(what)
            if armed := [gate for gate in gates if gate._armed is not None]:
                armed[0].cancel()  # or the test would take a minute
                raise AssertionError(f"{what} queues behind a gate")
            return call(*args)

        return looks

    def gate(*args: Any, **named: Any) -> Gate:
        gates.append(Gate(*args, **named, limit_ns=60 * 10**9))
        return gates[-1]

    def looked_at(binding: Binding, command: Any) -> Any:
        made = issued(binding, command)
        made.call = looking(made.call, f"{type(command).__name__} on its own")
        return made

    monkeypatch.setattr(life, "Gate", gate)
    monkeypatch.setattr(Binding, "issued", looked_at)
    for of, name in ((Gate, "launch"), (loaded.backend, "synchronize"),
                     (loaded.backend, "allocate"), (loaded.backend, "mark"),
                     (life.Plan, "destroy")):  # fmt: skip
        looks = looking(getattr(of, name), name)
        monkeypatch.setattr(of, name, lambda *args, looks=looks: looks(*args))
    return found


def is_armed(engine: wb.Engine) -> bool:
    gate = engine.issuer.gate
    return gate is not None and gate._armed is not None


def arm(engine: wb.Engine) -> None:
    """A prompt, and tokens until the plan of the next one stands at the gate."""
    engine.reset()
    engine.prefill(list(range(1, 21)))
    for token in range(12):
        engine.step([token])
    assert is_armed(engine)


@pytest.mark.parametrize("plans", PLANS)
def test_nothing_else_queues_behind_a_gate(loaded, asked, plans):
    """Whatever is asked next; when a benchmark's sample and the engine end. The plan's own step
    opens its gate."""
    with loaded.variant(wb.Toggles(**KEPT | AHEAD | PLANS[plans])) as engine:
        for what in DOES:
            arm(engine)
            before = len(asked)
            do(engine, what, 5)
            engine.step([3], sequence=1)
            assert len(asked) > before, what
        arm(engine)
        ahead = engine.counters["plans_ahead"]
        engine.step([3])
        assert engine.counters["plans_ahead"] == ahead + 1
        for test in ("tg4", "pp4+tg4@s2"):
            workload = parse(test)
            take_sample(engine, workload, draw_tokens(workload, 500, 0))
            assert not is_armed(engine)
        arm(engine)
        engine.close()
        assert not is_armed(engine)
