"""The hazard checker's slow twins: what races in a run, worked out in the plainest ways.

`racing_pairs` builds the whole relation, edge by edge, and asks for paths. `seen_both_ways` builds
no relation: it plays every state that the host and the streams can be in, and looks which of two
accesses were seen done without the other. Nothing is shared with `workbench.program`'s readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from workbench.program.commands import (
    HOST,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Stream,
    Sync,
    Wait,
    Write,
)

Key = tuple[int, int]  # step, index


def numbered(steps: Sequence[Program]) -> list[tuple[Key, Command]]:
    return [((s, i), c) for s, program in enumerate(steps) for i, c in enumerate(program.commands)]


def at_once(c: Command) -> bool:
    """Whether the host does it itself."""
    return isinstance(c, (Write, Read, Sync)) or (
        isinstance(c, Launch) and c.stream.backend == HOST
    )


def conflicts(a: Command, b: Command) -> bool:
    """Whether both touch some byte, one of them writing."""
    sides = [(a.writes, b.reads), (a.writes, b.writes), (a.reads, b.writes)]

    def meet(r: Range, s: Range) -> bool:
        ends = r.offset + r.nbytes, s.offset + s.nbytes
        return r.buffer is s.buffer and max(r.offset, s.offset) < min(ends)

    return any(
        meet(r, s)
        for ours, theirs in sides
        for r in ours
        for s in theirs
    )  # fmt: skip


def racing_pairs(steps: Sequence[Program], one_order: bool = True) -> set[tuple[Key, Key]]:
    """Pairs, in host order, that conflict and have no path from the one to the other.

    Every command has a point where the host is at it; what streams do has a point of its own, where
    it is over. Points before a point are kept as bits.
    """
    commands = numbered(steps)
    before: list[int] = []  # of each point, the points before it and itself
    over: dict[int, int] = {}  # of a command, the point at which it is over
    queued: dict[Stream, list[int]] = {}  # commands of each stream
    recorded: dict[int, int] = {}  # of an event, its latest Record

    def point(*after: int) -> int:
        mask = 1 << len(before)
        for p in after:
            mask |= before[p]
        before.append(mask)
        return len(before) - 1

    host = point()
    for n, (_, c) in enumerate(commands):
        if isinstance(c, Sync):
            waited = []
            if c.event is not None and c.event in recorded:
                waited.append(over[recorded[c.event]])
            if c.stream is not None:
                waited += [over[m] for m in queued.get(c.stream, ())]
            host = over[n] = point(host, *waited)
        elif at_once(c):
            host = over[n] = point(host)
        else:
            host = point(host)
            mine = queued.setdefault(c.stream, [])
            loose = isinstance(c, Copy) and not one_order
            behind = [] if loose else [
                over[m] for m in mine if one_order or not isinstance(commands[m][1], Copy)
            ]  # fmt: skip
            if isinstance(c, Wait) and c.event in recorded:
                behind.append(over[recorded[c.event]])
            over[n] = point(host, *behind)
            mine.append(n)
            if isinstance(c, Record):
                recorded[c.event] = n
    found = set()
    for a, b in combinations(range(len(commands)), 2):
        (first, one), (second, other) = commands[a], commands[b]
        if not before[over[b]] >> over[a] & 1 and conflicts(one, other):
            found.add((first, second))
    return found


def seen_both_ways(steps: Sequence[Program], one_order: bool = True) -> set[tuple[Key, Key]]:
    """Pairs, in host order, that conflict and of which each was done without the other in some
    state that can be reached."""
    commands = numbered(steps)
    queues, waits_for = _queues(commands, one_order)
    done_alone: set[tuple[int, int]] = set()
    touching = [n for n, (_, c) in enumerate(commands) if c.reads or c.writes]
    disputed = [(a, b) for a, b in combinations(touching, 2)
                if conflicts(commands[a][1], commands[b][1])]  # fmt: skip
    start = (0, tuple([0] * len(queues)))
    todo, known = [start], {start}
    while todo:
        host, heads = todo.pop()
        done = {m for queue, head in zip(queues, heads, strict=True) for m in queue[:head]}
        done |= {n for n in range(host) if at_once(commands[n][1])}
        for a, b in disputed:
            if (a in done) != (b in done):
                done_alone.add((a, b) if a in done else (b, a))
        for state in _next(commands, queues, waits_for, host, heads, done):
            if state not in known:
                known.add(state)
                todo.append(state)
    return {(commands[a][0], commands[b][0]) for a, b in disputed if {(a, b), (b, a)} <= done_alone}


def _queues(
    commands: list[tuple[Key, Command]], one_order: bool
) -> tuple[list[list[int]], dict[int, list[int]]]:
    """What is worked off in order, stream by stream, a copy without order being a queue by itself;
    and for each Wait and Sync, the commands it is for."""
    queues: dict[object, list[int]] = {}
    recorded: dict[int, int] = {}
    waits_for: dict[int, list[int]] = {}
    of_stream: dict[Stream, list[int]] = {}
    for n, (_, c) in enumerate(commands):
        if isinstance(c, (Wait, Sync)) and c.event is not None:
            waits_for[n] = [recorded[c.event]] if c.event in recorded else []
        if isinstance(c, Sync):
            if c.stream is not None:
                waits_for[n] = list(of_stream.get(c.stream, ()))
        elif not at_once(c):
            alone = isinstance(c, Copy) and not one_order
            queues.setdefault(n if alone else c.stream, []).append(n)
            of_stream.setdefault(c.stream, []).append(n)
        if isinstance(c, Record):
            recorded[c.event] = n
    return list(queues.values()), waits_for


def _next(commands, queues, waits_for, host, heads, done) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The states one step away: the host goes on, or a queue does what is at its head."""
    if host < len(commands) and done.issuperset(waits_for.get(host, ()) if isinstance(
        commands[host][1], Sync
    ) else ()):  # fmt: skip
        yield host + 1, heads
    for i, (queue, head) in enumerate(zip(queues, heads, strict=True)):
        if head < len(queue) and queue[head] < host and done.issuperset(
            waits_for.get(queue[head], ())
        ):  # fmt: skip
            yield host, (*heads[:i], head + 1, *heads[i + 1 :])
