"""What a test's steps launch is compiled before its first repetition, in a warm-up or out of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.backend.cuda.fake_cuda import fake_backend
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cuda.kernels import nvrtc
from workbench.benchmarks import workload
from workbench.benchmarks.workload import acts, draw_tokens, parse, take_sample, warm_up
from workbench.config import Toggles

SERVED = {
    "kv_cache": "per_sequence", "graph_reuse": "set_rows", "batch_sizes": "padded",
    "kv_growth": "geometric", "skip_masked_kv": "tail",
}  # fmt: skip
TOGGLES = {"plain": Toggles(graph_reuse="set_rows"), "served": Toggles(**SERVED)}
TESTS = ("tg40", "pp37+tg3", "tg3@d33", "pp20+tg4@b3", "pp20+tg4@s3", "tg2@b19")
BOTH = [*itertools.product(TOGGLES, TESTS)]


def load(path: Path, device: str, toggles: Toggles, test: str) -> wb.Engine:
    n_seqs = max(2, parse(test).n_seqs)
    return wb.Engine.load(
        path, device=device, n_ctx=64 * n_seqs, n_seqs=n_seqs, n_ubatch=16, n_kv_pad=32,
        threads=1, toggles=toggles,
    )  # fmt: skip


def shapes_taken(monkeypatch: pytest.MonkeyPatch, engine: wb.Engine) -> list[Any]:
    """The shapes of the programs that an engine asks for from now on."""
    found: list[Any] = []
    get = engine.steps.programs.get

    def noted(key: Any, cell: int = 0) -> Any:
        found.append(key.shape)
        return get(key, cell)

    monkeypatch.setattr(engine.steps.programs, "get", noted)
    return found


@pytest.mark.parametrize(("toggles", "test"), BOTH)
def test_a_rehearsal_has_the_shapes_of_the_steps(tiny_model, monkeypatch, toggles, test):
    asked = parse(test)
    with load(tiny_model("tiny-llama", "Q8_0"), "null", TOGGLES[toggles], test) as engine:
        wanted = engine.rehearsal.from_empty(acts(asked, engine.config.n_ubatch))
        taken = shapes_taken(monkeypatch, engine)
        take_sample(engine, asked, draw_tokens(asked, engine.model.n_vocab, 0))
        assert wanted == [*dict.fromkeys(taken)] and engine.n_past == asked.n_ctx(
            engine.cache.n_regions if asked.shared else 1
        )


def watched(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[], int]) -> list[int]:
    """How much was compiled when each repetition began, and when it had ended."""
    seen: list[int] = []

    def take(*given: Any, **named: Any) -> Any:
        seen.append(wanted())
        made = take_sample(*given, **named)
        seen.append(wanted())
        return made

    monkeypatch.setattr(workload, "take_sample", take)
    return seen


@pytest.mark.parametrize("device", ["embedded", "host"])
@pytest.mark.parametrize(("toggles", "test"), BOTH)
def test_no_repetition_compiles_a_cpu_kernel(tiny_model, monkeypatch, device, toggles, test):
    """From an empty cache: each kernel that this process has is forgotten."""
    compiled: list[str] = []
    compile_kernel = compiler.compile_kernel

    def noted(name: str, body: Any) -> Any:
        compiled.append(name)
        return compile_kernel(name, body)

    with load(tiny_model("tiny-llama", "Q8_0"), device, TOGGLES[toggles], test) as engine:
        monkeypatch.setattr(compiler, "compile_kernel", noted)
        op_table.kernel.cache_clear()
        seen = watched(monkeypatch, lambda: len(compiled))
        warm_up([engine], parse(test), 0, None, once=True)
    assert len(seen) == 2 and seen[0] == seen[1] > 5


@pytest.mark.parametrize(("toggles", "test"), BOTH)
def test_no_repetition_compiles_a_cuda_kernel(tiny_model, monkeypatch, toggles, test):
    """What launches ask NVRTC for was asked of many at once before."""
    fake_backend(monkeypatch)
    ready: set[Any] = set()
    late: set[Any] = set()
    cubin = nvrtc.cubin

    def noted(file: str, arch: str, defines: Any = (), sources: Any = None) -> bytes:
        if (file, defines) not in ready:
            late.add((file, defines))
        return cubin(file, arch, defines, sources=sources)

    monkeypatch.setattr(nvrtc, "compile_many", lambda wanted, arch, left: ready.update(wanted))
    with load(tiny_model("tiny-llama", "Q4_K"), "cuda", TOGGLES[toggles], test) as engine:
        monkeypatch.setattr(nvrtc, "cubin", noted)
        warm_up([engine], parse(test), 0, None, once=True)
    assert len(ready) > 3 and not late


def test_a_prompt_and_its_tokens_find_theirs(tiny_model, monkeypatch):
    """`generate` rehearses what comes, from the cache as it is."""
    with load(tiny_model("tiny-llama", "Q8_0"), "embedded", TOGGLES["served"], "tg1") as engine:
        engine.prefill([1] * 21)
        made: list[Any] = []
        monkeypatch.setattr(engine, "make_ready", made.extend)
        taken = shapes_taken(monkeypatch, engine)
        engine.generate(tokens=[5] * 18, max_tokens=10)
        assert {*taken} and {*taken} <= {*made}
