"""Nothing leaves the gate altogether: of what is long `make test` and `make test-slow` try some."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.measure.proofs import EXHAUSTIVE

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(r"mark\.exhaustive|\b(share|tiers|rest|exhaustive)\(")


@pytest.mark.slow
def test_nothing_leaves_the_gate_altogether():
    """Of what the exhaustive tests try the others try something, but for the full products."""
    files = [p for p in (ROOT / "tests").rglob("test_*.py") if WORDS.search(p.read_text())]
    found = {}
    for markers in ("exhaustive", "not exhaustive and not gpu and not browser"):
        ask = ["-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m"]
        said = subprocess.check_output([sys.executable, *ask, markers, *files], cwd=ROOT, text=True)
        found[markers] = {line.partition("[")[0] for line in said.splitlines() if "::" in line}
    exhaustive, gate = found.values()
    product = {test for test in exhaustive if test.rpartition("::")[2] in EXHAUSTIVE}
    assert len(product) == len(EXHAUSTIVE) and len(exhaustive) > 20
    assert exhaustive - product <= gate
