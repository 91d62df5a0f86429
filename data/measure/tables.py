"""One way to make every table of the pages: lines of values, a template for each cell, a caption.

A `Table` is data: `lines` are the recorded values, `cells` has a template for each column, and
`more` is the caption's text beside device, commits and date.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from data.measure.recorded import NOT_MEASURED, Recorded, commit_of, complete_runs
from data.measure.sources import mark
from workbench.benchmarks.runs import results
from workbench.report.tables import markdown


class Line(NamedTuple):
    """A line of a table: its values by name, and the runs that they come from, or what has one."""

    values: Mapping[str, Any]
    runs: Sequence[Any] = ()


class Table(NamedTuple):
    """A table of a page.

    title: named in the line that stands in place of a table without lines. A table without a title
        is left out then.
    cells: column to template; None where the values of a line are its cells.
    more: the caption's own words, a template of `facts`; None for no caption.
    said: makes a caption from something else than runs.
    by_device: a caption for each device.
    """

    title: str
    lines: Callable[[Recorded], Iterable[Line]]
    cells: Mapping[str, str] | None = None
    more: str | None = None
    said: Callable[[Recorded], str] | None = None
    by_device: bool = False


Part = Table | str | Callable[[Recorded], str]


class Folder(NamedTuple):
    """The folder of a command in data/results: a run folder for each model, and the table of all.
    read: makes a reader of a run, with its `lines()`, and what a caption says `about()` it."""

    name: str
    title: str
    read: Callable[[results.Run], Any]
    cells: Mapping[str, str]

    def load(self, folder: Path) -> Any:
        """One run folder, read."""
        return self.read(results.load_run(folder))

    def runs(self, recorded: Recorded) -> list[Any]:
        """The complete runs, small models first."""
        return [self.read(found) for found in complete_runs(recorded.folder / self.name)]

    def lines(self, recorded: Recorded) -> Iterator[Line]:
        for found in self.runs(recorded):
            yield from found.lines()

    def captions(self, recorded: Recorded) -> str:
        """A caption for each run."""
        return " ".join(caption([found], found.about()) for found in self.runs(recorded))

    @property
    def table(self) -> Table:
        return Table(self.title, self.lines, self.cells, said=self.captions)

    def shown(self, folder: Path) -> str:
        """The table of one run folder."""
        return as_text(self.load(folder).lines(), self.cells)


def block(parts: Sequence[Part], recorded: Recorded) -> str:
    """Tables and the sentences between them, as Markdown. Sentences are left out until a table has
    lines."""
    texts, measured = list[str](), False
    for part in parts:
        if isinstance(part, Table):
            lines = list(part.lines(recorded))
            measured |= bool(lines)
            texts.append(rendered(part, lines, recorded))
        elif measured or len(parts) == 1:
            texts.append(part if isinstance(part, str) else part(recorded))
    return "\n\n".join(filter(None, texts))


def rendered(table: Table, lines: Sequence[Line], recorded: Recorded) -> str:
    """The lines as Markdown with their caption. Without lines, a line says that nothing was
    measured."""
    runs = [run for line in lines for run in line.runs]
    if not lines or (table.more is not None and not runs):
        return f"{table.title}: {NOT_MEASURED}." if table.title else ""
    texts = [as_text(lines, table.cells)]
    if table.more is not None:
        groups = dict[str, list[Any]]()
        for run in runs:
            device = str(run.run["engine"].get("device_description")) if table.by_device else ""
            groups.setdefault(device, []).append(run)
        more = table.more.format_map(facts(runs))
        texts.append(" ".join(caption(group, more) for group in groups.values()))
    if table.said is not None:
        texts.append(table.said(recorded))
    return "\n\n".join(texts)


def as_text(lines: Iterable[Line], cells: Mapping[str, str] | None) -> str:
    """Lines as Markdown. A cell whose value is None is empty."""
    rows = [
        line.values if cells is None
        else {column: filled(template, line.values) for column, template in cells.items()}
        for line in lines
    ]  # fmt: skip
    made = pd.DataFrame(rows)
    empty = made.columns[made.isna().any()]  # an empty text is no number
    return markdown(made.astype(dict.fromkeys(empty, object)).fillna(""))


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with its values; empty where one of them is None."""
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return "" if any(values[name] is None for name in names) else template.format_map(values)


def caption(runs: Iterable[Any], more: str = "") -> str:
    """Device, commits and date of the runs in one table."""
    found = [run.run for run in runs]
    devices = dict.fromkeys(str(run["engine"].get("device_description")) for run in found)
    commits = dict.fromkeys(commit_of(run) for run in found)
    dates = sorted({run["started"][:10] for run in found})
    date = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    parts = [" and ".join(devices), *([more] if more else [])]
    return "; ".join([*parts, f"commit {', '.join(commits)}", date]) + f"{mark(*found)}."


def facts(runs: Iterable[Any]) -> dict[str, str]:
    """Facts for the caption of a table, over all its runs.

    read, peak: the read bandwidth, and the rate of a large product.
    n: repetitions.
    tests, shapes: their names; shapes of kernels.
    scored: tokens scored.
    tick: the step of the clock of stamps, with the words before it.
    """
    every = [run.run for run in runs]
    made = [run["result"] for run in every]
    scored = dict.fromkeys(str(of["engine"]["n"]) for of in made if "agreement" in of)
    timers = [timer for run in every if (timer := run["engine"].get("timer"))]
    tick = span(timer["tick_ns"] for timer in timers)
    shapes = dict.fromkeys(row["shape"][3:] for of in made for row in of.get("rows", ()))
    return {
        "read": span(of["read_gbps"] for of in made if "read_gbps" in of),
        "peak": span(of["product_tflops"] for of in made if "product_tflops" in of),
        "n": n_rounds(run["repetitions"] for run in every),
        "tests": ", ".join(dict.fromkeys(test for run in every for test in run["tests"])),
        "shapes": ", ".join(shapes),
        "scored": " or ".join(scored),
        "tick": tick and f", by a clock in steps of {tick} ns",
    }


def n_rounds(numbers: Iterable[int]) -> str:
    """`5`, `5 and 10`, or `5 to 44` where there are more."""
    few = sorted(set(numbers))
    return " and ".join(map(str, few)) if len(few) < 3 else f"{few[0]} to {few[-1]}"


def span(values: Iterable[float]) -> str:
    """The least and the most, rounded; one number where they are equal."""
    texts = [f"{value:.0f}" for value in sorted(values)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) if texts else ""
