"""The hazard checker's slow twins: what races in a run, worked out in the plainest ways.

`racing_pairs` asks what must be over before what. `seen_both_ways` plays every state that the host
and the streams can be in, and looks which of two accesses were seen done without the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from tests.oracles.reading import Key, conflict, read, touched
from workbench.program.commands import Program


def racing_pairs(steps: Sequence[Program], one_order: bool = True) -> set[tuple[Key, Key]]:
    """Pairs, in host order, that conflict, and the first need not be over when the second comes."""
    moments = read(steps, one_order)
    acting = [(n, m, t) for n, (m, t) in enumerate(zip(moments, touched(moments), strict=True))
              if any(t)]  # fmt: skip
    return {
        (one.at.key, other.at.key)
        for (a, one, ours), (_, other, theirs) in combinations(acting, 2)
        if not other.before >> a & 1 and conflict(ours, theirs)
    }


def seen_both_ways(steps: Sequence[Program], one_order: bool = True) -> set[tuple[Key, Key]]:
    """Pairs, in host order, that conflict and that can be done in either order: some state that can
    be reached has the first alone, another the second alone."""
    moments = read(steps, one_order)
    bytes_ = touched(moments)
    disputed = [(a, b) for a, b in combinations(range(len(moments)), 2)
                if conflict(bytes_[a], bytes_[b])]  # fmt: skip
    todo, known = [frozenset[int]()], {frozenset[int]()}
    alone: set[tuple[int, int]] = set()
    while todo:
        done = todo.pop()
        alone |= {(a, b) for a, b in disputed if a in done and b not in done}
        alone |= {(b, a) for a, b in disputed if b in done and a not in done}
        for n, moment in enumerate(moments):
            if n not in done and moment.after <= done and (state := done | {n}) not in known:
                known.add(state)
                todo.append(state)
    return {(moments[a].at.key, moments[b].at.key) for a, b in disputed
            if {(a, b), (b, a)} <= alone}  # fmt: skip
