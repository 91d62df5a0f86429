"""The time of a traced run, by kernel, by phase of the host, and by gap of the device.

Frames in (`Timeline.to_frame`), frames out. Recording a span costs about as much as issuing a
command. So these figures say where the time goes, not how long an untraced run takes. Every column
with a time or a rate begins with `traced`.

    host    | launch a | launch b |        | launch c | wait ......|
    device       |- a -||- b -|    ^^^^^^^^^^^^  |- c -|
            <----> launch to start of a          a gap that the host caused: when it began, the
                                                 host had not issued c
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from workbench.common.errors import UsageError
from workbench.common.nearest import choices
from workbench.graph.ops import touched_bytes
from workbench.program.commands import Program, Replay
from workbench.trace.spans import HOST_LANE, LOGITS_WAIT, Span

BY = ("op", "node", "kernel")  # the things of which the kernel table has a row each
KERNELS = [
    "calls", "traced_us", "traced_us_per_step", "traced_us_per_call", "traced_share", "bytes",
    "traced_gbps", "traced_share_of_read", "traced_launch_to_start_us",
]  # fmt: skip
GAPS = ["step", "between", "before", "after", "traced_us", "host_us", "device_us"]
TOKENS, LAUNCHES = "steps", "launches"  # a gap lies between two of these
PYTHON, OUTSIDE = "python", "outside"  # within a step, between its commands; between steps
_LAYER = re.compile(r"-\d+")  # `Qcur-8`, `attn_norm-8 (w)`


def with_bytes(spans: Iterable[Span], program_of: Callable[[int], Program | None]) -> list[Span]:
    """The spans, where those of launches have `bytes`: the bytes that the node must move
    (`graph.ops`). Both the host's and the device's spans have them. Where the device ran several
    kernels for a launch, `bytes` counts for all of them together, and `kernels` is their number.

    program_of: the program of a step, or None.
    """
    spans = list(spans)
    known: dict[tuple[int, int, int], int] = {}  # program, position and part -> bytes
    n_kernels: dict[tuple[Any, Any, int], int] = {}
    for span in spans:
        if span.category == "device" and span.args.get("kind") == "launch":
            launch_key = span.args.get("step"), span.args.get("index"), span.args.get("part", -1)
            n_kernels[launch_key] = n_kernels.get(launch_key, 0) + 1
    found = []
    for span in spans:
        launch = span.category == "launch" or span.args.get("kind") == "launch"
        program = program_of(span.args.get("step", -1)) if launch else None
        if program is not None:
            index, part = span.args["index"], span.args.get("part", -1)
            key = id(program), index, part
            if key not in known:
                command = program.commands[index]
                launched = command.parts[part] if isinstance(command, Replay) else command
                known[key] = touched_bytes(launched.node)
            more: dict[str, Any] = {"bytes": known[key]}
            several = n_kernels.get((span.args["step"], index, part), 1)
            if span.category == "device" and several > 1:
                more["kernels"] = several
            span = span._replace(args=span.args | more)
        found.append(span)
    return found


# by kernel ---------------------------------------------------------------------------------------


def kernels(frame: pd.DataFrame, by: str = "op", read_gbps: float | None = None) -> pd.DataFrame:
    """The table of kernels. The row with the longest time is first.

    by: `op`: a row for each op. `node`: a row for each node of a layer (`Qcur` for `Qcur-0`,
        `Qcur-1`...). `kernel`: a row for each function that CUPTI saw.
    read_gbps: the read bandwidth of the device, GB/s.

    Columns:

    * step_tokens: tokens of the steps; a row belongs to steps of one size.
    * on: the backend that computed the row.
    * calls: launches in all steps (with `kernel`: kernels).
    * traced_us: time of all calls.
    * traced_us_per_step: time in a step: the median of the steps, so that one disturbed step does
      not decide. The next columns use this time.
    * traced_us_per_call, traced_share: time of a call; the share of all kernel time in a step.
    * bytes: bytes that the launches must move, by the op table. With `kernel` only where a launch
      is one kernel.
    * traced_gbps: bytes over time.
    * traced_share_of_read: of read_gbps, where that is given. It can pass 1 for weights that fit a
      cache, and for rows that a value-dependent op skips. A row of the host beside a device has
      none.
    * traced_launch_to_start_us: median time from the host's call to the kernel's start. A row that
      the host computes inside its own call has none.

    Raises UsageError for another `by`, and for `kernel` where no span names its function.
    """
    if by not in BY:
        raise UsageError(f"by={by!r} does not exist; {choices(by, BY)}")
    if by == "kernel" and not frame["kernel"].notna().any():
        raise UsageError("no span names its kernel: only CUPTI does; use by=op or by=node")
    rows = _launches(frame, by_kernel=by == "kernel")
    sizes, n_steps = step_sizes(frame)
    rows["step_tokens"] = rows["step"].map(sizes)
    rows["node"] = rows["name"].str.replace(_LAYER, "", n=1, regex=True)
    keys = {"op": ["op"], "node": ["op", "node"], "kernel": ["kernel", "op"]}[by]
    keys = ["step_tokens", *keys, "on"]
    grouped = rows.groupby(keys, sort=False, dropna=False)
    table = grouped.agg(
        calls=("dur_us", "size"),
        traced_us=("dur_us", "sum"),
        bytes=("bytes", lambda n: n.sum() if n.notna().all() else pd.NA),
        traced_launch_to_start_us=("launch_to_start_us", "median"),
    ).reset_index()
    table["bytes"] = table["bytes"].astype("Int64")
    n = table["step_tokens"].map(n_steps)
    us = table["traced_us_per_step"] = _step_medians(rows, keys, n_steps)
    table["traced_us_per_call"] = us * n / table["calls"]
    of_size = table.groupby("step_tokens", dropna=False)["traced_us_per_step"].transform("sum")
    table["traced_share"] = us / of_size
    gbps = table["bytes"].astype("Float64") / n / us.where(us > 0) / 1e3
    table["traced_gbps"] = gbps.astype("float64")
    # read_gbps is the bandwidth of the device's memory, and of the host's only without a device.
    own = (table["on"] != HOST_LANE) | (table["on"] == HOST_LANE).all()
    table["traced_share_of_read"] = table["traced_gbps"].where(own) / (read_gbps or np.nan)
    order = ["step_tokens", "traced_us_per_step"]
    table = table.sort_values(order, ascending=[True, False], kind="stable")
    made = table[[*keys, *KERNELS]].reset_index(drop=True)
    made.attrs |= frame.attrs | {"read_gbps": read_gbps}
    return made


def _launches(frame: pd.DataFrame, by_kernel: bool = False) -> pd.DataFrame:
    """A row for each launch that computed something, by start.

    Columns: step, index, name, op, on, kernel, start_us, dur_us (of its kernels together), end_us,
    bytes, issue_us (when the host's call began), launch_to_start_us.

    by_kernel: a row for each kernel instead; bytes only where a launch is one kernel.
    """
    host = frame[(frame["lane"] == HOST_LANE) & frame["category"].isin(["launch", "replay"])]
    device = frame[(frame["category"] == "device") & frame["kind"].isin(["launch", "replay"])]
    # A plan is one launch without an op where the device does not tell its parts apart.
    one = device["kind"] == "launch"
    device = device.assign(op=device["op"].where(one, "replay"), bytes=device["bytes"].where(one))
    command = ["step", "index"]
    launch = [*command, "part"]
    if not by_kernel:
        end = (device["start_us"] + device["dur_us"]).rename("end_us")
        device = device.assign(end_us=end)
        device = device.groupby(launch, sort=False, as_index=False, dropna=False)
        device = device.agg(
            name=("name", "first"), op=("op", "first"), kernel=("kernel", "first"),
            lane=("lane", "first"), start_us=("start_us", "min"), dur_us=("dur_us", "sum"),
            end_us=("end_us", "max"), bytes=("bytes", "first"),
        )  # fmt: skip
    else:
        alone = device.groupby(launch, dropna=False)["index"].transform("size") == 1
        device = device.assign(
            end_us=device["start_us"] + device["dur_us"], bytes=device["bytes"].where(alone)
        )
    calls = host.set_index(command)["start_us"]
    calls = calls[~calls.index.duplicated()]
    issued = pd.MultiIndex.from_frame(device[command]).map(calls)
    device = device.assign(issue_us=np.asarray(issued, "float64"))
    device["launch_to_start_us"] = device["start_us"] - device["issue_us"]
    # A launch on the host has no device span: it ran inside the host's call. A launch on a device
    # without a device span was not recorded.
    inside = host[host["on"].str.startswith("host ", na=False) & (host["category"] == "launch")]
    inside = inside.assign(
        lane=HOST_LANE, end_us=inside["start_us"] + inside["dur_us"],
        issue_us=inside["start_us"], launch_to_start_us=np.nan,
    )  # fmt: skip
    columns = [
        *command, "name", "op", "kernel", "lane", "start_us", "dur_us", "end_us", "bytes",
        "issue_us", "launch_to_start_us",
    ]  # fmt: skip
    parts = [part[columns] for part in (device, inside) if len(part)]
    rows = pd.concat(parts) if parts else device[columns]
    rows = rows.sort_values("start_us", kind="stable", ignore_index=True)
    rows["on"] = rows["lane"].str.replace(r" stream \d+$", "", regex=True)
    return rows


def step_sizes(frame: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The tokens of each step, by the step's number; and the number of steps, by tokens. 0 where a
    trace does not say how many tokens a step had."""
    steps = frame[frame["category"] == "step"].set_index("step")["n_tokens"].fillna(0)
    steps = steps[~steps.index.duplicated()]
    return steps, steps.groupby(steps).size()


def _step_medians(rows: pd.DataFrame, keys: list[str], n_steps: pd.Series) -> pd.Series:
    """For each group of rows, in the order in which groups appear: the median over steps of the
    group's time in a step, us. A step without the group counts as 0. An unknown time (NaN) does not
    count.

    keys: the columns that make a group; the first is step_tokens.
    n_steps: number of steps, by step_tokens.
    """
    sums = rows.groupby([*keys, "step"], sort=False, dropna=False)["dur_us"].sum(min_count=1)
    medians = []
    for key, us in sums.groupby(level=list(range(len(keys))), sort=False, dropna=False):
        n = int(n_steps.get(key[0], len(us)))
        padded = np.concatenate((us.to_numpy(), np.zeros(max(0, n - len(us)))))
        medians.append(float(np.nanmedian(padded)) if np.isfinite(padded).any() else np.nan)
    return pd.Series(medians, dtype="float64")


# by phase of the host ----------------------------------------------------------------------------

# The phases of a step. Every command before the host's last wait belongs to `issue`.
BUILD, ISSUING, RESULTS, REST = "build", "issue", "results", "rest"
PHASES = ["phase", "part", "traced_calls_per_step", "traced_us_per_step", "traced_share"]


def phases(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of the host's time in a step: the median of the steps of one size (step_tokens).

    Values of phase and part:

    * `build`: a phase of `engine/look/phases.py`.
    * `issue`: the kind of command.
    * `results`: the kind of command: the wait for the logits, or the read.
    * `rest`: `python`, the time between the commands, recording included; or `outside`, the time
      from the end of the step to the start of the next step: the caller, and reading the device's
      clocks.

    traced_share: of the time from the start of a step to the start of the next step.
    """
    sizes, n_steps = step_sizes(frame)
    host = frame[(frame["lane"] == HOST_LANE) & frame["step"].isin(sizes.index)]
    steps = host[host["category"] == "step"]
    leaves = host[(host["category"] == "build") | (host["index"].notna())].copy()
    build = leaves["category"] == "build"
    last = (leaves["name"] == LOGITS_WAIT) | (leaves["category"] == "read")
    leaves["phase"] = np.where(build, BUILD, np.where(last, RESULTS, ISSUING))
    leaves["part"] = leaves["name"].where(build, leaves["category"])
    rest = steps.set_index("step")["dur_us"] - leaves.groupby("step")["dur_us"].sum()
    follows = steps["start_us"].shift(-1) - (steps["start_us"] + steps["dur_us"])
    extra = [
        pd.DataFrame({"step": steps["step"], "phase": REST, "part": part, "dur_us": us})
        for part, us in ((PYTHON, rest.to_numpy()), (OUTSIDE, follows.to_numpy()))
    ]
    rows = pd.concat([leaves[["step", "phase", "part", "dur_us"]], *extra], ignore_index=True)
    rows["step_tokens"] = rows["step"].map(sizes)
    table = rows.groupby(["step_tokens", "phase", "part"], sort=False).agg(
        calls=("dur_us", "count")
    )
    table = table.reset_index()
    n = table["step_tokens"].map(n_steps)
    table["traced_us_per_step"] = _step_medians(rows, ["step_tokens", "phase", "part"], n_steps)
    calls = table["calls"].where(table["phase"] != REST)
    table["traced_calls_per_step"] = calls / n
    of_step = table.groupby("step_tokens")["traced_us_per_step"].transform("sum")
    table["traced_share"] = table["traced_us_per_step"] / of_step
    order = {name: n for n, name in enumerate((BUILD, ISSUING, RESULTS, REST))}
    table = table.sort_values(
        ["step_tokens", "phase"], key=lambda c: c.map(order) if c.name == "phase" else c,
        kind="stable", ignore_index=True,
    )  # fmt: skip
    made = table[["step_tokens", *PHASES]]
    made.attrs |= frame.attrs
    return made


# by gap of the device ----------------------------------------------------------------------------


def gaps(frame: pd.DataFrame) -> pd.DataFrame:
    """The table of gaps: a row for each time between two kernels in which no device ran a kernel.

    The kernel before a gap is the kernel that ended last, on any stream.

    * step: of the kernel after the gap.
    * between: `steps` where the kernel before the gap belongs to another step, else `launches`.
    * before, after: ops of the two kernels.
    * traced_us: length of the gap.
    * host_us: the part of the gap before the host's call of the next kernel began. The device had
      nothing to do.
    * device_us: the rest of the gap. The host had called the next kernel.
    * a column for each kind of host span (`build`, `write`, `copy`, `sync`, ...): the host's time
      in the gap.
    * python: the host's time in the gap between the commands of a step.
    * outside: the host's time in the gap between two steps.

    All times are in us. From the first kind to `outside` they add up to traced_us.

    Kernels of the host backend do not count. Empty where there are no device spans.
    """
    rows = _launches(frame)
    rows = rows[rows["on"] != HOST_LANE].reset_index(drop=True)
    reached = rows["end_us"].cummax()
    latest = rows.index.to_series().where(rows["end_us"] == reached).ffill()
    gap = rows[rows["start_us"] > reached.shift()]
    begun = reached.shift()[gap.index]
    before = rows.loc[latest.shift()[gap.index]]
    issued = (gap["issue_us"] - begun).clip(lower=0)
    made = pd.DataFrame(
        {
            "step": gap["step"],
            # A trace may have no steps.
            "between": np.where(
                before["step"].fillna(-1).to_numpy() != gap["step"].fillna(-1), TOKENS, LAUNCHES
            ),
            "before": before["op"].to_numpy(),
            "after": gap["op"],
            "traced_us": gap["start_us"] - begun,
        },
        columns=GAPS,
    )
    made["host_us"] = np.minimum(issued.fillna(0), made["traced_us"])
    made["device_us"] = made["traced_us"] - made["host_us"]
    for kind, us in _meanwhile(frame, begun.to_numpy(), gap["start_us"].to_numpy()).items():
        made[kind] = us
    made.attrs |= frame.attrs
    return made.reset_index(drop=True)


def _meanwhile(frame: pd.DataFrame, begin: np.ndarray, end: np.ndarray) -> dict[str, np.ndarray]:
    """The host's time in each of the intervals begin..end (us, in order, disjoint): kind -> us."""
    host = frame[frame["lane"] == HOST_LANE]
    leaves = host[(host["category"] == "build") | host["index"].notna()]
    found: dict[str, np.ndarray] = {}
    for kind, part in leaves.groupby("category", sort=False):
        found[str(kind)] = _covered(part, begin, end)
    steps = _covered(host[host["category"] == "step"], begin, end)
    found[PYTHON] = np.clip(steps - sum(found.values(), np.zeros(len(begin))), 0, None)
    found[OUTSIDE] = np.clip(end - begin - steps, 0, None)
    return found


def _covered(spans: pd.DataFrame, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How much of each interval begin..end the spans cover, us. The spans do not overlap."""
    if spans.empty:
        return np.zeros(len(begin))
    starts = spans["start_us"].to_numpy()
    ends = starts + spans["dur_us"].to_numpy()
    done = np.concatenate(([0.0], np.cumsum(ends - starts)))
    # the time covered so far grows within a span, and stands still between two
    at, covered = np.column_stack((starts, ends)).ravel(), np.repeat(done, 2)[1:-1]
    return np.interp(end, at, covered) - np.interp(begin, at, covered)


def busy_us(spans: pd.DataFrame) -> float:
    """The time that at least one of the spans covers, us; NaN where there are no spans."""
    if spans.empty:
        return np.nan
    ordered = spans.sort_values("start_us")
    starts = ordered["start_us"].to_numpy()
    ends = starts + ordered["dur_us"].to_numpy()
    # A span adds the time by which it ends after all spans before it.
    reached = np.concatenate(([starts[0]], np.maximum.accumulate(ends)[:-1]))
    return float(np.clip(ends - np.maximum(starts, reached), 0, None).sum())
