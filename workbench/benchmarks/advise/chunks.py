"""Which readings are measured together: as arms of one comparison, on one background."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from workbench.benchmarks.advise.candidates import Candidate, Reading
from workbench.benchmarks.compare.arms import Arm, ComparisonSpec, answer_between
from workbench.benchmarks.workload import Workload
from workbench.config import EXACT, Toggles, differing

MOST_ARMS = 7  # engines of a comparison, its first arm and its A/A control included
ALONE, THE_REST, TOGETHER = "alone", "the rest", "together"
Asked = tuple[Candidate | None, str]  # a candidate, and ALONE or THE_REST; None: TOGETHER


class Chunk(NamedTuple):
    """Readings that are measured in one comparison.

    base: its first arm.
    readings: between which arms what was asked is read.
    """

    base: Toggles
    readings: dict[Asked, Reading]

    @property
    def toggles(self) -> list[Toggles]:
        """The toggles of its arms, without the A/A control; the base first."""
        sides = (side for one in self.readings.values() for side in (one.before, one.after))
        return list(dict.fromkeys([self.base, *sides]))

    def spec(self, workload: Workload) -> ComparisonSpec:
        """Its comparison. An arm is named by what it has that the base has not."""
        arms = [Arm(self.name_of(made), made, False, answer_between(self.base, made))
                for made in self.toggles]  # fmt: skip
        control = Arm(f"{arms[0].name} (A/A)", self.base, True, EXACT)
        name = " | ".join(arm.name for arm in arms)
        return ComparisonSpec(name, "", [*arms, control], [workload])

    def name_of(self, toggles: Toggles) -> str:
        return "base" if toggles == self.base else differing(self.base, toggles)[1]


def chunked(
    readings: Mapping[Asked, Reading], base_of: Mapping[str, Toggles], most: int = MOST_ARMS
) -> list[Chunk]:
    """The chunks of all readings, in their order. base_of: the first arm, by ALONE or THE_REST."""
    made, filling = list[Chunk](), dict[str, Chunk]()
    for asked, reading in readings.items():
        kind = asked[1]
        chunk = filling.get(kind)
        grown = Chunk(base_of[kind], {**(chunk.readings if chunk else {}), asked: reading})
        if chunk is None or len(grown.toggles) + 1 > most:
            chunk = filling[kind] = Chunk(base_of[kind], {})
            made.append(chunk)
        chunk.readings[asked] = reading
    return made


def kinds_in_turn(asked: Iterable[Candidate]) -> list[Asked]:
    """Each candidate with the rest, then each alone."""
    every = list(asked)
    return [(one, kind) for kind in (THE_REST, ALONE) for one in every]
