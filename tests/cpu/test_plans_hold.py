"""What plans of an engine hold to, whatever the policy: the logits; memory that grows; plans that
are destroyed behind the engine's back; and each policy leaves the counters that it promises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.profiles import share
from workbench.backend.plan import life as plan_module
from workbench.common.errors import DeviceError
from workbench.config import EXACT, Toggles
from workbench.graph.ir import StepShape

RULES = ("ours", "today", "pr")
SCOPES: dict[str, dict[str, str]] = {
    "split": {},
    "step": {"plan_scope": "step", "sync": "packed_implicit"},
    "direct": {"plan_scope": "step", "sync": "packed_implicit", "results": "direct"},
    "ahead": {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on"},
}
EACH = list(product(RULES, SCOPES))
POLICIES = ("plan_warmup", "plan_evict", "plan_batch")
PROMPT, DECODED = list(range(1, 41)), [(7 * i + 3) % 500 for i in range(12)]


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, n_ubatch=64, threads=1,
        toggles=Toggles(),
    ) as made:  # fmt: skip
        yield made


def planned(rule: str, scope: str = "split", **more: str) -> Toggles:
    fields: dict[str, Any] = {"graph_reuse": "set_rows", "plans": rule, **SCOPES[scope], **more}
    return Toggles(**fields)


def decoded(engine: wb.Engine) -> np.ndarray:
    return np.concatenate([engine.step([token]) for token in DECODED])


def answer(engine: wb.Engine) -> np.ndarray:
    """Two prompts, one in an empty cache and one behind tokens; tokens behind each."""
    engine.reset()
    rows = [engine.prefill(PROMPT), decoded(engine), engine.prefill(PROMPT[:20], "all")]
    return np.concatenate([*rows, decoded(engine)])


@pytest.fixture(scope="module")
def wanted(base) -> np.ndarray:
    return answer(base)


# each policy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "scope"), share(EACH, every=3))
def test_every_policy_is_exact(base, wanted, rule, scope):
    """Each value by itself, and all that are not the default together."""
    for name in POLICIES:
        assert Toggles.answer_class(name) == EXACT
    values = [(name, value) for name in POLICIES for value in Toggles.values(name)]
    assert len(values) == 9
    last = {name: Toggles.values(name)[-1] for name in POLICIES}
    for more in [*({name: value} for name, value in values), last]:
        with base.variant(planned(rule, scope, **more)) as engine:
            assert np.array_equal(answer(engine), wanted), more
            assert engine.counters["plans_replayed"] > 0


def counted(base: wb.Engine, rule: str, **more: str) -> dict[str, int]:
    with base.variant(planned(rule, **more)) as engine:
        answer(engine)
        return {
            name.removeprefix("plans_"): n
            for name, n in engine.counters.items()
            if name.startswith("plans_") and not name.endswith("_ns")
        }


@pytest.mark.parametrize("rule", RULES)
def test_warm_up_is_counted_in_calls_that_are_issued(base, rule):
    found = {value: counted(base, rule, plan_warmup=value) for value in ("auto", "0", "2")}
    assert found["auto"] == found["2" if rule == "today" else "0"]
    assert found["0"]["issued"] == 0 < found["2"]["issued"]


@pytest.mark.parametrize("rule", RULES)
def test_prompts_have_no_plans_with_plan_batch_one(base, rule):
    found = {value: counted(base, rule, plan_batch=value) for value in ("any", "one")}
    calls = {value: counts["replayed"] + counts["issued"] for value, counts in found.items()}
    assert calls == {"any": 2 + 2 * len(DECODED), "one": 2 * len(DECODED)}


@pytest.mark.parametrize("rule", RULES)
def test_what_goes_is_what_the_policy_says(base, wanted, monkeypatch, rule):
    """With room for one plan, and with every plan idle at once."""
    monkeypatch.setattr(plan_module, "KEPT", 1)
    monkeypatch.setattr(plan_module, "IDLE_S", 0.0)
    monkeypatch.setattr(plan_module, "SWEEP_S", 0.0)
    found = {
        value: counted(base, rule, plan_evict=value, plan_warmup="0")["evicted"]
        for value in ("never", "idle", "lru")
    }
    assert found["never"] == 0 < found["idle"]
    assert (found["lru"] > 0) == (rule == "ours")  # the others have a plan for each number
    for value in ("idle", "lru"):
        with base.variant(planned(rule, plan_evict=value)) as engine:
            assert np.array_equal(answer(engine), wanted)


# rings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_wait", Toggles.values("step_wait"))
@pytest.mark.parametrize(
    ("ring", "period"),
    [
        ({"host_source": "pinned_ring_2"}, 2), ({"host_source": "pinned_ring_4"}, 4),
        ({"host_source": "pinned_ring_2", "n_copies": "4"}, 4),
    ],
)  # fmt: skip
def test_each_turn_of_a_ring_has_a_plan(base, ring, period, step_wait):
    """A plan of a step has the addresses of one staging buffer, and is never patched for others.
    Where the host waits for each step, all have the first turn."""
    with base.variant(planned("ours", "step", step_wait=step_wait, **ring)) as engine:
        assert engine.period == period
        turns = 1 if step_wait == "every" else period
        for token in DECODED:
            engine.step([token], "none")
        counts = engine.counters
    assert (counts["plans_captured"], counts["plans_replayed"]) == (turns, len(DECODED))
    assert not counts["plans_updated"] and not counts["plans_issued"]


# memory that grows -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "scope"), EACH)
def test_memory_that_grows_behind_a_capture_is_followed(base, monkeypatch, rule, scope):
    """The engine has room for steps of one token, and captures them. A prompt wants more: arena and
    results move, with the scratch of products in it. No plan keeps an address of theirs."""
    monkeypatch.setattr("workbench.engine.bound.StepShape", lambda *shape: StepShape(1, 1, 32))
    with base.variant(Toggles()) as off, base.variant(planned(rule, scope)) as engine:
        found = []
        for side in (off, engine):
            rows, before = [decoded(side)], address_of(side)
            captured = side.counters.get("plans_captured", 0)
            for n in (40, 60):
                side.reset()
                rows.append(side.prefill(list(range(n)), "all"))
                side.reset()
                rows.append(decoded(side))
            found.append(np.concatenate(rows))
            moved = {name for name, at in address_of(side).items() if before.get(name) != at}
            assert {"arena.1", "result"} <= moved
        assert np.array_equal(*found)
        assert engine.counters["plans_captured"] > captured > 0, "anew"


def address_of(engine: wb.Engine) -> dict[str, int]:
    """Where the workspace's buffers are."""
    return {name: m.address for (name, _), m in engine.bound.workspace._memory.items()}


# plans that are destroyed ------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "scope"), EACH)
def test_a_destroyed_plan_is_told_once_and_the_engine_goes_on(base, rule, scope):
    """One clear line; the sequence is as it was; and the next call captures the work anew."""
    with base.variant(Toggles()) as off:
        off.prefill(PROMPT)
        wanted = [off.step([token]) for token in DECODED * 2]
    with base.variant(planned(rule, scope)) as engine:
        engine.prefill(PROMPT)
        found = [engine.step([token]) for token in DECODED]
        engine.synchronize()
        destroyed = [p.captured for p in engine.issuer.plans if p.captured is not None]  # type: ignore[attr-defined]
        for captured in destroyed:
            captured.destroy()
        told = 0
        for token in DECODED:
            while True:
                past = engine.n_past
                try:
                    found.append(engine.step([token]))
                    break
                except DeviceError as error:
                    told += 1
                    assert str(error) == "this plan is destroyed; capture its commands again"
                    assert engine.n_past == past and told <= len(destroyed)
        assert 0 < told <= len(destroyed)
        for ours, theirs in zip(found, wanted, strict=True):
            assert np.array_equal(ours, theirs)
        counts = engine.counters
        assert counts["plans_replayed"] >= len(DECODED)


@pytest.mark.parametrize("rule", RULES)
def test_an_update_that_cannot_be_is_told_and_the_engine_goes_on(base, rule):
    """A patched work wants its plan updated; that plan is destroyed."""
    toggles = planned(rule, graph_reuse="patch_pointers", plan_warmup="0")
    with base.variant(Toggles()) as off:
        wanted = [off.step([token]) for token in DECODED]
    with base.variant(toggles) as engine:
        found = [engine.step([token]) for token in DECODED[:6]]
        assert engine.counters["plans_updated"] > 0
        for made in engine.issuer.plans:  # type: ignore[attr-defined]
            made.captured.destroy()
        with pytest.raises(DeviceError, match=r"^this plan is destroyed; capture .*$"):
            engine.step([DECODED[6]])
        found += [engine.step([token]) for token in DECODED[6:]]
        for ours, theirs in zip(found, wanted, strict=True):
            assert np.array_equal(ours, theirs)


def test_work_of_another_topology_is_no_update_and_the_plan_is_as_it_was(base):
    """A token without logits has fewer launches. A refusal leaves either plan as it was."""
    with base.variant(planned("ours")) as engine:
        first = engine.step([3])
        engine.step([3], outputs="none")
        one, other = engine.issuer.plans  # type: ignore[attr-defined]
        assert len(one.work().parts) > len(other.work().parts)
        assert not one.captured.update(other.work(), None)
        assert not other.captured.update(one.work(), None)
        engine.reset()
        assert np.array_equal(engine.step([3]), first)
        assert engine.counters["plans_captured"] == 2 and not engine.counters["plans_issued"]
