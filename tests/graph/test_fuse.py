"""Fusion: every node once, in an order that dataflow allows, with honest outputs and ranges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import PRODUCTS, Decoder
from tests.profiles import examples
from workbench.backend.issue.args import parts_addresses, parts_scratch_bytes
from workbench.graph import ir, ops
from workbench.graph.arena import layout
from workbench.graph.forks import serial
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import (
    F16,
    F32,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    Graph,
    Kind,
    Node,
    StepShape,
    Tensor,
)
from workbench.graph.lifetimes import lifetimes, overwritten
from workbench.model.decoder import build_graph

ALL = frozenset(FUSIONS)
MODELS = {
    "llama": lambda: Decoder("tiny-llama", Q8_0),
    "llama bias": lambda: Decoder("tiny-llama-bias", Q4_0, biases=("ffn_gate", "ffn_down")),
    "qwen3": lambda: Decoder("tiny-qwen3", Q4_K),
    "qwen3 F16": lambda: Decoder("tiny-qwen3", F16),
    "mixed K quants": lambda: Decoder("tiny-llama", Q4_K, {"attn_v": Q6_K, "ffn_down": Q6_K}),
}


def covers(declared: Iterable[ops.Access], wanted: ops.Access) -> bool:
    tensor, begin, nbytes = wanted
    return any(t is tensor and at <= begin and begin + nbytes <= at + n for t, at, n in declared)


def in_order(nodes: list[Node]) -> set[tuple[Node, Node]]:
    """(before, after) wherever two nodes touch the same tensor and one of them writes it."""
    found: set[tuple[Node, Node]] = set()
    writer: dict[Tensor, Node] = {}
    readers: dict[Tensor, list[Node]] = {}
    for node in nodes:
        read = {t for t, _, _ in ops.reads(node)}
        written = {t for t, _, _ in ops.writes(node)}
        found |= {(writer[t], node) for t in read | written if t in writer}
        found |= {(r, node) for t in written for r in readers.get(t, ())}
        for t in read:
            readers.setdefault(t, []).append(node)
        writer |= dict.fromkeys(written, node)
    return found


def check_fused(before: Graph, after: Graph) -> None:
    """Everything but the number of launches."""
    order = [part for node in after.nodes for part in node.parts or (node,)]
    assert len(order) == len(before.nodes) and set(order) == set(before.nodes)
    number = {node: i for i, node in enumerate(order)}
    for first, second in in_order(before.nodes):
        assert number[first] < number[second], (first, second)
    assert (after.inputs, after.outputs, after.shape) == (
        before.inputs, before.outputs, before.shape,
    )  # fmt: skip
    made: set[Tensor] = set()
    for node in after.nodes:
        for t in node.inputs:
            assert t.storage in made or t.kind in (Kind.WEIGHT, Kind.CACHE, Kind.INPUT), (node, t)
        if node.parts:
            check_node(node, after)
        else:
            assert node in before.nodes
        made |= {t.storage for t in node.outputs}
    assert sum(map(ops.flops, after.nodes)) == sum(map(ops.flops, before.nodes))


def check_node(node: Node, graph: Graph) -> None:
    """Outputs are what is read outside; ranges are the parts', less what stays inside."""
    assert len(node.parts) > 1 and not node.params
    elsewhere = {t.storage for n in graph.nodes if n is not node for t in n.inputs}
    made = {part.output.storage: part.output for part in node.parts}
    shared = [t for t in made if t.kind != Kind.ACTIVATION or t in elsewhere or t in graph.outputs]
    shared = shared or [*made][-1:]  # nobody reads it: the last result is an output
    assert [t.storage for t in node.outputs] == shared and node.output is node.outputs[0]
    assert ops.interior(node) == [t for t in made if t not in shared]
    inputs = {t.storage for t in node.inputs}
    assert len(inputs) == len(node.inputs)
    reads, writes = ops.reads(node), ops.writes(node)
    assert {t for t, _, _ in reads} <= inputs and {t for t, _, _ in writes} == set(shared)
    inside: set[Tensor] = set()
    for part in node.parts:
        for access in ops.reads(part):
            assert access[0] in inside or covers(reads, access), (node, access)
        for access in ops.writes(part):
            assert access[0] not in shared or covers(writes, access), (node, access)
        inside.add(part.output.storage)
    own = (a for part in node.parts for a in (*ops.reads(part), *ops.writes(part)))
    assert {*reads, *writes} <= set(own)  # and nothing is declared that no part touches
    assert ops.touched_bytes(node) < sum(map(ops.touched_bytes, node.parts))


def check_memory(graph: Graph) -> None:
    """No live tensors overlap in the arena, nor do interior tensors in their node's scratch."""

    def scratch(node: Node) -> int:
        return parts_scratch_bytes(node, lambda part: 40) if node.parts else 0

    found = layout(graph.nodes, graph.inputs, graph.outputs, scratch)
    in_turn = serial(graph.nodes)
    assert not overwritten(lifetimes(found, in_turn, graph.outputs), in_turn)
    for node in graph.nodes:
        if node.parts:
            outside = {t.storage: -1 for t in (*node.inputs, *node.outputs)}
            at, own = parts_addresses(node, lambda t, of=outside: of[t.storage], 1 << 20)
            spans = [(at(t), at(t) + t.nbytes) for t in ops.interior(node)]
            ends = [1 << 20, *(end for _, end in spans)]
            assert all(begin >= end for (begin, _), end in zip(spans, ends, strict=False))
            assert own >= max(ends) and own - (1 << 20) == ops.interior_bytes(node)
            for part in node.parts:
                for t in (*part.inputs, part.output):
                    assert (at(t) < 0) == (t.storage in outside)


TYPES = st.sampled_from(ir.WEIGHT_DTYPES)


models = st.builds(
    Decoder, st.sampled_from(["tiny-llama", "tiny-qwen3", "tiny-llama-bias"]), TYPES,
    st.dictionaries(st.sampled_from(PRODUCTS), TYPES), st.sets(st.sampled_from(PRODUCTS)),
    n_layer=st.integers(1, 3),
)  # fmt: skip


@given(
    models, st.integers(1, 40), st.integers(0, 3), st.sampled_from(["q8", "float"]),
    st.sets(st.sampled_from(FUSIONS)) | st.just(ALL), st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(400))
def test_any_choice_of_patterns_keeps_the_meaning(
    model, n_tokens, outputs, activations, fusions, deferred
):
    graph = model.graph(
        n_tokens, min(outputs, n_tokens), activations=activations, deferred=deferred
    )
    fused = fuse(graph, fusions)
    assert len(fused.nodes) <= len(graph.nodes)
    check_fused(graph, fused)
    check_memory(fused)


# Nodes of a layer with none of the patterns, what each of them alone takes away, and what is left
# with all of them.
LAYERS = {
    #                 none norm  norm  add   bias qkv rope  glu epilogue product all
    #                      mul   quant norm           store     quant    norm
    "llama":          (23, 2,    2,    2,    0,   2,  3,    2,  2,       0,      7),
    "llama bias":     (29, 2,    2,    2,    6,   2,  3,    0,  2,       0,      7),
    "mixed K quants": (23, 2,    2,    2,    0,   2,  3,    2,  2,       0,      7),
    "qwen3":          (27, 4,    2,    2,    0,   2,  3,    2,  2,       0,      7),
    "qwen3 F16":      (23, 4,    0,    2,    0,   2,  3,    2,  0,       0,      7),
}  # fmt: skip


def launches(model: str, fusions: Iterable[str]) -> int:
    """How many nodes one more layer adds."""
    few, many = MODELS[model](), MODELS[model]()
    many.layers = few.layers[:1] * 3
    few.layers = few.layers[:1] * 2
    for made in (few, many):
        made.hparams = dataclasses.replace(made.hparams, n_layer=len(made.layers))
    return len(fuse(many.graph(), fusions).nodes) - len(fuse(few.graph(), fusions).nodes)


@pytest.mark.parametrize("model", LAYERS)
def test_launches_per_layer(model: str):
    none, *saved, every = LAYERS[model]
    assert launches(model, ()) == none and launches(model, FUSIONS) == every
    assert [none - launches(model, [name]) for name in FUSIONS] == saved


def test_gate_and_up_of_two_types_stay_apart():
    graph = Decoder("tiny-llama", Q8_0, {"ffn_up": Q4_0}).graph()
    assert "glu" not in {node.op for node in fuse(graph, ALL).nodes}
    assert fuse(graph, ()) is graph


def test_ropes_are_fused_with_stores_into_f16_alone():
    model: Any = Decoder("tiny-llama", Q8_0)
    for dtype, fused in ((F16, True), (Q8_0, False)):
        caches = [(k, Tensor(v.name, dtype, v.shape, v.kind)) for k, v in model.caches(96)]
        graph = build_graph(model, StepShape(1, 1, 64), caches)
        for fusions, op in ((ALL, "qkv_rope_store"), (["fuse_rope_store"], "rope_store")):
            assert (op in {node.op for node in fuse(graph, fusions).nodes}) == fused


def test_inner_results_are_each_aligned_in_scratch():
    x, y = (Tensor(name, F32, (1, 40), Kind.INPUT) for name in "xy")
    total = ops.make("add", "total", x, y)
    norm = ops.make("rms_norm", "norm", total.output, eps=1e-5)
    scaled = ops.make("mul", "scaled", norm.output, Tensor("w", F32, (40,), Kind.WEIGHT))
    graph = Graph([total, norm, scaled], [x, y], [scaled.output], StepShape(1, 1, 0))
    (node,) = (fused := fuse(graph, ALL)).nodes
    assert ops.interior_bytes(node) == 2 * ir.ALIGN > 2 * x.nbytes
    check_memory(fused)
