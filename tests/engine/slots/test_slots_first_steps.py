"""What a server does before it takes requests, and what is left for the requests to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.served import Told, go_on, ids, serve
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
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


def asks(n: int, seed: int) -> list[Ask]:
    sizes = np.random.default_rng(seed).integers((1, 1), (60, 30), (n, 2)).tolist()
    return [Ask(i, ids(n, 99 * seed + i), most, Sampling(0.8), i)
            for i, (n, most) in enumerate(sizes)]  # fmt: skip


@pytest.mark.parametrize("more", [{}, PLANNED], ids=["plain", "planned"])
def test_first_requests_build_little_and_compile_nothing(path, monkeypatch, more):
    """And get the same tokens as of an engine that took no first steps; nothing is left behind."""
    compiled: list[str] = []
    compile_kernel = compiler.compile_kernel

    def noted(name: str, body: Any) -> Any:
        compiled.append(name)
        return compile_kernel(name, body)

    monkeypatch.setattr(compiler, "compile_kernel", noted)
    with served(path, "embedded", **more) as engine, engine.variant(engine.toggles) as other:
        slots, plain = Slots(engine, SLOTS), Slots(other, SLOTS)
        op_table.kernel.cache_clear()
        n_ready = first_steps(engine, SLOTS)
        assert engine.cache.n_used == 0 and slots.totals() == plain.totals()
        assert (
            not engine.issuer.under_way and engine.cache.moved is None and not engine.cache.copied
        )
        before, n_compiled = engine.counters, len(compiled)
        assert n_compiled > 5 and n_ready == before["programs_built"] // engine.period
        found = serve(slots, asks(16, 1)).tokens
        after = engine.counters
        n_built, n_steps = (after[k] - before[k] for k in ("programs_built", "steps"))
        assert len(compiled) == n_compiled, compiled[n_compiled:]
        assert n_steps > 60 and n_built < n_steps / 10
        if more:
            assert before["plans_captured"] >= n_ready
            assert after["plans_captured"] - before["plans_captured"] <= n_built
        assert found == serve(plain, asks(16, 1)).tokens


def test_copies_of_cells_and_logits_find_all_made(path, monkeypatch):
    """Neither a copy of cells nor an answer with log-probabilities drops the programs kept."""
    with served(path, "embedded") as engine:
        slots, dropped, told = Slots(engine, SLOTS), list[str](), Told()
        first_steps(engine, SLOTS)
        n_kept, forget = len(engine.steps.programs._kept), engine.bound.workspace._on_grow
        monkeypatch.setattr(
            engine.bound.workspace, "_on_grow", lambda: (dropped.append("all"), forget())
        )
        tokens = np.arange(3, 60, dtype=np.int32)
        for number in range(SLOTS):
            slots.ask(Ask(number, tokens, 8, Sampling(), 0, frozenset(), 2, None))
            go_on(slots, 1, told)
        scored = np.arange(3, 90, dtype=np.int32)
        last = Ask(SLOTS, scored, 1, Sampling(), n_logprobs=2, scores_prompt=True)
        serve(slots, [last], told=told)
        assert slots.totals().n_cached_tokens > 50 and not dropped
        assert len(engine.steps.programs._kept) >= n_kept


@pytest.mark.parametrize("growth", KVGrowth)
def test_every_extent_and_width_is_made_ready(path, growth, monkeypatch):
    with served(path, "embedded", kv_growth=growth) as engine:
        first_steps(engine, SLOTS)
        built, pads = engine.counters["programs_built"], engine.cache.growth
        for extent in {pads.extent(n) for n in range(1, ROOM)}:
            for n in range(1, SLOTS + 1):
                engine.reset()
                for s in range(n):
                    engine.prefill([5] * (min(extent, ROOM) - 2), "none", sequence=s)
                before = engine.counters["programs_built"]
                for _ in range(2):
                    engine.submit([(s, [5], "last") for s in range(n)], engine.can_draw).wait()
                assert engine.counters["programs_built"] == before, (extent, n)
        assert built > 6
    monkeypatch.setattr(room, "BUILDING_S", 0.0)
    with served(path, "host") as engine:  # which a limit of time ends
        assert first_steps(engine, SLOTS) <= 1
        assert engine.cache.n_used == 0
