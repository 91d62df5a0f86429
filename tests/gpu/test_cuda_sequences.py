"""Several sequences on the GPU: each answered as alone, also in batches as a server has them, moved
cells as before, and cells given away while a step is under way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.engine import test_served_batches as served
from tests.engine.test_sequences import (
    MODELS,
    NEXT,
    PROMPTS,
    TRAINS,
    alone,
    submitted,
    together,
)
from workbench.benchmarks.compare.answers import compare_logits
from workbench.benchmarks.workload import draw_tokens, parse, take_sample
from workbench.config import Toggles

pytestmark = pytest.mark.gpu

# A step of other size takes other kernels: activations are rounded to 8 bits or to halves.
ROUNDING = {"F32": 2e-6, "BF16": 2e-4}
QUANTISED = 2e-3


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"),
        device="cuda",
        n_ctx=256,
        n_seqs=8,
        n_ubatch=32,
        toggles=Toggles(),
    ) as made:
        yield made


@pytest.mark.parametrize(("preset", "quant"), MODELS)
@pytest.mark.parametrize("toggles", ["baseline", "best"])
def test_each_sequence_is_answered_as_alone(tiny_model, preset, quant, toggles):
    with wb.Engine.load(
        tiny_model(preset, quant), device="cuda", n_ctx=256, n_seqs=8, n_ubatch=32, toggles=toggles
    ) as engine:
        wanted = alone(engine)
        for turn in range(4):
            engine.reset()
            for ours, theirs in zip(together(engine, turn), wanted, strict=True):
                answer = compare_logits(theirs, ours, "rounding", ROUNDING.get(quant, QUANTISED))
                assert answer.holds, str(answer)


@pytest.mark.parametrize(("preset", "quant"), served.MODELS)
def test_each_sequence_of_a_served_batch_is_answered_as_alone(tiny_model, preset, quant):
    allowed = ROUNDING.get(quant, QUANTISED)
    served.check_each_is_answered_as_alone(tiny_model(preset, quant), "cuda", allowed)


@pytest.mark.parametrize(("preset", "quant"), served.MODELS)
def test_company_of_a_served_batch_changes_no_bit(tiny_model, preset, quant):
    served.check_company_changes_no_bit(tiny_model(preset, quant), "cuda")


def test_served_tokens_are_those_of_each_alone(tiny_model):
    path = tiny_model("tiny-llama", "F32")
    served.check_served_tokens_are_those_of_each_alone(path, "cuda", ROUNDING["F32"])


@pytest.mark.parametrize("values", [{}, {"step_wait": "outputs"}, *TRAINS],
                         ids=lambda v: ",".join(v.values()))  # fmt: skip
def test_cells_may_go_while_a_step_is_under_way(engine, values):
    engine.reset()
    wanted = submitted(engine, waits=True)
    with engine.variant(Toggles(**values)) as variant:
        for _ in range(5):
            variant.reset()
            for ours, theirs in zip(submitted(variant, waits=False), wanted, strict=True):
                assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("preset", "quant"), [("tiny-llama", "F32"), ("tiny-qwen2", "F32"),
                                               ("tiny-qwen3", "Q8_0")])  # fmt: skip
def test_a_whole_sequence_that_moved_is_answered_as_before(tiny_model, preset, quant):
    with wb.Engine.load(
        tiny_model(preset, quant), device="cuda", n_ctx=64, n_seqs=8, toggles=Toggles()
    ) as engine:
        engine.step(PROMPTS[2], "none")
        wanted = engine.step(NEXT[0], "all")
        engine.cache.remove(0, len(PROMPTS[2]))
        for delta in (40, -25):
            engine.cache.shift(0, delta)
            moved = engine.step(NEXT[0], "all")
            assert compare_logits(wanted, moved, "rounding").holds
            engine.cache.remove(0, engine.cache.length() - len(NEXT[0]))


def test_many_sequences_are_what_one_is(tiny_model):
    """The last of 128 sequences, with cells behind all others'."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q4_K"), device="cuda", n_ctx=4096, n_seqs=128, toggles="best"
    ) as engine:
        test = parse("pp24+tg3@b128")
        tokens = draw_tokens(test, engine.model.n_vocab, 0)
        found = take_sample(engine, test, tokens).last_logits
        engine.reset()
        wanted = engine.prefill(tokens.prompt[-24:] + tokens.gen[127::128])
        answer = compare_logits(wanted, found[None], "rounding", QUANTISED)
        assert answer.holds, str(answer)
