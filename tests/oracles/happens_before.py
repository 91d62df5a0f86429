"""The hazard checker's slow twins: what races in a run, worked out in the plainest ways.

`racing_pairs` builds the whole relation, edge by edge, and asks for paths. `seen_both_ways` builds
no relation: it plays every state that the host and the streams can be in, and looks which of two
accesses were seen done without the other. Nothing is shared with `workbench.program`'s readers.

A plan has two edges. Its begin comes behind what its stream has in front, and its parts behind the
begin. Its end comes behind all parts, and what the stream has behind comes behind the end. Between
the edges a part on another stream is in a queue that only this plan has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from workbench.graph import ops
from workbench.graph.ir import Kind
from workbench.program.commands import (
    HOST,
    Command,
    Copy,
    Launch,
    Program,
    Range,
    Read,
    Record,
    Replay,
    Stream,
    Sync,
    Wait,
    Write,
)

Key = tuple[int, int, int | None]  # step, index, number of the part of a plan


@dataclass
class Begin:
    """A plan begins. others: the queues of its parts on other streams."""

    stream: Stream
    others: list[Hashable]
    reads = writes = ()


class End(Begin):
    """It is over."""


Moment = Command | Begin


class Entry(NamedTuple):
    """A command of a run. queue: where it is worked off, a stream or a plan's own. plan: a number,
    which events in it have besides their names."""

    key: Key
    command: Moment
    queue: Hashable
    plan: int | None = None


def numbered(steps: Sequence[Program]) -> list[Entry]:
    found: list[Entry] = []
    for s, program in enumerate(steps):
        for i, c in enumerate(program.commands):
            if not isinstance(c, Replay):
                found.append(Entry((s, i, None), c, c.stream))
                continue
            plan = len(found)
            queues = [p.stream if p.stream == c.stream else (plan, p.stream) for p in c.parts]
            others = [q for q in dict.fromkeys(queues) if q != c.stream]
            found.append(Entry((s, i, None), Begin(c.stream, others), c.stream))
            for number, (part, queue) in enumerate(zip(c.parts, queues, strict=True)):
                found.append(Entry((s, i, number), part, queue, plan))
            found.append(Entry((s, i, None), End(c.stream, others), c.stream))
    return found


def at_once(c: Moment) -> bool:
    """Whether the host does it itself."""
    return isinstance(c, (Write, Read, Sync)) or (
        isinstance(c, Launch) and c.stream.backend == HOST
    )


def begins_early(c: Moment) -> bool:
    """Whether it may begin while the kernel in front of it runs: its kernel waits inside for that,
    and has read weights by then."""
    return isinstance(c, Launch) and c.programmatic and not at_once(c)


class Part(NamedTuple):
    """What a command touches, or of a programmatic launch what it reads early and the rest."""

    reads: tuple[Range, ...]
    writes: tuple[Range, ...]


def parts(c: Moment) -> tuple[Part, Part]:
    """What a command touches early, and the rest."""
    if not (isinstance(c, Launch) and begins_early(c)):
        return Part((), ()), Part(c.reads, c.writes)
    inputs = [tensor.kind == Kind.WEIGHT for tensor, *_ in ops.reads(c.node)]
    ahead = {i for i, is_weight in enumerate(inputs) if is_weight}
    early = tuple(r for i, r in enumerate(c.reads) if i in ahead)
    return Part(early, ()), Part(tuple(r for r in c.reads if r not in early), c.writes)


def conflicts(a: Command | Part, b: Command | Part) -> bool:
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

    Every command has a point where the host is at it; what streams do has two points of its own,
    where it begins and where it is over. Points before a point are kept as bits.

    A launch in stream order begins when all in front of it is over. A programmatic one begins when
    the kernel in front of it has begun, or the copy in front of it is over. Where its stream has
    waited for events since, their past must be over too.
    """
    commands = numbered(steps)
    before: list[int] = []  # of each point, the points before it and itself
    begun: dict[int, int] = {}  # of a launch on a stream, the point at which it begins
    over: dict[int, int] = {}  # of a command, the point at which it is over
    queued: dict[Hashable, list[int]] = {}  # commands of each queue
    recorded: dict[tuple, int] = {}  # of an event, its latest Record
    plan_of: dict[Hashable, Stream] = {}  # of a queue that is a plan's own
    waits: dict[int, int] = {}  # of a Wait, the Record

    def point(*after: int) -> int:
        mask = 1 << len(before)
        for p in after:
            mask |= before[p]
        before.append(mask)
        return len(before) - 1

    def in_front(queue: Hashable) -> list[int]:
        """What a programmatic launch in `queue` begins after."""
        found = []
        for m in reversed(queued[queue]):
            match commands[m].command:
                case Wait() if m in waits:
                    found.append(over[waits[m]])
                case Launch():
                    return [*found, begun[m]]
                case Copy() if one_order:
                    return [*found, over[m]]
                case Begin():
                    return [*found, over[m]]
        return found

    def in_order(queue: Hashable) -> list[int]:
        """What is over when the next command in `queue` begins."""
        return [
            over[m]
            for m in queued.get(queue, ())
            if one_order or not isinstance(commands[m].command, Copy)
        ]

    host = point()
    for n, (_, c, queue, plan) in enumerate(commands):
        if isinstance(c, Begin):
            host = point(host)
            behind = in_order(queue)
            if isinstance(c, End):
                behind += [p for other in c.others for p in in_order(other)]
            over[n] = point(host, *behind)
            queued.setdefault(queue, []).append(n)
            for other in c.others:
                queued.setdefault(other, []).append(n)
                plan_of[other] = c.stream
        elif isinstance(c, Sync):
            waited = []
            if (None, c.event) in recorded:
                waited.append(over[recorded[None, c.event]])
            if c.stream is not None:
                waited += [over[m] for m in queued.get(c.stream, ())]
            host = over[n] = point(host, *waited)
        elif at_once(c):
            host = over[n] = point(host)
        else:
            host = point(host)
            loose = isinstance(c, Copy) and not one_order
            if loose:  # a plan's stream is what waits for it
                queue = plan_of.get(queue, queue)
            mine = queued.setdefault(queue, [])
            behind = [] if loose else in_order(queue)
            begun[n] = point(host, *(in_front(queue) if begins_early(c) else behind))
            if isinstance(c, Wait) and (plan, c.event) in recorded:
                waits[n] = recorded[plan, c.event]
                behind.append(over[waits[n]])
            over[n] = point(begun[n], *behind)
            mine.append(n)
            if isinstance(c, Record):
                recorded[plan, c.event] = n
    found = set()
    for a, b in combinations(range(len(commands)), 2):
        (first, one, *_), (second, other, *_) = commands[a], commands[b]
        early, rest = parts(other)
        for part, begins in ((early, begun.get(b, over[b])), (rest, over[b])):
            if not before[begins] >> over[a] & 1 and conflicts(one, part):
                found.add((first, second))
    return found


def seen_both_ways(steps: Sequence[Program], one_order: bool = True) -> set[tuple[Key, Key]]:
    """Pairs, in host order, that conflict and that can be done in either order: some state that can
    be reached has the first alone, another the second alone.

    What is done is a token: 2n for command n, 2n+1 for what it does early.
    """
    commands = numbered(steps)
    queues, waits_for = _queues(commands, one_order)
    touched = {}
    for n, entry in enumerate(commands):
        touched[2 * n + 1], touched[2 * n] = parts(entry.command)
    done_alone: set[tuple[int, int]] = set()
    disputed = [(a, b) for a, b in combinations(sorted(touched), 2)
                if a // 2 != b // 2 and conflicts(touched[a], touched[b])]  # fmt: skip
    start = (0, tuple([0] * len(queues)))
    todo, known = [start], {start}
    while todo:
        host, heads = todo.pop()
        done = {m for queue, head in zip(queues, heads, strict=True) for m in queue[:head]}
        done |= {2 * n for n in range(host) if at_once(commands[n].command)}
        for a, b in disputed:
            if (a in done) != (b in done):
                done_alone.add((a, b) if a in done else (b, a))
        for state in _next(commands, queues, waits_for, host, heads, done):
            if state not in known:
                known.add(state)
                todo.append(state)
    return {
        (commands[a // 2].key, commands[b // 2].key)
        for a, b in disputed
        if {(a, b), (b, a)} <= done_alone
    }


def _queues(commands: list[Entry], one_order: bool) -> tuple[list[list[int]], dict[int, list[int]]]:
    """What is worked off in order, stream by stream, a copy without order and what is done early
    being queues by themselves; and for each token, the tokens that must be done before it."""
    queues: dict[object, list[int]] = {}
    recorded: dict[tuple, int] = {}
    waits_for: dict[int, list[int]] = {}
    of_stream: dict[Stream, list[int]] = {}
    gates: dict[Hashable, list[int]] = {}  # what must be done before anything early is
    begins: dict[Hashable, int] = {}  # of a plan's own queue
    for n, (_, c, queue, plan) in enumerate(commands):
        if isinstance(c, (Wait, Sync)) and c.event is not None:
            waits_for[2 * n] = [recorded[plan, c.event]] if (plan, c.event) in recorded else []
        if isinstance(c, Begin):
            waits_for[2 * n] = [t for other in c.others for t in queues.get(other, ())]
            queues.setdefault(queue, []).append(2 * n)
            of_stream.setdefault(c.stream, []).append(2 * n)
            gates[queue] = [2 * n]
            begins |= dict.fromkeys(c.others, 2 * n)
            gates |= {other: [2 * n] for other in c.others}
        elif isinstance(c, Sync):
            if c.stream is not None:
                waits_for[2 * n] = list(of_stream.get(c.stream, ()))
        elif not at_once(c):
            alone = isinstance(c, Copy) and not one_order
            mine = queues.setdefault(("copy", n) if alone else queue, [])
            gate = gates.setdefault(queue, [])
            if queue in begins and not alone:
                waits_for.setdefault(2 * n, []).append(begins[queue])
            if begins_early(c):
                queues["early", n] = [2 * n + 1]
                waits_for[2 * n + 1] = list(gate)
                waits_for.setdefault(2 * n, []).append(2 * n + 1)
            elif isinstance(c, Launch):
                gates[queue] = [*gate, *mine]
            elif isinstance(c, Wait):
                gate += waits_for[2 * n]
            mine.append(2 * n)
            if isinstance(c, Copy) and one_order:
                gates[queue] = [*gate, *mine]
            if alone or queue not in begins:  # else a sync waits for the plan's end alone
                stream = c.stream if plan is None else commands[plan].command.stream
                of_stream.setdefault(stream, []).append(2 * n)
        if isinstance(c, Record):
            recorded[plan, c.event] = 2 * n
    return list(queues.values()), waits_for


def _next(commands, queues, waits_for, host, heads, done) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The states one step away: the host goes on, or a queue does what is at its head."""
    if host < len(commands) and done.issuperset(waits_for.get(2 * host, ()) if isinstance(
        commands[host].command, Sync
    ) else ()):  # fmt: skip
        yield host + 1, heads
    for i, (queue, head) in enumerate(zip(queues, heads, strict=True)):
        if head < len(queue) and queue[head] // 2 < host and done.issuperset(
            waits_for.get(queue[head], ())
        ):  # fmt: skip
            yield host, (*heads[:i], head + 1, *heads[i + 1 :])
