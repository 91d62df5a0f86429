"""The hazard checker: which commands race, and which waits a run could do without.

A run is a list of programs that one host issues one after the other. Two accesses of the same bytes
race where one of them writes and nothing makes one happen before the other, whatever the timing:
the proof needs no run and no device. `clocks.py` has the order, `intervals.py` the bytes.

    races         every pair of commands, once, however many steps it recurs in
    superfluous   the waits that are removable alone: without it (in every step) nothing races that
                  did not before
    sufficient    waits that together keep what all of them keep, none of which can go: found by
                  removing one after the other in program order. Removing a wait only ever removes
                  order, so what could not go early cannot go later, and one pass is enough.

What follows from a *cycle* of programs, repeated: whether a command of one lap happens before one
of a later lap depends on what lies between them alone, and if it does not happen before that of the
second next lap, then neither before that of the next. So a race shows within two laps or never;
three are checked, for a first, a steady and a last one.

Copies read late. A Sync is a wait of the host, a Wait one of a stream; only these are removed. A
Launch on the host's stream, a Write and a Read happen at their place. Where `one_order` is false
nothing orders a Copy but a Sync on its stream, behind which the host goes on when the stream's
copies are over too.

Programmatic launches (`Launch.programmatic`): a kernel that declares `griddepcontrol.wait` before
its first dependent read and before every write keeps stream order for all but weights, which it may
read as soon as the launch in front of it has begun (and so on, through programmatic launches
without a gap). Nothing may write those then. One whose kernel does not declare it may do all of its
work then, and is *refused*, race or not, for even its end says nothing about the launches in front
of it, so that what is behind it is not proved either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from workbench.errors import UsageError
from workbench.graph import ops
from workbench.program.as_json import command_as_json
from workbench.program.check.acts import Accessor, Declared, Run, Spot
from workbench.program.check.wording import unordered
from workbench.program.commands import (
    Buffer,
    Command,
    CommandAt,
    Launch,
    Program,
    Range,
    Sync,
    Wait,
)


class Race(NamedTuple):
    """Two commands that touch bytes offset..offset+nbytes-1 of a buffer in no order.

    first and second are in host order, and so is kind, `write-read`, `read-write` or `write-write`.
    may: one of them declares more bytes than it touches, and might not touch these. missing: one
    line, what would order them.
    """

    first: CommandAt
    second: CommandAt
    buffer: Buffer
    offset: int
    nbytes: int
    kind: str
    may: bool
    missing: str


class Findings(NamedTuple):
    """What `check` found. waits are all of the steady lap, of which superfluous and sufficient are
    parts; refused are programmatic launches of kernels that do not declare their wait."""

    races: list[Race]
    superfluous: list[CommandAt]
    sufficient: list[CommandAt]
    waits: list[CommandAt]
    refused: list[CommandAt]
    steps: list[Program]

    @property
    def safe(self) -> bool:
        return not (self.races or self.refused)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the programs, as JSON-able values."""
        return {
            "safe": self.safe,
            "races": [
                {
                    "kind": race.kind,
                    "first": self._entry(race.first),
                    "second": self._entry(race.second),
                    "buffer": race.buffer.name,
                    "offset": race.offset,
                    "bytes": race.nbytes,
                    "may": race.may,
                    "missing": race.missing,
                }
                for race in self.races
            ],
            **{
                name: [self._entry(one) for one in getattr(self, name)]
                for name in ("superfluous", "sufficient", "waits", "refused")
            },
        }

    def _entry(self, at: CommandAt) -> dict[str, Any]:
        command, backends = at.command, self.steps[at.step].backends
        return {
            "step": at.step,
            "index": at.index,
            "words": command.words(backends),
            **command_as_json(command, backends),
        }


def races(
    steps: Sequence[Program], *, one_order: bool = True, declared: Declared | None = None
) -> list[Race]:
    """Every race of a run, in host order of the second command, then of the first.

    one_order: as `Capabilities` has it of the backends. declared: whether the kernels of a node
    declare `griddepcontrol.wait`; without it all that are launched programmatically do. Two
    commands are one race for every stretch of bytes that they dispute, however many steps it recurs
    in; the steps given are the first. Takes time proportional to the commands, times the pieces
    that their ranges are cut into.
    """
    return _races(Run(steps, one_order, declared))


def superfluous(
    steps: Sequence[Program],
    steady: range | None = None,
    *,
    one_order: bool = True,
    declared: Declared | None = None,
) -> list[CommandAt]:
    """Every Sync and Wait of the steps `steady` (all, if not given) that is removable alone.

    A wait is removed in every step that its program is issued in, and is named once, in the first
    of the steady ones. What races with all waits in place may race without it too.
    """
    run = Run(steps, one_order, declared)
    return _superfluous(run, _waits(run, steady))


def sufficient(
    steps: Sequence[Program],
    steady: range | None = None,
    *,
    one_order: bool = True,
    declared: Declared | None = None,
) -> list[CommandAt]:
    """An inclusion-minimal set of the Syncs and Waits of `steady`, as `superfluous` has them, with
    which nothing races that does not with all: greedy removal in program order."""
    run = Run(steps, one_order, declared)
    return _sufficient(run, _waits(run, steady))


def refused(steps: Sequence[Program], declared: Declared) -> list[CommandAt]:
    """Programmatic launches of kernels that do not declare their wait, each named once."""
    return [
        CommandAt(step, i, command)
        for step in _first_steps(steps)
        for i, command in enumerate(steps[step].commands)
        if isinstance(command, Launch) and command.programmatic and not declared(command.node)
    ]


def check(
    cycle: Sequence[Program],
    *,
    laps: int = 3,
    one_order: bool = True,
    declared: Declared | None = None,
) -> Findings:
    """All of it, on the programs of one cycle, issued `laps` times: first, steady, last.

    A decode is a cycle of one program, a ring of k slots one of k, a prompt of several ubatches one
    of each ubatch's. Raises UsageError for an empty cycle, or fewer than two laps.
    """
    if not cycle or laps < 2:
        raise UsageError(
            f"{len(cycle)} programs in {laps} laps are no loop; give at least one program and 2 "
            "laps, for a race with the next step shows in no less"
        )
    steps = list(cycle) * laps
    run = Run(steps, one_order, declared)
    begin = laps // 2 * len(cycle)
    waits = _waits(run, range(begin, begin + len(cycle)))
    return Findings(
        _races(run),
        _superfluous(run, waits),
        _sufficient(run, waits),
        waits,
        refused(cycle, declared) if declared else [],
        steps,
    )


# the waits ----------------------------------------------------------------------------------------


def _first_steps(steps: Sequence[Program], among: Iterable[int] | None = None) -> list[int]:
    """Of each program, the first step (of these) that issues it."""
    first: dict[int, int] = {}
    for step in range(len(steps)) if among is None else among:
        first.setdefault(id(steps[step]), step)
    return list(first.values())


def _waits(run: Run, steady: range | None) -> list[CommandAt]:
    return [
        CommandAt(step, i, command)
        for step in _first_steps(run.steps, steady)
        for i, command in enumerate(run.steps[step].commands)
        if isinstance(command, (Sync, Wait))
    ]


def _superfluous(run: Run, waits: Sequence[CommandAt]) -> list[CommandAt]:
    n = len(run.walk())
    return [w for w in waits if len(run.walk({_spot(run, w)}, n)) == n]


def _sufficient(run: Run, waits: Sequence[CommandAt]) -> list[CommandAt]:
    n = len(run.walk())
    gone: set[Spot] = set()
    kept = []
    for wait in waits:
        tried = gone | {_spot(run, wait)}
        if len(run.walk(tried, n)) == n:  # with less order no race goes away: they are the same
            gone = tried
        else:
            kept.append(wait)
    return kept


def _spot(run: Run, at: CommandAt) -> Spot:
    return Spot(run.order[at.step], at.index)


# the races ----------------------------------------------------------------------------------------


def _races(run: Run) -> list[Race]:
    made = []
    for pair, steps in run.walk().items():
        a, b = (run.accessors[number] for number in pair)
        first, second = (
            CommandAt(step, x.command, run.steps[step].commands[x.command])
            for x, step in zip((a, b), steps, strict=True)
        )
        line = unordered(
            first.command,
            second.command,
            second.step - first.step,
            {a.missing, b.missing},
            run.steps[first.step].backends,
        )
        for stretch, (kind, may) in _disputed(a, first.command, b, second.command).items():
            made.append(Race(first, second, *stretch, kind, may, line))
    return sorted(made, key=lambda r: (r.second[:2], r.first[:2], r.buffer.name, r.offset))


_Stretch = tuple[Buffer, int, int]  # offset, bytes


def _disputed(
    a: Accessor, first: Command, b: Accessor, second: Command
) -> dict[_Stretch, tuple[str, bool]]:
    """The bytes that two accessors, in host order, dispute: kind and may of each stretch. Where
    both write is told before where one reads, what is sure before what may be."""
    vague_first, vague_second = _vague(first), _vague(second)
    found: dict[_Stretch, tuple[str, bool]] = {}
    for kind, ours, theirs in (
        ("write-write", a.writes, b.writes),
        ("write-read", a.writes, b.reads),
        ("read-write", a.reads, b.writes),
    ):
        one, other = kind.split("-")
        for r, s in product(ours, theirs):
            begin = max(r.offset, s.offset)
            nbytes = min(r.offset + r.nbytes, s.offset + s.nbytes) - begin
            if r.buffer is not s.buffer or nbytes <= 0:
                continue
            may = (one, r) in vague_first or (other, s) in vague_second
            known = found.get((r.buffer, begin, nbytes))
            if known is None or (known[1] and not may):
                found[r.buffer, begin, nbytes] = kind, may
    return found


def _vague(command: Command) -> set[tuple[str, Range]]:
    """The ranges of which a command may touch a part only, and how: a Launch's ranges are those of
    `ops.reads` and `ops.writes` of its node, in that order, then its scratch."""
    found: set[tuple[str, Range]] = set()
    if not isinstance(command, Launch):
        return found
    node = command.node
    vague = ops.vague(node)
    for how, unsure, accesses, ranges in (
        ("read", vague[0], ops.reads, command.reads),
        ("write", vague[1], ops.writes, command.writes),
    ):
        if unsure:
            for access, r in zip(accesses(node), ranges, strict=False):
                if access in unsure:
                    found.add((how, r))
    return found
