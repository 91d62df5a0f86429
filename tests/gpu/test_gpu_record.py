"""tests/gpu/record.py and what it compiles before, on tests that want no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import compile_kernels, record
from workbench.backend.cuda.kernels import nvrtc

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os
import pytest
gpu = pytest.mark.gpu

@gpu
@pytest.mark.parametrize("i", range(6))
def test_shared(i):
    if os.environ.get("WANTED"):
        assert os.environ["PYTEST_XDIST_WORKER"].startswith("gw")
        assert os.environ["OPENBLAS_NUM_THREADS"].isdigit()

@gpu
@pytest.mark.alone
def test_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ and "OPENBLAS_NUM_THREADS" not in os.environ

@gpu
@pytest.mark.alone
def test_skipped():
    pytest.skip("as told")

def test_not_asked_for():
    assert False
"""
FAILING = """
@gpu
@pytest.mark.xfail(strict=True)
def test_failing():
    pass
"""
SCRIPT = """
import importlib.util, sys
from pathlib import Path
from tests.gpu import record
folder, out, without = Path(sys.argv[1]), sys.argv[2], sys.argv.pop(3)
record.probe = lambda: "NVIDIA X, driver 1"
record.RUNS = {False: (folder, folder / "unused.json")}
record.compile_kernels = lambda: print("compiles")
if without:
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None if name == "xdist" else find(name)
sys.argv[1:] = ["--out", out, "--processes", "2", "--", "-c", sys.argv[3]]
sys.exit(record.main())
"""
BOTH = ["compiles", "gpu and not alone: 2 at a time", "6 passed", "gpu and alone: 1 at a time"]
ONE = ["pytest-xdist is not installed: one process runs all tests", "gpu: 1 at a time"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "without", "failed", "order"),
    [("", "", 0, BOTH), (FAILING, "", 1, BOTH[:2] + BOTH[3:]), ("", "xdist", 0, ONE)],
    ids=["both passes", "one fails and the other runs", "without xdist"],
)
def test_both_passes_are_one_record(tmp_path, more, without, failed, order):
    (tmp_path / "test_few.py").write_text(TESTS + more)
    out = tmp_path / "found.json"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OPENBLAS"))}
    env |= {"PYTHONPATH": str(ROOT)} | ({} if without else {"WANTED": "1"})
    given = [str(tmp_path), str(out), without, str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, cwd=ROOT, env=env,
        timeout=120,
    )  # fmt: skip
    assert out.is_file(), done.stdout + done.stderr
    found, said = json.loads(out.read_text()), done.stdout
    assert done.returncode == failed and found["failed"] == failed, said
    assert (found["passed"], found["skipped"]) == (7, 1), said
    assert (found["device"], found["driver"]) == ("NVIDIA X", "1") and found["duration_s"] > 0
    at = [said.index(words) for words in order]
    assert at == sorted(at) and len(re.findall("slowest 25 dur", said)) == (1 if without else 2)


@pytest.mark.parametrize(("cores", "processes"), [(3, 0), (4, 2), (128, 6)])
def test_processes_follow_from_the_cores(monkeypatch, cores, processes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: set(range(cores)))
    markers = ["gpu"] if not processes else ["gpu and not alone", "gpu and alone"]
    assert [each.markers for each in record.passes(False)] == markers
    assert record.passes(False)[0].processes == processes
    assert record.passes(True) == [record.Pass("gpu")]
    for statuses, worst in (([0, 5], 0), ([5, 5], 5), ([1, 0], 1), ([0, 2], 2)):
        assert record.worst(statuses) == worst


def test_what_modules_want_is_asked_and_compiled_once(monkeypatch):
    modules = sorted((ROOT / "tests" / "gpu").glob("test_cuda_*.py"))
    telling = {path.stem for path in modules if "\ndef kernels(sm: int)" in path.read_text()}
    using = {path.stem for path in modules if "compile_side_by_side(backend" in path.read_text()}
    assert telling == using == {f"test_cuda_{name}" for name in compile_kernels.MODULES}
    asked = []
    monkeypatch.setattr(nvrtc, "cubin", lambda *of, sources: asked.append((*of, sources)))
    both = compile_kernels.of_module("tunings", 90), compile_kernels.of_module("tiles", 90)
    sources = compile_kernels.of_tests([*both, both[0]])
    assert len(sources) == len(set(sources)) > len(both[0] | both[1])
    for source in sources:
        compile_kernels.compile_one(source, 90)
    assert len(asked) == len(sources) and {arch for _, arch, *_ in asked} == {"sm_90"}
    assert [file for file, *_, folder in asked if folder] == ["attention_simple", "mul_mat"]


@pytest.mark.slow
def test_every_process_finds_the_same_tests(monkeypatch):
    """Processes that share tests must name them alike, whatever the hashes of strings are."""
    command = "-m pytest tests/gpu --collect-only -q -m gpu -o addopts= -p no:cacheprovider"
    found = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        shown = subprocess.run(
            [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        ids = tuple(line for line in shown.stdout.splitlines() if "::" in line)
        assert len(ids) > 1000, shown.stdout[-500:]
        found.add(ids)
    assert len(found) == 1
