"""Findings for people to read: races in words, and waits.

Accessors race (`touched.py`); findings name commands, and every stretch of bytes that two commands
dispute. A program that races everywhere has a race for every pair of its steps. So races of
commands that have the same words and lack the same order are one group, which is told as its first
race and its number of races.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from itertools import count, product
from typing import Any, NamedTuple

from workbench.graph import ops
from workbench.program.as_json import command_as_json
from workbench.program.check.acts import Accessor, StepActs
from workbench.program.check.touched import RacingPairs
from workbench.program.check.wording import unordered
from workbench.program.commands import Buffer, Command, CommandAt, Launch, Program, Range

MOST_RACES = 1000  # groups that findings hold


class Race(NamedTuple):
    """Two commands that touch bytes offset..offset+nbytes-1 of a buffer in no order.

    first, second: in host order.
    kind: what the two do, in the same order: `write-read`, `read-write` or `write-write`.
    may: one of them declares more bytes than it touches, and might not touch these.
    missing: one line that says what would order them.
    count: how many races there are in the group that this race is the first of.
    """

    first: CommandAt
    second: CommandAt
    buffer: Buffer
    offset: int
    nbytes: int
    kind: str
    may: bool
    missing: str
    count: int = 1  # type: ignore[assignment]  # a number, and no method of a tuple


class Findings(NamedTuple):
    """What `check` found.

    races: the first of each group, MOST_RACES groups at most, in host order.
    waits: all waits of the steady lap.
    superfluous, sufficient: some of these waits, as `hazards.py` defines them.
    refused: programmatic launches of kernels that do not declare their wait.
    n_races: the races of all groups together.
    """

    races: list[Race]
    superfluous: list[CommandAt]
    sufficient: list[CommandAt]
    waits: list[CommandAt]
    refused: list[CommandAt]
    steps: list[Program]
    n_races: int

    @property
    def safe(self) -> bool:
        return not (self.races or self.refused)

    @property
    def more(self) -> int:
        """How many races are in groups that `races` does not hold."""
        return self.n_races - sum(race.count for race in self.races)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the programs, as JSON-able values."""
        return {
            "safe": self.safe,
            "n_races": self.n_races,
            "more": self.more,
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
                    "count": race.count,
                }
                for race in self.races
            ],
            **{
                name: [self._entry(one) for one in getattr(self, name)]
                for name in ("superfluous", "sufficient", "waits", "refused")
            },
        }

    def _entry(self, at: CommandAt) -> dict[str, Any]:
        backends = self.steps[at.step].backends
        part = {} if at.part is None else {"part": at.part}
        return {
            "step": at.step,
            "index": at.index,
            **part,
            "words": at.describe(backends),
            **command_as_json(at.command, backends),
        }


# races --------------------------------------------------------------------------------------------


class _Racing(NamedTuple):
    """Two commands that race, by number, so that sorting gives host order of the second command,
    then of the first.

    accessors: the pairs that race. A programmatic launch may have two accessors: one for what it
        reads early, one for the rest.
    """

    second_step: int
    second: int
    first_step: int
    first: int
    accessors: tuple[tuple[int, int], ...]


def every_race(acts: StepActs, found: RacingPairs) -> list[Race]:
    """Every race, in host order of the second command, then of the first."""
    made = [race for racing in _by_commands(acts, found) for race in _told(acts, racing)]
    return sorted(made, key=lambda r: (r.second.key, r.first.key, r.buffer.name, r.offset))


def grouped(acts: StepActs, found: RacingPairs) -> tuple[list[Race], int]:
    """The first race of each group, MOST_RACES at most, in host order; and the number of all races
    of all groups."""

    def phrase(a: Accessor) -> Hashable:
        backends = acts.programs[a.program].backends
        return acts.singly[a.program].at(0, a.command).describe(backends), a.missing

    label, ranges = _numbered(acts, phrase), _numbered(acts, lambda a: (a.reads, a.writes))
    stretches: dict[tuple[tuple[int, int], ...], int] = {}  # by the ranges that are disputed
    groups: dict[tuple[int, ...], tuple[int, _Racing]] = {}
    total = 0
    for racing in _by_commands(acts, found):
        same = tuple([(ranges(a), ranges(b)) for a, b in racing.accessors])
        n = stretches.get(same)
        if n is None:
            n = stretches[same] = len(_disputed(acts, racing))
        total += n
        key = tuple([label(accessor) for accessor in racing.accessors[-1]])
        n_before, first = groups.get(key, (0, racing))
        groups[key] = n_before + n, min(first, racing)
    races = []
    for n, racing in sorted(groups.values(), key=lambda group: group[1])[:MOST_RACES]:
        told = min(_told(acts, racing), key=lambda r: (r.buffer.name, r.offset))
        races.append(told._replace(count=n))
    return races, total


def _by_commands(acts: StepActs, found: RacingPairs) -> Iterator[_Racing]:
    """Every pair of commands that race, once."""
    accessors = acts.accessors
    parted: dict[tuple[int, int, int, int], _Racing] = {}
    for first, second, first_step, second_step in found:
        a, b = accessors[first], accessors[second]
        pair = ((first, second),)
        racing = _Racing(second_step, b.command, first_step, a.command, pair)
        if not (_in_two(acts, first) or _in_two(acts, second)):
            yield racing
            continue
        of = a.program, a.command, b.program, b.command
        known = parted.get(of)
        if known is None:
            parted[of] = racing
        else:
            parted[of] = min(known, racing)._replace(
                accessors=tuple(sorted([*known.accessors, *pair]))
            )
    yield from parted.values()


def _in_two(acts: StepActs, accessor: int) -> bool:
    """Whether another accessor belongs to the same command."""
    near = acts.accessors[max(0, accessor - 1) : accessor + 2]
    return [a[:2] for a in near].count(acts.accessors[accessor][:2]) > 1


def _numbered(acts: StepActs, told: Callable[[Accessor], Hashable]) -> Callable[[int], int]:
    """Numbers for accessors, equal where `told` says the same of them. `told` is asked once of
    each."""
    numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)
    return cache(lambda accessor: numbers[told(acts.accessors[accessor])])


def _told(acts: StepActs, racing: _Racing) -> Iterator[Race]:
    """A race for every stretch of bytes that two commands dispute."""
    first = acts.at(racing.first_step, racing.first)
    second = acts.at(racing.second_step, racing.second)
    a, b = (acts.accessors[accessor] for accessor in racing.accessors[-1])
    line = unordered(first, second, (a.missing, b.missing), acts.steps)
    for stretch, (kind, may) in _disputed(acts, racing).items():
        yield Race(first, second, *stretch, kind, may, line)


_Stretch = tuple[Buffer, int, int]  # offset, bytes


def _disputed(acts: StepActs, racing: _Racing) -> dict[_Stretch, tuple[str, bool]]:
    """The stretches of bytes that two commands, in host order, dispute, each with kind and may.
    Of several kinds for one stretch, two writes are preferred to a write and a read, and a certain
    race to a possible one."""
    first = acts.at(racing.first_step, racing.first).command
    second = acts.at(racing.second_step, racing.second).command
    vague_first, vague_second = _vague(first), _vague(second)
    both = [(acts.accessors[a], acts.accessors[b]) for a, b in racing.accessors]
    sides: list[tuple[str, list[tuple[Range, Range]]]] = [
        ("write-write", [pair for a, b in both for pair in product(a.writes, b.writes)]),
        ("write-read", [pair for a, b in both for pair in product(a.writes, b.reads)]),
        ("read-write", [pair for a, b in both for pair in product(a.reads, b.writes)]),
    ]
    found: dict[_Stretch, tuple[str, bool]] = {}
    for kind, pairs in sides:
        one, other = kind.split("-")
        for r, s in pairs:
            begin = max(r.offset, s.offset)
            nbytes = min(r.offset + r.nbytes, s.offset + s.nbytes) - begin
            if r.buffer is not s.buffer or nbytes <= 0:
                continue
            may = _may(first, one, r, vague_first) or _may(second, other, s, vague_second)
            known = found.get((r.buffer, begin, nbytes))
            if known is None or (known[1] and not may):
                found[r.buffer, begin, nbytes] = kind, may
    return found


def _may(command: Command, how: str, r: Range, vague: set[tuple[str, Range]]) -> bool:
    """Whether a command might leave bytes of r untouched. r: a range that the command declares, or
    a part of such a range."""
    declared = command.reads if how == "read" else command.writes
    if not vague or r in declared:
        return (how, r) in vague
    begin, end = r.offset, r.offset + r.nbytes
    inside = [d for d in declared if d.buffer is r.buffer and d.offset <= begin]
    return all((how, d) in vague for d in inside if end <= d.offset + d.nbytes)


def _vague(command: Command) -> set[tuple[str, Range]]:
    """The ranges that a command may touch only in part, each with `read` or `write`. The ranges of
    a Launch are `ops.reads` and `ops.writes` of its node, in that order, then its scratch."""
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
