"""From the shape of a step to its program: graph, splits and commands. Everything but addresses."""

from __future__ import annotations

from collections.abc import Callable

from workbench.config import Toggles
from workbench.engine.loaded import Loaded
from workbench.engine.memory import Residents
from workbench.engine.wanted import step_graph
from workbench.graph.ir import StepShape
from workbench.program.commands import Buffer, Program
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import Ordering
from workbench.trace.spans import now_ns


class StepPrograms:
    """The programs of one engine's steps; each is made when it is asked for, and none is kept.

    ordering, programmatic: as `modes_of` has them. spent: told of every phase, by name, and of the
    ns at which it began and ended.
    """

    def __init__(
        self,
        toggles: Toggles,
        ordering: Ordering,
        programmatic: bool,
        residents: Residents,
        spent: Callable[[str, int, int], None],
    ):
        self._toggles = toggles
        self._ordering = ordering
        self._programmatic = programmatic
        self._residents = residents
        self._spent = spent

    def of(
        self, loaded: Loaded, shape: StepShape, buffers: dict[str, Buffer] | None, turn: int
    ) -> Program:
        """The program of a step of `shape` on the backends of `loaded`; buffers and turn as `lower`
        has them."""
        t0 = now_ns()
        graph, place = step_graph(
            loaded.model, shape, self._residents.caches, self._toggles, loaded.placement
        )
        t1 = now_ns()
        splits = split(graph, place)
        t2 = now_ns()
        program = lower(
            graph,
            splits,
            self._residents.ranges,
            [b.name for b in loaded.backends],
            [b.scratch_bytes for b in loaded.backends],
            self._ordering,
            loaded.backend.begins_early if self._programmatic else None,
            buffers,
            turn,
            loaded.backend.capabilities.in_stream,
        )
        self._spent("graph", t0, t1)
        self._spent("split", t1, t2)
        self._spent("lower", t2, now_ns())
        return program
