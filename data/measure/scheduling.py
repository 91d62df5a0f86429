"""README's tables of scheduling: what a wait costs, what the sync modes are worth, what rebuilding
costs, and what a second device adds. A table without runs is a line that says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data.measure.blocks import caption
from data.measure.recorded import NOT_MEASURED, model_of
from workbench.bench import gaps, results
from workbench.bench.comparison import AB
from workbench.bench.gaps import CONTROL, DIFFERENCES
from workbench.bench.stats import FASTER, SLOWER, aa_band, speedup, verdict
from workbench.config import StepWait, SyncMode
from workbench.report.tables import markdown

MODES = [mode.value for mode in SyncMode if mode != SyncMode.AUTO]
BASE, MERGED = SyncMode.PER_COPY.value, SyncMode.COPY_BOUNDARY.value
OTHERS = [mode for mode in MODES if mode not in (BASE, MERGED)]
BACKGROUNDS = {"off": "programs kept", "on": "all on"}


def _of(folder: Path, kind: str, device: str) -> list[tuple[str, Path]]:
    """Background and folder of the runs `DEVICE-KIND-[STREAM-]BACKGROUND-MODEL`, those of a model
    together."""
    name = re.compile(rf"{device}-{kind}-(?:(\w+)-)?({'|'.join(BACKGROUNDS)})-(.+)")
    found = [
        (match[3], match[2], match[1] or "", path)
        for path in sorted(folder.glob(f"{device}-{kind}-*"))
        if (match := name.fullmatch(path.name)) and (path / results.RUN_JSON).is_file()
    ]
    return [(background, path) for _, background, _, path in sorted(found)]


def gaps_table(folder: Path, device: str = "cuda") -> str:
    """A row for each model, background and copy stream: the gap under every mode, and what a wait
    adds to it by the line; the same rows: what goes from mode to mode; then what each mode issues
    for a token."""
    rows, steps, runs = list[dict[str, str]](), list[dict[str, str]](), list[gaps.Gaps]()
    issued: dict[str, dict[str, Any]] = {}
    every: list[gaps.Difference] = []
    for background, path in _of(folder, "gaps", device):
        found = gaps.load(path)
        runs.append(found)
        table, fits, model = found.table(), found.fits, model_of(found.run)
        differences = found.differences
        every += differences
        again = dict.fromkeys(table["copy_stream"], "")
        for row in table[table["arm"].str.endswith(CONTROL)].to_dict("records"):
            again[row["copy_stream"]] = f"{row['gap_us']:.0f}"
        table = table[~table["arm"].str.endswith(CONTROL)]
        for stream, part in table.groupby("copy_stream", sort=False):
            modes, fit = part.set_index("sync"), fits[str(stream)]
            what = {"Model": model, "with": BACKGROUNDS[background], "copies ride": str(stream)}
            us = {m: f"{modes['gap_us'][m]:.0f}" if m in modes.index else "" for m in MODES}
            one = f"{fit.wait_us:.1f} ({fit.low_us:.1f}..{fit.high_us:.1f})"
            rows.append(what | us | {f"{BASE} again": again[str(stream)], "one wait": one})
            went = {(s.before, s.after): s for s in differences if s.copy_stream == stream}
            steps.append(
                what
                | {
                    f"{before} -> {after}": (
                        f"{went[before, after].us:.0f} ({went[before, after].low_us:.0f}.."
                        f"{went[before, after].high_us:.0f})"
                        if (before, after) in went
                        else ""
                    )
                    for before, after in DIFFERENCES
                }
            )
        for row in table.to_dict("records"):
            known = issued.setdefault(row["sync"], row | {"bytes": {}})
            known["bytes"][model] = int(row["bytes"])
    if not rows:
        return f"Host gaps: {NOT_MEASURED}."
    counts = [
        {"sync": mode, "pattern": f"`{found['pattern']}`", "waits of the host": found["waits"],
         "of the device": found["stream_waits"], "copies": found["copies"]}
        | {f"bytes, {model}": n for model, n in found["bytes"].items()}
        for mode, found in issued.items()
    ]  # fmt: skip
    n = " and ".join(str(n) for n in sorted({run.run["repetitions"] for run in runs}))
    what_goes = [
        f"{before} -> {after}, {what}: {min(found_us):.0f} to {max(found_us):.0f} us"
        for (before, after), what in DIFFERENCES.items()
        if (found_us := [d.us for d in every if (d.before, d.after) == (before, after)])
    ]
    return "\n\n".join(
        [
            markdown(pd.DataFrame(rows)),
            caption(runs, f"us, medians; {n} rounds; one wait with its 95 % interval"),
            "What goes from mode to mode, us (95 % interval), within a round:",
            markdown(pd.DataFrame(steps)),
            "From row to row: " + "; ".join(what_goes) + ".",
            "What each mode issues for a token (of the bytes all but some kilobytes are logits):",
            markdown(pd.DataFrame(counts)),
        ]
    )


def sync_table(folder: Path, device: str = "cuda") -> str:
    """A row for each test: t/s under the mode before the change and under the one that was merged,
    then the speedup of every other. Then the same by the median token (`_by_median_token`). A
    speedup outside the A/A band whose interval excludes 1 is bold."""
    rows, by_token, runs = list[dict[str, str]](), list[dict[str, str]](), list[AB]()
    saved = _saved(folder, device)
    for background, path in _of(folder, "sync", device):
        ab = AB.load(path)
        runs.append(ab)
        what = {
            "Model": model_of(ab.run),
            "with": BACKGROUNDS[background],
            "copies ride": ab.run["arms"][0]["toggles"]["copy_stream"],
        }
        by_token.append(what | _by_median_token(ab, saved.get(tuple(what.values()))))
        for test, part in ab.summary().groupby("test", sort=False):
            arms = part.set_index("arm")
            merged, control = arms.loc[MERGED], part[part["is_control"]].iloc[0]
            speedups = {
                mode: _bold(arms.loc[mode, "speedup"], arms.loc[mode, "verdict"])
                for mode in MODES
                if mode in arms.index
            }
            rows.append(
                what
                | {
                    "Test": str(test),
                    f"t/s {BASE}": f"{merged['tps_baseline']:.1f}",
                    f"t/s {MERGED}": f"{merged['tps_toggled']:.1f}",
                    "Speedup": speedups[MERGED],
                    **{mode: speedups.get(mode, "") for mode in OTHERS},
                    "A/A band": f"{control['band_low']:.2f}..{control['band_high']:.2f}",
                }
            )
    if not rows:
        return f"Sync modes: {NOT_MEASURED}."
    n = " and ".join(str(n) for n in sorted({run.run["repetitions"] for run in runs}))
    more = f"{n} interleaved repetitions of each test, answers checked in the same run"
    return "\n\n".join(
        [
            markdown(pd.DataFrame(rows)),
            caption(runs, more),
            "By the median token of each repetition, all tests of a row together; *by its gap* is "
            f"what {MERGED} would be worth if a token were shorter by what its gap is:",
            markdown(pd.DataFrame(by_token)),
        ]
    )


def _saved(folder: Path, device: str) -> dict[tuple[str, ...], float]:
    """By model, background and copy stream: how much shorter the gap is under the mode that was
    merged than before the change, us, median over the rounds."""
    found = dict[tuple[str, ...], float]()
    for background, path in _of(folder, "gaps", device):
        run = gaps.load(path)
        for stream in run.fits:
            us = float(np.median(run.less(BASE, MERGED, stream)))
            found[model_of(run.run), BACKGROUNDS[background], stream] = us
    return found


def _by_median_token(ab: AB, saved: float | None) -> dict[str, str]:
    """us of the median token, and its speedup by mode: a repetition counts by its median token,
    which some hundred slow ones in a row do not touch; a throughput pays for each of them.

    saved: us that the gap is shorter under the merged mode, where that was measured."""
    us = ab.samples.groupby(["arm", "test", "repetition"])["ns"].median().unstack("arm") / 1e3
    rates, token = 1e6 / us, us[BASE].median()
    control = next(arm["name"] for arm in ab.run["arms"] if arm["is_control"])
    band = aa_band(speedup(rates[BASE].to_numpy(), rates[control].to_numpy()))
    found = {m: speedup(rates[BASE].to_numpy(), rates[m].to_numpy()) for m in MODES if m in rates}
    said = {mode: _bold(ratio.value, verdict(ratio, band)) for mode, ratio in found.items()}
    return {
        f"us {BASE}": f"{token:.0f}",
        f"us {MERGED}": f"{us[MERGED].median():.0f}",
        "Speedup": said[MERGED],
        "by its gap": "" if saved is None else f"{token / (token - saved):.3f}",
        **{mode: said.get(mode, "") for mode in OTHERS},
        "A/A band": f"{band.low:.3f}..{band.high:.3f}",
    }


def _bold(ratio: float, judged: str) -> str:
    return f"**{ratio:.3f}**" if judged in (FASTER, SLOWER) else f"{ratio:.3f}"


def _comparisons(names: dict[str, str], folder: Path, device: str, missing: str) -> str:
    """A row for each toggled arm of the runs `DEVICE-NAME`, a name to what its row is called."""
    rows, runs = list[dict[str, str]](), list[AB]()
    for name, what in names.items():
        for path in sorted(folder.glob(f"{device}-{name}/run.json")):
            ab = AB.load(path.parent)
            runs.append(ab)
            for row in ab.summary().to_dict("records"):
                if row["is_control"]:
                    continue
                rows.append(
                    {
                        "": what,
                        "Model": model_of(ab.run),
                        "Test": row["test"],
                        "toggle": f"{ab.run['result']['toggle']}: "
                        f"{ab.label(ab.run['arms'][0])} -> {row['label']}",
                        "t/s baseline": f"{row['tps_baseline']:.1f}",
                        "t/s toggled": f"{row['tps_toggled']:.1f}",
                        "Speedup": f"{row['speedup']:.2f}",
                        "95% CI": f"{row['low']:.2f}..{row['high']:.2f}",
                        "verdict": row["verdict"],
                    }
                )
    if not rows:
        return f"{missing}: {NOT_MEASURED}."
    n = " and ".join(str(n) for n in sorted({run.run["repetitions"] for run in runs}))
    return f"{markdown(pd.DataFrame(rows))}\n\n{caption(runs, f'{n} interleaved repetitions')}"


def reuse_table(folder: Path, device: str = "cuda") -> str:
    """What rebuilding graph and program costs."""
    return _comparisons({"graph-reuse-*": "everything else off"}, folder, device, "Graph reuse")


def pipeline_table(folder: Path, device: str = "cuda") -> str:
    """A prompt of eight ubatches over two devices and on one."""
    names = {
        "pipeline-step-wait-*": "two devices",
        "pipeline-n-copies-llama*": f"two devices, step_wait={StepWait.OUTPUTS}",
        "pipeline-n-copies-per-copy-*": f"the same, sync={BASE}, copy_stream=own",
        "pipeline-one-device-*": "one device",
    }
    return _comparisons(names, folder, device, "Two devices")


def cpu_table(folder: Path) -> str:
    """What preset `best` leaves out or takes on the devices of a CPU."""
    found = [_comparisons({"*": f"{d}, all else best"}, folder, d, d) for d in ("embedded", "host")]
    return "\n\n".join(found)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "gaps-cuda": gaps_table,
    "sync-cuda": sync_table,
    "graph-reuse-cuda": reuse_table,
    "pipeline-cuda": pipeline_table,
    "toggles-cpu": cpu_table,
}
