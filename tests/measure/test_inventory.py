"""The inventory of two checkouts: what counts as kept, moved, renamed and dropped."""

from __future__ import annotations

import ast
import json

import pytest

from data.measure import inventory
from data.measure.inventory import change, docstring_change


def test_what_is_in_both_is_kept_and_what_is_nowhere_is_dropped():
    found = change(["a::x", "a::y"], ["a::x", "b::z"])
    assert (found.kept, found.dropped, found.new) == (["a::x"], ["a::y"], ["b::z"])


def test_the_same_name_in_another_file_has_moved():
    found = change(["a.py::T::x[1]", "a.py::T::x[2]"], ["b.py::T::x[1]"])
    assert [(old, new) for old, new, _ in found.moved] == [("a.py::T::x[1]", "b.py::T::x[1]")]
    assert found.dropped == ["a.py::T::x[2]"] and found.new == []


def test_two_of_one_name_do_not_both_move_to_one():
    found = change(["a.py::x", "b.py::x"], ["c.py::x"])
    assert len(found.dropped) == 2 and found.new == ["c.py::x"]  # nobody knows which it was


def test_a_name_without_a_file_does_not_move_by_itself():
    assert change(["ab --n"], ["bench --n"]).dropped == ["ab --n"]


@pytest.mark.parametrize(
    ("rules", "dropped"),
    [
        ([], 1),
        ([{"old": "::lane_is_told$", "new": "::worker_is_told", "why": "one word"}], 0),
        (
            [
                {"old": "lane", "new": "thread", "why": "a wrong guess"},
                {"old": "lane", "new": "worker", "why": "one word"},
            ],
            0,
        ),
    ],
)
def test_the_table_says_what_was_renamed(rules, dropped):
    found = change(["a::lane_is_told"], ["a::worker_is_told"], rules)
    assert len(found.dropped) == dropped
    assert [why for _, _, why in found.moved] == ["one word"] * (1 - dropped)


def test_a_file_and_a_test_in_it_may_both_be_renamed():
    rules = [
        {"old": "^old.py", "new": "new.py", "why": "moved"},
        {"old": "::a$", "new": "::b", "why": "renamed"},
    ]
    ((_, new, why),) = change(["old.py::a"], ["new.py::b"], rules).moved
    assert (new, why) == ("new.py::b", "moved; renamed")


def test_errors_are_known_by_their_words():
    code = """
def f(x):
    if x:
        raise UsageError(f"{x} is " "too " + "many; give 1")
    raise
"""
    assert list(inventory.errors_of(ast.parse(code))) == ["UsageError: {} is too many; give 1"]


def test_docstrings_are_found_where_they_are_and_by_what_they_say():
    before = dict(inventory.docstrings_of(ast.parse('"""A."""\nclass C:\n  """B."""'), "a.py"))
    same = dict(inventory.docstrings_of(ast.parse('class D:\n  """B."""'), "b.py"))
    bare = dict(inventory.docstrings_of(ast.parse('"""A."""\nclass C: pass'), "a.py"))
    assert [new for _, new, _ in docstring_change(before, same).moved] == ["b.py:D"]
    assert docstring_change(before, same).dropped == ["a.py: (with its definition)"]
    assert docstring_change(before, bare).dropped == ["a.py:C (the definition stays)"]
    assert docstring_change(before, before).dropped == []


@pytest.mark.parametrize("kind", ["tests", "commands"])
def test_a_dropped_name_fails_and_a_dropped_error_is_told(kind, capsys):
    whole = {"commit": "a" * 8, "lines": 3, "tests": ["a::x"], "commands": ["run"],
             "errors": ["E: x"], "docstrings": {}}  # fmt: skip
    assert inventory.compare(whole, whole, False) == 0
    assert inventory.compare(whole, whole | {kind: []}, False) == 1
    assert inventory.compare(whole, whole | {"errors": []}, True) == 0
    assert "dropped  E: x" in capsys.readouterr().out


def test_the_table_of_renamed_names_has_reasons():
    for rules in json.loads(inventory.RENAMED.read_text()).values():
        for rule in rules:
            assert set(rule) == {"old", "new", "why"} and rule["old"] and rule["why"]
