"""ROOM #16991: which compute stream each node of a split runs on, and what streams wait for.

    norm -. Q product . Q rope -------------.- attention      stream 0
           `. K product . K rope . K store -|                 stream 1
           `. V product . V store ----------'                 stream 2
     fork                                  join

A *branch* is what runs on one stream between a fork and a join. A stream computes its nodes in
order. Order across streams is an event: recorded behind a node, waited for in front of another. It
is there only where it does not already follow from others. `Branches.clocks` says what follows.

Which branches there are is the rule's to say (toggle `fork`): `regions.py` finds llama.cpp's,
`schedule.py` any that gain.

Pure: nodes go in, numbers come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from workbench.config import Fork
from workbench.graph import regions, schedule
from workbench.graph.dependencies import dependencies
from workbench.graph.ir import Node
from workbench.graph.schedule import COSTS, Costs

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
        n, reached, found = self.n_streams, list[list[int]](), list[Clock]()
        now = [[0] * n for _ in range(n)]  # of each stream, behind its latest node
        for stream, waits in zip(self.streams, self.waits, strict=True):
            own = now[stream]
            for other in waits:
                if other != START:
                    own = _later(own, reached[other])
            found.append(tuple(own))
            own = own.copy()
            own[stream] += 1
            now[stream] = own
            reached.append(own)
        return found

    def side_by_side(self) -> Iterator[tuple[Node, Node]]:
        """Nodes that may run at the same time: every pair that has no order, the second as they
        are issued."""
        ahead = [list[int]() for _ in range(self.n_streams)]  # of each stream, its nodes so far
        for j, clock in enumerate(self.clocks()):
            for stream, some in enumerate(ahead):
                if stream != self.streams[j]:
                    yield from ((self.nodes[i], self.nodes[j]) for i in some[clock[stream] :])
            ahead[self.streams[j]].append(j)


def _later(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


def _sooner(a: Clock, b: Clock) -> Clock:
    return tuple([x if x < y else y for x, y in zip(a, b, strict=True)])


def serial(nodes: Sequence[Node]) -> Branches:
    """All on stream 0."""
    return Branches(nodes, [0] * len(nodes), [()] * len(nodes))


def fork(nodes: Sequence[Node], n_streams: int, rule: str, costs: Costs = COSTS) -> Branches:
    """The nodes of a split on up to n_streams streams, where `rule` finds branches.

    qkv: Q, K and V behind attn_norm, in steps of one token (llama.cpp #16991, as narrowed by
    #18496). three_way: wherever three nodes read a result, in steps of one token (as first merged).
    any: wherever the costs say that a branch gains more than its events cost.
    """
    if n_streams == 1:
        return serial(nodes)
    needed = dependencies(nodes)
    if rule == Fork.ANY:
        streams = schedule.spread(nodes, needed, n_streams, costs)
    else:
        streams = regions.spread(nodes, needed, n_streams, rule == Fork.QKV, costs)
    return ordered(nodes, streams, needed)


def ordered(
    nodes: Sequence[Node], streams: Sequence[int], needed: Sequence[Sequence[int]]
) -> Branches:
    """The nodes on these streams, with the events that `needed` asks for and no other. needed: of
    each node, earlier nodes that must be over when it begins."""
    n = max(streams, default=0) + 1
    now = [[0] * n for _ in range(n)]
    begun = [s == 0 for s in range(n)]  # streams that are behind START
    reached, since = list[list[int]](), list[bool]()
    number, waits = list[int](), list[Sequence[int]]()  # number: of a node in its stream
    for stream, before in zip(streams, needed, strict=True):
        own, own_begun, some = now[stream], begun[stream], list[int]()
        for i in sorted(before, reverse=True):  # a later one may be behind an earlier one
            if own[streams[i]] <= number[i]:
                some.append(i)
                own, own_begun = _later(own, reached[i]), own_begun or since[i]
        if not own_begun:
            some.append(START)
        number.append(own[stream])
        own = own.copy()
        own[stream] += 1
        now[stream], begun[stream] = own, True
        reached.append(own)
        since.append(True)
        waits.append(tuple(some))
    joins, own = list[int](), now[0] if n else []
    last = {stream: i for i, stream in enumerate(streams)}
    for i in sorted(last.values(), reverse=True):
        if own[streams[i]] <= number[i]:
            joins.append(i)
            own = _later(own, reached[i])
    return Branches(nodes, streams, waits, joins)


def chained(several: Sequence[Branches]) -> Branches:
    """The splits of one backend, one behind the other. What begins in one follows all of the one
    before, because stream 0 has joined all streams there."""
    if len(several) == 1:
        return several[0]
    nodes, streams, waits = list[Node](), list[int](), list[Sequence[int]]()
    ends: list[int] = []  # the last nodes of the split before, one of each stream
    for one in several:
        first, here = len(nodes), set[int]()
        for stream, some in zip(one.streams, one.waits, strict=True):
            own = [i + first for i in some if i != START]
            waits.append(own if own or stream in here else ends)
            here.add(stream)
        nodes += one.nodes
        streams += one.streams
        ends = list({stream: i for i, stream in enumerate(one.streams, first)}.values()) or ends
    return Branches(nodes, streams, waits)


# orders for others --------------------------------------------------------------------------------


def branch_of(branches: Branches) -> dict[Node, int]:
    """A number for each branch, and for each stretch between: nodes of one number are neighbours on
    a stream. What they wait for is issued in front of the first, and others wait for the last
    alone. A branch has a larger number than what it waits for."""
    found, latest = dict[Node, int](), dict[int, int]()
    waited = {i for some in branches.waits for i in some}
    for i, (node, stream) in enumerate(zip(branches.nodes, branches.streams, strict=True)):
        if any(other > latest.get(stream, i) for other in branches.waits[i]):
            del latest[stream]
        latest.setdefault(stream, i)
        found[node] = latest[stream]
        if i in waited:
            latest.pop(stream)
    return found


def interleaved(branches: Branches) -> list[Node]:
    """The nodes, and nodes of side-by-side streams alternate: the order in which llama.cpp's
    allocator sees them (#16991). What one branch makes then stays while another is at work."""
    count = [0] * branches.n_streams
    queues: list[list[int]] = [[] for _ in count]
    found: list[Node] = []
    known = list(accumulate(reversed(branches.clocks()), _sooner))  # by all from a node on
    for i, clock in enumerate(reversed(known)):
        if list(clock) == count:  # they all begin when everything in front is over: a region ends
            found += _alternating(branches, queues)
            queues = [[] for _ in count]
        queues[branches.streams[i]].append(i)
        count[branches.streams[i]] += 1
    return found + _alternating(branches, queues)


def _alternating(branches: Branches, queues: Sequence[list[int]]) -> list[Node]:
    waiting, found = {i for queue in queues for i in queue}, list[Node]()
    heads = [iter(queue) for queue in queues]
    nexts = [next(head, None) for head in heads]
    while waiting:
        for s, i in enumerate(nexts):
            if i is not None and not waiting.intersection(branches.waits[i]):
                found.append(branches.nodes[i])
                waiting.remove(i)
                nexts[s] = next(heads[s], None)
    return found
