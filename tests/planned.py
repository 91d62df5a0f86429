"""Programs with plans: what `with_plans` may change, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.program.check.hazards import races
from workbench.program.commands import Command, Launch, Program, Record, Replay, Sync, Wait
from workbench.program.plans import with_plans

SCOPES = ("split", "step")


def by_commands(run: Sequence[Program], **how: Any) -> set[tuple[Command, Command]]:
    return {(race.first.command, race.second.command) for race in races(run, **how)}


def only_adds_order(run: Sequence[Program], scope: str) -> list[Program]:
    """The run with plans, which has the same work and races nowhere else."""
    made = {id(p): with_plans(p, scope) for p in run}
    planned = [made[id(p)] for p in run]
    for before, after in zip(run, planned, strict=True):
        work = [[c for c in p.singly() if not isinstance(c, (Record, Wait, Sync))]
                for p in (before, after)]  # fmt: skip
        assert work[0] == work[1]  # the very same commands in their order, so the same bytes
        waits = [[(c.stream, c.event) for c in p.commands if isinstance(c, Sync)]
                 for p in (before, after)]  # fmt: skip
        assert waits[0] == waits[1]
        assert not any(isinstance(c, Launch) and not c.by_host for c in after.commands)
        for c in after.commands:
            if isinstance(c, Replay):
                assert {part.stream.backend for part in c.parts} == {c.stream.backend}
    assert by_commands(planned) <= by_commands(run)
    return planned
