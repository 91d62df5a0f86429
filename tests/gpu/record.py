"""Runs the GPU tests and records what came of them: `python tests/gpu/record.py [--out FILE]`.

First every kernel that many tests want is compiled. Then processes side by side share the tests,
and at last this one runs what wants the GPU to itself (marker `alone`). Without pytest-xdist, or
with few cores, this process runs them all.

Writes data/results/gpu-tests.json (or FILE): date, device, driver, hash of the sources tested
(`data/measure/sources.py`), counts and duration of everything together. Exits with the worst status
of pytest's. A failed run is recorded, too. With `--two` only what wants two GPUs, into
gpu-tests-two.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data.measure.sources import source_hash  # noqa: E402
from tests.gpu.twins.product import FOLDER  # noqa: E402
from workbench.backend.cuda.device.backend import probe  # noqa: E402
from workbench.backend.cuda.device.driver import device_properties, libraries  # noqa: E402
from workbench.backend.cuda.kernels import nvrtc  # noqa: E402
from workbench.common.errors import WorkbenchError  # noqa: E402
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
HELPERS = ("device", "gate", "read", "repack", "stamp")  # files without macros that no module names


class Counts:
    """A pytest plugin that counts each test once, as passed, failed or skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        worst = self.outcomes.get(report.nodeid, "passed")
        if report.outcome != "passed" and worst != "failed":
            worst = report.outcome
        self.outcomes[report.nodeid] = worst


def kernels_of(module: str, sm: int) -> set:
    return importlib.import_module(f"tests.gpu.{module}").kernels(sm)


def compile_one(file: str, defines: tuple[str, ...], folder: Path | None, sm: int) -> None:
    nvrtc.cubin(file, f"sm_{sm}", defines, sources=folder)


def compile_kernels(sm: int, n: int) -> None:
    """What modules name in `kernels(sm)`, into the cache on disk, by n processes: in a single one
    only one thread at a time can be in the compiler's front end. A fresh interpreter for each:
    CUDA does not survive a fork."""
    files = sorted(TESTS.glob("test_cuda_*.py"))
    telling = [path.stem for path in files if "\ndef kernels(sm: int)" in path.read_text()]
    with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
        lists = pool.map(kernels_of, telling, [sm] * len(telling))
        wanted = set().union(*lists, {(file, ()) for file in HELPERS})
        sources = [(path.stem, (), FOLDER, sm) for path in sorted(FOLDER.glob("*.cu"))]
        sources += [(file, defines, None, sm) for file, defines in sorted(wanted)]
        list(pool.map(compile_one, *zip(*sources, strict=True), chunksize=2))
    print(f"{len(sources)} kernels compiled or found, {n} at a time", flush=True)


def passes(n: int) -> list[tuple[str, int]]:
    """What is run, in order: tests by their markers, and how many processes share them; 0: none
    but this one."""
    if n > 1 and importlib.util.find_spec("xdist") is None:
        print("pytest-xdist is not installed: one process runs all tests, which takes longer")
        n = 0
    return [("gpu", 0)] if n < 2 else [("gpu and not alone", n), ("gpu and alone", 0)]


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
    cores = len(os.sched_getaffinity(0))
    try:
        properties = device_properties(libraries()[0], 0)
        if not args.two:
            compile_kernels(10 * int(properties["major"]) + int(properties["minor"]), cores)
    except WorkbenchError as error:
        print(f"kernels are compiled as tests want them: {error}", file=sys.stderr)
    wanted = min(MOST_PROCESSES, cores // CORES_EACH) if args.processes is None else args.processes
    for markers, n in passes(0 if args.two else wanted):
        print(f"{markers}: {n or 1} at a time", flush=True)
        given = [str(tests), "-p", "no:cacheprovider", "--durations=25", "-m", markers]
        given += ["-n", str(n), "--dist", "worksteal"] if n else []
        # processes that are started have their share of the cores for NumPy
        with patch.dict(os.environ, dict.fromkeys(THREADS, str(max(1, cores // n))) if n else {}):
            statuses.append(int(pytest.main([*given, *args.pytest_args], plugins=[counts])))
        if statuses[-1] == pytest.ExitCode.INTERRUPTED:
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
    # a pass without any test says nothing where another has some
    nothing = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return max((status for status in statuses if status != nothing), default=nothing)


if __name__ == "__main__":
    sys.exit(main())
