"""Toggles on the GPU: the bits of the engine without them, whatever is planned, forked, launched
ahead, reused or stamped; and what plans do for it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.gpu.harness import one_by_one, tokens_for
from tests.gpu.test_cuda_captures import free_bytes
from tests.nll import is_the_same_under_every_ordering, nll
from workbench.backend.cuda.device.graph_nodes import commands_of
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.cuda.kernels.cublas import PRODUCT
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.program.check.hazards import check_cycle

pytestmark = pytest.mark.gpu

Values = dict[str, str]
RULES: list[Values] = [
    {"plans": "ours"}, {"plans": "ours", "plan_warmup": "2"}, {"plans": "today"}, {"plans": "pr"},
]  # fmt: skip
STEP: Values = {"plan_scope": "step", "sync": "implicit"}
FORKED: Values = {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"}
SCOPES: list[Values] = [{"plan_scope": "split"}, STEP, FORKED]
NAMES = ["split", "step", "forked"]
OURS = {"plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute"}
AHEAD = OURS | {"launch_ahead": "on"}
INSIDE = {"fuse": "on", "branch_fusion": "inside"}
FUSED = {"fuse": "on", "activations": "q8", "pdl": "on"}
# streams and what goes with them; within one stream fused nodes are the same ones
STREAMS: dict[str, Values] = {
    "three": {"streams": "3"},
    "two": {"streams": "2", "fork": "any"},
    "any, halved norms": {"streams": "4", "fork": "any", "defer_norm": "on"},
    "copies on their own": {"streams": "3", "sync": "event_guarded", "copy_stream": "own"},
    "a plan for each split": {"streams": "3", "plans": "ours", "plan_scope": "split", "pdl": "on"},
    "a plan for the step": {"streams": "8", "fork": "any", "results": "direct", **OURS},
    "launched ahead": {"streams": "3", "plan_end": "word", "pdl": "on", **AHEAD},
    "stores by pointer": {"streams": "3", "graph_reuse": "patch_pointers"},
}
WAYS: dict[str, Values] = {
    **{f"{reuse}, {name}": {"graph_reuse": reuse, "plans": "ours", **scope}
       for reuse in ("rebuild", "patch_pointers", "pointer_table")
       for name, scope in zip(NAMES, SCOPES, strict=True)},
    **{f"{reuse} alone": {"graph_reuse": reuse, "pdl": "on"}
       for reuse in ("rebuild", "patch_pointers", "pointer_table")},
    "a ring": {"host_source": "pinned_ring_2", "step_wait": "outputs", **AHEAD},
    "everything fused": FUSED | {"defer_norm": "on"} | AHEAD,
    **STREAMS,
    **{f"{name}, fused": values | INSIDE for name, values in STREAMS.items()
       if "graph_reuse" not in values},
}  # fmt: skip
# what changes roundings, so that the other side has it, too
ROUNDING = ("defer_norm", "fuse", "branch_fusion", "activations")
MODELS = [("tiny-llama", "Q4_0"), ("tiny-qwen3", "F16"), ("tiny-qwen3", "Q4_K")]


def captured_of(used: wb.Engine) -> list[CudaGraph]:
    plans: Any = used.issuer.plans
    return [plan.captured for plan in plans if plan.captured is not None]


def feed(used: wb.Engine, tokens: Sequence[int], n: int = 40) -> np.ndarray:
    """A prompt of n tokens (40: cuBLAS multiplies), 8 tokens, and single ones, twice as if it were
    anew."""
    rows = []
    for _ in range(2):
        used.reset()
        rows.append(used.prefill(tokens[:n], outputs="all"))
        rows.append(used.step(tokens[n : n + 8], outputs="all"))
        rows.append(used.prefill(tokens[48 : 48 + n]))  # the first one's shape but for its outputs
        rows.append(one_by_one(used, list(tokens[88:100])))
    return np.concatenate(rows)


def skip_where_refused(values: Values, backend: Any) -> None:
    if "pdl" in values and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")


@pytest.mark.parametrize(("preset", "quant"), MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_logits_are_those_without_it(engine, backend, preset, quant, way):
    values = {"graph_reuse": "set_rows"} | WAYS[way]
    skip_where_refused(values, backend)
    tokens, shared = tokens_for(preset, 100), engine(preset, quant)
    kept = {name: value for name, value in values.items() if name in ROUNDING}
    # with 40 tokens cuBLAS multiplies what fusion leaves apart, and what it joins another kernel
    n = 20 if way.endswith(", fused") else 40
    with shared.variant(Toggles(graph_reuse=values["graph_reuse"], **kept)) as plain:
        wanted = feed(plain, tokens, n)
    with shared.variant(Toggles(**values)) as used:
        assert np.array_equal(feed(used, tokens, n), wanted)
        if "streams" in values:
            assert check_cycle(used.cycle(9, 2), declared=used.backend.begins_early).safe


@pytest.mark.parametrize("scope", SCOPES, ids=NAMES)
@pytest.mark.parametrize(
    ("preset", "quant", "more"),
    [("tiny-llama", "Q4_0", {"results": "direct"}), ("tiny-qwen3", "F16", {}),
     ("tiny-qwen3", "Q4_K", FUSED)],
)  # fmt: skip
def test_replayed_logits_are_the_eager_ones(engine, backend, preset, quant, more, scope):
    skip_where_refused(more, backend)
    tokens = tokens_for(preset, 100)
    shared = engine(preset, quant)
    base = Toggles(graph_reuse="set_rows", **more)
    with shared.variant(base) as eager:
        wanted = feed(eager, tokens)
    for rule in RULES:
        with shared.variant(replace(base, **rule, **scope)) as planned:
            assert np.array_equal(feed(planned, tokens), wanted), rule
            counters = planned.counters
        assert counters["plans_replayed"] > 20, counters
        made = [counters[f"plans_{how}"] for how in ("captured", "updated", "reinstantiated")]
        # a prompt with all outputs and with one, 8 tokens, one token: or one, behind a warm-up
        if rule == {"plans": "pr"}:  # a prompt and a token in turns: another topology
            assert counters["plans_reinstantiated"] >= 2, counters
        assert sum(made) >= (4 if rule in ({"plans": "ours"}, {"plans": "pr"}) else 1), (rule, made)


def test_every_safe_ordering_has_the_bits_of_one(engine):
    shared = engine("tiny-llama", "Q8_0", n_ctx=128, n_ubatch=8)
    safe, racing = is_the_same_under_every_ordering(shared, nll(shared), share=4)
    assert safe > racing > 0


@pytest.mark.parametrize("scope", SCOPES, ids=NAMES)
@pytest.mark.parametrize("reuse", ["patch_pointers", "pointer_table"])
def test_stores_that_move_with_every_token_are_followed(engine, reuse, scope):
    """Their nodes are set, or their table is written: what is captured stays. n_kv grows once."""
    tokens = tokens_for("tiny-llama", 300)
    shared = engine("tiny-llama", "Q4_0")
    with shared.variant(Toggles(graph_reuse="set_rows")) as eager:
        wanted = one_by_one(eager, tokens)
    with shared.variant(Toggles(graph_reuse=reuse, plans="ours", **scope)) as planned:
        assert np.array_equal(one_by_one(planned, tokens), wanted)
        counters, graphs = planned.counters, captured_of(planned)
    if reuse == "patch_pointers":
        assert counters["plans_updated"] >= 290, counters
        assert sum(g.nodes_set for g in graphs) >= 290 and not sum(g.recaptured for g in graphs)
    else:
        assert counters["plans_replayed"] >= 290 and counters["plans_updated"] <= 4, counters


def test_memory_that_grows_after_a_capture_is_followed(tiny_model):
    """Many outputs need memory that was not reserved: what was captured before is not replayed."""
    tokens = tokens_for("tiny-llama", 220)
    path = tiny_model("tiny-llama", "Q4_0")
    base = Toggles(graph_reuse="set_rows")

    def rows(used: wb.Engine) -> np.ndarray:
        first = one_by_one(used, tokens[:5])
        many = used.step(tokens[5:205], outputs="all")
        return np.concatenate([first, many, one_by_one(used, tokens[205:])])

    with wb.Engine.load(path, device="cuda", n_ctx=256, n_ubatch=256, toggles=base) as eager:
        wanted = rows(eager)
        for scope in SCOPES:
            with eager.variant(replace(base, plans="ours", **scope)) as planned:
                assert np.array_equal(rows(planned), wanted), scope


def test_a_destroyed_graph_is_told_and_the_engine_goes_on(engine):
    tokens = tokens_for("tiny-llama", 24)
    shared = engine("tiny-llama", "Q4_0")
    with shared.variant(Toggles(graph_reuse="set_rows")) as eager:
        wanted = one_by_one(eager, tokens)
    with shared.variant(Toggles(graph_reuse="set_rows", plans="ours", **FORKED)) as planned:
        rows = [one_by_one(planned, tokens[:12])]
        graphs = captured_of(planned)
        for graph in graphs:
            graph.destroy()
        told = 0
        for token in tokens[12:]:
            while told <= len(graphs):
                try:
                    rows.append(planned.step([token]).copy())
                    break
                except DeviceError as error:
                    told += 1
                    assert "was destroyed and cannot" in str(error)
        assert 1 <= told <= len(graphs)
        assert np.array_equal(np.concatenate(rows), wanted)


def test_products_of_cublas_are_captured_at_their_first_call(tiny_model):
    """A prompt of 600 tokens on a fresh backend, and its replay: no workspace is made in it."""
    tokens = tokens_for("tiny-llama", 600)
    path = tiny_model("tiny-llama", "F16")
    found = []
    for more in ({"plans": "ours", **STEP}, {}):
        toggles = Toggles(graph_reuse="set_rows", **more)
        with wb.Engine.load(path, device="cuda", n_ctx=1024, n_ubatch=600, toggles=toggles) as used:
            rows = []
            for _ in range(3):
                used.reset()
                rows.append(used.prefill(tokens))
            found.append(np.concatenate(rows))
            if more:
                plans: Any = used.issuer.plans
                works = [plan.work() for plan in plans]
                issued = [i for w in works for part in w.parts for i in commands_of(part)]
                assert [i for i in issued if i.same[:1] == (PRODUCT,)]
                assert used.counters["plans_replayed"] == 3
    assert np.array_equal(*found)


# edges -------------------------------------------------------------------------------------------


def test_a_captured_step_has_the_edges_of_its_branches(engine, programmatic):
    shared, made = engine("tiny-llama", "Q8_0"), dict[str, tuple[int, int, int]]()
    step = {"graph_reuse": "set_rows", "results": "direct", "pdl": "on", **OURS}
    for streams in ("1", "3"):
        with shared.variant(Toggles(**step, streams=streams)) as one:
            one_by_one(one, tokens_for("tiny-llama", 8))
            # a graph for each block that results land in, all alike
            (made[streams],) = {(len(g.nodes), *g.edges()) for g in captured_of(one)}
            n_layer = one.model.n_layer
    one, three = made["1"], made["3"]
    assert three[0] == one[0] and one[1] == one[0] - 1
    # Two branches more in each layer: an edge of each to the join. Behind the first layer each also
    # follows what its stream had there.
    assert three[1] == one[1] + 2 * n_layer + 2 * (n_layer - 1)
    assert 0 < three[2] < one[2]  # a launch behind a wait is not programmatic


# twins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("results", ["copy", "direct"])
@pytest.mark.parametrize(
    "scope", [STEP, FORKED, AHEAD, AHEAD | {"plan_end": "word"}],
    ids=["step", "forked", "ahead", "word"],
)  # fmt: skip
@pytest.mark.parametrize(("preset", "quant", "more"), [
    ("tiny-llama", "Q4_0", {}), ("tiny-qwen3", "Q4_K", FUSED),
])  # fmt: skip
def test_twins_give_the_eager_bits_and_those_of_captures(
    engine, backend, monkeypatch, preset, quant, more, scope, results
):
    skip_where_refused(more, backend)
    tokens = tokens_for(preset, 40)
    shared = engine(preset, quant)
    base = Toggles(graph_reuse="set_rows", results=results, **more)
    with shared.variant(base) as eager:
        wanted = one_by_one(eager, tokens)
    planned = replace(base, **({"plans": "ours"} | scope))
    with shared.variant(planned) as used:
        assert np.array_equal(one_by_one(used, tokens), wanted)
        counters = used.counters
        assert (counters["plans_captured"], counters["plans_twinned"]) == (1, 2), counters
        assert counters["plans_replayed"] == len(tokens) and not counters["plans_updated"]
        graphs = captured_of(used)
        assert len({id(g.template) for g in graphs}) == 1 and len(graphs) == 3
        assert len({g.edges() for g in graphs}) == 1
    # the slow twin: every block where results land is captured
    monkeypatch.setattr(CudaGraph, "twin", lambda self, work, changed: None)
    with shared.variant(planned) as slow:
        assert np.array_equal(one_by_one(slow, tokens), wanted)
        counters = slow.counters
        assert (counters["plans_captured"], counters["plans_twinned"]) == (3, 0), counters


@pytest.mark.alone
def test_fresh_engines_give_everything_back(engine):
    """Engines with plans and twins, some destroyed before and some with their engine."""
    shared = engine("tiny-llama", "Q4_0")
    toggles = Toggles(graph_reuse="set_rows", plans="ours", **STEP)
    device: Any = shared._loaded.backends[1]  # type: ignore[union-attr]
    free: list[int] = []
    for i in range(100):
        with shared.variant(toggles) as used:
            one_by_one(used, [1, 2, 3, 4])
            assert used.counters["plans_twinned"] == 2
            if i % 2:
                used.issuer.plans.clear()
                used.step([5])
        if i % 10 == 9:
            gc.collect()
            free.append(free_bytes(device))
            assert not [g for g in device._graphs if g._executable is not None]
    assert free[-1] >= free[0] - (4 << 20), free
