"""What `python -m tests.exhaustive` keeps of its tests, and which it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import exhaustive
from workbench.benchmarks.runs import provenance

ROOT = Path(__file__).resolve().parents[2]
SOME = "tests/benchmarks/test_compare_until.py"


@pytest.fixture
def at(monkeypatch):
    """`at(hash)`: the checkout is at this commit."""

    def move(commit: str, dirty: bool = False) -> None:
        monkeypatch.setattr(
            provenance, "commit", lambda: {"hash": commit, "number": 1, "dirty": dirty}
        )

    monkeypatch.setattr(provenance, "machine", lambda: {"cpu": {"name": "a processor"}})
    return move


def over(test: str, outcome: str = "passed", when: str = "call", **properties) -> pytest.TestReport:
    return pytest.TestReport(
        test, (test, 0, test), {}, outcome, None, when, duration=1.234,
        user_properties=list(properties.items()),
    )  # fmt: skip


def test_a_test_that_is_over_is_in_the_file(at, tmp_path):
    at("aaaa")
    out = tmp_path / "found.json"
    record = exhaustive.Record(out)
    record.pytest_runtest_logreport(over("a.py::one", when="setup"))
    assert not out.exists(), "it is not over"
    record.pytest_runtest_logreport(over("a.py::one", runs={"safe": 3, "unsafe": 4}))
    found = json.loads(out.read_text())
    assert found["tests"] == {"a.py::one": {
        "commit": "aaaa", "outcome": "passed", "seconds": 1.2, "safe": 3, "unsafe": 4}}  # fmt: skip
    assert found["commits"]["aaaa"]["machine"] == {"cpu": {"name": "a processor"}}
    assert found["commits"]["aaaa"]["commit"]["hash"] == "aaaa"
    # whatever fails behind it is of the test, too
    record.pytest_runtest_logreport(over("a.py::one", "failed", when="teardown"))
    assert json.loads(out.read_text())["tests"]["a.py::one"]["outcome"] == "failed"


@pytest.mark.parametrize(("outcome", "when", "done"), [
    ("passed", "call", True), ("skipped", "setup", True), ("skipped", "call", True),
    ("failed", "call", False), ("failed", "setup", False), ("failed", "???", False),
])  # fmt: skip
def test_a_run_that_was_cut_off_goes_on(at, tmp_path, outcome, when, done):
    at("aaaa")
    exhaustive.Record(tmp_path / "f").pytest_runtest_logreport(over("a.py::one", outcome, when))
    again = exhaustive.Record(tmp_path / "f")
    assert again.is_done("a.py::one") == done and not again.is_done("a.py::two")


def test_of_another_commit_a_test_is_run_again_and_its_row_stays_until_then(at, tmp_path):
    at("aaaa")
    record = exhaustive.Record(tmp_path / "f")
    for test in ("a.py::one", "a.py::two"):
        record.pytest_runtest_logreport(over(test))
    for now, dirty, name in (("bbbb", False, "bbbb"), ("bbbb", True, "bbbb+")):
        at(now, dirty)
        record = exhaustive.Record(tmp_path / "f")
        assert not record.is_done("a.py::one")
        record.pytest_runtest_logreport(over("a.py::one"))
        found = json.loads((tmp_path / "f").read_text())
        assert {test: row["commit"] for test, row in found["tests"].items()} == {
            "a.py::one": name, "a.py::two": "aaaa"}  # fmt: skip
        assert found["commits"].keys() == {"aaaa", name}


@pytest.mark.slow
def test_what_no_test_begins_with_is_refused():
    with pytest.raises(SystemExit, match=f"no test begins with {SOME}::test_none; see"):
        exhaustive.collected([f"{SOME}::test_none"])
    with pytest.raises(SystemExit, match=r"(?s)not collect the tests:.*unit/test_nothing\.py"):
        exhaustive.collected(["tests/unit/test_nothing.py"])


@pytest.mark.slow
def test_some_are_run_and_recorded_beside_others(tmp_path):
    wanted, out = exhaustive.collected([SOME]), tmp_path / "found.json"
    rows = {"tests/gone.py::test": {"commit": "aaaa", "outcome": "passed", "seconds": 1.0}}
    out.write_text(json.dumps({"commits": {"aaaa": {}}, "tests": rows}))
    command = [sys.executable, "-m", "tests.exhaustive", "--only", SOME, "--jobs", "1", "--out"]
    for n_run in (len(wanted), 0):
        done = subprocess.run([*command, out], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("PASSED") == n_run
        tests = json.loads(out.read_text())["tests"]
        assert tests.keys() == {*wanted, *rows} and len(wanted) > 3
        assert {row["outcome"] for row in tests.values()} == {"passed"}
