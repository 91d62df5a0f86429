"""ROOM #8366: step shape -> prepared program, built or reused.

Topology follows from the step shape, and cache stores go through a row-index input. So a program
that was built for a shape is right for every step with this shape, if each input of its graph says
so (`model/inputs.py`). The only question is what building it again costs. To tell which phase costs
how much, the toggles `redo_...` have a phase done again for every step whose program is reused.
What it makes is dropped.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from workbench.backend.issue import Prepared
from workbench.config import GraphReuse, Redo, Toggles
from workbench.engine.phases import Phases, Spent
from workbench.graph.ir import StepShape
from workbench.trace.spans import now_ns

KEPT = 64  # most programs kept; the least recently used goes first
# toggle -> the phases that it has done again, in their order
REDO: dict[str, tuple[str, ...]] = {
    "redo_build": ("graph", "fuse"),
    "redo_split": ("split",),
    "redo_layout": ("layout",),
    "redo_lower": ("lower",),
    "redo_bind": ("prepare",),
}


class Key(NamedTuple):
    """What a program follows from: the step's shape, and which copy of the rings the step takes
    (`program/layout.py`)."""

    shape: StepShape
    turn: int


class Kept(NamedTuple):
    """A program that is ready. refusing: inputs, by name, that cannot be given it again. redone:
    the phases that each reuse does again."""

    prepared: Prepared
    refusing: tuple[str, ...]
    redone: tuple[Callable[[], object], ...]


Build = Callable[[Key, Phases], Prepared]


class Rebuild:
    """Builds graph and program anew for every step.

    build: does the phases of a program. spent: told of every phase. redone: the phases, by name,
    that are done again where a program is reused. refused: how often each input kept a program of
    the step's shape from being reused.
    """

    def __init__(self, build: Build, spent: Spent, redone: tuple[str, ...] = ()):
        self._build, self._spent, self._redone = build, spent, redone
        self.built = self.reused = 0
        self.refused: Counter[str] = Counter()

    def get(self, key: Key) -> Prepared:
        self.built += 1
        return self._build(key, Phases(self._spent))

    def clear(self) -> None:
        """Nothing is kept."""


class KeepByShape(Rebuild):
    """Builds once for each step shape and turn and keeps the program.

    Each input is asked once, when its program is kept: the answer follows from the input and the
    step shape, and both stay what they are. So a token pays for one look at the answers.
    """

    def __init__(self, build: Build, spent: Spent, redone: tuple[str, ...] = ()):
        super().__init__(build, spent, redone)
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def get(self, key: Key) -> Prepared:
        start = now_ns()
        kept = self._kept.get(key)
        if kept is None or kept.refusing:
            if kept is not None:
                self.refused.update(kept.refusing)
            return self._keep(key)
        self._kept.move_to_end(key)
        self.reused += 1
        self._spent("reuse", start, now_ns())
        for again in kept.redone:
            again()
        return kept.prepared

    def _keep(self, key: Key) -> Prepared:
        self.built += 1
        phases = Phases(self._spent)
        prepared = self._build(key, phases)
        refusing = [t.name for t in prepared.program.inputs if not t.can_reuse(key.shape)]
        redone = [phases.again[phase] for phase in self._redone]
        self._kept[key] = Kept(prepared, tuple(refusing), tuple(redone))
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return prepared

    def clear(self) -> None:
        self._kept.clear()


_POLICIES: Mapping[str, type[Rebuild]] = {
    GraphReuse.REBUILD: Rebuild,
    GraphReuse.SET_ROWS: KeepByShape,
}


def programs_of(toggles: Toggles, build: Build, spent: Spent) -> Rebuild:
    """Where an engine with these toggles gets its programs."""
    redone = [p for name, phases in REDO.items() if getattr(toggles, name) == Redo.ON
              for p in phases]  # fmt: skip
    return _POLICIES[toggles.graph_reuse](build, spent, tuple(redone))
