"""What a request is answered does not depend on who is served beside it.

Its slow twin has the engine to itself (`tests/served.py`). Among others it has other cells, and a
prompt in other steps, so logits may differ by rounding. A token that differs is right only where
the twin's logits say that rounding decides it (`same`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from tests.served import APART, BEHIND, Alone, Told, alone, go_on, ids, same, serve
from workbench.config import BEST, TogglePreset, Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import LENGTH, STOP, Ask
from workbench.engine.slots.requests import logprobs
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling
from workbench.server.serving import serving

N_SLOTS, ROOM, N_UBATCH = 5, 96, 16
# a shared region for less than two whole requests, so that some wait, and kept cells are let go
SHARED = 160
SETTINGS: dict[str, dict[str, str]] = {
    "baseline": {},
    "per_sequence": APART,
    "padded": {"batch_sizes": "padded", "graph_reuse": "set_rows"},
    "padded per_sequence": APART | {"batch_sizes": "padded", "skip_masked_kv": "tail"},
    "in a row": {"graph_reuse": "pointer_table"},
    "device": {"sampling": "device", "graph_reuse": "set_rows"},
    "behind": BEHIND,
    "behind per_sequence": BEHIND | APART | {"batch_sizes": "padded"},
    "behind, cells moved": BEHIND | {"defrag": "cells"},
    "lowest_free": BEHIND | APART | {"slot_choice": "lowest_free"},
}  # fmt: skip


@pytest.fixture(scope="module")
def own(tiny_model) -> Iterator[Engine]:
    """For requests that are alone."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=ROOM, n_seqs=1, threads=1,
        n_ubatch=ROOM, toggles=Toggles(),
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def shared(request, tiny_model) -> Iterator[Engine]:
    apart = request.param.get("kv_cache") == "per_sequence"
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_seqs=N_SLOTS, n_ubatch=N_UBATCH,
        n_ctx=N_SLOTS * ROOM if apart else SHARED, threads=1, toggles=Toggles(**request.param),
        n_kv_pad=16,
    ) as engine:  # fmt: skip
        yield engine


PREFIXES = [ids(40, seed) for seed in (1, 2)]
TAILS = [ids(n, 100 + n) for n in (1, 2, 3, 9, 17, 30)]
_known: dict[tuple[object, ...], Alone] = {}


def twin(engine: Engine, ask: Ask) -> Alone:
    key = (ask.tokens.tobytes(), *ask[2:6])
    if key not in _known:
        _known[key] = alone(engine, ask)
    return _known[key]


@st.composite
def a_request(draw: st.DrawFn) -> tuple[Ask, int, int | None]:
    """An Ask, the steps before it comes, and which of its tokens it should end at."""
    cut = draw(st.sampled_from([0, 0, 5, 39, 40]))
    prompt = np.concatenate([draw(st.sampled_from(PREFIXES))[:cut], draw(st.sampled_from(TAILS))])
    sampling = draw(st.sampled_from([Sampling(), Sampling(0.8, 8, 1.0), Sampling(1.5, 0, 1.0)]))
    n_logprobs = draw(st.sampled_from([None] * 7 + [0, 3]))
    ask = Ask(
        0, prompt, draw(st.integers(1, 12)), sampling, draw(st.integers(0, 3)), frozenset(),
        n_logprobs,
    )  # fmt: skip
    return ask, draw(st.sampled_from([0, 0, 0, 1, 3])), draw(st.sampled_from([None, None, 0, 4]))


@settings(max_examples=examples(40))
@given(st.lists(a_request(), min_size=1, max_size=12))
def test_a_request_among_others_has_the_tokens_it_has_alone(own, shared, load):
    asks, told = dict[int, Ask](), Told()
    slots = Slots(shared, N_SLOTS)
    for number, (ask, n_steps, end_at) in enumerate(load):
        ask = ask._replace(number=number)
        made = twin(own, ask).tokens
        if end_at is not None and end_at < len(made):
            ask = ask._replace(ends=frozenset({made[end_at], 1023}))
        asks[number] = ask
        go_on(slots, n_steps, told)
        slots.ask(ask)
    serve(slots, (), told=told)
    assert told.ended.keys() == asks.keys()
    for number, ask in asks.items():
        wanted = twin(own, ask)
        assert told.ended[number].timings.n_prompt == len(ask.tokens)
        if same(ask, told.tokens.get(number, []), wanted):
            assert told.ended[number].reason == wanted.reason
            check_logprobs(ask, told, wanted)


def check_logprobs(ask: Ask, told: Told, wanted: Alone) -> None:
    found = told.logprobs.get(ask.number, [])
    if ask.n_logprobs is None:
        assert found == [None] * len(wanted.tokens)
        return
    for ours, token, row in zip(found, wanted.tokens, wanted.logits, strict=False):
        assert ours is not None and len(ours.values) == len(ours.tokens) == ask.n_logprobs
        total = np.logaddexp.reduce(row.astype(np.float64))
        assert abs(ours.drawn - (row[token] - total)) < 1e-3
        assert np.allclose(np.sort(row - total)[::-1][: ask.n_logprobs], ours.values, atol=1e-3)


def test_what_a_server_has_is_what_it_has_alone(own, tiny_model):
    """The toggles of `workbench serve`, on a load that fills all slots again and again."""
    rng = np.random.default_rng(5)
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=16 * ROOM, n_seqs=16,
        n_ubatch=64, threads=2, toggles=serving("embedded", TogglePreset(BEST, {
            "activations": "float"})),
    ) as engine:  # fmt: skip
        slots = Slots(engine, 16)
        asks = [
            Ask(
                i,
                ids(int(rng.integers(1, 60)), i),
                int(rng.integers(1, 30)),
                Sampling(0.7, 8, 1.0),
                i,
            )
            for i in range(60)
        ]
        told = serve(slots, asks)
        exact = [same(ask, told.tokens[ask.number], twin(own, ask)) for ask in asks]
        assert sum(exact) > 50  # of 60; rounding decides few
        totals = slots.totals()
        assert totals.n_made_tokens == sum(map(len, told.tokens.values()))
        assert totals.n_prompt_tokens + totals.n_cached_tokens == sum(len(a.tokens) for a in asks)
        assert (totals.n_running, totals.n_waiting) == (0, 0)
        assert 0 < totals.sampling_s < totals.step_s


def test_a_context_that_is_full_ends_a_request(own, shared):
    """The last token needs no cell, so a prompt of all cells has one token."""
    slots = Slots(shared, N_SLOTS)
    room = slots.room
    told = serve(slots, [Ask(0, ids(room), 9), Ask(1, ids(room - 3), 9), Ask(2, ids(2), 3)])
    assert [len(told.tokens[i]) for i in range(3)] == [1, 4, 3]
    assert {told.ended[i].reason for i in range(3)} == {LENGTH}
    assert told.tokens[2] == twin(own, Ask(2, ids(2), 3)).tokens
    assert "has" in slots.refusal(Ask(3, ids(room + 1), 1))


@pytest.mark.parametrize("n", [0, 1, 5, 1024, 5000])
def test_logprobs_are_of_the_whole_row(n):
    row = np.random.default_rng(n).normal(0, 4, 1024).astype(np.float32)
    row[[7, 9]] = row.max() + 1  # ties go to the lowest id
    found, p = logprobs(row, 9, n), np.exp(row.astype(np.float64))
    wanted = np.log(p / p.sum())
    order = np.lexsort((np.arange(1024), -row.astype(np.float64)))[:n]
    assert found.tokens.tolist() == order.tolist()
    assert np.allclose(found.values, wanted[order], atol=1e-6)
    assert abs(found.drawn - wanted[9]) < 1e-9


def test_a_stop_token_is_no_part_of_the_answer(own, shared):
    ask = Ask(0, ids(7), 8, Sampling(1.0), 3)
    made = alone(own, ask).tokens
    at = max(i for i in range(8) if made[i] not in made[:i])
    told = serve(Slots(shared, N_SLOTS), [ask._replace(ends=frozenset({made[at]}))])
    assert told.tokens.get(0, []) == made[:at] and told.ended[0].reason == STOP
