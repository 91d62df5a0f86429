"""Every interleaving of a run, by brute force: what the hazard checker and the adversary are held
to. Small runs only, or large ones reduced to the commands that touch a few bytes.

It tries every order in which the host and the streams can do what touches memory, one whole
command at a time. It remembers the states it has been in: how far everybody is, and which command
wrote each byte last. Whole commands are enough. If nothing orders two commands, either can be
first. What a reader may see amid the pieces of the other, it may see after all of it too. The rest
(Record, Wait, Sync, and queuing) touches no memory and only lets others go on, so it happens as
soon as it can. What a programmatic launch reads early, the weights, is a command of its own, in a
queue of its own. It can come when the kernel in front of the launch has begun, and when what the
stream has waited for since then is over.

A plan is two edges in the queue of its stream, and between them its parts: those on other streams
are in queues of the plan's own, where they wait for the first edge, and the second waits for them.

Nothing here is shared with `workbench.program`'s own readers of programs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.graph import ops
from workbench.graph.ir import Kind
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

if TYPE_CHECKING:
    from workbench.program.check.hazards import Race

MOST_STATES = 50_000
BEFORE = -1  # version of what was there before the run

Key = tuple[int, int, int | None]  # a command by its step, its number, and its part's in a plan
# a stream, the number of a plan or 0, and which copy where each is a queue of its own
Queue = tuple[Stream, int, int]


class _Edge(NamedTuple):
    """The begin of a plan, or the end. number: the plan's, from 1 on."""

    stream: Stream
    number: int
    ends: bool = False
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    by_host: bool = False


_Entry = tuple[Key, Any, int]  # a command or an edge, and the number of its plan or 0


def _listed(steps: Sequence[Program]) -> list[_Entry]:
    found: list[_Entry] = []
    for s, program in enumerate(steps):
        for i, c in enumerate(program.commands):
            if isinstance(c, Replay):
                plan = len(found) + 1
                found.append(((s, i, None), _Edge(c.stream, plan), 0))
                found += [((s, i, n), part, plan) for n, part in enumerate(c.parts)]
                found.append(((s, i, None), _Edge(c.stream, plan, ends=True), 0))
            else:
                found.append(((s, i, None), c, 0))
    return found


class TooManyStates(Exception):
    pass


class Wrong(NamedTuple):
    """A command (None: the end of the run) that can see another version than program order's."""

    reader: Key | None
    buffer: Buffer
    offset: int
    nbytes: int


class _State(NamedTuple):
    host: int
    queues: tuple[tuple[Queue, tuple[int, ...]], ...]
    versions: tuple[int, ...]


class Interleavings:
    """wrong: everything that some interleaving makes wrong. n_states: how many it took; raises
    TooManyStates above MOST_STATES.

    within: look at these bytes only. among: only these commands touch memory; the others, Record,
    Wait and Sync apart, are as if they were not there. one_order: see `Capabilities`.
    """

    def __init__(
        self,
        steps: Sequence[Program],
        one_order: bool = True,
        within: Range | None = None,
        among: Collection[Key] | None = None,
    ):
        self._one_order = one_order
        self._keys: list[Key] = []
        self._commands: list[Any] = []  # and the edges of plans
        self._early: set[int] = set()  # what launches read early
        self._needs: dict[int, set[int]] = {}  # what must be over before a command can be next
        self._gates: dict[Queue, set[int]] = {}  # the same, for what comes early
        self._queued: dict[Queue, set[int]] = {}
        self._latest: dict[tuple[int, str | None], int] = {}  # of an event, its latest Record
        self._plans: list[int] = []  # of each command
        self._edges: dict[int, tuple[Stream, int]] = {}  # of a plan: its stream and its begin
        touched: list[Any] = []
        for key, command, plan in _listed(steps):
            kept = among is None or key in among
            ahead = _ahead(command)
            rest = [r for r in command.reads if r not in ahead]
            early, *both = (
                _clipped(r, within) if kept else () for r in (ahead, rest, command.writes)
            )
            if early:
                self._early.add(len(self._keys))
                self._needs[len(self._keys)] = set(self._gate(command, plan))
                self._keys.append(key)
                self._commands.append(command)
                self._plans.append(plan)
                touched.append([early, ()])
            if any(both) or early or isinstance(command, (Record, Wait, Sync, _Edge)):
                n = len(self._keys)
                self._needs[n] = {n - 1} if early else set()
                self._keys.append(key)
                self._commands.append(command)
                self._plans.append(plan)
                touched.append(both)
                self._order(command, n, plan)
            else:
                self._order(command, None, plan)
        self._cells = _cells([r for both in touched for ranges in both for r in ranges])
        self._touched = [tuple(map(self._numbers, both)) for both in touched]

        versions: tuple[int, ...] = (BEFORE,) * len(self._cells)
        self._expected: list[tuple[int, ...]] = []
        for n in range(len(self._commands)):
            self._expected.append(versions)
            versions = self._written(n, versions)
        self._final = versions
        self.wrong: set[Wrong] = set()
        self.n_states = self._explore()

    def _order(self, command: Any, n: int | None, plan: int) -> None:
        """Enters what comes behind a command, and what it comes behind. n: None for one that is
        left out."""
        event = plan, command.event if isinstance(command, (Record, Wait, Sync)) else None
        if isinstance(command, (Wait, Sync)) and n is not None and event in self._latest:
            self._needs[n].add(self._latest[event])
        if isinstance(command, Record) and n is not None:
            self._latest[event] = n
        if command.stream is None or isinstance(command, Sync) or command.by_host:
            return
        queue = self._queue(command, plan)
        queued = self._queued.setdefault(queue, set())
        gate = self._gate(command, plan)
        if isinstance(command, _Edge):
            assert n is not None
            if command.ends:  # behind what is queued in the plan's own queues
                for (_, number, _), parts in self._queued.items():
                    if number == command.number:
                        self._needs[n] |= parts
            else:
                self._edges[command.number] = command.stream, n
            gate |= {*queued, n}
        elif n is not None and queue[1]:
            self._needs[n].add(self._edges[plan][1])
        if isinstance(command, Launch) and not command.programmatic:
            gate |= queued
        if isinstance(command, Wait) and n is not None:
            gate |= self._needs[n]
        if n is not None and (self._one_order or not isinstance(command, Copy)):
            queued.add(n)
        if isinstance(command, Copy) and self._one_order:
            gate |= queued

    def _queue(self, command: Any, plan: int) -> Queue:
        """Of a command, were it no queue by itself. A copy in a plan that keeps no order with its
        stream is waited for on the plan's."""
        if not plan or command.stream == self._edges[plan][0]:
            return command.stream, 0, -1
        if isinstance(command, Copy) and not self._one_order:
            return self._edges[plan][0], 0, -1
        return command.stream, plan, -1

    def _gate(self, command: Any, plan: int) -> set[int]:
        queue = self._queue(command, plan)
        begun = {self._edges[plan][1]} if queue[1] else set()
        return self._gates.setdefault(queue, begun)

    def _explore(self) -> int:
        start = self._settled(_State(0, (), (BEFORE,) * len(self._cells)))
        seen, to_visit = {start}, [start]
        while to_visit:
            for state in map(self._settled, self._next(to_visit.pop())):
                if state not in seen:
                    seen.add(state)
                    to_visit.append(state)
            if len(seen) > MOST_STATES:
                raise TooManyStates(f"more than {MOST_STATES} states; reduce the run")
        return len(seen)

    def _next(self, state: _State) -> Iterable[_State]:
        """The states after each command that touches memory and can be next."""
        host, queues, versions = state
        if host < len(self._commands) and self._by_host(host) and any(self._touched[host]):
            yield _State(host + 1, queues, self._done(host, versions))
        pending = {m for _, queued in queues for m in queued}
        for i, (queue, (head, *rest)) in enumerate(queues):
            if any(self._touched[head]) and not self._needs[head] & pending:
                left = ((queue, tuple(rest)),) if rest else ()
                yield _State(
                    host, (*queues[:i], *left, *queues[i + 1 :]), self._done(head, versions)
                )
        if host == len(self._commands) and not queues:
            self._look(None, versions, self._final, range(len(versions)))

    def _done(self, n: int, versions: tuple[int, ...]) -> tuple[int, ...]:
        self._look(self._keys[n], versions, self._expected[n], self._touched[n][0])
        return self._written(n, versions)

    def _look(self, reader, versions, expected, cells: Iterable[int]) -> None:
        for cell in cells:
            if versions[cell] != expected[cell]:
                self.wrong.add(Wrong(reader, *self._cells[cell]))

    def _written(self, n: int, versions: tuple[int, ...]) -> tuple[int, ...]:
        cells = self._touched[n][1]
        return tuple(n if cell in cells else v for cell, v in enumerate(versions))

    # what touches no memory ---------------------------------------------------------------------

    def _settled(self, state: _State) -> _State:
        """The state after everything that can happen and touches no memory."""
        host, versions = state.host, state.versions
        queues = dict(state.queues)
        moved = True
        while moved:
            moved = False
            for queue, (head, *rest) in list(queues.items()):
                if not any(self._touched[head]) and self._passes(head, queues):
                    moved = True
                    queues[queue] = tuple(rest)
                    if not rest:
                        del queues[queue]
            while host < len(self._commands) and not self._host_stops(host, queues):
                if not self._by_host(host):
                    queue = self._queue_of(host)
                    queues[queue] = (*queues.get(queue, ()), host)
                host += 1
                moved = True
        return _State(host, tuple(sorted(queues.items())), versions)

    def _host_stops(self, n: int, queues: dict[Queue, tuple[int, ...]]) -> bool:
        if isinstance(self._commands[n], Sync):
            return not self._passes(n, queues)
        return self._by_host(n) and any(self._touched[n])

    def _passes(self, n: int, queues: dict[Queue, tuple[int, ...]]) -> bool:
        """Whether what command n waits for has happened."""
        command = self._commands[n]
        pending = {m for queued in queues.values() for m in queued}
        if isinstance(command, Sync) and command.stream is not None:
            return all(queue[:2] != (command.stream, 0) for queue in queues)
        return not self._needs[n] & pending

    def _by_host(self, n: int) -> bool:
        command = self._commands[n]
        return isinstance(command, (Write, Read, Sync)) or (
            isinstance(command, Launch) and command.stream.backend == HOST
        )

    def _queue_of(self, n: int) -> Queue:
        command = self._commands[n]
        stream, plan, _ = self._queue(command, self._plans[n])
        own = isinstance(command, Copy) and not self._one_order
        return stream, plan, n if own or n in self._early else -1

    def _numbers(self, ranges: Iterable[Range]) -> tuple[int, ...]:
        return tuple(
            n
            for n, (buffer, offset, nbytes) in enumerate(self._cells)
            for r in ranges
            if r.buffer is buffer and r.offset <= offset and offset + nbytes <= r.offset + r.nbytes
        )


def ends_wrong(steps: Sequence[Program], race: Race, one_order: bool) -> bool:
    """Whether some interleaving of the run reduced to a race's two commands, and to the bytes they
    dispute, is wrong."""
    disputed = Range(race.buffer, race.offset, race.nbytes)
    pair = {at.key for at in (race.first, race.second)}
    return bool(Interleavings(steps, one_order, disputed, pair).wrong)


def _clipped(ranges: Iterable[Range], within: Range | None) -> tuple[Range, ...]:
    if within is None:
        return tuple(r for r in ranges if r.nbytes)
    found = []
    for r in ranges:
        a = max(r.offset, within.offset)
        b = min(r.offset + r.nbytes, within.offset + within.nbytes)
        if r.buffer is within.buffer and a < b:
            found.append(Range(r.buffer, a, b - a))
    return tuple(found)


def _cells(ranges: Iterable[Range]) -> list[tuple[Buffer, int, int]]:
    """Bytes that every range has together or not at all, as (buffer, offset, bytes)."""
    cuts: dict[Buffer, set[int]] = {}
    for r in ranges:
        cuts.setdefault(r.buffer, set()).update((r.offset, r.offset + r.nbytes))
    return [(b, x, y - x) for b, found in cuts.items() for x, y in pairwise(sorted(found))]


def _ahead(command: Command) -> tuple[Range, ...]:
    """What a command reads early: the weights, if it is a programmatic launch."""
    if not (isinstance(command, Launch) and command.programmatic) or command.by_host:
        return ()
    kinds = [tensor.kind for tensor, *_ in ops.reads(command.node)]
    return tuple(r for r, kind in zip(command.reads, kinds, strict=False) if kind == Kind.WEIGHT)
