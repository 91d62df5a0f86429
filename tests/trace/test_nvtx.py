"""NVTX ranges reach a tool: a library that NVTX loads by itself hears of what an engine is told."""

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

from workbench.common.errors import UsageError
from workbench.config import EngineConfig
from workbench.engine.look import nvtx_ranges

linux = pytest.mark.skipif(
    not nvtx_injection.supported(), reason="the injection library is written for Linux only"
)

# Runs in a process of its own: NVTX looks for its tool once, at its first call.
PROGRAM = """
import json, sys
from workbench.engine.look.nvtx_ranges import ranges_of
ranges = ranges_of(sys.argv[1])
spent = []
clock = ranges.clock(lambda *told: spent.append(told[0]), lambda: 7)
with ranges.scope("prompt", "prompt", 512):
    step = ranges.start_step(3, 1, 40) if ranges.on else 0
    clock.end("batch", clock.begin("batch"))
    clock.begin("reuse")
    clock.leave()
    request = ranges.start("request", "request", 9)
    ranges.stop(step)
    try:
        with ranges.scope("server step", "server", 2):
            clock.begin("graph")
            raise OSError
    except OSError:
        pass
ranges.stop(request)
json.dump(dict(on=ranges.on, words=ranges.words, spent=spent), sys.stdout)
"""


def run(folder: Path, setting: str, tool: bool = True) -> tuple[Any, list[nvtx_injection.Event]]:
    """What the program says, and what its tool was told."""
    env = {k: v for k, v in os.environ.items() if k != "NVTX_INJECTION64_PATH"}
    env |= nvtx_injection.environment(folder) if tool else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, setting], env=env, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = nvtx_injection.logged(folder)
    return json.loads(done.stdout), told[0] if told else []


@linux
def test_where_a_tool_listens_auto_tells_it(tmp_path: Path) -> None:
    said, told = run(tmp_path, "auto")
    assert said == {"on": True, "words": "on, a tool listens", "spent": ["batch"]}
    begun = [
        (e.kind, e.name, e.category, e.payload) for e in told if e.kind in ("push", "start")
    ]  # fmt: skip
    assert begun == [
        ("push", "prompt", "prompt", 512),
        ("start", "step", "step", (3, 1, 40)),  # tokens and cells beside its number
        ("push", "batch", "build", 7),
        ("push", "reuse", "build", 7),
        ("start", "request", "request", 9),
        ("push", "server step", "server", 2),
        ("push", "graph", "build", 7),
    ]
    assert {e.domain for e in told} == {nvtx_ranges.DOMAIN}
    assert all(e.registered for e in told if e.name)
    assert nvtx_injection.balanced(told)  # the range of the failed phase, too


@linux
@pytest.mark.parametrize(
    ("setting", "tool", "words"),
    [("off", True, "off"), ("auto", False, "off"), ("on", False, "on, no tool listens")],
)
def test_no_tool_or_no_ranges(tmp_path: Path, setting: str, tool: bool, words: str) -> None:
    said, told = run(tmp_path, setting, tool)
    assert said == {"on": setting == "on", "words": words, "spent": ["batch"]} and not told


def test_without_the_package_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx_ranges, "_domain", lambda: None)
    assert nvtx_ranges.ranges_of("auto") is nvtx_ranges.OFF
    with pytest.raises(UsageError, match="nvtx=on: the package nvtx is not installed"):
        nvtx_ranges.ranges_of("on")


def test_the_setting_has_three_values() -> None:
    assert EngineConfig().nvtx == "auto"
    with pytest.raises(UsageError, match="nvtx='yes' must be one of auto, on, off"):
        EngineConfig(nvtx="yes")


def test_both_machines_have_a_library(tmp_path: Path) -> None:
    for machine, (e_machine, _) in nvtx_injection.MACHINES.items():
        path = tmp_path / machine
        nvtx_injection.write_library(path, machine)
        data = path.read_bytes()
        assert data[:4] == b"\x7fELF" and data[18] == e_machine and len(data) < 1024
