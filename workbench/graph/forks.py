"""ROOM #16991: which compute stream each node of a split runs on, and which nodes streams wait for.

Q, K and V of a layer need the same row and not one another. So they may run side by side:

    norm -. Q product . Q rope -------------.- attention      stream 0
           `. K product . K rope . K store -|                 stream 1
           `. V product . V store ----------'                 stream 2
     fork                                  join

A *branch* is what runs on one stream between a fork and a join. A stream computes its nodes in
order. Across streams, order is an event: recorded after one node, waited for before another.

Three steps lead from the nodes of a split to its `Branches`:

    dependencies   which earlier nodes must be over when a node begins
    a rule         the stream of each node (toggle `fork`). `qkv` and `three_way` look for regions
                   of three branches, as llama.cpp does. `any` takes each branch that gains
    ordered        the events. There is none where the order follows from the others

Pure: nodes go in, numbers come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from typing import NamedTuple

from workbench.config import Fork
from workbench.graph import ops
from workbench.graph.ir import Kind, Node, Tensor

MOST_STREAMS = 8
START = -1  # in place of a node's number: what stream 0 does before the split
Clock = tuple[int, ...]  # how many nodes of each stream


class Branches(NamedTuple):
    """How the nodes of one split are spread over compute streams.

    nodes: in the order in which the host issues them.
    streams: the stream of each node, 0 for the first stream.
    waits: for each node, the numbers of nodes on other streams for whose end the node's stream
        waits directly before the node. START stands for what stream 0 does before the split.
    joins: the numbers of nodes for whose end stream 0 waits after the last node.
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
        (Fidge and Mattern 1988). On the node's own stream these are all nodes before it."""
        n, reached, found = self.n_streams, list[list[int]](), list[Clock]()
        now = [[0] * n for _ in range(n)]  # of each stream, after its latest node
        for stream, waits in zip(self.streams, self.waits, strict=True):
            own = now[stream]
            for other in waits:
                if other != START:
                    own = later(own, reached[other])
            found.append(tuple(own))
            own = own.copy()
            own[stream] += 1
            now[stream] = own
            reached.append(own)
        return found

    def known_from(self) -> list[Clock]:
        """For each node, what is over when it or any later node begins: the least of their clocks,
        stream by stream."""
        return list(accumulate(reversed(self.clocks()), _sooner))[::-1]

    def side_by_side(self) -> Iterator[tuple[Node, Node]]:
        """Nodes that may run at the same time: every pair without an order. The node that is issued
        first comes first."""
        earlier = [list[int]() for _ in range(self.n_streams)]  # of each stream, its nodes so far
        for j, clock in enumerate(self.clocks()):
            for stream, some in enumerate(earlier):
                if stream != self.streams[j]:
                    yield from ((self.nodes[i], self.nodes[j]) for i in some[clock[stream] :])
            earlier[self.streams[j]].append(j)


def later(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The clock of what comes after both."""
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


def _sooner(a: Clock, b: Clock) -> Clock:
    return tuple([x if x < y else y for x, y in zip(a, b, strict=True)])


class Costs(NamedTuple):
    """What a device takes, roughly.

    bytes_per_us: bytes read or written in a microsecond.
    flops_per_us: arithmetic operations in a microsecond.
    launch_us: a launch, beyond its bytes and operations.
    event_us: a stream that waits for another.
    """

    bytes_per_us: float
    flops_per_us: float
    launch_us: float
    event_us: float

    def us(self, node: Node) -> float:
        """What a node takes that runs alone on the device."""
        return self.launch_us + self.work_us(node)

    def work_us(self, node: Node) -> float:
        """What a node's bytes and operations take. Nodes that run side by side share the device for
        these."""
        return max(ops.touched_bytes(node) / self.bytes_per_us, ops.flops(node) / self.flops_per_us)


# An H200 (PERFORMANCE: reading 4.7 TB/s, a launch boundary 4 to 5 us). Rules need no better.
COSTS = Costs(bytes_per_us=4.7e6, flops_per_us=4e8, launch_us=4.5, event_us=2.0)


def serial(nodes: Sequence[Node]) -> Branches:
    """The nodes, all on stream 0."""
    return Branches(nodes, [0] * len(nodes), [()] * len(nodes))


def fork(nodes: Sequence[Node], n_streams: int, rule: str, costs: Costs = COSTS) -> Branches:
    """The nodes of a split on up to n_streams streams, where `rule` finds branches.

    qkv: Q, K and V after attn_norm, in steps of one token (llama.cpp #16991, as narrowed by
    #18496). three_way: wherever three nodes read a result, in steps of one token (as first merged).
    any: wherever the costs say that a branch gains more than its events cost.
    """
    if n_streams == 1:
        return serial(nodes)
    needed = dependencies(nodes)
    if rule == Fork.ANY:
        streams = _scheduled(nodes, needed, n_streams, costs)
    else:
        streams = _in_regions(nodes, needed, n_streams, rule == Fork.QKV, costs)
    return ordered(nodes, streams, needed)


# dependencies -------------------------------------------------------------------------------------

_NEVER_WRITTEN = (Kind.WEIGHT, Kind.INPUT)  # by a device


def dependencies(nodes: Sequence[Node]) -> list[list[int]]:
    """For each node, the numbers of the earlier nodes that must be over when it begins.

    A node needs the nodes that wrote the bytes which it reads. It also needs the nodes that read or
    wrote the bytes which it writes. Whole tensors are compared: two stores into one cache keep
    their order. A needed node is left out where another needed node needs it for the same tensor.
    """
    writer: dict[Tensor, int] = {}
    readers: dict[Tensor, list[int]] = {}
    found: list[list[int]] = []
    for i, node in enumerate(nodes):
        before: set[int] = set()
        reads = {t for t, *_ in ops.reads(node) if t.kind not in _NEVER_WRITTEN}
        writes = {t for t, *_ in ops.writes(node)}
        for t in reads:
            if t in writer:
                before.add(writer[t])
        for t in writes:
            earlier = readers.pop(t, None)
            if earlier:
                before.update(earlier)
            elif t in writer:
                before.add(writer[t])
            writer[t] = i
        for t in reads - writes:
            readers.setdefault(t, []).append(i)
        found.append(sorted(before))
    return found


# regions: rules `qkv` and `three_way` -------------------------------------------------------------
#
# A node whose one-row result exactly three others read is a fork. Each reader begins a branch. A
# later node belongs to the branch that it needs. The first node that needs two branches is the
# join. Where a node before the join needs no branch, there is no fork.
#
# Source: llama.cpp #16991 (`graph_optimize` of its CUDA backend). For `qkv` the fork must also
# stand at attn_norm, as in #18496.

N_BRANCHES = 3
AT = "attn_norm"  # name of the node, or of a part of it


def _in_regions(
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
    """Each node whose one-row result exactly three nodes read, and these three."""
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
    """The nodes of each branch, and the number of the join. None where a node between the fork
    `first` and the join belongs to no branch."""
    branch = {reader: k for k, reader in enumerate(readers)}
    join = len(needed)
    for j in range(first + 1, len(needed)):
        mine = {branch[i] for i in needed[j] if i in branch}
        if j in branch:
            mine.add(branch[j])
        if len(mine) > 1:
            join = j
            break
        if not mine:
            return None
        branch[j] = mine.pop()
    own = [(i, k) for i, k in branch.items() if i < join]  # readers may come after the join
    return [[i for i, k in own if k == which] for which in range(N_BRANCHES)], join


# the schedule: rule `any` -------------------------------------------------------------------------
#
# List scheduling. The priority of a node is the longest path from it to the end (Hu 1961; Graham
# 1966). Of all nodes that need a node, its *heir* has the highest priority. The heir runs on the
# same stream. Each other node begins a branch, if that branch gains: it must take longer than the
# two events of its fork and its join.


def _scheduled(
    nodes: Sequence[Node], needed: Sequence[Sequence[int]], n_streams: int, costs: Costs
) -> list[int]:
    """The stream of each node."""
    us = [costs.us(node) for node in nodes]
    heir = _heirs(needed, us)
    streams, ends = list[int](), list[float]()
    tail, free_at = [-1] * n_streams, [0.0] * n_streams  # of each stream: last node, its end
    for j, before in enumerate(needed):
        ready = max([ends[i] for i in before], default=0.0)
        own = [i for i in before if tail[streams[i]] == i and heir[i] == j]
        if own:  # the node is their heir: it follows the one that ends last
            stream = streams[max(own, key=ends.__getitem__)]
        elif _branch_us(j, needed, heir, us) <= 2 * costs.event_us:
            stream = streams[max(before, key=ends.__getitem__)] if before else 0
        else:
            # a stream whose last node has no heir still to come: best one that is idle by then
            left = [s for s, i in enumerate(tail) if i < 0 or not 0 <= j < heir[i]]
            idle = [s for s in left if free_at[s] <= ready]
            stream = idle[0] if idle else min(left or range(n_streams), key=free_at.__getitem__)
        streams.append(stream)
        tail[stream] = j
        ends.append(max(ready, free_at[stream]) + us[j])
        free_at[stream] = ends[j]
    return streams


def _heirs(needed: Sequence[Sequence[int]], us: Sequence[float]) -> list[int]:
    """The heir of each node: of the nodes that need it, the one with the longest path to the end;
    -1 where none needs it."""
    found, longest = [-1] * len(us), [0.0] * len(us)  # longest: path after a node
    for j in range(len(us) - 1, -1, -1):  # all that need j come later
        path = us[j] + longest[j]
        for i in needed[j]:
            if path >= longest[i]:
                found[i], longest[i] = j, path
    return found


def _branch_us(
    j: int, needed: Sequence[Sequence[int]], heir: Sequence[int], us: Sequence[float]
) -> float:
    """The time of a branch that begins with node j and ends before the first node that needs
    another branch as well."""
    fork, total = max(needed[j], default=-1), us[j]
    while (k := heir[j]) >= 0 and all(i == j or i <= fork for i in needed[k]):
        total, j = total + us[k], k
    return total


# events -------------------------------------------------------------------------------------------


def ordered(
    nodes: Sequence[Node], streams: Sequence[int], needed: Sequence[Sequence[int]]
) -> Branches:
    """The nodes on these streams, with the events that `needed` asks for and no other.

    needed: of each node, earlier nodes that must be over when it begins.
    """
    n = max(streams, default=0) + 1
    now = [[0] * n for _ in range(n)]  # of each stream, its clock after its latest node
    begun = [s == 0 for s in range(n)]  # streams that come after START
    reached, since = list[list[int]](), list[bool]()
    number, waits = list[int](), list[Sequence[int]]()  # number: of a node in its stream
    for stream, before in zip(streams, needed, strict=True):
        own, own_begun, some = now[stream], begun[stream], list[int]()
        for i in sorted(before, reverse=True):  # a later one may follow an earlier one
            if own[streams[i]] <= number[i]:
                some.append(i)
                own, own_begun = later(own, reached[i]), own_begun or since[i]
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
            own = later(own, reached[i])
    return Branches(nodes, streams, waits, joins)


def chained(several: Sequence[Branches]) -> Branches:
    """The splits of one backend as one. Every node comes after all nodes of earlier splits, because
    stream 0 joins all streams between two splits."""
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


# orders for fusion and for the arena --------------------------------------------------------------


def branch_of(branches: Branches) -> dict[Node, int]:
    """The number of each node's branch. What stream 0 runs between regions has numbers, too.

    Nodes of one number are neighbours on a stream. Their waits can all be issued before the first
    of them, and other streams wait only for the last of them. A branch has a larger number than the
    branches that it waits for.
    """
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
    """The nodes in the order in which llama.cpp's allocator sees them (#16991): one from each of
    the streams that run side by side, again and again. So the results of a branch stay while
    another branch computes."""
    count = [0] * branches.n_streams
    queues: list[list[int]] = [[] for _ in count]
    found: list[Node] = []
    for i, known in enumerate(branches.known_from()):
        if list(known) == count:  # every node from i on begins after all before it: a region ends
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


# an estimate --------------------------------------------------------------------------------------


def estimate_us(branches: Branches, costs: Costs = COSTS) -> float:
    """The time of all branches, in us. Launches and events of several streams overlap. Nodes whose
    bytes and operations are under way share the device in equal parts."""
    n = len(branches.nodes)
    # of each node: the nodes that wait for it, each with the time that the wait adds
    followers: list[list[tuple[int, float]]] = [[] for _ in range(n)]
    missing, ready, tail = [0] * n, [0.0] * n, dict[int, int]()
    for j, (stream, waits) in enumerate(zip(branches.streams, branches.waits, strict=True)):
        before = [(i, costs.event_us) for i in waits if i >= 0]
        if stream in tail:
            before.append((tail[stream], 0.0))
        for i, lag in before:
            followers[i].append((j, lag))
        missing[j], tail[stream] = len(before), j
    # done: the work that a node at work from the start would have had. In this virtual time a node
    # ends where it would end alone, whoever begins later (Demers, Keshav and Shenker 1989).
    begins = [(costs.launch_us, j) for j in range(n) if not missing[j]]
    at_work, now, done = list[tuple[float, int]](), 0.0, 0.0
    while begins or at_work:
        end = now + (at_work[0][0] - done) * len(at_work) if at_work else inf
        if begins and begins[0][0] < end:
            then, j = heappop(begins)
            done += (then - now) / len(at_work) if at_work else 0.0
            now = then
            heappush(at_work, (done + costs.work_us(branches.nodes[j]), j))
            continue
        done, i = heappop(at_work)
        now = end
        for j, lag in followers[i]:
            missing[j] -= 1
            ready[j] = max(ready[j], now + lag)
            if not missing[j]:
                heappush(begins, (ready[j] + costs.launch_us, j))
    return now
