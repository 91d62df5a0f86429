"""What planning takes: forks, arena and fusion of a step.

Requirements, on one core, for a decode step of 48 layers: at most 80 ms in all, with a router
beside shared work in each layer (no op of experts is in the table yet, so nodes that multiply and
add stand in for them); the arena by visibility well under 25 ms, the clocks included.
"""

from __future__ import annotations

import pytest

from tests.graphs import Decoder
from workbench.config import BranchFusion
from workbench.graph.arena import layout
from workbench.graph.branch_fusion import fused
from workbench.graph.forks import fork
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import Q4_0, Graph, Node
from workbench.graph.lifetimes import lifetimes, overwritten
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
def plain() -> Graph:
    return Decoder("llama-3-8b", Q4_0, n_layer=N_LAYER).graph(1, 1, N_KV, n_cells=N_KV)


@pytest.fixture(scope="module")
def graph(plain) -> Graph:
    return with_experts(plain)


def laid_out(graph: Graph, branches):
    return layout(graph.nodes, graph.inputs, graph.outputs, lambda node: 0, visible=branches)


@pytest.mark.parametrize("fusions", [(), FUSIONS], ids=["unfused", "fused"])
@pytest.mark.parametrize(("n_streams", "rule"), [(1, "qkv"), (3, "qkv"), (8, "any")])
def test_planning(benchmark, graph, n_streams, rule, fusions):
    def planned():
        joined = fused(graph, fusions, lambda node: 0, BranchFusion.AUTO, n_streams, rule)
        branches = fork(joined.nodes, n_streams, rule)
        laid_out(joined, branches)
        return branches

    branches = benchmark(planned)
    assert len(graph.nodes) > 1100
    assert branches.n_streams == n_streams or rule == "any" or fusions


@pytest.mark.parametrize("n_streams", [1, 3, 8])
def test_layout_by_visibility(benchmark, plain, n_streams):
    branches = fork(plain.nodes, n_streams, "any")
    made = benchmark(laid_out, plain, branches)
    assert len(plain.nodes) > 900
    assert not overwritten(lifetimes(made, branches, plain.outputs), branches)


def test_forks_alone(benchmark, graph):
    """Of a graph that any branch may leave."""
    assert benchmark(fork, graph.nodes, 8, "any").n_streams > 3
