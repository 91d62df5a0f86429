"""Made-up runs of llama.cpp beside this engine, with the speeds that a test asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.measure.peer import OURS, SWITCHES, PeerRun, theirs
from workbench.benchmarks.compare.rounds import interleave
from workbench.benchmarks.runs import results
from workbench.benchmarks.runs.draft import Draft, kept, new_arm, new_run
from workbench.config import Toggles, parse_changes

BEST, AGAIN = f"{OURS} best", " (A/A)"
CONTROL = f"{BEST}{AGAIN}"
ARMS = (*map(theirs, list(SWITCHES)[:4]), BEST, f"{OURS} best plans=ours plan_scope=step", CONTROL)
N_TOKENS = {"pp512": 512, "tg128": 128}


def found(name: str, quant: str = "Q4_0", device: str = "NVIDIA Made Up") -> dict[str, Any]:
    """What `provenance.collect` would say."""
    return {
        "command": ["cuda.py"],
        "commit": {"hash": "0123456789" * 4, "number": 3, "dirty": False},
        "versions": {},
        "machine": {"gpus": []},
        "model": {"name": f"{name} with random weights", "quant": quant, "hash": "abc"},
        "engine": {"config": {}, "device": "cuda", "device_description": device},
    }


def toggles(arm: str) -> dict[str, str]:
    """What an arm's name says, over the baseline; an arm of llama.cpp has none."""
    if not arm.startswith(BEST):
        return {}
    return Toggles().to_dict() | parse_changes(arm.removeprefix(BEST).removesuffix("(A/A)"))


def write(
    folder: Path, us: Mapping[str, Mapping[str, Sequence[float]]], rounds: int = 5,
    counted: int = 2, **of: str,
) -> PeerRun:  # fmt: skip
    """A run folder. us: arm -> test -> us a token in each round."""
    arms = [new_arm(arm, toggles(arm), arm.endswith(AGAIN)) for arm in us]
    tests, about = list(next(iter(us.values()))), found(of.pop("name", folder.name), **of)
    made = new_run("peer", folder.name, "peer", about, arms, tests, rounds, 0)
    made["result"] = {
        "peer": {"version": "1.0 (build 1, commit abc)"},
        "env": {theirs(name): env for name, env in SWITCHES.items() if theirs(name) in us},
        "answers": {},
    }
    draft = Draft(made, folder)

    def take(round_: int, arm: int) -> None:
        name = list(us)[arm]
        for test in tests:
            ns = np.full(counted, round(us[name][test][round_] * 1e3 * N_TOKENS[test]), np.int64)
            n = np.full(counted, N_TOKENS[test], np.int64)
            draft.samples.add(name, name.endswith(AGAIN), test, round_, ns, n)

    with kept(draft):
        interleave(range(rounds), len(us), take)
    return PeerRun(results.load_run(folder))
