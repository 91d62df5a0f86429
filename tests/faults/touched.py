"""Which tests touch which function: coverage by test, of `make test` and of the long tests.

Coverage writes down the lines that each test executes, in processes that the test starts, too. From
that follow the tests that touch a function, and how many functions a test touches. The run takes
two to three times as long as `make test`. Tests that fail in it touch nothing: they would fail
without a fault. Tests that are new can be measured alone, and join the others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.faults.planted import ROOT, Fault, FaultError, functions
from tests.measure.checked import ALWAYS

FOLDER = ROOT / "data" / "runs" / "faults"
MAP, DATA, REPORT = FOLDER / "touched.json", FOLDER / "coverage", FOLDER / "tests.xml"
QUICK_AND_LONG = "not slow and not gpu and not exhaustive and not browser"
OWN = "tests/faults/"  # they fail with any fault, because its text is gone
NAMED = "WORKBENCH_TEST"  # the test that a process was started by
CONFIG = f"""\
[run]
source = workbench, data.measure
data_file = {DATA}
parallel = true
patch = subprocess
context = ${{{NAMED}-}}
"""
MODULE = ""  # a module's own lines, which run where it is imported


class Touched(NamedTuple):
    """functions: tests by `path::function`. seconds: of each test that passed. left_out: tests that
    failed or were skipped."""

    functions: dict[str, list[str]]
    seconds: dict[str, float]
    left_out: Sequence[str] = ()

    def tests(self, fault: Fault, at_most_s: float) -> list[str]:
        """The tests to run for a fault: those near its room first, and of these, as of the others,
        those that touch little, because they say most. After them come tests of the same files,
        which share what a file sets up once. All together take at most so many seconds. The tests
        of the faults themselves are no judges."""
        at = f"{fault.path}::{fault.function}" if fault.function else ""
        wanted = self.functions.get(at, [])
        folder = fault.path.rpartition("/")[0]
        # of what no test is seen to touch, a module's tables say: who touches anything near it
        for near in (f"{fault.path}::", f"{folder}/"):
            if not wanted:
                wanted = sorted(
                    {test for name, tests in self.functions.items()
                     if name.startswith(near) for test in tests}
                )  # fmt: skip
        n_touched = self._n_touched()
        first = sorted(
            wanted,
            key=lambda test: (-_n_shared(folder, test), n_touched[test], self.seconds[test]),
        )
        named = [test for test in self.seconds if test.startswith(fault.tests or ("?",))]
        files = {_file(test) for test in wanted}
        same = [test for test in self.seconds if _file(test) in files]
        chosen, left = [], at_most_s
        for test in dict.fromkeys([*named, *first, *same]):
            if self.seconds[test] <= left and not test.startswith(OWN):
                chosen.append(test)
                left -= self.seconds[test]
        return chosen

    def of(self, tests: Collection[str]) -> Touched:
        """Of the tests that there are. Raises FaultError where some of them were not measured: they
        would see faults, and are not chosen."""
        known = {*self.seconds, *self.left_out}
        if files := {_file(t) for t in tests if t not in known and not t.startswith(OWN)}:
            raise FaultError(f"tests of {len(files)} files were not measured; run python -m "
                             f"tests.faults --touched {' '.join(sorted(files))}")  # fmt: skip
        there = {*tests}
        functions = {name: [test for test in touching if test in there]
                     for name, touching in self.functions.items()}  # fmt: skip
        seconds = {test: s for test, s in self.seconds.items() if test in there}
        return Touched(functions, seconds, [test for test in self.left_out if test in there])

    def joined(self, newer: Touched) -> Touched:
        """With what was measured of some tests in place of what is known of them."""
        again = {*newer.seconds, *newer.left_out}

        def kept(tests: Iterable[str]) -> list[str]:
            return [test for test in tests if test not in again]

        functions = {
            name: sorted({*kept(self.functions.get(name, ())), *newer.functions.get(name, ())})
            for name in sorted({*self.functions, *newer.functions})
        }
        seconds = {test: self.seconds[test] for test in kept(self.seconds)}
        left_out = [*kept(self.left_out), *newer.left_out]
        return Touched(functions, seconds | newer.seconds, left_out)

    def _n_touched(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for tests in self.functions.values():
            for test in tests:
                counts[test] += 1
        return counts


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """As a pytest plugin, this module tells processes that a test starts which test it is."""
    os.environ[NAMED] = item.nodeid.replace("%", "%%")


def measure(jobs: int, *paths: str) -> None:
    """Runs the quick and the long tests under coverage, and writes MAP. paths: files or tests,
    to run them alone; what is measured of them joins what MAP has of others."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("coverage*"):
        old.unlink()
    config = FOLDER / "settings.ini"
    config.write_text(CONFIG)
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.faults.touched", "-n", str(jobs), "--dist",
        "loadfile", "-p", "no:cacheprovider", "--cov", "--cov-config", str(config),
        "--cov-context=test", "--cov-report=", f"--junitxml={REPORT}", "-o",
        "junit_family=xunit1", "--timeout=600", "-m", QUICK_AND_LONG, *paths,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=os.environ | {"CI": "1", ALWAYS: "1"}, check=False)
    found = measured()
    if paths and MAP.is_file():
        found = load().joined(found)
    MAP.write_text(json.dumps(found._asdict()))


def measured() -> Touched:
    """What coverage and the report say."""
    from coverage import CoverageData

    data = CoverageData(str(DATA))
    data.read()
    seconds, left_out = dict[str, float](), list[str]()
    for test, passed, took in _reported():
        if passed:
            seconds[test] = took
        else:
            left_out.append(test)
    found: dict[str, set[str]] = defaultdict(set)
    for name in data.measured_files():
        path = Path(name)
        if path.suffix != ".py" or not path.is_relative_to(ROOT) or not path.is_file():
            continue
        at = path.relative_to(ROOT).as_posix()
        by_line = {line: {*map(_test, contexts)} & seconds.keys()
                   for line, contexts in data.contexts_by_lineno(name).items()}  # fmt: skip
        for function, (_, first, last) in functions(path.read_text()).items():
            for line in range(first, last + 1):
                found[f"{at}::{function}"] |= by_line.get(line, set())
    return Touched({name: sorted(found[name]) for name in sorted(found)}, seconds, left_out)


def _n_shared(folder: str, test: str) -> int:
    """How many folders of `workbench/a/b` lead to a test, too: 1 of `tests/a/test_c.py`."""
    pairs = zip(folder.split("/")[1:], _file(test).split("/")[1:-1], strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _file(test: str) -> str:
    return test.partition("::")[0]


def _test(context: str) -> str:
    """Of `tests/a.py::test_b|run` the test. In a process that a test starts, the test alone."""
    for phase in ("|setup", "|run", "|teardown"):
        context = context.removesuffix(phase)
    return context.partition("|tests/")[0]


def _reported() -> Iterator[tuple[str, bool, float]]:
    """Each test, whether it passed, and how long it took."""
    for case in ElementTree.parse(REPORT).iter("testcase"):
        passed = not {child.tag for child in case} & {"failure", "error", "skipped"}
        path = case.get("file") or ""
        inside = (case.get("classname") or "").removeprefix(
            path.removesuffix(".py").replace("/", ".")
        )
        parts = [path, *filter(None, inside.split(".")), case.get("name") or ""]
        yield "::".join(parts), passed, float(case.get("time") or 0)


def load() -> Touched:
    """Raises FileNotFoundError where nothing was measured."""
    return Touched(**json.loads(MAP.read_text()))
