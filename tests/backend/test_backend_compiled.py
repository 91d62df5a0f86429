"""What was compiled is counted, said in a line, and over before a clock runs."""

from __future__ import annotations

import io
import re
import threading
import time
from pathlib import Path

import pytest

import workbench as wb
from workbench.backend import compiled
from workbench.backend.compiled import Compiled, so_far, took
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cuda.kernels import nvrtc
from workbench.common import progress
from workbench.common.progress import Bar, shown_on
from workbench.engine import engine as engine_module
from workbench.graph.ir import StepShape

S = 1_000_000_000


@pytest.fixture(autouse=True)
def counted_from_nothing(monkeypatch):
    for name, nothing in (("_found", Compiled()), ("_until_ns", 0), ("_said", Compiled())):
        monkeypatch.setattr(compiled, name, nothing)


@pytest.mark.parametrize("device", ["host", "embedded"])
def test_kernels_are_compiled_before_the_prompt_is_timed(tiny_model, monkeypatch, request, device):
    """Each takes two seconds, by the count."""
    wanted, looked = list[int](), list[int]()  # when kernels were, and when the engine's clock was
    compile_kernel = compiler.compile_kernel

    def compile_slowly(name, body):
        wanted.append(time.perf_counter_ns())
        made = compile_kernel(name, body)
        took(time.perf_counter_ns() - 2 * S, Path.home() / ".cache" / "kernels")
        monkeypatch.setattr(compiled, "_until_ns", 0)  # one after the other, as far as it counts
        return made

    op_table.kernel.cache_clear()
    request.addfinalizer(op_table.kernel.cache_clear)
    monkeypatch.setattr(compiler, "compile_kernel", compile_slowly)
    for name in ("SHOWN_AFTER_S", "LINE_EVERY_S"):
        monkeypatch.setattr(progress, name, 0.0)
    path = tiny_model("tiny-llama", "Q4_0")
    with wb.Engine.load(path, device=device, n_ctx=64, n_ubatch=16, toggles="baseline") as engine:
        with shown_on(io.StringIO()) as out:
            engine.make_ready([StepShape(1, 1, 256)])
        clock = engine_module.now_ns
        monkeypatch.setattr(engine_module, "now_ns", lambda: looked.append(clock()) or looked[-1])
        engine.generate(tokens=list(range(3, 23)), max_tokens=3)
    assert len(wanted) > 5 and max(wanted) < min(looked)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("compiling kernels: ")]
    assert re.fullmatch(r"compiling kernels: 1 of (\d+) launches", lines[0]), "of unlike launches"
    assert len(lines) < 40, "of launches that are alike one"


def test_the_line_is_said_once():
    took(time.perf_counter_ns() - int(12.3 * S), Path.home() / ".cache" / "workbench")
    with shown_on(io.StringIO()) as out:
        compiled.say()
        took(time.perf_counter_ns() - 1000, Path("/x"))  # not worth a line
        compiled.say()
    line = "compiling kernels for this device: 12.3 s, kept in ~/.cache/workbench\n"
    assert out.getvalue() == line


def test_what_is_in_the_cache_counts_for_nothing(tmp_path, monkeypatch):
    (tmp_path / "tiny.cu").write_text('extern "C" __global__ void k(int* p) { *p = 1; }')
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(nvrtc, "source_dir", lambda: tmp_path)
    monkeypatch.setattr(nvrtc, "cache_dir", lambda: tmp_path / "kept")
    left = Bar("compiling", 2, "kernels", None)
    for _ in range(2):
        nvrtc.compile_many([("tiny", ())], "sm_90", left)
        assert so_far().n == 1 and so_far().ns > 0 and so_far().folder == tmp_path / "kept"
    assert left.done == 2


def test_time_of_several_threads_counts_once():
    begun = time.perf_counter_ns() - 2 * S
    threads = [threading.Thread(target=took, args=(begun, Path("/x"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert so_far().n == 4 and 2 * S <= so_far().ns < 3 * S


def test_a_kernel_is_what_it_includes():
    """Another header may change, and it is not compiled again."""
    headers = {
        "a.cuh": b'#pragma once\n#include "b.cuh"\n', "b.cuh": b'  #include "a.cuh"\nint b;',
        "c.cuh": b"int c;",
    }  # fmt: skip
    source = b'// #include "c.cuh"\n#include <cuda_fp16.h>\n#include "a.cuh"\nvoid f();'
    assert list(nvrtc.included(source, headers)) == ["a.cuh", "b.cuh"]
    assert nvrtc.included(b"void f();", headers) == {}
