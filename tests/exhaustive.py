"""Runs the exhaustive tests, a process for each, and records what came of them.

    python -m tests.exhaustive [--out FILE] [--jobs N]

Writes data/results/exhaustive.json (or FILE) whenever a test is over: the commit, the processor,
and for each test its seconds, its outcome and how many runs it judged (safe; unsafe; unsafe though
no seed saw it). Tests that FILE has of this commit are not run again, so that a run cut off goes
on. Takes hours. Exits with 1 where a test failed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from workbench.bench import provenance
from workbench.output import write_text

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
OUT = ROOT / "data" / "results" / "exhaustive.json"
PYTEST = [sys.executable, "-m", "pytest", "-m", "exhaustive", "-p", "no:cacheprovider"]


def collected() -> list[str]:
    """The ids of the exhaustive tests."""
    marked = [p for p in sorted(TESTS.rglob("test_*.py")) if "mark.exhaustive" in p.read_text()]
    said = subprocess.run(
        [*PYTEST, "--collect-only", *marked], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [line for line in said.splitlines() if "::" in line]


def run(test: str) -> dict[str, Any]:
    """One test, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "found.xml"
        said = subprocess.run(
            [*PYTEST, test, f"--junitxml={xml}"], cwd=ROOT, capture_output=True, text=True
        )
        case = next(ET.parse(xml).iter("testcase")) if xml.is_file() else None
    if said.returncode or case is None:
        print(said.stdout, said.stderr, flush=True)
    if case is None:  # killed
        return {"outcome": "failed", "seconds": None}
    counts = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    passed = not said.returncode and case.find("skipped") is None
    return {
        "outcome": "passed" if passed else "failed",
        "seconds": round(float(case.attrib["time"]), 1),
        **ast.literal_eval(counts.get("runs", "{}")),
    }


def write(out: Path, record: dict[str, Any]) -> None:
    write_text(out, json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    record: dict[str, Any] = {
        "commit": provenance.commit(), "machine": provenance.machine(), "tests": {},
    }  # fmt: skip
    if args.out.is_file():
        before = json.loads(args.out.read_text())
        if before["commit"] == record["commit"]:
            record = before
    tests = record["tests"]
    wanted = [t for t in collected() if tests.get(t, {}).get("outcome") != "passed"]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(run, test): test for test in wanted}
        try:
            for future in as_completed(futures):
                test = futures[future]
                tests[test] = future.result()
                record |= {"date": provenance.utc_now(), "tests": dict(sorted(tests.items()))}
                write(args.out, record)
                print(test, tests[test], flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return 130
    return int(any(t["outcome"] != "passed" for t in tests.values()))


if __name__ == "__main__":
    sys.exit(main())
