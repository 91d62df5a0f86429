"""Assigns each record of a replayed plan to a part of the plan. Pure.

All nodes of a launched graph share the correlation id of one call. `Captured.nodes` gives the part
of each node. A record has the id of its node, but of the node's copy in the executable graph: these
ids give only an order. So an assignment is tried, and kept if the names of kernels and the bytes of
copies fit. If no assignment fits, the plan is not as recorded.

Where all kernels of a plan are on one stream (copies may be on another):

1. records in the order in which they began, copies and kernels separately;
2. records in the order of their ids;
3. as 1, with the names of the launched kernels, because CUPTI may have other names
   (`activity.named`).

Kernels of a plan with branches begin in any order that its streams and events allow, and CUPTI's
streams are those of the graph:

1. records in the order of their ids. No part may begin before a part for which it waits has begun;
2. each record, in the order of time, is the first node that may begin then and has its name or
   bytes. Among several such nodes, a node after a record of the same stream is taken;
3. as 1, with the names of the launched kernels.

Parts that were issued one by one are identified by names and bytes alone, in the order of time, or
for branches in the order of the calls.
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

Wanted = Sequence[Sequence[Want]]  # for each part, its work on the device
Parted = dict[int, list[Activity]]  # part -> its records, in order
EndsBefore = Sequence[Collection[int]]  # for each part, parts that must end before it begins


def parted(
    rows: Sequence[Activity],
    wanted: Wanted,
    nodes: Sequence[int] | None,
    ends_before: EndsBefore | None = None,
) -> tuple[Parted, str]:
    """The records of each part, and ""; or no records, and the reason.

    nodes: the part of each node of the replayed graph; None where the parts were issued one by one.
    ends_before: for each part of a plan with branches, the parts that must end before it begins;
        None for a plan without branches.
    """
    if nodes is None:
        order = _start if ends_before is None else _call
        in_order = sorted(rows, key=order)
        found, reason = _by_names(in_order, wanted)
        if reason:
            again, left = _by_names(named(in_order, [w for each in wanted for w in each]), wanted)
            found, reason = (found, reason) if left else (again, "")
        return found, reason
    rows = [row for row in rows if row.node] or rows  # records without a node ran during a capture
    if len(rows) != len(nodes):
        return {}, f"{len(rows)} records for {len(nodes)} nodes"
    reasons = []
    for found in _readings(rows, wanted, nodes, ends_before):
        reason = (
            _first_difference(found, wanted)
            or (ends_before and _too_early(found, ends_before))
            or ""
        )
        if not reason:
            return found, ""
        reasons.append(reason)
    by_number = f"; by numbers of nodes, {reasons[1]}" if reasons[1] != reasons[0] else ""
    return {}, reasons[0] + by_number


def _readings(
    rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int], ends_before: EndsBefore | None
) -> Iterator[Parted]:
    """The three assignments to try, in order (see the module)."""
    if ends_before is None:
        first = _of_parts(_by_start(rows, wanted, nodes))
        yield first
        yield _of_parts(_by_node(rows, nodes))
    else:
        first = _of_parts(_by_node(rows, nodes))
        yield first
        yield _of_parts(_by_readiness(rows, wanted, nodes, ends_before))
    yield {part: named(of_part, wanted[part]) for part, of_part in first.items()}


def _too_early(found: Parted, ends_before: EndsBefore) -> str:
    """The first part that began before a part for which it waits; empty without such a part."""
    for part, rows in found.items():
        for other in ends_before[part]:
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
    rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int], ends_before: EndsBefore
) -> Iterable[tuple[int, Activity]]:
    """Assigns each record, in the order of time, to the first node that may begin and fits. Ends at
    the first record without such a node."""
    left: list[int] = [*range(len(nodes))]
    wants = [*_wants_of_nodes(wanted, nodes)]
    last: dict[int, Activity] = {}  # part -> its latest record
    to_do = [nodes.count(part) for part in range(len(wanted))]
    for row in sorted(rows, key=_start):

        def follows(node: int, stream: int = row.stream) -> bool:
            part = nodes[node]
            before = [part] if part in last else ends_before[part]
            return any(last[other].stream == stream for other in before if other in last)

        seen: set[int] = set()  # parts with an earlier node that has not run
        ready = []
        for node in left:
            part = nodes[node]
            may = part not in seen and not any(to_do[other] for other in ends_before[part])
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
    """The work of each node; None where its part has a product of cuBLAS, whose nodes are not
    known."""
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
    for row in reversed(ordered):  # a memset belongs to the part of the next record
        part = part if row.kind == MEMSET else owner[row]
        if part is not None:
            found[part].insert(0, row)
    return found, ""


def _walk(
    rows: Sequence[Activity], wants: Sequence[tuple[int, Want]], owner: dict[Activity, int]
) -> str:
    """Writes the part of each record to `owner`. Returns the first difference, or "".

    A product of cuBLAS takes all records up to the next named kernel. Of neighbouring products, all
    but the last take one record.
    """
    at = 0
    for n, (part, want) in enumerate(wants):
        following = wants[n + 1][1] if n + 1 < len(wants) else None
        alone = n + 1 < len(wants) and following is None  # the next is a product too
        first = at
        if want is not None:
            at += at < len(rows) and fits(rows[at], want)
        else:
            while at < len(rows) and (following is None or not fits(rows[at], following)):
                at += 1
                if alone:
                    break
        if at == first:
            there = rows[at] if at < len(rows) else "nothing"
            return f"part {part}: {there} instead of {describe(want)}"
        owner.update(dict.fromkeys(rows[first:at], part))
    return f"{len(rows) - at} records too many" if at < len(rows) else ""
