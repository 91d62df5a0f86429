"""Runs that nobody measured: the smallest that is one, those of given rates, and a comparison."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs.results import SampleTable, write_run

DEVICE = "embedded device, 2 workers, A CPU"
# arm -> factor on the baseline's t/s, of `comparison`
FACTORS = {
    "per_copy": 1.0,
    "copy_boundary": 1.05,
    "write_read_boundary": 0.95,
    "blocking_copies": 1.0,
    "per_copy (A/A)": 1.0,
}
TESTS = {"tg32": (32, 1, 100.0), "pp512": (1, 512, 2000.0)}  # rows, tokens a row, t/s


def a_run(run_id: str = "r1", **changes: Any) -> dict[str, Any]:
    arm = {
        "name": "per_copy", "is_control": False, "toggles": {"sync": "per_copy"},
        "sync_mode": "per_copy", "program": {}, "counters": {},
    }  # fmt: skip
    return {
        "schema": 1, "run_id": run_id, "kind": "ab", "name": "a name", "status": "complete",
        "started": "2026-11-21T00:56:01Z", "duration_s": 1.5, "command": ["workbench", "ab"],
        "commit": {"hash": "a" * 40, "number": 1, "dirty": False},
        "versions": {"numpy": "2.2", "scipy": "1.16"},
        "machine": {"cpu": {"name": "A CPU"}, "gpus": []},
        "model": {"name": "tiny", "quant": "Q8_0", "hash": "h1"},
        "engine": {"device": "embedded", "device_description": DEVICE, "config": {"n_ctx": 512}},
        "seed": 0, "tests": ["tg2"], "repetitions": 2, "arms": [arm],
        "result": {"toggle": "sync", "smoke": False, "warm_up": {}, "answers": {}},
    } | changes  # fmt: skip


def write(root: Path, name: str, tests: dict | None = None, *, n=8, noise=0.01, arms=("engine",),
          kind="bench", control=False, toggles=None, **changes: Any) -> Path:  # fmt: skip
    """A run folder of tests -> t/s (a number, or one for each arm)."""
    rng = np.random.default_rng([0, *name.encode()])
    samples = SampleTable(name)
    names = [*arms, *([f"{arms[0]} (A/A)"] if control else [])]
    tests = tests or {"tg8": 100.0}
    for test, rates in tests.items():
        for repetition in range(n):
            for i, arm in enumerate(names):
                rate = rates[i % len(arms)] if isinstance(rates, list) else rates
                tps = rate * math.exp(noise * rng.standard_normal())
                ns = np.array([int(1e9 / tps)] * 4)
                samples.add(arm, "A/A" in arm, test, repetition, ns, np.ones(4, int))
    of = [
        {"name": arm, "is_control": "A/A" in arm, "sync_mode": "", "program": {}, "counters": {},
         "toggles": (toggles or [{}] * len(arms))[i % len(arms)]}
        for i, arm in enumerate(names)
    ]  # fmt: skip
    run = a_run(name, kind=kind, name=name, arms=of, tests=list(tests), repetitions=n)
    return write_run(root / name, run | changes, samples.frame())


def gpu(number="1111", driver="580.1", card="NVIDIA H100", day="2026-11-21", cpu="A CPU"):
    """What a run on a GPU says of where and when it was."""
    description = f"{card} (sm_90), driver {driver}"
    return {
        "engine": {"device": "cuda", "device_description": description, "config": {}},
        "machine": {"cpu": {"name": cpu}, "gpus": [{"card": number, "driver": driver}]},
        "started": f"{day}T10:00:00Z",
    }


def comparison(
    device: str = "embedded", model: str = "tiny", rounds: int = 10, tests: tuple = tuple(TESTS)
) -> AB:
    """What `wb.ab` would have measured of known speedups."""
    rng, samples = np.random.default_rng(7), SampleTable("run")
    for test in tests:
        n_rows, n_tokens, tps = TESTS[test]
        for repetition in range(rounds):
            for arm, factor in FACTORS.items():
                ns = (1 + 0.01 * rng.random(n_rows)) * 1e9 * n_tokens / tps / factor
                counts = np.full(n_rows, n_tokens)
                samples.add(arm, "A/A" in arm, test, repetition, ns.astype(int), counts)
    arms = [
        {
            "name": arm, "is_control": "A/A" in arm, "program": {}, "counters": {},
            "toggles": {"sync": arm.split()[0], "copy_stream": "own"}, "sync_mode": arm.split()[0],
        }
        for arm in FACTORS
    ]  # fmt: skip
    answer = {"kind": "exact", "holds": True, "n_rows": 9, "n_differ": 0, "nmse": 0.0}
    answers = dict.fromkeys(list(FACTORS)[1:], answer)
    run = a_run(
        "20261121-000000-sync", tests=list(tests), arms=arms, repetitions=rounds,
        model={"name": model, "quant": "Q8_0", "file": "m.gguf", "hash": "abc"},
        engine={"config": {}, "device": device, "device_description": f"{device}, 2 workers"},
        result={"toggle": "sync", "smoke": False, "warm_up": {}, "answers": answers},
    )  # fmt: skip
    return AB(run, samples.frame())
