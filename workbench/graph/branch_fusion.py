"""Fusion or streams: whether fused nodes may have parts of several branches (toggle
`branch_fusion`).

Q, K and V as one launch leave nothing to run side by side. As branches they keep their streams, and
only nodes of one branch are joined. The costs of the ops tell which takes less time. One layer is
enough to tell, because all layers are alike.

Pure, as fuse.py and forks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import groupby

from workbench.config import BranchFusion
from workbench.graph.forks import COSTS, MOST_STREAMS, Costs, branch_of, estimate_us, fork
from workbench.graph.fuse import fuse
from workbench.graph.ir import Graph, Node

BackendOf = Callable[[Node], int]


def fused(
    graph: Graph,
    fusions: Collection[str],
    backend_of: BackendOf,
    choice: str,
    n_streams: int,
    rule: str,
    costs: Costs = COSTS,
) -> Graph:
    """`graph` with `fusions`, inside its branches or across them, as `choice` says.

    choice: a value of the toggle. `auto` is for several streams; with one stream an engine has
        `joined` (`engine/choose.py`).
    n_streams, rule: as `forks.fork` has them.

    `inside` fuses within the branches that the largest number of streams would have. So it means
    the same for every number of streams.
    """
    if not fusions:
        return graph
    inside = choice == BranchFusion.INSIDE
    if choice == BranchFusion.AUTO:
        inside = _gains(_a_layer(graph), fusions, backend_of, n_streams, rule, costs)
    if not inside:
        return fuse(graph, fusions, backend_of)
    return fuse(graph, fusions, backend_of, branch_numbers(graph, backend_of, rule, costs))


def branch_numbers(
    graph: Graph, backend_of: BackendOf, rule: str, costs: Costs = COSTS
) -> dict[Node, int]:
    """The branch of each node, by number. Neighbours on one backend have numbers of their own."""
    found: dict[Node, int] = {}
    for _, part in groupby(graph.nodes, backend_of):
        first = len(found)
        branches = branch_of(fork(list(part), MOST_STREAMS, rule, costs))
        found.update((node, first + number) for node, number in branches.items())
    return found


def _gains(
    graph: Graph,
    fusions: Collection[str],
    backend_of: BackendOf,
    n_streams: int,
    rule: str,
    costs: Costs,
) -> bool:
    """Whether fusion inside branches takes less time than across them."""
    numbers = branch_numbers(graph, backend_of, rule, costs)
    across, inside = (fuse(graph, fusions, backend_of, of) for of in (None, numbers))
    return _us(inside, n_streams, rule, costs) < _us(across, n_streams, rule, costs)


def _us(graph: Graph, n_streams: int, rule: str, costs: Costs) -> float:
    return estimate_us(fork(graph.nodes, n_streams, rule, costs), costs)


def _a_layer(graph: Graph) -> Graph:
    """The nodes of a layer in the middle."""
    layers = sorted({node.layer for node in graph.nodes if node.layer >= 0})
    one = layers[len(layers) // 2] if layers else -1
    nodes = [node for node in graph.nodes if node.layer == one]
    return Graph(nodes, graph.inputs, [], graph.shape)
