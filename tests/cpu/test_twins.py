"""Twins on the embedded device: a fresh engine captures one plan and makes the others of it, behind
launches; logits are the bits of captures. Plans and twins end in any order."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.backend.plan.plannable import Log, planned, spins
from tests.gates import hold
from workbench.backend.cpu.device.embedded import open_backend
from workbench.backend.cpu.device.recorded import EmbeddedPlan
from workbench.backend.plan.life import Planned
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.program.commands import COPY_STREAM

SCOPES: dict[str, dict[str, str]] = {
    "step": {"plan_scope": "step", "sync": "packed_implicit"},
    "forked": {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
    "direct": {"results": "direct"},
    "ahead": {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on"},
    "direct, ahead": {
        "plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on", "results": "direct",
    },
    "ahead, word": {
        "plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on", "results": "direct",
        "plan_end": "word",
    },
}  # fmt: skip
TOKENS = [(7 * i + 3) % 500 for i in range(10)]


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, threads=1, toggles=Toggles()
    ) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(base) -> np.ndarray:
    return decoded(base)


def decoded(engine: wb.Engine) -> np.ndarray:
    """Logits of single tokens, by a caller who keeps the last."""
    engine.reset()
    rows, last = [], None
    for token in TOKENS:
        last = engine.step([token])
        rows.append(last.copy())
    assert last is not None
    return np.concatenate(rows)


def toggles(scope: str, **more: str) -> Toggles:
    fields: dict[str, Any] = {"graph_reuse": "set_rows", "plans": "ours", **SCOPES[scope], **more}
    return Toggles(**fields)


def made(engine: wb.Engine) -> dict[str, int]:
    kinds = ("captured", "twinned", "updated", "reinstantiated", "issued", "evicted")
    counts = engine.counters
    return {kind: n for kind in kinds if (n := counts[f"plans_{kind}"])}


# engines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_a_fresh_engine_captures_once_and_has_two_twins(base, wanted, scope):
    with base.variant(toggles(scope)) as engine:
        assert np.array_equal(decoded(engine), wanted)
        assert made(engine) == {"captured": 1, "twinned": 2}
        assert engine.counters["plans_replayed"] == len(TOKENS)
        ahead = [engine.counters.get(n, 0) for n in ("plans_ahead", "plans_ahead_missed")]
        assert ("ahead" in scope) == (sum(ahead) > 0)


@pytest.mark.parametrize("scope", SCOPES)
def test_captures_in_the_stead_of_twins_give_the_same_bits(base, wanted, monkeypatch, scope):
    """The slow twin."""
    monkeypatch.setattr(EmbeddedPlan, "twin", lambda self, work, changed: None)
    with base.variant(toggles(scope)) as engine:
        assert np.array_equal(decoded(engine), wanted)
        assert made(engine) == {"captured": 3}


@pytest.mark.parametrize("rule", ["pr", "today"])
def test_the_reproductions_capture_every_block(base, wanted, rule):
    with base.variant(toggles("step", plans=rule, plan_warmup="0")) as engine:
        assert np.array_equal(decoded(engine), wanted)
        assert made(engine) == {"captured": 3}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_twin_that_fails_costs_a_capture_and_nothing_else(base, wanted, monkeypatch, scope):
    def fails(self: EmbeddedPlan, work: Any, changed: Any) -> None:
        raise DeviceError("no memory for a twin; use plans=off")

    with base.variant(toggles(scope)) as engine:
        monkeypatch.setattr(EmbeddedPlan, "twin", fails)
        assert np.array_equal(decoded(engine), wanted) and made(engine) == {"captured": 3}
        monkeypatch.undo()
        engine.issuer.plans.clear()
        assert np.array_equal(decoded(engine), wanted)
        assert made(engine) == {"captured": 4, "twinned": 2}


def test_a_twin_is_made_behind_the_launch_and_once_for_each_block(base, monkeypatch):
    did: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (did.append(name), call(*given))[1]

    with base.variant(toggles("step")) as engine:
        monkeypatch.setattr(EmbeddedPlan, "twin", noted("twin", EmbeddedPlan.twin))
        monkeypatch.setattr(Planned, "next", noted("next", Planned.next))
        last = []
        for token in TOKENS:
            did.append("step")
            last = [engine.step([token])]
        assert last
    assert did[:6] == ["step", "next", "twin", "step", "next", "twin"]
    assert did[6:8] == ["step", "next"] and set(did[8:]) == {"step"}


# plans --------------------------------------------------------------------------------------------


def works_of(device: Any, logs: list[Log]) -> list[Any]:
    """For each log, work of two streams that appends to it."""
    return [
        planned(device, [spins(device, 1), log.part(1), log.part(2, COPY_STREAM)]) for log in logs
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_plans_and_twins_are_destroyed_in_any_order(two, order):
    logs = [Log(two) for _ in range(3)]
    works = works_of(two, logs)
    plans = [two.capture(works[0])]
    plans += [plans[0].twin(works[1], [1, 2]), plans[0].twin(works[2], [1, 2])]
    assert [plan.nodes for plan in plans] == [(0, 1, 2)] * 3
    assert all(plan.instantiate_ns > 0 == plan.capture_ns for plan in plans[1:])
    with hold(two):
        for _ in range(2):
            for plan in plans:
                plan.launch()
        for which in order:
            plans[which].destroy()
            with pytest.raises(DeviceError, match=r"^this plan is destroyed; capture .*$"):
                plans[which].twin(works[0], [1])
            with pytest.raises(DeviceError, match=r"^this plan is destroyed; capture .*$"):
                plans[which].launch()
    two.synchronize()
    assert [sorted(log.values) for log in logs] == [[1, 1, 2, 2]] * 3


def test_an_update_under_way_is_the_plan_s_own(two):
    logs = [Log(two) for _ in range(3)]
    works = works_of(two, logs)
    plan = two.capture(works[0])
    with hold(two):
        plan.launch()
        twin = plan.twin(works[1], [1, 2])
        twin.launch()
        assert twin.update(works[2], [1, 2])
        twin.launch()
        plan.launch()
    two.synchronize()
    assert [sorted(log.values) for log in logs] == [[1, 1, 2, 2], [1, 2], [1, 2]]
    assert twin.launches == plan.launches == 2 and len(twin.spans()) == len(plan.spans()) == 3


def test_another_topology_has_no_twin(two):
    log = Log(two)
    plan = two.capture(planned(two, [log.part(1), log.part(2)]))
    longer = planned(two, [log.part(1), log.part(2), log.part(3)])
    assert plan.twin(longer, [2]) is None
    plan.launch()
    two.synchronize()
    assert log.values == [1, 2]


def test_a_hundred_cycles_of_twins_leave_nothing():
    device = open_backend(threads=1)
    logs = [Log(device, 4000) for _ in range(2)]
    works = works_of(device, logs)

    def cycles(n: int) -> None:
        for i in range(n):
            plan = device.capture(works[0])
            twin = plan.twin(works[1], [1, 2])
            twin.launch()
            plan.launch()
            (twin if i % 2 else plan).destroy()
        device.synchronize()

    cycles(20)
    device._keep(None)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cycles(100)
    device._keep(None)  # gives back what is over
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1 << 16, grown
    device.close()
    assert all(len(log.values) == 240 for log in logs)
