"""Tables of comparisons: those of `compare-llama-bench.py`, with intervals, verdicts and answers.

Comparisons go in (`wb.ab(...)`, or `AB.load(folder)` from a run folder), frames come out. All
numbers are the comparison's own (`AB.summary`). Only the geometric mean is computed here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import interval
from workbench.common.tables import Table, markdown, show

__all__ = [
    "GEOMETRIC_MEAN", "in_short", "markdown", "provenance",
    "show", "speedup_table", "summary",
]  # fmt: skip
GEOMETRIC_MEAN = "geometric mean"
# the origin of a comparison: column of the speedup table -> column of `summary`
ORIGIN = {
    "Model": "model", "Device": "device", "Toggle": "toggle", "Baseline": "baseline",
    "Background": "background", "Settings": "settings", "Commit": "commit", "Date": "date",
}  # fmt: skip
# left out of the speedup table where the value is the same in every row
IF_VARYING = (*ORIGIN, "answer")


def summary(*comparisons: AB) -> pd.DataFrame:
    """The summaries of several comparisons as one frame of numbers, with the origin of each row.

    Columns: those of `AB.to_frame()`, but settings only as far as the comparisons differ in them,
    toggle empty where sets are compared, so that a comparison's rows agree in it, and comparison
    (its number). Rows of one device stand together, devices
    in the order in which they come.
    """
    settings = _settings([comparison.run for comparison in comparisons])
    parts = [
        one.to_frame().assign(
            toggle=one.run["result"]["toggle"], settings=settings[n], comparison=n
        )
        for n, one in enumerate(comparisons)
    ]
    if not parts:
        return pd.DataFrame()
    table = pd.concat(parts, ignore_index=True)
    order = {device: n for n, device in enumerate(dict.fromkeys(table["device"]))}
    return table.sort_values("device", key=lambda d: d.map(order), kind="stable", ignore_index=True)


def speedup_table(*comparisons: AB) -> pd.DataFrame:
    """The speedup table of one or more comparisons: a row per test and toggled arm.

    Columns: those of ORIGIN that vary, then Test, Toggled, t/s baseline, t/s toggled, Speedup, 95%
    CI, n, verdict, and answer where it varies. An arm with several tests has its geometric mean in
    a row at the end of its comparison. The A/A controls have rows, too. `attrs["constant"]` has the
    columns left out. `attrs["groups"]` tells one comparison from another: a table that is too wide
    becomes one table for each.
    """
    numbers = summary(*comparisons)
    rows = []
    for _, part in numbers.groupby("comparison", sort=False) if len(numbers) else ():
        rows += [_row(row) for row in part.to_dict("records")]
        for label, arm in part[~part["is_control"]].groupby("label", sort=False):
            if len(arm) > 1:
                mean = math.exp(np.log(arm["speedup"]).mean())
                own = _row(arm.iloc[0].to_dict())
                rows.append(
                    {name: own[name] for name in ORIGIN}
                    | {"Test": GEOMETRIC_MEAN, "Toggled": label, "Speedup": f"{mean:.3f}"}
                )
    columns = [
        *ORIGIN, "Test", "Toggled", "t/s baseline", "t/s toggled", "Speedup", "95% CI", "n",
        "verdict", "answer",
    ]  # fmt: skip
    table = _without_constants(Table(rows, columns=columns).fillna(""))
    table.attrs |= {
        "groups": [name for name in ORIGIN if name in table],
        "keys": [name for name in (*ORIGIN, "Test", "Toggled") if name in table],
    }
    return table


class Short(NamedTuple):
    """Rows of comparisons with one baseline and the same settings.

    shared: what all rows have: test, baseline, settings.
    rows: columns `test` where it varies, `toggled`, `speedup` with its interval, `verdict`.
    """

    shared: str
    rows: pd.DataFrame


class Beside(NamedTuple):
    """Comparisons of one model beside one background, in short. The A/A controls have no rows."""

    model: str
    background: str
    parts: list[Short]


def in_short(*comparisons: AB) -> list[Beside]:
    """The comparisons in short, an entry for each model and background, in their order."""
    numbers, found = summary(*comparisons), []
    if not len(numbers):
        return []
    named = [c.assigned for c in comparisons]
    shown = numbers[~numbers["is_control"]]
    for (model, beside), part in shown.groupby(["model", "background"], sort=False):
        own = part.groupby(["settings", "toggle", "baseline"], sort=False)
        parts = [_short(rows, named) for _, rows in own]
        found.append(Beside(str(model), str(beside), parts))
    return found


def _short(part: pd.DataFrame, named: Sequence[Callable[[str], str]]) -> Short:
    """named: of each comparison, a label to the toggles that it stands for."""
    first = part.iloc[0]
    rows = pd.DataFrame([
        {
            "test": row["test"], "toggled": named[row["comparison"]](row["label"]),
            "speedup": f"{row['speedup']:.3f} ({interval(row['low'], row['high'])})",
            "verdict": row["verdict"],
        }
        for row in part.to_dict("records")
    ])  # fmt: skip
    against = f"against {named[first['comparison']](first['baseline'])}"
    tests = rows["test"].unique()
    if len(tests) == 1:
        rows = rows.drop(columns="test")
    shared = (tests[0] if len(tests) == 1 else "", against, first["settings"])
    return Short("; ".join(filter(None, shared)), rows)


def _settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings of each run's engine that the runs differ in."""
    configs = [(run.get("engine") or {}).get("config") or {} for run in runs]
    names = dict.fromkeys(name for config in configs for name in config if name != "device")
    differ = [n for n in names if len({str(config.get(n)) for config in configs}) > 1]
    return [", ".join(f"{n}={config[n]}" for n in differ if n in config) for config in configs]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[ORIGIN[name]] for name in ORIGIN},
        "Test": row["test"],
        "Toggled": row["label"],
        "t/s baseline": f"{row['tps_baseline']:.2f}",
        "t/s toggled": f"{row['tps_toggled']:.2f}",
        "Speedup": f"{row['speedup']:.3f}",
        "95% CI": interval(row["low"], row["high"]),
        "n": str(row["n"]),
        "verdict": row["verdict"],
        "answer": row["answer"],
    }


def _without_constants(table: Table) -> Table:
    """Leaves out the columns of IF_VARYING that have one value in all rows that have a value."""
    constant = {}
    for column in IF_VARYING:
        values = [v for v in dict.fromkeys(table[column]) if v != ""]
        if len(values) <= 1:
            constant[column] = values[0] if values else ""
    made = table.drop(columns=list(constant))
    made.attrs["constant"] = constant
    return made


def provenance(run: Mapping[str, Any]) -> pd.DataFrame:
    """The facts that a reader needs to judge a run or to repeat it: columns `what` and `value`.

    run: run.json as a dict. A missing key is shown as `unknown`.
    """
    commit, model, engine = (run.get(k) or {} for k in ("commit", "model", "engine"))
    machine, versions = run.get("machine") or {}, run.get("versions") or {}
    cpu = machine.get("cpu") or {}
    gpus = [
        f"{g.get('name')}, driver {g.get('driver')}, clocks {g.get('clock_mhz')} MHz, "
        f"throttle reasons {g.get('throttle_reasons')}"
        for g in machine.get("gpus") or []
    ]
    dirty = {True: " with uncommitted changes", False: "", None: " (state unknown)"}
    rows = {
        "run": f"{run.get('run_id', 'unknown')} ({run.get('status', 'unknown')})",
        "started": f"{run.get('started', 'unknown')}, took {run.get('duration_s', 'unknown')} s",
        "command": " ".join(map(str, run.get("command") or ["unknown"])),
        "commit": f"{commit.get('hash', 'unknown')}{dirty[commit.get('dirty')]}",
        "model": f"{model.get('name')} {model.get('quant')}, {model.get('file')}",
        "model hash": model.get("hash", "unknown"),
        "device": f"{_device(run)} ({engine.get('device_reason', 'unknown')})",
        "engine": ", ".join(f"{k}={v}" for k, v in (engine.get("config") or {}).items()),
        "seed": run.get("seed", "unknown"),
        "CPU": f"{cpu.get('name')}, {cpu.get('usable_cores')} of {cpu.get('cores')} cores, "
        f"governor {cpu.get('governor')}",
        "GPU": "; ".join(gpus) or "none",
        "load average": machine.get("load_average"),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v is not None),
    }
    return Table({"what": list(rows), "value": [str(v) for v in rows.values()]})


def _device(run: Mapping[str, Any]) -> str:
    engine = run.get("engine") or {}
    return str(engine.get("device_description") or engine.get("device") or "unknown")
