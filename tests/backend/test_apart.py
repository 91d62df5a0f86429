"""Kernels that other processes compile, into the cache of this user."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.backend import apart, compiled
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cuda.kernels import nvrtc
from workbench.common.progress import Bar

ON_CPU = [((op,), "file") for op in ("add", "mul", "rms_norm", "swiglu")]
ON_GPU = [("stamp", ()), ("gate", ()), ("repack", ()), ("elementwise", ())]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and cores enough."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(apart, "usable_cores", lambda: 4)
    return compiled.cache_dir()


def kept() -> list[bool]:
    return [op_table.is_kept(*one) for one in ON_CPU]


def test_what_the_cache_of_the_cpu_lacks_is_compiled_and_reported():
    before = compiled.so_far()
    op_table.compile_many([*ON_CPU, *ON_CPU, (("draw",), "file")])
    assert all(kept())
    now = compiled.so_far().since(before)
    assert now.n == len(ON_CPU) and now.ns > 0
    op_table.compile_many(ON_CPU)
    assert compiled.so_far().since(before) == now, "nothing is compiled twice"


@pytest.mark.parametrize(("n", "cores"), [(3, 64), (4, 3), (0, 64)])
def test_few_kernels_or_few_cores_start_no_process(monkeypatch, n, cores):
    monkeypatch.setattr(apart, "usable_cores", lambda: cores)
    op_table.compile_many(ON_CPU[:n])
    assert not any(kept())


def test_where_no_process_can_be_had_the_caller_compiles(monkeypatch, cache):
    monkeypatch.setattr(sys, "executable", str(cache / "nowhere"))
    op_table.compile_many(ON_CPU)
    assert not any(kept())


def test_a_kernel_that_fails_takes_few_others_with_it():
    """Those that its process had before it. The caller compiles it again, and has the error."""
    op_table.compile_many([*ON_CPU[:2], (("mul_mat", "no type"), "file"), *ON_CPU[2:]])
    assert sum(kept()) >= 2
    with pytest.raises(KeyError):
        op_table.kernel(("mul_mat", "no type"))


def test_what_the_cache_of_a_gpu_lacks_is_compiled_by_others(monkeypatch, cache):
    """Not here: this process only looks. The bar counts each kernel once, also what is there."""
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: pytest.fail("compiled here"))
    started, apart_ = list[int](), nvrtc.compiled_apart
    monkeypatch.setattr(
        nvrtc, "compiled_apart",
        lambda module, wanted: started.append(len(wanted)) or apart_(module, wanted),
    )  # fmt: skip
    for _ in range(2):
        left = Bar("", len(ON_GPU), "launches", None)
        nvrtc.compile_many([*ON_GPU, *ON_GPU], "sm_90", left)
        assert left.done == len(ON_GPU) == len([*cache.glob("*.cubin")])
    assert started == [len(ON_GPU), 0]
