"""What planning takes: forks, arena and fusion of a step.

Requirement: at most 80 ms on one core for a graph of 48 layers, with a router beside shared work in
each. No op of experts is in the table yet, so nodes that multiply and add stand in for them.
"""

from __future__ import annotations

import pytest

from tests.graphs import Decoder
from workbench.config import BranchFusion
from workbench.graph.arena import layout, visibility
from workbench.graph.branch_fusion import fused
from workbench.graph.forks import fork
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import Q4_0, Graph, Node
from workbench.graph.ops import make

N_LAYER, N_KV = 48, 512


def with_experts(graph: Graph) -> Graph:
    """Beside each feed-forward block a router, two experts that it weighs, and their sum."""
    nodes = list[Node]()
    for node in graph.nodes:
        nodes.append(node)
        if node.op == "mul" and node.name.startswith("ffn_norm"):
            x, i = node.output, node.layer
            router = make("mul", f"router-{i}", x, node.inputs[1], layer=i)
            experts = [make("mul", f"expert_{e}-{i}", x, router.output, layer=i) for e in range(2)]
            chosen = make("add", f"experts-{i}", *(e.output for e in experts), layer=i)
            nodes += [router, *experts, chosen]
    return Graph(nodes, graph.inputs, graph.outputs, graph.shape)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return with_experts(
        Decoder("llama-3-8b", Q4_0, n_layer=N_LAYER).graph(1, 1, N_KV, n_cells=N_KV)
    )


@pytest.mark.parametrize("fusions", [(), FUSIONS], ids=["unfused", "fused"])
@pytest.mark.parametrize(("n_streams", "rule"), [(1, "qkv"), (3, "qkv"), (8, "any")])
def test_planning(benchmark, graph, n_streams, rule, fusions):
    """To be at most 80 ms."""

    def planned():
        chosen = BranchFusion.AUTO
        joined = fused(graph, fusions, lambda node: 0, chosen, n_streams, rule)
        branches = fork(joined.nodes, n_streams, rule)
        seen = visibility(branches)
        layout(joined.nodes, joined.inputs, joined.outputs, lambda node: 0, visible=seen)
        return branches

    branches = benchmark(planned)
    assert len(graph.nodes) > 1100
    assert branches.n_streams == n_streams or rule == "any" or fusions


def test_forks_alone(benchmark, graph):
    """Of a graph that any branch may leave."""
    branches = benchmark(fork, graph.nodes, 8, "any")
    assert branches.n_streams > 3
