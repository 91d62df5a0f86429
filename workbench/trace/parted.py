"""Which part of a plan each record of a replay belongs to. Pure.

All nodes of a launched graph share the correlation id of one call. `Captured.nodes` says which part
each node is. A record has an id of its node, but of the node's copy in the executable graph: ids
give an order and nothing else. So records are taken in the order in which they began, copies and
kernels each by themselves. All kernels of a plan are on one stream; copies may ride another. Where
names of kernels or bytes of copies do not fit then, records are taken in the order of their ids.
Where they do not fit either, CUPTI may have names of other kernels (`activity.named`): in the order
of the stream, what was launched decides. Else the plan is not as recorded.

Parts that were issued one by one are told apart by names and bytes alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from workbench.trace.activity import (
    COPY,
    COUNTED,
    MEMSET,
    Activity,
    Want,
    differs,
    fits,
    named,
    words,
)

Wanted = Sequence[Sequence[Want]]  # of each part, what the device does for it
Parted = dict[int, list[Activity]]  # of each part with records, these in order


def parted(
    rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int] | None
) -> tuple[Parted, str]:
    """The records of each part; or none, and why they cannot be told. nodes: of each node of the
    replayed graph its part; None where the parts were issued one by one."""
    if nodes is None:
        found, reason = _by_names(rows, wanted)
        if reason:
            in_order = sorted(rows, key=_start)
            again, left = _by_names(named(in_order, [w for each in wanted for w in each]), wanted)
            found, reason = (found, reason) if left else (again, "")
        return found, reason
    rows = [row for row in rows if row.node] or rows  # others were run to be captured
    if len(rows) != len(nodes):
        return {}, f"{len(rows)} records for {len(nodes)} nodes"
    reasons = []
    for found in _readings(rows, wanted, nodes):
        reason = _first_difference(found, wanted)
        if not reason:
            return found, ""
        reasons.append(reason)
    by_number = f"; by numbers of nodes, {reasons[1]}" if reasons[1] != reasons[0] else ""
    return {}, reasons[0] + by_number


def _readings(rows: Sequence[Activity], wanted: Wanted, nodes: Sequence[int]) -> Iterator[Parted]:
    """The records of each part, in three ways."""
    by_start = _of_parts(_by_start(rows, wanted, nodes))
    yield by_start
    yield _of_parts(_by_node(rows, nodes))
    yield {part: named(of_part, wanted[part]) for part, of_part in by_start.items()}


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


def _start(row: Activity) -> tuple[int, int, int]:
    return row.start, row.correlation, row.node


def _by_names(rows: Sequence[Activity], wanted: Wanted) -> tuple[Parted, str]:
    ordered = sorted(rows, key=_start)
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
            return f"part {part}: {there} instead of {words(want)}"
        owner.update(dict.fromkeys(rows[first:at], part))
    return f"{len(rows) - at} records too many" if at < len(rows) else ""
