"""Comparisons with another commit: a smoke test of each."""

from __future__ import annotations

import pytest

from data.measure import inventory, two_commits
from data.measure.same_logits import compare


def test_names_are_kept_moved_or_dropped():
    found = inventory.change(["a::x", "a.py::T::z[1]", "a::y"], ["a::x", "b.py::T::z[1]", "b::w"])
    assert (found.kept, found.dropped, found.new) == (["a::x"], ["a::y"], ["b::w"])
    assert [(old, new) for old, new, _ in found.moved] == [("a.py::T::z[1]", "b.py::T::z[1]")]


def test_other_logits_are_told():
    arrays = [["aa", 1, 100, True], ["bb", 1, 100, True]]
    cases = [{"case": "cpu 0", "device": "embedded", "model": "m.gguf"}]
    was, now = ({"cpu 0": {"case": "cpu 0", "arrays": of}} for of in (arrays, arrays[:1]))
    assert compare.compare(cases, was, was)["others"] == []
    (other,) = compare.compare(cases, was, now)["others"]
    assert other["was"] == "different" and "2 and 1 arrays" in other["what"]


@pytest.mark.parametrize(("new", "verdict"), [(100.0, "no difference"), (125.0, "slower")])
def test_times_of_two_commits_become_a_verdict(new, verdict):
    noise = [0.0, 0.3, -0.2, 0.1, -0.1, 0.2, -0.3, 0.05]
    us = {"old": [100 + n for n in noise], "control": [100 - n for n in noise]}
    found = two_commits.judged(us | {"new": [new + n for n in noise]})
    assert found["verdict"] == verdict and found["speedup"] == pytest.approx(100 / new, rel=0.01)
