"""Splits: consecutive nodes on one backend, and the tensors each must be given from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.graph.ir import Graph, Kind, Node, Tensor


class Split(NamedTuple):
    """Nodes of one backend in order. inputs: host inputs and other backends' activations that
    these nodes read, in the order of first use; a tensor copied for an earlier split of the same
    backend is not listed again."""

    backend: int
    nodes: list[Node]
    inputs: list[Tensor]


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
