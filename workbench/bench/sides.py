"""Which engine a test runs on, where preset `best` differs by the number of sequences.

`best` has a set for one sequence and a set for several. An engine takes the set for the most
sequences that its tests name. A test of another number runs on a variant, with the set for its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.bench.workload import Workload
from workbench.config import TogglePreset, Toggles

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


class Sides:
    """The engine and, while its test runs, one variant of it. on_side: told of a new variant."""

    def __init__(self, engine: Engine, on_side: Callable[[Engine], None] = lambda side: None):
        self._engine, self._on_side = engine, on_side
        self._variant: Engine | None = None
        self._closed: Counter[str] = Counter()  # counters of variants that are closed

    def _wanted(self, test: Workload) -> Toggles | TogglePreset:
        wanted = self._engine.wanted
        if wanted is None or not wanted.of_device:
            return self._engine.toggles
        return wanted.for_sequences(test.width)

    def toggles_of(self, test: Workload) -> Toggles:
        """The toggles that `test` runs with."""
        return self._engine.resolve(self._wanted(test))

    def of(self, test: Workload) -> Engine:
        """The engine that `test` runs on. The variant of an earlier test is closed, where this one
        needs another."""
        toggles = self.toggles_of(test)
        if toggles == self._engine.toggles:
            return self._engine
        if self._variant is None or self._variant.toggles != toggles:
            self.close()
            self._variant = self._engine.variant(self._wanted(test))
            self._on_side(self._variant)
        return self._variant

    @property
    def counters(self) -> dict[str, int]:
        """What the engine and its variants have counted, added up."""
        found = Counter(self._engine.counters)
        found.update(self._closed)
        if self._variant is not None:
            found.update(self._variant.counters)
        return dict(found)

    def close(self) -> None:
        """Closes the variant; the engine is its owner's."""
        if self._variant is not None:
            self._closed.update(self._variant.counters)
            self._variant.close()
            self._variant = None

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
