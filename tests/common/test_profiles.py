"""What the targets promise: of what is long `make test` tries a little, `make test-slow` more and
`make test-exhaustive` all; two workers, the slowest 25 named, and no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

from data.measure.proofs import EXHAUSTIVE
from tests.profiles import SHARES, examples, rest, share, tiers

ROOT = Path(__file__).resolve().parents[2]


def test_a_profile_sets_how_many_examples_a_property_has():
    was = settings.get_current_profile_name()
    try:
        for profile, n in (("quick", 40), ("slow", 100), ("exhaustive", 2000)):
            settings.load_profile(profile)
            assert examples(200) == n and SHARES[profile] == n / 2
    finally:
        settings.load_profile(was)


@pytest.mark.parametrize(("every", "slow"), [(2, 1), (3, 2), (7, 4), (50, 3)])
def test_every_parameter_is_of_one_target(every, slow):
    made = share(range(40), every, slow)
    assert [value_of(one) for one in made] == [*range(40)]
    quick, others = [n for n in range(40) if not n % every], [n for n in range(40) if n % every]
    assert [value_of(one) for one in made if target_of(one) == "quick"] == quick
    assert [value_of(one) for one in made if target_of(one) == "slow"] == others[::slow]


def test_parameters_may_be_tuples_and_have_no_share_of_the_quick_tests():
    made = rest([(n, -n) for n in range(4)], slow=3)
    assert [(*one.values, target_of(one)) for one in made] == [
        (0, 0, "slow"), (1, -1, "exhaustive"), (2, -2, "exhaustive"), (3, -3, "slow")
    ]  # fmt: skip
    assert [(value_of(one), target_of(one)) for one in [13, *tiers(5, 1)]] == [
        (13, "quick"), (5, "slow"), (1, "exhaustive")
    ]  # fmt: skip


def target_of(one: Any) -> str:
    return one.marks[0].name if isinstance(one, ParameterSet) else "quick"


def value_of(one: Any) -> Any:
    return one.values[0] if isinstance(one, ParameterSet) else one


def functions(markers: str, *files: str | Path) -> set[str]:
    """The tests with these markers, without parameters."""
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m", markers,
         *files], cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {line.partition("[")[0] for line in said.splitlines() if "::" in line}


WORDS = re.compile(r"mark\.exhaustive|\b(share|tiers|rest)\(")
GATE = "not exhaustive and not gpu and not browser"  # what `make test` and `make test-slow` run


@pytest.mark.slow
def test_nothing_leaves_the_gate_altogether():
    """Of what the exhaustive tests try the others try something, but for the full product."""
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if WORDS.search(p.read_text())]
    exhaustive = functions("exhaustive", *files)
    product = {test for test in exhaustive if test.rpartition("::")[2] in EXHAUSTIVE}
    assert len(product) == len(EXHAUSTIVE) and len(exhaustive) > 20
    assert exhaustive - product <= functions(GATE, *files)
