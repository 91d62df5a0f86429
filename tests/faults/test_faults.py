"""Faults that are planted to know the tests' power: each can be planted, and is judged right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import planted
from tests.faults.__main__ import LATE, MISSED, OUT, SEEN, Copy
from tests.faults.planted import Fault, FaultError
from tests.faults.touched import OWN, Touched
from tests.rows import Rows

SOURCE = '''\
"""Numbers."""

MOST = 3


def least(values):
    """The least."""
    return min(values)


class Counter:
    def add(self, n):
        self.n = n + 1

    def most(self, values):
        return max(values) + 0 * len(values)
'''
TEST = """\
import numbers_of
import pytest

def test_least():
    assert numbers_of.least([3, 1]) == 1

def test_nothing():
    assert numbers_of.MOST

@pytest.mark.parametrize("most", [3], ids=["three at - most"])
def test_most(most):
    assert numbers_of.MOST == most
"""


def fault(function: str, old: str, new: str, tests: tuple[str, ...] = ()) -> Fault:
    return Fault("name", "It is wrong.", "numbers_of.py", function, old, new, tests)


@pytest.mark.long
def test_every_fault_can_be_planted():
    assert planted.problems() == []


def test_there_are_hundreds_over_all_rooms_each_with_a_row():
    faults, record = list(planted.every()), json.loads(OUT.read_text())
    assert len(faults) >= 300
    assert len({fault.means for fault in faults}) == len(faults)
    for one in faults:
        assert one.means.endswith(".") and 3 < len(one.means.split()) <= 30, one.name
        assert all((planted.ROOT / test.partition("::")[0]).exists() for test in one.tests)
    files = (planted.ROOT / "workbench").rglob("*.py")
    rooms = {path.parent.relative_to(planted.ROOT) for path in files if path.stat().st_size}
    assert not rooms - {Path("workbench"), *(Path(one.path).parent for one in faults)}
    assert set(record["faults"]) == {fault.name for fault in faults}
    for name, row in record["faults"].items():
        assert row["outcome"] in (SEEN, MISSED, LATE), name
        assert bool(row["by"]) == (row["outcome"] == SEEN), name
        assert row["commit"] in record["commits"] and not row["commit"].endswith("+"), name


def test_only_the_text_of_the_function_changes():
    assert "return max(values)" in fault("least", "min", "max").planted(SOURCE)
    changed = fault("Counter.add", "n + 1", "n").planted(SOURCE)
    assert changed == SOURCE.replace("self.n = n + 1", "self.n = n")
    assert "MOST = 4" in fault("", "MOST = 3", "MOST = 4").planted(SOURCE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (fault("least", "max", "min"), "has 0 times 'max'"),
        (fault("Counter", "values", "n"), "has 3 times 'values'"),
        (fault("Counter.gone", "n", "m"), "Counter.gone is not in its file"),
        (fault("least", "min(values)", "min(values"), "is no Python"),
        (fault("least", "min(values)", "min(values)  # least"), "changes nothing but text"),
    ],
)
def test_a_fault_that_cannot_be_planted_says_why(wrong, said):
    with pytest.raises(FaultError, match=r"^name: ") as error:
        wrong.planted(SOURCE)
    assert said in str(error.value)


def test_tests_that_touch_little_come_first():
    functions = {
        "numbers_of.py::least": ["t/a.py::wide", "t/a.py::narrow"],
        "numbers_of.py::Counter.add": ["t/a.py::wide", "t/b.py::other"],
    }
    seconds = {"t/a.py::wide": 1.0, "t/a.py::narrow": 2.0, "t/a.py::last": 3.0, "t/b.py::other": 1}
    known, least = Touched(functions, seconds), ["t/a.py::narrow", "t/a.py::wide"]
    assert known.tests(fault("least", "", ""), 9.0) == [*least, "t/a.py::last"]
    assert known.tests(fault("least", "", ""), 3.5) == least, "the time is bounded"
    assert known.tests(fault("", "", ""), 9.0)[0] == "t/b.py::other"
    assert known.tests(fault("least", "", "", ("t/b",)), 9.0)[0] == "t/b.py::other"


def test_tests_near_the_room_come_first():
    tests = ["tests/a/b/test_b.py::test", "tests/a/test_a.py::test", "tests/c/test_c.py::test"]
    known = Touched({"workbench/a/b/m.py::f": tests[::-1]}, dict.fromkeys(tests, 1.0))
    assert known.tests(fault("f", "", "")._replace(path="workbench/a/b/m.py"), 9.0) == tests


def test_what_fails_with_any_fault_is_no_judge():
    known = Touched({"numbers_of.py::least": [f"{OWN}test_faults.py::test", "t/a.py::test"]},
                    {f"{OWN}test_faults.py::test": 1.0, "t/a.py::test": 1.0})  # fmt: skip
    assert known.tests(fault("least", "", ""), 9.0) == ["t/a.py::test"]


def test_tests_that_were_not_measured_are_told():
    known = Touched({"n.py::f": ["t/a.py::old", "t/b.py::b"]}, {"t/a.py::old": 1.0, "t/b.py::b": 2},
                    ["t/a.py::skipped"])  # fmt: skip
    there = ["t/a.py::skipped", "t/b.py::b", f"{OWN}test_faults.py::test"]
    assert known.of(there) == Touched({"n.py::f": ["t/b.py::b"]}, {"t/b.py::b": 2}, there[:1])
    with pytest.raises(FaultError, match=r"2 files .* --touched t/a\.py t/c\.py$"):
        known.of([*there, "t/c.py::c", "t/a.py::new", "t/a.py::newer"])
    newer = Touched({"n.py::f": ["t/a.py::new"], "n.py::g": ["t/a.py::old"]},
                    {"t/a.py::new": 3.0, "t/a.py::old": 4.0})  # fmt: skip
    assert known.joined(newer) == Touched(
        {"n.py::f": ["t/a.py::new", "t/b.py::b"], "n.py::g": ["t/a.py::old"]},
        {"t/b.py::b": 2, "t/a.py::new": 3.0, "t/a.py::old": 4.0}, known.left_out,
    )  # fmt: skip


@pytest.mark.long
def test_a_fault_is_planted_alone_judged_and_taken_back(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "numbers_of.py").write_text(SOURCE)
    (source / "test_numbers.py").write_text(TEST)
    (tmp_path / "copy").mkdir()
    copy = Copy(tmp_path / "copy", source)
    tests = ["test_numbers.py::test_least", "test_numbers.py::test_nothing"]
    seen = copy.judge(fault("least", "min(values)", "max(values)"), tests)
    assert seen["outcome"] == SEEN and seen["by"] == tests[0]
    named = "test_numbers.py::test_most[three at - most]"
    assert copy.collected() == [*tests, named]
    assert copy.judge(fault("", "MOST = 3", "MOST = 4"), [*tests, named])["by"] == named
    dies = fault("", "MOST = 3", "import os; os.abort()")
    assert copy.judge(dies, tests) | {"seconds": 0} == {
        "outcome": SEEN, "by": "SIGABRT", "tests": 2, "seconds": 0,
    }  # fmt: skip
    missed = copy.judge(fault("Counter.add", "n + 1", "n"), tests)
    assert missed["outcome"] == MISSED and not missed["by"]
    assert (copy.root / "numbers_of.py").read_text() == SOURCE
    assert (source / "numbers_of.py").read_text() == SOURCE


def test_what_was_judged_at_this_commit_is_kept(tmp_path):
    record = Rows(tmp_path / "faults.json", "faults")
    assert not record.now("a-fault")
    record.note("a-fault", {"outcome": MISSED, "by": "", "tests": 0, "seconds": 0.1})
    again = Rows(tmp_path / "faults.json", "faults")
    assert again.now("a-fault")["outcome"] == MISSED and not again.now("other")
    again.commit = "another"
    assert not again.now("a-fault") and again.rows["a-fault"]
