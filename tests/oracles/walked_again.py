"""The hazard checker's first form: a walk for every wait that is tried, a log for every piece.

It shares nothing with `program/check/` but the words for what a race lacks. Memory is cut at every
end of a range, and each range covers all of its pieces. Every wait that may be superfluous is
removed, and all steps are walked again. What it finds is what the checker finds, and it takes
waits times commands to do so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from operator import gt
from typing import Any, NamedTuple

from workbench.graph import ops
from workbench.graph.ir import Kind, Node
from workbench.program.commands import (
    HOST,
    Buffer,
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

Clock = list[int]
Declared = Callable[[Node], bool]
Spot = tuple[int, int | None]  # a command by its number in a program, and by its part's in a plan
At = tuple[int, int, int | None]  # the same, of a step


class Found(NamedTuple):
    """A race: two commands, bytes offset..offset+nbytes-1 of a buffer, `write-read` and so on."""

    first: At
    second: At
    buffer: Buffer
    offset: int
    nbytes: int
    kind: str


class _Piece:
    def __init__(self, n: int):
        self.last_read: Clock = [0] * n
        self.last_write: Clock = [0] * n
        self.readers: dict[int, dict[int, tuple[int, int]]] = {}
        self.writers: dict[int, dict[int, tuple[int, int]]] = {}


class _Walk:
    """One walk: found[a, b] is (step of a, step of b), of accessors by number."""

    def __init__(self, n: int, pieces: int):
        self.step = 0
        self.found: dict[tuple[int, int], tuple[int, int]] = {}
        self._host: Clock = [0] * n
        self._streams: list[Clock] = [[0] * n for _ in range(n)]
        self._gates: list[Clock] = [[0] * n for _ in range(n)]
        self._events: dict[str, Clock] = {}
        self._n = n
        self._pieces = [_Piece(n) for _ in range(pieces)]

    def on_host(self, accessor, reads, writes) -> None:
        self._compare(self._host, accessor, reads, writes)

    def in_order(self, t, accessor, reads, writes) -> None:
        self._compare(self._issued(t), accessor, reads, writes)
        self._enter(t, accessor, reads, writes)

    def early(self, t, accessor, reads, writes) -> None:
        self._compare(_later(self._gates[t], self._host), accessor, reads, writes)
        self._enter(t, accessor, reads, writes)

    def at_will(self, t, accessor, reads, writes) -> None:
        self._compare(self._host, accessor, reads, writes)
        self._enter(t, accessor, reads, writes)

    def gate(self, t) -> None:
        self._gates[t] = self._issued(t).copy()

    def record(self, event, t) -> None:
        self._events[event] = self._issued(t).copy()

    def wait(self, event, t) -> None:
        if event in self._events:
            self._streams[t] = _later(self._issued(t), self._events[event])
            self._gates[t] = _later(self._gates[t], self._events[event])

    def sync(self, event) -> None:
        if event in self._events:
            self._host = _later(self._host, self._events[event])

    def drain(self, timelines) -> None:
        for t in timelines:
            self._host = _later(self._host, self._streams[t])

    def _issued(self, t: int) -> Clock:
        self._streams[t] = _later(self._streams[t], self._host)
        return self._streams[t]

    def _compare(self, clock, accessor, reads, writes) -> None:
        for p in writes:
            piece = self._pieces[p]
            if any(map(gt, piece.last_write, clock)):
                self._collect(piece.writers, clock, accessor)
            if any(map(gt, piece.last_read, clock)):
                self._collect(piece.readers, clock, accessor)
        for p in reads:
            if any(map(gt, self._pieces[p].last_write, clock)):
                self._collect(self._pieces[p].writers, clock, accessor)

    def _collect(self, log, clock: Clock, accessor: int) -> None:
        for t, entries in log.items():
            for other, (number, step) in entries.items():
                if number > clock[t]:
                    self.found.setdefault((other, accessor), (step, self.step))

    def _enter(self, t: int, accessor: int, reads, writes) -> None:
        self._streams[t][t] = number = self._streams[t][t] + 1
        for p in reads:
            self._pieces[p].readers.setdefault(t, {})[accessor] = number, self.step
            self._pieces[p].last_read[t] = number
        for p in writes:
            self._pieces[p].writers.setdefault(t, {})[accessor] = number, self.step
            self._pieces[p].last_write[t] = number


def _later(a: Clock, b: Clock) -> Clock:
    return [max(x, y) for x, y in zip(a, b, strict=True)]


class _Accessor(NamedTuple):
    program: int
    command: Spot
    method: Callable[..., None]
    timeline: tuple[int, ...]
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]


class _Act(NamedTuple):
    command: Spot | None  # none: a plan's own
    method: Callable[..., None]
    arguments: tuple[Any, ...]


class WalkedAgain:
    """Steps as acts; `races`, `superfluous` and `sufficient` as `hazards` has them."""

    def __init__(
        self, steps: Sequence[Program], one_order: bool = True, declared: Declared | None = None
    ):
        programs = list({id(program): program for program in steps}.values())
        numbers = {id(program): i for i, program in enumerate(programs)}
        self._steps = steps
        self._order = [numbers[id(program)] for program in steps]
        self._accessors: list[_Accessor] = []
        self._one_order, self._declared = one_order, declared
        self._timelines: dict[tuple[Stream, bool], int] = {}
        drafts = [
            [a for i, c in enumerate(program.commands) for a in self._acts_at(number, i, c)]
            for number, program in enumerate(programs)
        ]
        ranges = {r for a in self._accessors for r in (*a.reads, *a.writes)}
        pieces, self._n_pieces = _cut(ranges)
        accessors = iter(enumerate(self._accessors))
        self._acts = []
        for draft in drafts:
            acts = []
            for act in draft:
                if isinstance(act, _Accessor):
                    number, a = next(accessors)
                    both = [
                        sorted(set(chain.from_iterable(pieces[r] for r in some)))
                        for some in (a.reads, a.writes)
                    ]
                    acts.append(_Act(a.command, a.method, (*a.timeline, number, *both)))
                else:
                    acts.append(act)
            self._acts.append(acts)

    def races(self) -> set[Found]:
        """Every race, without `may` and what is missing."""
        told = set()
        for (a, b), (first, second) in self._walk().items():
            one, other = self._accessors[a], self._accessors[b]
            by_bytes: dict[tuple[Buffer, int, int], str] = {}
            for kind, ours, theirs in (
                ("write-write", one.writes, other.writes),
                ("write-read", one.writes, other.reads),
                ("read-write", one.reads, other.writes),
            ):
                for r, s in product(ours, theirs):
                    begin = max(r.offset, s.offset)
                    nbytes = min(r.offset + r.nbytes, s.offset + s.nbytes) - begin
                    if r.buffer is s.buffer and nbytes > 0:
                        by_bytes.setdefault((r.buffer, begin, nbytes), kind)
            for where, kind in by_bytes.items():
                told.add(Found((first, *one.command), (second, *other.command), *where, kind))
        return told

    def superfluous(self, steady: range | None = None) -> list[At]:
        n = len(self._walk())
        return [w for w in self._waits(steady) if len(self._walk({self._spot(w)})) == n]

    def sufficient(self, steady: range | None = None) -> list[At]:
        n, gone, kept = len(self._walk()), set[At](), []
        for wait in self._waits(steady):
            tried = gone | {self._spot(wait)}
            if len(self._walk(tried)) == n:
                gone = tried
            else:
                kept.append(wait)
        return kept

    def _waits(self, steady: range | None) -> list[At]:
        first: dict[int, int] = {}
        for step in range(len(self._steps)) if steady is None else steady:
            first.setdefault(self._order[step], step)
        return [
            (step, i, part)
            for step in first.values()
            for i, whole in enumerate(self._steps[step].commands)
            for part, command in _parts(whole)
            if isinstance(command, (Sync, Wait))
        ]

    def _spot(self, at: At) -> At:
        return self._order[at[0]], *at[1:]

    def _walk(self, without: Collection[At] = ()) -> dict[tuple[int, int], tuple[int, int]]:
        walk = _Walk(len(self._timelines), self._n_pieces)
        for step, number in enumerate(self._order):
            walk.step = step
            for command, method, arguments in self._acts[number]:
                if command is None or (number, *command) not in without:
                    method(walk, *arguments)
        return walk.found

    def _acts_at(self, program: int, i: int, whole: Command) -> Iterator[_Act | _Accessor]:
        """A plan is written out as commands with streams and events that only it has."""
        if not isinstance(whole, Replay):
            yield from self._acts_of(program, (i, None), whole)
            return
        here = self._timeline(whole.stream)
        yield _Act(None, _Walk.gate, (here,))
        forked = {p.stream: Stream(p.stream.backend, 1000 + 100 * whole.stream.id + p.stream.id)
                  for p in whole.parts if p.stream != whole.stream}  # fmt: skip
        for stream in forked.values():
            yield _Act(None, _Walk.record, ("fork", here))
            yield _Act(None, _Walk.wait, ("fork", self._timeline(stream)))
        recorded = set()
        for number, part in _parts(whole):
            stream = forked.get(part.stream, part.stream)
            if isinstance(part, Copy) and not self._one_order:
                stream = whole.stream
            if isinstance(part, (Record, Wait)):
                recorded |= {part.event} if isinstance(part, Record) else set()
                if part.event not in recorded:
                    continue
                part = replace(part, event=("plan", part.event))
            yield from self._acts_of(program, (i, number), replace(part, stream=stream))
        for stream in forked.values():
            yield _Act(None, _Walk.record, ("join", self._timeline(stream)))
            yield _Act(None, _Walk.wait, ("join", here))
        yield _Act(None, _Walk.gate, (here,))

    def _acts_of(self, program: int, i: Spot, c: Command) -> Iterator[_Act | _Accessor]:
        match c:
            case Write() | Read():
                yield self._touch(program, i, _Walk.on_host, (), c.reads, c.writes)
            case Launch() if c.stream.backend == HOST:
                yield self._touch(program, i, _Walk.on_host, (), c.reads, c.writes)
            case Copy() if self._one_order:
                t = self._timeline(c.stream)
                yield self._touch(program, i, _Walk.in_order, (t,), c.reads, c.writes)
                yield _Act(i, _Walk.gate, (t,))
            case Copy():
                t = self._timeline(c.stream, True)
                yield self._touch(program, i, _Walk.at_will, (t,), c.reads, c.writes)
            case Launch():
                yield from self._launch(program, i, c)
            case Record():
                yield _Act(i, _Walk.record, (c.event, self._timeline(c.stream)))
            case Wait():
                yield _Act(i, _Walk.wait, (c.event, self._timeline(c.stream)))
            case Sync():
                if c.event is not None:
                    yield _Act(i, _Walk.sync, (c.event,))
                if c.stream is not None:
                    loose = (False,) if self._one_order else (False, True)
                    both = tuple([self._timeline(c.stream, which) for which in loose])
                    yield _Act(i, _Walk.drain, (both,))

    def _launch(self, program: int, i: Spot, c: Launch) -> Iterator[_Act | _Accessor]:
        t = self._timeline(c.stream)
        reads = c.reads
        if not c.programmatic:
            yield _Act(i, _Walk.gate, (t,))
        elif self._declared is not None and not self._declared(c.node):
            yield self._touch(program, i, _Walk.early, (t,), reads, c.writes)
            return
        else:
            weights = [tensor.kind == Kind.WEIGHT for tensor, *_ in ops.reads(c.node)]
            ahead = tuple([r for r, is_one in zip(reads, weights, strict=False) if is_one])
            reads = tuple([r for r in reads if r not in ahead])
            yield self._touch(program, i, _Walk.early, (t,), ahead, ())
        yield self._touch(program, i, _Walk.in_order, (t,), reads, c.writes)

    def _timeline(self, stream: Stream, loose: bool = False) -> int:
        return self._timelines.setdefault((stream, loose), len(self._timelines))

    def _touch(self, *what: Any) -> _Accessor:
        made = _Accessor(*what)
        self._accessors.append(made)
        return made


def _parts(command: Command) -> list[tuple[int | None, Command]]:
    """The parts of a plan by number, or the command itself."""
    return [*enumerate(command.parts)] if isinstance(command, Replay) else [(None, command)]


def _cut(ranges: Iterable[Range]) -> tuple[dict[Range, range], int]:
    """The numbers of the pieces that each range covers; and how many there are."""
    by_buffer: defaultdict[Buffer, list[Range]] = defaultdict(list)
    for r in ranges:
        by_buffer[r.buffer].append(r)
    of, n = {}, 0
    for some in by_buffer.values():
        edges = sorted({edge for r in some for edge in (r.offset, r.offset + r.nbytes)})
        number = {edge: n + i for i, edge in enumerate(edges)}
        n += len(edges)
        for r in some:
            of[r] = range(number[r.offset], number[r.offset + r.nbytes])
    return of, n
