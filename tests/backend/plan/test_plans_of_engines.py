"""Plans of engines on the embedded device: what is captured and replayed for which toggles, memory
that grows, and ends in any order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

import workbench as wb
from workbench.config import Toggles
from workbench.graph.ir import StepShape

SCOPES: dict[str, dict[str, str]] = {
    "split": {"plan_scope": "split"},
    "step": {"plan_scope": "step", "sync": "packed_implicit"},
    "forked": {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
    "direct": {"results": "direct"},
    "ahead": {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on"},
}
PROMPT, DECODED = list(range(1, 41)), [(7 * i + 3) % 500 for i in range(12)]
N = len(DECODED)


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, n_ubatch=16, threads=2,
        toggles=Toggles(),
    ) as made:  # fmt: skip
        yield made


def toggles(scope: str, **more: str) -> Toggles:
    return Toggles(**{"graph_reuse": "set_rows", "plans": "ours"} | SCOPES[scope] | more)


def decoded(engine: wb.Engine) -> np.ndarray:
    """Logits of single tokens, by a caller who keeps the last."""
    rows, last = [], None
    for token in DECODED:
        last = engine.step([token])
        rows.append(last.copy())
    assert last is not None
    return np.concatenate(rows)


def made(engine: wb.Engine) -> dict[str, int]:
    kinds = ("captured", "twinned", "updated", "reinstantiated", "issued", "evicted")
    counts = engine.counters
    return {kind: n for kind in kinds if (n := counts[f"plans_{kind}"])}


TWINS = {"captured": 1, "twinned": 2}  # each block where results land has a plan
EXPECTED: list[tuple[str, str, str, dict[str, int]]] = [  # of decoded tokens
    ("set_rows", "split", "ours", {"captured": 1}),
    ("set_rows", "split", "pr", {"captured": 1}),
    ("set_rows", "split", "today", {"captured": 1, "issued": 1}),
    *(("set_rows", scope, "ours", TWINS) for scope in ("step", "forked", "direct", "ahead")),
    ("set_rows", "step", "pr", {"captured": 3}),
    ("set_rows", "step", "today", {"captured": 3, "issued": 3}),
    # where every step is bound anew, its uid is another
    ("rebuild", "split", "ours", {"captured": 1}),
    ("rebuild", "split", "pr", {"captured": 1, "updated": N - 1}),
    ("rebuild", "split", "today", {"captured": 1, "issued": 1}),
    # the work that had the plan is gone: only addresses differ
    ("patch_pointers", "split", "ours", {"captured": 1, "updated": N - 1}),
    ("patch_pointers", "split", "pr", {"captured": 1, "updated": N - 1}),
    ("patch_pointers", "split", "today", {"issued": N}),
    ("pointer_table", "split", "ours", {"captured": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("reuse", "scope", "rule", "expected"), EXPECTED)
def test_counters_say_what_became_of_plans(base, reuse, scope, rule, expected):
    with base.variant(toggles(scope, plans=rule, graph_reuse=reuse, plan_batch="one")) as engine:
        engine.prefill(PROMPT)
        decoded(engine)
        assert made(engine) == expected
        counts = engine.counters
        assert counts["plans_replayed"] == N - expected.get("issued", 0)
        captured = expected.get("captured", 0) > 0
        assert (counts["plans_capture_ns"] > 0) == (counts["plans_instantiate_ns"] > 0) == captured
        assert (counts["plans_update_ns"] > 0) == ("updated" in expected)


@pytest.mark.parametrize("step_wait", wb.Toggles.values("step_wait"))
@pytest.mark.parametrize("ring", [2, 4])
def test_each_turn_of_a_ring_has_a_plan(base, ring, step_wait):
    """A plan of a step has the addresses of one staging buffer, and is never patched for others.
    Where the host waits for each step, all have the first turn."""
    more = {"host_source": f"pinned_ring_{ring}", "step_wait": step_wait}
    with base.variant(toggles("step", **more)) as engine:
        for token in DECODED:
            engine.step([token], "none")
        turns = 1 if step_wait == "every" else ring
        assert engine.period == ring and made(engine) == {"captured": turns}
        assert engine.counters["plans_replayed"] == N


@pytest.mark.parametrize(
    ("rule", "scope"), [("ours", "ahead"), ("today", "split"), ("pr", "direct")]
)
def test_memory_that_grows_after_a_capture_is_followed(base, monkeypatch, rule, scope):
    """The engine has room for steps of one token, and captures them. A prompt wants more: arena and
    results move, with the scratch of products in it. No plan keeps an address of theirs."""
    monkeypatch.setattr("workbench.engine.bound.StepShape", lambda *shape: StepShape(1, 1, 32))
    with base.variant(Toggles()) as off, base.variant(toggles(scope, plans=rule)) as engine:
        found = []
        for side in (off, engine):
            rows = [decoded(side)]
            captured = side.counters.get("plans_captured", 0)
            for n in (40, 60):
                side.reset()
                rows.append(side.prefill(list(range(n)), "all"))
                side.reset()
                rows.append(decoded(side))
            found.append(np.concatenate(rows))
        assert np.array_equal(found[0], found[1])
        assert engine.counters["plans_captured"] > captured > 0, "anew"


@pytest.mark.parametrize("order", ["engine", "backend", "plans"])
def test_engine_backend_and_plans_end_in_any_order(tiny_model, order):
    """And an engine that nobody closes; none leaves a plan."""
    engine = wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", threads=2, n_ctx=64,
        toggles=toggles("forked"),
    )  # fmt: skip
    alive = []
    for used in (engine.variant(toggles("split")), engine):
        used.submit([(0, PROMPT[:4], "none")])
        used.step([3])
        alive += [weakref.ref(plan.captured) for plan in used.issuer.plans if plan.captured]
    del used
    ends: dict[str, Callable[[], None]] = {
        "engine": engine.close, "backend": engine.backend.close,
        "plans": partial(engine.issuer.plans.clear, None),
    }  # fmt: skip
    for end in (ends.pop(order), *ends.values()):
        end()
    del engine, ends, end
    gc.collect()
    assert len(alive) > 2 and not any(plan() for plan in alive)
