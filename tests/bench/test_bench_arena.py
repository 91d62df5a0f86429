"""What the arena by visibility takes of planning.

Requirement: well under 25 ms for a graph of 48 layers on up to eight streams, on one core. Forks,
arena and fusion together have 80 ms (`test_bench_forks.py`).
"""

from __future__ import annotations

import pytest

from tests.graphs import Decoder
from workbench.graph.arena import layout, visibility
from workbench.graph.forks import fork
from workbench.graph.ir import Q4_0
from workbench.graph.lifetimes import lifetimes, overwritten

N_KV = 512


@pytest.fixture(scope="module")
def graph():
    """A decode step of 48 layers like llama-3-8b's, unfused."""
    return Decoder("llama-3-8b", Q4_0, n_layer=48).graph(1, 1, N_KV, n_cells=N_KV)


@pytest.mark.parametrize("n_streams", [1, 3, 8])
def test_layout_by_visibility(benchmark, graph, n_streams):
    """To be under 25 ms, the clocks included."""
    branches = fork(graph.nodes, n_streams, "any")

    def laid_out():
        seen = visibility(branches)
        return layout(graph.nodes, graph.inputs, graph.outputs, lambda node: 0, visible=seen)

    made = benchmark(laid_out)
    assert len(graph.nodes) > 900
    assert not overwritten(lifetimes(made, branches, graph.outputs), branches)
