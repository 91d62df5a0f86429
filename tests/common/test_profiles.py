"""Nothing leaves the gate altogether: of what is long `make test` and `make test-slow` try some."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.measure.proofs import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]


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
