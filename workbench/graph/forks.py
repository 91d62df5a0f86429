"""ROOM #16991: which compute stream each node of a split runs on, and what streams wait for.

    norm -. Q product . Q rope -------------.- attention      stream 0
           `. K product . K rope . K store -|                 stream 1
           `. V product . V store ----------'                 stream 2
     fork                                  join

A *branch* is what runs on one stream between a fork and a join. A stream computes its nodes in
order. Order across streams is an event: recorded behind a node, waited for in front of another. It
is there only where it does not already follow from others.

Pure: nodes go in, numbers come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workbench.graph.ir import Node

MOST_STREAMS = 8
START = -1  # in place of a node's number: what stream 0 has in front of the split
Clock = tuple[int, ...]


class Branches(NamedTuple):
    """How the nodes of one split are spread over compute streams.

    nodes: in the order in which the host issues them. streams: of each node, 0 for the first.
    waits: of each node, the numbers of nodes on other streams whose end its stream waits for right
    in front of it; START for what stream 0 has in front of the split. joins: numbers of nodes whose
    end stream 0 waits for behind the last node.
    """

    nodes: Sequence[Node]
    streams: Sequence[int]
    waits: Sequence[Sequence[int]]
    joins: Sequence[int] = ()

    @property
    def n_streams(self) -> int:
        """Streams that are used: one more than the largest number."""
        return max(self.streams, default=0) + 1

    def clocks(self) -> list[Clock]:
        """Of each node, how many nodes of each stream are over when it begins, whatever the timing
        (Fidge and Mattern 1988). A node's stream counts all that is in front of it."""
        n, reached = self.n_streams, list[list[int]]()
        now = [[0] * n for _ in range(n)]  # of each stream, behind its latest node
        found = list[Clock]()
        for stream, waits in zip(self.streams, self.waits, strict=True):
            own = now[stream]
            for other in waits:
                if other != START:
                    own = [a if a > b else b for a, b in zip(own, reached[other], strict=True)]
            found.append(tuple(own))
            own = own.copy()
            own[stream] += 1
            now[stream] = own
            reached.append(own)
        return found


def serial(nodes: Sequence[Node]) -> Branches:
    """All on stream 0."""
    return Branches(nodes, [0] * len(nodes), [()] * len(nodes))


def fork(nodes: Sequence[Node], n_streams: int, rule: str) -> Branches:
    """The nodes on up to n_streams streams, where `rule` finds branches."""
    return serial(nodes)


def interleaved(branches: Branches) -> list[Node]:
    """The nodes with those of a fork's branches in turn."""
    return list(branches.nodes)


def chained(several: Sequence[Branches]) -> Branches:
    """The splits of one backend, one behind the other: what begins in one follows all of the one
    before, because stream 0 has joined all streams there."""
    if len(several) == 1:
        return several[0]
    nodes, streams, waits = list[Node](), list[int](), list[Sequence[int]]()
    before: Sequence[int] = ()  # what the next node of stream 0, or behind START, waits for
    for one in several:
        first = len(nodes)
        ends = _ends(one, first)
        for i, stream in enumerate(one.streams):
            own = [w + first for w in one.waits[i] if w != START]
            begins = not own and all(s != stream for s in one.streams[:i])
            waits.append([*own, *(before if begins else ())])
        nodes += one.nodes
        streams += one.streams
        before = ends
    return Branches(nodes, streams, waits)


def _ends(one: Branches, first: int) -> list[int]:
    """The last node of each stream, numbered from `first` on."""
    last = {stream: i + first for i, stream in enumerate(one.streams)}
    return list(last.values())


def side_by_side(branches: Branches) -> Iterator[tuple[Node, Node]]:
    """Nodes that may run at the same time: every pair that the branches do not order, in the order
    of the nodes."""
    nodes, streams, clocks = branches.nodes, branches.streams, branches.clocks()
    ahead = [list[int]() for _ in range(branches.n_streams)]  # of each stream, its nodes so far
    for j, clock in enumerate(clocks):
        for stream, some in enumerate(ahead):
            if stream != streams[j]:
                yield from ((nodes[i], nodes[j]) for i in some[clock[stream] :])
        ahead[streams[j]].append(j)
