"""Made-up run folders of a GPU, and what tables say of them."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from data.measure import readme, targets
from data.measure.peer import PeerRun
from data.measure.recorded import Recorded
from workbench.benchmarks.compare.arms import switched
from workbench.benchmarks.compare.rounds import order_of
from workbench.benchmarks.runs import results
from workbench.config import Toggles
from workbench.engine.look.phases import PHASES

READ, PEAK = 3000.0, 600.0  # GB/s and TFLOP/s of made-up runs
MODEL = "llama-3.2-1b-bf16"
COUNTED = [f"{phase}_{what}" for phase in PHASES for what in ("ns", "n")]
COUNTERS = {"steps": 10, "untraced_steps": 10, **dict.fromkeys(COUNTED, 0)}
ON = Toggles(graph_reuse="set_rows", sync="packed_implicit", copy_stream="compute", pdl="on")


def arm(name: str, toggles: Toggles = ON, launches: int = 0, **us: float) -> dict[str, Any]:
    """us: of a phase, a token."""
    counters = COUNTERS | {f"{phase}_ns": int(10_000 * each) for phase, each in us.items()}
    return {"name": name, "is_control": "A/A" in name, "toggles": toggles.to_dict(),
            "sync_mode": "implicit", "counters": counters,
            "program": {"tg128": {"counts": {"launches": launches}}}}  # fmt: skip


def sets(*arms: str) -> list[dict]:
    """Arms that are sets of toggles, and the first one's control."""
    return [arm(name, switched(ON, name.removesuffix(" (A/A)")))
            for name in (*arms, f"{arms[0]} (A/A)")]  # fmt: skip


def model(name: str, quant: str, weight_bytes: float = 1e9) -> dict:
    return {"name": f"{name} with random weights", "quant": quant, "n_layer": 32,
            "architecture": "llama", "weight_bytes_per_token": weight_bytes}  # fmt: skip


def record(
    folder: Path, name: str, kind: str, us: dict[str, Any], arms: list[dict] | None = None,
    rounds: int = 6, fields: dict | None = None, **result: Any,
) -> None:  # fmt: skip
    """us: of a repetition, by test, or by test and arm; its token counts as in the name of the
    test. A repetition of several arms is off by some tenths of a percent, alike in all."""
    table, alone = results.SampleTable(name), [{"name": "engine", "is_control": False}]
    answer = {"kind": "exact", "holds": True, "n_rows": 3, "n_differ": 0, "nmse": 0.0}
    answers = {one["name"]: answer for one in (arms or [])[1:]}
    for test, of in us.items():
        n = int(test.partition("@")[0][2:]) if test[:2] == "pp" or arms else 1
        for round_ in range(rounds):
            for one in arms or alone:
                each = of[one["name"]] * (1 + round_ / 1e3) if isinstance(of, dict) else of
                ns = np.array([1e3 * each])
                table.add(one["name"], one["is_control"], test, round_, ns, np.array([n]))
    run = {
        "schema": 1, "run_id": name, "kind": kind, "name": name, "status": "complete",
        "started": "2026-01-02T03:04:05Z", "duration_s": 1.0, "command": [], "versions": {},
        "commit": {"hash": "0" * 40, "number": 1, "dirty": False}, "machine": {}, "seed": 0,
        "engine": {"device_description": "a GPU", "timer": {"tick_ns": 32, "error_ns": 900}},
        "tests": list(us), "repetitions": rounds, "model": model("llama-3.2-1b", "BF16"),
        "arms": arms or [arm("engine")],
        "result": {"answers": answers, "warm_up": {}, "smoke": False} | result,
    } | (fields or {})  # fmt: skip
    results.write_run(folder / f"cuda-{name}", run, table.frame())


def lines(folder: Path, block: str) -> list[dict[str, str]]:
    """The rows of the first table of a block, by column."""
    text = readme.made(block, Recorded(folder)).splitlines()
    head, _, *rest = [line for line in text if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rest)]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if len(row) == len(rows[0])]


def in_turn(peer: PeerRun) -> bool:
    """Whether every round ran each arm once, one after the other, in turning order."""
    names, rates = [arm["name"] for arm in peer.run["arms"]], results.rates(peer.samples)
    return bool(len(rates)) and all(
        rows["arm"].loc[rows["arm"].ne(rows["arm"].shift())].tolist()
        == [names[i] for i in order_of(int(round_), len(names))]
        and rows["order"].diff().iloc[1:].eq(1).all()
        for round_, rows in rates.groupby("repetition", sort=True)
    )


@functools.cache
def history() -> frozenset[str] | None:
    """The commits behind HEAD; None where a shallow clone or an unpacked archive lacks them."""
    shallow, commits = (
        subprocess.run(
            ["git", *asked], cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.split()
        for asked in (("rev-parse", "--is-shallow-repository"), ("rev-list", "HEAD"))
    )
    return frozenset(commits) if shallow == ["false"] else None


def is_ours(commit: dict) -> bool:
    """A commit of this history, with nothing changed on top."""
    return not commit["dirty"] and ((known := history()) is None or commit["hash"] in known)


def target(folder: Path, start: str) -> targets.Result:
    (found,) = [t for t in targets.targets(Recorded(folder)) if t.what.startswith(start)]
    return found
