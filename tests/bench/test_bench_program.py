"""What the host pays to build a program, to reuse one, and to import the package.

Requirements: at most 20 ms to build the program of a 32-layer llama from nothing (graph, splits,
arena and commands, on one core), at most 100 us to find the kept one of a step's shape; `import
workbench` under 0.5 s, the interpreter's start included.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.steps import Steps
from workbench.backend.issue.prepared import Prepared
from workbench.backend.null import open_backend
from workbench.engine.batch import NOBODY
from workbench.engine.programs import KeepByShape, Key
from workbench.graph.ir import StepShape


@pytest.fixture(scope="module")
def steps():
    return Steps(n_cells=2048)


@pytest.fixture(scope="module")
def prepare(steps):
    """Binds a program to addresses: what a rebuild pays on top."""
    backends = [open_backend(), open_backend()]
    held = {r.buffer: backends[1].allocate(1, r.buffer.space) for r in steps.residents.values()}

    def prepared(program):
        made = {b: backends[1].allocate(b.nbytes, b.space) for b in program.buffers}
        return Prepared(program, backends, held | made)

    return prepared


def test_build_from_nothing(benchmark, steps):
    def built():
        steps.buffers.clear()
        return steps.program()

    assert len(benchmark(built).commands) > 32 * 20


def test_prepare(benchmark, steps, prepare):
    program = steps.program()
    assert benchmark(prepare, program).program is program


def test_reuse(benchmark, steps, prepare):
    kept = KeepByShape(lambda key, phases, cell: prepare(steps.program()), NOBODY)
    key = Key(StepShape(1, 1, 256), 0)
    first = kept.get(key)
    assert benchmark(kept.get, key) is first and kept.reused


def test_import(benchmark):
    command = [sys.executable, "-c", "import workbench"]
    benchmark.pedantic(subprocess.run, (command,), {"check": True}, rounds=5)
