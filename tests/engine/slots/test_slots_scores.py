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


def check(told: Told, ask: Ask, engine: Engine) -> None:
    """A logprob of each token but the first, and the likeliest beside it: those of all logits of
    the prompt computed alone."""
    with engine.variant(Toggles()) as own:
        wide = own.prefill(ask.tokens.tolist(), outputs="all").astype(np.float64)
    wanted = wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)
    found = told.scores.get(ask.number, [])
    assert len(found) == len(ask.tokens) - 1
    for row, token, known in zip(wanted, ask.tokens[1:], found, strict=False):
        assert known.drawn == pytest.approx(row[token], abs=ROUNDING)
        assert len(known.tokens) == len(known.values) == ask.n_logprobs
        assert np.allclose(known.values, np.sort(row)[::-1][: ask.n_logprobs], atol=ROUNDING)
        assert np.allclose(row[known.tokens], known.values, atol=ROUNDING)
    end = told.ended[ask.number]
    assert end.reason == LENGTH and end.timings.n_cached == 0
    assert len(told.tokens.get(ask.number, [])) == ask.max_tokens


@pytest.mark.parametrize("scored", [5, 12])
def test_scores_are_those_of_the_logits(engine, monkeypatch, scored):
    """Of a step's tokens few are scored, since each has a row of logits."""
    monkeypatch.setattr(slots_module, "SCORED", scored)
    rows, submit = list[int](), engine.submit

    def noted(work, draws=False):
        rows.append(sum(len(tokens) for _, tokens, outputs in work if outputs == "all"))
        return submit(work, draws)

    monkeypatch.setattr(engine, "submit", noted)
    asks = [
        Ask(0, ids(40, 1), 8, Sampling(1.0), 3),
        Ask(1, ids(40, 2), 0, n_logprobs=2, scores_prompt=True),
        Ask(2, ids(33, 3), 3, n_logprobs=0, scores_prompt=True),
        Ask(3, ids(1, 4), 1, n_logprobs=1, scores_prompt=True),
        Ask(4, ids(1, 5), 0, n_logprobs=1, scores_prompt=True),
        Ask(5, ids(20, 6), 0),
    ]
    told = serve(Slots(engine, 4), asks)
    for ask in asks[1:5]:
        check(told, ask, engine)
    assert not told.scores.keys() & {0, 3, 4, 5}  # of a first token there is none
    assert len(told.tokens[0]) == 8 and 5 not in told.tokens
    assert told.ended[5].timings.n_prompt == 20
    assert max(rows) == scored and sum(rows) == 40 + 33 + 1 + 1


def test_scores_reuse_no_cells_but_leave_theirs(engine, monkeypatch):
    """A prompt that is scored is computed whole, in the slot that nobody misses most; one that is
    cancelled is scored no more."""
    slots, told, prompt = Slots(engine, 4), Told(), ids(40, 7)
    serve(slots, [Ask(0, prompt, 2)], told=told)
    scored = Ask(1, prompt, 0, n_logprobs=1, scores_prompt=True)
    serve(slots, [scored], told=told)
    check(told, scored, engine)
    serve(slots, [Ask(2, prompt, 2)], told=told)
    assert told.ended[2].timings.n_cached == 39
    assert told.tokens[2] == told.tokens[0]
    monkeypatch.setattr(slots_module, "SCORED", 4)
    slots.ask(Ask(3, ids(40, 1), 1, n_logprobs=0, scores_prompt=True))
    go_on(slots, 2, told)
    slots.cancel(3)
    serve(slots, (), check_cells, told)
    assert 0 < len(told.scores[3]) < 39 and 3 not in told.tokens
