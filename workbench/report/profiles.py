"""A profile for reading: the time of untraced steps, and tables of the parts of traced steps.

A column with traced figures is named `traced ...`. Frames go in, frames of text come out. Nothing
is measured here.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.common.tables import Table
from workbench.engine.look.phases import OF_STEPS, PHASES
from workbench.trace.analysis import LAUNCHES, TOKENS
from workbench.trace.spans import HOST_LANE

BEHIND = "from the end of the step before to this one's, by the device's stamps"
SINGLE = "from the first kernel to the end of the last, by the device's stamps"
BY_HOST = "by the host's clock: nothing here runs beside the host"
# phase of the engine's counters -> phase and part of the traced table
COUNTED = {
    **{name: ("build", name) for name in PHASES if name not in OF_STEPS},
    "issue": ("issue", "all"), "wait": ("results", "all"),
}  # fmt: skip


def steps_table(steps: pd.DataFrame) -> Table:
    """A row for each size of step, untraced: the number of steps; then medians and quartiles in us
    of a step's time, the time without a kernel before it, and the time of its kernels.

    steps: `times.profiling.step_times`. The first step of a test has no step before it. A test
    of one step is measured from its first kernel to its last. A device without stamps is measured
    by the host's clock.
    """
    rows = []
    for n_tokens, part in steps.groupby("n_tokens"):
        us, how = part["step_us"].dropna(), BEHIND
        if us.empty:
            us, how = part["kernels_us"].dropna(), SINGLE
        if us.empty:
            us, how = part["host_us"], BY_HOST
        rows.append(
            {
                "step": _step(int(str(n_tokens))),
                "n": len(us),
                "untraced us": _spread(us),
                "untraced gap us": _spread(part["gap_us"].dropna()),
                "untraced kernels us": _spread(part["kernels_us"].dropna()),
                "measured": how,
            }
        )
    return _table(rows, ["step"])


def kernels_table(kernels: pd.DataFrame, n_steps: Mapping[int, int]) -> Table:
    """`Profile.kernels` for reading, by step. n_steps: traced steps, by their tokens.

    traced % read: of the read bandwidth. traced launch us: from the host's call to the start.
    """
    several = kernels["step_tokens"].nunique() > 1
    rows = []
    for row in kernels.to_dict("records"):
        steps = n_steps[row["step_tokens"]]
        rows.append(
            ({"step": _step(row["step_tokens"])} if several else {})
            | {name: row[name] for name in ("kernel", "op", "node") if name in row}
            | {"op": f"{row['op']} (host)" if row["on"] == HOST_LANE else row["op"]}
            | {
                "calls": _count(row["calls"] / steps),
                "traced us": _us(row["traced_us_per_step"]),
                "traced %": _percent(row["traced_share"]),
                "traced GB/s": _us(row["traced_gbps"]),
                "traced % read": _percent(row["traced_share_of_read"]),
                "traced launch us": _us(row["traced_launch_to_start_us"]),
            }
        )
    names = ("step", "kernel", "op", "node")
    return _table(rows, [name for name in names if rows and name in rows[0]])


def phases_table(phases: pd.DataFrame, untraced: pd.DataFrame) -> Table:
    """`Profile.phases` for reading, with the engine's own counters for untraced steps.

    untraced: a row for each untraced step (`times.profiling.counted_steps`); medians are shown.
    """
    several = phases["step_tokens"].nunique() > 1
    medians = untraced.groupby("n_tokens").median()
    known = {
        (n_tokens, *COUNTED[name]): us for name in medians for n_tokens, us in medians[name].items()
    }
    rows = []
    for (tokens, phase), part in phases.groupby(["step_tokens", "phase"], sort=False):
        parts = part.to_dict("records")
        if (phase, "all") in COUNTED.values():
            columns = ["traced_calls_per_step", "traced_us_per_step", "traced_share"]
            parts = [{"part": "all", **part[columns].sum().to_dict()}, *parts]
        for one in parts:
            us = known.get((tokens, phase, one["part"]))
            rows.append(
                ({"step": _step(tokens)} if several else {})
                | {
                    "phase": phase,
                    "part": one["part"],
                    "untraced us": "" if us is None else _us(us),
                    "calls": _count(one["traced_calls_per_step"]),
                    "traced us": _us(one["traced_us_per_step"]),
                    "traced %": _percent(one["traced_share"]),
                }
            )
    return _table(rows, ["step", "phase", "part"] if several else ["phase", "part"])


def gaps_table(gaps: pd.DataFrame, n_steps: int) -> Table:
    """`Profile.gaps` for reading: a column for the gaps between steps, and a column for the gaps
    between the launches of a step; empty without gaps. Each column shows the median step, ordered
    by the time without a kernel, so that its parts add up. n_steps: how many were traced."""
    if gaps.empty:
        return Table()
    kinds = [c for c in gaps.columns if c not in ("step", "between", "before", "after")]
    words = {
        "traced_us": "all", "host_us": "until the host had issued the next",
        "device_us": "the next on its way",
        "outside": "meanwhile outside of steps: the caller, and the trace",
    }  # fmt: skip
    columns: dict[str, list[str]] = {}
    for between in (TOKENS, LAUNCHES):
        part = gaps[gaps["between"] == between]
        steps = part.groupby("step")[kinds].sum().sort_values("traced_us")
        # steps without a gap between launches count; the first step has no gap before it
        n_without = n_steps - len(steps) if between == LAUNCHES else 0
        middle = (len(steps) + n_without - 1) // 2 - n_without
        own = part[part["step"] == steps.index[middle]] if middle >= 0 and len(steps) else part[:0]
        columns[f"between {between}"] = [_count(len(own)), *(_us(us) for us in own[kinds].sum())]
    names = ["gaps (count)", *(words.get(kind, f"meanwhile the host: {kind}") for kind in kinds)]
    return Table({"traced us": names} | columns)


def n_steps_by_tokens(frame: pd.DataFrame) -> dict[int, int]:
    """The number of steps of each size in a trace. frame: `Profile.to_frame`."""
    steps = frame[frame["category"] == "step"]
    return {int(n): int(k) for n, k in steps.groupby("n_tokens").size().items()}


def lines(found: Any, by: str = "op") -> list[tuple[str, Table]]:
    """The tables of a profile, each under its title. found: a `Profiled`."""
    trace, read = found.trace, found.read
    sizes = n_steps_by_tokens(trace.to_frame())
    slower = trace.slowdown
    cost = f"{slower.ratio:.2f} times as slow as untraced" if slower else "slowdown unknown"
    first, n = found.window
    traced = f"traced, {cost}; steps {first} to {first + n - 1}"
    each = f"{traced}; a step's median"
    steps = steps_table(found.steps)
    measured = "; ".join(dict.fromkeys(steps.pop("measured")))
    kernels, gaps = trace.kernels(by, read.gbps), trace.gaps()
    cached = "; above 100 %: from a cache" if (kernels["traced_share_of_read"] > 1).any() else ""
    why = "" if found.stamped else ", for nothing here runs beside the host"
    none = "" if len(gaps) else f": none{why}"
    how = f"{found.repetitions} repetitions, median (quartiles), {measured}"
    return [
        (f"{found.test}: untraced, {how}", steps),
        (f"Kernels ({each}; {read.note}{cached})", kernels_table(kernels, sizes)),
        (f"The host ({each})", phases_table(trace.phases(), found.phases)),
        (
            f"Time in which no kernel runs ({traced}; the step in the middle){none}",
            gaps_table(gaps, sum(sizes.values())),
        ),
    ]


def _table(rows: list[dict[str, Any]], keys: list[str]) -> Table:
    return Table(rows).shown(groups=[k for k in keys[:-1] if k == "step"], keys=keys)


def _step(n_tokens: int) -> str:
    return "token" if n_tokens == 1 else f"ubatch of {n_tokens}"


def _us(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.1f}"


def _percent(value: float) -> str:
    return "" if pd.isna(value) else f"{100 * value:.1f}"


def _count(value: float) -> str:
    return "" if pd.isna(value) else f"{value:g}" if value == round(value) else f"{value:.1f}"


def _spread(us: pd.Series) -> str:
    """`85.4 (83.7..89.5)`: the median, and the quartiles."""
    if us.empty:
        return ""
    low, middle, high = us.quantile([0.25, 0.5, 0.75])
    return f"{_us(middle)} ({_us(low)}..{_us(high)})"
