"""What won on each kind of device, from the run folders: the table that preset `best` is made of.

    python -m data.measure.best_table            writes workbench/config/best.json from data/results
    python -m data.measure.best_table RUNS...    takes the run folders in these folders, too

A kind of device has two sets of values: for one sequence, from runs whose tests have one sequence,
and for several sequences, from runs whose tests have several.

For each toggle, the comparisons on the richest background count: the background with most other
toggles switched on. A value wins that is faster in more than half of them and slower in none. A
value that acts in some tests alone (ACTS_IN_SOME) wins where it is faster in some and slower in
none. Where tokens per second show no difference, the shortest gap between tokens wins (runs of kind
`gaps`), and then the fewest waits; with equally few waits `auto` wins, which is safe beside any
other toggle. A value is out whose answer did not hold, or that not every step can have (NARROW). A
test in which it does the baseline's work does not count. A toggle that no run of a kind of device
compares stays as in the baseline, except for SAFE.

Toggles of TOGETHER can need each other: a plan of a step needs one copy of all inputs. Comparisons
of sets decide them as a whole, against the values that won one by one. A set wins that is faster in
some test and slower in none, in warm engines and in fresh ones. Of several sets the fastest by the
mean wins; a speedup inside its A/A band counts as 1. The values that won one by one stay in the
table, for devices that cannot honour the whole set.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from data.measure.session import ROOT
from workbench.benchmarks.compare.arms import NEVER_JOINED
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import FASTER, SAME_WORK, SLOWER
from workbench.benchmarks.runs import results
from workbench.benchmarks.times import gaps
from workbench.benchmarks.workload import parse
from workbench.common.output import write_text
from workbench.config import FAMILIES, KVParts, SkipMaskedKV, StepWait, SyncMode, Toggles
from workbench.config.presets import ONE, SEVERAL, set_for

RESULTS, TABLE = ROOT / "data/results", ROOT / "workbench/config/best.json"
KINDS = ("cuda", "embedded", "host")
TOGETHER = (
    "sync", "copy_stream", "host_source", "n_copies", "step_wait", "results", "plans", "plan_scope",
    "plan_warmup", "plan_evict", "plan_batch", "launch_ahead", "plan_end",
)  # fmt: skip
# these stores need the cells of a step in a row, and are joined with no other launch
NARROW = {"graph_reuse": NEVER_JOINED}
# these values do nothing in many tests: they depend on the size of a step, or act on prompts alone
ACTS_IN_SOME = {
    ("skip_masked_kv", SkipMaskedKV.AUTO), ("kv_parts", KVParts.AUTO),
    ("step_wait", StepWait.OUTPUTS),
}  # fmt: skip
COMPARING = ("ab", "fresh")  # kinds of runs
SAFE = {"sync": "auto", "graph_reuse": "set_rows"}  # proved, or obvious; until a run says more


class Trial(NamedTuple):
    """A value against the baseline's value, in one test of one run."""

    folder: str
    before: str
    after: str
    verdict: str
    speedup: float
    holds: bool
    saved: int  # waits of a token

    @property
    def lost(self) -> bool:
        return not self.holds or self.verdict == SLOWER


def made(folders: Iterable[Path]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """The table: kind of device -> one or several sequences -> toggle -> its value, how the value
    won, and the runs."""
    runs = {f.name: results.load_run(f) for f in sorted(folders, key=lambda f: f.name)}
    found = dict[str, tuple[str, str]]()  # of whole runs: device, one or several sequences
    for name, (_, run, _) in runs.items():
        if run["status"] == results.COMPLETE and not run["result"].get("smoke"):
            widths = (parse(test).width for test in run["tests"])
            found[name] = run["engine"].get("device", ""), set_for(max(widths, default=1))
    return {
        kind: {
            wanted: of_kind({name: runs[name] for name in found if found[name] == (kind, wanted)})
            for wanted in (ONE, SEVERAL)
        }
        for kind in KINDS
    }


def of_kind(runs: dict[str, results.Run]) -> dict[str, dict[str, Any]]:
    """Toggle to its row, for values that differ from the baseline's. Then come the members of a
    winning family that lost. A toggle that no run compares is as SAFE says."""
    comparisons = {f: AB(r.run, r.samples) for f, r in runs.items() if r.run["kind"] == "ab"}
    gap_runs = {f: gaps.Gaps(r.run, r.samples) for f, r in runs.items() if r.run["kind"] == "gaps"}
    members = {m: f for f in FAMILIES for m in Toggles.members(f)}
    rows = {}
    for name in (*FAMILIES, *(n for n in Toggles.names() if n not in members)):
        trials, off = _trials_of(name, comparisons), Toggles().value_of(name)
        row = _winner(name, trials, gap_runs) if trials else None
        if row is None and name in SAFE:
            seen = sorted({t.folder for t in trials if t.after == SAFE[name]})
            by = "safe, no difference" if seen else "safe, not measured yet"
            row = {"value": SAFE[name], "by": by, "runs": seen}
        if row is not None and row["value"] != off:
            rows[name] = row
    for name in (m for m, family in members.items() if family in rows):
        trials = _trials_of(name, comparisons)
        if lost := sorted({t.folder for t in trials if t.lost and t.after != t.before}):
            rows[name] = {"value": trials[0].before, "by": "slower", "runs": lost}
    return rows | _together(runs, rows)


def _together(
    runs: dict[str, results.Run], rows: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The rows of toggles for which the winning set has other values than `rows`, the values that
    won one by one. A row's `alone` is that earlier row, None for the baseline's value. Empty where
    no set won."""
    off = Toggles().to_dict()
    singly = {name: rows[name]["value"] if name in rows else off[name] for name in TOGETHER}
    trials: dict[tuple[str, ...], list[Trial]] = {}
    for folder, run in runs.items():
        arms = [arm["toggles"] for arm in run.run["arms"]] if _of_sets(run.run) else []
        if not arms or any(arms[0][name] != value for name, value in singly.items()):
            continue
        named = {arm["name"]: arm["toggles"] for arm in run.run["arms"]}
        for trial in _trials(folder, AB(run.run, run.samples)):
            values = tuple(named[trial.after][name] for name in TOGETHER)
            trials.setdefault(values, []).append(trial)
    won = {
        values: fmean(math.log(t.speedup) if t.verdict == FASTER else 0.0 for t in them)
        for values, them in trials.items()
        if any(t.verdict == FASTER for t in them) and not any(t.lost for t in them)
    }
    if not won:
        return {}
    best = max(won, key=won.__getitem__)
    folders = sorted({t.folder for them in trials.values() for t in them})
    return {
        name: {"value": value, "by": "faster together", "runs": folders, "alone": rows.get(name)}
        for name, value in zip(TOGETHER, best, strict=True)
        if value != singly[name]
    }


def _of_sets(run: dict[str, Any]) -> bool:
    """Whether a run compares sets of toggles of TOGETHER."""
    if run["kind"] not in COMPARING or run["result"]["toggle"]:
        return False
    first, *others = (arm["toggles"] for arm in run["arms"])
    differ = {name for other in others for name in other if other[name] != first[name]}
    return bool(differ) and differ <= set(TOGETHER)


def _winner(
    name: str, trials: list[Trial], gap_runs: dict[str, gaps.Gaps]
) -> dict[str, Any] | None:
    folders = sorted({t.folder for t in trials})
    of = {v: [t for t in trials if t.after == v] for v in dict.fromkeys(t.after for t in trials)}
    sound = {
        value: them for value, them in of.items()
        if value not in NARROW.get(name, ()) and not any(t.lost for t in them)
    }  # fmt: skip
    faster = {
        value: median(t.speedup for t in them)
        for value, them in sound.items()
        if (n := sum(t.verdict == FASTER for t in them)) * 2 > len(them)
        or (n and (name, value) in ACTS_IN_SOME)
    }
    if faster:
        return {"value": max(faster, key=faster.__getitem__), "by": "faster", "runs": folders}
    found = {
        f: run for f, run in gap_runs.items()
        if len({arm["toggles"].get(name, "") for arm in run.run["arms"]}) > 1
    }  # fmt: skip
    if found:
        richest = max(_background(run.run, name) for run in found.values())
        found = {f: run for f, run in found.items() if _background(run.run, name) == richest}
        value = Counter(_shortest(run, name) for run in found.values()).most_common(1)[0][0]
        return {"value": value, "by": "the shortest gap", "runs": [*sorted(found), *folders]}
    saves = {value: max(t.saved for t in them) for value, them in sound.items()}
    if saves and max(saves.values()) > 0:
        value = max(saves, key=lambda v: (saves[v], v == SyncMode.AUTO))
        return {"value": value, "by": "fewer waits", "runs": folders}
    return None


def _background(run: dict[str, Any], name: str) -> int:
    """How many other toggles differ from the baseline; the stream of copies does not count."""
    off, own = Toggles().to_dict(), {*Toggles.members(name), "copy_stream"}
    given = run["arms"][0]["toggles"]
    return sum(v != off.get(k, v) for k, v in given.items() if k not in own)


def _trials_of(name: str, comparisons: dict[str, AB]) -> list[Trial]:
    """The trials of a toggle on the richest background."""
    own = {f: ab for f, ab in comparisons.items() if ab.run["result"]["toggle"] == name}
    rich = {f: _background(ab.run, name) for f, ab in own.items()}
    kept = [f for f in own if rich[f] == max(rich.values())]
    return [trial for folder in kept for trial in _trials(folder, own[folder])]


def _trials(folder: str, ab: AB) -> Iterator[Trial]:
    baseline, *others = ab.run["arms"]
    arms = {arm["name"]: arm for arm in others}
    for row in ab.summary().itertuples():
        if row.is_control or row.verdict == SAME_WORK:
            continue
        answer, arm = ab.answer(row.arm), arms[row.arm]
        before, after = (a["program"][row.test]["counts"] for a in (baseline, arm))
        holds, saved = answer is not None and answer.holds, before["waits"] - after["waits"]
        yield Trial(folder, baseline["name"], row.arm, row.verdict, row.speedup, holds, saved)


def _shortest(found: gaps.Gaps, name: str) -> str:
    """The value of toggle `name` in the arm with the shortest median gap."""
    table = found.table()
    arm = table.loc[table["gap_us"].idxmin(), "arm"]
    return next(a["toggles"][name] for a in found.run["arms"] if a["name"] == arm)


def folders_in(*roots: Path) -> list[Path]:
    """The folders of comparisons and gaps in `roots`; a root may itself be such a folder. Runs of
    notebooks show one small model, and are left out."""
    found = [f.parent for p in roots for f in (*p.glob("run.json"), *p.glob("*/run.json"))]
    kinds = {f: json.loads((f / "run.json").read_text())["kind"] for f in found}
    return [
        f for f in found if kinds[f] in (*COMPARING, "gaps") and not f.name.startswith("notebook-")
    ]


def text(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=1) + "\n"


if __name__ == "__main__":
    write_text(TABLE, text(made(folders_in(RESULTS, *map(Path, sys.argv[1:])))))
    print(f"wrote {TABLE}")
