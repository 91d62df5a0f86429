"""A program bound to addresses is a list of segments, and executors issue what is in them.

A segment is one of two things. `HostCalls` are writes, reads, waits of the host, and what the host
computes. A `SplitWork` is what one device is asked for one split, with the copies around it.
Neighbours without a call of the host between them go to one executor together:

    segments    calls | work of split 1 | calls | work of split 2, work of split 3 | calls
    executors           ---- one -----          ------------- one ----------------

An executor turns split works into calls once, when the program is bound. `eager` makes one call of
each command. What replays a captured graph is another executor, and no other file changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from workbench.backend.base import Backend, Issue, Memory
from workbench.backend.bind import Binding
from workbench.backend.issued import Issued
from workbench.program.commands import RESULT, Buffer, Program, Read, Sync


class Call(NamedTuple):
    """A call, and the numbers of the program's commands that it performs."""

    call: Issue
    commands: tuple[int, ...]


class HostCalls(NamedTuple):
    """What the host does between two split works."""

    calls: tuple[Call, ...]


class SplitWork(NamedTuple):
    """What a device is asked for one split: copies, launches, records and waits, in order.

    commands: their numbers in the program, one for each of `issued`.
    """

    split: int
    commands: tuple[int, ...]
    issued: tuple[Issued, ...]


Segment = HostCalls | SplitWork
Executor = Callable[[Sequence[SplitWork]], Sequence[Call]]


def eager(works: Sequence[SplitWork]) -> list[Call]:
    """Every command is issued by a call of its own."""
    return [
        Call(issued.call, (number,))
        for work in works
        for number, issued in zip(work.commands, work.issued, strict=True)
    ]


class Unwatched:
    """Hands out the calls of a program, first to last; costs nothing. What looks on while a program
    is issued (`engine/watch.py`) does something around each call."""

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        """Everything up to the last wait of the host."""
        return prepared.plain[0]

    def tail(self, prepared: Prepared) -> Iterable[Issue]:
        """The wait for the results, and their reads."""
        return prepared.plain[1]


class Prepared:
    """A program bound to addresses. Lives as long as the memory it was bound to.

    head: the calls before the wait for the results. tail: that wait and the reads. plain: both
    without the commands' numbers, for steps that nobody looks at.
    """

    def __init__(
        self,
        program: Program,
        backends: Sequence[Backend],
        memory: Mapping[Buffer, Memory],
        events: dict[str, Any] | None = None,
        execute: Executor = eager,
    ):
        """events: as `Binding` has them. execute: makes the calls of split works."""
        self.program = program
        self.backends = backends
        # another engine's device may be the thread's; where there are several, commands say which
        self._attach = backends[-1].attach
        self._attach()
        self.binding = Binding(program, backends, memory, {} if events is None else events)
        self.segments = _segments(program, self.binding)
        calls = tuple(_calls(self.segments, execute))
        end = _first_of_tail(program)
        n = sum(call.commands[-1] < end for call in calls)
        self.head, self.tail = calls[:n], calls[n:]
        self.plain = tuple(c.call for c in self.head), tuple(c.call for c in self.tail)

    @property
    def issued(self) -> dict[int, Issued]:
        """What devices are asked, by number of the command."""
        works = [segment for segment in self.segments if isinstance(segment, SplitWork)]
        return {n: i for w in works for n, i in zip(w.commands, w.issued, strict=True)}

    def run(self, values: Mapping[str, np.ndarray], watch: Unwatched) -> None:
        """Issues everything up to the last wait. values: each input's array, of one dtype and
        shape for all runs."""
        self.binding.values.update(values)
        self._attach()
        for call in watch.head(self):
            call()

    def finish(self, watch: Unwatched) -> dict[str, np.ndarray]:
        """Waits for the results of the latest `run`: arrays by name, uint8; the caller owns them. A
        result in a `Landing` is handed out where it landed, any other is copied."""
        for call in watch.tail(self):
            call()
        results = dict(self.binding.results)
        self.binding.results.clear()
        return results


def _first_of_tail(program: Program) -> int:
    """The number of the first of the waits and reads that end a program."""
    end = len(program.commands)
    while end and isinstance(last := program.commands[end - 1], Read | Sync):
        if last.split != RESULT:
            break
        end -= 1
    return end


def _segments(program: Program, binding: Binding) -> list[Segment]:
    """The commands in their order. The copies of the results belong to the last split's work."""
    segments: list[Segment] = []
    calls: list[Call] = []
    work: list[tuple[int, Issued]] = []
    split = RESULT

    def end_calls() -> None:
        if calls:
            segments.append(HostCalls(tuple(calls)))
            calls.clear()

    def end_work() -> None:
        if work:
            numbers, issued = zip(*work, strict=True)
            segments.append(SplitWork(split, numbers, issued))
            work.clear()

    for number, command in enumerate(program.commands):
        if binding.device_of(command) is None:
            if work:
                end_work()
            calls.append(Call(binding.call(command), (number,)))
            continue
        if calls:
            end_calls()
        if work and command.split not in (split, RESULT):
            end_work()
        if not work:
            split = command.split
        work.append((number, binding.issued(command)))
    end_calls()
    end_work()
    return segments


def _calls(segments: Sequence[Segment], execute: Executor) -> Iterable[Call]:
    for kind, neighbours in groupby(segments, type):
        if kind is HostCalls:
            for segment in neighbours:
                yield from segment.calls  # type: ignore[union-attr]
        else:
            yield from execute(list(neighbours))  # type: ignore[arg-type]
