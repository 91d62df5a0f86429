"""Who tells NVTX of steps: ranges around the calls that another watch hands out.

    step     | range of the process, from its begin to its end; two steps may overlap
    split    |   range of the thread, around neighbours of one split
    command  |     range of the thread, around one call: a copy, a launch, a plan, a wait ...

Ranges are made once for a program. A call that belongs to the other watch alone has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

from workbench.backend.base import Issue
from workbench.backend.issue.prepared import Prepared
from workbench.engine.batch import Batch, Work, n_tokens
from workbench.engine.look.nvtx_ranges import OFF, NoRanges, NvtxRanges, ranges_of
from workbench.engine.look.watch import Trace, Untraced, Watch, described, split_name
from workbench.program import commands as c
from workbench.trace.spans import Recorder

AHEAD = "launch ahead"  # category: of a plan that is launched before its step is submitted


class _InRanges(NamedTuple):
    """A call, what ranges begin before it, outermost first, and how many end after it."""

    call: Issue
    begin: tuple[Any, ...]
    n_end: int


class _Marks(NamedTuple):
    """Of one program, the calls of its head and of its tail; `ahead`: of its plan, launched ahead.
    late: as `Prepared.late`, empty until that is known."""

    head: list[_InRanges]
    tail: list[_InRanges]
    ahead: Any
    late: list[_InRanges]


class RangedWatch(Watch):
    """Tells NVTX of what `inner` hands out. coming: the number of the step that comes, and the
    cells that are in use before it."""

    looks_at_batches = True

    def __init__(self, inner: Watch, ranges: NvtxRanges, coming: Callable[[], tuple[int, int]]):
        self.counts = inner.counts
        self._inner, self._ranges, self._coming = inner, ranges, coming
        self._marks = ranges.kept
        self._steps = deque[int]()  # ranges of steps under way, oldest first
        self._has_begun = False
        self._depth = ranges.depth

    # of a step --------------------------------------------------------------------------------

    def of(self, prepared: Prepared) -> Prepared:
        return self._inner.of(prepared)

    def begin(self, step: int, work: Work, n_past: int) -> None:
        self._begin(n_tokens(work))
        self._inner.begin(step, work, n_past)

    def _begin(self, n_tokens: int) -> None:
        ranges, (number, n_used) = self._ranges, self._coming()
        self._depth, self._has_begun = ranges.depth, True
        self._steps.append(ranges.start_step(number, n_tokens, n_used))

    def batch(self, batch: Batch, program: c.Program) -> None:
        if not self._has_begun:  # it was made ahead
            self._begin(batch.shape.n_tokens)
        self._has_begun = False
        if self._inner.looks_at_batches:
            self._inner.batch(batch, program)

    def arm(self, prepared: Prepared) -> None:
        self._ranges.push(self._marks_of(prepared).ahead)
        self._inner.arm(prepared)
        self._ranges.pop()

    def end(self, waited: bool) -> None:
        self._ranges.stop(self._steps.popleft())
        self._inner.end(waited)

    def fail(self) -> None:
        self._stop_newest()
        self._inner.fail()

    def lost(self) -> None:
        self._stop_newest()
        self._inner.lost()

    def _stop_newest(self) -> None:
        """Steps fail from the newest on."""
        self._ranges.unwind(self._depth)
        self._has_begun = False
        if self._steps:
            self._ranges.stop(self._steps.pop())

    # of calls ---------------------------------------------------------------------------------

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        return self._calls(self._inner.head(prepared), self._marks_of(prepared).head)

    def late(self, prepared: Prepared) -> Iterable[Issue]:
        marks = self._marks_of(prepared)
        if not marks.late:
            marks.late.extend(_marked(prepared, prepared.late, prepared.late_numbers, self._ranges))
        return self._calls(self._inner.late(prepared), marks.late)

    def tail(self, prepared: Prepared) -> Iterable[Issue]:
        return self._calls(self._inner.tail(prepared), self._marks_of(prepared).tail)

    def _calls(self, calls: Iterable[Issue], marked: Iterable[_InRanges]) -> Iterator[Issue]:
        """Hands out `calls`, each that is marked in its ranges. Between marked ones, in their
        order, there may be calls of the inner watch."""
        push, pop, left = self._ranges.push, self._ranges.pop, iter(marked)
        wanted, begin, n_end = next(left, _NONE)
        for call in calls:
            if call is not wanted:
                yield call
                continue
            for attributes in begin:
                push(attributes)
            yield call
            for _ in range(n_end):
                pop()
            wanted, begin, n_end = next(left, _NONE)

    def _marks_of(self, prepared: Prepared) -> _Marks:
        found = self._marks.get(prepared)
        if found is None:
            found = self._marks[prepared] = _marks_of(prepared, self._ranges)
        return found


def _nothing() -> None:
    """No program has this call."""


_NONE = _InRanges(_nothing, (), 0)


def _marks_of(prepared: Prepared, ranges: NvtxRanges) -> _Marks:
    ahead = None
    if prepared.number_ahead is not None:
        name, _, payload = _range_of(prepared, prepared.number_ahead)
        ahead = ranges.attributes(name, AHEAD, payload)
    return _Marks(
        _marked(prepared, prepared.head, count(), ranges),
        _marked(prepared, prepared.tail, count(len(prepared.head)), ranges), ahead, [],
    )  # fmt: skip


def _marked(
    prepared: Prepared, calls: Iterable[Issue], numbers: Iterable[int], ranges: NvtxRanges
) -> list[_InRanges]:
    """Each call in the range of its command, inside the range of its split. numbers: of these
    commands."""
    commands = prepared.program.commands
    made, before = list[_InRanges](), c.RESULT
    for call, number in zip(calls, numbers, strict=False):
        split, begin = commands[number].split, []
        if split != before != c.RESULT:
            made[-1] = made[-1]._replace(n_end=2)
        if split not in (before, c.RESULT):
            begin.append(ranges.attributes(split_name(prepared, split), "split", split))
        begin.append(ranges.attributes(*_range_of(prepared, number)))
        made.append(_InRanges(call, tuple(begin), 1))
        before = split
    if before != c.RESULT:
        made[-1] = made[-1]._replace(n_end=2)
    return made


def _range_of(prepared: Prepared, number: int) -> tuple[str, str, int]:
    """Name, category and payload of a command's range: the number of a plan in its program; the
    bytes of a copy, a write and a read; of any other command its number."""
    name, args = described(prepared, number, 0)
    kind = prepared.program.commands[number].kind
    if kind == c.Replay.kind:  # one name, for a filter of a tool
        return "plan", kind, args["plan"]
    return name, kind, args.get("bytes", number)


def chosen(
    own: NoRanges,
    recorder: Recorder | None,
    plain: Watch,
    coming: Callable[[], tuple[int, int]],
) -> Callable[[int], Watch]:
    """From the number of a step to its watch, for an engine with this recorder.

    own: the ranges that the engine's setting asks for. Traced steps have ranges as `recorder` says.
    plain: the watch of untraced steps.
    coming: as `RangedWatch` has it.
    """

    def around(watch: Watch, ranges: NoRanges) -> Watch:
        return RangedWatch(watch, ranges, coming) if isinstance(ranges, NvtxRanges) else watch

    if recorder is None:
        watch = around(plain, own)
        return lambda step: watch
    traced = OFF if not recorder.nvtx else own if own.on else ranges_of("auto")
    trace, untraced = around(Trace(recorder), traced), around(Untraced(recorder, plain), own)
    return lambda step: trace if recorder.wants(step) else untraced
