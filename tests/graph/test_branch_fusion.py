"""Fusion inside branches: every node once, and no launch for two branches. Which of the two kinds
of fusion takes less time, by the costs of the ops."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.test_fuse import ALL, MODELS, check_fused, check_memory, models
from tests.graphs import Decoder, topology_key
from tests.profiles import examples
from workbench.config import BranchFusion, Fork
from workbench.graph.branch_fusion import branch_numbers, fused
from workbench.graph.forks import COSTS, Costs, dependencies, estimate_us, fork
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import BF16, F16, Q4_0, Graph, Node

RULES = [str(rule) for rule in Fork]
JOINED, INSIDE, AUTO = BranchFusion.JOINED, BranchFusion.INSIDE, BranchFusion.AUTO
HEADS = ("rope_set_rows", "norm_rope")

magnitudes = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
some_costs = st.builds(
    Costs, magnitudes.map(lambda x: 1e4 * x), magnitudes.map(lambda x: 1e6 * x), magnitudes,
    magnitudes,
)  # fmt: skip


def on_one(node: Node) -> int:
    return 0


def check_inside(graph: Graph, after: Graph, number: Mapping[Node, int]) -> None:
    """`after` computes what `graph` does, and no node of it stands in two branches. Each part of
    heads reads the result of the one before it, and K's cache takes only K's."""
    check_fused(graph, after)
    check_memory(after)
    for node in after.nodes:
        assert len({number[part] for part in node.parts or (node,)}) == 1, node
        for before, part in itertools.pairwise(node.parts if node.op in HEADS else ()):
            assert before.output.storage in {t.storage for t in part.inputs}, node
            if part.op == "set_rows":
                assert part.name.startswith("cache_k") and before.name.startswith("K"), node


@given(
    models, st.integers(1, 12), st.integers(0, 2), st.sampled_from(["q8", "float"]), st.booleans(),
    st.sets(st.sampled_from(FUSIONS), min_size=1), st.sampled_from(RULES) | st.floats(0, 1),
    some_costs, st.integers(0, 2**32 - 1).map(Random),
)  # fmt: skip
@settings(max_examples=examples(350))
def test_no_node_has_parts_of_two_branches(
    model, n_tokens, outputs, activations, deferred, fusions, how, costs, rng
):
    """Whatever the costs make of the branches: V may come after Q on one stream. Any growing
    numbers will do: the largest of what a node needs, or, as often as `how` says, one more."""
    graph = model.graph(n_tokens, min(outputs, n_tokens), 64, activations, deferred=deferred)
    number: dict[Node, int] = {}
    if isinstance(how, str):
        number = branch_numbers(graph, on_one, how, costs)
    for node, needed in zip(graph.nodes, dependencies(graph.nodes), strict=True):
        least = max((number[graph.nodes[i]] for i in needed), default=0)
        number.setdefault(node, least + (isinstance(how, float) and rng.random() < how))
    check_inside(graph, fuse(graph, fusions, branch_of=number), number)


@given(models, st.sets(st.sampled_from(FUSIONS), min_size=1), st.sampled_from(RULES), st.data())
@settings(max_examples=examples(60))
def test_branches_of_two_backends_stay_apart(model, fusions, rule, data):
    graph = model.graph()
    first = data.draw(st.integers(0, len(graph.nodes)))
    backend = {node: int(i >= first) for i, node in enumerate(graph.nodes)}
    for choice in BranchFusion:
        after = fused(graph, fusions, backend.__getitem__, choice, 3, rule)
        check_fused(graph, after)
        for node in after.nodes:
            assert len({backend[part] for part in node.parts or (node,)}) == 1


def of_a_layer(model: str, rule: str, fusions=ALL, **step) -> dict[str, list[str]]:
    """Ops of a layer fused inside branches, with those of their parts where heads are in them."""
    graph = fused(MODELS[model]().graph(**step), set(fusions), on_one, INSIDE, 1, rule)
    return {
        node.name: [node.op, *(part.op for part in node.parts if node.op in HEADS)]
        for node in graph.nodes
        if node.layer == 1 and node.name[:4] in ("Qcur", "Kcur", "Vcur", "cach")
    }


@pytest.mark.parametrize("rule", RULES)
def test_a_layer_with_every_pattern_inside_branches(rule):
    normed = ["rms_norm", "mul", "rope"]
    plain = {
        "Qcur-1": ["mul_mat"], "Qcur_rope-1": ["rope"], "Kcur-1": ["mul_mat"],
        "cache_k-1": ["rope_set_rows", "rope", "set_rows"],
        "Vcur-1": ["mul_mat"], "cache_v-1": ["set_rows"],
    }  # fmt: skip
    heads = {"Qcur_rope-1": ["norm_rope", *normed],
             "cache_k-1": ["rope_set_rows", *normed, "set_rows"]}  # fmt: skip
    products = {name: ["product"] for name in ("Qcur-1", "Kcur-1", "Vcur-1")}
    assert of_a_layer("llama", rule) == plain
    assert of_a_layer("llama bias", rule) == plain | products
    assert of_a_layer("qwen3", rule) == plain | heads
    if rule != Fork.THREE_WAY:  # its fork is the residual then: two halves and an add read it
        assert of_a_layer("qwen3", rule, deferred=True) == plain | heads | products
    mixed = ALL - {"fuse_norm_mul"}  # heads are normed apart, and K is still stored with its rope
    assert of_a_layer("qwen3", rule, mixed)["cache_k-1"] == plain["cache_k-1"]


def test_neighbours_by_chance_are_not_joined():
    """The rope of Q and the store of V are neighbours; a launch of both would store Q as V."""
    graph = MODELS["llama"]().graph()
    number = dict.fromkeys(graph.nodes, 2)
    for node in graph.nodes:
        if node.layer == 0:
            amid = node.name in ("Qcur_rope-0", "cache_v-0")
            before = node.name.startswith(("attn_norm", "Vcur-"))
            product = node.name.startswith(("Qcur-", "Kcur", "cache_k"))
            number[node] = 1 if amid else 0 if before or product else 2
        elif node.layer < 0 and node.op == "get_rows":
            number[node] = 0
    after = fuse(graph, {"fuse_rope_store"}, branch_of=number)
    check_inside(graph, after, number)
    at = [node.name for node in after.nodes]
    assert at.index("cache_v-0") == at.index("Qcur_rope-0") + 1


SHAPES = {
    "llama-3-8b Q4_0": lambda n: Decoder("llama-3-8b", Q4_0, n_layer=n),
    "qwen3-8b F16": lambda n: Decoder("qwen3-8b", F16, n_layer=n),
    "llama-3.2-1b BF16": lambda n: Decoder("llama-3.2-1b", BF16, n_layer=n),
}
SLOW_EVENTS = COSTS._replace(event_us=50.0)


def auto(graph: Graph, fusions: Iterable[str], rule: str, costs: Costs = COSTS) -> str:
    """Which of the two kinds `auto` takes with three streams."""
    keys = {
        choice: topology_key(fused(graph, set(fusions), on_one, choice, 3, rule, costs))
        for choice in BranchFusion
    }
    assert keys[JOINED] != keys[INSIDE]
    return INSIDE if keys[AUTO] == keys[INSIDE] else JOINED


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_costs_choose(shape, rule):
    """All of Q, K, V, rope and stores as one launch beat three streams. Q + K + V alone do not: the
    streams that they take away would have had rope and stores side by side, too."""
    graph = SHAPES[shape](2).graph(1, 1, 512, n_cells=1024)
    assert auto(graph, ALL, rule) == JOINED
    assert auto(graph, {"fuse_qkv"}, rule) == INSIDE
    if rule != Fork.ANY:  # which forks nowhere where events take so long
        assert auto(graph, {"fuse_qkv"}, rule, SLOW_EVENTS) == JOINED


@pytest.mark.parametrize("fusions", [ALL, {"fuse_qkv"}])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_tells_for_the_whole_graph(shape, rule, fusions):
    """Its slow twin asks all of a graph of eight layers. Where they disagree it does not matter."""
    graph = SHAPES[shape](8).graph(1, 1, 512, n_cells=1024)

    def us(choice: str) -> float:
        after = fused(graph, fusions, on_one, choice, 3, rule)
        return estimate_us(fork(after.nodes, 3, rule))

    least, most = sorted([us(JOINED), us(INSIDE)])
    assert us(AUTO) == least or most / least < 1.001
