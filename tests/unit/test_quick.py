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


def commands(target: str) -> list[str]:
    """The pytest command lines of a target of the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    parallel = re.search(r"^PARALLEL = (.+)$", text, re.M)
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.M)
    assert parallel and recipe
    text = recipe[1].replace("$(PARALLEL)", parallel[1])
    return [line.strip() for line in text.splitlines() if "pytest" in line]


def test_the_quick_tests_run_on_two_workers_and_name_the_slowest():
    (line,) = commands("test")
    assert "-n $(TEST_WORKERS)" in line and "--durations=25" in line
    assert "\nTEST_WORKERS ?= 2\n" in (ROOT / "Makefile").read_text()


def test_the_slow_tests_are_more_of_what_is_long_and_more_examples():
    (line,) = commands("test-slow")
    assert "-n $(TEST_WORKERS)" in line and "--hypothesis-profile=slow" in line
    assert '-m "(slow or hypothesis) and not gpu and not exhaustive and not browser"' in line
    gate = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in gate and "make test-slow\n" in gate


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


# what is too slow for every time: of each some in `make test`, more in `make test-slow`
SHARED = {
    "tests/unit/test_kernels_compile.py": ["test_arguments_are_those_the_compiler_saw"],
    "tests/unit/test_pdl.py": [
        "test_nothing_dependent_comes_before_the_wait",
        "test_products_request_weights_before_they_wait",
    ],
    "tests/unit/test_cuda_gemm.py": ["test_builds_spill_nothing"],
    "tests/cpu/test_logits.py": ["test_bit_equal_under_every_toggle"],
    "tests/graph/test_fuse.py": ["test_every_choice_of_patterns_keeps_the_meaning"],
    "tests/unit/test_mutations.py": [
        "test_without_any_one_command_the_checker_is_right",
        "test_without_any_one_command_the_checker_is_right_where_copies_have_no_order",
    ],
    "tests/unit/test_orderings.py": [
        "test_what_is_said_to_race_does_and_nothing_else",
        "test_what_is_safe_is_safe_whatever_shapes_steps_have",
    ],
    "tests/cpu/test_nll_of_orderings.py": [
        "test_every_token_has_the_same_nll_under_every_safe_ordering"
    ],
}


def test_what_is_shared_is_tried_again_by_the_slow_tests():
    wanted = {f"{path}::{name}" for path, names in SHARED.items() for name in names}
    assert wanted <= functions("slow and not exhaustive and not gpu", *SHARED)


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
