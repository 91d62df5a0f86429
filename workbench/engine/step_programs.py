"""From the shape of a step to its program: graph, splits, layout and commands. Everything but
addresses."""

from __future__ import annotations

import math
from collections.abc import Callable

from workbench.config import Toggles
from workbench.engine.batch import prompt_shapes, step_shape
from workbench.engine.kv_cache import check_room
from workbench.engine.loaded import Loaded
from workbench.engine.memory import Residents
from workbench.engine.wanted import step_graph
from workbench.errors import UsageError
from workbench.graph.ir import StepShape
from workbench.program.commands import Buffer, Program
from workbench.program.layout import Target, lay_out
from workbench.program.lower import lower
from workbench.program.split import split
from workbench.program.sync_modes import Ordering
from workbench.trace.spans import now_ns

PHASES = ("graph", "split", "layout", "lower")


class StepPrograms:
    """The programs of one engine's steps; each is made when it is asked for, and none is kept.

    ordering, programmatic: as `modes_of` has them. spent: told of every phase, by name, and of the
    ns at which it began and ended.
    """

    def __init__(
        self,
        loaded: Loaded,
        toggles: Toggles,
        ordering: Ordering,
        programmatic: bool,
        residents: Residents,
        spent: Callable[[str, int, int], None],
    ):
        self._loaded = loaded
        self._toggles = toggles
        self._ordering = ordering
        self._residents = residents
        self._spent = spent
        last = loaded.backend
        self._targets = [
            Target(
                b.name,
                b.scratch_bytes,
                last.begins_early if programmatic and b is not loaded.backends[0] else None,
                last.capabilities.in_stream,
            )
            for b in loaded.backends
        ]

    @property
    def period(self) -> int:
        """After how many steps the rings that steps take by turns come round again."""
        return self._ordering.period

    def of(
        self, shape: StepShape, turn: int = 0, buffers: dict[str, Buffer] | None = None
    ) -> Program:
        """The program of a step of `shape`; turn and buffers as `lay_out` has them."""
        loaded, residents, ordering = self._loaded, self._residents, self._ordering
        t0 = now_ns()
        graph, backend_of = step_graph(
            loaded.model, shape, residents.caches, self._toggles, loaded.placement
        )
        t1 = now_ns()
        splits = split(graph, backend_of)
        t2 = now_ns()
        layout = lay_out(graph, splits, residents.ranges, self._targets, ordering, turn, buffers)
        t3 = now_ns()
        program = lower(graph, splits, layout, self._targets, ordering)
        times = (t0, t1, t2, t3, now_ns())
        for phase, start, end in zip(PHASES, times, times[1:], strict=False):
            self._spent(phase, start, end)
        return program

    def one(self, n_tokens: int, n_outputs: int, n_past: int) -> Program:
        """The program of a step behind n_past tokens. Raises UsageError where no step has it."""
        return self.of(step_shape(n_tokens, n_outputs, n_past, self._loaded.config))

    def several(self, n_prompt: int, n_decoded: int, laps: int) -> list[Program]:
        """See `Engine.programs`: steps of one shape and turn share one program."""
        config = self._loaded.config
        check_room(0, n_prompt + n_decoded, config.n_ctx)
        shapes = prompt_shapes(n_prompt, n_decoded, config.n_ubatch, config.n_kv_pad)
        buffers = dict[str, Buffer]()
        keys = [(shape, i % self.period) for i, shape in enumerate(shapes * laps)]
        made = {key: self.of(*key, buffers) for key in dict.fromkeys(keys)}
        return [made[key] for key in keys]

    def cycle(self, n_prompt: int, n_decoded: int) -> list[Program]:
        """See `Engine.cycle`."""
        if n_prompt < 1:
            raise UsageError(f"a prompt of {n_prompt} tokens has no steps; give at least 1")
        steps = -(-n_prompt // self._loaded.config.n_ubatch) + n_decoded
        return self.several(n_prompt, n_decoded, math.lcm(steps, self.period) // steps)
