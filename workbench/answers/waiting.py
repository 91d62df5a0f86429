"""Where the device waits in a token, and for whom: traced, by cause; untraced, by part.

    host     [build][write][copy][sync]  [launch][launch]         [sync ......][read]
    device                 [copy]              [== a ==]  [== b ==][copy]
             |build |issue |copies |wait|issue|lat|       |latency|copies|

At every moment between two kernels the device waits for one cause. A copy in flight on the device
comes first. Then, until the host's call of the next kernel: the host builds, waits, copies or
issues. After the call what is left is the latency of the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

import workbench as wb
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.compare.stats import median_interval
from workbench.benchmarks.times.overlap import measure_overlap
from workbench.benchmarks.times.token_parts import PARTS, medians_us, slow_host, token_parts
from workbench.common.tables import Table
from workbench.config import BEST, TogglePreset, Toggles
from workbench.config.toggles import names_that_differ
from workbench.trace.profile import Profile
from workbench.trace.spans import HOST_LANE

WORKS = "the device computes"
BUILDS, ISSUES, WAITS, COPIES, LATENCY = CAUSES = (
    "the host builds", "the host issues", "the host waits", "bytes are copied", "a launch begins",
)  # fmt: skip
OUTSIDE = "between steps"  # the caller, and reading the device's clocks: not in an untraced token
BASELINE, CONTROL = "baseline", "baseline (A/A)"
KERNELS = ("launch", "replay")
# rows of `parts_table`
RUN, BETWEEN, LOGITS, HOST, TOKEN = (
    "kernels run", "between kernels", "last kernel to logits", "logits to first kernel", "a token",
)  # fmt: skip


def arms(engine: wb.Engine, changes: str = "") -> dict[str, Toggles]:
    """The engine's own toggles as the baseline; and the same with `changes` (`sync=packed`), or,
    without any, what `best` has on the engine's device. Raises UsageError for an unknown toggle."""
    other = switched(engine.toggles, changes) if changes else TogglePreset(BEST)
    return {BASELINE: engine.toggles, changes or BEST: engine.resolve(other)}


def sets(arms: Mapping[str, Toggles]) -> str:
    """The arms as sets of toggles, for `wb.ab`, by their names: each has the toggles in which arms
    differ."""
    names = names_that_differ(*arms.values())
    return " | ".join(
        f"{arm}: {' '.join(f'{name}={toggles.value_of(name)}' for name in names)}"
        for arm, toggles in arms.items()
    )


# traced: for whom ---------------------------------------------------------------------------------


def causes(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each traced token: us in which the device computes, in which it waits for each
    cause, and OUTSIDE.

    frame: of `Profile.to_frame`. A token lasts from its first kernel to the first kernel of the
    next, so the last traced step has no row.
    """
    host, device = frame[frame["lane"] == HOST_LANE], frame[frame["category"] == "device"]
    kernels = device[device["kind"].isin(KERNELS)].sort_values("start_us", kind="stable")
    begins = kernels.groupby("step")["start_us"].min().sort_values()
    if len(begins) < 2:
        return pd.DataFrame(columns=[WORKS, *CAUSES, OUTSIDE])
    command = ["step", "index"]
    calls = host[host["category"].isin(KERNELS)].groupby(command)["start_us"].min()
    called = np.asarray(pd.MultiIndex.from_frame(kernels[command]).map(calls), float)
    leaves = host[(host["category"] == "build") | host["index"].notna()]
    at = _moments(pd.concat([device, leaves, host[host["category"] == "step"]]), begins, called)
    middle = (at[1:] + at[:-1]) / 2
    starts = kernels["start_us"].to_numpy()
    following = np.minimum(np.searchsorted(starts, middle), len(starts) - 1)
    due = called[following] > middle  # the host has not called the next kernel yet
    during = {
        kind: _during(middle, leaves[leaves["category"] == kind])
        for kind in ("build", "sync", "copy")
    }
    cause = np.select(
        [
            _during(middle, kernels), _during(middle, device[device["kind"] == "copy"]),
            due & during["build"], due & during["sync"], due & during["copy"],
            due & _during(middle, host[host["category"] == "step"]), due,
        ],
        [WORKS, COPIES, BUILDS, WAITS, COPIES, ISSUES, OUTSIDE],
        LATENCY,
    )  # fmt: skip
    token = begins.index[np.searchsorted(begins.to_numpy(), middle, side="right") - 1]
    found = pd.DataFrame({"step": token, "cause": cause, "us": np.diff(at)})
    made = found.pivot_table(index="step", columns="cause", values="us", aggfunc="sum")
    return made.reindex(columns=[WORKS, *CAUSES, OUTSIDE]).fillna(0.0).rename_axis(columns=None)


def _moments(spans: pd.DataFrame, begins: pd.Series, called: np.ndarray) -> np.ndarray:
    """Every moment at which something begins or ends, from the first token to the last, us."""
    ends = spans["start_us"] + spans["dur_us"]
    edges = np.concatenate([spans["start_us"], ends, called[np.isfinite(called)]])
    first, last = begins.iloc[0], begins.iloc[-1]
    return np.unique(np.concatenate([edges[(edges > first) & (edges < last)], [first, last]]))


def _during(moments: np.ndarray, spans: pd.DataFrame) -> np.ndarray:
    """Whether a span lies around each moment, bool."""
    begun = np.searchsorted(np.sort(spans["start_us"].to_numpy()), moments)
    ended = np.searchsorted(np.sort((spans["start_us"] + spans["dur_us"]).to_numpy()), moments)
    return np.asarray(begun > ended)


def whom(traces: Mapping[str, Profile]) -> pd.DataFrame:
    """The medians over the tokens of `causes`, us: a row for each arm, by its name. For
    `plots.shares`."""
    rows = {name: causes(trace.to_frame()).median() for name, trace in traces.items()}
    made = pd.DataFrame(rows).T[[WORKS, *CAUSES]]
    made.attrs = {"unit": "us, traced", "x": "share of a traced token"}
    return made


def whom_table(waits: pd.DataFrame) -> Table:
    """For each cause: us of a traced token, and the share of all the device's waiting, by arm."""
    waiting = waits[list(CAUSES)].sum(axis=1)
    rows = []
    for cause in (WORKS, *CAUSES):
        row: dict[str, Any] = {"": cause}
        for arm, us in waits[cause].items():
            row[f"{arm}, traced us"] = us
            row[f"{arm}, of the waiting"] = "" if cause == WORKS else f"{us / waiting[arm]:.0%}"
        rows.append(row)
    shares = [f"{arm}, of the waiting" for arm in waits.index]
    digits = {f"{arm}, traced us": 1 for arm in waits.index}
    return Table(rows).shown(keys=[""], right=shares, digits=digits)


# untraced: how long -------------------------------------------------------------------------------


def parts(
    engine: wb.Engine, arms: Mapping[str, Toggles], rounds: int, n_tokens: int = 4
) -> dict[str, dict[str, Any]]:
    """`token_parts` of each arm, and of the first once more as the A/A control. `run_us`: the time
    of a token in which some kernel runs, as the kernels themselves note it."""
    first = next(iter(arms.values()))
    found = token_parts(engine, {**arms, CONTROL: first}, rounds, n_tokens)
    for name, toggles in arms.items():
        # kernels of a plan that is launched ahead note no times
        plain = toggles.switched("launch_ahead", "off").switched("plan_end", "event")
        with engine.variant(plain) as side:
            tokens = measure_overlap(side, n_tokens, collector=None).tokens
        found[name]["run_us"] = float(tokens["total_us"].median())
    return found


def parts_us(own: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a token of an arm of `parts`, us, medians over the rounds. The token is one
    without stamps, and HOST is what its other parts leave: the host makes the stamps, too, and
    makes them anew where it builds each token's program anew. Where kernels that note their times
    run longer than the token's plain kernels, nothing is left between kernels."""
    us = medians_us(own)
    run = min(own["run_us"], us["device"])
    return {RUN: run, BETWEEN: us["device"] - run, **_after_kernels(us)}


def _after_kernels(us: Mapping[str, Any]) -> dict[str, Any]:
    """What comes after a token's kernels, and the token. us: PARTS, each a number or an array."""
    logits, token = us["gap"] - us["host"], us["plain"]
    return {LOGITS: logits, HOST: np.maximum(0.0, token - us["device"] - logits), TOKEN: token}


SAVED = "the median of the differences within a round, not the difference of two medians"


def parts_table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """The parts of an untraced token, us, in each arm; the time that the last arm saves of the
    first arm's token, and the interval of the A/A control's difference."""
    first, *others, control = found
    last, rounds = others[-1], {arm: _rounds(own) for arm, own in found.items()}
    us = {arm: parts_us(found[arm]) for arm in (first, *others)}
    rows = []
    for part in (RUN, BETWEEN, LOGITS, HOST, TOKEN):
        row: dict[str, Any] = {"part of a token": part}
        row |= {f"{arm}, us": of[part] for arm, of in us.items()}
        if part in rounds[first]:
            saved = median_interval(rounds[first][part] - rounds[last][part])
            apart = median_interval(rounds[first][part] - rounds[control][part])
            row |= {"saved, us": saved[0], "95% CI": _interval(saved), "A/A": _interval(apart)}
        rows.append(row)
    digits = dict.fromkeys(("saved, us", *(f"{arm}, us" for arm in us)), 1)
    return Table(rows).fillna({"95% CI": "", "A/A": ""}).shown(
        keys=["part of a token"], digits=digits, constant={"saved": SAVED} | slow_host(found[first])
    )  # fmt: skip


def _rounds(own: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parts of a token in each round, us, (rounds,)."""
    return _after_kernels({part: np.array(own[part], float) for part in PARTS})


def _interval(found: tuple[float, float, float]) -> str:
    _, low, high = found
    return "" if np.isnan(low) else f"{low:.1f}..{high:.1f}"
