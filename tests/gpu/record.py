"""Runs the GPU tests and records what came of them: `python tests/gpu/record.py [--out FILE]`.

Writes data/results/gpu-tests.json (or FILE): date, device, driver, hash of the sources tested
(`data/measure/sources.py`), counts and duration. Exits as pytest does. A failed
run is recorded, too. With `--two` only what wants two GPUs, into gpu-tests-two.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data.measure.sources import source_hash  # noqa: E402
from workbench.backend.cuda.backend import probe  # noqa: E402
from workbench.output import write_text  # noqa: E402

RESULTS = ROOT / "data" / "results"
TESTS = ROOT / "tests" / "gpu"
# the tests, and where what came of them is kept; by whether two GPUs are wanted
RUNS = {
    False: (TESTS, RESULTS / "gpu-tests.json"),
    True: (TESTS / "test_cuda_devices.py", RESULTS / "gpu-tests-two.json"),
}


class Counts:
    """A pytest plugin that counts each test once, as passed, failed or skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = self.outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and worst != "failed":
            worst = report.outcome
        self.outcomes[report.nodeid] = worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--two", action="store_true", help="only what wants two GPUs")
    parser.add_argument("pytest_args", nargs="*", help="more arguments for pytest")
    args = parser.parse_args()
    tests, out = RUNS[args.two]
    device, _, driver = probe().partition(", driver ")
    counts, start = Counts(), time.perf_counter()
    status = pytest.main(
        [str(tests), "-m", "gpu", "-p", "no:cacheprovider", *args.pytest_args],
        plugins=[counts],
    )
    found = Counter(counts.outcomes.values())
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "driver": driver,
        "source_hash": source_hash(),
        "passed": found["passed"],
        "failed": found["failed"],
        "skipped": found["skipped"],
        "duration_s": round(time.perf_counter() - start, 1),
    }
    out = args.out or out
    write_text(out, json.dumps(record, indent=1) + "\n", parents=True)
    print(json.dumps(record))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
