"""Kept programs on the GPU: each layer of reuse done again, the whole cache masked, and steps with
outputs and without by turns."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from tests.contract.test_contract_logits import engine, one_by_one, tokens_for  # noqa: F401 - a fixture
from tests.engine.test_kept_programs import MADE, MAKING, Steps, growth
from workbench.benchmarks.compare.answers import compare_logits
from workbench.config import Toggles
from workbench.engine.programs import REDO

pytestmark = pytest.mark.gpu

N_TOKENS = 300  # one n_kv_pad of 256 and more
STEP = {"plan_scope": "step", "sync": "implicit"}
WORK = [{}, {"plans": "ours"}, {"plans": "today", **STEP}, {"plans": "ours", **STEP}]
# Products of a prompt are rounded to halves, and attention sums in as many parts as n_kv wants.
ROUNDING = {"F32": 2e-6, "Q4_0": 2e-3, "Q8_0": 2e-3, "BF16": 2e-4}


@pytest.mark.parametrize("more", WORK, ids=lambda more: ",".join(more.values()))
@pytest.mark.parametrize("way", ["set_rows", "patch_pointers", "pointer_table"])
def test_layers_done_again_change_nothing(engine, way, more):  # noqa: F811
    """Each alone with `set_rows`, all together with every way."""
    tokens = tokens_for("tiny-llama", 60)
    kept = Toggles(graph_reuse=way, **more)
    with engine("tiny-llama", "Q4_0", "cuda").variant(kept) as used:
        wanted = one_by_one(used, tokens)
        whole = used.counters
        names = [name for name in whole if name.startswith("plans_") and name[-3:] != "_ns"]
        for name in (*REDO, "redo") if way == "set_rows" else ("redo",):
            with used.variant(kept.switched(name, "on")) as again:
                assert np.array_equal(one_by_one(again, tokens), wanted), name
                counters = again.counters
                again.step([1])
                after = again.counters
            assert {n: counters[n] for n in names} == {n: whole[n] for n in names}, name
            assert counters["programs_reused"] == len(tokens) - 1
            spent = {p for p in MADE if after[f"{p}_ns"] > counters[f"{p}_ns"]}
            assert spent == {p for n in Toggles.members(name) for p in REDO[n]}


@pytest.mark.parametrize("more", WORK, ids=lambda more: ",".join(more.values()))
@pytest.mark.parametrize(
    ("preset", "quant"), [("tiny-llama", "F32"), ("tiny-llama", "Q4_0"), ("tiny-qwen3", "BF16")]
)
def test_the_whole_cache_masked_answers_the_same(tiny_model, preset, quant, more):
    """Prompts, ubatches and tokens; cells that nobody owns are in every part of the cache."""
    tokens = tokens_for(preset, N_TOKENS)
    answers = []
    with wb.Engine.load(
        tiny_model(preset, quant), device="cuda", n_ctx=4096, n_ubatch=128, toggles=Toggles()
    ) as base:
        for growth_of in ("step", "full"):
            toggles = Toggles(graph_reuse="set_rows", kv_growth=growth_of, **more)
            with base.variant(toggles) as used:
                rows = [used.prefill(tokens[:200], outputs="all"), used.prefill(tokens[200:230])]
                steps = Steps(used)
                rows.append(one_by_one(used, tokens[230:]))
                n = len(tokens) - 230
                assert steps() == ((1, n - 1) if growth_of == "full" else (2, n - 2))
                answers.append(np.concatenate(rows))
    answer = compare_logits(*answers, "rounding", ROUNDING[quant])
    assert answer.holds, str(answer)


def test_a_plan_for_each_n_kv_or_one_for_all(engine):  # noqa: F811
    tokens = tokens_for("tiny-llama", N_TOKENS)
    found = {}
    for growth_of in ("step", "full"):
        toggles = Toggles(graph_reuse="set_rows", kv_growth=growth_of, plans="ours")
        with engine("tiny-llama", "Q8_0", "cuda").variant(toggles) as used:
            one_by_one(used, tokens)
            found[growth_of] = used.counters["plans_captured"]
            assert used.counters["plans_replayed"] == len(tokens)
    assert found == {"step": 2, "full": 1}


@pytest.mark.parametrize("rule", ["today", "ours"])
def test_steps_with_outputs_and_without_do_not_take_each_others_entries(tiny_model, rule):
    path = tiny_model("tiny-llama", "Q8_0")
    full = Toggles(kv_growth="full", step_wait="outputs", graph_reuse="set_rows")
    with wb.Engine.load(path, device="cuda", n_ctx=128, n_kv_pad=32, toggles=full) as eager:
        wanted, _ = growth(eager, ("programs_built",), 12)
        with eager.variant(full.switched("plans", rule)) as used:
            found, grown = growth(used, (*MAKING, "plans_issued", "plans_replayed"), 12)
    assert grown == [*[0] * len(MAKING), 0, 24]
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
