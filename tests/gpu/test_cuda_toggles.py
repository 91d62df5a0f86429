"""Toggles on the GPU: every value, and values together, give the answers of the engine without
them; and what plans and gates do for it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.contract.toggle_cases import Case, cases
from tests.gpu.harness import one_by_one, skip_where_refused, tokens_for
from tests.late_host import LATE, never_passed  # noqa: F401 - of every test
from tests.nll import is_the_same_under_every_ordering, nll
from tests.reference import nmse
from workbench.backend.cuda.device.graph_nodes import commands_of
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.cuda.kernels.cublas import PRODUCT
from workbench.backend.plan import gate
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import DeviceError, UsageError
from workbench.config import EXACT, Toggles
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import COMPUTE_STREAM, Space

pytestmark = pytest.mark.gpu

Values = dict[str, str]
STEP: Values = {"plan_scope": "step", "sync": "implicit"}
FORKED: Values = {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"}
SCOPES: dict[str, Values] = {"split": {"plan_scope": "split"}, "step": STEP, "forked": FORKED}
OURS = {"plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute"}
AHEAD = OURS | {"launch_ahead": "on"}
GATED = {"graph_reuse": "set_rows"} | OURS
FUSED = {"fuse": "on", "activations": "q8", "pdl": "on"}
# streams and what goes with them; within one stream fused nodes are the same ones
STREAMS: dict[str, Values] = {
    "any, halved norms": {"streams": "4", "fork": "any", "defer_norm": "on"},
    "copies on their own": {"streams": "3", "sync": "event_guarded", "copy_stream": "own"},
    "a plan for each split": {"streams": "3", "plans": "ours", "plan_scope": "split", "pdl": "on"},
    "a plan for the step": {"streams": "8", "fork": "any", "results": "direct", **OURS},
    "launched ahead": {"streams": "3", "plan_end": "word", "pdl": "on", **AHEAD},
}
WAYS: dict[str, Values] = {
    **{f"{reuse}, {name}": {"graph_reuse": reuse, "plans": "ours", **scope}
       for reuse in ("rebuild", "patch_pointers", "pointer_table")
       for name, scope in SCOPES.items()},
    **{f"{reuse} alone": {"graph_reuse": reuse, "pdl": "on"}
       for reuse in ("rebuild", "patch_pointers", "pointer_table")},
    **{f"{' '.join(rule.values())}, {name}": {**rule, **scope, **more}
       for rule in ({"plans": "ours"}, {"plans": "ours", "plan_warmup": "2"}, {"plans": "today"},
                    {"plans": "pr"})
       for (name, scope), more in zip(SCOPES.items(), ({"results": "direct"}, {}, FUSED),
                                      strict=True)},
    "a ring": {"host_source": "pinned_ring_2", "step_wait": "outputs", **AHEAD},
    "everything fused": FUSED | {"defer_norm": "on"} | AHEAD,
    "stores by pointer": {"streams": "3", "graph_reuse": "patch_pointers"},
    **STREAMS,
    **{f"{name}, inside": values | {"fuse": "on", "branch_fusion": "inside"}
       for name, values in STREAMS.items()},
}  # fmt: skip
# what changes roundings, so that the other side has it, too: fork names the branches that are fused
ROUNDING = ("defer_norm", "fuse", "branch_fusion", "fork", "activations")
MODELS = [("tiny-llama", "Q4_0"), ("tiny-qwen3", "F16"), ("tiny-qwen3", "Q4_K")]


def captured_of(used: wb.Engine) -> list[CudaGraph]:
    plans: Any = used.issuer.plans
    return [plan.captured for plan in plans if plan.captured is not None]


def feed(used: wb.Engine, tokens: Sequence[int], late: float = 0.0) -> np.ndarray:
    """A prompt of 40 tokens (cuBLAS multiplies), 8 tokens, and single ones, twice as if it were
    anew. late: for how many of the single ones the host is late."""
    rows, chance = [], random.Random(3)
    for _ in range(2):
        used.reset()
        rows.append(used.prefill(tokens[:40], outputs="all").copy())
        rows.append(used.step(tokens[40:48], outputs="all").copy())
        rows.append(used.prefill(tokens[48:88]).copy())  # the first one's shape, other outputs
        for token in tokens[88:]:
            if chance.random() < late:
                time.sleep(LATE * chance.random())
            rows.append(used.step([token]).copy())
    return np.concatenate(rows)


def answers(used: wb.Engine, tokens: Sequence[int]) -> np.ndarray:
    """And steps of several sequences, with cells copied, removed and shifted."""
    rows = [feed(used, tokens)]
    rows += used.submit([(1, tokens[34:39], "all"), (2, tokens[39:40], "last")]).each()
    used.cache.remove(0)
    used.cache.copy(1, 0)
    used.cache.remove(0, 3)
    used.cache.remove(1, 1, 3)
    used.cache.shift(1, -2, 3)
    rows += used.submit([(s, [tokens[40 + s]], "last") for s in (2, 0, 1)]).each()
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def known() -> dict[tuple, np.ndarray]:
    """Answers that were asked for."""
    return {}


@pytest.mark.parametrize(("preset", "quant"), [("tiny-llama", "Q8_0"), ("tiny-qwen3", "F16")])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_value_answers_as_without_it(engine, known, preset, quant, case: Case):
    tokens, shared = tokens_for(preset, 100), engine(preset, quant, n_seqs=3)
    if case.lacks(shared.backend.capabilities) or case.name == "lifetimes":  # which race
        with pytest.raises((DeviceError, UsageError)):
            shared.variant(case.toggles)
        return
    key = preset, quant, case.without
    if key not in known:
        with shared.variant(case.without) as plain:
            known[key] = answers(plain, tokens)
    with shared.variant(case.toggles) as used:
        found = answers(used, tokens)
    kind = case.answer_of(case.without)
    assert kind != EXACT or np.array_equal(found, known[key])
    answer = compare_logits(known[key], found, kind)
    assert answer.holds, str(answer)


# NMSE of logits: what a cache of a type adds to one of halves, and what products of many tokens and
# rounding to halves by tensor cores add
OF_CACHE, PRODUCTS = {"f16": 0.0, "f32": 4e-7, "bf16": 2e-5, "q8_0": 2e-4}, 4e-6
CACHES = [("f32", "f32"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "bf16"), ("f16", "q8_0")]


@pytest.mark.parametrize("cache", ["unified", "per_sequence"])
@pytest.mark.parametrize(("k", "v"), CACHES)
def test_caches_of_every_type_answer_alike(engine, k, v, cache):
    tokens, rows = tokens_for("tiny-qwen3", 100), []
    for types in (("f16", "f16"), (k, v)):
        kinds = dict(zip(("cache_type_k", "cache_type_v"), types, strict=True))
        shared = engine("tiny-qwen3", "F32", n_seqs=3, **kinds)
        with shared.variant(Toggles(kv_cache=cache, graph_reuse="set_rows")) as used:
            rows.append(answers(used, tokens))
    assert nmse(rows[1], rows[0]) <= OF_CACHE[k] + OF_CACHE[v] + PRODUCTS


@pytest.mark.parametrize(("preset", "quant"), MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_values_together_give_the_bits_without_them(engine, backend, preset, quant, way):
    values = {"graph_reuse": "set_rows"} | WAYS[way]
    skip_where_refused(values, backend)
    tokens, shared = tokens_for(preset, 100), engine(preset, quant)
    kept = {name: value for name, value in values.items() if name in ROUNDING}
    with shared.variant(Toggles(graph_reuse=values["graph_reuse"], **kept)) as plain:
        wanted = feed(plain, tokens)
    with shared.variant(Toggles(**values)) as used:
        assert np.array_equal(feed(used, tokens), wanted)
        replays = "plans" in values and values["graph_reuse"] == "set_rows"
        assert not replays or used.counters["plans_replayed"] > 20, used.counters
        if "streams" in values:
            assert check_cycle(used.cycle(9, 2), declared=used.backend.begins_early).safe


def test_every_safe_ordering_has_the_bits_of_one(engine):
    shared = engine("tiny-llama", "Q8_0", n_ctx=128, n_ubatch=8)
    safe, racing = is_the_same_under_every_ordering(shared, nll(shared), share=4)
    assert safe > racing > 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("reuse", ["patch_pointers", "pointer_table"])
def test_stores_that_move_with_every_token_are_followed(engine, reuse, scope):
    """Their nodes are set, or their table is written: what is captured stays. n_kv grows once."""
    tokens, shared = tokens_for("tiny-llama", 300), engine("tiny-llama", "Q4_0")
    with shared.variant(Toggles(graph_reuse="set_rows")) as eager:
        wanted = one_by_one(eager, tokens)
    with shared.variant(Toggles(graph_reuse=reuse, plans="ours", **SCOPES[scope])) as planned:
        assert np.array_equal(one_by_one(planned, tokens), wanted)
        counters, graphs = planned.counters, captured_of(planned)
    if reuse == "patch_pointers":
        assert counters["plans_updated"] >= 290, counters
        assert sum(g.nodes_set for g in graphs) >= 290 and not sum(g.recaptured for g in graphs)
    else:
        assert counters["plans_replayed"] >= 290 and counters["plans_updated"] <= 4, counters


def test_products_of_cublas_are_captured_at_their_first_call(tiny_model):
    """A prompt of 600 tokens on a fresh backend, and its replay: no workspace is made in it."""
    tokens, path = tokens_for("tiny-llama", 600), tiny_model("tiny-llama", "F16")
    found = []
    for more in ({"plans": "ours", **STEP}, {}):
        toggles = Toggles(graph_reuse="set_rows", **more)
        with wb.Engine.load(path, device="cuda", n_ctx=1024, n_ubatch=600, toggles=toggles) as used:
            for _ in range(3):
                used.reset()
                found.append(used.prefill(tokens).copy())
            if more:
                plans: Any = used.issuer.plans
                parts = [part for plan in plans for part in plan.work().parts]
                issued = [i for part in parts for i in commands_of(part)]
                assert [i for i in issued if i.same[:1] == (PRODUCT,)]
                assert used.counters["plans_replayed"] == 3
    assert all(np.array_equal(rows, found[0]) for rows in found)


def test_a_captured_step_has_the_edges_of_its_branches(engine, backend):
    shared, made = engine("tiny-llama", "Q8_0"), dict[str, tuple[int, int, int]]()
    step = {"graph_reuse": "set_rows", "results": "direct", "pdl": "on", **OURS}
    skip_where_refused(step, backend)
    for streams in ("1", "3"):
        with shared.variant(Toggles(**step, streams=streams)) as one:
            one_by_one(one, tokens_for("tiny-llama", 8))
            # a graph for each block that results land in, all alike
            (made[streams],) = {(len(g.nodes), *g.edges()) for g in captured_of(one)}
            n_layer = one.model.n_layer
    one, three = made["1"], made["3"]
    assert three[0] == one[0] and one[1] == one[0] - 1
    # two branches more in each layer, each with an edge to the join, and behind the first layer one
    # to what its stream had there
    assert three[1] == one[1] + 2 * n_layer + 2 * (n_layer - 1)
    assert 0 < three[2] < one[2]  # a launch behind a wait is not programmatic


@pytest.mark.parametrize("scope", [STEP, FORKED, AHEAD | {"plan_end": "word"}])
def test_twins_are_made_in_place_of_captures(engine, monkeypatch, scope):
    tokens, shared = tokens_for("tiny-llama", 40), engine("tiny-llama", "Q4_0")
    planned = Toggles(**{"graph_reuse": "set_rows", "plans": "ours", "results": "direct"} | scope)
    with shared.variant(planned) as used:
        found, counters, graphs = one_by_one(used, tokens), used.counters, captured_of(used)
        assert (counters["plans_captured"], counters["plans_twinned"]) == (1, 2), counters
        assert counters["plans_replayed"] == len(tokens) and not counters["plans_updated"]
        assert len({(id(g.template), g.edges()) for g in graphs}) == 1 and len(graphs) == 3
    # the slow twin: every block where results land is captured
    monkeypatch.setattr(CudaGraph, "twin", lambda self, work, changed: None)
    with shared.variant(planned) as slow:
        assert np.array_equal(one_by_one(slow, tokens), found)
        counters = slow.counters
        assert (counters["plans_captured"], counters["plans_twinned"]) == (3, 0), counters


class Gate(AbstractContextManager["Gate"]):
    """A gate's control block, and memory on both sides of its copy."""

    def __init__(self, backend: Any, nbytes: int, limit_ns: int = 1_000_000_000):
        room = -(-nbytes // 16) * 16
        pinned = [backend.allocate(n, Space.PINNED) for n in (gate.CONTROL_BYTES, room, room)]
        self.memory = [*pinned, backend.allocate(room, Space.DEVICE)]
        control, source, back, there = (memory.address for memory in self.memory)
        self.words = pinned[0].array.view(np.int64)
        self.source, self.back = (memory.array[:nbytes] for memory in pinned[1:])
        stream = COMPUTE_STREAM
        self.copy = backend.gate_copy(there, source, nbytes, control, limit_ns, stream)
        self.bring = backend.copy(back, there, nbytes, stream, to_host=True)
        self.sync = backend.sync_stream(stream)

    def open(self, number: int) -> None:
        self.words[gate.OPENED // 8] = number

    def cancel(self, number: int) -> None:
        self.words[gate.CANCELLED // 8] |= 1 << number % gate.N_CANCELLED

    def came(self, number: int) -> tuple[int, np.ndarray]:
        """How gate `number`, the last, went, and what has been copied."""
        self.bring()
        self.sync()
        assert self.words[gate.RAN // 8] == number
        return int(self.words[gate.WENT // 8 + number % gate.N_WENT]), self.back

    def __exit__(self, *error: object) -> None:
        for memory in self.memory:
            memory.free()


@pytest.mark.alone
@pytest.mark.parametrize("nbytes", [1, 16, 100, 4096, 65536 - 16, 65536 + 20, gate.MOST_BYTES])
def test_a_gate_copies_what_is_there_when_it_opens(backend, nbytes):
    """Every byte, of what was written before or while the gate was closed."""
    with Gate(backend, nbytes) as one:
        for number in range(1, 20):
            wanted = np.random.default_rng(number).integers(0, 256, nbytes).astype(np.uint8)
            late = number % 2
            if late:
                one.copy()
                time.sleep(random.Random(number).random() / 1000)
            one.source[:] = wanted
            one.open(number)
            if not late:
                one.copy()
            went, found = one.came(number)
            assert went == number and np.array_equal(found, wanted)


@pytest.mark.alone
def test_a_closed_gate_copies_nothing(backend):
    """At its limit, or cancelled, before or after it is reached."""
    with Gate(backend, 256, 20_000_000) as one:
        for number, content, opened, found in (
            (1, 1, 1, 1), (2, 2, 1, 1), (3, 2, 1, 1), (4, 2, 4, 2), (5, 3, 6, 2), (6, 3, 6, 3),
        ):  # fmt: skip
            one.source[:] = content
            if number == 5:  # the host has gone on: the fifth stays cancelled
                one.cancel(5)
            one.open(opened)
            one.copy()
            if number == 3:
                one.cancel(3)
            went, there = one.came(number)
            assert (there == found).all(), number
            assert went == (-number if number in (2, 3, 5) else number)


LATE_ONES = [
    ("tiny-llama", "Q4_0", {}), ("tiny-qwen3", "F16", {"results": "direct"}),
    ("tiny-llama", "Q4_0", {"graph_reuse": "pointer_table", "plans": "today"}),
    ("tiny-llama", "Q8_0", {"plan_end": "word", "results": "direct", "fuse": "on"}),
]  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize(("preset", "quant", "more"), LATE_ONES)
def test_a_late_host_changes_no_bit(engine, preset, quant, more):
    tokens, shared = tokens_for(preset, 150), engine(preset, quant)
    with shared.variant(Toggles(**GATED | more | {"plan_end": "event"})) as plain:
        wanted = feed(plain, tokens)
    with shared.variant(Toggles(**GATED | more, launch_ahead="on")) as ahead:
        for late in (0.0, 0.3):
            assert np.array_equal(feed(ahead, tokens, late=late), wanted), late
        counters = ahead.counters
        assert counters["plans_ahead"] > 60 and counters["plans_ahead_missed"] > 0, counters
