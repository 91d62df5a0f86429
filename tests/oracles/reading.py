"""How the oracles read a run: as moments, and what must be over before each. Nothing here is shared
with `workbench.program`'s own readers.

The host comes to commands one after the other; what it does itself, and each of its waits, is a
moment of its own. A stream works off its commands in order. A launch that begins early (a
programmatic one) has read its weights by the time it is at its place in that order: this is a
moment in no queue, which may come when the kernel before the launch has begun, or the copy before
it is over, and what the stream has waited for since is over.

A plan is two edges in the queue of its stream. Its parts on other streams are in queues of the
plan's own: they come after the first edge, and the second comes after them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from workbench.graph import ops
from workbench.graph.ir import Kind, Node
from workbench.program.commands import (
    Buffer,
    Command,
    CommandAt,
    Copy,
    Launch,
    Program,
    Range,
    Record,
    Replay,
    Stream,
    Sync,
    Wait,
)

Key = tuple[int, int, int | None]  # a command by its step, its number, and its part's in a plan
Ranges = Sequence[Range]
HOST_QUEUE = "host"


class Moment(NamedTuple):
    """What a command does (early: what it reads early). after: numbers of the moments that must be
    over, the one before it in its queue among them. before: all that follow from these, as bits."""

    at: CommandAt
    queue: Hashable
    reads: Ranges
    writes: Ranges
    early: bool
    after: frozenset[int]
    before: int


def read(
    steps: Sequence[Program],
    one_order: bool = True,
    declared: Callable[[Node], bool] | None = None,
    without: Collection[tuple[Program, int, int | None]] = (),
) -> list[Moment]:
    """The moments of a run, in host order. one_order: whether copies share the order of their
    stream's other work. declared: whether a node waits inside, as all do if not given. without:
    these commands of programs are as if they were not there."""
    reader = _Reader(one_order, declared)
    for s, program in enumerate(steps):
        for i, c in enumerate(program.commands):
            if isinstance(c, Replay):
                parts = [CommandAt(s, i, part, n) for n, part in enumerate(c.parts)]
                left = [at for at in parts if (program, i, at.part) not in without]
                reader.plan(CommandAt(s, i, c), left)
            elif (program, i, None) not in without:
                reader.command(CommandAt(s, i, c), c.stream, c.stream, None)
    return reader.made


class _Reader:
    def __init__(self, one_order: bool, declared: Callable[[Node], bool] | None):
        self.made: list[Moment] = []
        self._one_order, self._declared = one_order, declared
        self._last: dict[Hashable, int] = {}  # of each queue
        self._loose: defaultdict[Stream | None, set[int]] = defaultdict(set)  # copies in no order
        self._gates: defaultdict[Hashable, set[int]] = defaultdict(set)  # for what comes early
        self._recorded: dict[Hashable, int] = {}  # a plan keeps its events to itself

    def _add(
        self, at: CommandAt, queue: Hashable, after: Iterable[int] = (), reads: Ranges = (),
        writes: Ranges = (), early: bool = False,
    ) -> int:  # fmt: skip
        n, before = len(self.made), 0
        known = (self._last[q] for q in (HOST_QUEUE, queue) if q in self._last)
        behind = frozenset((*after, *known))
        for m in behind:
            before |= self.made[m].before | 1 << m
        self.made.append(Moment(at, queue, reads, writes, early, behind, before))
        self._last[queue] = n
        return n

    def plan(self, whole: CommandAt, parts: Iterable[CommandAt]) -> None:
        stream = whole.command.stream
        begin = self._add(whole, stream)
        self._gates[stream], own = {begin}, set()
        for at in parts:
            queue: Hashable = at.command.stream
            if queue != stream:
                queue = begin, queue
                if queue not in own:
                    self._last[queue], self._gates[queue] = begin, {begin}
                    own.add(queue)
            self.command(at, queue, stream, begin)
        self._gates[stream] = {self._add(whole, stream, [self._last[q] for q in own])}

    def command(self, at: CommandAt, queue: Hashable, home: Stream | None, plan: object) -> None:
        """home: the stream whose Sync waits for a copy in no order."""
        c = at.command
        reads, writes = c.reads, c.writes
        event = plan, c.event if isinstance(c, Record | Wait | Sync) else None
        known = [self._recorded[event]] if event in self._recorded else []
        match c:
            case Sync():
                drained = [self._last[queue]] if queue in self._last else []
                self._add(at, HOST_QUEUE, [*known, *drained, *self._loose[c.stream]])
            case _ if c.by_host:
                self._add(at, HOST_QUEUE, (), reads, writes)
            case Record():
                self._recorded[event] = self._add(at, queue)
            case Wait():
                self._add(at, queue, known)
                self._gates[queue].update(known)
            case Copy() if not self._one_order:
                self._loose[home].add(self._add(at, len(self.made), (), reads, writes))
            case Copy():
                self._gates[queue] = {self._add(at, queue, (), reads, writes)}
            case Launch() if c.programmatic:
                ahead, behind = ((reads, writes), ((), ()))
                if self._declared is None or self._declared(c.node):
                    found = weights(c)
                    ahead = found, ()
                    behind = [r for r in reads if r not in found], writes
                first = [self._add(at, len(self.made), self._gates[queue], *ahead, early=True)]
                self._add(at, queue, first, *behind)
            case _:
                if queue in self._last:
                    self._gates[queue] = {self._last[queue]}
                self._add(at, queue, (), reads, writes)


def weights(c: Command) -> Ranges:
    """What a launch that begins early reads before it waits inside."""
    if not isinstance(c, Launch) or not c.programmatic or c.by_host:
        return ()
    inputs = ops.reads(c.node)
    return [r for (t, *_), r in zip(inputs, c.reads, strict=False) if t.kind == Kind.WEIGHT]


class Cells:
    """Bytes that every range has together or not at all: `cells[n]` is buffer, begin, end."""

    def __init__(self, ranges: Iterable[Range]):
        cuts: defaultdict[Buffer, set[int]] = defaultdict(set)
        for r in ranges:
            cuts[r.buffer] |= {r.offset, r.offset + r.nbytes}
        self.cells: list[tuple[Buffer, int, int]] = []
        self._number: dict[tuple[Buffer, int], int] = {}
        for buffer, found in cuts.items():
            edges = sorted(found)
            for a, b in pairwise([*edges, edges[-1]]):  # the last one is empty
                self._number[buffer, a] = len(self.cells)
                self.cells.append((buffer, a, b))

    def of(self, r: Range) -> range:
        number = self._number
        return range(number[r.buffer, r.offset], number[r.buffer, r.offset + r.nbytes])

    def bits(self, ranges: Ranges) -> int:
        found = 0
        for own in map(self.of, ranges):
            found |= (1 << own.stop) - (1 << own.start)
        return found


def touched(moments: Sequence[Moment]) -> list[tuple[int, int]]:
    """Of each moment, what it reads and what it writes, as bits that stand for bytes."""
    cells = Cells(r for m in moments for r in (*m.reads, *m.writes))
    return [(cells.bits(m.reads), cells.bits(m.writes)) for m in moments]


def conflict(a: tuple[int, int], b: tuple[int, int]) -> int:
    """The bytes that both touch, one of them writing."""
    return a[1] & (b[0] | b[1]) | a[0] & b[1]
