"""Whether gains add: each switch alone, pairs, all, and all but one, in one comparison.

A gain multiplies where switches do not touch each other: the speedup of two is the product of the
speedups of each. The *interaction* is what was measured over that product. Above 1 the switches
need each other; below 1 they save the same time.

    interaction(a, b) = (t/s ab / t/s start) / ((t/s a / t/s start) (t/s b / t/s start))

The start is the baseline with its graph kept. Building the graph anew takes Python many times a
token, and no other gain could be told beside it: so `reuse` has two arms of its own. All arms take
turns in one run, and the interval of an interaction is a bootstrap over its rounds.
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
ALONE, PAIR, BUT_ONE, ALL = "alone", "pair", "all but one", "all"
ANEW, ALL_ANEW = "graph built anew", "all, graph built anew"  # kinds of arms without reuse
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

    An arm names the switches that are on; the first arm names all of them, off. Where the engine
    keeps its graph, two arms build it anew: with no mechanism, and with all. out: a run folder.
    """
    off = {
        toggle: engine.toggles.value_of(toggle)
        for changes in mechanisms.values()
        for toggle in parse_changes(changes)
    }
    start = " ".join(f"{toggle}={value}" for toggle, value in off.items())
    sets = [start, *(changes_of(names, mechanisms) for names in sets_of([*mechanisms]))]
    if engine.toggles.graph_reuse != GraphReuse.REBUILD:
        sets += anew(mechanisms).values()
    return wb.ab(
        engine, " | ".join(sets), tests=[test], seed=seed, **effort(engine, repeats, "3%"), out=out,
    )  # fmt: skip


def anew(mechanisms: Mapping[str, str]) -> dict[str, str]:
    """The arms that build the graph anew, by kind."""
    return {ANEW: REBUILT, ALL_ANEW: f"{changes_of(mechanisms, mechanisms)} {REBUILT}"}


def changes_of(names: Iterable[str], mechanisms: Mapping[str, str]) -> str:
    return " ".join(mechanisms[name] for name in names)


def gains(found: AB, mechanisms: Mapping[str, str]) -> pd.DataFrame:
    """A row for each set of mechanisms.

    Columns: names, label (`waits + plans`), kind, speedup, low, high, band_low, band_high, verdict
    (as `AB.summary`), token_us (from medians), answer; and of sets of two and more: product (of the
    members' speedups alone), interaction, inter_low, inter_high (95 % interval), together (MORE,
    LESS, AS, or too few repetitions). The last rows are of the arms that build the graph anew.
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
    for kind, changes in anew(mechanisms).items():
        if changes in summary.index:
            names = () if kind == ANEW else tuple(mechanisms)
            rows.append({"names": names, "label": kind, "kind": kind} | _of(summary.loc[changes]))
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


def alone_table(frame: pd.DataFrame) -> Table:
    """Each mechanism: its speedup alone, and its speedup when it comes last, to all others; and the
    time that it saves a token in both places."""
    start_us, every = frame.attrs["start_us"], _one(frame, ALL)
    rows = []
    for row in frame[frame["kind"] == ALONE].to_dict("records"):
        (name,) = row["names"]
        rest = without(frame, name)
        ratio = stats.Ratio(row["speedup"], row["low"], row["high"], stats.MIN_REPETITIONS)
        rows.append(_row(name, ratio, row["verdict"], start_us - row["token_us"], rest, every))
    if (frame["kind"] == ANEW).any():
        none, rest = _one(frame, ANEW), _one(frame, ALL_ANEW)
        value, low, high = (1 / none[name] for name in ("speedup", "high", "low"))
        ratio = stats.Ratio(value, low, high, stats.MIN_REPETITIONS)
        turned = {stats.FASTER: stats.SLOWER, stats.SLOWER: stats.FASTER}
        said = turned.get(none["verdict"], none["verdict"])
        rows.append(_row(REUSE, ratio, said, none["token_us"] - start_us, rest, every))
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
    name: str, alone: stats.Ratio, verdict: str, saved_us: float,
    rest: Mapping[str, Any], every: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    return {
        "mechanism": name,
        "alone": f"{alone.value:.2f} {mark(verdict)}".strip(),
        "95% CI": stats.interval(alone.low, alone.high),
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
