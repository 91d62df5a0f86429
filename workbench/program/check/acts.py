"""From commands to a walk: a run as calls of `clocks.Walk`, ready to be walked many times.

What cannot race is left out once for all: bytes that nobody writes, and bytes that one stream
touches alone, in its order. Of a decode of some hundred launches the walk of a step is then some
dozen calls, and to try the run without one of its waits is to walk it again without that call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from workbench.graph import ops
from workbench.graph.ir import Kind, Node
from workbench.program.check.clocks import Walk
from workbench.program.check.intervals import cut
from workbench.program.check.wording import Missing
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

Declared = Callable[[Node], bool]


class Spot(NamedTuple):
    """A command of a program, whatever the step: numbers of both, the programs of a run counted as
    they first come."""

    program: int
    command: int


class Accessor(NamedTuple):
    """A command's accesses, or those of them that come early: what a Walk knows by its number."""

    program: int
    command: int
    method: Callable[..., None]  # the Walk's, with which its turn comes
    timeline: int  # none on the host
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    missing: Missing  # what these accesses lack where they race


class _Act(NamedTuple):
    """A call of a Walk's method. arguments of one that touches memory: the timeline (none on the
    host), the accessor, the pieces read and those written."""

    command: int
    method: Callable[..., None]
    arguments: tuple[Any, ...]


_Draft = _Act | Accessor  # memory is cut when everything that touches it is known
_NO_TIMELINE = -1
_LOOSE = frozenset((Walk.early, Walk.at_will))  # not in the order of a stream
_HOST_USER, _LOOSE_USER, _FIRST_USER = 0, 1, 2  # who touches a range: two bits, read and write


class Run:
    """The programs of a run, one for each step, as lists of acts; accessors by number."""

    def __init__(self, steps: Sequence[Program], one_order: bool, declared: Declared | None):
        programs = list({id(program): program for program in steps}.values())
        numbers = {id(program): i for i, program in enumerate(programs)}
        self.steps = steps
        self.order = [numbers[id(program)] for program in steps]
        self.accessors: list[Accessor] = []
        self._one_order = one_order
        self._declared = declared
        self._timelines: dict[tuple[Stream, bool], int] = {}  # of a stream, or its loose copies
        self._users: dict[Range, int] = {}
        self._programmatic = any(
            isinstance(c, Launch) and c.programmatic for p in programs for c in p.commands
        )
        drafts = [
            [
                act
                for i, command in enumerate(program.commands)
                for act in _ACTS[type(command)](self, Spot(number, i), command)
            ]
            for number, program in enumerate(programs)
        ]
        self._acts = self._cut(drafts)

    def walk(
        self, without: Collection[Spot] = (), most: int | None = None
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """As `Walk.found`, with some commands removed in every step; ends early once more than
        `most` pairs are found."""
        acts = list(self._acts)
        for number in {spot.program for spot in without}:
            acts[number] = [act for act in acts[number] if Spot(number, act.command) not in without]
        walk = Walk(len(self._timelines), self._n_pieces)
        for step, number in enumerate(self.order):
            walk.step = step
            for _, method, arguments in acts[number]:
                method(walk, *arguments)
            if most is not None and len(walk.found) > most:
                break
        return walk.found

    # commands as acts, by type --------------------------------------------------------------------

    def _at_once(self, spot: Spot, c: Command) -> Iterator[_Draft]:
        yield self._touch(Walk.on_host, _NO_TIMELINE, spot, c.reads, c.writes)

    def _copy(self, spot: Spot, c: Copy) -> Iterator[_Draft]:
        t = self._timeline(c.stream, loose=not self._one_order)
        if self._one_order:
            yield self._touch(Walk.in_turn, t, spot, c.reads, c.writes)
            yield from self._turn(spot, t)
        else:
            yield self._touch(Walk.at_will, t, spot, c.reads, c.writes, Missing.ORDER_OF_COPIES)

    def _launch(self, spot: Spot, c: Launch) -> Iterator[_Draft]:
        if c.stream.backend == HOST:
            yield from self._at_once(spot, c)
            return
        t = self._timeline(c.stream)
        reads, writes, early = c.reads, c.writes, Walk.early
        if not c.programmatic:
            yield from self._turn(spot, t)
        elif self._declared is not None and not self._declared(c.node):
            yield self._touch(early, t, spot, reads, writes, Missing.DECLARED_WAIT)
            return
        else:
            weights = [tensor.kind == Kind.WEIGHT for tensor, *_ in ops.reads(c.node)]
            ahead = tuple([r for r, is_one in zip(reads, weights, strict=False) if is_one])
            reads = tuple([r for r in reads if r not in ahead])
            yield self._touch(early, t, spot, ahead, (), Missing.STREAM_ORDER_OF_WEIGHTS)
        yield self._touch(Walk.in_turn, t, spot, reads, writes)

    def _record(self, spot: Spot, c: Record) -> Iterator[_Draft]:
        yield _Act(spot.command, Walk.record, (c.event, self._timeline(c.stream)))

    def _wait(self, spot: Spot, c: Wait) -> Iterator[_Draft]:
        t = self._timeline(c.stream)
        yield _Act(spot.command, Walk.wait, (c.event, t))
        yield from self._turn(spot, t)

    def _sync(self, spot: Spot, c: Sync) -> Iterator[_Draft]:
        if c.event is not None:
            yield _Act(spot.command, Walk.sync, (c.event,))
        if c.stream is not None:
            loose = (False,) if self._one_order else (False, True)
            drained = tuple([self._timeline(c.stream, which) for which in loose])
            yield _Act(spot.command, Walk.drain, (drained,))

    def _turn(self, spot: Spot, t: int) -> Iterator[_Act]:
        if self._programmatic:
            yield _Act(spot.command, Walk.turn, (t,))

    def _timeline(self, stream: Stream, loose: bool = False) -> int:
        return self._timelines.setdefault((stream, loose), len(self._timelines))

    def _touch(
        self,
        method: Callable[..., None],
        t: int,
        spot: Spot,
        reads: tuple[Range, ...],
        writes: tuple[Range, ...],
        missing: Missing = Missing.WAIT,
    ) -> Accessor:
        bit = 1 << 2 * (_HOST_USER if t == _NO_TIMELINE else _FIRST_USER + t)
        if method in _LOOSE:
            bit |= 1 << 2 * _LOOSE_USER
        users = self._users
        for r in reads:
            users[r] = users.get(r, 0) | bit
        for r in writes:
            users[r] = users.get(r, 0) | bit << 1
        made = Accessor(*spot, method, t, reads, writes, missing)
        self.accessors.append(made)
        return made

    # memory ---------------------------------------------------------------------------------------

    def _cut(self, drafts: list[list[_Draft]]) -> list[list[_Act]]:
        """Gives what touches memory its pieces, and leaves out what cannot race."""
        readings = sum(1 << 2 * user for user in range(_FIRST_USER + len(self._timelines)))

        def can_race(bits: int) -> bool:
            """Whether somebody writes, and more than one touch it: two bits are set or more."""
            users = (bits | bits >> 1) & readings
            return bool(bits >> 1 & readings) and users & (users - 1) != 0

        pieces = cut(self._users, can_race)
        self._n_pieces = pieces.n
        numbers = count()  # of the accessors, in the order in which they were made
        acts = [
            [a for d in draft if (a := _placed(d, numbers, pieces.of)) is not None]
            for draft in drafts
        ]
        early = {a.arguments[0] for own in acts for a in own if a.method is Walk.early}
        return [
            [a for a in own if a.method is not Walk.turn or a.arguments[0] in early] for own in acts
        ]


_ACTS: dict[type[Command], Callable[[Run, Spot, Any], Iterable[_Draft]]] = {
    Write: Run._at_once,
    Read: Run._at_once,
    Copy: Run._copy,
    Launch: Run._launch,
    Record: Run._record,
    Wait: Run._wait,
    Sync: Run._sync,
}


def _placed(draft: _Draft, numbers: Iterator[int], of: Mapping[Range, range]) -> _Act | None:
    """None for what touches no piece."""
    if isinstance(draft, _Act):
        return draft
    number = next(numbers)
    reads, writes = _together(draft.reads, of), _together(draft.writes, of)
    if not (reads or writes):
        return None
    where = () if draft.timeline == _NO_TIMELINE else (draft.timeline,)
    return _Act(draft.command, draft.method, (*where, number, reads, writes))


def _together(ranges: Iterable[Range], of: Mapping[Range, range]) -> Sequence[int]:
    found = [of[r] for r in ranges if of[r]]
    return found[0] if len(found) == 1 else tuple(dict.fromkeys(chain.from_iterable(found)))
