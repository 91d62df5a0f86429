"""tests/gpu/record.py, on tests that want no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("i", range(6))
def test_shared(i):
    assert os.environ["PYTEST_XDIST_WORKER"].startswith("gw")
    assert os.environ["OPENBLAS_NUM_THREADS"].isdigit()

@pytest.mark.xfail(strict=True)
def test_failing():
    pass

@pytest.mark.alone
def test_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ and "OPENBLAS_NUM_THREADS" not in os.environ

@pytest.mark.alone
def test_skipped():
    pytest.skip("as told")
"""
SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.gpu import record
folder, out, settings = map(Path, sys.argv[1:])
record.probe = lambda: "NVIDIA X, driver 1"
record.RUNS = {False: (folder, folder / "unused.json")}
record.subprocess = SimpleNamespace(run=lambda *of, **more: print("compiles", flush=True))
sys.argv[1:] = ["--out", str(out), "--processes", "2", "--", "-c", str(settings)]
sys.exit(record.main())
"""


@pytest.mark.slow
def test_both_passes_are_one_record_though_one_fails(tmp_path):
    (tmp_path / "test_few.py").write_text(TESTS)
    out, settings = tmp_path / "found.json", ROOT / "pyproject.toml"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OPENBLAS"))}
    env["PYTHONPATH"], command = str(ROOT), [sys.executable, "-c", SCRIPT, tmp_path, out, settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    said = done.stdout + done.stderr
    assert out.is_file() and done.returncode == 1, said
    found = json.loads(out.read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == (7, 1, 1), said
    assert (found["device"], found["driver"]) == ("NVIDIA X", "1") and found["duration_s"] > 0
    order = ["compiles", "gpu and not alone: 2 at a time", "gpu and alone: 1 at a time"]
    at = [said.index(words) for words in order]
    assert at == sorted(at) and len(re.findall("slowest 25 dur", said)) == 2
