"""Which part of a plan each record of a replay belongs to. Pure.

All nodes of a launched graph share the correlation id of one call. `Captured.nodes` says which part
each node is. A record has an id of its node, but of the node's copy in the executable graph: ids
give an order and nothing else. So records are taken in the order in which they began, copies and
kernels each by themselves, where all kernels of a plan are on one stream; copies may ride another.
Where names of kernels or bytes of copies do not fit then, records are taken in the order of their
ids. Where they do not fit either, CUPTI may have names of other kernels (`activity.named`): in the
order of the stream, what was launched decides. Else the plan is not as recorded.

Kernels of a plan with branches begin in any order that its streams and events allow, and CUPTI's
streams are the graph's own. So ids come first there, and what begins must be behind what it waits
for. Else each record is the first node that may begin then and has its name or its bytes. Of
several it is the one behind a record of the same stream of the graph.

Parts that were issued one by one are told apart by names and bytes alone, in the order of time; of
branches in the order of the calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from workbench.backend.base import KernelName
from workbench.trace.cupti.activity import (
    COPY,
    COUNTED,
    KERNEL,
    MEMSET,
    Activity,
    Want,
    describe,
    differs,
    fits,
    named,
)

Wanted = Sequence[Sequence[Want]]  # of each part, what the device does for it
Parted = dict[int, list[Activity]]  # of each part with records, these in order
Behind = Sequence[Collection[int]]  # of each part, parts that end before it begins


def parted(
    rows: Sequence[Activity],
    wanted: Wanted,
    nodes: Sequence[int] | None,
    behind: Behind | None = None,
) -> tuple[Parted, str]:
    """The records of each part; or none, and why they cannot be told. nodes: of each node of the
    replayed graph its part; None where the parts were issued one by one. behind: of each part of a
    plan with branches, the parts that it begins behind; None for a plan without."""
    if nodes is None:
        order = _start if behind is None else _call
        in_order = sorted(rows, key=order)
        found, reason = _by_names(in_order, wanted)
        if reason:
            again, left = _by_names(named(in_order, [w for each in wanted for w in each]), wanted)
            found, reason = (found, reason) if left else (again, "")
        return found, reason
    rows = [row for row in rows if row.node] or rows  # others were run to be captured
    if len(rows) != len(nodes):
        return {}, f"{len(rows)} records for {len(nodes)} nodes"
    reasons = []
    for found in _readings(rows, wanted, nodes, behind):
        reason = _first_difference(found, wanted) or (behind and _too_early(found, behind)) or ""
        if not reason:
            return found, ""
        reasons.append(reason)
    by_number = f"; by numbers of nodes, {reasons[1]}" if reasons[1] != reasons[0] else ""
    return {}, reasons[0] + by_number


def _readings(
    rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int], behind: Behind | None
) -> Iterator[Parted]:
    """The records of each part, in three ways: in an order, in another, and in the first with the
    names that kernels were launched by."""
    if behind is None:
        first = _of_parts(_by_start(rows, wanted, nodes))
        yield first
        yield _of_parts(_by_node(rows, nodes))
    else:
        first = _of_parts(_by_node(rows, nodes))
        yield first
        yield _of_parts(_by_readiness(rows, wanted, nodes, behind))
    yield {part: named(of_part, wanted[part]) for part, of_part in first.items()}


def _too_early(found: Parted, behind: Behind) -> str:
    """Which part began before what it is behind, or nothing."""
    for part, rows in found.items():
        for other in behind[part]:
            if other in found and rows[0].start < max(row.start for row in found[other]):
                return f"part {part}: it began before part {other}"
    return ""


def _of_parts(pairs: Iterable[tuple[int, Activity]]) -> Parted:
    found: Parted = defaultdict(list)
    for part, row in pairs:
        found[part].append(row)
    return found


def _first_difference(found: Parted, wanted: Wanted) -> str:
    for part, wants in enumerate(wanted):
        if reason := differs(found.get(part, ()), wants):
            return f"part {part}: {reason}"
    return ""


def _by_start(
    rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int]
) -> Iterable[tuple[int, Activity]]:
    ordered = sorted(rows, key=_start)
    copies = {part for part, wants in enumerate(wanted) if any(isinstance(w, int) for w in wants)}
    for are in (True, False):
        parts = [part for part in nodes if (part in copies) == are]
        yield from zip(parts, [r for r in ordered if (r.kind == COPY) == are], strict=False)


def _by_node(rows: Sequence[Activity], nodes: Sequence[int]) -> Iterable[tuple[int, Activity]]:
    return zip(nodes, sorted(rows, key=lambda r: r.node), strict=True)


def _by_readiness(
    rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int], behind: Behind
) -> Iterable[tuple[int, Activity]]:
    """Each record, as it begins, is the first node that may begin and fits. Ends with the first
    record that no node is left for."""
    left: list[int] = [*range(len(nodes))]
    wants = [*_wants_of_nodes(wanted, nodes)]
    last: dict[int, Activity] = {}  # by part
    to_do = [nodes.count(part) for part in range(len(wanted))]
    for row in sorted(rows, key=_start):

        def follows(node: int, stream: int = row.stream) -> bool:
            part = nodes[node]
            before = [part] if part in last else behind[part]
            return any(last[other].stream == stream for other in before if other in last)

        seen: set[int] = set()  # parts with a node in front that is not over
        ready = []
        for node in left:
            part = nodes[node]
            may = part not in seen and not any(to_do[other] for other in behind[part])
            if may and _may_be(row, wants[node]):
                ready.append(node)
            seen.add(part)
        if not ready:
            return
        node = next(filter(follows, ready), ready[0])
        left.remove(node)
        last[nodes[node]] = row
        to_do[nodes[node]] -= 1
        yield nodes[node], row


def _wants_of_nodes(wanted: Wanted, nodes: Sequence[int]) -> Iterator[Want]:
    """What each node is: None where its part has a product of cuBLAS, whose nodes nobody knows."""
    told = {part: iter(wants) for part, wants in enumerate(wanted) if None not in wants}
    for part in nodes:
        yield next(told[part], None) if part in told else None


def _may_be(row: Activity, want: Want) -> bool:
    if isinstance(want, KernelName) and want.dims and row.dims:
        return row.kind == KERNEL and row.dims == want.dims
    return row.kind != COPY if want is None else fits(row, want)


def _call(row: Activity) -> int:
    return row.correlation


def _start(row: Activity) -> tuple[int, int, int]:
    return row.start, row.correlation, row.node


def _by_names(ordered: Sequence[Activity], wanted: Wanted) -> tuple[Parted, str]:
    wants = [(part, want) for part, each in enumerate(wanted) for want in each]
    owner: dict[Activity, int] = {}
    for are in (True, False):
        mine = [r for r in ordered if r.kind in COUNTED and (r.kind == COPY) == are]
        reason = _walk(mine, [w for w in wants if isinstance(w[1], int) == are], owner)
        if reason:
            return {}, reason
    found: Parted = defaultdict(list)
    part = None
    for row in reversed(ordered):  # a memset goes with what follows it
        part = part if row.kind == MEMSET else owner[row]
        if part is not None:
            found[part].insert(0, row)
    return found, ""


def _walk(
    rows: Sequence[Activity], wants: Sequence[tuple[int, Want]], owner: dict[Activity, int]
) -> str:
    """Notes the part of each record. A product has a kernel or more, up to the next one with a
    name; of products in a row all but the last have one."""
    at = 0
    for n, (part, want) in enumerate(wants):
        behind = wants[n + 1][1] if n + 1 < len(wants) else None
        alone = n + 1 < len(wants) and behind is None  # another product behind this one
        first = at
        if want is not None:
            at += at < len(rows) and fits(rows[at], want)
        else:
            while at < len(rows) and (behind is None or not fits(rows[at], behind)):
                at += 1
                if alone:
                    break
        if at == first:
            there = rows[at] if at < len(rows) else "nothing"
            return f"part {part}: {there} instead of {describe(want)}"
        owner.update(dict.fromkeys(rows[first:at], part))
    return f"{len(rows) - at} records too many" if at < len(rows) else ""
