"""The steps that are issued and have not ended, and whose turn of the rings comes next.

With results=behind there may be two: the next one is issued before the results of the one before
are there. They end in the order in which they were issued.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from workbench.program.sync_modes import Ordering

if TYPE_CHECKING:
    from workbench.engine.pending import Pending


class UnderWay:
    """Of one engine. one_by_one: a step ends before the next is issued, whatever the ordering.

    turn: which copy of the rings the next step takes (`program/layout.py`). Without results behind,
    it is the turn of the step under way until it ends.
    """

    def __init__(self, ordering: Ordering):
        self._ordering = ordering
        self._steps: deque[Pending] = deque()  # oldest first
        self.one_by_one = False
        self.turn = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def most(self) -> int:
        """How many steps may be under way."""
        return 1 if self.one_by_one else self._ordering.result_ring

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is made ready when one is submitted, not when one is waited for."""
        return self.most > 1

    def add(self, pending: Pending) -> Pending:
        """A step that has just been issued."""
        self._steps.append(pending)
        if self._ordering.result_ring > 1:
            self.turn = self._ordering.turn_after(self.turn, False)
        return pending

    def end(self, pending: Pending, waits: bool) -> None:
        """A step ends, and those before it have. waits: the host waits for it before it issues
        another."""
        while self._steps and self._steps[0] is not pending:
            self._steps[0].wait()
        if self._steps:
            self._steps.popleft()
        if self._ordering.result_ring == 1:
            self.turn = self._ordering.turn_after(self.turn, waits)

    def end_all_but(self, n: int) -> None:
        """Waits until no more than n steps are under way."""
        while len(self._steps) > n:
            self._steps[0].wait()

    def fail(self) -> None:
        """A step has failed: those behind it have no results either."""
        while self._steps:
            self._steps.pop().fail()

    def give_up(self) -> None:
        """Nobody waits any more: what results would be read from is freed."""
        while self._steps:
            self._steps.pop().give_up()
