"""Regions of three branches: rules `qkv` and `three_way` of toggle `fork`.

A node whose result exactly three others read is a fork, in steps of one row. Each reader begins a
branch. Nodes behind it belong to the branch that they need; the first that needs two is the join. A
node in between that needs none leaves the region unexplained, and the fork is dropped.

Source: llama.cpp #16991 (`graph_optimize` of its CUDA backend). `qkv` asks besides that the fork
stands at attn_norm, as #18496 does.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.graph.ir import Node, Tensor
from workbench.graph.schedule import Costs

N_BRANCHES = 3
AT = "attn_norm"  # name of the node, or of a part of it


def spread(
    nodes: Sequence[Node],
    needed: Sequence[Sequence[int]],
    n_streams: int,
    at_norm: bool,
    costs: Costs,
) -> list[int]:
    """The stream of each node. The branch that takes longest stays on stream 0. at_norm: forks are
    at attn_norm alone."""
    streams, end = [0] * len(nodes), 0
    for first, readers in _forks(nodes, at_norm):
        region = _region(first, readers, needed) if first >= end else None
        if region is None:
            continue
        branches, end = region
        us = [sum(costs.us(nodes[i]) for i in branch) for branch in branches]
        load = [0.0] * n_streams
        for k in sorted(range(len(branches)), key=lambda k: -us[k]):
            stream = load.index(min(load))
            load[stream] += us[k]
            for i in branches[k]:
                streams[i] = stream
    return streams


def _forks(nodes: Sequence[Node], at_norm: bool) -> list[tuple[int, list[int]]]:
    """Nodes whose one-row result three nodes read, with these three."""
    maker: dict[Tensor, int] = {}
    readers: dict[Tensor, list[int]] = {}
    for i, node in enumerate(nodes):
        for t in {t.storage for t in node.inputs if t.storage in maker}:
            readers.setdefault(t, []).append(i)
        for t in node.outputs:
            if t.storage is t and t.rows == 1:
                maker[t] = i
    found = {
        maker[t]: some
        for t, some in readers.items()
        if len(some) == N_BRANCHES and not (at_norm and not _stands_at(nodes[maker[t]], AT))
    }
    return sorted(found.items())


def _stands_at(node: Node, name: str) -> bool:
    return any(part.name.startswith(name) for part in node.parts or (node,))


def _region(
    first: int, readers: Sequence[int], needed: Sequence[Sequence[int]]
) -> tuple[list[list[int]], int] | None:
    """The nodes of each branch, and the number of the join; None where a node between the fork
    `first` and the join belongs to no branch."""
    branch = {reader: k for k, reader in enumerate(readers)}
    for j in range(first + 1, len(needed)):
        mine = {branch[i] for i in needed[j] if i in branch}
        if j in branch:
            mine.add(branch[j])
        if len(mine) > 1:
            return _listed(branch, j), j
        if not mine:
            return None
        branch[j] = mine.pop()
    return _listed(branch, len(needed)), len(needed)


def _listed(branch: dict[int, int], join: int) -> list[list[int]]:
    return [
        [i for i, k in branch.items() if k == which and i < join] for which in range(N_BRANCHES)
    ]
