"""ROOM #16548, what is in a plan: a rewrite of a program, before anything is captured.

A plan is one command, `Replay`, in place of the commands that it stands for. `backend/plan/life.py`
captures and replays it. Here it says which commands those are:

    split    h s a a s g g g g . a r S R       the launches of each split
                       `plan -'
    step     h s a a . g g g g . a r S R       copies, launches, copies of results: all that one
                 `------ plan -----'           device is asked between two calls of the host

What a plan needs from outside is waited for in front of it. What others need of it is recorded
behind it. So Waits for others' events move in front, and Records for others move behind, both on
the stream that the plan is launched on. A Wait behind the last work stays on its stream, and so
does a Record behind it. With `step` on several devices that costs overlap: before a
plan begins, the next device has to be done with what the plan's last copy overwrites. Several
buffers (n_copies=4) give the overlap back.

Parts on another stream lose its order with what it does outside; where it does anything, it is
joined with the plan's stream in front and behind. All of that only adds order.
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
    """A plan, and what stands in front of it and behind it."""

    front: list[c.Command]
    replay: c.Replay
    behind: list[c.Command]


def with_plans(program: c.Program, scope: str) -> c.Program:
    """The program with plans in place of what they stand for. Its order is at least as strong, for
    programs that record and wait for the same events alike."""
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
    around = [x for p in made if isinstance(p, _Planned) for x in (*p.front, *p.behind)]
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
    """The same for neighbours that one plan can have; None for what no plan has."""
    if command.by_host or not isinstance(command, _IN[scope]):
        return None
    assert command.stream is not None
    if command.split == c.RESULT and command.stream.id == c.COPY_STREAM:
        return None  # the copy of results behind a step, which the next one does not wait for
    return command.stream.backend, command.split if scope == PlanScope.SPLIT else 0


def _planned(
    run: Sequence[c.Command], stream: c.Stream, outside: Collection[str | None]
) -> _Planned:
    """The plan of a run. outside: events that are waited for outside of it."""
    last = max(i for i, x in enumerate(run) if isinstance(x, _WORK))
    record_of = _records(run[:last])
    needed, outside = {*record_of.values()}, {*outside, *_events(run[last:], c.Wait)}
    front: list[c.Command] = []
    parts: list[c.Command] = []
    behind: list[c.Command] = []
    waits: list[c.Wait] = []  # of those behind
    for i, x in enumerate(run):
        if isinstance(x, _WORK) or i in record_of:
            parts.append(x)
        elif isinstance(x, c.Wait):
            if i > last:
                waits.append(x)
                behind.append(x)
            else:
                front += [x] if x.stream == stream else [x, c.Wait(x.event, stream, x.split)]
        elif isinstance(x, c.Record):
            if any(w.event == x.event or w.stream == x.stream for w in waits):
                behind.append(x)  # of what the stream waits for there, or by the same name
            elif any(part.stream == x.stream for part in parts):
                if i in needed:
                    parts.append(x)
                if i not in needed or x.event in outside:
                    behind.append(replace(x, stream=stream))
            else:  # of what the stream did before
                front.append(x)
                if x.event in _events(behind, c.Record):  # and the event's latest
                    behind.append(x)
    split = next(x.split for x in run if isinstance(x, c.Launch))
    return _Planned(front, c.Replay(tuple(parts), stream, split), behind)


def _records(run: Sequence[c.Command]) -> dict[int, int]:
    """Of each Wait for work of the run, the Record: their numbers. What such a Wait is in front of
    is behind that work, too."""
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
    """What stands for a plan in a program. apart: streams with work outside of plans."""
    front, replay, behind = planned
    here, split = replay.stream, replay.split
    streams = dict.fromkeys(x.stream for x in replay.parts)
    others = [s for s in streams if s in apart and s is not None and s != here]
    if not others:
        return *front, replay, *behind
    for other in others:
        reached = events.in_front(other.describe(backends))
        front += [c.Record(reached, other, split), c.Wait(reached, here, split)]
    over = events.replayed(here.describe(backends))
    joins = [c.Wait(over, other, split) for other in others]
    return *front, replay, c.Record(over, here, split), *joins, *behind
