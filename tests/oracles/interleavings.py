"""Every interleaving of a run, by brute force: what the hazard checker and the adversary are held
to. Small runs only, or large ones reduced to the commands that touch a few bytes.

It tries every order in which the host and the streams can do what touches memory, one whole
command at a time, and remembers the states it has been in (how far everybody is, and which command
wrote each byte last). Whole commands are enough: of two commands that nothing orders either can be
first, and what a reader may see amid the pieces of the other, it may see after all of it too. The
rest (Record, Wait, Sync, and queuing) touches no memory and only lets others go on, so it happens
as soon as it can.

Nothing here is shared with `workbench.program`'s own readers of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.graph.ir import F32, Node, StepShape, Tensor
from workbench.graph.ops import make
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
    Space,
    Stream,
    Sync,
    Wait,
    Write,
)

if TYPE_CHECKING:
    from workbench.program.check.hazards import Race

MOST_STATES = 50_000
BEFORE = -1  # version of what was there before the run

Key = tuple[int, int]  # a command by its step, and its number in it
Queue = tuple[Stream, int]  # a stream, and which copy where each is a queue of its own


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
        self._commands: list[Command] = []
        touched = []
        for key, command in [
            ((s, i), c) for s, p in enumerate(steps) for i, c in enumerate(p.commands)
        ]:
            kept = among is None or key in among
            both = [_clipped(r, within) if kept else () for r in (command.reads, command.writes)]
            if any(both) or isinstance(command, (Record, Wait, Sync)):
                self._keys.append(key)
                self._commands.append(command)
                touched.append(both)
        self._cells = _cells([r for both in touched for ranges in both for r in ranges])
        self._touched = [tuple(map(self._numbers, both)) for both in touched]
        self._recorded = _latest_records(self._commands)

        versions: tuple[int, ...] = (BEFORE,) * len(self._cells)
        self._expected: list[tuple[int, ...]] = []
        for n in range(len(self._commands)):
            self._expected.append(versions)
            versions = self._written(n, versions)
        self._final = versions
        self.wrong: set[Wrong] = set()
        self.n_states = self._explore()

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
        for i, (queue, (head, *rest)) in enumerate(queues):
            if any(self._touched[head]):
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
            return all(stream != command.stream for stream, _ in queues)
        return self._recorded.get(n) not in pending

    def _by_host(self, n: int) -> bool:
        command = self._commands[n]
        return isinstance(command, (Write, Read, Sync)) or (
            isinstance(command, Launch) and command.stream.backend == HOST
        )

    def _queue_of(self, n: int) -> Queue:
        command: Any = self._commands[n]
        own = isinstance(command, Copy) and not self._one_order
        return command.stream, n if own else -1

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
    pair = {at[:2] for at in (race.first, race.second)}
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


def _latest_records(commands: Sequence[Command]) -> dict[int, int]:
    """For each Wait and Sync on an event, by number: the Record it refers to, if any."""
    latest: dict[str | None, int] = {}
    found = {}
    for n, c in enumerate(commands):
        if isinstance(c, Record):
            latest[c.event] = n
        elif isinstance(c, (Wait, Sync)) and c.event in latest:
            found[n] = latest[c.event]
    return found


# runs --------------------------------------------------------------------------------------------


def program(commands: Sequence[Command]) -> Program:
    """A program of nothing but commands."""
    buffers = dict.fromkeys(r.buffer for c in commands for r in (*c.reads, *c.writes))
    return Program(
        commands=list(commands),
        buffers=list(buffers),
        layout=[],
        splits=[],
        backends=("host", "dev", "dev2"),
        shape=StepShape(1, 1, 1),
        sync="",
        copy_stream="",
    )


def node(name: str) -> Node:
    """A node to launch; what it touches is what its Launch says."""
    return make("add", name, Tensor("a", F32, (1,)), Tensor("b", F32, (1,)))


STREAMS = (Stream(1, 0), Stream(1, 1), Stream(2, 0))
N_EVENTS = 2
N_BYTES = 4  # of each buffer
MOST_COMMANDS = 16  # of a run


def random_run(rng: Random) -> list[Program]:
    """A run of about MOST_COMMANDS commands at most: one program again and again, or several.

    Commands come alone, which mostly race, and in the few groups that order work (see `_group`), of
    which any may lack a command.
    """
    buffers = [Buffer(name, Space.PINNED, N_BYTES, 1) for name in "xyz"[: rng.randint(2, 3)]]
    n_steps = rng.randint(1, 3)
    most = MOST_COMMANDS // n_steps
    alike = rng.random() < 0.5
    made = [
        program(_random_commands(rng, buffers, rng.randint(1, most)))
        for _ in range(1 if alike else n_steps)
    ]
    return made * (n_steps // len(made))


def _random_commands(rng: Random, buffers: list[Buffer], n: int) -> list[Command]:
    found: list[Command] = []
    while len(found) < n:
        for kind, where, event in _group(rng):
            if rng.random() < 0.95:
                found.append(kind(rng, buffers, where, event))
    return found[:n]


_Kind = Callable[[Random, list[Buffer], Stream, str], Command]


def _range(rng: Random, buffer: Buffer, nbytes: int = 0) -> Range:
    nbytes = nbytes or rng.choice((N_BYTES, rng.randint(1, N_BYTES)))
    return Range(buffer, rng.randint(0, N_BYTES - nbytes), nbytes)


def _write(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Write(_range(rng, rng.choice(buffers)), "v")


def _read(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Read(_range(rng, rng.choice(buffers)), "v")


def _copy(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    dst, src = rng.sample(buffers, 2)
    to = _range(rng, dst)
    return Copy(to, _range(rng, src, to.nbytes), where, "c", 0)


def _launch(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    reads, writes = (
        tuple(_range(rng, rng.choice(buffers)) for _ in range(n))
        for n in (rng.randint(0, 2), rng.randint(0, 1))
    )
    return Launch(node("n"), where, reads, writes, None, 0)


def _host_launch(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return _launch(rng, buffers, Stream(HOST, 0), event)


def _record(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Record(event, where, 0)


def _wait(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Wait(event, where, 0)


def _sync_event(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Sync(0, event=event)


def _sync_stream(rng: Random, buffers: list[Buffer], where: Stream, event: str) -> Command:
    return Sync(0, stream=where)


_WORK: tuple[_Kind, ...] = (_copy, _launch)
_BY_HOST: tuple[_Kind, ...] = (_write, _read, _host_launch)
_ORDER: tuple[_Kind, ...] = (_record, _wait, _sync_event, _sync_stream)


def _group(rng: Random) -> list[tuple[_Kind, Stream, str]]:
    """Commands that belong together, as kind, stream and event."""
    here, there, event = rng.choice(STREAMS), rng.choice(STREAMS), str(rng.randrange(N_EVENTS))
    work, more, by_host = rng.choice(_WORK), rng.choice(_WORK), rng.choice(_BY_HOST)
    groups: tuple[list[tuple[_Kind, Stream, str]], ...] = (
        [(work, here, event)],
        [(by_host, here, event)],
        [(rng.choice(_ORDER), here, event)],
        # one stream behind another, and the host behind a stream
        [(work, here, event), (_record, here, event), (_wait, there, event), (more, there, event)],
        [
            (work, here, event),
            (_record, here, event),
            (_sync_event, here, event),
            (by_host, here, 0),
        ],
        [(work, here, event), (_sync_stream, here, event), (by_host, here, event)],
        # work that comes behind the record is not waited for
        [(_record, here, event), (work, here, event), (_wait, there, event), (more, there, event)],
        [
            (_record, here, event),
            (work, here, event),
            (_sync_event, here, event),
            (by_host, here, 0),
        ],
    )
    return rng.choice(groups)
