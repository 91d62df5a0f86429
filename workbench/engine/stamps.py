"""Who looks on in `Engine.stamped`: when each step began and ended on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from workbench.backend.base import Backend, Issue
from workbench.backend.issue import Prepared
from workbench.backend.stamps import StampedWork, StampRing
from workbench.engine.watch import PLAIN, Watch, device_of
from workbench.program import commands as c

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

Stamp = tuple[int, int]


class _Told(NamedTuple):
    """What tells when a work began or ended: a pair of a ring, or without one marks of the device.
    It does not keep the work: plans of works that are gone are taken over."""

    device: Backend
    ring: StampRing | None


class _Work(NamedTuple):
    """The call that has a device's launch, and where its marks are made. plan: what it calls, where
    that has stamps of its own."""

    number: int
    stream: int
    plan: StampedWork | None
    by: _Told

    def mark(self) -> Any:
        return self.by.device.mark(self.stream)


class _Marked(NamedTuple):
    """First and last work of a program, and its calls with the marks that they need."""

    first: _Work
    last: _Work
    calls: list[Issue]


class _StampedStep(NamedTuple):
    """A step that has ended. marks: in front of its first work and behind it, and behind its last,
    unless these are plans. pairs: of the rings of first and last."""

    marks: tuple[Any, ...]
    first: _Told
    last: _Told
    pairs: tuple[int, int]


class Stamps(Watch):
    """Of each step: when its first kernel began, and when its last one ended.

    Plans have stamps of their own, by the device's clock (`backend/stamps.py`). Where a step begins
    or ends with a launch outside of any plan, there are marks: in front of the launch, behind it,
    and behind the last. On CUDA such a mark is passed when the stream comes to it, before the
    launch is issued, and costs the host a microsecond or two. Only programs that launch on a device
    can be stamped. with_stamps: gives a program plans with stamps (`Plans.stamped`).

    The device stands still while a step begins and ends. What need not be done then is done before.
    """

    def __init__(self, with_stamps: Callable[[Prepared], Prepared]) -> None:
        self.found: list[Stamp] = []
        self._with_stamps = with_stamps
        self._steps: list[_StampedStep] = []
        self._marks: list[Any] = []  # of the step under way
        self._now: _Marked | None = None  # the program of the step under way
        self._coming: tuple[Prepared, _Marked] | None = None  # of the next step, most likely
        self._programs = WeakKeyDictionary[Prepared, _Marked]()

    def of(self, prepared: Prepared) -> Prepared:
        stamped = self._with_stamps(prepared)
        self._coming = stamped, self._marked(stamped)
        return stamped

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        return self._begun(prepared).calls

    def late(self, prepared: Prepared) -> Iterable[Issue]:
        self._begun(prepared)  # a plan, which has stamps: none of its calls is a mark
        return prepared.late

    def _begun(self, prepared: Prepared) -> _Marked:
        """A step with this program begins."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] is prepared:
            self._now = coming[1]
        else:
            self._now = self._marked(prepared)
        return self._now

    def _marked(self, prepared: Prepared) -> _Marked:
        """Made once: a search in every step would be part of what is measured there."""
        found = self._programs.get(prepared)
        if found is not None:
            return found
        work = list(_device_work(prepared))
        first, last = work[0], work[-1]
        calls = list(prepared.head)
        # No cycle through self: a mark's event goes back to its pool when the mark is let go, and
        # the collector would destroy the event with it.
        marks = self._marks
        if last.plan is None:
            calls.insert(last.number + 1, lambda: marks.append(last.mark()))
        if first.plan is None:
            calls.insert(first.number + 1, lambda: marks.append(first.mark()))
            calls.insert(first.number, lambda: marks.append(first.mark()))
        self._programs[prepared] = found = _Marked(first, last, calls)
        return found

    def end(self, waited: bool) -> None:
        assert self._now is not None, "a step that ends has begun"
        first, last, _ = self._now
        begin = -1 if first.plan is None else first.plan.number
        if last is first:
            end = begin
        else:
            end = -1 if last.plan is None else last.plan.number
        self._steps.append(_StampedStep(tuple(self._marks), first.by, last.by, (begin, end)))
        self._over()

    def fail(self) -> None:
        self._over()

    def _over(self) -> None:
        self._now = None
        self._marks.clear()

    def find(self) -> None:
        """Makes `found`: the stamps of all steps that have ended, in ns. Differences are by the
        device's clock, which is set to the host's. Call it once, when nothing is under way."""
        rings = {by.ring for step in self._steps for by in (step.first, step.last)}
        ahead = {ring: _ahead_ns(ring) for ring in rings if ring is not None}
        for marks, first, last, pairs in self._steps:
            if first.ring is None:
                begin = first.device.resolve(*marks[:2])[0]
            else:
                begin = first.ring.pair(pairs[0])[0] + ahead[first.ring]
            if last.ring is None:
                end = last.device.resolve(marks[-1], marks[-1])[1]
            else:
                end = last.ring.pair(pairs[1])[1] + ahead[last.ring]
            self.found.append((begin, end))
        for ring in ahead:
            ring.forget()


@contextmanager
def stamped(engine: Engine, stamps: Stamps) -> Iterator[list[Stamp]]:
    """See `Engine.stamped`."""
    engine.look(engine.recorder, stamps)
    try:
        yield stamps.found
        engine.issuer.end_all_but(0)
    finally:
        engine.look(engine.recorder, PLAIN)
        engine.synchronize()
        stamps.find()


def _ahead_ns(ring: StampRing) -> int:
    clock = ring.backend.clock()
    assert clock is not None, "who writes stamps has a clock"
    return clock.ahead_ns


def _device_work(prepared: Prepared) -> Iterator[_Work]:
    firsts = prepared.firsts
    for number in range(len(prepared.head)):
        for command in prepared.program.commands[firsts[number] : firsts[number + 1]]:
            if isinstance(command, c.Launch | c.Replay) and (
                device := device_of(prepared, command)
            ):
                plan = prepared.issued.get(firsts[number])
                stamped = plan if isinstance(plan, StampedWork) else None
                told = _Told(device, None if stamped is None else stamped.ring)
                yield _Work(number, command.stream.id, stamped, told)
                break
