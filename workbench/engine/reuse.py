"""ROOM #8366: step shape -> prepared program, built or reused.

Topology follows from the step shape, and cache stores go through a row-index input. So a program
that was built for a shape is right for every step with this shape. The only question is what
building it again costs.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from workbench.backend.issue import Prepared
from workbench.config import GraphReuse
from workbench.graph.ir import StepShape

KEPT = 64  # most programs kept; the least recently used goes first


class Key(NamedTuple):
    """What a program follows from: the step's shape, and which copy of the rings the step takes
    (`program/layout.py`)."""

    shape: StepShape
    turn: int


class Rebuild:
    """Builds graph and program anew for every step."""

    def __init__(self, build: Callable[[Key], Prepared]):
        self._build = build
        self.built = self.reused = 0

    def get(self, key: Key) -> Prepared:
        self.built += 1
        return self._build(key)

    def clear(self) -> None:
        """Nothing is kept."""


class KeepByShape(Rebuild):
    """Builds once for each step shape and turn and keeps the program."""

    def __init__(self, build: Callable[[Key], Prepared]):
        super().__init__(build)
        self._kept: OrderedDict[Key, Prepared] = OrderedDict()

    def get(self, key: Key) -> Prepared:
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self.reused += 1
            return kept
        made = self._kept[key] = super().get(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return made

    def clear(self) -> None:
        self._kept.clear()


POLICIES: dict[str, type[Rebuild]] = {
    GraphReuse.REBUILD: Rebuild,
    GraphReuse.SET_ROWS: KeepByShape,
}
