"""The result of a comparison: tables and sentences from a run of kind `ab`, measured or read.

Everything here follows from `run.json` and the samples. So a folder gives the same table on every
machine.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from workbench.benchmarks.compare import pace, resolution, stats
from workbench.benchmarks.compare.answers import Answer
from workbench.benchmarks.compare.rounds import order_of
from workbench.benchmarks.compare.until import RepeatEnd
from workbench.benchmarks.energy import joules
from workbench.benchmarks.runs import results
from workbench.common.devices import is_gpu
from workbench.common.errors import UsageError
from workbench.common.framed import Framed
from workbench.common.tables import Table, markdown, terminal_columns, to_html
from workbench.config import folded, said_toggles

CONTROL = "A/A control"


def background(run: dict[str, Any]) -> str:
    """The toggles that all arms of a run share and that are not off, as `copy_stream=own, fuse=on,
    all else off`; of kind `ab` without the toggle that is compared."""
    toggle = run["result"].get("toggle")
    first, *others = (arm["toggles"] for arm in run["arms"])
    shared = {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
        and not (toggle and (name == toggle or name.startswith(f"{toggle}_")))
    }
    return said_toggles(shared)


def _changes(baseline: dict[str, Any], arm: dict[str, Any]) -> str:
    """The toggles of an arm that are not the baseline's, as `sync=packed, fuse=on`."""
    was, now = baseline["toggles"], arm["toggles"]
    changed = folded({name: value for name, value in now.items() if was.get(name) != value})
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "the same toggles"


class AB(Framed):
    """A finished or interrupted comparison: what `wb.ab` returns.

    run: `run.json` as a dict.
    samples: every timed token of the rounds that count (`pace.counted`), with the columns of
        samples.parquet (`benchmarks/README.md`). every: of all rounds.

    Printed, it is a speedup table with intervals, verdicts and answers. `to_frame` has the numbers,
    `table` the speedup table, `verdict` the sentences, `percentiles` the times of single tokens,
    `evidence` the commands of a step, `samples` every time. `plot`, `to_csv`, `to_parquet` and
    `save` draw and write. `load` raises UsageError for a folder that holds no comparison; what
    writes raises it for a path that cannot be written.
    """

    def __init__(self, run: dict[str, Any], samples: pd.DataFrame):
        self.run, self.samples, self.every = run, pace.counted(run, samples), samples

    @classmethod
    def load(cls, folder: str | Path) -> AB:
        """Returns the comparison in a run folder. Raises UsageError where it is no run folder, or
        of another kind."""
        found = results.load_run(folder)
        if found.run["kind"] != "ab":
            raise UsageError(f"{folder} holds a run of kind {found.run['kind']!r}, no comparison")
        return cls(found.run, found.samples)

    def save(self, folder: str | Path) -> Path:
        """Writes the run folder; returns its path. Raises UsageError where it cannot be written."""
        return results.write_run(folder, self.run, self.every)

    @property
    def interrupted(self) -> bool:
        """Whether the measuring ended early, by Ctrl-C or by a failure."""
        return self.run["status"] == results.INTERRUPTED

    @property
    def interleaved(self) -> bool:
        """Whether the samples were taken in the order of `order_of`, round by round."""
        names = [arm["name"] for arm in self.run["arms"]]
        cells = results.rates(self.every)
        return bool(len(cells)) and all(
            rows["arm"].tolist()
            == [names[i] for i in order_of(int(round_), len(names))][: len(rows)]
            and rows["order"].diff().iloc[1:].eq(1).all()
            for (_, round_), rows in cells.groupby(["test", "repetition"])
        )

    @property
    def model(self) -> str:
        """The model's name and the type of its weights, as `llama-3.2-1b Q4_K`."""
        return f"{self.run['model']['name']} {self.run['model']['quant']}"

    def answer(self, arm: str) -> Answer | None:
        """Whether `arm` gave the baseline's answer; None: the arm was never compared."""
        found = self.run["result"]["answers"].get(arm)
        return None if found is None else Answer.from_dict(found)

    def label(self, arm: dict[str, Any]) -> str:
        """The arm's value; for sync=auto also the chosen mode."""
        chose = arm["toggles"].get("sync") == "auto" and self.run["result"]["toggle"] == "sync"
        return f"{arm['name']} ({arm['sync_mode']})" if chose else arm["name"]

    def assigned(self, label: str) -> str:
        """`sync=per_copy`, or the set where sets of toggles are compared."""
        toggle = self.run["result"]["toggle"]
        return f"{toggle}={label}" if toggle else label

    def to_frame(self) -> pd.DataFrame:
        """All numbers, with the origin of each row, so that frames of several comparisons can be
        concatenated. A row per test and arm except the baseline; the control has rows, too.

        Columns: model, device, settings (of the engine, where they are no defaults), toggle (where
        sets of toggles are compared: what the arm has in place of the baseline's, as `sync=packed,
        fuse=on`, and `the same toggles` for the control), baseline (its value, or its set),
        background, commit, run_id, date, test, and the further columns of `summary`.
        """
        run, numbers = self.run, self.summary()
        toggle = run["result"]["toggle"]
        changes = {arm["name"]: _changes(run["arms"][0], arm) for arm in run["arms"]}
        origin = results.origin(
            run, toggle=toggle or numbers["arm"].map(changes), baseline=run["arms"][0]["name"],
            background=background(run),
        )  # fmt: skip
        return pd.DataFrame(origin, index=numbers.index).join(numbers)

    def summary(self) -> pd.DataFrame:
        """One row per test and arm except the baseline, with all numbers; the control has rows,
        too.

        Columns: test, arm, label, is_control, tps_baseline and tps_toggled (medians, tokens/s),
        speedup, low, high (95 % interval), n (pairs), band_low, band_high (A/A), verdict, answer.
        Where energy was measured, also j_per_token_baseline and the columns of `joules.joules` from
        j_per_token on.
        """
        return self._summary

    @cached_property
    def _summary(self) -> pd.DataFrame:
        return joules.beside(pd.DataFrame(self._rows(), columns=_COLUMNS), self.run)

    def _rows(self) -> Iterator[dict[str, Any]]:
        rates = results.rates(self.samples)
        baseline, *others = self.run["arms"]
        control = next(arm for arm in others if arm["is_control"])
        for test in self.run["tests"]:
            idle = self._idle(test)
            tps = rates[rates["test"] == test].pivot(
                index="repetition", columns="arm", values="tps"
            )
            band = stats.aa_band(self._ratio(tps, baseline, control))
            for arm in others:
                ratio = self._ratio(tps, baseline, arm)
                if ratio.n == 0:
                    continue
                a, b = baseline["name"], arm["name"]
                pairs = tps[[a, b]].dropna()
                answer = self.answer(b)
                yield {
                    "test": test,
                    "arm": b,
                    "label": self.label(arm),
                    "is_control": arm["is_control"],
                    "tps_baseline": float(pairs[a].median()),
                    "tps_toggled": float(pairs[b].median()),
                    "speedup": ratio.value,
                    "low": ratio.low,
                    "high": ratio.high,
                    "n": ratio.n,
                    "band_low": band.low,
                    "band_high": band.high,
                    "verdict": CONTROL
                    if arm["is_control"]
                    else stats.SAME_WORK
                    if b in idle
                    else stats.verdict(ratio, band),
                    "answer": "not compared" if answer is None else str(answer),
                }

    def _idle(self, test: str) -> dict[str, str]:
        """The arms that do the baseline's work in a test, each with the reason. Older runs do not
        say."""
        found: dict[str, str] = self.run["result"].get("idle", {}).get(test, {})
        return found

    def _ratio(self, tps: pd.DataFrame, baseline: dict, arm: dict) -> stats.Ratio:
        a, b = baseline["name"], arm["name"]
        if a not in tps or b not in tps:
            return stats.Ratio(np.nan, np.nan, np.nan, 0)
        pairs = tps[[a, b]].dropna()
        if pairs.empty:
            return stats.Ratio(np.nan, np.nan, np.nan, 0)
        return stats.speedup(pairs[a].to_numpy(), pairs[b].to_numpy(), self.run["seed"])

    def table(self) -> pd.DataFrame:
        """The speedup table of compare-llama-bench.py, with interval, verdict and answer.

        The last row of each test is the A/A control. It shows how large an effect noise alone has.
        """
        s = self.summary()
        return Table(
            {
                "Model": self.model,
                "Test": s["test"],
                "Toggled": s["label"],
                "t/s baseline": s["tps_baseline"].round(2),
                "t/s toggled": s["tps_toggled"].round(2),
                "Speedup": s["speedup"],
                "95% CI": [stats.interval(a, b) for a, b in zip(s["low"], s["high"], strict=True)],
                "n": s["n"],
                "verdict": s["verdict"],
                "answer": s["answer"],
                **joules.columns(s),
            }
        ).shown(groups=["Test"], keys=["Test", "Toggled"], digits={"Speedup": 3})

    @property
    def caption(self) -> str:
        """One line under a table: baseline, background, settings of the engine that are no
        defaults, device, commit and time of the run."""
        run, baseline = self.run, self.run["arms"][0]
        device = run["engine"]["device_description"]
        said = results.settings_said(run)
        settings = f"{said}; " if said else ""
        own = "" if is_gpu(run["engine"]["device"]) else "timings of this device, not of a GPU; "
        return (
            f"baseline {self.assigned(self.label(baseline))}, "
            f"background {background(run)}; {settings}{device}; {own}"
            f"{results.taken(run)}"
        )

    @property
    def verdict(self) -> str:
        """A sentence per test and toggled arm; then the smallest effect that this machine could
        resolve, how the repeating ended, and further reasons for doubt."""
        toggle, baseline = self.run["result"]["toggle"], self.label(self.run["arms"][0])
        lines = []
        for row in self.summary().itertuples():
            if row.is_control:
                continue
            lines.append(
                f"{row.test}: {f'{toggle} {baseline}'.strip()} -> {row.label}: {row.verdict}, "
                f"{row.speedup:.3f}x (95% CI {stats.interval(row.low, row.high)}, n={row.n}, "
                f"A/A band {stats.interval(row.band_low, row.band_high)}); {row.answer}"
            )
        for test in self.run["tests"]:
            same = "does what the baseline does"
            lines += [f"{test}: {arm} {same}: {why}" for arm, why in self._idle(test).items()]
        lines += joules.lines(self.run)
        lines += pace.Noted.of(self.run).lines()
        # of a run that was repeated until its intervals were narrow
        asked = self.run["result"].get("until")
        ends = {
            test: RepeatEnd(**ended) for test, ended in (asked or {"tests": {}})["tests"].items()
        }
        lines += resolution.lines(self.summary(), ends)
        lines += [f"{test}: {ended.line()}" for test, ended in ends.items()]
        control = self.answer(self.run["arms"][-1]["name"])
        if control is not None and not control.holds:
            lines.append(f"the A/A control's own answer is {control}: the engine is not repeatable")
        for test, warm in self.run["result"]["warm_up"].items():
            if not (warm["stable"] or self.run["result"]["smoke"]):
                lines.append(f"{test}: times had not settled after {warm['rounds']} warm-up rounds")
        if self.interrupted:
            cut = (
                f"before {stats.percent(asked['half_width'])} was reached"
                if asked
                else f"not every one of {self.run['repetitions']} rounds was run"
            )
            lines.append(f"interrupted: {cut}")
        return "\n".join(lines)

    def percentiles(self) -> Table:
        """How long single tokens took, a row per test and arm: see `results.percentiles`."""
        return results.percentiles(self.samples)

    def evidence(self) -> pd.DataFrame:
        """The commands of a step by test and arm: pattern, waits, copies, launches, bytes
        copied."""
        rows: list[dict[str, Any]] = [
            {"Test": test, "Arm": self.label(arm), "pattern": program["folded_pattern"]}
            | program["counts"]
            for test in self.run["tests"]
            for arm in self.run["arms"]
            if not arm["is_control"] and (program := arm["program"].get(test))
        ]
        return Table(rows).convert_dtypes().shown(code=["pattern"])

    def __repr__(self) -> str:
        shown = markdown(self.table(), terminal_columns())
        return f"{shown}\n\n{self.caption}\n{self.verdict}"

    def _repr_html_(self) -> str:
        lines = "<br>".join(html.escape(line) for line in self.verdict.splitlines())
        return (
            to_html(self.table())
            + f"<p><small>{html.escape(self.caption)}</small></p><p>{lines}</p>"
        )


class Comparisons(dict[str, AB], Framed):
    """Several comparisons on one engine, each an `AB` by the name of its toggle: what `wb.ab`
    returns for a list of names.

    found: the comparisons, each by the name of its toggle.
    left_out: a line for each toggle or value that was not compared, with the reason.

    `to_frame` has the rows of all of them, one after the other.
    """

    def __init__(self, found: Mapping[str, AB] = MappingProxyType({})):
        super().__init__(found)
        self.left_out: list[str] = []

    @property
    def interrupted(self) -> bool:
        """Whether the measuring of any of them ended early."""
        return any(one.interrupted for one in self.values())

    def to_frame(self) -> pd.DataFrame:
        """The rows of all comparisons; see `AB.to_frame`."""
        return pd.concat([one.to_frame() for one in self.values()], ignore_index=True)

    @property
    def verdict(self) -> str:
        """The sentences of all comparisons, then what was left out."""
        return "\n".join([*(one.verdict for one in self.values()), *self.left_out])

    def table(self) -> Table:
        """A row per toggle, test and toggled value: the columns of `AB.table`, with the A/A band in
        place of the control's row."""
        numbers = self.to_frame()
        numbers = numbers[~numbers["is_control"]].reset_index(drop=True)
        bounds = zip(numbers["low"], numbers["high"], strict=True)
        bands = zip(numbers["band_low"], numbers["band_high"], strict=True)
        return Table(
            {
                "Model": numbers["model"],
                "Toggle": numbers["toggle"],
                "Baseline": numbers["baseline"],
                "Toggled": numbers["label"],
                "Test": numbers["test"],
                "Speedup": numbers["speedup"],
                "95% CI": [stats.interval(*pair) for pair in bounds],
                "A/A band": [stats.interval(*pair) for pair in bands],
                "n": numbers["n"],
                "verdict": numbers["verdict"],
                "answer": numbers["answer"],
            }
        ).shown(groups=["Toggle"], keys=["Toggle", "Toggled", "Test"], digits={"Speedup": 3})

    def __repr__(self) -> str:
        return "\n".join([markdown(self.table(), terminal_columns()), "", *self.left_out]).rstrip()

    def _repr_html_(self) -> str:
        left = "<br>".join(map(html.escape, self.left_out))
        return to_html(self.table()) + (f"<p>{left}</p>" if left else "")


_COLUMNS = [
    "test", "arm", "label", "is_control", "tps_baseline", "tps_toggled", "speedup", "low", "high",
    "n", "band_low", "band_high", "verdict", "answer",
]  # fmt: skip
