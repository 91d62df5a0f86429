"""The watch of `Engine.stamped`: when each step began and ended on its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from workbench.backend.base import Issue
from workbench.backend.clock.stamps import StampRing, StepPairs, StepStamps
from workbench.backend.issue.prepared import Prepared
from workbench.engine.look.watch import Watch

Stamp = tuple[int, int]


class Stamps(Watch):
    """Finds when the first kernel of each step began, and when the last ended, by the device's
    clock (`backend/clock/stamps.py`). Only programs that launch on a device can be stamped.

    found: the stamps of all steps that have ended, in ns, after `find`.
    """

    def __init__(self, with_stamps: Callable[[Prepared], Prepared]) -> None:
        """with_stamps: gives a program stamps (`BoundPrograms.stamped`)."""
        self.found: list[Stamp] = []
        self._with_stamps = with_stamps
        self._under_way = deque[StepPairs]()  # of steps that are issued, oldest first
        self._ended: list[StepPairs] = []

    def of(self, prepared: Prepared) -> Prepared:
        return self._with_stamps(prepared)

    def head(self, prepared: Prepared) -> Iterable[Issue]:
        return chain(prepared.head, (partial(self._issued, prepared),))

    def late(self, prepared: Prepared) -> Iterable[Issue]:
        return chain(prepared.late, (partial(self._issued, prepared),))

    def _issued(self, prepared: Prepared) -> None:
        self._under_way.append(_stamps_of(prepared).latest())

    def tail(self, prepared: Prepared) -> Iterable[Issue]:
        if prepared.ahead is None:
            return prepared.tail
        return self._waited(prepared)

    def _waited(self, prepared: Prepared) -> Iterator[Issue]:
        """The tail of a step that is launched again if its gate was opened too late. Then the step
        has other pairs."""
        stamps = _stamps_of(prepared)
        before = stamps.latest()
        yield from prepared.tail
        if (now := stamps.latest()) != before:
            self._under_way[0] = now

    def end(self, waited: bool) -> None:
        self._ended.append(self._under_way.popleft())

    def lost(self) -> None:
        self._under_way.pop()  # steps fail from the newest on

    def find(self) -> None:
        """Fills `found`. Differences are by the device's clock, which is set to the host's. Call it
        once, when nothing is under way."""
        rings = {ring for pairs in self._ended for ring, _ in pairs}
        ahead = {ring: _ahead_ns(ring) for ring in rings}
        self.found += [pairs.times(ahead.__getitem__) for pairs in self._ended]
        for ring in rings:
            ring.forget()


def _stamps_of(prepared: Prepared) -> StepStamps:
    assert isinstance(prepared.launches, StepStamps), "the program was prepared with stamps"
    return prepared.launches


def _ahead_ns(ring: StampRing) -> int:
    clock = ring.backend.clock()
    assert clock is not None, "who writes stamps has a clock"
    return clock.ahead_ns
