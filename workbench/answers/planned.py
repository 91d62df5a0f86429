"""Tables of graph plans: calls of the host, captures and updates, the number of tokens after which
a capture has repaid itself, and the gap that is left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.compare.stats import FASTER, SLOWER, median_interval
from workbench.benchmarks.times.token_parts import issued, medians_us
from workbench.common.tables import Table
from workbench.config import Toggles

# ways of graph reuse and rules that capture anew, or update, when n_kv grows
FORCING = (
    ("set_rows", "pr"), ("set_rows", "today"), ("set_rows", "ours"),
    ("pointer_table", "ours"), ("patch_pointers", "ours"),
)  # fmt: skip
MADE = ("captured", "twinned", "updated", "reinstantiated", "replayed", "issued")
NEVER, UNKNOWN = "never", "not known"


def calls_table(engine: Any, arms: Mapping[str, Toggles]) -> pd.DataFrame:
    """The host's calls for a token in each arm, and the nodes that the device runs: kernels and
    copies. A replay is one call."""
    rows = []
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            program, given = side.program(), issued(side)
        kinds = [command.kind for command in program.commands]
        rows.append(
            {
                "arm": name,
                "pattern": program.pattern(fold=True),
                "values written": kinds.count("write"),
                "host launches": sum(c.kind == "launch" and c.by_host for c in program.commands),
                "nodes": given["nodes"],
                "calls": given["calls"],
                "waits": kinds.count("sync"),
            }
        )
    return Table(rows).shown(code=["pattern"])


def forcing(toggles: Toggles) -> dict[str, Toggles]:
    """Arms for `made_table`: ways of graph reuse under plans, and rules, beside `toggles`."""
    return {
        f"{rule} with {way}": toggles.switched("graph_reuse", way).switched("plans", rule)
        for way, rule in FORCING
    }


def made_table(engine: Any, arms: Mapping[str, Toggles], n_tokens: int) -> pd.DataFrame:
    """What a fresh engine of each arm did with its plans in its first n_tokens tokens: how many
    plans were captured, made as twins, updated in place, made anew, replayed, and issued part by
    part. `capture us`: of one capture. `instantiate us`: of one instantiation, also of a twin.
    `update us`: of one update."""
    rows = []
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            for token in range(n_tokens):
                side.step([1 + token % (side.model.n_vocab - 1)])
            n = {key.removeprefix("plans_"): count for key, count in side.counters.items()}
        captures, updates = n["captured"] + n["reinstantiated"], n["updated"]
        rows.append(
            {"arm": name, "tokens": n_tokens}
            | {what: n[what] for what in MADE}
            | {
                "capture us": _each(n["capture_ns"], captures),
                "instantiate us": _each(n["instantiate_ns"], captures + n["twinned"]),
                "update us": _each(n["update_ns"], updates),
            }
        )
    return (
        Table(rows)
        .rename(columns={"reinstantiated": "made anew", "issued": "part by part"})
        .shown(digits=dict.fromkeys(("capture us", "instantiate us", "update us"), 1))
    )


def _each(ns: int, n: int) -> float:
    return ns / 1e3 / n if n else math.nan


def repaid_table(made: pd.DataFrame, *comparisons: AB) -> pd.DataFrame:
    """After how many tokens an arm has saved the cost of its captures: a row for each arm of a
    comparison that is in `made` (of `made_table`). us saved: of a token, from medians of the
    comparison. Unknown where the comparison found no difference."""
    costs, rows = made.set_index("arm"), []
    for comparison in comparisons:
        summary = comparison.summary()
        for row in summary[~summary["is_control"]].itertuples():
            if row.arm not in costs.index:
                continue
            own = costs.loc[row.arm]
            once = own["captured"] * own["capture us"]
            once += (own["captured"] + own["twinned"]) * own["instantiate us"]
            saved = 1e6 / row.tps_baseline - 1e6 / row.tps_toggled
            known = (row.verdict == FASTER) - (row.verdict == SLOWER)
            rows.append(
                {"arm": row.arm, "us for captures": once, "us saved a token": saved}
                | {"repaid after tokens": _after(once, saved, known), "verdict": row.verdict}
            )
    return Table(rows).shown(
        digits={"us for captures": 1, "us saved a token": 1}, right=["repaid after tokens"]
    )


def _after(once: float, saved: float, known: int) -> str:
    """The text for that number of tokens. known: 1 where a token is shorter, -1 where longer."""
    if known == 1 and saved > 0:
        return f"{math.ceil(once / saved)}"
    return NEVER if known == -1 else UNKNOWN


def gap_table(parts: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Toggles]) -> pd.DataFrame:
    """The parts of a token's time in each arm, us, by the device's clock
    (`benchmarks/times/token_parts.py`). Then the time that an arm saves of the first arm's plain
    token, median over the rounds with its 95 % interval, and when that repays the captures."""
    rows: list[dict[str, Any]] = []
    first = np.array(parts[next(iter(arms))]["plain"], float)
    for name in arms:
        own = medians_us(parts[name])
        row = {"arm": name, "calls": parts[name]["calls"]}
        rows.append(row | {f"{part} us": us for part, us in own.items()})
        n = parts[name]["counters"]
        if "plans_captured" in n:
            saved, low, high = median_interval(first - np.array(parts[name]["plain"], float))
            once = (n["plans_capture_ns"] + n["plans_instantiate_ns"]) / 1e3
            known = int(low > 0) - int(high < 0)
            rows[-1] |= {
                "saved us": saved, "95% CI": f"{low:.1f}..{high:.1f}", "captures us": once,
                "repaid after tokens": _after(once, saved, known),
            }  # fmt: skip
    table = Table(rows).fillna({"95% CI": "", "repaid after tokens": ""})
    table.attrs |= {"digits": {c: 1 for c in table if str(c).endswith(" us")},
                    "keys": ["arm"], "right": ["repaid after tokens"]}  # fmt: skip
    return table
