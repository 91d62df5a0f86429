"""How long the missing groups of a sweep will take, and from what that is known."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from workbench.benchmarks.sweep.cells import Cell, CellGroup
from workbench.benchmarks.sweep.measured import OneEngine, seconds_of
from workbench.benchmarks.sweep.store import FoundGroup
from workbench.benchmarks.workload import WARM_MIN
from workbench.common.errors import WorkbenchError
from workbench.common.progress import duration
from workbench.common.sizes import counted

EARLIER, CALIBRATED = "by finished cells of this sweep", "by one repetition of each test"
Alike = tuple[str, str]  # a cell's model and test: the name of the file, and the test's
Seconds = Mapping[Alike, float]  # of one repetition


def alike(cell: Cell) -> Alike:
    return cell.path.stem, cell.workload.name


class Expected(NamedTuple):
    """What is left of a sweep.

    cells: how many are not measured yet.
    repetitions: of all of them, A/A controls and baselines that are measured again included.
    seconds: of measuring, for the groups whose time is known.
    unknown: how many cells have no known time.
    by: how the time is known; empty where it is not.
    """

    cells: int
    repetitions: int
    seconds: float
    unknown: int
    by: str

    def __str__(self) -> str:
        if not self.cells:
            return "every cell is measured"
        said = (
            f"{counted(self.cells, 'cell')} to measure, in "
            f"{counted(self.repetitions, 'repetition')}"
        )
        if self.unknown == self.cells:
            return (
                f"{said}; how long that takes is unknown, since no cell like them was measured: "
                "--calibrate (in Python calibrate=True) times one of each test, and says how long"
            )
        known = f"about {duration(self.seconds)} {self.by}, loading not included"
        have = "has" if self.unknown == 1 else "have"
        rest = f"; {counted(self.unknown, 'cell')} {have} no known time" if self.unknown else ""
        return f"{said}; {known}{rest}"


def from_earlier(found: Sequence[FoundGroup]) -> dict[Alike, float]:
    """The median seconds of a repetition in finished groups, by model and test. Their warm-ups are
    a part of it."""
    known: dict[Alike, list[float]] = {}
    for group in found:
        if group.complete:
            run = group.run.run
            own = Path(run["model"]["file"]).stem, run["tests"][0]
            known.setdefault(own, []).append(group.seconds)
    return {key: statistics.median(seconds) for key, seconds in known.items()}


def calibrated(
    groups: Sequence[CellGroup], known: Seconds, repetitions: int, seed: int
) -> dict[Alike, float]:
    """Seconds of a repetition by model and test, for those that are not `known`: one repetition of
    the first cell. The warm-up's least rounds are added. A cell that fails stays unknown."""
    found: dict[Alike, float] = {}
    engines = OneEngine()
    try:
        for group in groups:
            key = alike(group.cells[0])
            if key in known or key in found:
                continue
            try:
                one = seconds_of(engines.of(group.cells[0]), group.cells[0], seed)
            except WorkbenchError:  # the sweep itself will say why
                continue
            found[key] = one * (1 + WARM_MIN / repetitions)
    finally:
        engines.close()
    return found


def expected(
    groups: Sequence[CellGroup], n_missing: int, known: Seconds, repetitions: int, by: str
) -> Expected:
    """What `groups` will take. n_missing: how many cells are not measured yet."""
    seconds, unknown = 0.0, 0
    for group in groups:
        one = known.get(alike(group.cells[0]))
        if one is None:
            unknown += len(group.cells)
        else:
            seconds += one * group.n_arms * repetitions
    total = sum(group.n_arms for group in groups) * repetitions
    return Expected(n_missing, total, seconds, min(unknown, n_missing), by if seconds else "")
