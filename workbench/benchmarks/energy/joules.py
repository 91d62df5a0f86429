"""Joules a token by test and arm, from the windows in `run.json`; see `windows.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from workbench.benchmarks.compare import stats
from workbench.benchmarks.energy.windows import COARSE

MORE, LESS = "more energy", "less energy"
VERDICTS = {stats.FASTER: MORE, stats.SLOWER: LESS}  # of a ratio of joules
CONTROL = "A/A control"
COLUMNS = (
    "test", "arm", "is_control", "j_per_token", "j_low", "j_high", "n_windows", "mean_w", "idle_w",
    "step_share", "uncertainty_share", "energy", "energy_low", "energy_high", "energy_band_low",
    "energy_band_high", "energy_verdict",
)  # fmt: skip


def joules(run: Mapping[str, Any]) -> pd.DataFrame:
    """A row per test and arm, the baseline first; empty where energy was not measured.

    Columns: test, arm, is_control, j_per_token (median over windows, J), j_low, j_high (its 95 %
    interval), n_windows, mean_w (median of the windows' power, W), idle_w (of the idle device, W),
    step_share (the largest share that one step of the counter has of a window), uncertainty_share
    (the largest of a window), and beside the baseline: energy (ratio of medians), energy_low,
    energy_high (its interval), energy_band_low, energy_band_high (A/A), energy_verdict. Windows for
    which the counter's steps are too coarse do not count.
    """
    return pd.DataFrame(_rows(run), columns=list(COLUMNS))


def compared(run: Mapping[str, Any], test: str, before: str, after: str) -> tuple[stats.Ratio, str]:
    """The ratio of the joules a token of two arms, after/before, and its verdict beside the run's
    A/A band. NaN where a side has no windows."""
    each = _counted(run).query("test == @test").pivot(index="window", columns="arm", values="each")
    first = run["arms"][0]["name"]
    found = _ratio_of(each, before, after, run["seed"])
    controls = [arm["name"] for arm in run["arms"] if arm["is_control"]]
    band = stats.aa_band(_ratio_of(each, first, controls[0], run["seed"]))
    judged = stats.verdict(found, band)
    return found, VERDICTS.get(judged, judged)


def _counted(run: Mapping[str, Any]) -> pd.DataFrame:
    """The windows that count, with J/token as `each`, and shares of step and uncertainty."""
    found = run["result"].get("energy") or {"windows": []}
    windows = pd.DataFrame(found["windows"])
    if windows.empty:
        return windows
    windows["each"] = windows["joules"] / windows["n_tokens"]
    for share, of in (("step_share", "step_j"), ("uncertainty_share", "uncertainty_j")):
        windows[share] = windows[of] / windows["joules"]
    return windows[windows["step_share"] <= COARSE]


def _rows(run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    windows = _counted(run)
    if windows.empty:
        return
    idle_w = run["result"]["energy"]["idle_w"]
    first, seed = run["arms"][0]["name"], run["seed"]
    for test, of_test in windows.groupby("test", sort=False):
        each = of_test.pivot(index="window", columns="arm", values="each")
        about = of_test.drop_duplicates("arm").set_index("arm")["is_control"]
        names = [arm["name"] for arm in run["arms"] if arm["name"] in about.index]
        names += [name for name in about.index if name not in names]  # the control of `bench`
        controls = [name for name in names if about[name]]
        band = stats.Band(math.nan, math.nan)
        if controls:
            band = stats.aa_band(_ratio_of(each, first, controls[0], seed))
        for name in names:
            own = of_test[of_test["arm"] == name]
            middle, low, high = stats.median_interval(own["each"].to_numpy(), seed)
            beside = _ratio_of(each, first, name, seed)
            judged = stats.verdict(beside, band)
            yield {
                "test": test, "arm": name, "is_control": bool(about[name]), "j_per_token": middle,
                "j_low": low, "j_high": high, "n_windows": len(own),
                "mean_w": float(own["mean_w"].median()), "idle_w": idle_w[test],
                "step_share": float(own["step_share"].max()),
                "uncertainty_share": float(own["uncertainty_share"].max()),
                "energy": beside.value, "energy_low": beside.low, "energy_high": beside.high,
                "energy_band_low": band.low, "energy_band_high": band.high,
                "energy_verdict": "" if name == first else CONTROL if about[name]
                else VERDICTS.get(judged, judged),
            }  # fmt: skip


def _ratio_of(each: pd.DataFrame, before: str, after: str, seed: int) -> stats.Ratio:
    """The ratio of two arms. each: J/token, a row for each window, a column for each arm."""
    if before == after or not {before, after} <= set(each):
        return stats.Ratio(math.nan, math.nan, math.nan, 0)
    pairs = each[[before, after]].dropna()
    if pairs.empty:
        return stats.Ratio(math.nan, math.nan, math.nan, 0)
    return stats.speedup(pairs[before].to_numpy(), pairs[after].to_numpy(), seed)


PER_TOKEN = COLUMNS[3:10]  # of an arm by itself


def of_test(run: Mapping[str, Any], test: str, arm: str) -> dict[str, Any]:
    """The figures of an arm in a test, by itself; empty where energy was not measured."""
    found = joules(run)
    rows = found.loc[(found["test"] == test) & (found["arm"] == arm), list(PER_TOKEN)]
    return next(iter(rows.to_dict("records")), {})


def beside_tests(frame: pd.DataFrame, run: Mapping[str, Any]) -> pd.DataFrame:
    """A frame with a row per test and the energy of the first arm; unchanged where energy was not
    measured."""
    found = joules(run)
    if found.empty:
        return frame
    first = found[found["arm"] == run["arms"][0]["name"]]
    return frame.merge(first[["test", *PER_TOKEN]], on="test", how="left")


def beside(summary: pd.DataFrame, run: Mapping[str, Any]) -> pd.DataFrame:
    """`AB.summary` with the energy of each row's arm, and the baseline's; unchanged where energy
    was not measured."""
    found = joules(run)
    if found.empty:
        return summary
    first = found.drop_duplicates("test").set_index("test")["j_per_token"]
    more = summary.merge(found.drop(columns="is_control"), on=["test", "arm"], how="left")
    more.insert(len(summary.columns), "j_per_token_baseline", more["test"].map(first))
    return more


def columns(summary: pd.DataFrame) -> dict[str, Any]:
    """The columns of a table: joules a token, and in comparisons the ratio with its verdict; none
    where energy was not measured."""
    if "j_per_token" not in summary:
        return {}
    rows = summary.to_dict("records")
    made = {"J/token": [cell(row) for row in rows]}
    return made | ({"energy": [_ratio(row) for row in rows]} if "energy" in summary else {})


def _ratio(row: Mapping[str, Any]) -> str:
    if not math.isfinite(row["energy"]):
        return "-"
    interval = stats.interval(row["energy_low"], row["energy_high"])
    return f"{row['energy']:.3f} ({interval}) {row['energy_verdict']}"


def cell(row: Mapping[str, Any]) -> str:
    """`0.2134 ± 0.4 %`: joules a token with half of the interval's width; `-` without windows."""
    if not math.isfinite(row.get("j_per_token", math.nan)):
        return "-"
    text = f"{row['j_per_token']:.4g}"
    if not math.isfinite(row["j_low"]):
        return text
    return f"{text} ± {stats.percent(stats.half_width(row['j_low'], row['j_high']))}"


def lines(run: Mapping[str, Any]) -> list[str]:
    """A sentence per test and arm beside the baseline, and one per test on the windows."""
    frame, said = joules(run), list[str]()
    for test, rows in frame.groupby("test", sort=False):
        for row in rows.to_dict("records"):
            if row["is_control"] or not row["energy_verdict"]:
                continue
            said.append(
                f"{test}: energy of {row['arm']}: {row['energy_verdict']}, {row['energy']:.3f}x "
                f"(95% CI {stats.interval(row['energy_low'], row['energy_high'])}, "
                f"n={row['n_windows']}, A/A band "
                f"{stats.interval(row['energy_band_low'], row['energy_band_high'])}); "
                f"{cell(row)} J/token at {row['mean_w']:.0f} W"
            )
        first = rows.iloc[0]
        said.append(
            f"{test}: energy of the GPU's board without the host; {first['arm']} "
            f"{cell(first.to_dict())} J/token at {first['mean_w']:.0f} W; idle it draws "
            f"{first['idle_w']:.0f} W; a step of the counter is at most "
            f"{stats.percent(rows['step_share'].max())} of a window; the ends of a window are "
            f"uncertain by {stats.percent(rows['uncertainty_share'].max())} at most"
        )
    return said
