"""ROOM #16548, what is in a plan: a rewrite of a program, before anything is captured.

A plan is one command, `Replay`, in place of the commands that it stands for. `backend/plan.py`
captures and replays it. Here it says which commands those are:

    split    h s a a s g g g g . a r S R       the launches of each split
                       `plan -'
    step     h s a a . g g g g . a r S R       copies, launches, copies of results: all that one
                 `------ plan -----'           device is asked between two calls of the host

What a plan needs from outside is waited for in front of it. What others need of it is recorded
behind it. So Waits for others' events move in front, and Records for others move behind, both on
the stream that the plan is launched on. That only adds order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from workbench.choices import PlanRule, PlanScope
from workbench.errors import DeviceError, UsageError
from workbench.program import commands as c
from workbench.program.capabilities import Capabilities
from workbench.program.sync_modes import Ordering

_WORK = (c.Copy, c.Launch)
_IN: dict[str, tuple[type[c.Command], ...]] = {
    PlanScope.SPLIT: (c.Launch, c.Record, c.Wait),
    PlanScope.STEP: (c.Copy, c.Launch, c.Record, c.Wait),
}


def choose_scope(
    plans: str, scope: str, ordering: Ordering, capabilities: Capabilities, device: str
) -> str:
    """What is in plans; empty for no plans. Raises DeviceError where the device cannot capture any,
    UsageError where the host waits amid what `scope` wants in one plan."""
    if plans == PlanRule.OFF:
        return ""
    if not capabilities.capture:
        raise DeviceError(f"the {device} device cannot capture: plans={plans}; use plans=off")
    if scope == PlanScope.STEP and (ordering.rule.blocking or ordering.rule.wait_after):
        raise UsageError(
            f"toggles plan_scope={scope} and sync={ordering.sync} clash: the host waits between "
            "the first copy and the last launch; use sync=packed_implicit, or "
            "plan_scope=split"
        )
    return scope


def with_plans(program: c.Program, scope: str) -> c.Program:
    """The program with plans in place of what they stand for. Its order is at least as strong."""
    used = [(i, x.event) for i, x in enumerate(program.commands) if isinstance(x, c.Wait | c.Sync)]
    made: list[c.Command] = []
    for device, group in groupby(enumerate(program.commands), lambda at: _device(at[1], scope)):
        numbers, run = zip(*group, strict=True)
        if device is None or not any(isinstance(x, c.Launch) for x in run):
            made += run
        else:
            outside = {event for i, event in used if not numbers[0] <= i <= numbers[-1]}
            made += _planned(run, c.Stream(device[0], c.COMPUTE_STREAM), outside)
    return replace(program, commands=made)


def _device(command: c.Command, scope: str) -> tuple[int, int] | None:
    """The same for neighbours that one plan can have; None for what no plan has."""
    if command.by_host or not isinstance(command, _IN[scope]):
        return None
    assert command.stream is not None
    return command.stream.backend, command.split if scope == PlanScope.SPLIT else 0


def _planned(
    run: Sequence[c.Command], stream: c.Stream, outside: set[str | None]
) -> Iterator[c.Command]:
    """What stands in front of the plan of a run, the plan, and what stands behind it.

    outside: events that others wait for.
    """
    work = [i for i, x in enumerate(run) if isinstance(x, _WORK)]
    first, last = work[0], work[-1]
    inside: set[str] = set()  # events that are recorded and waited for between first and last
    recorded: set[str] = set()
    for x in run[first : last + 1]:
        if isinstance(x, c.Record):
            recorded.add(x.event)
        elif isinstance(x, c.Wait) and x.event in recorded:
            inside.add(x.event)
    parts: list[c.Command] = []
    behind: list[c.Command] = []
    here: set[str] = set()  # events whose latest Record is a part
    for i, x in enumerate(run):
        if isinstance(x, c.Record):
            if i < first:
                yield x
            elif x.event in inside and i < last:
                parts.append(x)
                here.add(x.event)
            if i > first and (x.event not in inside or x.event in outside):
                behind.append(c.Record(x.event, stream, x.split))
        elif not isinstance(x, c.Wait):
            parts.append(x)
        elif i > last:
            behind.append(x)
        elif x.event not in here:
            yield c.Wait(x.event, stream, x.split)
        else:
            parts.append(x)
    split = next(x.split for x in run if isinstance(x, c.Launch))
    yield c.Replay(tuple(parts), stream, split)
    yield from behind
