"""`diff(before, after)`: what takes longer in one trace than in another, the largest change first.

Two traces of this package are aligned by op and layer. With a foreign trace the names of kernels
are all that both have. The host's time is aligned by its phases.
"""

from __future__ import annotations

import re
from os import PathLike, fspath
from typing import Protocol

import numpy as np
import pandas as pd

from workbench.common.errors import UsageError
from workbench.trace import analysis
from workbench.trace.imports.foreign import short_name
from workbench.trace.profile import Profile

BY = ("auto", "op", "node", "kernel")
COLUMNS = {
    # "device" or "host". The host's rows add up to its time in a step. Time between two steps is
    # no row: it is the caller's, or the trace's own, which reads marks there. Kernels that run
    # beside each other count in full, so the device's rows can be more than its time.
    "where": "str",
    "what": "str",  # op, node or kernel; a phase of the host; "no kernel runs"
    "layer": "Int64",  # of the op or node; <NA> without a layer
    "calls_before": "float64",  # in a step
    "calls_after": "float64",
    "us_before": "float64",  # in a step: the median of the steps
    "us_after": "float64",
    "delta_us": "float64",  # after less before
    "share": "float64",  # of the step's time before
}
FOREIGN = ("kineto", "nsys")  # collectors of traces that have no ops and layers of this package
IDLE = "no kernel runs"
_LAYER = re.compile(r"-(\d+)")  # `Qcur-8`, `attn_norm-8 (w)`


class OfEngines(Protocol):
    """A trace of several engines, or of one; what `%%wb_profile` binds is one."""

    def single(self, what: str) -> Profile:
        """The only profile. Raises UsageError where there is none, or several."""


Trace = Profile | OfEngines | str | PathLike[str]


def diff(before: Trace, after: Trace, by: str = "auto") -> pd.DataFrame:
    """Compares two traces. Returns a frame of what takes longer after than before.

    It has a row for each op of a layer, and for each phase of the host, the largest change first.
    `COLUMNS` lists the columns; `delta_us` above 0 is longer.

    before, after: profiles, what `%%wb_profile --as` binds, or paths that `Profile.load` reads.
    by: `op`: a row for an op of a layer. `node`: for a node. `kernel`: for a function of the
        device, with its template's arguments where both files are of one tool. `auto`: `op`, and
        `kernel` where a trace is foreign.

    Steps of the size that both traces have most often are compared, and times are medians of those
    steps. Without steps in both traces, times are sums of the whole trace. Both are traced times.

    `attrs`: `line` compares the steps in one line; `notes` has the source of each trace.

    Raises UsageError for another `by`, where one trace has steps and the other has none, where no
    steps are of one size, for a trace of several engines, and for a file that `Profile.load`
    refuses.
    """
    if by not in BY:
        raise UsageError(f"by={by!r} does not exist; choose one of {', '.join(BY)}")
    profiles = [_profile(p) for p in (before, after)]
    names = [fspath(p) if isinstance(p, str | PathLike) else "before" for p in (before, after)]
    names = ["after" if n and name == "before" else name for n, name in enumerate(names)]
    tools = [p.collector for p in profiles]
    if by == "auto":
        by = "kernel" if any(tool in FOREIGN for tool in tools) else "op"
    full = tools[0] == tools[1] or not any(tool in FOREIGN for tool in tools)
    frames = [p.to_frame() for p in profiles]
    sizes = _common_size(frames, names)
    sides = [_side(frame, size, by, full) for frame, size in zip(frames, sizes, strict=True)]
    (rows_before, step_before), (rows_after, step_after) = sides
    keys = ["where", "what", "layer"]
    table = rows_before.merge(rows_after, on=keys, how="outer", suffixes=("_before", "_after"))
    numbers = ["calls_before", "calls_after", "us_before", "us_after"]
    table[numbers] = table[numbers].astype("float64").fillna(0.0)
    table["delta_us"] = table["us_after"] - table["us_before"]
    table["share"] = table["delta_us"] / (step_before or np.nan)
    order = table["delta_us"].abs().sort_values(ascending=False, kind="stable").index
    table = table.loc[order, list(COLUMNS)].astype(COLUMNS).reset_index(drop=True)
    unit = "step" if sizes[0] is not None else "whole trace"
    table.attrs |= {
        "line": f"a {unit}, traced: {step_before:,.1f} us before, {step_after:,.1f} us after "
        f"({(step_after / step_before - 1) if step_before else 0:+.1%}){_largest(table)}",
        "notes": [p.note for p in profiles],
        "by": by,
        "names": names,
    }
    return table


def _largest(table: pd.DataFrame) -> str:
    if table.empty or not table["delta_us"].iloc[0]:
        return "; nothing changed"
    row = table.iloc[0]
    layer = "" if pd.isna(row["layer"]) else f", layer {row['layer']}"
    what = short_name(row["what"]) if "(" in row["what"] else row["what"]
    return f"; the largest change: {row['where']}, {what}{layer}, {row['delta_us']:+,.1f} us"


def _common_size(frames: list[pd.DataFrame], names: list[str]) -> list[int | None]:
    """For each trace the tokens of the steps to compare; None where no trace has steps."""
    counts = [analysis.step_sizes(frame)[1] for frame in frames]
    without = [name for name, count in zip(names, counts, strict=True) if count.empty]
    if len(without) == 2:
        return [None, None]
    if without:
        raise UsageError(
            f"the trace {without[0]} has no steps and the other has; name its steps: "
            "Profile.load(path, step='cudaGraphLaunch'), or the name of its ranges"
        )
    first, second = counts
    if 0 in first.index or 0 in second.index:  # a foreign trace does not say the size of its steps
        return [int(count.idxmax()) for count in counts]
    both = first.index.intersection(second.index)
    if both.empty:
        told = " and ".join(", ".join(map(str, count.index)) for count in counts)
        raise UsageError(f"no steps are of one size: the traces have steps of {told} tokens")
    size = int((first[both] + second[both]).idxmax())
    return [size, size]


def _side(frame: pd.DataFrame, size: int | None, by: str, full: bool) -> tuple[pd.DataFrame, float]:
    """The rows of one trace, with calls and us in a step; and the time of a step, us."""
    steps = frame[frame["category"] == "step"]
    if size is not None:
        steps = steps[steps["n_tokens"].fillna(0) == size]
        frame = frame[frame["step"].isin(steps["step"])]
    n = max(1, len(steps))
    device = frame[(frame["category"] == "device")].copy()
    launch = device["kind"] == "launch"
    if by == "kernel":
        named = device["kernel"].fillna(device["op"])
        device["what"] = named if full else named.map(short_name, na_action="ignore")
    else:
        device["what"] = device["op"]
        if by == "node":
            device["what"] = (
                device["op"] + " " + device["name"].str.replace(_LAYER, "", n=1, regex=True)
            )
    device["what"] = device["what"].where(launch, device["kind"]).fillna(device["name"])
    device["layer"] = pd.NA
    if by != "kernel":
        found = device["name"].str.extract(_LAYER, expand=False)
        device["layer"] = found.where(launch)
    device["layer"] = device["layer"].astype("Int64")
    rows = [_in_a_step(device, ["what", "layer"], n, size is None).assign(where="device")]
    gaps = analysis.gaps(frame).rename(columns={"traced_us": "dur_us"})
    if size is not None:
        gaps["dur_us"] -= gaps[analysis.OUTSIDE]
    if len(gaps):
        gaps = gaps.assign(what=IDLE, layer=pd.array([pd.NA] * len(gaps), dtype="Int64"))
        rows.append(_in_a_step(gaps, ["what", "layer"], n, size is None).assign(where="device"))
    if size is not None:
        host = analysis.phases(frame)
        host = host[host["part"] != analysis.OUTSIDE]
        rows.append(
            pd.DataFrame(
                {
                    "what": host["phase"] + " " + host["part"],
                    "layer": pd.array([pd.NA] * len(host), dtype="Int64"),
                    "calls": host["traced_calls_per_step"],
                    "us": host["traced_us_per_step"],
                    "where": "host",
                }
            )
        )
        us = float(steps["dur_us"].median())
    else:
        us = float((frame["start_us"] + frame["dur_us"]).max() - frame["start_us"].min())
    return pd.concat([part for part in rows if len(part)], ignore_index=True), us


def _in_a_step(rows: pd.DataFrame, keys: list[str], n_steps: int, whole: bool) -> pd.DataFrame:
    """For each group its calls and its us in a step; a step without the group counts as 0. whole:
    the trace has no steps, and is summed."""
    grouped = rows.groupby(keys, dropna=False, sort=False)["dur_us"]
    made = grouped.agg(calls="size", us="sum").reset_index()
    made["calls"] = made["calls"] / n_steps
    if whole:
        return made
    sums = rows.groupby([*keys, "step"], dropna=False, sort=False)["dur_us"].sum()
    medians = [
        float(np.median(np.concatenate((us, np.zeros(max(0, n_steps - len(us)))))))
        for _, us in sums.groupby(level=list(range(len(keys))), dropna=False, sort=False)
    ]
    return made.assign(us=medians)


def _profile(trace: Trace) -> Profile:
    if isinstance(trace, Profile):
        return trace
    if isinstance(trace, str | PathLike):
        return Profile.load(trace)
    if not hasattr(trace, "single"):
        raise UsageError(f"diff takes profiles or trace files, and no {type(trace).__name__}")
    return trace.single("diff")
