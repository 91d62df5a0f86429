"""Tables of graph reuse: the stores and phases of each way to keep a graph, the steps that cannot
reuse it, the time that each layer saves, and what that would be worth to other engines.

The device is idle while the host builds. So a token without a kept graph takes the time of a token
with it, plus the build. A ratio measured here is the price of this engine's Python. The same sum
with the build time of another engine gives the ratio there (llama.cpp #8366).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from workbench.answers import claims
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import interval
from workbench.common.errors import WorkbenchError
from workbench.common.shipped import shipped
from workbench.common.tables import Table
from workbench.config import GraphReuse
from workbench.engine.look.phases import per_step
from workbench.engine.programs import REDO, WAYS
from workbench.graph.ir import Kind

REBUILD, KEPT = GraphReuse.REBUILD.value, GraphReuse.SET_ROWS.value
TOTAL = "all"
OWN, MEASURED = "this engine's, in Python", "measured here, in Python"
BUILD_US = (0, 25, 50, 100, 200, 400)  # columns of the results' table
FEW_BUILD_US = (50, 100, 400)  # rows of a lesson's
BUILD = ("graph", "fuse", "split", "layout", "lower", "prepare")  # phases that a kept program saves
NOTEBOOK = "03_graph_reuse"
OWN_TOKEN = re.compile(r"its own token is ([\d.]+) times as fast")
CARD = re.compile(r"entails, on (.+?): ")
VERDICT = re.compile(r"<!-- begin reuse-verdict -->.*?^(Verdict on #8366.*?)$", re.S | re.M)


def ways_table(engine: Any) -> pd.DataFrame:
    """A row for each way: the cache stores of its program, the inputs that hold their addresses,
    how many stores have another address for the next token, and the copies."""
    rows = []
    for way, found in WAYS.items():
        with engine.variant(engine.toggles.switched("graph_reuse", way)) as side:
            program, after = side.program(n_past=3), side.program(n_past=4)
        pairs = [
            (now, then)
            for now, then in zip(program.singly(), after.singly(), strict=True)
            if now.kind == "launch" and now.node.op == found.store
        ]
        told = {t.name: 0 for now, _ in pairs for t in now.node.inputs if t.kind == Kind.INPUT}
        n_copies = program.counts()["copies"]
        rows.append(
            {
                "graph_reuse": way,
                "stores": f"{len(pairs)} {found.store}",
                "told by": ", ".join(told) or "their address",
                "patched": sum(now.writes != then.writes for now, then in pairs),
                "inputs": len(program.inputs),
                "copies": n_copies,
            }
        )
    return Table(rows).shown(code=["graph_reuse"])


def phases_table(comparison: AB) -> pd.DataFrame:
    """The host's time for each phase, us a token, in each arm of a comparison except its control;
    the last row has the sum."""
    arms = {
        arm["name"]: phases_us(arm["counters"])
        for arm in comparison.run["arms"]
        if not arm["is_control"]
    }
    table = pd.DataFrame(arms).rename_axis("phase").reset_index()
    table.loc[len(table)] = [TOTAL, *table[list(arms)].sum()]
    return Table(table).shown(digits=dict.fromkeys(arms, 1))


def inputs_table(program: Any) -> pd.DataFrame:
    """For each input of a program, whether steps of four other kinds could reuse it."""
    shape = program.shape
    steps = {
        "the next token": shape,
        "n_kv grows": shape._replace(n_kv=2 * shape.n_kv),
        "two tokens": shape._replace(n_tokens=2),
        "two outputs": shape._replace(n_outputs=2),
    }
    rows = [
        {"input": t.name, "shape": " x ".join(map(str, t.shape))}
        | {what: "yes" if t.can_reuse(step) else "no" for what, step in steps.items()}
        for t in program.inputs
    ]
    return Table(rows)


def reuse_table(engine: Any) -> pd.DataFrame:
    """Steps in a row, and how many of them built a program or reused one.

    engine: a fresh engine; its results do not matter (device `null` will do).
    """
    pad, one = engine.config.n_kv_pad, [(0, [1], "last")]
    taken = [
        ("the first token", one, 1),
        ("tokens until n_kv is full", one, pad - 1),
        ("a token with which n_kv grows", one, 1),
        ("tokens until it is full again", one, pad - 1),
        ("a token with which n_kv grows", one, 1),
        ("two tokens in a step", [(0, [1, 2], "last")], 1),
    ]
    rows = [_taken(engine, *step) for step in taken]
    engine.reset()
    return Table([*rows, _taken(engine, "the first token after a reset", one, 1)])


def _taken(engine: Any, what: str, work: list, n: int) -> dict[str, Any]:
    before = engine.counters
    for _ in range(n):
        engine.submit(work).wait()
    after, pad = engine.counters, engine.config.n_kv_pad
    made = {name: after[f"programs_{name}"] - before[f"programs_{name}"]
            for name in ("built", "reused")}  # fmt: skip
    return {"step": what, "steps": n, "n_kv": -(-engine.n_past // pad) * pad} | made


def each_again() -> str:
    """Sets of toggles for `wb.ab`: every layer of reuse kept, and then each of them done again."""
    return " | ".join([" ".join(f"{name}=off" for name in REDO), *(f"{name}=on" for name in REDO)])


def layers_table(again: AB) -> pd.DataFrame:
    """A row for each layer of reuse that a toggle disables: us in its phases, how much longer a
    token takes without the layer, and the speedup of disabling it with its 95 % interval; the last
    row has the sums. again: of the sets of `each_again`."""
    rows: list[dict[str, Any]] = []
    summary = again.summary().set_index("arm")
    arms = {arm["name"]: arm for arm in again.run["arms"]}
    for name in REDO:
        row, phases = summary.loc[f"{name}=on"], phases_us(arms[f"{name}=on"]["counters"])
        rows.append(
            {
                "toggle": name,
                "phases": " + ".join(REDO[name]),
                "us in them": sum(phases[phase] for phase in REDO[name]),
                "us more a token": 1e6 / row["tps_toggled"] - 1e6 / row["tps_baseline"],
                "Speedup": f"{row['speedup']:.3f} ({interval(row['low'], row['high'])})",
                "verdict": row["verdict"],
            }
        )
    summed = {name: sum(row[name] for row in rows) for name in ("us in them", "us more a token")}
    return Table(
        [*rows, {"toggle": TOTAL, "phases": "", "Speedup": "", "verdict": ""} | summed]
    ).shown(keys=["toggle"], digits={"us in them": 1, "us more a token": 1})


def speedup(token_us: float, build_us: float) -> float:
    """The speedup of a kept graph. token_us: a token with it; build_us: the cost of a build."""
    return (token_us + build_us) / token_us


def build_us(token_us: float, speedup: float) -> float:
    """The build time with which a kept graph has this speedup, us."""
    return token_us * (speedup - 1)


def phases_us(counters: Mapping[str, int]) -> dict[str, float]:
    """us a step by phase, from the counters of an arm or an engine."""
    return {row.phase: row.us for row in per_step(counters)}


def own_build_us(arm: Mapping[str, Any]) -> float:
    """us a token of all phases of this engine's build, in an arm that keeps no program."""
    phases = phases_us(arm["counters"])
    return sum(phases[phase] for phase in BUILD)


def worth_table(comparison: AB) -> pd.DataFrame:
    """The speedup of a kept graph for engines with other build times; the build times that the
    least and the most of the thread's gain mean here; and this engine's own build time.

    comparison: of `graph_reuse`, from `rebuild` on, with `set_rows` among its arms.
    """
    summary = comparison.summary().set_index("arm")
    token_us = 1e6 / float(summary["tps_toggled"][KEPT])
    own_us = own_build_us(comparison.run["arms"][0])
    claim = claims.verdict(NOTEBOOK)
    rows: list[tuple[str, float, float]]
    rows = [("some engine's", us, speedup(token_us, us)) for us in FEW_BUILD_US]
    rows += [
        (f"{gain - 1:.0%} in the thread of {claim.thread}", build_us(token_us, gain), gain)
        for gain in (claim.low, claim.high)
    ]
    rows += [
        (OWN, own_us, speedup(token_us, own_us)),
        (MEASURED, build_us(token_us, found := float(summary["speedup"][KEPT])), found),
    ]
    return Table(rows, columns=["whose", "a build costs, us", "speedup of a kept graph"]).shown(
        keys=["whose", "a build costs, us"],
        digits={"a build costs, us": 1, "speedup of a kept graph": 3},
        constant={"a token with a kept graph": f"{token_us:.0f} us"},
    )


def recorded_verdict(page: str | Path | None = None) -> str:
    """The sentence of the results page about #8366 at llama.cpp's own build time; empty where it
    was not measured, and where the page did not come along. page: default: the page that comes
    with the package."""
    try:
        page = page or shipped("data/results", "README.md") / "README.md"
    except WorkbenchError:
        return ""
    found = VERDICT.search(Path(page).read_text(encoding="utf-8"))
    return found[1] if found else ""


class Theirs(NamedTuple):
    """The least and the most speedup of llama.cpp's own token by its reuse, and of how many models
    on which card."""

    low: float
    high: float
    n_models: int
    card: str


def own_token(model: str, saved_us: float, speedup: float) -> str:
    """The part of that sentence that is of one model."""
    return f"{model} {saved_us:.0f} us, its own token is {speedup:.2f} times as fast"


def theirs(sentence: str) -> Theirs | None:
    """What `recorded_verdict` says of llama.cpp; None where it was not measured."""
    found, card = [float(ratio) for ratio in OWN_TOKEN.findall(sentence)], CARD.search(sentence)
    return Theirs(min(found), max(found), len(found), card[1]) if found and card else None
