"""The waits that any steps could do without: what `check` tells of a cycle, of steps one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.program.check.acts import StepActs
from workbench.program.check.hazards import trials_of, waits_of
from workbench.program.commands import CommandAt, Program


def superfluous(
    steps: Iterable[Program], steady: range | None = None, way: str = "alone", *,
    one_order: bool = True, declared: Any = None,
) -> list[CommandAt]:  # fmt: skip
    """Every Sync and Wait of the steps `steady` (all, if not given) that is removable alone, in all
    steps of its program. What races with all waits in place may race without it."""
    acts = StepActs(list(steps), one_order, declared)
    waits = waits_of(acts, steady)
    return [waits[spot] for spot in getattr(trials_of(acts)[0], way)(list(waits))]


def sufficient(
    steps: Iterable[Program], steady: range | None = None, **how: Any
) -> list[CommandAt]:
    """An inclusion-minimal set of these Syncs and Waits with which nothing races that does not with
    all: greedy removal in program order."""
    return superfluous(steps, steady, "together", **how)
