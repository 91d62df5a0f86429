"""What stands at a gate is let go before its device is asked anything else.

The limit of a gate is a minute here. A command that queued behind one would fail its test at once,
and not by a clock: every one looks whether a plan stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import workbench as wb
from tests.backend.issue.test_next_step import AHEAD, DOES, KEPT, do
from workbench.backend.issue.bind import Binding
from workbench.backend.plan import life
from workbench.backend.plan.gate import Gate
from workbench.benchmarks.workload import draw_tokens, parse, take_sample

PLANS: dict[str, dict[str, str]] = {
    "today": {"plans": "today"},  # what it has not seen twice is issued part by part
    "train": {"plan_batch": "one", "host_source": "pinned_ring_2", "step_wait": "outputs"},
    "word": {"plan_end": "word"},
}


class Asked:
    """What an engine's device is asked while a plan stands at the gate (`late`), and how often:
    launches of plans, commands that are issued one by one, marks, waits and allocations."""

    def __init__(self, patch: pytest.MonkeyPatch, loaded: wb.Engine):
        self.engine: Any = None
        self.late, self.n = list[str](), 0
        patch.setattr(life, "Gate", partial(Gate, limit_ns=60 * 10**9))
        issued = Binding.issued

        def looked_at(binding: Binding, command: Any) -> Any:
            made = issued(binding, command)
            made.call = self.looking(made.call, f"{type(command).__name__} on its own")
            return made

        patch.setattr(Binding, "issued", looked_at)
        for of, name in ((Gate, "launch"), (loaded.backend, "synchronize"),
                         (loaded.backend, "allocate"), (loaded.backend, "mark")):  # fmt: skip
            looks = self.looking(getattr(of, name), name)
            patch.setattr(of, name, lambda *args, looks=looks: looks(*args))

    def looking(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def looks(*args: Any) -> Any:
            self.n += 1
            if self.is_armed:
                self.late.append(what)
                self.engine.issuer.release()  # or the test would take a minute
            return call(*args)

        return looks

    @property
    def is_armed(self) -> bool:
        gate = self.engine and self.engine.issuer.gate
        return gate is not None and gate._armed is not None

    def arm(self) -> None:
        """A prompt, and tokens until the plan of the next one stands at the gate."""
        self.engine.reset()
        self.engine.prefill(list(range(1, 21)))
        for token in range(12):
            self.engine.step([token])
        assert self.is_armed and not self.late


@pytest.fixture(scope="module", params=[-1, 1], ids=["device", "output"])
def loaded(request, tiny_model) -> Iterator[wb.Engine]:
    """All of a model on the device; and its output only, where steps without one are the host's."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=96, n_ubatch=16, n_seqs=2,
        threads=1, n_gpu_layers=request.param, toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("plans", PLANS)
def test_nothing_else_queues_behind_a_gate(loaded, monkeypatch, plans):
    """Whatever is asked next; when a benchmark's sample and the engine end. The plan's own step
    opens its gate."""
    asked = Asked(monkeypatch, loaded)
    with loaded.variant(wb.Toggles(**KEPT | AHEAD | PLANS[plans])) as engine:
        asked.engine = engine
        for what in DOES:
            asked.arm()
            before = asked.n
            do(engine, what, 5)
            engine.step([3], sequence=1)
            assert not asked.late and asked.n > before, what
        asked.arm()
        ahead = engine.counters["plans_ahead"]
        engine.step([3])
        assert engine.counters["plans_ahead"] == ahead + 1
        for test in ("tg4", "pp4+tg4@s2"):
            workload = parse(test)
            take_sample(engine, workload, draw_tokens(workload, 500, 0))
            assert not asked.late and not asked.is_armed
        asked.arm()
        engine.close()
        assert not asked.late and not asked.is_armed
        asked.engine = None
