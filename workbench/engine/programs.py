"""ROOM #8366: step shape -> prepared program, built, patched or reused.

Topology follows from the step shape. So a program that was built for a shape is right for every
step with this shape, if each input of its graph agrees (`model/inputs.py`). Only one thing differs
from step to step: the cells that K and V of the step's tokens go to. How a program learns of these
cells depends on the way of reuse. In the order of llama.cpp's history:

    rebuild         set_rows, though nothing is kept
    patch_pointers  copy_to_view: an address in every store, patched before a step (#8366)
    pointer_table   copy_by_table: an input has an entry for every store (#9017)
    set_rows        an input has a row for every token (#14482)

The stores of the second and third way need cells in a row. The toggles `redo_...` show what each
phase of a build costs: such a phase is done again for every step that reuses a program, and its
result is dropped.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from workbench.backend.issue.prepared import Prepared
from workbench.config import GraphReuse, Redo, Toggles
from workbench.engine.batch import Values, row_values
from workbench.engine.look.phases import PhaseClock, Phases
from workbench.graph.ir import StepShape
from workbench.model.inputs import STORE_TABLE

KEPT = 256  # the most programs that are kept; beyond that the least recently used is dropped
# toggle -> the phases that it does again, in their order
REDO: dict[str, tuple[str, ...]] = {
    "redo_build": ("graph", "fuse"),
    "redo_split": ("split",),
    "redo_layout": ("layout",),
    "redo_lower": ("lower",),
    "redo_bind": ("prepare",),
}


class Key(NamedTuple):
    """What a program is built for: the step's shape, and which copy of the rings the step takes
    (`program/layout.py`)."""

    shape: StepShape
    turn: int


class KeptProgram(NamedTuple):
    """A program that is kept.

    refusing: the names of inputs that refuse to be reused.
    redone: the phases that each reuse does again.
    """

    prepared: Prepared
    refusing: tuple[str, ...]
    redone: tuple[Callable[[], object], ...]


Build = Callable[[Key, Phases, int], Prepared]  # int: the first cell that the program stores


class Rebuild:
    """Builds graph and program anew for every step.

    build: builds a program, phase by phase.
    clock: told of every phase.
    redone: the names of the phases that are done again where a program is reused.
    n_refused: steps whose program was built although a program of their shape was kept.
    refused: how often each input was the reason.
    """

    def __init__(self, build: Build, clock: PhaseClock, redone: tuple[str, ...] = ()):
        self._build, self._clock, self._redone = build, clock, redone
        self.built = self.reused = self.n_refused = 0
        self.refused: Counter[str] = Counter()

    def get(self, key: Key, cell: int = 0) -> Prepared:
        """The program of the next step, whose first token is stored in `cell`."""
        self.built += 1
        return self._build(key, Phases(self._clock), cell)

    def peek(self, key: Key) -> Prepared | None:
        """The program of a next step, if it is kept and right as it is. Builds and counts
        nothing."""
        return None

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The step shapes that have a kept program, each once."""
        return ()

    @property
    def refusals(self) -> str:
        """`; inp_pos kept 5 from being reused`; empty where every input agreed."""
        return "".join(f"; {name} kept {n} from being reused" for name, n in self.refused.items())

    def clear(self) -> None:
        """Nothing is kept."""


class KeepByShape(Rebuild):
    """Builds a program once for each step shape and turn, and keeps it.

    Each input is asked once, when its program is kept, because its answer follows from the input
    and the step shape. So a token only pays for one look at the answers.
    """

    def __init__(self, build: Build, clock: PhaseClock, redone: tuple[str, ...] = ()):
        super().__init__(build, clock, redone)
        self._kept: OrderedDict[Key, KeptProgram] = OrderedDict()

    def get(self, key: Key, cell: int = 0) -> Prepared:
        start = self._clock.begin("reuse")
        kept = self._kept.get(key)
        if kept is None or kept.refusing:
            self._clock.leave()
            if kept is not None:
                self.n_refused += 1
                self.refused.update(kept.refusing)
            return self._keep(key, cell)
        self._kept.move_to_end(key)
        self.reused += 1
        self._fit(kept.prepared, cell)
        self._clock.end("reuse", start)
        for again in kept.redone:
            again()
        return kept.prepared

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return tuple(dict.fromkeys(key.shape for key in self._kept))

    def _keep(self, key: Key, cell: int) -> Prepared:
        self.built += 1
        phases = Phases(self._clock)
        prepared = self._build(key, phases, cell)
        refusing = [t.name for t in prepared.program.inputs if not t.can_reuse(key.shape)]
        redone = [phases.again[phase] for phase in self._redone]
        self._kept[key] = KeptProgram(prepared, tuple(refusing), tuple(redone))
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return prepared

    def _fit(self, prepared: Prepared, cell: int) -> None:
        """Makes a kept program right for the step. Here it already is: inputs tell the stores where
        to store."""

    def peek(self, key: Key) -> Prepared | None:
        kept = self._kept.get(key)
        return None if kept is None or kept.refusing or kept.redone else kept.prepared

    def clear(self) -> None:
        self._kept.clear()


class PatchPointers(KeepByShape):
    """As KeepByShape, but stores are patched for the step's first cell."""

    def _fit(self, prepared: Prepared, cell: int) -> None:
        prepared.store_at(cell)

    def peek(self, key: Key) -> Prepared | None:
        return None  # the stores of a step are patched when it begins


def _no_values(n_layer: int, cells: np.ndarray) -> Values:
    """No inputs: the destinations are in the stores."""
    return {}


def _table(n_layer: int, cells: np.ndarray) -> Values:
    """The table of first cells, for K and V of each layer."""
    return {STORE_TABLE: np.full(2 * n_layer, cells[0], np.int64)}


class Reuse(NamedTuple):
    """A way of reuse.

    policy: builds or keeps programs.
    store: the op of the cache stores (`model/blocks.py`).
    in_a_row: a step needs its cells in a row.
    values: (n_layer, cells) -> the inputs that tell the stores the step's cells.
    """

    policy: type[Rebuild]
    store: str
    in_a_row: bool
    values: Callable[[int, np.ndarray], Values]


_ROWS = ("set_rows", False, lambda n_layer, cells: row_values(cells))
WAYS: dict[str, Reuse] = {
    GraphReuse.REBUILD: Reuse(Rebuild, *_ROWS),
    GraphReuse.PATCH_POINTERS: Reuse(PatchPointers, "copy_to_view", True, _no_values),
    GraphReuse.POINTER_TABLE: Reuse(KeepByShape, "copy_by_table", True, _table),
    GraphReuse.SET_ROWS: Reuse(KeepByShape, *_ROWS),
}


def reuse_of(toggles: Toggles) -> Reuse:
    """The way of reuse that `toggles` ask for."""
    return WAYS[toggles.graph_reuse]


def programs_of(toggles: Toggles, build: Build, clock: PhaseClock) -> Rebuild:
    """What builds or keeps the programs of an engine with these toggles."""
    redone = [p for name, phases in REDO.items() if getattr(toggles, name) == Redo.ON
              for p in phases]  # fmt: skip
    return reuse_of(toggles).policy(build, clock, tuple(redone))
