"""What a server does before it takes requests, and what is left for the requests to pay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.backend.cuda.fake_cuda import fake_backend
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cuda.kernels import nvrtc
from workbench.config import BEST, KVGrowth, TogglePreset
from workbench.engine.slots import first_steps as room
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling
from workbench.server.serving import serving

SLOTS, ROOM = 4, 96
PLANNED = {"plans": "ours", "plan_scope": "step"}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No limit of time, which a busy machine would reach."""
    monkeypatch.setattr(room, "AT_MOST_S", 600.0)
    monkeypatch.setattr(room, "BUILDING_S", 600.0)


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("tiny-llama", "Q8_0")


def served(path: Path, device: str, **more: str) -> wb.Engine:
    """An engine with a server's toggles."""
    return wb.Engine.load(
        path, device=device, n_ctx=SLOTS * ROOM, n_seqs=SLOTS, n_ubatch=16, n_kv_pad=32, threads=1,
        toggles=serving(device, TogglePreset(BEST, more)),
    )  # fmt: skip


def asks(n: int, seed: int) -> Iterator[Ask]:
    rng = np.random.default_rng(seed)
    for number in range(n):
        tokens = rng.integers(3, 900, int(rng.integers(1, 60))).astype(np.int32)
        n_made = int(rng.integers(1, 30))
        yield Ask(
            1000 * seed + number, tokens, n_made, Sampling(0.8), number, frozenset(), None, None
        )


def load(slots: Slots, n: int, seed: int) -> dict[int, list[int]]:
    """Serves n requests, SLOTS at a time; their tokens."""
    left, made = [*asks(n, seed)][::-1], dict[int, list[int]]()
    n_open = 0
    while left or n_open:
        while left and n_open < SLOTS:
            slots.ask(left.pop())
            n_open += 1
        found = slots.step()
        n_open -= len(found.ended)
        for token in found.tokens:
            made.setdefault(token.number, []).append(token.token)
    return made


@pytest.mark.parametrize("more", [{}, PLANNED], ids=["plain", "planned"])
def test_first_requests_build_little_and_compile_nothing(path, monkeypatch, more):
    compiled: list[str] = []
    compile_kernel = compiler.compile_kernel

    def noted(name: str, body: Any) -> Any:
        compiled.append(name)
        return compile_kernel(name, body)

    monkeypatch.setattr(compiler, "compile_kernel", noted)
    with served(path, "embedded", **more) as engine:
        slots = Slots(engine, SLOTS)
        op_table.kernel.cache_clear()
        n_ready = first_steps(engine, SLOTS)
        before, n_compiled = engine.counters, len(compiled)
        assert n_compiled > 5 and n_ready == before["programs_built"] // engine.period
        load(slots, 16, 1)
        after = engine.counters
        n_built, n_steps = (after[k] - before[k] for k in ("programs_built", "steps"))
        assert len(compiled) == n_compiled, compiled[n_compiled:]
        assert n_steps > 60 and n_built < n_steps / 10
        if more:
            assert before["plans_captured"] >= n_ready
            assert after["plans_captured"] - before["plans_captured"] <= n_built


def test_nothing_is_left_behind(path):
    """The same tokens, counts and cells as of an engine that took no first steps."""
    with served(path, "embedded") as engine, engine.variant(engine.toggles) as other:
        slots, plain = Slots(engine, SLOTS), Slots(other, SLOTS)
        first_steps(engine, SLOTS)
        assert engine.cache.n_used == 0 and slots.totals() == plain.totals()
        assert not engine.issuer and engine.cache.moved is None and not engine.cache.copied
        assert load(slots, 12, 2) == load(plain, 12, 2)


def test_copies_of_cells_and_logits_find_all_made(path, monkeypatch):
    """Neither a copy of cells nor an answer with log-probabilities drops the programs kept."""
    with served(path, "embedded") as engine:
        slots, dropped = Slots(engine, SLOTS), list[str]()
        first_steps(engine, SLOTS)
        n_kept, forget = len(engine.steps.programs._kept), engine.bound.workspace._on_grow
        monkeypatch.setattr(
            engine.bound.workspace, "_on_grow", lambda: (dropped.append("all"), forget())
        )
        tokens = np.arange(3, 60, dtype=np.int32)
        for number in range(SLOTS):
            slots.ask(Ask(number, tokens, 8, Sampling(), 0, frozenset(), 2, None))
            slots.step()
        scored = np.arange(3, 90, dtype=np.int32)
        slots.ask(Ask(SLOTS, scored, 1, Sampling(), n_logprobs=2, scores_prompt=True))
        while not slots.idle:
            slots.step()
        assert slots.totals().n_cached_tokens > 50 and not dropped
        assert len(engine.steps.programs._kept) >= n_kept


@pytest.mark.parametrize("growth", KVGrowth)
def test_tokens_alone_are_made_at_every_extent(path, growth):
    with served(path, "embedded", kv_growth=growth) as engine:
        first_steps(engine, SLOTS)
        cache, built = engine.cache, engine.counters["programs_built"]
        for extent in {cache.growth.extent(n) for n in range(1, cache.n_ctx_seq + 1)}:
            for n in (1, 2, 4):
                engine.reset()
                for s in range(n):
                    engine.prefill([5] * (min(extent, cache.n_ctx_seq) - 2), "none", sequence=s)
                before = engine.counters["programs_built"]
                for _ in range(2):
                    engine.submit([(s, [5], "last") for s in range(n)], engine.can_draw).wait()
                assert engine.counters["programs_built"] == before, (extent, n)
        assert built > 6


def test_a_limit_of_time_ends_it(path, monkeypatch):
    monkeypatch.setattr(room, "BUILDING_S", 0.0)
    with served(path, "host") as engine:
        assert first_steps(engine, SLOTS) <= 1
        assert engine.cache.n_used == 0


@pytest.mark.parametrize("depth", [200, 1200])
def test_cuda_kernels_beside_caches_of_any_length_are_made(path, monkeypatch, depth):
    """Attention of some tokens is cut by the extent: 2, 4 or 8 blocks share its cells."""
    fake_backend(monkeypatch)
    monkeypatch.setattr(room, "AT_MOST_S", 0.0)  # as if there were time for none
    ready, cubin = list[set[Any]](), nvrtc.cubin
    late: set[Any] = set()

    def noted(file: str, arch: str, defines: Any = (), sources: Any = None) -> bytes:
        late.update({(file, defines)} - ready[0])
        return cubin(file, arch, defines, sources=sources)

    monkeypatch.setattr(nvrtc, "compile_many", lambda wanted, arch, left: ready.append({*wanted}))
    with wb.Engine.load(
        path, device="cuda", n_ctx=SLOTS * 2048, n_seqs=SLOTS,
        toggles=serving("cuda", TogglePreset(BEST)),
    ) as engine:  # fmt: skip
        first_steps(engine, SLOTS)
        monkeypatch.setattr(nvrtc, "cubin", noted)

        def deep(sequence: int) -> None:
            for _ in range(depth // 100):
                engine.submit([(sequence, [5] * 100, "none")], engine.can_draw).wait()

        others = range(1, SLOTS)
        for sequence in others:
            deep(sequence)
        for n, width in itertools.product((2, 10, 15, 30, 60, 120, 250, 400), range(SLOTS)):
            engine.cache.remove(0)
            if not width:
                deep(0)
            beside = [(sequence, [5], "last") for sequence in others[:width]]
            engine.submit([(0, [5] * n, "last"), *beside], engine.can_draw).wait()
    assert not late
