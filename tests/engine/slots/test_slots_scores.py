"""Prompts whose tokens have logprobs (`Ask.scores_prompt`), in slots beside other requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.served import APART, BEHIND, Told, check_cells, go_on, ids, serve
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots import slots as slots_module
from workbench.engine.slots.asks import LENGTH, Ask
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling

SETTINGS: dict[str, dict[str, str]] = {
    "baseline": {},
    "behind, apart": BEHIND | APART | {"batch_sizes": "padded", "skip_masked_kv": "tail"},
}
ROUNDING = 2e-3


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def engine(request, tiny_model) -> Iterator[Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=4 * 96, n_seqs=4, n_ubatch=16,
        threads=1, n_kv_pad=16, toggles=Toggles(**request.param),
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def own(tiny_model) -> Iterator[Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=96, n_ubatch=96, threads=1,
        toggles=Toggles(),
    ) as made:  # fmt: skip
        yield made


def direct(own: Engine, tokens: np.ndarray) -> np.ndarray:
    """Logprobs of all logits of a prompt that is computed alone, (tokens, n_vocab) float64."""
    own.reset()
    wide = own.prefill(tokens.tolist(), outputs="all").astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)


def check(told: Told, ask: Ask, own: Engine) -> None:
    """A logprob of each token but the first, and the likeliest beside it."""
    wanted, found = direct(own, ask.tokens), told.scores.get(ask.number, [])
    assert len(found) == len(ask.tokens) - 1
    for row, token, known in zip(wanted, ask.tokens[1:], found, strict=False):
        assert known.drawn == pytest.approx(row[token], abs=ROUNDING)
        assert len(known.tokens) == len(known.values) == ask.n_logprobs
        assert np.allclose(known.values, np.sort(row)[::-1][: ask.n_logprobs], atol=ROUNDING)
        assert np.allclose(row[known.tokens], known.values, atol=ROUNDING)
    end = told.ended[ask.number]
    assert end.reason == LENGTH and end.timings.n_cached == 0
    assert len(told.tokens.get(ask.number, [])) == ask.max_tokens


@pytest.mark.parametrize("scored", [5, 32])
def test_scores_are_those_of_the_logits(engine, own, monkeypatch, scored):
    monkeypatch.setattr(slots_module, "SCORED", scored)
    slots, told = Slots(engine, 4), Told()
    hot = Sampling(1.0)
    asks = [
        Ask(0, ids(40, 1), 8, hot, 3),
        Ask(1, ids(40, 2), 0, n_logprobs=2, scores_prompt=True),
        Ask(2, ids(33, 3), 3, n_logprobs=0, scores_prompt=True),
        Ask(3, ids(1, 4), 1, n_logprobs=1, scores_prompt=True),
        Ask(4, ids(1, 5), 0, n_logprobs=1, scores_prompt=True),
        Ask(5, ids(20, 6), 0),
    ]
    serve(slots, asks, told=told)
    for ask in asks[1:5]:
        check(told, ask, own)
    assert not told.scores.keys() & {0, 3, 4, 5}  # of a first token there is none
    assert len(told.tokens[0]) == 8 and 5 not in told.tokens
    assert told.ended[5].timings.n_prompt == 20


def test_a_step_has_few_rows_of_a_scored_prompt(engine, monkeypatch):
    monkeypatch.setattr(slots_module, "SCORED", 6)
    rows, submit = list[list[int]](), engine.submit

    def noted(work, draws=False):
        rows.append([len(tokens) for _, tokens, outputs in work if outputs == "all"])
        return submit(work, draws)

    monkeypatch.setattr(engine, "submit", noted)
    scored = [Ask(i, ids(20, i), 0, n_logprobs=0, scores_prompt=True) for i in range(2)]
    serve(Slots(engine, 4), [*scored, Ask(2, ids(30, 9), 1)])
    assert max(map(sum, rows)) == 6 and sum(map(sum, rows)) == 40


def test_scores_reuse_no_cells_but_leave_theirs(engine, own):
    """A prompt that is scored is computed whole, in the slot that nobody misses most."""
    slots, told, prompt = Slots(engine, 4), Told(), ids(40, 7)
    serve(slots, [Ask(0, prompt, 2)], told=told)
    scored = Ask(1, prompt, 0, n_logprobs=1, scores_prompt=True)
    serve(slots, [scored], told=told)
    check(told, scored, own)
    serve(slots, [Ask(2, prompt, 2)], told=told)
    assert told.ended[2].timings.n_cached == 39
    assert told.tokens[2] == told.tokens[0]


def test_a_request_that_is_cancelled_is_scored_no_more(engine, monkeypatch):
    monkeypatch.setattr(slots_module, "SCORED", 4)
    slots, told = Slots(engine, 4), Told()
    slots.ask(Ask(0, ids(40, 1), 1, n_logprobs=0, scores_prompt=True))
    go_on(slots, 2, told)
    slots.cancel(0)
    serve(slots, (), check_cells, told)
    assert 0 < len(told.scores[0]) < 39 and 0 not in told.tokens
