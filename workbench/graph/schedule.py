"""What runs beside what, by the costs of ops: rule `any` of toggle `fork`.

List scheduling with the longest path to the end as priority (Hu 1961; Graham 1966). Each node goes
on on the stream of a node that it needs, where it is that node's *heir*: of all that need it, the
one with the longest path behind it. Others fork, if their branch gains: it must take longer than
the two events that a fork and its join cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from workbench.graph import ops
from workbench.graph.ir import Node

if TYPE_CHECKING:
    from workbench.graph.forks import Branches


class Costs(NamedTuple):
    """What a device takes, roughly. launch_us: what a launch takes beyond its bytes and
    arithmetic. event_us: what a stream that waits for another one loses."""

    bytes_per_us: float
    flops_per_us: float
    launch_us: float
    event_us: float

    def us(self, node: Node) -> float:
        """A node alone on the device."""
        return self.launch_us + self.work_us(node)

    def work_us(self, node: Node) -> float:
        """Its bytes and arithmetic, which nodes side by side share the device for."""
        return max(ops.touched_bytes(node) / self.bytes_per_us, ops.flops(node) / self.flops_per_us)


# An H200 (PERFORMANCE: reading 4.7 TB/s, a launch boundary 4 to 5 us). Rules need no better.
COSTS = Costs(bytes_per_us=4.7e6, flops_per_us=4e8, launch_us=4.5, event_us=2.0)


def spread(
    nodes: Sequence[Node], needed: Sequence[Sequence[int]], n_streams: int, costs: Costs
) -> list[int]:
    """The stream of each node. needed: of each, earlier nodes that must be over before it."""
    us = [costs.us(node) for node in nodes]
    heir = _heirs(needed, us)
    streams, ends = list[int](), list[float]()
    tail, free_at = [-1] * n_streams, [0.0] * n_streams
    for j, before in enumerate(needed):
        ready = max([ends[i] for i in before], default=0.0)
        own = [i for i in before if tail[streams[i]] == i and heir[i] == j]
        if own:  # it goes on where its latest own one is
            stream = streams[max(own, key=ends.__getitem__)]
        elif _branch_us(j, needed, heir, us) <= 2 * costs.event_us:
            stream = streams[max(before, key=ends.__getitem__)] if before else 0
        else:
            # a stream that nobody goes on on, idle by then; else the one that is idle first
            left = [s for s, i in enumerate(tail) if i < 0 or not 0 <= j < heir[i]]
            idle = [s for s in left if free_at[s] <= ready]
            stream = idle[0] if idle else min(left or range(n_streams), key=free_at.__getitem__)
        streams.append(stream)
        tail[stream] = j
        ends.append(max(ready, free_at[stream]) + us[j])
        free_at[stream] = ends[j]
    return streams


def _heirs(needed: Sequence[Sequence[int]], us: Sequence[float]) -> list[int]:
    """Of each node, which of those that need it has the longest path behind it; -1 for none."""
    found, longest = [-1] * len(us), [0.0] * len(us)  # path behind a node
    for j in range(len(us) - 1, -1, -1):  # all that need j come later
        path = us[j] + longest[j]
        for i in needed[j]:
            if path >= longest[i]:
                found[i], longest[i] = j, path
    return found


def _branch_us(
    j: int, needed: Sequence[Sequence[int]], heir: Sequence[int], us: Sequence[float]
) -> float:
    """What a branch that begins with node j takes, up to the node that needs others beside it."""
    fork, total = max(needed[j], default=-1), us[j]
    while (k := heir[j]) >= 0 and all(i == j or i <= fork for i in needed[k]):
        total, j = total + us[k], k
    return total


def estimate_us(branches: Branches, costs: Costs = COSTS) -> float:
    """What the branches take. Launches and events of several streams go by side by side. The device
    is shared in equal parts by the nodes whose bytes and arithmetic are under way."""
    n = len(branches.nodes)
    followers: list[list[tuple[int, float]]] = [[] for _ in range(n)]  # and what an event takes
    missing, ready, tail = [0] * n, [0.0] * n, dict[int, int]()
    for j, (stream, waits) in enumerate(zip(branches.streams, branches.waits, strict=True)):
        behind = [(i, costs.event_us) for i in waits if i >= 0]
        if stream in tail:
            behind.append((tail[stream], 0.0))
        for i, lag in behind:
            followers[i].append((j, lag))
        missing[j], tail[stream] = len(behind), j
    # done: the work behind a node that has been at work from the start. In this virtual time a node
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
