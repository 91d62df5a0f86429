"""Whether gains add: each switch alone, pairs, all, and all but one, in one comparison.

A gain multiplies where switches do not touch each other: the speedup of two is the product of the
speedups of each. The *interaction* is what was measured over that product. Above 1 the switches
need each other; below 1 they save the same time.

    interaction(a, b) = (t/s ab / t/s start) / ((t/s a / t/s start) (t/s b / t/s start))

All sets take turns in one run, and the interval of an interaction is a bootstrap over its rounds.
The start is the baseline with its graph kept. Building the graph anew takes Python many times a
token, and would take most of that run's time: so what `reuse` gains is measured by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

import workbench as wb
from workbench.answers.effort import effort
from workbench.answers.skipped import mark
from workbench.benchmarks.compare import stats
from workbench.benchmarks.compare.arms import parse_changes, switched
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs import results
from workbench.benchmarks.workload import parse
from workbench.common.errors import DeviceError, UsageError
from workbench.common.tables import Table
from workbench.config import GraphReuse, Toggles

# each mechanism: its name, and its switches
MECHANISMS = {
    "waits": "sync=packed_implicit",
    "plans": "plans=ours",
    "fusion": "fuse=on",
    "streams": "streams=3",
    "dependent launch": "pdl=on",
}
REUSE, REBUILT = "reuse", "graph_reuse=rebuild"
SETS_AT_MOST_S = 8.0  # more than other comparisons have: a round of so many sets is long
REUSE_PART = 4  # of the tokens of a test: this share is enough for `reuse`
ALONE, PAIR, BUT_ONE, ALL = "alone", "pair", "all but one", "all"
MORE, LESS, AS = "more", "less", "no difference"  # from the product of the gains alone
MOST_ROWS = 7
Names = tuple[str, ...]  # of mechanisms that are on together


def possible(engine: wb.Engine) -> dict[str, str]:
    """The mechanisms of MECHANISMS that the engine's device can honour, on its own toggles."""
    found = {}
    for name, changes in MECHANISMS.items():
        with suppress(DeviceError, UsageError), engine.variant(switched(engine.toggles, changes)):
            found[name] = changes
    return found


def start(changes: str) -> Toggles:
    """The baseline with some changes: `graph_reuse=set_rows`. Raises UsageError for an unknown
    toggle."""
    return switched(Toggles(), changes)


def sets_of(mechanisms: Sequence[str]) -> dict[Names, str]:
    """Which mechanisms are on together, and of which kind the set is: each alone, pairs, all but
    one, all. A set of two kinds has the first."""
    names = tuple(mechanisms)
    wanted = [(ALL, [names]), (ALONE, combinations(names, 1)), (PAIR, combinations(names, 2)),
              (BUT_ONE, combinations(names, len(names) - 1))]  # fmt: skip
    found: dict[Names, str] = {}
    for kind, groups in wanted:
        for group in filter(None, groups):
            found.setdefault(group, kind)
    return found


def measured(
    engine: wb.Engine, mechanisms: Mapping[str, str], test: str, repeats: int, seed: int, out: str
) -> AB:
    """Compares every set of mechanisms with none of them, on the engine's toggles.

    An arm names the switches that are on; the first arm names all of them, off. out: a run folder.
    """
    sets = [changes_of(names, mechanisms) for names in sets_of([*mechanisms])]
    return wb.ab(
        engine, " | ".join([_all_off(engine, mechanisms), *sets]), tests=[test], seed=seed,
        **effort(engine, repeats, "3%", SETS_AT_MOST_S), out=out,
    )  # fmt: skip


def reused(
    engine: wb.Engine, mechanisms: Mapping[str, str], test: str, repeats: int, seed: int, out: str
) -> AB | None:
    """Compares the engine's kept graph with one that is built anew for each token. The arms are
    built anew and kept, with every mechanism off; then the same with all of them on. The test has
    1 / REUSE_PART of the tokens of `test`. None where the engine keeps no graph. out: a run folder.
    """
    if engine.toggles.graph_reuse == GraphReuse.REBUILD:
        return None
    kept = f"graph_reuse={engine.toggles.value_of('graph_reuse')}"
    off, every = _all_off(engine, mechanisms), changes_of(mechanisms, mechanisms)
    sets = [f"{off} {REBUILT}", kept, f"{every} {REBUILT}", f"{every} {kept}"]
    return wb.ab(
        engine, " | ".join(sets), seed=seed,
        tests=[f"tg{max(1, parse(test).n_gen // REUSE_PART)}"],
        **effort(engine, repeats, "3%"), out=out,
    )  # fmt: skip


def _all_off(engine: wb.Engine, mechanisms: Mapping[str, str]) -> str:
    """What the engine's toggles have in place of the mechanisms' values."""
    names = dict.fromkeys(toggle for of in mechanisms.values() for toggle in parse_changes(of))
    return " ".join(f"{toggle}={engine.toggles.value_of(toggle)}" for toggle in names)


def changes_of(names: Iterable[str], mechanisms: Mapping[str, str]) -> str:
    return " ".join(mechanisms[name] for name in names)


def gains(found: AB, mechanisms: Mapping[str, str]) -> pd.DataFrame:
    """A row for each set of mechanisms.

    Columns: names, label (`waits + plans`), kind, speedup, low, high, band_low, band_high, verdict
    (as `AB.summary`), token_us (from medians), answer; and of sets of two and more: product (of the
    members' speedups alone), interaction, inter_low, inter_high (95 % interval), together (MORE,
    LESS, AS, or too few repetitions).
    """
    summary = found.summary().set_index("arm")
    rates = results.rates(found.samples).pivot(index="repetition", columns="arm", values="tps")
    start = found.run["arms"][0]["name"]
    band = stats.Band(*summary.iloc[-1][["band_low", "band_high"]])
    rows = []
    for names, kind in sets_of([*mechanisms]).items():
        arm = summary.loc[changes_of(names, mechanisms)]
        row: dict[str, Any] = {
            "names": names, "label": f"all {len(names)}" if kind == ALL else " + ".join(names),
            "kind": kind,
        }  # fmt: skip
        row |= _of(arm)
        if len(names) > 1:
            singles = [changes_of([name], mechanisms) for name in names]
            row["product"] = float(np.prod([summary.loc[one, "speedup"] for one in singles]))
            on = changes_of(names, mechanisms)
            whole = rates[[start, on, *singles]].dropna()
            sides = [whole[one].to_numpy() for one in singles]
            ratio = stats.interaction(
                whole[start].to_numpy(), whole[on].to_numpy(), sides, found.run["seed"]
            )
            row |= _interaction(ratio, band)
        rows.append(row)
    made = pd.DataFrame(rows)
    made.attrs["start_us"] = float(1e6 / summary["tps_baseline"].iloc[0])
    return made


def _of(arm: pd.Series) -> dict[str, Any]:
    columns = ["speedup", "low", "high", "band_low", "band_high", "verdict", "answer"]
    return dict(arm[columns]) | {"token_us": 1e6 / arm["tps_toggled"]}


def _interaction(ratio: stats.Ratio, band: stats.Band) -> dict[str, Any]:
    """The interaction of a set. It is a ratio of two ratios: it must lie outside of the A/A band's
    square."""
    said = stats.verdict(ratio, stats.Band(band.low**2, band.high**2))
    words = {stats.FASTER: MORE, stats.SLOWER: LESS, stats.SAME: AS}
    return {"interaction": ratio.value, "inter_low": ratio.low, "inter_high": ratio.high,
            "together": words.get(said, said)}  # fmt: skip


def alone_table(frame: pd.DataFrame, reuse: AB | None = None) -> Table:
    """Each mechanism: its speedup alone, and its speedup when it comes last, to all others; and the
    time that it saves a token in both places. frame: of `gains`. reuse: of `reused`, for the last
    row."""
    start_us, every = frame.attrs["start_us"], _one(frame, ALL)
    rows = []
    for row in frame[frame["kind"] == ALONE].to_dict("records"):
        (name,) = row["names"]
        rest = without(frame, name)
        rows.append(_row(name, row, start_us - row["token_us"], rest, every))
    if reuse is not None:
        found = reuse.summary()
        kept, all_anew, all_kept = (_of(found.loc[i]) for i in range(3))
        saved_us = float(1e6 / found["tps_baseline"].iloc[0]) - kept["token_us"]
        rows.append(_row(REUSE, kept, saved_us, all_anew, all_kept))
    band = stats.interval(every["band_low"], every["band_high"])
    return Table(rows).shown(
        keys=["mechanism"], digits={"us saved alone": 1, "us saved last": 1},
        constant={"the start": f"{start_us:.1f} us a token", "A/A band": band},
    )  # fmt: skip


def _one(frame: pd.DataFrame, kind: str) -> dict[str, Any]:
    (found,) = frame[frame["kind"] == kind].to_dict("records")
    return found


def without(frame: pd.DataFrame, name: str) -> dict[str, Any]:
    """The row of `gains` whose set has all mechanisms but one: the start, where there is only one.
    Of two mechanisms it is the other alone."""
    others = tuple(one for one in _one(frame, ALL)["names"] if one != name)
    if not others:
        return {"speedup": 1.0, "token_us": frame.attrs["start_us"]}
    return next(row for row in frame.to_dict("records") if row["names"] == others)


def _row(
    name: str, alone: Mapping[str, Any], saved_us: float,
    rest: Mapping[str, Any], every: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    return {
        "mechanism": name,
        "alone": f"{alone['speedup']:.2f} {mark(alone['verdict'])}".strip(),
        "95% CI": stats.interval(alone["low"], alone["high"]),
        "us saved alone": saved_us,
        "as the last": every["speedup"] / rest["speedup"],
        "us saved last": rest["token_us"] - every["token_us"],
    }


def together_table(frame: pd.DataFrame) -> Table:
    """All mechanisms, and the sets that lie farthest from the product of their gains alone."""
    several = frame[frame["product"].notna()]
    far = several["interaction"].map(np.log).abs()
    order = several.assign(far=far.mask(several["kind"] == ALL, np.inf)).sort_values("far")
    rows = [
        {
            "together": row["label"],
            "speedup": row["speedup"],
            "product": row["product"],
            "interaction": row["interaction"],
            "95% CI": stats.interval(row["inter_low"], row["inter_high"]),
            "than the product": row["together"],
        }
        for row in order[::-1].head(MOST_ROWS).to_dict("records")
    ]
    return Table(rows).shown(keys=["together"])


def answers_table(frame: pd.DataFrame) -> Table:
    """How the logits differ from the start's: a row for each answer, and which sets gave it."""
    rows = [
        {"answer": answer, "sets": len(of), "which": "; ".join(of["label"])}
        for answer, of in frame.groupby("answer", sort=False)
    ]
    return Table(rows).shown(keys=["answer"])


def drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """For `plots.together`: all sets of two and more, the largest speedup first."""
    return frame[frame["product"].notna()].sort_values("speedup", ascending=False)
