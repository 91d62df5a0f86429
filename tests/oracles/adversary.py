"""The adversary: runs programs in the worst order that the contract allows, and sees who is wrong.

The hazard checker proves that a run is free of races; this finds out by trying. It plays the device
in one thread. Before each thing the host does it executes any part of the pending work that the
contract lets run. An asynchronous copy runs in pieces. Each piece is read and written at a moment
of its own, from when the copy may begin to its end:

    host     W0  W1   .    .    W0' Sync ..............  R     W' is a later step's write
    stream       |              |    c0.read  c0.write         c0 saw the bytes of W0', not of W0:
                 '- c0 queued   '- pending, still unread       a wrong read

"Wrong" is judged by shadow versions, not by outputs. Every byte carries the number of the command
that wrote it last. A read is wrong where it sees another number than the same commands leave there
in program order. At the end of a run everybody reads everything. So two writes in the wrong order
are seen even where no command reads them. If both are overwritten before anybody looks, they leave
no trace: the adversary is silent, and the checker reports the race.

Bytes are grouped into segments between the bounds of all accesses. Segments that nobody writes, or
that one queue alone touches, cannot go wrong and are left out, and with them what touches nothing
else: of a model's step little more than its inputs and results remains. Ranges are taken as
declared: a command that declares a superset counts as touching all of it.

Random schedules with few changes of mind find most ordering bugs, as few ordering constraints make
one (Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs,
ASPLOS 2010); the strategies are the extremes, and runs change from one to another at few points.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain, pairwise
from random import Random
from typing import NamedTuple

import numpy as np

from tests.oracles.reading import HOST_QUEUE, Cells, Moment, Ranges, read
from workbench.program.commands import Buffer, CommandAt, Copy, Program, Range

SEEDS = range(200)  # what `search` tries unless told otherwise
PIECES = 3  # parts of a copy that move on their own
BEFORE = -1  # version of the bytes that were there before the run
SPOILT_FIRST = 3  # the last of `_copy_orders`


class WrongRead(NamedTuple):
    """Bytes offset..offset+nbytes-1 of `buffer` were not what program order gives.

    reader: the command that read them, None for the end of the run. seen and expected: the
    commands that wrote them, None for what was there before the run. unfinished: the copy `seen`
    was not done with them.
    """

    reader: CommandAt | None
    buffer: Buffer
    offset: int
    nbytes: int
    seen: CommandAt | None
    expected: CommandAt | None
    unfinished: bool = False


class _Op(NamedTuple):
    """One moment of a task: segments first..end-1 read, or written. versions: those a read should
    see, or those a write leaves. spoils: what it writes is not the copy's bytes yet."""

    task: int
    reads: bool
    first: int
    end: int
    versions: list[int]
    spoils: bool = False


class _Task(NamedTuple):
    """What a moment does, in each order it may, when the tasks `before` (as bits) are done."""

    at: CommandAt
    queue: Hashable
    before: int
    orders: tuple[tuple[_Op, ...], ...]
    copies: bool


class _Mood(NamedTuple):
    """What a strategy does before each step of the host.

    awake: queues that run unasked; work of the others is done only when something waits for it.
    urge: the chance to go on after each op, 1 until nothing awake can run. late_sources: unasked, a
    copy at most spoils its destination. order: of a copy's pieces, None any.
    """

    awake: frozenset[Hashable]
    urge: float
    late_sources: bool = False
    order: int | None = None


Queues = Sequence[Hashable]
_all = frozenset


STRATEGIES: dict[str, Callable[[Random, Queues], _Mood]] = {
    "eager": lambda rng, queues: _Mood(_all(queues), 1.0),
    "lazy": lambda rng, queues: _Mood(_all(), 0.0),
    "random": lambda rng, queues: _Mood(_all(queues), rng.uniform(0.3, 0.98)),
    "one starved": lambda rng, queues: _Mood(_all(queues) - {rng.choice(queues)}, 1.0),
    "some starved": lambda rng, queues: _Mood(
        _all(q for q in queues if rng.random() < 0.5), rng.choice((0.7, 0.95, 1.0))
    ),
    "sources late": lambda rng, queues: _Mood(_all(queues), 1.0, late_sources=True),
    "destinations first": lambda rng, queues: _Mood(
        _all(q for q in queues if rng.random() < 0.5), 1.0, True, SPOILT_FIRST
    ),
}


class Adversary:
    """A run, prepared once and then tried under as many seeds as wanted.

    steps: programs that one host issues one after the other (the same Buffer is the same memory,
    the same event name the same event). one_order: whether copies share the order of their
    stream's other work; where not, nothing orders a copy but a Sync on its stream.
    """

    def __init__(self, steps: Sequence[Program], one_order: bool = True):
        self.moments = moments = read(steps, one_order)
        touches = [(_pieces(m, m.reads), _pieces(m, m.writes)) for m in moments]
        cells = Cells(r for both in touches for r in chain(*both))
        position = _position(moments, touches, cells)
        self.bounds = [c for n, c in enumerate(cells.cells) if position[n] < position[n + 1]]
        self.tasks: list[_Task] = []
        final, numbers = [BEFORE] * len(self.bounds), dict[int, int]()
        for n, (m, both) in enumerate(zip(moments, touches, strict=True)):
            reads, writes = (
                [(position[c.start], position[c.stop]) for c in map(cells.of, some)]
                for some in both
            )
            task = len(self.tasks)
            looks = [_Op(task, True, a, b, final[a:b]) for a, b in reads if a < b]
            leaves = [_Op(task, False, a, b, [task] * (b - a)) for a, b in writes if a < b]
            if not looks and not leaves:
                continue
            for _, _, a, b, versions, _ in leaves:
                final[a:b] = versions
            copies = isinstance(m.at.command, Copy)
            orders = _copy_orders(looks, leaves) if copies else ((*looks, *leaves),)
            before = sum(1 << i for k, i in numbers.items() if m.before >> k & 1)
            self.tasks.append(_Task(m.at, m.queue, before, orders, copies))
            numbers[n] = task
        # at the end of the run everybody reads everything
        self.end = _Op(len(self.tasks), True, 0, len(final), final)
        queues = dict.fromkeys(m.queue for m in moments if m.queue != HOST_QUEUE)
        self.queues = [*queues] or [HOST_QUEUE]

    def run(self, seed: int, strategy: str | None = None) -> list[WrongRead]:
        """The wrong reads of one schedule, in program order, then what is wrong at the end.

        strategy: a name of STRATEGIES to keep to; without, seeds begin with one after the other and
        most change to others on the way. The same seed makes the same schedule.
        """
        names = list(STRATEGIES)
        schedule = _Schedule(self, Random(seed))
        schedule.play(strategy or names[seed % len(names)], fickle=strategy is None)
        return self._told(schedule.wrong)

    def search(self, seeds: Iterable[int] = SEEDS) -> list[WrongRead]:
        """The wrong reads of the first of `seeds` that has any."""
        return next(filter(None, map(self.run, seeds)), [])

    def form(self) -> Hashable:
        """Equal for runs that go wrong under the same seeds: what their tasks do to which segments,
        in what queues and behind what, and not the commands that they are of."""
        numbers: dict[Hashable, int] = {HOST_QUEUE: 0}
        tasks = [
            (numbers.setdefault(task.queue, len(numbers)), task.before, task.copies,
             *((op.reads, op.first, *op.versions) for op in task.orders[0]))
            for task in self.tasks
        ]  # fmt: skip
        queues = [numbers.setdefault(queue, len(numbers)) for queue in self.queues]
        return tuple(tasks), tuple(queues), len(self.bounds)

    def _told(self, wrong: dict[tuple[int, int], tuple[int, int]]) -> list[WrongRead]:
        """Segments grown together again: those side by side that went wrong alike."""
        told: list[WrongRead] = []
        ats = [*(task.at for task in self.tasks), None]
        for (reader, segment), (seen, expected) in sorted(wrong.items()):
            buffer, a, b = self.bounds[segment]
            half = seen < BEFORE
            by = _unfinished(seen) if half else seen
            one = WrongRead(ats[reader], buffer, a, b - a, ats[by], ats[expected], half)
            if told and _next_to(told[-1], one):
                one = one._replace(offset=told[-1].offset, nbytes=told.pop().nbytes + one.nbytes)
            told.append(one)
        return told


def _pieces(m: Moment, ranges: Ranges) -> Ranges:
    if not isinstance(m.at.command, Copy):
        return ranges
    (r,) = ranges
    cuts = [r.nbytes * i // PIECES for i in range(PIECES + 1)]
    return [Range(r.buffer, r.offset + a, b - a) for a, b in pairwise(cuts) if b > a]


def _position(moments: Sequence[Moment], touches: Sequence, cells: Cells) -> list[int]:
    """Of each cell, how many of those that come first can go wrong; of all at the end."""
    written, shared = np.zeros((2, len(cells.cells)), bool)
    toucher, queues = np.full(len(cells.cells), -1), dict[Hashable, int]()
    for m, both in zip(moments, touches, strict=True):
        queue = queues.setdefault(m.queue, len(queues))
        for which, some in enumerate(both):
            for c in (slice(c.start, c.stop) for c in map(cells.of, some)):
                own = toucher[c]
                shared[c] |= (own != -1) & (own != queue)
                own[own == -1] = queue
                written[c] |= which == 1
    return [0, *np.cumsum(written & shared).tolist()]


def _unfinished(task: int) -> int:
    """The version of bytes that a copy has begun to write and has not written; and back."""
    return -2 - task


def _copy_orders(looks: list[_Op], leaves: list[_Op]) -> tuple[tuple[_Op, ...], ...]:
    """The orders in which a copy's pieces move. In the last one the destination is spoilt first,
    which the contract allows, and the source read after that."""
    each, backwards = looks + leaves, looks[::-1] + leaves[::-1]
    if len(looks) == len(leaves):  # else one side is nobody else's business
        each = [*chain(*zip(looks, leaves, strict=True))]
        backwards = [*chain(*zip(looks[::-1], leaves[::-1], strict=True))]
    spoil = [op._replace(versions=[_unfinished(op.task)] * len(op.versions), spoils=True)
             for op in leaves]  # fmt: skip
    return tuple(map(tuple, (each, backwards, looks + leaves, spoil + looks + leaves)))


def _next_to(a: WrongRead, b: WrongRead) -> bool:
    alike = a._replace(offset=0, nbytes=0) == b._replace(offset=0, nbytes=0)
    return alike and a.offset + a.nbytes == b.offset


class _Schedule:
    """One schedule as it unfolds. wrong[task, segment] = (version seen, version expected)."""

    def __init__(self, run: Adversary, rng: Random):
        self._run, self._rng = run, rng
        self._done = 0  # tasks, as bits
        self._pending: dict[Hashable, list[int]] = {}  # of queues with work, in order
        self._begun: dict[Hashable, list[_Op]] = {}  # what is left of the first one's ops
        self._versions = [BEFORE] * len(run.bounds)
        self._mood = _Mood(frozenset(), 0.0)
        self.wrong: dict[tuple[int, int], tuple[int, int]] = {}

    def play(self, strategy: str, fickle: bool) -> None:
        """Plays the run to its end; fickle: strategies may change on the way."""
        rng, names, tasks = self._rng, list(STRATEGIES), self._run.tasks
        changes = rng.choice((0.0, 1 / (len(tasks) + 1), 0.05, 0.2)) if fickle else 0.0
        self._feel(strategy)
        for n, task in enumerate(tasks):
            if rng.random() < changes:
                self._feel(rng.choice(names))
            if task.queue == HOST_QUEUE:
                self._finish(task.before)
            self._indulge()
            self._pending.setdefault(task.queue, []).append(n)
            if task.queue == HOST_QUEUE:
                self._advance(HOST_QUEUE, whole=True)
        left = [queue[-1] for queue in self._pending.values()]
        rng.shuffle(left)
        for n in left:
            self._finish(1 << n)
        self._perform(self._run.end)

    def _feel(self, strategy: str) -> None:
        self._mood = STRATEGIES[strategy](self._rng, self._run.queues)

    def _indulge(self) -> None:
        """Runs what the mood asks for."""
        rng, urge = self._rng, self._mood.urge
        while urge == 1.0 or rng.random() < urge:
            ready = [queue for queue in self._pending if self._wants(queue)]
            if not ready:
                return
            self._advance(ready[0] if len(ready) == 1 else rng.choice(ready))

    def _finish(self, tasks: int) -> None:
        """The host waits: runs what must be done, and what the mood asks for in between."""
        every = self._run.tasks
        while left := tasks & ~self._done:
            chain = [left.bit_length() - 1]  # each, and the last that must be done before it
            while chain:
                n = chain[-1]
                if self._done >> n & 1:
                    chain.pop()
                elif holds := every[n].before & ~self._done:
                    chain.append(holds.bit_length() - 1)
                else:
                    self._advance(every[n].queue)
                    self._indulge()

    def _wants(self, queue: Hashable) -> bool:
        """Whether the mood asks for the first of `queue`, and the contract lets it run."""
        mood, task = self._mood, self._run.tasks[self._pending[queue][0]]
        if queue not in mood.awake or task.before & ~self._done:
            return False
        return not (mood.late_sources and task.copies) or self._ops(queue)[0].spoils

    def _ops(self, queue: Hashable) -> list[_Op]:
        if queue not in self._begun:  # its order is chosen when it begins
            task, order = self._run.tasks[self._pending[queue][0]], self._mood.order
            free = order is None or not task.copies
            self._begun[queue] = [*(self._rng.choice(task.orders) if free else task.orders[order])]
        return self._begun[queue]

    def _advance(self, queue: Hashable, whole: bool = False) -> None:
        ops = self._ops(queue)
        self._perform(ops.pop(0))
        while whole and ops:
            self._perform(ops.pop(0))
        if not ops:
            del self._begun[queue]
            self._done |= 1 << self._pending[queue].pop(0)
            if not self._pending[queue]:
                del self._pending[queue]

    def _perform(self, op: _Op) -> None:
        task, reads, first, end, versions, _ = op
        if not reads:
            self._versions[first:end] = versions
            return
        seen = self._versions[first:end]
        if seen != versions:
            for i, (saw, expected) in enumerate(zip(seen, versions, strict=True)):
                if saw != expected:
                    self.wrong.setdefault((task, first + i), (saw, expected))


def run(steps: Sequence[Program], seed: int, one_order: bool = True) -> list[WrongRead]:
    """The wrong reads of the schedule that `seed` draws; see `Adversary.run`."""
    return Adversary(steps, one_order).run(seed)


def search(
    steps: Sequence[Program], seeds: Iterable[int] = SEEDS, one_order: bool = True
) -> list[WrongRead]:
    """The wrong reads of the first of `seeds` that has any, or none."""
    return Adversary(steps, one_order).search(seeds)
