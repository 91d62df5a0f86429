"""The result of a sweep: a row for each cell, from the run folders of its groups."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.benchmarks.compare import pace, stats
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.energy import joules
from workbench.benchmarks.runs import results
from workbench.benchmarks.sweep.expected import Expected
from workbench.benchmarks.sweep.matrix import TEST
from workbench.benchmarks.sweep.store import FoundGroup, SweepFolder, SweepRecord
from workbench.common.errors import UsageError
from workbench.common.framed import Framed
from workbench.common.nearest import choices
from workbench.common.sizes import counted
from workbench.common.tables import Table, markdown, terminal_columns, to_html
from workbench.config import said_toggles

DONE, PART, MISSING, FAILED, LEFT_OUT = "done", "interrupted", "missing", "failed", "left out"
# of a cell that is measured, after its axes
COLUMNS = (
    "status", "tps", "tps_low", "tps_high", "n", "p50_us", "p90_us", "p99_us", "ttft_us",
    "baseline", "speedup", "low", "high", "band_low", "band_high", "verdict", "answer", "toggles",
    "device_description", "commit", "started", "key", "group", "reason",
)  # fmt: skip
# what a column of numbers holds, with its unit
WORDS = {
    "tps": "tokens/s (median)", "tps_low": "tokens/s (low end of the 95 % interval)",
    "tps_high": "tokens/s (high end of the 95 % interval)", "n": "repetitions",
    "p50_us": "time of a token, us (median)", "p90_us": "time of a token, us (90th percentile)",
    "p99_us": "time of a token, us (99th percentile)",
    "ttft_us": "time to the first token, us (median)",
    "speedup": "speedup over the first cell of its group (ratio of medians)",
    "j_per_token": "joules a token (median)",
}  # fmt: skip
# columns of `AB.summary` that a cell has under other names
_NOT_PASSED = ("label", "arm", "test", "is_control", "tps_baseline", "tps_toggled", "n")


class Sweep(Framed):
    """A sweep, finished or not. `wb.sweep` and `wb.load` make it.

    folder: where its run folders are.
    record: the content of its `sweep.json`.
    found: its groups of cells that have a run folder.
    expected: what is left to measure, and how long it takes; None where the sweep was read.
    interrupted: it ended with Ctrl-C.

    `to_frame` has a row for each cell, `pivot` a table of two axes, `plot` a picture
    (`report/sweeps.py`). `load` raises UsageError for a folder that is no sweep, `pivot` and `plot`
    for a name that is no column.
    """

    def __init__(
        self,
        folder: Path,
        record: SweepRecord,
        found: Sequence[FoundGroup],
        expected: Expected | None = None,
        interrupted: bool = False,
    ):
        self.folder, self.expected, self.interrupted = folder, expected, interrupted
        self._record, self._found = record, list(found)

    @classmethod
    def load(cls, folder: str | Path) -> Sweep:
        """Reads the folder of a sweep, of any machine. Raises UsageError where it is none."""
        of = SweepFolder(folder)
        record = of.read()
        return cls(of.path, record, list(of.found(record)))

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The values of each axis, in order."""
        return self._record.axes

    @property
    def varying(self) -> list[str]:
        """The axes with several values."""
        return [name for name, values in self.axes.items() if len(values) > 1]

    def to_frame(self) -> pd.DataFrame:
        """A row for each cell, in the order of the matrix; at the end those that are left out.

        Columns: every axis (model, test, n_depth, n_parallel, settings, preset, set, toggles);
        status (done, interrupted, missing, failed, left out); tps, tps_low, tps_high (median
        tokens/s and its 95 % interval); n (repetitions); p50_us, p90_us, p99_us (single tokens,
        us); ttft_us (first token, us); baseline (the cell that it is compared with), speedup, low,
        high (95 % interval), band_low, band_high (A/A), verdict, answer; toggles (all that are
        on); device_description, commit, started, key, group (its run folder); reason (why it is
        left out, or failed, or does what its baseline does). Cells without a baseline have no
        speedup. Further columns of a comparison's summary pass through.
        """
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        rows, measured = [], self._measured()
        for key, axes in self._record.cells.items():
            failed = self._record.failed.get(key, "")
            own = {"key": key, "status": FAILED if failed else MISSING, "reason": failed}
            rows.append(axes | own | measured.get(key, {}))
        for axes, reason in self._record.left_out:
            rows.append(axes | {"status": LEFT_OUT, "reason": reason})
        further = [name for row in rows for name in row if name not in (*self.axes, *COLUMNS)]
        columns = [*self.axes, *COLUMNS[:-1], *dict.fromkeys(further), COLUMNS[-1]]
        made = pd.DataFrame(rows, columns=columns)
        return made.astype({"n": "Int64"})  # whole, also where a cell has none

    def _measured(self) -> dict[str, dict[str, Any]]:
        """What is known of each measured cell, by key. A baseline that was measured with several
        groups counts once: in the group that was first."""
        known: dict[str, dict[str, Any]] = {}
        for group in sorted(self._found, key=lambda group: not group.complete):
            for key, row in _rows(group):
                known.setdefault(key, row)
        return known

    def pivot(
        self,
        index: str | Sequence[str] = (),
        columns: str = "",
        values: str = "tps",
        **unknown: Any,
    ) -> Table:
        """A table of two axes: `values` of each cell; a line above says what they are, with their
        unit. By default columns are the last axis that varies, and rows (`index`) are all others.
        Raises UsageError where several cells share a place, for a name that is no column, and for
        an unknown keyword."""
        for name in unknown:
            said = choices(name, ("index", "columns", "values"))
            raise UsageError(f"argument {name!r} does not exist; {said}; index names the rows")
        frame = self.to_frame()
        frame = frame[frame["status"] != LEFT_OUT]
        columns = columns or (self.varying or [TEST])[-1]
        rows: list[Any] = list(index) if isinstance(index, list | tuple) else [index]
        rows = rows or [name for name in self.varying if name != columns] or ["model"]
        for name in (*rows, columns, values):
            if not isinstance(name, str) or name not in frame:
                raise UsageError(f"column {name!r} does not exist; {choices(name, frame)}")
        if frame.duplicated([*rows, columns]).any():
            more = [name for name in self.varying if name not in (*rows, columns)]
            raise UsageError(
                f"several cells have the same {', '.join([*rows, columns])}; give index="
                f"{[*rows, *more]}"
            )
        made = frame.pivot(index=rows, columns=columns, values=values)
        in_order = frame[rows[0]] if len(rows) == 1 else pd.MultiIndex.from_frame(frame[rows])
        made = made.loc[in_order.drop_duplicates(), frame[columns].drop_duplicates()]
        names = list(map(str, made))
        return Table(made).shown(
            constant={"values": WORDS.get(values, values), "columns": columns},
            keys=rows, right=names, digits=dict.fromkeys(names, 3 if values == "speedup" else 2),
        )  # fmt: skip

    def table(self) -> Table:
        """The cells that are not left out: axes that vary, t/s, interval, speedup, verdict and
        answer; a status where a cell is not done."""
        frame = self.to_frame()
        frame = frame[frame["status"] != LEFT_OUT]
        table = Table(frame[self.varying or [TEST]].astype(object))
        table["t/s"] = frame["tps"].astype(float)
        span = zip(frame["tps_low"].astype(float), frame["tps_high"].astype(float), strict=True)
        table["95% CI"] = ["" if math.isnan(a) else f"{a:.2f}..{b:.2f}" for a, b in span]
        if "j_per_token" in frame:
            table["J/token"] = [joules.cell(row) for row in frame.to_dict("records")]
        if frame["speedup"].notna().any():
            table["Speedup"] = frame["speedup"].astype(float)
            table["verdict"] = frame["verdict"].fillna("")
            table["answer"] = [str(said).partition(" (")[0] for said in frame["answer"].fillna("")]
        if (frame["status"] != DONE).any():
            table["status"] = frame["status"]
        keys = self.varying or [TEST]
        return table.shown(keys=keys, groups=keys[:1], digits={"Speedup": 3})

    @property
    def summary(self) -> str:
        """Sentences: how many cells there are of each status, where they are, how far baselines
        differ from themselves, why cells are left out or failed, and what is left."""
        frame = self.to_frame()
        counts = frame["status"].value_counts(sort=False)
        said = ", ".join(f"{n} {status}" for status, n in counts.items())
        lines = [f"{counted(len(frame), 'cell')}: {said}; {self.folder}"]
        if frame["band_low"].notna().any():
            band = stats.interval(frame["band_low"].min(), frame["band_high"].max())
            lines.append(f"the widest A/A band of a speedup: {band}")
        reasons = frame[frame["reason"].fillna("") != ""]
        for (status, why), rows in reasons.groupby(["status", "reason"], sort=False):
            lines.append(f"{len(rows)} {status}: {why}")
        if self.expected is not None and self.expected.cells:
            lines.append(str(self.expected))
        if self.interrupted:
            lines.append("interrupted: resume goes on with the cells that are missing")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"{markdown(self.table(), terminal_columns())}\n\n{self.summary}"

    def _repr_html_(self) -> str:
        lines = "<br>".join(map(html.escape, self.summary.splitlines()))
        return to_html(self.table()) + f"<p>{lines}</p>"


def _rows(group: FoundGroup) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is known of each cell of a group, after its key."""
    run = group.run.run
    samples = pace.counted(run, group.run.samples)
    arms = [arm for arm in run["arms"] if not arm["is_control"]]
    rates = results.rates(samples)
    times = results.percentiles(samples).set_index("arm")
    compared, test = _compared(run, samples), run["tests"][0]
    idle = run["result"].get("idle", {}).get(test, {})
    for key, arm in zip(group.keys, arms, strict=True):
        name = arm["name"]
        tps = rates.loc[rates["arm"] == name, "tps"].to_numpy()
        if not len(tps):
            continue
        middle, low, high = stats.median_interval(tps, run["seed"])
        yield key, {
            "status": DONE if group.complete else PART,
            "tps": middle, "tps_low": low, "tps_high": high, "n": len(tps),
            **times.loc[name, ["p50_us", "p90_us", "p99_us", "ttft_us"]].to_dict(),
            **joules.of_test(run, run["tests"][0], name), **compared.get(name, {}),
            "toggles": said_toggles(arm["toggles"]),
            "device_description": run["engine"]["device_description"],
            "commit": str(run["commit"]["hash"])[:8],
            "started": run["started"],
            "group": group.name,
            "reason": idle.get(name, ""),
        }  # fmt: skip


def _compared(run: dict[str, Any], samples: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The speedup, the verdict and the answer of each arm but the baseline, by the arm's name."""
    if run["kind"] != "ab":
        return {}
    baseline = run["arms"][0]["name"]
    return {
        row["arm"]: {"baseline": baseline} | {k: v for k, v in row.items() if k not in _NOT_PASSED}
        for row in AB(run, samples).summary().to_dict("records")
        if not row["is_control"]
    }
