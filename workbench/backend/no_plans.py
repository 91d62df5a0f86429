"""What an engine without plans has in the stead of `Plans` (`plan.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.backend.base import Backend, Memory
from workbench.backend.bind import Launcher, launched
from workbench.backend.issue import Executor, Prepared, eager
from workbench.program.commands import Buffer, Program


class NoPlans:
    """Every command is issued by a call of its own."""

    replays = False  # whether steps are captured and replayed
    launches_ahead = False  # whether a next step's plan waits on the device before it is submitted

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def executor(self, program: Program) -> Executor:
        """Makes the calls of a program that is bound now (`backend/issue.py`)."""
        return eager

    def clear(self) -> None:
        """Gives every plan back. Works that are called later are captured anew."""

    def prepare(
        self,
        program: Program,
        backends: Sequence[Backend],
        memory: Mapping[Buffer, Memory],
        events: dict[str, Any],
        launch: Launcher = launched,
    ) -> Prepared:
        """The program bound to addresses, as `Prepared` has it."""
        execute = self.executor(program)
        return self._ready(Prepared(program, backends, memory, events, execute, launch))

    def _ready(self, prepared: Prepared) -> Prepared:
        return prepared

    def stamped(self, prepared: Prepared) -> Prepared:
        """The program with stamps in its plans (`stamps.py`), kept beside the one without."""
        return prepared

    def release(self) -> None:
        """Lets go what was launched ahead. Before a wait for the device, which else takes the limit
        of a gate."""

    def free(self) -> None:
        """Gives everything back, once nothing is queued any more."""
        self.clear()
