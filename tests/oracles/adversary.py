"""The adversary: runs programs in the worst order that the contract allows, and sees who is wrong.

The hazard checker proves that a run is free of races; this finds out by trying, and knows nothing
of happens-before. It plays the device in one thread. Before each thing the host does it executes
any part of the pending work that the contract lets run. Heads of streams may run, a Wait only after
its Record, a Sync not before what it waits for. An asynchronous copy runs in pieces. Each piece is
read and written at a moment of its own, from when the copy may begin to its end:

    host     W0  W1   .    .    W0' Sync ..............  R     W' is a later step's write
    stream       |              |    c0.read  c0.write         c0 saw the bytes of W0', not of W0:
                 '- c0 queued   '- pending, still unread       a wrong read

"Wrong" is judged by shadow versions, not by outputs. Every byte carries the number of the command
that wrote it last. A read is wrong where it sees another number than the same commands leave there
in program order. At the end of a run everybody reads everything. So two writes in the wrong order
are seen even where no command reads them. If both are overwritten before anybody looks, they leave
no trace: the adversary is silent, and the checker reports the race.

Ranges are taken as declared: a command that declares a superset counts as touching all of it.

Random schedules with few changes of mind find most ordering bugs, as few ordering constraints make
one (Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs,
ASPLOS 2010); the strategies are the extremes, and runs change from one to another at few points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import NamedTuple

from tests.oracles.shadow import (
    BEFORE,
    HOST_QUEUE,
    SPOILT_FIRST,
    CommandAt,
    Op,
    Point,
    Run,
    Task,
    unfinished,
)
from workbench.program.commands import Buffer, Program, Range

SEEDS = range(200)  # what `search` tries unless told otherwise


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

    def __str__(self) -> str:
        def of(at: CommandAt | None) -> str:
            return "what was there before the run" if at is None else f"[{at}]"

        reader = "the end of the run" if self.reader is None else f"[{self.reader}]"
        half = "half of " if self.unfinished else ""
        where = Range(self.buffer, self.offset, self.nbytes)
        return f"{reader} sees in {where} {half}{of(self.seen)} instead of {of(self.expected)}"


class _Mood(NamedTuple):
    """What a strategy does before each step of the host.

    awake: queues that run unasked; work of the others is done only for a Sync that needs it.
    urge: the chance to go on after each op, 1 until nothing awake can run. late_sources: unasked, a
    copy at most spoils its destination. order: of a copy's pieces, None any.
    """

    awake: frozenset[int]
    urge: float
    late_sources: bool = False
    order: int | None = None


def _all(queues: Sequence[int]) -> frozenset[int]:
    return frozenset(queues)


def _some(rng: Random, queues: Sequence[int]) -> frozenset[int]:
    return frozenset(q for q in queues if rng.random() < 0.5)


STRATEGIES: dict[str, Callable[[Random, Sequence[int]], _Mood]] = {
    "eager": lambda rng, queues: _Mood(_all(queues), 1.0),
    "lazy": lambda rng, queues: _Mood(frozenset(), 0.0),
    "random": lambda rng, queues: _Mood(_all(queues), rng.uniform(0.3, 0.98)),
    "one starved": lambda rng, queues: _Mood(_all(queues) - {rng.choice(queues)}, 1.0),
    "some starved": lambda rng, queues: _Mood(_some(rng, queues), rng.choice((0.7, 0.95, 1.0))),
    "sources late": lambda rng, queues: _Mood(_all(queues), 1.0, late_sources=True),
    "destinations first": lambda rng, queues: _Mood(
        _some(rng, queues), 1.0, late_sources=True, order=SPOILT_FIRST
    ),
}


class Adversary:
    """A run, prepared once and then tried under as many seeds as wanted.

    steps: programs that one host issues one after the other (the same Buffer is the same memory,
    the same event name the same event). one_order: whether copies share the order of their
    stream's other work; where not, nothing orders a copy but a Sync on its stream.
    """

    def __init__(self, steps: Sequence[Program], one_order: bool = True):
        self._run = Run(steps, one_order)
        # at the end of the run everybody reads everything
        n = len(self._run.bounds)
        self._end = Op(len(self._run.commands), True, 0, n, self._run.final)

    def run(self, seed: int, strategy: str | None = None) -> list[WrongRead]:
        """The wrong reads of one schedule, in program order, then what is wrong at the end.

        strategy: a name of STRATEGIES to keep to; without, seeds begin with one after the other and
        most change to others on the way. The same seed makes the same schedule.
        """
        names = list(STRATEGIES)
        schedule = _Schedule(self._run, Random(seed))
        schedule.play(strategy or names[seed % len(names)], self._end, fickle=strategy is None)
        return self._told(schedule.wrong)

    def search(self, seeds: Iterable[int] = SEEDS) -> list[WrongRead]:
        """The wrong reads of the first of `seeds` that has any."""
        return next(filter(None, map(self.run, seeds)), [])

    def _told(self, wrong: dict[tuple[int, int], tuple[int, int]]) -> list[WrongRead]:
        """Segments grown together again: those side by side that went wrong alike."""
        told: list[WrongRead] = []
        commands, bounds = self._run.commands, self._run.bounds
        for (reader, segment), (seen, expected) in sorted(wrong.items()):
            buffer, a, b = bounds[segment]
            half = seen < BEFORE
            one = WrongRead(
                commands[reader] if reader < len(commands) else None,
                buffer,
                a,
                b - a,
                self._at(unfinished(seen) if half else seen),
                self._at(expected),
                half,
            )
            if told and _next_to(told[-1], one):
                one = one._replace(offset=told[-1].offset, nbytes=told.pop().nbytes + one.nbytes)
            told.append(one)
        return told

    def _at(self, version: int) -> CommandAt | None:
        return None if version == BEFORE else self._run.commands[version]


def _next_to(a: WrongRead, b: WrongRead) -> bool:
    return a.offset + a.nbytes == b.offset and a._replace(offset=0, nbytes=0) == b._replace(
        offset=0, nbytes=0
    )


class _Schedule:
    """One schedule as it unfolds. wrong[command, segment] = (version seen, version expected)."""

    def __init__(self, run: Run, rng: Random):
        self._host = run.host
        self._tasks = run.tasks
        self._rng = rng
        n = len(run.tasks)
        self._queues = range(1, n)  # all but the host's
        self._issued = [0] * n
        self._done = [0] * n
        self._pending: list[int] = []  # queues with work
        # the ops of the task each queue is at, in the order chosen for it, and how many are done
        self._ops: list[tuple[Op, ...]] = [()] * n
        self._at = [0] * n
        self._versions = [BEFORE] * len(run.bounds)
        self._mood = _Mood(frozenset(), 0.0)
        self.wrong: dict[tuple[int, int], tuple[int, int]] = {}

    def play(self, strategy: str, end: Op, fickle: bool) -> None:
        """Plays the run to its end and has `end` look; fickle: strategies may change on the way."""
        rng, names = self._rng, list(STRATEGIES)
        changes = rng.choice((0.0, 1 / (len(self._host) + 1), 0.05, 0.2)) if fickle else 0.0
        self._feel(strategy)
        for step in self._host:
            if rng.random() < changes:
                self._feel(rng.choice(names))
            self._indulge()
            for op in step.ops:
                self._perform(op)
            if step.queue != HOST_QUEUE:
                self._put(step.queue)
            self._finish(step.until)
        left = [Point(queue, self._issued[queue]) for queue in self._pending]
        rng.shuffle(left)
        self._finish(left)
        self._perform(end)

    def _put(self, queue: int) -> None:
        if self._done[queue] == self._issued[queue]:
            self._pending.append(queue)
        self._issued[queue] += 1

    def _feel(self, strategy: str) -> None:
        self._mood = STRATEGIES[strategy](self._rng, self._queues or (HOST_QUEUE,))

    def _indulge(self) -> None:
        """Runs what the mood asks for."""
        rng, urge = self._rng, self._mood.urge
        while urge == 1.0 or rng.random() < urge:
            ready = [queue for queue in self._pending if self._wants(queue)]
            if not ready:
                return
            self._advance(ready[0] if len(ready) == 1 else rng.choice(ready))

    def _finish(self, until: Iterable[Point]) -> None:
        """The host waits: runs what must be done, and what the mood asks for in between."""
        done = self._done
        for queue, count in until:
            while done[queue] < count:
                head = queue
                while (holds := self._held_by(head)) is not None:
                    head = holds
                self._advance(head)
                self._indulge()

    def _held_by(self, queue: int) -> int | None:
        """The queue that the head of `queue` waits for. What it waits for was issued before it, so
        going from one to the next ends."""
        after = self._tasks[queue][self._done[queue]].after
        return next((point.queue for point in after if not self._reached(point)), None)

    def _reached(self, point: Point) -> bool:
        return self._done[point.queue] >= point.n_done

    def _wants(self, queue: int) -> bool:
        """Whether the mood asks for the pending head of `queue`, and the contract lets it run."""
        mood = self._mood
        if queue not in mood.awake:
            return False
        task = self._tasks[queue][self._done[queue]]
        if not all(map(self._reached, task.after)):
            return False
        if mood.late_sources and task.copies:
            return self._next_op(queue, task).spoils
        return True

    def _next_op(self, queue: int, task: Task) -> Op:
        if not self._ops[queue]:  # its order is chosen when it begins
            order = self._mood.order
            if order is None or not task.copies:
                self._ops[queue] = self._rng.choice(task.orders)
            else:
                self._ops[queue] = task.orders[order]
        return self._ops[queue][self._at[queue]]

    def _advance(self, queue: int) -> None:
        task = self._tasks[queue][self._done[queue]]
        if task.orders:
            self._perform(self._next_op(queue, task))
            self._at[queue] += 1
            if self._at[queue] < len(self._ops[queue]):
                return
            self._ops[queue], self._at[queue] = (), 0
        self._done[queue] += 1
        if self._done[queue] == self._issued[queue]:
            self._pending.remove(queue)

    def _perform(self, op: Op) -> None:
        command, reads, first, end, versions, _ = op
        if not reads:
            self._versions[first:end] = versions
            return
        seen = self._versions[first:end]
        if seen != versions:
            for i, (saw, expected) in enumerate(zip(seen, versions, strict=True)):
                if saw != expected:
                    self.wrong.setdefault((command, first + i), (saw, expected))


def run(steps: Sequence[Program], seed: int, one_order: bool = True) -> list[WrongRead]:
    """The wrong reads of the schedule that `seed` draws; see `Adversary.run`."""
    return Adversary(steps, one_order).run(seed)


def search(
    steps: Sequence[Program], seeds: Iterable[int] = SEEDS, one_order: bool = True
) -> list[WrongRead]:
    """The wrong reads of the first of `seeds` that has any, or none."""
    return Adversary(steps, one_order).search(seeds)
