"""NVTX ranges reach a tool: a library that NVTX loads by itself counts the recorder's ranges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import nvtx_injection

pytestmark = pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)

# Runs in a process of its own: NVTX looks for its tool once, at its first call.
PROGRAM = """
import json, os, sys
sys.path.insert(0, os.environ["HELPER"])
import nvtx_injection
tool = nvtx_injection.Counter(os.environ["LIBRARY"])
from workbench.trace.spans import Recorder
recorder = Recorder(nvtx={nvtx}, record={record})
with recorder.span("step", "step", step=0):
    for split, n in ((0, 1), (1, 40)):
        with recorder.span(f"split {{split}}", "split", split=split):
            for i in range(n):
                handle = recorder.begin(f"node-{{i}}")
                recorder.end(handle, f"node-{{i}}", "launch", 0, dict(index=i))
    recorder.add("node-0", "device", "embedded stream 0", 1, 2, index=0)
    try:
        with recorder.span("logits", "read"):
            raise OSError
    except OSError:
        pass
json.dump(dict(
    loaded=tool.loaded, pushes=tool.pushes, pops=tool.pops, max_depth=tool.max_depth,
    host=[s.name for s in sorted(recorder.spans, key=lambda s: -s.end_ns) if s.lane == "host"],
    other=[s.name for s in recorder.spans if s.lane != "host"],
), sys.stdout)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvtx") / "libnvtxtool.so"
    nvtx_injection.write_library(path)
    return path


def run(library: Path, injected: bool = True, nvtx: bool = True, record: bool = True) -> Any:
    env = {k: v for k, v in os.environ.items() if k != "NVTX_INJECTION64_PATH"}
    env |= {"HELPER": str(Path(__file__).parent), "LIBRARY": str(library)}
    if injected:
        env["NVTX_INJECTION64_PATH"] = str(library)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(nvtx=nvtx, record=record)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_host_span_is_one_range(library: Path) -> None:
    seen = run(library)
    assert seen["loaded"]
    # 1 step, 2 splits, 41 nodes, 1 read; the device span is no range of the host's
    assert len(seen["host"]) == 45 and seen["other"] == ["node-0"]
    assert sorted(m for _, m in seen["pushes"]) == sorted(seen["host"])
    assert len(seen["pops"]) == len(seen["pushes"])
    assert {d for d, _ in seen["pushes"]} == set(seen["pops"]) == {"workbench"}
    assert [m for _, m in seen["pushes"]][:4] == ["step", "split 0", "node-0", "split 1"]
    assert seen["max_depth"] == 3  # step, split, node


def test_ranges_without_a_record(library: Path) -> None:
    """Under nsys nothing need be recorded: the ranges are the same."""
    seen = run(library, record=False)
    assert (len(seen["pushes"]), len(seen["host"])) == (45, 0)


@pytest.mark.parametrize(("injected", "nvtx"), [(False, True), (True, False)])
def test_no_tool_or_no_ranges(library: Path, injected: bool, nvtx: bool) -> None:
    seen = run(library, injected=injected, nvtx=nvtx)
    assert not seen["loaded"] and not seen["pushes"]
    assert len(seen["host"]) == 45


def test_both_machines_have_a_library(tmp_path: Path) -> None:
    for machine, (e_machine, _) in nvtx_injection.MACHINES.items():
        path = tmp_path / machine
        nvtx_injection.write_library(path, machine)
        data = path.read_bytes()
        assert data[:4] == b"\x7fELF" and data[18] == e_machine and len(data) < 1024
