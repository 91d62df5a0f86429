"""Every interleaving of a run, by brute force: what the hazard checker and the adversary are held
to. Small runs only, or large ones reduced to the commands that touch a few bytes.

It tries every order in which what touches memory can be done, one whole command at a time. It
remembers the states it has been in: what is done, and which command wrote each byte last. Whole
commands are enough. If nothing orders two commands, either can be first. What a reader may see amid
the pieces of the other, it may see after all of it too. The rest (Record, Wait, Sync) touches no
memory and only lets others go on, so it happens as soon as it can.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tests.oracles.reading import Cells, Key, Moment, Ranges
from workbench.program.commands import Buffer, Range

if TYPE_CHECKING:
    from workbench.program.check.hazards import Race

MOST_STATES = 50_000
BEFORE = -1  # version of what was there before the run


class TooManyStates(Exception):
    pass


class Wrong(NamedTuple):
    """A command (None: the end of the run) that can see another version than program order's."""

    reader: Key | None
    buffer: Buffer
    offset: int
    nbytes: int


class Interleavings:
    """wrong: everything that some interleaving makes wrong. n_states: how many it took; raises
    TooManyStates above MOST_STATES.

    moments: a run as `read` reads it. within: look at these bytes only. among: only these commands
    touch memory.
    """

    def __init__(
        self,
        moments: Sequence[Moment],
        within: Range | None = None,
        among: Collection[Key] | None = None,
    ):
        acting = []  # number, key, what is read and written
        for n, m in enumerate(moments):
            if among is not None and m.at.key not in among:
                continue
            both = _clipped(m.reads, within), _clipped(m.writes, within)
            if any(both):
                acting.append((n, m.at.key, *both))
        found = Cells(r for _, _, *both in acting for ranges in both for r in ranges)
        self._cells = found.cells
        self._keys = [key for _, key, *_ in acting]
        # of each: the bits of those that must be done before, the cells it reads and it writes
        self._before = [
            sum(1 << i for i, (n, *_) in enumerate(acting) if moments[m].before >> n & 1)
            for m, *_ in acting
        ]
        self._reads, self._writes = (
            [{cell for r in one[which] for cell in found.of(r)} for one in acting]
            for which in (2, 3)
        )
        versions = (BEFORE,) * len(self._cells)
        self._expected = []
        for n in range(len(acting)):
            self._expected.append(versions)
            versions = self._written(n, versions)
        self._final = versions
        self.wrong: set[Wrong] = set()
        self.n_states = self._explore()

    def _explore(self) -> int:
        start, every = (0, (BEFORE,) * len(self._cells)), (1 << len(self._keys)) - 1
        seen, to_visit = {start}, [start]
        while to_visit:
            done, versions = to_visit.pop()
            if done == every:
                self._look(None, versions, self._final, range(len(versions)))
            for n, key in enumerate(self._keys):
                if done >> n & 1 or self._before[n] & ~done:
                    continue
                self._look(key, versions, self._expected[n], self._reads[n])
                state = done | 1 << n, self._written(n, versions)
                if state not in seen:
                    seen.add(state)
                    to_visit.append(state)
            if len(seen) > MOST_STATES:
                raise TooManyStates(f"more than {MOST_STATES} states; reduce the run")
        return len(seen)

    def _look(
        self, reader: Key | None, versions: Sequence[int], expected: Sequence[int],
        cells: Collection[int],
    ) -> None:  # fmt: skip
        for cell in cells:
            if versions[cell] != expected[cell]:
                buffer, begin, end = self._cells[cell]
                self.wrong.add(Wrong(reader, buffer, begin, end - begin))

    def _written(self, n: int, versions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n if cell in self._writes[n] else v for cell, v in enumerate(versions))


def ends_wrong(moments: Sequence[Moment], race: Race) -> bool:
    """Whether some interleaving of the run reduced to a race's two commands, and to the bytes they
    dispute, is wrong."""
    disputed = Range(race.buffer, race.offset, race.nbytes)
    pair = {at.key for at in (race.first, race.second)}
    return bool(Interleavings(moments, disputed, pair).wrong)


def _clipped(ranges: Ranges, within: Range | None) -> list[Range]:
    if within is None:
        return [r for r in ranges if r.nbytes]
    found = []
    for r in ranges:
        a = max(r.offset, within.offset)
        b = min(r.offset + r.nbytes, within.offset + within.nbytes)
        if r.buffer is within.buffer and a < b:
            found.append(Range(r.buffer, a, b - a))
    return found
