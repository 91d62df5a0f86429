"""Tables of graph plans: calls of the host, captures and updates, the gap that is left, and the
number of tokens after which captures have repaid themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from workbench.answers.waiting import SAVED
from workbench.backend.cpu.device.base import n_workers
from workbench.benchmarks.compare.stats import median_interval
from workbench.benchmarks.times.token_parts import issued, medians_us, slow_host
from workbench.common.tables import Table
from workbench.config import Toggles
from workbench.engine.engine import Engine

# ways of graph reuse and rules that capture anew, or update, when n_kv grows
FORCING = (
    ("set_rows", "pr"), ("set_rows", "today"), ("set_rows", "ours"),
    ("pointer_table", "ours"), ("patch_pointers", "ours"),
)  # fmt: skip
MADE, COSTS = ("captured", "reinstantiated", "twinned"), ("capture", "instantiate", "update")
NEVER, UNKNOWN = "never", "not known"


def half_on_host(engine: Engine, toggles: Toggles) -> Engine:
    """The same model with the first half of its layers on the host, and the others and the output
    on the engine's device.

    Three of four cores compute the host's layers. The others are left to the thread that issues and
    to other processes: a worker that is put aside holds up all workers.
    """
    threads = max(1, n_workers(0) * 3 // 4)
    return Engine.load(
        engine.model.path, device=engine.device, n_gpu_layers=engine.model.n_layer // 2 + 1,
        threads=threads, toggles=toggles,
    )  # fmt: skip


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
    plans were made (captured, captured anew, or as twins), updated in place, replayed, and issued
    part by part; and the time of all captures, instantiations and updates, us."""
    rows = []
    for name, toggles in arms.items():
        with engine.variant(toggles) as side:
            for token in range(n_tokens):
                side.step([1 + token % (side.model.n_vocab - 1)])
            n = {key.removeprefix("plans_"): count for key, count in side.counters.items()}
        rows.append(
            {
                "arm": name,
                "tokens": n_tokens,
                "made": sum(n[how] for how in MADE),
                "updated": n["updated"],
                "replayed": n["replayed"],
                "part by part": n["issued"],
                "us for these": sum(n[f"{what}_ns"] for what in COSTS) / 1e3,
            }
        )
    return Table(rows).shown(digits={"us for these": 0})


def _after(once: float, saved: float, known: int) -> str:
    """The text for that number of tokens. known: 1 where a token is shorter, -1 where longer."""
    if known == 1 and saved > 0:
        return f"{math.ceil(once / saved)}"
    return NEVER if known == -1 else UNKNOWN


def gap_table(parts: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Toggles]) -> pd.DataFrame:
    """A token in each arm (`benchmarks/times/token_parts.py`): its time without stamps, and the gap
    between its last kernel and the next token's first by the device's clock, us. Then the time that
    an arm saves of the first arm's token, median over the rounds with its 95 % interval, the time
    of its captures, and the number of tokens after which these are repaid. A slow host is said."""
    rows: list[dict[str, Any]] = []
    first = np.array(parts[next(iter(arms))]["plain"], float)
    for name in arms:
        own, n = medians_us(parts[name]), parts[name]["counters"]
        rows.append({"arm": name, "token us": own["plain"], "gap us": own["gap"], "saved us": "",
                     "captures us": math.nan, "repaid after tokens": ""})  # fmt: skip
        if "plans_captured" in n:
            saved, low, high = median_interval(first - np.array(parts[name]["plain"], float))
            once = (n["plans_capture_ns"] + n["plans_instantiate_ns"]) / 1e3
            known = int(low > 0) - int(high < 0)
            rows[-1] |= {
                "saved us": f"{saved:.1f} ({low:.1f}..{high:.1f})", "captures us": once,
                "repaid after tokens": _after(once, saved, known),
            }  # fmt: skip
    return Table(rows).shown(
        digits={"token us": 1, "gap us": 1, "captures us": 1}, keys=["arm"],
        right=["saved us", "repaid after tokens"],
        constant={"saved": SAVED} | slow_host(parts[next(iter(arms))]),
    )  # fmt: skip
