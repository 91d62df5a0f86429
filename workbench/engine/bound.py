"""Programs on addresses: a step's program is made, bound to memory and prepared for its backends.

Programs of one engine share its workspace and its events. Where a program needs more memory than
there is, everything that holds old addresses is dropped before they change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from workbench.backend.base import Backend
from workbench.backend.issue.bind import Launching
from workbench.backend.issue.prepared import Prepared
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.load import Loaded, kind
from workbench.engine.look.phases import Phases
from workbench.engine.memory import Residents, Workspace
from workbench.engine.programs import Key
from workbench.engine.step import Issuer
from workbench.engine.step_programs import StepPrograms
from workbench.graph.ir import Node, StepShape
from workbench.program.commands import Program


class BoundPrograms:
    """The bound programs of one engine.

    made: makes its programs.
    on_grow: drops everything that holds addresses of the workspace, which are about to change.
    events: by name.
    """

    def __init__(
        self,
        loaded: Loaded,
        residents: Residents,
        issuer: Issuer,
        made: Callable[[], StepPrograms],
        on_grow: Callable[[], None],
    ):
        self._loaded, self._residents, self._issuer, self._made = loaded, residents, issuer, made
        self.workspace = Workspace(loaded.backends, on_grow)
        self.events: dict[str, Any] = {}
        self._stamped = WeakKeyDictionary[Prepared, Prepared]()
        self._ready = set[StepShape]()  # shapes that `unready` was given

    def build(self, key: Key, phases: Phases, cell: int = 0) -> Prepared:
        """A step's program, ready to be issued. Where it needs new memory, the host may wait for
        the device."""
        self._issuer.release()
        program = self._made().of(key.shape, key.turn, phases=phases, cell=cell)
        return phases.do("prepare", self._prepared, program)

    def _prepared(self, program: Program) -> Prepared:
        memory = self._residents.memory | self.workspace.bind(program)
        return self._issuer.prepare(program, self._loaded.backends, memory, self.events)

    def again(self, prepared: Prepared, launches: Launching) -> Prepared:
        """The same program on the same memory, with its launches asked for in another way."""
        memory, backends = prepared.binding.memory, self._loaded.backends
        return self._issuer.prepare(prepared.program, backends, memory, self.events, launches)

    def stamped(self, prepared: Prepared) -> Prepared:
        """The same program with stamps. It is kept beside the program without stamps."""
        made = self._stamped.get(prepared)
        if made is None:
            stamps = self._issuer.stamps(prepared.program, self._loaded.backends)
            made = self._stamped[prepared] = self.again(prepared, stamps)
        if prepared.binding.cell is not None:
            made.store_at(prepared.binding.cell)
        return made

    def unready(self, shapes: Iterable[StepShape]) -> list[tuple[Backend, Node]]:
        """What steps of these shapes launch, each node after its backend: of nodes that need the
        same kernels only the first. Shapes that an earlier call was given have none."""
        new = [shape for shape in dict.fromkeys(shapes) if shape not in self._ready]
        self._ready |= {*new}
        found = dict[tuple, tuple[Backend, Node]]()
        for shape in new:
            for node, number in self._made().nodes_of(shape):
                found.setdefault((number, kind(node)), (self._loaded.backends[number], node))
        return [*found.values()]

    def reserve(self, cache: KVCache, n_ubatch: int, period: int) -> None:
        """Allocates the cache, and memory for the largest step in each of its turns. So memory
        grows later only for many outputs. Raises UsageError where lifetimes let steps race."""
        self._residents.allocate(self._loaded)
        n_kv = cache.region_cells
        n_tokens = min(n_ubatch, n_kv)
        self._made().refuse_races(n_tokens, n_kv, cache.pad)
        self.grow(StepShape(n_tokens, 1, n_kv), period)

    def grow(self, shape: StepShape, period: int) -> None:
        """Allocates memory for a step of `shape` in each of its turns, so that no later step grows
        it."""
        for turn in range(period):
            self.workspace.bind(self._made().of(shape, turn))

    def free(self) -> None:
        """Gives memory back, except the weights, which belong to the model."""
        self.workspace.free()
        self._residents.free()
