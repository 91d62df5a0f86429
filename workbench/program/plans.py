"""ROOM #16548, what is in a plan: a rewrite of a program, before anything is captured.

A plan is one command, `Replay`, in place of the commands that it stands for. `backend/plan/life.py`
captures and replays plans. This module says which commands a plan stands for:

    split    h s a a s g g g g . a r S R       the launches of each split
                       `plan -'
    step     h s a a . g g g g . a r S R       copies, launches, copies of results: all that one
                 `------ plan -----'           device is asked between two calls of the host

Whatever a plan needs from outside is waited for before the plan. Whatever others need of it is
recorded after the plan. So a Wait for an event from outside moves to the time before the plan, and
a Record for others to the time after it, both on the stream that the plan is launched on. A Wait
after the last work stays on its stream, and so does a Record after that Wait. With `step` on
several devices this costs overlap: before a plan begins, the next device must be done with the
bytes that the plan's last copy overwrites. Several buffers (n_copies=4) give the overlap back.

A part on another stream has no order with that stream's work outside of the plan. So a stream that
has such work is joined with the plan's stream before and after the plan. Both rewrites only add
order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from workbench.config import PlanScope
from workbench.program import commands as c
from workbench.program import events

_WORK = (c.Copy, c.Launch)
_IN: dict[str, tuple[type[c.Command], ...]] = {
    PlanScope.SPLIT: (c.Launch, c.Record, c.Wait),
    PlanScope.STEP: (c.Copy, c.Launch, c.Record, c.Wait),
}


class _Planned(NamedTuple):
    """A plan, and the commands before and after it."""

    before: list[c.Command]
    replay: c.Replay
    after: list[c.Command]


def with_plans(program: c.Program, scope: str) -> c.Program:
    """The program with plans in place of the commands that they stand for. Its order is at least as
    strong, towards any program that records and waits for the same events."""
    used = [(i, x.event) for i, x in enumerate(program.commands) if isinstance(x, c.Wait | c.Sync)]
    made: list[c.Command | _Planned] = []
    for device, group in groupby(enumerate(program.commands), lambda at: _device(at[1], scope)):
        numbers, run = zip(*group, strict=True)
        if device is None or not any(isinstance(x, c.Launch) for x in run):
            made += run
        else:
            outside = {event for i, event in used if not numbers[0] <= i <= numbers[-1]}
            made.append(_planned(run, c.Stream(device[0], c.COMPUTE_STREAM), outside))
    plain = [x for x in made if not isinstance(x, _Planned)]
    around = [x for p in made if isinstance(p, _Planned) for x in (*p.before, *p.after)]
    apart = {x.stream for x in (*plain, *around)}
    copied = {part for p in made if isinstance(p, _Planned) for part in p.replay.parts}
    commands: list[c.Command] = []
    for x in made:
        if isinstance(x, _Planned):
            commands += _joined(x, apart, program.backends)
        elif isinstance(x, c.Sync) and x.blocks in copied:  # now a wait for the plan
            commands.append(replace(x, blocks=None))
        else:
            commands.append(x)
    return replace(program, commands=commands)


def _device(command: c.Command, scope: str) -> tuple[int, int] | None:
    """A key that is equal for neighbours which can be in one plan; None for a command that is in no
    plan."""
    if command.by_host or not isinstance(command, _IN[scope]):
        return None
    assert command.stream is not None
    if command.split == c.RESULT and command.stream.id == c.COPY_STREAM:
        return None  # a copy of results after a step, for which the next step does not wait
    return command.stream.backend, command.split if scope == PlanScope.SPLIT else 0


def _planned(
    run: Sequence[c.Command], stream: c.Stream, outside: Collection[str | None]
) -> _Planned:
    """The plan that stands for a stretch of commands. outside: events that are waited for outside
    of it."""
    last = max(i for i, x in enumerate(run) if isinstance(x, _WORK))
    record_of = _records(run[:last])
    needed, outside = {*record_of.values()}, {*outside, *_events(run[last:], c.Wait)}
    before: list[c.Command] = []
    parts: list[c.Command] = []
    after: list[c.Command] = []
    waits: list[c.Wait] = []  # in `after`
    for i, x in enumerate(run):
        if isinstance(x, _WORK) or i in record_of:
            parts.append(x)
        elif isinstance(x, c.Wait):
            if i > last:
                waits.append(x)
                after.append(x)
            else:
                before += [x] if x.stream == stream else [x, c.Wait(x.event, stream, x.split)]
        elif isinstance(x, c.Record):
            if any(w.event == x.event or w.stream == x.stream for w in waits):
                after.append(x)  # it stands for what the stream waits for, or has the same name
            elif any(part.stream == x.stream for part in parts):
                if i in needed:
                    parts.append(x)
                if i not in needed or x.event in outside:
                    after.append(replace(x, stream=stream))
            else:  # it stands for what the stream did before the plan
                before.append(x)
                if x.event in _events(after, c.Record):  # and must stay the event's latest Record
                    after.append(x)
    split = next(x.split for x in run if isinstance(x, c.Launch))
    return _Planned(before, c.Replay(tuple(parts), stream, split), after)


def _records(run: Sequence[c.Command]) -> dict[int, int]:
    """The number of each Wait for work of this stretch, with the number of its Record. The stretch
    orders whatever follows such a Wait after that work, too."""
    found: dict[int, int] = {}
    latest: dict[str, int | None] = {}
    begun: set[c.Stream | None] = set()
    for i, x in enumerate(run):
        if isinstance(x, c.Record):
            latest[x.event] = i if x.stream in begun else None
            continue
        if isinstance(x, c.Wait) and (record := latest.get(x.event)) is not None:
            found[i] = record
        if isinstance(x, _WORK) or i in found:
            begun.add(x.stream)
    return found


def _events(run: Sequence[c.Command], kind: type[c.Record] | type[c.Wait]) -> set[str]:
    return {x.event for x in run if isinstance(x, kind)}


def _joined(
    planned: _Planned, apart: Collection[c.Stream | None], backends: Sequence[str]
) -> Sequence[c.Command]:
    """The commands that stand for a plan in a program.

    apart: streams with work outside of plans.
    """
    before, replay, after = planned
    here, split = replay.stream, replay.split
    streams = dict.fromkeys(x.stream for x in replay.parts)
    others = [s for s in streams if s in apart and s is not None and s != here]
    if not others:
        return *before, replay, *after
    for other in others:
        reached = events.before_plan(other.describe(backends))
        before += [c.Record(reached, other, split), c.Wait(reached, here, split)]
    over = events.replayed(here.describe(backends))
    joins = [c.Wait(over, other, split) for other in others]
    return *before, replay, c.Record(over, here, split), *joins, *after
