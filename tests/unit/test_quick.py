"""What `make test` promises: two workers, the slowest 25 named, a share of what `make test-slow`
tries whole, and no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hypothesis import settings

from tests.profiles import SHARES, examples

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


def test_the_slow_tests_are_all_that_is_left_out_and_long_properties():
    slow, properties = commands("test-slow")
    assert all("-n $(TEST_WORKERS)" in line for line in (slow, properties))
    assert '-m "slow and' in slow
    assert '-m "hypothesis and not slow' in properties and "--hypothesis-profile=long" in properties
    gate = (ROOT / ".ci" / "run").read_text()
    assert "make test\n" in gate and "make test-slow\n" in gate


def test_a_profile_sets_how_many_examples_a_property_has():
    was = settings.get_current_profile_name()
    try:
        for profile, n in (("quick", 40), ("long", 2000)):
            settings.load_profile(profile)
            assert examples(200) == n and SHARES[profile] == n / 2
    finally:
        settings.load_profile(was)


# what is too slow for every time: in `make test` a share of it, in `make test-slow` all
SHARED = {
    "tests/unit/test_kernels_compile.py": ["test_arguments_are_those_the_compiler_saw"],
    "tests/unit/test_pdl.py": [
        "test_nothing_dependent_comes_before_the_wait",
        "test_products_request_weights_before_they_wait",
    ],
    "tests/unit/test_cuda_gemm.py": ["test_builds_spill_nothing"],
    "tests/cpu/test_logits.py": ["test_bit_equal_under_every_toggle"],
    "tests/unit/test_fuse.py": ["test_every_choice_of_patterns_keeps_the_meaning"],
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


def test_what_is_shared_is_tried_whole_by_the_slow_tests():
    said = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m",
         "slow and not exhaustive and not gpu", *SHARED],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = {line.partition("[")[0] for line in said.splitlines() if "::" in line}
    wanted = {f"{path}::{name}" for path, names in SHARED.items() for name in names}
    assert wanted <= found
