"""Which effects in the tables of the notebooks' runs cannot be told from noise, whether a load was
held up, and whether a table of tokens was made by a slow host."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import nbformat
import pandas as pd

from workbench.answers import loaded, skipped
from workbench.answers.loaded import CONTROL, SERVING, SUSPECTS, load_steady, slug, speedups
from workbench.benchmarks.compare import pace
from workbench.benchmarks.compare.comparison import AB
from workbench.engine.cache.extent import WAYS
from workbench.traffic.bench import load_served

HELD_UP = 2.0  # times the wait for a first token with all slots in use
DECIDED = ("faster", "slower", "same work", "A/A control")
UNTOLD = 0.03  # the largest effect that a recorded table may leave undecided
# of 22 sets in turn, and of loads one after the other: a host's noise is longer than a round there
UNTOLD_OF = {"notebook-together": 0.06, "served": 0.06}
# rows of several run folders, and one of these folders
OF_LOADS = {"ragged": "notebook-ragged-off", "served": f"notebook-served-{SERVING}"}

POISSON = f"notebook-arriving-{slug(loaded.ONE_BY_ONE)}"


def rows(runs: Path) -> pd.DataFrame:
    """The rows of all comparisons among the run folders `notebook-*` in `runs`: of t/s, of requests
    of random lengths, of a steady load. Columns: of, folder, test, label, speedup, low, high,
    band_low, band_high, verdict."""
    found = []
    for path in sorted(runs.glob("notebook-*")):
        if json.loads((path / "run.json").read_text())["kind"] == "ab":
            found.append(AB.load(path).summary().assign(of=path.name, folder=path.name))
    if (runs / OF_LOADS["ragged"]).is_dir():
        ragged = {way: runs / f"notebook-ragged-{way.replace('_', '-')}" for way in WAYS}
        ragged[skipped.AGAIN] = runs / "notebook-ragged-off-again"
        frame = skipped.ragged_frame(ragged)
        found.append(frame[~frame["is_control"]].assign(of="ragged", test=frame["phase"]))
    if (runs / OF_LOADS["served"]).is_dir():
        served = {name: load_steady(runs / f"notebook-served-{slug(name)}")
                  for name in (SERVING, *SUSPECTS, CONTROL)}  # fmt: skip
        loads = speedups(served)
        found.append(loads.assign(of="served", test="", label=loads["setting"]))
    every = pd.concat(found, ignore_index=True)
    return every.assign(folder=every["folder"].fillna(every["of"].map(OF_LOADS)))


def untold(every: pd.DataFrame) -> pd.DataFrame:
    """The rows of `rows` whose effect is large, and undecided."""
    undecided = every[~every["verdict"].isin(DECIDED)]
    most = undecided["of"].map(UNTOLD_OF).fillna(UNTOLD)
    return undecided[(undecided["speedup"] - 1).abs() > most]


def held_up(runs: Path) -> bool:
    """Whether requests that come one by one, at half the rate that the engine serves, waited longer
    than a free slot lets them: while a program was built, or the host did other work. False where
    the run folders `notebook-*` in `runs` are not of this."""
    if not (runs / POISSON).is_dir():
        return False
    own, steady = load_served(runs / POISSON), load_served(runs / OF_LOADS["served"])
    alone, full = (made.rows[-1].figures["mean_ttft_ms"] for made in (own, steady))
    return bool(alone > HELD_UP * full)


def shown(notebook: Path) -> str:
    """All that a notebook's cells show as text."""
    cells = nbformat.read(notebook, 4).cells
    outputs = [out for cell in cells if cell.cell_type == "code" for out in cell.outputs]
    return "\n".join(
        out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs
    )


def slow_host(notebook: Path) -> bool:
    """Whether a table of tokens says that the host was slow in most of its rounds. (A comparison
    says "took" of its rounds; `slow` judges these.)"""
    return re.search(rf"takes [\d.]+ {pace.AS_LONG}", shown(notebook)) is not None


def paces(runs: Path) -> pd.Series:
    """The median us of the host's loop in the rounds that count, of each comparison among the run
    folders `notebook-*` in `runs`, by folder (`benchmarks/compare/pace.py`)."""
    found = {}
    for path in sorted(runs.glob("notebook-*")):
        noted = pace.Noted.of(json.loads((path / "run.json").read_text()))
        every = [
            us
            for test, rounds in noted.rounds.items()
            for n, us in rounds.items()
            if n not in noted.uncounted(test)
        ]
        if every:
            found[path.name] = statistics.median(every)
    return pd.Series(found, dtype=float)


def slow(runs: Path, least_us: float) -> list[str]:
    """The comparisons that were made by a slow host. least_us: of `paces`, the fastest known."""
    found = paces(runs)
    return [*found.index[found >= pace.SLOW * least_us]]


def tokens(runs: Path) -> pd.DataFrame:
    """The median us of a token of every arm, of all comparisons of one sequence's tokens among the
    run folders `notebook-*` in `runs`. Columns: folder, arm, us, issues: what arms share that issue
    the same on the same layers."""
    found = []
    for path in sorted(runs.glob("notebook-*")):
        run = json.loads((path / "run.json").read_text())
        if run["kind"] != "ab":
            continue
        samples = AB.load(path).samples
        samples = samples[samples["test"].str.fullmatch(r"tg\d+")]
        us = samples.groupby(["arm", "repetition"])["ns"].median().groupby("arm").median() / 1e3
        for arm in run["arms"]:
            issues = json.dumps([arm["toggles"], run["engine"]["config"]["n_gpu_layers"]])
            row = {
                "folder": path.name,
                "arm": arm["name"],
                "us": us.get(arm["name"]),
                "issues": issues,
            }
            found.append(row)
    return pd.DataFrame(found).dropna(subset="us")
