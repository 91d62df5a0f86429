"""Which backend computes a node, and how a graph is cut into splits where the backend changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from workbench.graph.forks import Branches, serial
from workbench.graph.ir import Graph, Kind, Node, Tensor
from workbench.program.commands import HOST


class Split(NamedTuple):
    """Consecutive nodes of one backend.

    inputs: host inputs and other backends' activations that these nodes read, in the order of first
        use. A tensor that an earlier split of the same backend was given is not listed again.
    forked: the nodes on several streams; None: all nodes are on one stream.
    """

    backend: int
    nodes: list[Node]
    inputs: list[Tensor]
    forked: Branches | None = None

    @property
    def branches(self) -> Branches:
        """The nodes on the streams that they run on."""
        return self.forked or serial(self.nodes)


def split(graph: Graph, backend_of: Callable[[Node], int]) -> list[Split]:
    """Cuts the graph where the backend changes, and lists each split's inputs."""
    splits: list[Split] = []
    made_by: dict[Tensor, int] = {}
    present: dict[int, set[Tensor]] = {}
    for node in graph.nodes:
        b = backend_of(node)
        if not splits or splits[-1].backend != b:
            splits.append(Split(b, [], []))
        current = splits[-1]
        here = present.setdefault(b, set())
        for t in node.inputs:
            s = t.storage
            foreign = s.kind == Kind.INPUT or made_by.get(s, b) != b
            if foreign and s not in here:
                here.add(s)
                current.inputs.append(s)
        current.nodes.append(node)
        made_by.update((t.storage, b) for t in node.outputs)
    return splits


def assign(nodes: Sequence[Node], fixed: Callable[[Node], int | None]) -> dict[Node, int]:
    """The backend of every node.

    fixed: the backend that a node's weight or cache ties the node to, if any. Other nodes take a
        neighbour's backend, as in ggml_backend_sched: devices spread first, down the graph and then
        up; then the host spreads.
    """
    found: list[int | None] = [fixed(node) for node in nodes]

    def spread(order: Iterable[int], takes: Callable[[int], bool]) -> None:
        current: int | None = None
        for i in order:
            if found[i] is not None:
                current = found[i]
            elif current is not None and takes(current):
                found[i] = current

    down, up = range(len(nodes)), range(len(nodes) - 1, -1, -1)
    for takes in (lambda b: b != HOST, lambda b: True):
        spread(down, takes)
        spread(up, takes)
    return {node: HOST if b is None else b for node, b in zip(nodes, found, strict=True)}
