"""Made-up comparisons with known speedups: what `wb.ab` would have measured."""

from __future__ import annotations

import numpy as np

from tests.benchmarks.made_runs import a_run
from workbench.benchmarks.compare.comparison import AB
from workbench.benchmarks.runs.results import SampleTable

# arm -> factor on the baseline's t/s
FACTORS = {
    "per_copy": 1.0,
    "copy_boundary": 1.05,
    "write_read_boundary": 0.95,
    "blocking_copies": 1.0,
    "per_copy (A/A)": 1.0,
}
TESTS = {"tg32": (32, 1, 100.0), "pp512": (1, 512, 2000.0)}  # rows, tokens a row, t/s


def comparison(
    device: str = "embedded",
    model: str = "tiny",
    rounds: int = 10,
    tests: tuple = ("tg32", "pp512"),
) -> AB:
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
    run = a_run(
        "20261121-000000-sync", started="2026-11-21T00:00:00Z", duration_s=12.5,
        command=["workbench", "ab", "--toggle", "sync=a|b"],
        commit={"hash": "0123456789" * 4, "number": 3, "dirty": True},
        versions={"python": "3.11.9", "cupy-cuda13x": None},
        machine={
            "cpu": {"name": "A CPU", "cores": 4, "usable_cores": 2, "governor": "unknown"},
            "load_average": [0.1, 0.2, 0.3], "gpus": [],
        },
        model={"name": model, "quant": "Q8_0", "file": "m.gguf", "hash": "abc"},
        engine={
            "config": {"n_ctx": 2048, "threads": 0}, "device": device, "device_reason": "as asked",
            "device_description": f"{device}, 2 workers",
        },
        tests=list(tests), arms=arms, repetitions=rounds,
        result={"toggle": "sync", "smoke": False, "warm_up": {},
                "answers": dict.fromkeys(list(FACTORS)[1:], answer)},
    )  # fmt: skip
    return AB(run, samples.frame())
