"""Random graphs on random streams, with the events that their order needs."""

from __future__ import annotations

from random import Random

from workbench.graph.forks import START, Branches, dependencies, ordered
from workbench.graph.ir import F16, F32, I64, Kind, Node, Tensor
from workbench.graph.ops import make


def random_nodes(rng: Random, n: int) -> list[Node]:
    """Nodes that add what earlier ones made, and some that store it into a cache or read that."""
    tensors = [Tensor("x", F32, (1, 64), Kind.INPUT)]
    cache = Tensor("cache", F16, (4, 64), Kind.CACHE)
    cells = Tensor("cells", I64, (1,), Kind.INPUT)
    nodes: list[Node] = []
    for i in range(n):
        recent = tensors[-rng.choice((1, 2, 4, 8)) :]
        if rng.random() < 0.1:
            row = rng.choice([t for t in recent if t.cols == 64] or tensors[:1])
            nodes.append(make("set_rows", f"store-{i}", cache, row, cells, n_kv=4))
            continue
        if rng.random() < 0.1:
            inputs = rng.choice(recent), Tensor("ids", F32, (1, 64), Kind.INPUT), cache
        else:  # now and then it looks at the cache, as attention does
            inputs = rng.choice(recent), rng.choice(recent)
        out = Tensor(f"n{i}", F32, (1, rng.choice((1, 64, 64, 70, 700))))
        nodes.append(Node("add", out.name, out, inputs, {}, -1))
        tensors.append(out)
    return nodes


def random_branches(rng: Random, n: int, n_streams: int) -> Branches:
    nodes = random_nodes(rng, n)
    streams, stream = list[int](), 0
    for _ in nodes:
        if rng.random() < 0.6:
            stream = rng.randrange(n_streams)
        streams.append(stream)
    return ordered(nodes, streams, dependencies(nodes))


def closure(branches: Branches, without: tuple[int, int] | None = None) -> list[set[int]]:
    """Of each node, and at last of the end, all nodes that are over when it begins: the brute-force
    transitive closure of the streams' order and the waits. START is in it where all of what stream
    0 has in front is. without: leaves out wait number w of node i; i = -1 means a join."""
    found: list[set[int]] = []
    tail: dict[int, int] = {}
    for i, (stream, waits) in enumerate(zip(branches.streams, branches.waits, strict=True)):
        kept = [w for k, w in enumerate(waits) if without != (i, k)]
        direct = [*kept, *([tail[stream]] if stream in tail else [])]
        over = {START} if stream == 0 else set()
        for j in direct:
            over |= {j} | (found[j] if j != START else set())
        found.append(over)
        tail[stream] = i
    kept = [w for k, w in enumerate(branches.joins) if without != (-1, k)]
    end: set[int] = set()
    for j in [*kept, *([tail[0]] if 0 in tail else [])]:
        end |= {j} | found[j]
    return [*found, end]
