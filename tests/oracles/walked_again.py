"""The hazard checker's first form: all steps are walked again for every wait that is tried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import product
from typing import NamedTuple

from tests.oracles.reading import Moment, conflict, read, touched
from workbench.graph.ir import Node
from workbench.program.commands import Buffer, Program, Sync, Wait

At = tuple[int, int, int | None]  # a command by its step, its number, and its part's in a plan
Spot = tuple[Program, int, int | None]  # the same, of a program
Access = tuple[Program, int, int | None, bool]  # and whether it comes early


class Found(NamedTuple):
    """A race: two commands, bytes offset..offset+nbytes-1 of a buffer, `write-read` and so on."""

    first: At
    second: At
    buffer: Buffer
    offset: int
    nbytes: int
    kind: str


class WalkedAgain:
    """`races`, `superfluous` and `sufficient` as `hazards` has them. What recurs in other steps is
    one command, of its program."""

    def __init__(
        self,
        steps: Sequence[Program],
        one_order: bool = True,
        declared: Callable[[Node], bool] | None = None,
    ):
        self._steps, self._how = steps, (one_order, declared)
        known = {self._access(m): m for m in self._read()}
        of = dict(zip(known, touched([*known.values()]), strict=True))
        acting = [access for access, some in of.items() if any(some)]
        self._rivals: defaultdict[Access, list[Access]] = defaultdict(list)
        for a, b in product(acting, acting):
            if conflict(of[a], of[b]):
                self._rivals[b].append(a)

    def _read(self, without: Collection[Spot] = ()) -> list[Moment]:
        return read(self._steps, *self._how, without)

    def _access(self, m: Moment) -> Access:
        return self._steps[m.at.step], m.at.index, m.at.part, m.early

    def races(self) -> set[Found]:
        """Every race, without `may` and what is missing."""
        told = set()
        for one, other in self._walk().values():
            by_bytes: dict[tuple[Buffer, int, int], str] = {}
            for kind, ours, theirs in (
                ("write-write", one.writes, other.writes),
                ("write-read", one.writes, other.reads),
                ("read-write", one.reads, other.writes),
            ):
                for r, s in product(ours, theirs):
                    begin = max(r.offset, s.offset)
                    nbytes = min(r.offset + r.nbytes, s.offset + s.nbytes) - begin
                    if r.buffer is s.buffer and nbytes > 0:
                        by_bytes.setdefault((r.buffer, begin, nbytes), kind)
            told |= {Found(one.at.key, other.at.key, *b, kind) for b, kind in by_bytes.items()}
        return told

    def superfluous(self, steady: range | None = None) -> list[At]:
        n = len(self._walk())
        return [at for at, spot in self._waits(steady) if len(self._walk({spot})) == n]

    def sufficient(self, steady: range | None = None) -> list[At]:
        n, gone, kept = len(self._walk()), set[Spot](), []
        for at, spot in self._waits(steady):
            if len(self._walk(gone | {spot})) == n:
                gone.add(spot)
            else:
                kept.append(at)
        return kept

    def _waits(self, steady: range | None) -> list[tuple[At, Spot]]:
        first: dict[Program, int] = {}
        for step in range(len(self._steps)) if steady is None else steady:
            first.setdefault(self._steps[step], step)
        return [
            ((step, i, part), (program, i, part))
            for program, step in first.items()
            for _, i, command, part in program.located(step)
            if isinstance(command, Sync | Wait)
        ]

    def _walk(self, without: Collection[Spot] = ()) -> dict[object, tuple[Moment, Moment]]:
        """The moments that race first, of each two accesses that do."""
        found: dict[object, tuple[Moment, Moment]] = {}
        latest: dict[Access, tuple[int, Moment]] = {}
        for n, moment in enumerate(self._read(without)):
            access = self._access(moment)
            for rival in self._rivals[access]:
                if rival in latest:
                    m, other = latest[rival]
                    if not moment.before >> m & 1:
                        found.setdefault((rival, access), (other, moment))
            latest[access] = n, moment
        return found
