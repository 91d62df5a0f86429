"""Compares runs that were measured apart: run folders, across commits and machines.

The first run is the baseline. A ratio is (median t/s of the run) / (median t/s of the baseline).
Its interval is a percentile bootstrap of the log ratio. Each side's repetitions are resampled on
their own, since no round holds both sides. So the interval covers the noise within each run. It
does not cover changes between the runs: clocks, neighbours, temperature. Where runs have an A/A
control, the wider A/A band of the two sides counts as well.

The column `can tell` of a row is the smallest effect that would have had a verdict: outside the
band, and with an interval that excludes 1 (`stats.resolution`).

Runs of another device, processor, driver or day are history. Their rows have no verdict, except
with `across`.
"""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.matching import Matched, Repeated, match, repeated
from workbench.benchmarks.compare.stats import Band, Ratio
from workbench.benchmarks.llama.llama_bench import ARM
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.nameless import card_number
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.tables import Table, to_html

KINDS = ("ab", "bench")
HISTORY = "history"
LIFTED = ("Run", "Model", "Arm", "Toggles")  # above the table where the same in every row
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
        return self.verdict not in (HISTORY, stats.TOO_FEW)


class Compared:
    """Two or more compared runs. Never draws.

    rows: the pairs.
    left: repetitions without a counterpart: the run that has them, the run that lacks them, and
        the repetitions.
    lines: the differences between the runs, and why a run is history.
    """

    def __init__(
        self,
        runs: list[results.Run],
        rows: list[ComparedRow],
        left: list[tuple[str, str, Repeated]],
        lines: list[str],
    ):
        self.runs, self.rows, self.left, self.lines = runs, rows, left, lines

    def below(self, limit: float) -> list[ComparedRow]:
        """The rows that have a verdict and whose whole interval lies below `limit`."""
        return [row for row in self.rows if row.is_judged and row.ratio.high < limit]

    def summary(self) -> pd.DataFrame:
        """One row per pair, all numbers, with the columns that `plots.speedup` takes: run, model,
        test, arm, label (for a picture), toggles, is_control (never), tps_baseline, tps_toggled
        (medians), speedup, low, high, n_baseline, n_toggled, band_low, band_high (1 without a
        control), least, verdict."""
        rows = []
        for row in self.rows:
            before, after, _ = row.sides
            a, b = (stats.median_interval(side.tps)[0] for side in (before, after))
            bounds = (1.0, 1.0) if math.isnan(row.band.low) else row.band
            rows.append(
                {
                    "run": row.run_id, "model": " ".join(after.model[1:]), "test": after.test,
                    "arm": after.arm, "label": self._label(row), "toggles": _toggles(row.sides),
                    "is_control": False,
                    "tps_baseline": a, "tps_toggled": b, "speedup": row.ratio.value,
                    "low": row.ratio.low, "high": row.ratio.high, "n_baseline": len(before.tps),
                    "n_toggled": len(after.tps), "band_low": bounds[0], "band_high": bounds[1],
                    "least": row.least, "verdict": row.verdict,
                }
            )  # fmt: skip
        return pd.DataFrame(rows, columns=_COLUMNS)

    def table(self) -> Table:
        """The rows as text. Columns that are the same in every row are in `attrs["constant"]`."""
        s = self.summary()
        table = Table(
            {
                "Run": s["run"],
                "Model": s["model"],
                "Arm": s["arm"],
                "Toggles": s["toggles"],
                "Test": s["test"],
                "t/s baseline": [f"{tps:.2f}" for tps in s["tps_baseline"]],
                "t/s": [f"{tps:.2f}" for tps in s["tps_toggled"]],
                "Ratio": [f"{value:.3f}" for value in s["speedup"]],
                "95% CI": [stats.interval(a, b) for a, b in zip(s["low"], s["high"], strict=True)],
                "n": [f"{a}/{b}" for a, b in zip(s["n_baseline"], s["n_toggled"], strict=True)],
                "can tell": [stats.percent(share) for share in s["least"]],
                "verdict": s["verdict"],
            }
        )
        same = [c for c in LIFTED if len(table) and table[c].nunique() == 1]
        made = table.drop(columns=same)
        constant = {c: table[c].iloc[0] for c in same}
        made.attrs = {
            "constant": {"Baseline": self.runs[0].run["run_id"]} | constant,
            "groups": [c for c in ("Run", "Model", "Toggles") if c in made],
            "keys": [c for c in (*LIFTED, "Test") if c in made],
        }
        return made

    def _label(self, row: ComparedRow) -> str:
        arm = "" if row.sides.after.arm == ARM else row.sides.after.arm
        return f"{row.run_id} {arm}".strip() if len(self.runs) > 2 or not arm else arm

    def unmatched(self) -> Table:
        """Repetitions without a counterpart: columns Only in, Not in, Model, Toggles, Tests."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for run, other, side in self.left:
            key = (run, other, " ".join(side.model[1:]), side.label)
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
    "run", "model", "test", "arm", "label", "toggles", "is_control", "tps_baseline", "tps_toggled",
    "speedup", "low", "high", "n_baseline", "n_toggled", "band_low", "band_high", "least",
    "verdict",
]  # fmt: skip


def compare(*folders: str | Path, across: bool = False) -> Compared:
    """Compares run folders of kinds `ab` and `bench` with the first folder. Returns a Compared,
    which prints as a table; `summary` has its numbers.

    across: rows of another device, driver or day have a verdict, too.
    Raises UsageError for fewer than two folders and for a folder that is no run folder. Also for a
    baseline of another kind, and where all further runs are of other kinds.
    """
    if len(folders) < 2:
        raise UsageError("compare needs two run folders or more; the first is the baseline")
    runs = [results.load_run(folder) for folder in folders]
    baseline, lines, others = runs[0], [], []
    if baseline.run["kind"] not in KINDS:
        raise UsageError(
            f"{baseline.folder} is of kind {baseline.run['kind']}; compare takes "
            f"{' and '.join(KINDS)} runs"
        )
    for other in runs[1:]:
        if other.run["kind"] in KINDS:
            others.append(other)
        else:
            lines.append(
                f"{other.run['run_id']} is not compared: it is of kind {other.run['kind']}, and "
                f"{' and '.join(KINDS)} runs are"
            )
    if not others:
        raise UsageError(f"nothing to compare with {baseline.folder}: {'; '.join(lines)}")
    rows: list[ComparedRow] = []
    left: list[tuple[str, str, Repeated]] = []
    for other in others:
        found = match(list(repeated(baseline)), list(repeated(other)))
        unlike = [] if across else why_history(baseline.run, other.run)
        bands = (_bands(baseline), _bands(other))
        rows += [_row(other, sides, bands, bool(unlike)) for sides in found.matched]
        name = other.run["run_id"]
        if unlike:
            lines.append(
                f"{name} is history, and has no verdict: {'; '.join(unlike)}. "
                "--across (in Python across=True) judges it"
            )
        lines += [f"{name}: {said}" for said in differences(baseline.run, other.run)]
        lines += [f"{name}: {said}" for said in _other_files(found.matched)]
        first = baseline.run["run_id"]
        left += [(first, name, side) for side in found.only_before]
        left += [(name, first, side) for side in found.only_after]
    lines += [f"{run.run['run_id']} was interrupted" for run in (baseline, *others)
              if run.run["status"] == results.INTERRUPTED]  # fmt: skip
    if not rows:
        lines.append(
            "nothing matches: no test, model and arm is in the baseline and in another run"
        )
    return Compared([baseline, *others], rows, left, [*dict.fromkeys(lines), *METHOD])


def _row(
    other: results.Run, sides: Matched, bands: tuple[dict[str, Band], ...], is_history: bool
) -> ComparedRow:
    ratio = stats.independent_ratio(sides.before.tps, sides.after.tps)
    known = [found[sides.after.test] for found in bands if sides.after.test in found]
    band = max(known, key=lambda b: b.high, default=Band(math.nan, math.nan))
    used = Band(1.0, 1.0) if math.isnan(band.low) else band
    verdict = HISTORY if is_history else stats.verdict(ratio, used)
    return ComparedRow(
        str(other.run["run_id"]), sides, ratio, band, stats.resolution(ratio, used), verdict
    )


def _bands(run: results.Run) -> dict[str, Band]:
    """The A/A band by test; empty for a run without a control."""
    if run.run["kind"] != "ab":
        return {}
    found = AB(run.run, run.samples).summary()
    bands = {row.test: Band(row.band_low, row.band_high) for row in found.itertuples()}
    return {test: band for test, band in bands.items() if not math.isnan(band.low)}


def _toggles(sides: Matched) -> str:
    if not sides.differ:
        return sides.after.label
    return ", ".join(f"{name}: {a} -> {b}" for name, a, b in sides.differ)


def why_history(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Why a run is history: its device, card, processor, driver or day differs. Empty where all are
    alike. before, after: `run.json` as dicts."""
    return [
        f"another {what} ({a[what]}, and {b[what]})"
        for a, b in [(_circumstances(before), _circumstances(after))]
        for what in a
        if a[what] != b[what]
    ]


def _circumstances(run: dict[str, Any]) -> dict[str, str]:
    """The circumstances that must be alike for a verdict. The day is the UTC day of the start."""
    engine, machine = run["engine"], run["machine"]
    device, _, software = str(engine.get("device_description")).partition(", driver ")
    gpus = machine.get("gpus") or [] if is_gpu(str(engine.get("device"))) else []
    drivers = {str(gpu.get("driver")) for gpu in gpus}
    return {
        "device": device,
        "card": ", ".join(str(gpu.get("card") or card_number(gpu.get("uuid"))) for gpu in gpus),
        "processor": str((machine.get("cpu") or {}).get("name")),
        "driver": software or ", ".join(sorted(drivers)),
        "day": str(run["started"])[:10],
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """The further differences between two runs: commits, versions, the engine's settings."""
    a, b = (_commit(run["commit"]) for run in (before, after))
    yield f"commit {a} -> {b}" if a != b else f"the same commit {a}"
    for what, old, new in (
        ("versions", before["versions"], after["versions"]),
        ("settings", before["engine"].get("config") or {}, after["engine"].get("config") or {}),
    ):
        names = [k for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]
        if names:
            changed = (f"{k} {_said(old.get(k))} -> {_said(new.get(k))}" for k in names)
            yield f"other {what}: {', '.join(changed)}"


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


def _commit(commit: dict[str, Any]) -> str:
    return str(commit.get("hash"))[:8] + (" with changes" if commit.get("dirty") else "")


def _other_files(matched: Sequence[Matched]) -> Iterator[str]:
    names = {" ".join(s.after.model[1:]) for s in matched if s.before.model[0] != s.after.model[0]}
    for name in sorted(names):
        yield f"{name} is another file: the same name and type, and another hash"
