"""Engines with plans on a driver that notes what it is asked: a replayed step queues the launches
and copies of an eager one, with the same arguments."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import workbench as wb
from tests.backend.cuda.fake_cuda import SPARE, fake_backend
from tests.backend.cuda.fake_graphs import COPIES, Call
from workbench.common.errors import DeviceError, UsageError
from workbench.config import SyncMode, Toggles

FORKED = {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"}
SCOPES = [{}, {"plan_scope": "step", "sync": "implicit"}, FORKED]
RULES = [{"plans": "ours"}, {"plans": "today"}, {"plans": "pr"}]
FUSED = {"fuse": "on", "pdl": "on"}


@pytest.fixture
def engine(monkeypatch, tiny_model) -> Iterator[wb.Engine]:
    fake_backend(monkeypatch)
    kept = Toggles(graph_reuse="set_rows")
    with wb.Engine.load(
        tiny_model("tiny-llama", "F16"), device="cuda", n_ctx=2048, toggles=kept
    ) as made:
        yield made


def step(used: wb.Engine, n: int, outputs: Any = "last") -> list[tuple[Any, ...]]:
    """What a step queues, without the addresses: variants have memory of their own."""
    log = used.backend._driver.api.log  # type: ignore[attr-defined]
    log.clear()
    used.step([1] * n, outputs=outputs)
    found = []
    for i, call in enumerate(log):
        product = call.function == "cublasGemmEx"
        # a product is two nodes of a graph; in front of its first capture it runs to be loaded
        if product and (call == log[i - 1] or SPARE in call.args):
            continue
        if product or (call.function in COPIES or call.function.startswith("cuLaunch")):
            found.append(_without_addresses(call))
    return found


def _without_addresses(call: Call) -> tuple[Any, ...]:
    far = 1 << 40
    return call.function, *(a for a in call.args if not isinstance(a, int) or a < far)


def feed(used: wb.Engine) -> list[Any]:
    found: list[Any] = []
    for n, outputs in ((1, "last"), (8, "all"), (500, "last"), (1, "last"), (1, "last")):
        found += [step(used, n, outputs) for _ in range(3)]
    return found


@pytest.mark.parametrize("more", [{}, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked"])
def test_a_replayed_step_queues_what_an_eager_one_does(engine, scope, more):
    base = Toggles(
        graph_reuse="set_rows", **more, **{k: v for k, v in scope.items() if k != "plan_scope"}
    )
    with engine.variant(base) as eager:
        wanted = feed(eager)
    for rule in RULES:
        with engine.variant(replace(base, **rule, **scope)) as planned:
            found, counters = feed(planned), planned.counters
        assert [sorted(map(str, s)) for s in found] == [sorted(map(str, s)) for s in wanted], rule
        assert counters["plans_replayed"] >= 5, counters
        api = engine.backend._driver.api  # type: ignore[attr-defined]
        assert not api.alive and not api._captures, "closed with its engine"


@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked"])
@pytest.mark.parametrize("results", Toggles.values("results"))
@pytest.mark.parametrize("reuse", Toggles.values("graph_reuse"))
def test_a_patched_pointer_sets_a_node_and_nothing_else_does(engine, reuse, results, scope):
    """Of the ways to keep a graph only `patch_pointers` has other addresses for each token. Each
    block that logits land in has a plan. One is captured, and the others are twins of it.

    Results behind the step lie in two buffers by turns. No plan brings them. A kept program has a
    plan for each turn, and a rebuilt one the same plan, whose last product gets the other buffer.
    """
    behind = results == "behind"
    if behind and scope:
        with pytest.raises(UsageError, match="results=behind race on the cuda device"):
            engine.variant(Toggles(graph_reuse=reuse, results=results, plans="ours", **scope))
        scope = scope | {"host_source": "pinned_ring_2"}
    toggles = Toggles(graph_reuse=reuse, results=results, plans="ours", **scope)
    in_plan = not behind and (results == "direct" or "plan_scope" in scope)
    turns = 2 if behind and reuse != "rebuild" else 1
    for keeps in (False, True):  # the last logits, so that they land in three blocks
        kept: dict[str, Any] = {}
        with engine.variant(toggles) as planned:
            for token in range(20):
                logits = planned.step([token])
                kept |= {"the last": logits} if keeps else {}
                del logits
            plans: Any = planned.issuer.plans
            graphs = [plan.captured for plan in plans]
            counters = planned.counters
        n = (3 if keeps else 2) if in_plan else turns
        made = counters["plans_captured"], counters["plans_twinned"]
        assert made == (turns, n - turns), counters
        assert n == len(graphs) and counters["plans_replayed"] == 20, counters
        updates = reuse == "patch_pointers" or (behind and reuse == "rebuild")
        updated = 20 - turns if updates else 0
        assert counters["plans_updated"] == updated == sum(g.nodes_set for g in graphs)
        assert not sum(g.recaptured for g in graphs)


@pytest.mark.parametrize("reuse", ["set_rows", "patch_pointers"])
@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked"])
def test_a_destroyed_graph_is_told_once_and_captured_anew(engine, scope, reuse):
    """Also where it was to be updated."""
    with engine.variant(Toggles(graph_reuse=reuse, plans="ours", **scope)) as planned:
        wanted = [step(planned, 1) for _ in range(3)][-1]
        plans: Any = planned.issuer.plans
        n = len([plan.captured.destroy() for plan in plans])
        told = 0
        for _ in range(n + 3):
            past = planned.n_past
            try:
                found = step(planned, 1)
            except DeviceError as error:
                told += 1
                assert "was destroyed and cannot" in str(error) and planned.n_past == past
        assert found == wanted and 1 <= told <= n and planned.n_past == past + 1
        counters = planned.counters
        made = sum(counters[f"plans_{how}"] for how in ("captured", "twinned", "reinstantiated"))
        assert made == n + told


@pytest.mark.parametrize("sync", [m.value for m in SyncMode if m != SyncMode.AUTO])
def test_every_ordering_has_plans_that_a_capture_bears(engine, sync):
    """No part waits for an event of another capture, and none of the host's waits is a part."""
    n = 0
    for copy_stream, n_copies, scope in product(("own", "compute"), ("1", "4"), ("split", "step")):
        fields = {"sync": sync, "copy_stream": copy_stream, "n_copies": n_copies}
        try:
            toggles = Toggles(
                graph_reuse="set_rows", plans="ours", plan_scope=scope, **fields,
            )  # fmt: skip
            planned = engine.variant(toggles)
        except UsageError:  # a race, a clash, or the host waits amid a step
            continue
        n += 1
        with planned:
            for tokens in (1, 1, 30, 1, 1, 1):
                planned.step([1] * tokens)
            assert planned.counters["plans_replayed"] >= 6, fields
    assert n >= 1


def test_programmatic_launches_behind_kernels_are_programmatic_edges(engine):
    for pdl, wanted in (("on", True), ("off", False)):
        toggles = Toggles(graph_reuse="set_rows", fuse="on", pdl=pdl, plans="ours")
        with engine.variant(toggles) as planned:
            planned.step([1])
            plans: Any = planned.issuer.plans
            (plan,) = plans
            edges, programmatic = plan.captured.edges()
            assert edges == len(plan.captured.nodes) - 1 and (programmatic > 10) == wanted


def test_a_dropped_program_leaves_nothing_to_the_collector(engine):
    """Launches bound for one step die with its program."""
    with engine.variant(Toggles()) as rebuilding:
        rebuilding.step([1])
        gc.collect()
        gc.disable()
        try:
            for token in range(3):
                rebuilding.step([token])
            assert gc.collect() < 10
        finally:
            gc.enable()
