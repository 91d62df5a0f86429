"""Which waits could be removed: a trial walks through the steps without a wait.

What each access needs is known before the trials: the latest work that must be over when the access
begins. The number of a command does not depend on waits. So a trial walks clocks alone, and a race
is a clock that holds less than an access needs.

The state of the clocks at the begin of a step is relative to the numbers reached there, and equal
states have one number. A step without certain waits always leads from one state to the same next
state, which is looked up when the state recurs. A trial begins at the first step that loses the
wait. The trial ends once its states equal the states with the wait, so a long decode costs little:

    step            0     1     2     3     4     5
    with the wait   a     b     b     b     b     b
    a trial               b     c ------ as from 1 on, b leads to c and c leads to b: looked up
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from workbench.program.check.acts import Act, StepActs
from workbench.program.check.clocks import EARLY_CLOCK, HOST_CLOCK, Clock, Clocks
from workbench.program.check.touched import RacingPairs

Need = tuple[tuple[int, int], ...]  # of timelines, the number of the latest work that must be over
_LOW = -(1 << 40)  # stands for every number that no later access needs
_RACES = -1  # in place of a state
_RECENT = 16  # steps: a state has numbers of work that is at most so old


class Spot(NamedTuple):
    """A command of a program, in whatever step. Both are numbers, as `StepActs` counts."""

    program: int
    command: int


class _NeedSearch(Clocks):
    """Walks through steps. `needs` fills with what each access needs, in the order of the acts.

    Left out is work that races with the access while all waits are in place. Left out is also what
    an earlier access at the same clock, or an earlier access of the host, has needed: clocks only
    grow.
    """

    def __init__(self, n: int, n_logs: int, racing: RacingPairs):
        super().__init__(n)
        self.needs: list[Need] = []
        self._racing = racing
        self._found: dict[int, Clock] = {}  # of timelines and the host: what their clocks hold
        # of a log, of a timeline: the latest access of each accessor, the latest one last
        self._logs: list[dict[int, dict[int, int]]] = [{} for _ in range(n_logs)]

    def _look(self, clock: Clock, own: int, accessor: int, looks: Sequence[int]) -> None:
        needs: dict[int, int] = {}
        racing = self._racing.with_second(accessor)
        for p in looks:
            for t, latest in self._logs[p].items():
                if t == own:
                    continue
                for other in reversed(latest):
                    if other not in racing:
                        needs[t] = max(needs.get(t, 0), latest[other])
                        break
        if not needs:
            self.needs.append(())
            return
        host = self._found.setdefault(HOST_CLOCK, [0] * self.n)
        held = self._found.setdefault(own, [0] * self.n)
        needed = [(t, x) for t, x in needs.items() if x > host[t] and x > held[t]]
        if own != EARLY_CLOCK:  # each timeline has its own
            for t, number in needed:
                held[t] = number
        self.needs.append(tuple(needed))

    def _enter(self, t: int, accessor: int, marks: Sequence[int]) -> None:
        self.streams[t][t] += 1
        for p in marks:
            latest = self._logs[p].setdefault(t, {})
            latest.pop(accessor, None)
            latest[accessor] = self.streams[t][t]


class _StepNeeds(NamedTuple):
    """A step as a trial sees it. Numbers are relative to those reached at the step's begin.

    floor: the lowest number of each timeline that is needed after the step's end, relative to the
        numbers reached there.
    """

    program: int
    needs: tuple[Need, ...]
    floor: tuple[int, ...]


class _Trial(Clocks):
    """The clocks of a walk through one step. `races` is set where an access lacks what it needs."""

    def __init__(self, n: int, needs: Sequence[Need]):
        super().__init__(n)
        self.races = False
        self._needs = iter(needs)

    def _look(self, clock: Clock, own: int, accessor: int, looks: Sequence[int]) -> None:
        for t, number in next(self._needs):
            if clock[t] < number:
                self.races = True


class _Numbered:
    """Numbers for values, equal where the values are. made: the value of each number."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, what: Hashable) -> int:
        found = self._numbers.setdefault(what, len(self.made))
        if found == len(self.made):
            self.made.append(what)
        return found


class WaitTrials:
    """Tries steps without some of their waits.

    walked: the acts of each program: `acts.acts`, or `acts.merged()` where nothing races.
    racing: the accessors that race with all waits in place.
    """

    def __init__(self, acts: StepActs, walked: list[list[Act]], racing: RacingPairs):
        self._acts, self._walked_acts = acts, walked
        self._described, self._told, self._left = _Numbered(), _Numbered(), _Numbered()
        self._left_acts: list[list[Act]] = []  # by number of `_left`: the acts that are left
        # by the numbers of a state, of a step and of what is left: the next state's
        self._known: dict[tuple[int, int, int], int] = {}
        first_floor = self._describe(racing)
        self._of_program: dict[int, list[int]] = {}
        for step, program in enumerate(acts.order):
            self._of_program.setdefault(program, []).append(step)
        self._states = [
            self._told.number(_canonical(Clocks(acts.n_timelines), first_floor, acts.early))
        ]
        # of each program, the number of what is left of it: all
        self._whole = [self._number_left((program,), whole) for program, whole in enumerate(walked)]
        for step, program in enumerate(acts.order):
            self._states.append(self._next(self._states[-1], step, self._whole[program]))

    def alone(self, waits: Sequence[Spot]) -> list[Spot]:
        """The waits that can be removed alone, with all other waits in place."""
        return [w for w in waits if self._changed(self._whole, w, self._states) is not None]

    def together(self, waits: Sequence[Spot]) -> list[Spot]:
        """Waits that exclude every race which all waits exclude, and of which none can be removed.
        Found by removing waits one at a time, and keeping each that such a race needs."""
        left, states, kept = self._whole.copy(), self._states.copy(), []
        for wait in waits:
            changed = self._changed(left, wait, states)
            if changed is None:
                kept.append(wait)
                continue
            left[wait.program] = self._less(left[wait.program], wait)
            for step, state in changed:
                states[step] = state
        return kept

    def _less(self, left: int, wait: Spot) -> int:
        """The number of what is left of a program once `wait` is removed as well."""
        program, *gone = self._left.made[left]
        return self._number_left(
            (program, *sorted([*gone, wait.command])),
            [act for act in self._left_acts[left] if act[0] != wait.command],
        )

    def _number_left(self, program_and_gone: tuple[int, ...], acts: list[Act]) -> int:
        number = self._left.number(program_and_gone)
        if number == len(self._left_acts):
            self._left_acts.append(acts)
        return number

    # one trial ------------------------------------------------------------------------------------

    def _changed(
        self, left: Sequence[int], wait: Spot, states: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """The states that change once `wait` is removed as well, each with its step. None where
        something races then.

        left: of each program, what earlier removals have left of it.
        states: the state before each step, with what is left.
        """
        order, steps = self._acts.order, self._of_program[wait.program]
        less = self._less(left[wait.program], wait)
        changed: list[tuple[int, int]] = []
        step, state = steps[0], states[steps[0]]
        while True:
            program = order[step]
            state = self._next(state, step, less if program == wait.program else left[program])
            if state == _RACES:
                return None
            step += 1
            if state == states[step]:  # as with the wait, up to the next step that loses it
                following = bisect_left(steps, step)
                if following == len(steps):
                    return changed
                step = steps[following]
                state = states[step]
                continue
            changed.append((step, state))
            if step == len(order):
                return changed

    def _next(self, state: int, step: int, left: int) -> int:
        """The state after a step, or _RACES."""
        key = state, self._steps[step], left
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._walked(
                self._told.made[state], self._described.made[key[1]], self._left_acts[left]
            )
        return found

    def _walked(self, state: Any, step: _StepNeeds, acts: list[Act]) -> int:
        trial = _Trial(self._acts.n_timelines, step.needs)
        host, streams, gates, events = state
        trial.host = list(host)
        trial.streams = [list(s) for s in streams]
        for t, gate in zip(self._acts.early, gates, strict=True):
            trial.gates[t] = list(gate)
        trial.events = {event: list(clock) for event, clock in events}
        for _, method, arguments in acts:
            method(trial, *arguments)
            if trial.races:
                return _RACES
        return self._told.number(_canonical(trial, step.floor, self._acts.early))

    # what is known beforehand ---------------------------------------------------------------------

    def _describe(self, racing: RacingPairs) -> tuple[int, ...]:
        """Numbers the steps as trials see them. Returns the floor of the first step."""
        acts, n = self._acts, self._acts.n_timelines
        search = _NeedSearch(n, acts.n_logs, racing)
        reached: list[list[int]] = []  # at the begin of each step, and at the end
        needs: list[list[Need]] = []
        for program in acts.order:
            reached.append([search.streams[t][t] for t in range(n)])
            search.needs = []
            for _, method, arguments in self._walked_acts[program]:
                method(search, *arguments)
            needs.append(search.needs)
        reached.append([search.streams[t][t] for t in range(n)])
        floor = [1 << 40] * n
        self._steps = [0] * len(needs)
        for step in reversed(range(len(needs))):
            there = reached[step]
            relative = tuple(
                [tuple([(t, number - there[t]) for t, number in need]) for need in needs[step]]
            )
            ends = _relative(floor, reached, step + 1)
            self._steps[step] = self._described.number(_StepNeeds(acts.order[step], relative, ends))
            for need in needs[step]:
                for t, number in need:
                    floor[t] = min(floor[t], number)
        return _relative(floor, reached, 0)


def _relative(floor: Sequence[int], reached: Sequence[Sequence[int]], step: int) -> tuple[int, ...]:
    """A floor, relative to the numbers at the begin of a step; _LOW where it lies far below."""
    there, recent = reached[step], reached[max(0, step - _RECENT)]
    return tuple(
        [
            _LOW if low < before else low - number
            for low, number, before in zip(floor, there, recent, strict=True)
        ]
    )


def _canonical(clocks: Clocks, floor: Sequence[int], early: Sequence[int]) -> Hashable:
    """The state of clocks, relative to the numbers they have reached.

    Clocks that lead to the same races from now on have the same state. All later work knows what
    the host knows, and no later access needs what lies below the floor.
    """
    n = range(clocks.n)
    reached = [clocks.streams[t][t] for t in n]
    known = clocks.host

    def told(clock: Clock) -> tuple[int, ...]:
        numbers = [(clock[t] if clock[t] > known[t] else known[t]) - reached[t] for t in n]
        return tuple([x if x >= low else _LOW for x, low in zip(numbers, floor, strict=True)])

    host = told(known)
    streams = []
    for t in n:
        stream = list(told(clocks.streams[t]))
        stream[t] = 0
        streams.append(tuple(stream))
    events = [(event, told(clock)) for event, clock in clocks.events.items()]
    return (
        host,
        tuple(streams),
        tuple([told(clocks.gates[t]) for t in early]),
        frozenset([(event, clock) for event, clock in events if clock != host]),
    )
