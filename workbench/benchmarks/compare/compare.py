"""Compares runs that were measured apart, across commits, machines and engines: run folders, and
files of llama-bench (`sides.py`).

The first run is the baseline. A ratio is (median t/s of the run) / (median t/s of the baseline).
Its interval is a percentile bootstrap of the log ratio. Each side's repetitions are resampled on
their own, since no round holds both sides. So the interval covers the noise within each run. It
does not cover changes between the runs: clocks, neighbours, temperature. Where runs have an A/A
control, the wider A/A band of the two sides counts as well.

The column `can tell` of a row is the smallest effect that would have had a verdict: outside the
band, and with an interval that excludes 1 (`stats.resolution`).

Runs of another device, processor, driver or day are history. Their rows have no verdict, except
with `across`. Days that end between two runs of one night are no other days (`sides.APART`).
"""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.matching import Matched, Repeated, match
from workbench.benchmarks.compare.sides import (
    ARM,
    KINDS,
    Side,
    differences,
    sides_of,
    why_history,
)
from workbench.benchmarks.compare.stats import Band, Ratio
from workbench.common.errors import UsageError
from workbench.common.tables import Table, to_html

HISTORY = "history"
AVERAGES = "averages only"
LIFTED = ("Run", "Model", "Arm", "Engine", "Toggles")  # above the table where the same in every row
NO_INTERVAL = "The runs were not interleaved. So a change between the runs counts as a difference."
METHOD = (
    "The runs were not interleaved: each side's repetitions were resampled on their own. So a "
    "change between the runs counts as a difference.",
    "A row can tell the smallest effect that would have had a verdict: its interval excludes 1, "
    "and it is outside the A/A band where a run has one.",
)


class ComparedRow(NamedTuple):
    """A test and arm of the baseline, and its counterpart in another run.

    band: the wider A/A band of the two runs, NaN without any.
    least: the smallest effect that the row can tell, as a share.
    """

    run_id: str
    sides: Matched
    ratio: Ratio
    band: Band
    least: float
    verdict: str

    @property
    def is_judged(self) -> bool:
        return self.verdict not in (HISTORY, AVERAGES, stats.TOO_FEW)

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.ratio.low)


class Compared:
    """Two or more compared runs. Never draws.

    sides: the runs, the baseline first.
    rows: the pairs.
    left: repetitions without a counterpart: the run that has them, the run that lacks them, and
        the repetitions.
    lines: the differences between the runs, and why a run is history.
    """

    def __init__(
        self,
        sides: list[Side],
        rows: list[ComparedRow],
        left: list[tuple[str, str, Repeated]],
        lines: list[str],
    ):
        self.sides, self.rows, self.left, self.lines = sides, rows, left, lines

    def below(self, limit: float) -> list[ComparedRow]:
        """The rows that have a verdict and whose whole interval lies below `limit`."""
        return [row for row in self.rows if row.is_judged and row.ratio.high < limit]

    def summary(self) -> pd.DataFrame:
        """One row per pair, all numbers, with the columns that `plots.speedup` takes: run, model,
        test, arm, label (for a picture), engine, toggles, is_control (never), tps_baseline,
        tps_toggled (medians, or the averages that a file has), speedup, low, high, n_baseline,
        n_toggled (0 for an average), band_low, band_high (1 without a control), least, verdict."""
        rows = []
        for row in self.rows:
            before, after, _ = row.sides
            a, b = (stats.median_interval(side.tps)[0] for side in (before, after))
            bounds = (1.0, 1.0) if math.isnan(row.band.low) else row.band
            rows.append(
                {
                    "run": row.run_id, "model": " ".join(after.model[1:]), "test": after.test,
                    "arm": after.arm, "label": self._label(row),
                    "engine": _changed(before.engine, after.engine),
                    "toggles": _toggles(row.sides), "is_control": False,
                    "tps_baseline": a, "tps_toggled": b, "speedup": row.ratio.value,
                    "low": row.ratio.low, "high": row.ratio.high, "n_baseline": before.n,
                    "n_toggled": after.n, "band_low": bounds[0], "band_high": bounds[1],
                    "least": row.least, "verdict": row.verdict,
                }
            )  # fmt: skip
        return pd.DataFrame(rows, columns=_COLUMNS)

    def table(self) -> Table:
        """The rows as text, without columns that no row has. Columns that are the same in every
        row are in `attrs["constant"]`."""
        s = self.summary()
        sides = [row.sides for row in self.rows]
        table = Table(
            {
                "Run": s["run"],
                "Model": s["model"],
                "Arm": s["arm"],
                "Engine": s["engine"],
                "Toggles": s["toggles"],
                "Test": s["test"],
                "t/s baseline": [
                    _rate(tps, one.before)
                    for tps, one in zip(s["tps_baseline"], sides, strict=True)
                ],
                "t/s": [
                    _rate(tps, one.after) for tps, one in zip(s["tps_toggled"], sides, strict=True)
                ],
                "Ratio": [f"{value:.3f}" for value in s["speedup"]],
                "95% CI": [stats.interval(a, b) for a, b in zip(s["low"], s["high"], strict=True)],
                "n": [f"{one.before.n or '-'}/{one.after.n or '-'}" for one in sides],
                "can tell": [stats.percent(share) for share in s["least"]],
                "verdict": s["verdict"],
            }
        )
        absent = [
            *(() if any(row.has_interval for row in self.rows) else ("95% CI", "can tell")),
            *(() if any(one.before.n or one.after.n for one in sides) else ("n",)),
            *(() if any(one.before.foreign or one.after.foreign for one in sides) else ("Engine",)),
            *(() if s["toggles"].any() else ("Toggles",)),
        ]
        table = table.drop(columns=absent)
        same = [c for c in LIFTED if len(table) and c in table and table[c].nunique() == 1]
        made = table.drop(columns=same)
        constant = {c: table[c].iloc[0] for c in same}
        made.attrs = {
            "constant": {"Baseline": self.sides[0].name} | constant,
            "groups": [c for c in ("Run", "Model", "Engine", "Toggles") if c in made],
            "keys": [c for c in (*LIFTED, "Test") if c in made],
        }
        return made

    def _label(self, row: ComparedRow) -> str:
        arm = "" if row.sides.after.arm == ARM else row.sides.after.arm
        return f"{row.run_id} {arm}".strip() if len(self.sides) > 2 or not arm else arm

    def unmatched(self) -> Table:
        """Repetitions without a counterpart: columns Only in, Not in, Model, Toggles, Tests. An
        engine without toggles is named in their place."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for run, other, side in self.left:
            key = (run, other, " ".join(side.model[1:]), side.label or side.engine)
            groups.setdefault(key, []).append(side.test)
        rows = [(*key, ", ".join(tests)) for key, tests in groups.items()]
        return Table(rows, columns=["Only in", "Not in", "Model", "Toggles", "Tests"])

    def tables(self) -> list[Table]:
        """`table` and `unmatched`, without an empty table."""
        return [table for table in (self.table(), self.unmatched()) if len(table)]

    def __repr__(self) -> str:
        return "\n".join([*map(repr, self.tables()), *self.lines])

    def _repr_html_(self) -> str:
        lines = "<br>".join(html.escape(line) for line in self.lines)
        return "".join(map(to_html, self.tables())) + f"<p>{lines}</p>"


_COLUMNS = [
    "run", "model", "test", "arm", "label", "engine", "toggles", "is_control", "tps_baseline",
    "tps_toggled", "speedup", "low", "high", "n_baseline", "n_toggled", "band_low", "band_high",
    "least", "verdict",
]  # fmt: skip


def compare(*runs: str | Path, across: bool = False) -> Compared:
    """Compares runs with the first run. Returns a Compared, which prints as a table; `summary` has
    its numbers.

    runs: run folders of kinds `ab` and `bench`, and files of llama-bench (json, jsonl, csv, sql,
        SQLite). A file has a side for each build_commit, as for compare-llama-bench.py.
    across: rows of another device, driver or day have a verdict, too.

    Raises UsageError for fewer than two sides, and for anything that is no run folder and no file
    of llama-bench. Also for a baseline of another kind, and where all further runs are of other
    kinds.
    """
    if listed := [one for one in runs if not isinstance(one, str | Path)]:
        raise UsageError(f"{listed[0]!r} is no path; give each run by itself: compare(a, b)")
    sides = [side for path in runs for side in sides_of(path)]
    if len(sides) < 2:
        raise UsageError("compare needs two runs or more; the first is the baseline")
    baseline, others = sides[0], [side for side in sides[1:] if side.kind in KINDS]
    kinds = " and ".join(KINDS)
    if baseline.kind not in KINDS:
        raise UsageError(f"{runs[0]} is of kind {baseline.kind}; compare takes {kinds} runs")
    lines = [
        f"{side.name} is not compared: it is of kind {side.kind}, and {kinds} runs are"
        for side in sides[1:]
        if side.kind not in KINDS
    ]
    if not others:
        raise UsageError(f"nothing to compare with {runs[0]}: {'; '.join(lines)}")
    rows: list[ComparedRow] = []
    left: list[tuple[str, str, Repeated]] = []
    for other in others:
        found = match(baseline.repetitions, other.repetitions)
        unlike = [] if across else why_history(baseline, other)
        rows += [_row(other, pair, baseline, bool(unlike)) for pair in found.matched]
        if unlike:
            lines.append(
                f"{other.name} is history, and has no verdict: {'; '.join(unlike)}. "
                "--across (in Python across=True) judges it"
            )
        lines += [f"{other.name}: {said}" for said in differences(baseline, other)]
        lines += [f"{other.name}: {said}" for said in _other_files(found.matched)]
        left += [(baseline.name, other.name, side) for side in found.only_before]
        left += [(other.name, baseline.name, side) for side in found.only_after]
    lines += [note for side in (baseline, *others) for note in side.notes]
    if not rows:
        lines.append(
            "nothing matches: no test, model and arm is in the baseline and in another run"
        )
    method = METHOD if any(row.has_interval for row in rows) else (NO_INTERVAL,) if rows else ()
    return Compared([baseline, *others], rows, left, [*dict.fromkeys(lines), *method])


def _row(other: Side, sides: Matched, baseline: Side, is_history: bool) -> ComparedRow:
    ratio = stats.independent_ratio(sides.before.tps, sides.after.tps)
    test = sides.after.test
    known = [side.bands[test] for side in (baseline, other) if test in side.bands]
    band = max(known, key=lambda b: b.high, default=Band(math.nan, math.nan))
    used = Band(1.0, 1.0) if math.isnan(band.low) else band
    averages = not (sides.before.n and sides.after.n)
    verdict = HISTORY if is_history else AVERAGES if averages else stats.verdict(ratio, used)
    return ComparedRow(other.name, sides, ratio, band, stats.resolution(ratio, used), verdict)


def _toggles(sides: Matched) -> str:
    before, after = sides.before, sides.after
    if not sides.differ:  # nor do those of an engine that has none
        return after.label or before.label
    return ", ".join(f"{name}: {a} -> {b}" for name, a, b in sides.differ)


def _changed(before: str, after: str) -> str:
    return after if before == after else f"{before} -> {after}"


def _rate(tps: float, side: Repeated) -> str:
    """A rate as text; an average with the standard deviation that its file gives."""
    known = side.stddev is not None and not math.isnan(side.stddev)
    return f"{tps:.2f} ± {side.stddev:.2f}" if known else f"{tps:.2f}"


def _other_files(matched: Sequence[Matched]) -> Iterator[str]:
    names = {
        " ".join(s.after.model[1:])
        for s in matched
        if None not in (s.before.model[0], s.after.model[0])
        and s.before.model[0] != s.after.model[0]
    }
    for name in sorted(names):
        yield f"{name} is another file: the same name and type, and another hash"
