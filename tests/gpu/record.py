"""Runs the GPU tests and records what came of them: `python tests/gpu/record.py [--out FILE]`.

First every kernel that many tests want is compiled (`compile_kernels.py`). Then processes side by
side share the tests, and at last this one runs what wants the GPU to itself (marker `alone`).
Without pytest-xdist, or with few cores, this process runs them all.

Writes data/results/gpu-tests.json (or FILE): date, device, driver, hash of the sources tested
(`data/measure/sources.py`), counts and duration of everything together. Exits with the worst status
of pytest's. A failed run is recorded, too. With `--two` only what wants two GPUs, into
gpu-tests-two.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data.measure.sources import source_hash  # noqa: E402
from workbench.backend.cuda.device.backend import probe  # noqa: E402
from workbench.common.output import write_text  # noqa: E402

RESULTS, TESTS = ROOT / "data" / "results", ROOT / "tests" / "gpu"
# the tests, and where what came of them is kept; by whether two GPUs are wanted
RUNS = {
    False: (TESTS, RESULTS / "gpu-tests.json"),
    True: (TESTS / "test_cuda_devices.py", RESULTS / "gpu-tests-two.json"),
}
# Processes take turns on one GPU, and each wants cores: for Python, and for what NumPy expects.
MOST_PROCESSES, CORES_EACH = 6, 2
# libraries below NumPy that would start a thread for each core in every process
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
DURATIONS = 25  # slowest tests of a pass that are named
INTERRUPTED, NOTHING_RUN = int(pytest.ExitCode.INTERRUPTED), int(pytest.ExitCode.NO_TESTS_COLLECTED)


class Counts:
    """A pytest plugin that counts each test once, as passed, failed or skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = self.outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and worst != "failed":
            worst = report.outcome
        self.outcomes[report.nodeid] = worst


class Pass(NamedTuple):
    """Tests by their markers, and how many processes share them; 0: this one alone."""

    markers: str
    processes: int = 0


def passes(two: bool, wanted: int | None = None) -> list[Pass]:
    """What is run, in order. wanted: processes; else as many as there are cores for."""
    cores = len(os.sched_getaffinity(0))
    processes = min(MOST_PROCESSES, cores // CORES_EACH) if wanted is None else wanted
    if not two and processes > 1 and importlib.util.find_spec("xdist") is None:
        print("pytest-xdist is not installed: one process runs all tests, which takes longer")
        processes = 0
    if two or processes < 2:
        return [Pass("gpu")]
    return [Pass("gpu and not alone", processes), Pass("gpu and alone")]


def compile_kernels() -> None:
    """In processes of their own. Where it fails, tests compile what they want, and tell."""
    subprocess.run([sys.executable, "-m", "tests.gpu.compile_kernels"], cwd=ROOT, check=False)


def run(each: Pass, tests: Path, counts: Counts, more: list[str]) -> int:
    """pytest's status. Processes that are started have their share of the cores for NumPy."""
    n = each.processes
    print(f"{each.markers}: {n or 1} at a time", flush=True)
    shared = ["-n", str(n), "--dist", "worksteal"] if n else []
    share = max(1, len(os.sched_getaffinity(0)) // max(1, n))
    with patch.dict(os.environ, dict.fromkeys(THREADS, str(share)) if n else {}):
        arguments = [str(tests), "-p", "no:cacheprovider", f"--durations={DURATIONS}"]
        return int(pytest.main([*arguments, "-m", each.markers, *shared, *more], plugins=[counts]))


def worst(statuses: list[int]) -> int:
    """Of all passes; one without any test says nothing where another has some."""
    return max((s for s in statuses if s != NOTHING_RUN), default=NOTHING_RUN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--two", action="store_true", help="only what wants two GPUs")
    parser.add_argument("--processes", type=int, help="that share the tests")
    parser.add_argument("pytest_args", nargs="*", help="more arguments for pytest")
    args = parser.parse_args()
    tests, out = RUNS[args.two]
    device, _, driver = probe().partition(", driver ")
    counts, start, statuses = Counts(), time.perf_counter(), list[int]()
    if not args.two:
        compile_kernels()
    for each in passes(args.two, args.processes):
        statuses.append(run(each, tests, counts, args.pytest_args))
        if statuses[-1] == INTERRUPTED:
            break
    found = Counter(counts.outcomes.values())
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "driver": driver,
        "source_hash": source_hash(),
        **{outcome: found[outcome] for outcome in ("passed", "failed", "skipped")},
        "duration_s": round(time.perf_counter() - start, 1),
    }
    write_text(args.out or out, json.dumps(record, indent=1) + "\n", parents=True)
    print(json.dumps(record))
    return worst(statuses)


if __name__ == "__main__":
    sys.exit(main())
