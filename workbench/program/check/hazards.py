"""The hazard checker: which commands race, and which waits the steps could do without.

One host issues the programs of some steps, one after the other. Two accesses of the same bytes race
where one of them writes and nothing makes one happen before the other, whatever the timing. The
proof needs no device and issues nothing. `clocks.py` has the order, `intervals.py` the bytes.
`touched.py` finds the races, `waits.py` tries steps without waits, `findings.py` puts both into
words.

    races         every pair of racing commands, once, however many steps the pair recurs in
    superfluous   each wait that can be removed alone: without it, in every step, nothing races that
                  did not race before
    sufficient    waits that exclude every race which all waits exclude, and of which none can be
                  removed. Found by removing waits one at a time, in program order, and keeping
                  each that a race needs. Removing a wait never adds order. So a wait that was
                  needed stays needed when more are removed, and one pass is enough.

A *cycle* of programs is repeated. Whether a command of one lap happens before a command of a later
lap depends only on what lies between the two. If a command does not happen before another two laps
later, it does not happen before the same one a single lap later either. So a race shows within two
laps or never. Three laps are checked: a first, a steady and a last one.

Copies read late. A Sync is a wait of the host, a Wait is a wait of a stream; only these are
removed. The host does a Launch on its own stream, a Write and a Read before it goes on. Where
`one_order` is false, only a Sync on its stream orders a Copy: the host then goes on when the
stream's copies are over too.

Programmatic launches (`Launch.programmatic`). A kernel that declares `griddepcontrol.wait` before
its first dependent read and before every write keeps stream order for everything but weights. It
may read weights as soon as the launch before it has begun (and so on, through programmatic
launches), and nothing may write weights then. CUDA overlaps a launch only with the kernel right
before it. A launch begins after a copy before it, and after the past of every event that its stream
has waited for. A Wait says nothing of the work queued before the Wait (`CUlaunchAttributeID` in
cuda.h: "overlap with the previous kernel in the stream"; `cudaGraphEdgeData`: "only kernel nodes
define non-zero ports"). A kernel that does not declare its wait may do all of its work early. It is
*refused*, race or not: even its end says nothing about the launches before it, so nothing is proved
of the work after it.

A plan is checked part by part: accesses, waits and refusals name its parts (`acts.py`).
"""

import copy
from collections.abc import Iterable, Sequence

from workbench.common.errors import UsageError
from workbench.program.check.acts import Act, Declared, StepActs
from workbench.program.check.findings import MOST_RACES, Findings, Race, every_race, grouped
from workbench.program.check.touched import RaceSearch, RacingPairs
from workbench.program.check.waits import Spot, WaitTrials
from workbench.program.commands import CommandAt, Launch, Program, Sync, Wait

__all__ = [
    "MOST_RACES", "Findings", "Race", "apart", "check_cycle", "races", "refused", "trials_of",
    "waits_of",
]  # fmt: skip


def races(
    steps: Iterable[Program], *, one_order: bool = True, declared: Declared | None = None
) -> list[Race]:
    """Every race of some steps, in host order of the second command, then of the first.

    one_order: as `Capabilities` has it of the backends.
    declared: whether the kernels of a node declare `griddepcontrol.wait`; without it, all kernels
        that are launched programmatically do.

    Two commands are one race for every stretch of bytes that they dispute, however many steps the
    race recurs in; its steps are the first two. The time is proportional to the commands, times the
    logarithm of the pieces that their ranges are cut into. Raises UsageError for a command on a
    backend that its program does not have.
    """
    acts = StepActs(list(steps), one_order, declared)
    return every_race(acts, _found(acts, acts.acts))


def refused(steps: Iterable[Program], declared: Declared) -> list[CommandAt]:
    """Programmatic launches of kernels that do not declare their wait, each named once."""
    steps = list(steps)
    return [
        at
        for step in _first_steps(steps)
        for at in steps[step].located(step)
        if isinstance(at.command, Launch)
        and at.command.programmatic
        and not declared(at.command.node)
    ]


def check_cycle(
    cycle: Iterable[Program],
    *,
    laps: int = 3,
    one_order: bool = True,
    declared: Declared | None = None,
) -> Findings:
    """Races and waits of the programs of one cycle, issued `laps` times: first, steady, last.

    The cycle of a decode is one program, of a ring of k entries k programs, of a prompt of several
    ubatches the program of each ubatch. Races of the same words that lack the same order are told
    once. Raises UsageError for an empty cycle, fewer than two laps, and as `races` does.
    """
    cycle = list(cycle)
    if not cycle or laps < 2:
        raise UsageError(
            f"{len(cycle)} programs in {laps} laps are no loop; give at least one program and 2 "
            "laps, for a race with the next step shows in no fewer"
        )
    steps = cycle * laps
    acts = StepActs(steps, one_order, declared)
    begin = laps // 2 * len(cycle)
    waits = waits_of(acts, range(begin, begin + len(cycle)))
    trials, found = trials_of(acts)
    first, n_races = grouped(acts, found)
    return Findings(
        first,
        [waits[spot] for spot in trials.alone(list(waits))],
        [waits[spot] for spot in trials.together(list(waits))],
        list(waits.values()),
        refused(cycle, declared) if declared else [],
        steps,
        n_races,
    )


def apart(steps: Iterable[Program]) -> list[Program]:
    """The same steps, each with a program of its own. A wait or a race then belongs to one step,
    and no longer to every step that issues its program."""
    return [copy.copy(program) for program in steps]


def trials_of(acts: StepActs) -> tuple[WaitTrials, RacingPairs]:
    """What tries steps without waits, and the accessors that race with all waits in place."""
    walked = acts.merged()
    found = _found(acts, walked)
    if found:  # then each command is wanted, which `merged` does not tell
        walked = acts.acts
        found = _found(acts, walked)
    return WaitTrials(acts, walked, found), found


def _found(acts: StepActs, walked: list[list[Act]]) -> RacingPairs:
    search = RaceSearch(acts.n_timelines, acts.n_logs)
    for search.step, program in enumerate(acts.order):
        for _, method, arguments in walked[program]:
            method(search, *arguments)
    return search.found


def _first_steps(steps: Sequence[Program], among: Iterable[int] | None = None) -> list[int]:
    """The first step that issues each program. among: the steps to look at; None: all."""
    first: dict[int, int] = {}
    for step in range(len(steps)) if among is None else among:
        first.setdefault(id(steps[step]), step)
    return list(first.values())


def waits_of(acts: StepActs, steady: range | None = None) -> dict[Spot, CommandAt]:
    """Every Sync and Wait of the steps `steady` (all steps, if not given). Each is named once, in
    the first of these steps that issues its program."""
    return {
        Spot(acts.order[step], number): acts.at(step, number)
        for step in _first_steps(acts.steps, steady)
        for number, command in enumerate(acts.singly[acts.order[step]].commands)
        if isinstance(command, (Sync, Wait))
    }
