"""The table of a server's first requests (`first_requests.py` records the runs)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.measure.recorded import Recorded, model_of
from data.measure.tables import Line, Part, Table, caption
from workbench.bench import results

FOLDER = "first-requests"


class Start(NamedTuple):
    """One start of a server. begin_s: from the command to a healthy server. first_ms, next_ms: the
    slowest request of the first and of the next, from when it was due to its end."""

    begin_s: float
    first_ms: float
    next_ms: float

    @property
    def ratio(self) -> float:
        return self.first_ms / self.next_ms


class FirstRun(NamedTuple):
    """A run folder."""

    found: results.Run

    @property
    def run(self) -> dict[str, Any]:
        return self.found.run

    @property
    def starts(self) -> list[Start]:
        return [Start(**one) for one in self.run["result"]["starts"]]

    @property
    def ratio(self) -> float:
        """The median over the starts."""
        return float(np.median([start.ratio for start in self.starts]))

    def lines(self) -> Iterator[Line]:
        for number, start in enumerate(self.starts, 1):
            values = start._asdict() | {"start": number, "ratio": start.ratio}
            yield Line(values | {"model": model_of(self.run)}, [self])


def recorded_first(recorded: Recorded) -> Iterator[FirstRun]:
    """The complete runs, by folder."""
    for path in sorted((recorded.folder / FOLDER).glob(f"*/{results.RUN_JSON}")):
        found = results.load_run(Path(path).parent)
        if found.run["status"] == results.COMPLETE:
            yield FirstRun(found)


def every(recorded: Recorded) -> Iterator[Line]:
    for found in recorded_first(recorded):
        yield from found.lines()


def where(recorded: Recorded) -> str:
    """A caption for each run, with the median of its ratios."""
    said = []
    for found in recorded_first(recorded):
        result, test = found.run["result"], found.run["tests"][0]
        about = (
            f"{test.partition('@')[0]} a request, {result['in_flight']} in flight; "
            f"{len(found.starts)} starts, kernels kept; median ratio {found.ratio:.2f}"
        )  # fmt: skip
        said.append(caption([found], about))
    return " ".join(said)


CELLS = {
    "Model": "{model}", "start": "{start}", "healthy after s": "{begin_s:.1f}",
    "slowest of the first 64, ms": "{first_ms:.0f}", "of the next 64, ms": "{next_ms:.0f}",
    "ratio": "{ratio:.2f}",
}  # fmt: skip

BLOCKS: dict[str, list[Part]] = {
    "first-requests": [Table("First requests of a server", every, CELLS, said=where)],
}
