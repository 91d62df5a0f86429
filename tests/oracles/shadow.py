"""A run in shadow: which of its bytes can go wrong, and which version of them each command should
see. What the adversary plays with; it holds no order but the host's and each queue's.

Every byte carries the number of the command that wrote it last, its version. Bytes are grouped
into segments between the bounds of all accesses (a copy's pieces have bounds of their own).
Segments that nobody writes, or that one queue alone touches (its order is program order), cannot
go wrong and are left out, and with them what touches nothing else: of a model's step little more
than its inputs and results remains.

Ranges are taken as declared: a command that declares a superset counts as touching all of it. What
a programmatic launch reads early, the weights, is a task of its own. It may run as soon as the
kernel in front of the launch has begun, and what the stream has waited for since is over.

The parts of a plan are commands by themselves. What they have on other streams goes to queues of
the plan's stream, which begin with a task that waits for this stream; when the plan ends, the
stream waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from workbench.graph import ops
from workbench.graph.ir import Kind
from workbench.program.commands import (
    HOST,
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

PIECES = 3  # parts of a copy that move on their own
BEFORE = -1  # version of the bytes that were there before the run
HOST_QUEUE = 0  # the host thread, among the queues


class Op(NamedTuple):
    """One moment of a command: segments first..end-1 read, or written.

    versions: those a read should see, or those a write leaves, one a segment. spoils: what it
    writes is not the copy's bytes yet.
    """

    command: int
    reads: bool
    first: int
    end: int
    versions: list[int]
    spoils: bool = False


class Point(NamedTuple):
    """Reached when `queue` has done `n_done` of its tasks."""

    queue: int
    n_done: int


class Task(NamedTuple):
    """Queued work: its ops, in each order it may do them (none for a Wait), behind the points
    `after`."""

    orders: tuple[tuple[Op, ...], ...]
    after: tuple[Point, ...] = ()
    copies: bool = False


class HostStep(NamedTuple):
    """What the host does at once: ops, then one task put in `queue` (or none), then it waits."""

    ops: tuple[Op, ...] = ()
    queue: int = HOST_QUEUE
    until: tuple[Point, ...] = ()


class _Touch(NamedTuple):
    """Who touches what: the reads come before the writes."""

    queue: int
    reads: Sequence[Range]
    writes: Sequence[Range]


def _pieces(r: Range) -> list[Range]:
    cuts = [r.nbytes * i // PIECES for i in range(PIECES + 1)]
    return [Range(r.buffer, r.offset + a, b - a) for a, b in pairwise(cuts) if b > a]


def _touch(command: Command, queue: int) -> _Touch:
    if isinstance(command, Copy):
        return _Touch(queue, _pieces(command.src), _pieces(command.dst))
    ahead = _weights(command)
    return _Touch(queue, [r for r in command.reads if r not in ahead], command.writes)


def _weights(command: Command) -> list[Range]:
    """What a programmatic launch reads early; nothing of another command."""
    if not isinstance(command, Launch) or not command.programmatic or command.by_host:
        return []
    inputs = ops.reads(command.node)
    return [r for (t, *_), r in zip(inputs, command.reads, strict=False) if t.kind == Kind.WEIGHT]


class _Segments:
    """The bytes of a run that can go wrong, cut at every bound of an access."""

    def __init__(self, touches: Sequence[_Touch]):
        cuts: dict[Buffer, set[int]] = {}
        for touch in touches:
            for r in (*touch.reads, *touch.writes):
                cuts.setdefault(r.buffer, set()).update((r.offset, r.offset + r.nbytes))
        self._number: dict[tuple[Buffer, int], int] = {}
        bounds: list[tuple[Buffer, int, int]] = []
        for buffer, found in cuts.items():
            ordered = sorted(found)
            for a, b in pairwise([*ordered, ordered[-1]]):  # the last one is empty
                self._number[buffer, a] = len(bounds)
                bounds.append((buffer, a, b))
        written = np.zeros(len(bounds), bool)
        shared = np.zeros(len(bounds), bool)
        toucher = np.full(len(bounds), -1)
        for touch in touches:
            for r in (*touch.reads, *touch.writes):
                own = toucher[self._slice(r)]
                shared[self._slice(r)] |= (own != -1) & (own != touch.queue)
                own[own == -1] = touch.queue
            for r in touch.writes:
                written[self._slice(r)] = True
        kept = written & shared
        self._position = np.concatenate(([0], np.cumsum(kept))).tolist()
        self.bounds = [bounds[i] for i in np.flatnonzero(kept)]

    def _slice(self, r: Range) -> slice:
        number = self._number
        return slice(number[r.buffer, r.offset], number[r.buffer, r.offset + r.nbytes])

    def of(self, r: Range) -> tuple[int, int]:
        """The segments of `r` that can go wrong: first, end."""
        where = self._slice(r)
        return self._position[where.start], self._position[where.stop]


def unfinished(command: int) -> int:
    """The version of bytes that a copy has begun to write and has not written."""
    return -2 - command


class Run:
    """A run walked once in host order.

    commands: its commands, by number. bounds: its segments, as (buffer, first byte, end). tasks:
    of each queue, in its order. host: what the host does, in its order. final: the version
    of every segment at the end of the run, in program order.
    """

    def __init__(self, steps: Sequence[Program], one_order: bool):
        self._one_order = one_order
        self.commands: list[CommandAt] = []
        self._plans: dict[int, Stream] = {}  # of a part, the stream of its plan
        begins, ends = set(), set()  # the first parts of plans, the last ones
        for s, program in enumerate(steps):
            for i, c in enumerate(program.commands):
                n = len(self.commands)
                if not isinstance(c, Replay):
                    self.commands.append(CommandAt(s, i, c))
                elif c.parts:
                    self.commands += [CommandAt(s, i, p, at) for at, p in enumerate(c.parts)]
                    self._plans |= dict.fromkeys(range(n, n + len(c.parts)), c.stream)
                    begins.add(n)
                    ends.add(n + len(c.parts) - 1)
        self._queues: dict[Stream | int | tuple[Stream, Stream], int] = {}
        # copies of a stream that do not share its order, and that nothing has drained yet
        self._loose: dict[Stream, list[int]] = {}
        touches = [_touch(p.command, self._queue_of(n)) for n, p in enumerate(self.commands)]
        self._early = {n: self._ahead_of(n) for n, p in enumerate(self.commands)
                       if _weights(p.command)}  # fmt: skip
        self._gates: dict[int, tuple[Point, ...]] = {}  # of a queue: what comes early is behind
        self._segments = _Segments([*touches, *self._early.values()])
        self.bounds = self._segments.bounds
        self.tasks: list[list[Task]] = [[] for _ in range(len(self._queues) + 1)]
        self.host: list[HostStep] = []
        self.final = [BEFORE] * len(self.bounds)
        self._events: dict[str, Point] = {}
        outside = self._events
        for n, touch in enumerate(touches):
            if n in begins:
                self._events = {}  # a plan keeps its events to itself
                self._edge(self._plans[n], ends=False)
            self._issue(n, touch)
            if n in ends:
                self._events = outside
                self._edge(self._plans[n], ends=True)

    def _edge(self, stream: Stream, ends: bool) -> None:
        """A plan begins on `stream`, or ends."""
        here = self._queues.setdefault(stream, len(self._queues) + 1)
        if here == len(self.tasks):
            self.tasks.append([])
        others = [q for key, q in self._queues.items() if isinstance(key, tuple)
                  and key[0] == stream]  # fmt: skip
        now = Point(here, len(self.tasks[here]))
        for other in others:
            if ends:
                over = Point(other, len(self.tasks[other]))
                self._put(here, Task((), (over,)))
            elif now.n_done:
                self._put(other, Task((), (now,)))
            self._gates[other] = (now,)
        self._gates[here] = (Point(here, len(self.tasks[here])),)

    def _queue_of(self, n: int) -> int:
        command = self.commands[n].command
        match command:
            case Copy() if not self._one_order:
                return self._queues.setdefault(n, len(self._queues) + 1)
            case Launch() if command.stream.backend == HOST:
                return HOST_QUEUE
            case Launch() | Copy() | Wait() | Record():
                plan = self._plans.get(n, command.stream)
                key = command.stream if plan == command.stream else (plan, command.stream)
                return self._queues.setdefault(key, len(self._queues) + 1)
        return HOST_QUEUE

    def _ahead_of(self, n: int) -> _Touch:
        queue = self._queues.setdefault(-1 - n, len(self._queues) + 1)
        return _Touch(queue, _weights(self.commands[n].command), ())

    def _issue(self, n: int, touch: _Touch) -> None:
        command = self.commands[n].command
        now = Point(touch.queue, len(self.tasks[touch.queue]))
        if isinstance(command, Launch) and not command.programmatic:
            self._gates[touch.queue] = (now,)
        match command:
            case Record():
                self._events[command.event] = now
            case Wait():
                after = self._events.get(command.event)
                if after and after.n_done:
                    self._gates[touch.queue] = (*self._gates.get(touch.queue, ()), after)
                    if after.queue != touch.queue:
                        self._put(touch.queue, Task((), (after,)))
            case Sync():
                if until := tuple(point for point in self._awaited(command) if point.n_done):
                    self.host.append(HostStep(until=until))
            case _:
                self._touching(n, touch)
                if isinstance(command, Copy) and self._one_order:
                    self._gates[touch.queue] = (Point(touch.queue, len(self.tasks[touch.queue])),)

    def _put(self, queue: int, task: Task) -> None:
        self.tasks[queue].append(task)
        self.host.append(HostStep(queue=queue))

    def _awaited(self, sync: Sync) -> Iterator[Point]:
        if sync.event is not None and sync.event in self._events:
            yield self._events[sync.event]
        if sync.stream is not None:
            if sync.stream in self._queues:
                queue = self._queues[sync.stream]
                yield Point(queue, len(self.tasks[queue]))
            for queue in self._loose.pop(sync.stream, ()):
                yield Point(queue, 1)

    def _touching(self, n: int, touch: _Touch) -> None:
        final = self.final
        reads, writes = (
            [ab for r in ranges for ab in [self._segments.of(r)] if ab[0] < ab[1]]
            for ranges in (touch.reads, touch.writes)
        )
        behind = self._early_task(n)
        if not (reads or writes or behind):
            return
        looks = [Op(n, True, a, b, final[a:b]) for a, b in reads]
        leaves = [Op(n, False, a, b, [n] * (b - a)) for a, b in writes]
        for a, b in writes:
            final[a:b] = [n] * (b - a)
        if touch.queue == HOST_QUEUE:
            self.host.append(HostStep((*looks, *leaves)))
            return
        command = self.commands[n].command
        if not isinstance(command, Copy):
            both = (*looks, *leaves)
            self._put(touch.queue, Task((both,) if both else (), behind))
            return
        self._put(touch.queue, Task(_copy_orders(looks, leaves), copies=True))
        if not self._one_order:
            self._loose.setdefault(self._plans.get(n, command.stream), []).append(touch.queue)

    def _early_task(self, n: int) -> tuple[Point, ...]:
        """Queues what a programmatic launch reads early; returns the point behind it, if any."""
        touch = self._early.get(n)
        segments = [self._segments.of(r) for r in touch.reads] if touch else []
        looks = tuple([Op(n, True, a, b, self.final[a:b]) for a, b in segments if a < b])
        if touch is None or not looks:
            return ()
        of = self._queue_of(n)
        self._put(touch.queue, Task((looks,), self._gates.get(of, ())))
        return (Point(touch.queue, 1),)


def _copy_orders(looks: list[Op], leaves: list[Op]) -> tuple[tuple[Op, ...], ...]:
    """The orders in which a copy's pieces move. In the last one the destination is spoilt first,
    which the contract allows, and the source read after that."""
    each, backwards = looks + leaves, looks[::-1] + leaves[::-1]
    if len(looks) == len(leaves):  # else one side is nobody else's business
        each, backwards = (
            [op for pair in zip(*sides, strict=True) for op in pair]
            for sides in ((looks, leaves), (looks[::-1], leaves[::-1]))
        )
    spoil = [
        op._replace(versions=[unfinished(op.command)] * len(op.versions), spoils=True)
        for op in leaves
    ]
    orders = (each, backwards, looks + leaves, spoil + looks + leaves)
    return tuple(tuple(order) for order in orders)


SPOILT_FIRST = 3  # the last of `_copy_orders`
