"""A program bound to addresses is a list of segments, and executors issue what is in them.

A segment is one of two things. `HostCalls` are writes, reads, waits of the host, and what the host
computes. A `SplitWork` is what one device is asked for one split, with the copies around it.
Neighbours without a call of the host between them go to one executor together:

    segments    calls | work of split 1 | calls | work of split 2, work of split 3 | calls
    executors           ---- one -----          ------------- one ----------------

An executor turns split works into calls once, when the program is bound. `eager` makes one call of
each command, and issues a plan part by part. `backend/plan.py` captures plans and replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate, compress, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.backend.base import Backend, Captured, Issue, Memory
from workbench.backend.bind import Binding, Launcher, launched
from workbench.backend.issued import Issued, Plannable, in_order
from workbench.program.commands import RESULT, Buffer, Program, Read, Replay, Sync, Write
from workbench.program.first_cell import at_cell

if TYPE_CHECKING:
    from workbench.backend.ahead import GatedCall


class HostCalls(NamedTuple):
    """What the host does between two split works. commands: their numbers in the program, one for
    each of `calls`."""

    commands: range
    calls: tuple[Issue, ...]


class SplitWork(NamedTuple):
    """What a device is asked for one split: copies, launches, records and waits, in order.

    commands: their numbers in the program, one for each of `issued`.
    """

    split: int
    commands: range
    issued: tuple[Issued, ...]


Segment = HostCalls | SplitWork
# Calls that perform the works' commands in their order, and how many commands each performs. (No
# object for each call: what a step makes anew is what Python's collector has to look through.)
Executed = tuple[Sequence[Issue], Sequence[int]]
Executor = Callable[[Sequence[SplitWork]], Executed]


def eager(works: Sequence[SplitWork]) -> Executed:
    """Every command is issued by a call of its own."""
    calls = [issued.call for work in works for issued in work.issued]
    return calls, [1] * len(calls)


class Unwatched:
    """Hands out the calls of a program, first to last; costs nothing. What looks on while a program
    is issued (`engine/watch.py`) does something around each call."""

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        """Everything up to the last wait of the host."""
        return prepared.head

    def late(self, prepared: Prepared) -> Iterable[Issue]:
        """The same without what `Prepared.write_ahead` has done."""
        return prepared.late

    def tail(self, prepared: Prepared) -> Iterable[Issue]:
        """The wait for the results, and their reads."""
        return prepared.tail


class Prepared:
    """A program bound to addresses. Lives as long as the memory it was bound to.

    head: the calls before the wait for the results. tail: that wait and the reads. firsts: of each
    call, the number of the first command that it performs; the next call's first is behind its
    last. ahead: the call that can be launched ahead, if there is one (`backend/ahead.py`). stamped:
    the same program with stamps in its plans, once somebody has asked for it (`Plans.stamped`).
    late, late_firsts: of the head, what is left to call behind `write_ahead`, and its part of
    `firsts`.
    """

    ahead: GatedCall | None = None
    stamped: Prepared | None = None

    def __init__(
        self,
        program: Program,
        backends: Sequence[Backend],
        memory: Mapping[Buffer, Memory],
        events: dict[str, Any] | None = None,
        execute: Executor = eager,
        launch: Launcher = launched,
    ):
        """events, launch: as `Binding` has them. execute: makes the calls of split works."""
        self._program = program
        self.backends = backends
        # another engine's device may be the thread's; where there are several, commands say which
        self._attach = backends[-1].attach
        self._attach()
        known = {} if events is None else events
        self.binding = Binding(program, backends, memory, known, launch)
        self.segments = _segments(program, self.binding)
        self._n_reads = sum(isinstance(command, Read) for command in program.commands)
        self._execute(execute)

    def _execute(self, execute: Executor) -> None:
        calls, counts = _executed(self.segments, execute)
        self.firsts = tuple(accumulate(counts, initial=0))
        n = self.firsts.index(self._program.first_of_tail)
        self.head, self.tail = tuple(calls[:n]), tuple(calls[n:])
        self.late, self.late_firsts = tuple[Issue, ...](), tuple[int, ...]()
        self._writes: tuple[Issue, ...] = ()

    def twin(self, other: Callable[[Replay, Plannable], Plannable], execute: Executor) -> Prepared:
        """The same program on the same memory, with other work in place of each plan's."""
        commands, twin = self._program.commands, copy(self)

        def changed(segment: Segment) -> Segment:
            if isinstance(segment, HostCalls):
                return segment
            issued = [
                other(plan, i) if isinstance(i, Plannable) and isinstance(plan, Replay) else i
                for plan, i in zip(map(commands.__getitem__, segment.commands), segment.issued,
                                   strict=True)
            ]  # fmt: skip
            return segment._replace(issued=tuple(issued))

        twin.segments, twin.ahead = [changed(segment) for segment in self.segments], None
        twin._execute(execute)
        return twin

    @property
    def program(self) -> Program:
        """The program as its next run issues it; made when it is asked for after `store_at`."""
        cell = self.binding.cell
        if cell is not None:
            self._program = at_cell(self._program, cell)
        return self._program

    def store_at(self, cell: int) -> None:
        """Patches the program for a step whose first cell is another. What is queued stays as it
        is. A program whose stores are no copies to views needs no patch."""
        if self.binding.cell not in (None, cell):
            self.binding.store_at(cell)

    @property
    def issued(self) -> dict[int, Issued]:
        """What devices are asked, by number of the command."""
        works = [segment for segment in self.segments if isinstance(segment, SplitWork)]
        return {n: i for w in works for n, i in zip(w.commands, w.issued, strict=True)}

    def replayed(self, number: int) -> Captured | None:
        """What command number `number`, a plan, launched when it was last called; None where it
        issued its parts, or the host computed them."""
        plan = self.issued.get(number)
        return plan.replayed if isinstance(plan, Plannable) else None

    def run(self, values: Mapping[str, np.ndarray], watch: Unwatched) -> None:
        """Issues everything up to the last wait. values: each input's array, of one dtype and
        shape for all runs."""
        self.binding.values.update(values)
        self._attach()
        for call in watch.head(self):
            call()

    def write_ahead(self, values: Mapping[str, np.ndarray], late: Collection[str]) -> None:
        """Writes a next run's inputs now, but for those named in `late`. Then `run_late` issues
        that run. The caller knows that the device has read what was in this staging memory."""
        if not self.late:
            commands = [self._program.commands[n] for n in self.firsts[: len(self.head)]]
            early = [isinstance(c, Write) and c.value in values and c.value not in late
                     for c in commands]  # fmt: skip
            assert self.ahead is not None, "what can be launched ahead is written ahead"
            at = self.head.index(self.ahead)
            waits = [isinstance(c, Sync) and i < at for i, c in enumerate(commands)]
            self._writes = tuple(compress(self.head, early))
            left = [i for i, done in enumerate(zip(early, waits, strict=True)) if not any(done)]
            # what comes after the gate wants its device; the gate is opened without it
            self.late = tuple([
                self.head[i] if i <= at else in_order([self._attach, self.head[i]]) for i in left
            ])  # fmt: skip
            self.late_firsts = tuple([self.firsts[i] for i in left])
        self.binding.values.update(values)
        for write in self._writes:
            write()

    def run_late(self, watch: Unwatched) -> None:
        """As `run`, behind `write_ahead`: what is late is now in the arrays that it was given. The
        host's waits in front of the plan are left out. They are for steps before, on the one stream
        that there is, and the host has waited for the last of them."""
        for call in watch.late(self):
            call()
        self._attach()  # whoever waits; what is called late attaches by itself

    def early(self) -> dict[str, np.ndarray] | None:
        """The arrays that `finish` will return, before the results are in them. None where they
        are made only then."""
        early = {name: make() for name, make in self.binding.early.items()}
        made = {name: array for name, array in early.items() if array is not None}
        return made if len(made) == self._n_reads else None

    def finish(self, watch: Unwatched) -> dict[str, np.ndarray]:
        """Waits for the results of the latest `run`: arrays by name, uint8; the caller owns them. A
        result in a `Landing` is handed out where it landed, any other is copied."""
        for call in watch.tail(self):
            call()
        results = dict(self.binding.results)
        self.binding.results.clear()
        return results


def _segments(program: Program, binding: Binding) -> list[Segment]:
    """The commands in their order. The copies of the results belong to the last split's work."""
    made: list[Any] = []  # of each command, its call or what its device is asked
    splits: list[int | None] = []  # of each command; None for a call of the host
    split = None
    for command in program.commands:
        if binding.device_of(command) is None:
            split = None
            made.append(binding.call(command))
        else:
            if split is None or command.split != RESULT:
                split = command.split
            made.append(binding.issued(command))
        splits.append(split)
    segments: list[Segment] = []
    for split, numbers in groupby(range(len(made)), splits.__getitem__):
        first, *others = numbers
        commands = range(first, first + 1 + len(others))
        parts = tuple(made[first : commands.stop])
        segments.append(
            HostCalls(commands, parts) if split is None else SplitWork(split, commands, parts)
        )
    return segments


def _executed(segments: Sequence[Segment], execute: Executor) -> tuple[list[Issue], list[int]]:
    """The calls of all segments, and how many commands each performs."""
    calls: list[Issue] = []
    counts: list[int] = []
    for kind, neighbours in groupby(segments, type):
        if kind is HostCalls:
            found = [call for part in neighbours for call in part.calls]  # type: ignore[union-attr]
            made: Executed = found, [1] * len(found)
        else:
            made = execute(list(neighbours))  # type: ignore[arg-type]
        calls += made[0]
        counts += made[1]
    return calls, counts
