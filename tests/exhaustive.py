"""Runs what `make test` and `make test-slow` leave out, and records what came of it.

    python -m tests.exhaustive [--only PREFIX ...] [--out FILE] [--jobs N]

That is every test marked `exhaustive` (`tests/profiles.py`), and every property, with the examples
of that profile. --only: those whose names begin with one of these paths, such as
`tests/program/check/test_mutations.py::test_without_any_two`.

Writes data/results/exhaustive.json (or FILE) whenever a test is over: for each test its commit,
seconds and outcome, and how many runs it judged where it counts them (safe; unsafe; unsafe though
no seed saw it); for each commit the date and the machine. Tests that FILE has of this commit are
not run again. Rows of other tests stay; without --only those of tests that are gone go.
Exits with 1 where a test that is asked for failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.rows import Rows

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "data" / "results" / "exhaustive.json"
MARKERS = "(exhaustive or hypothesis) and not gpu and not browser"
PYTEST = ["-m", MARKERS, "--hypothesis-profile=exhaustive", "-p", "no:cacheprovider"]
MOST_SECONDS = 7200  # of one test, unless it is marked otherwise


class Record(Rows):
    """What FILE holds; as a pytest plugin it notes each test that is over."""

    def __init__(self, out: Path) -> None:
        super().__init__(out, "tests")

    def is_done(self, test: str) -> bool:
        """Whether it has been run at this commit, and has not failed."""
        return self.now(test).get("outcome", "failed") != "failed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            counts = dict(report.user_properties).get("runs", {})
            seconds = round(report.duration, 1)
            self.note(report.nodeid, {"outcome": report.outcome, "seconds": seconds, **counts})


def collected(only: Sequence[str] = ()) -> list[str]:
    """The names of the exhaustive tests and of the properties, of those that begin with one of
    `only`: each is a path of this checkout, perhaps with a part of the name of a test behind it."""
    paths = dict.fromkeys(prefix.partition("::")[0] for prefix in only)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PYTEST, "--collect-only", *paths],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest does not collect the tests: {done.stdout}{done.stderr}")
    known = (line for line in done.stdout.splitlines() if "::" in line)
    if found := [test for test in known if test.startswith(tuple(only) or "")]:
        return found
    raise SystemExit(f"no test begins with {' or '.join(only)}; see python -m tests.exhaustive -h")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.chdir(ROOT)
    record, chosen = Record(args.out), collected(args.only)
    if not args.only:
        record.rows = {test: row for test, row in record.rows.items() if test in chosen}
    took = {test: row["seconds"] for test, row in record.rows.items()}
    wanted = [test for test in chosen if not record.is_done(test)]
    wanted.sort(key=lambda test: took.get(test, 0), reverse=True)  # so that all end together
    # a worker takes two tests when it begins: a long one, and a short one behind it
    first, rest = wanted[: args.jobs], wanted[args.jobs :]
    short = rest[max(0, len(rest) - len(first)) :]
    pairs = [test for pair in zip_longest(first, short) for test in pair if test]
    wanted = pairs + rest[: len(rest) - len(short)]
    if wanted:
        shared = ["-n", str(args.jobs), "--dist", "load", "--maxschedchunk=1"]
        shared += [f"--timeout={MOST_SECONDS}"]
        status = pytest.main([*wanted, *PYTEST, *shared, "-vv"], plugins=[record])
        if status == pytest.ExitCode.INTERRUPTED:
            return 130
    return int(not all(map(record.is_done, chosen)))


if __name__ == "__main__":
    sys.exit(main())
