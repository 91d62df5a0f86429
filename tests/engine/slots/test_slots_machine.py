"""Slots under anything that a server can do: every request ends once, with the tokens it has alone
(a beginning of them where it was broken off), and no cell is lost.

The slow twin of a request has the engine to itself (`tests/served.py`). Among others it has other
cells, and a prompt in other steps, so logits may differ by rounding. A token that differs is right
only where the twin's logits say that rounding decides it (`same`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import workbench as wb
from tests.profiles import examples
from tests.served import APART, BEHIND, Alone, Told, alone, check_cells, go_on, ids, same, serve
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots import slots as slots_room
from workbench.engine.slots.asks import (
    CANCELLED,
    LENGTH,
    NEVER,
    STOP,
    TIMEOUT,
    Ask,
    Logprobs,
    logprobs,
)
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling

N_SLOTS, ROOM, MOST, N_UBATCH = 3, 64, 14, 8
SETTINGS: dict[str, dict[str, str]] = {
    "shared": {},
    "shared, in a row": {"graph_reuse": "pointer_table"},
    "shared, cells moved": BEHIND | {"defrag": "cells", "batch_sizes": "padded"},
    "apart": BEHIND | APART | {"batch_sizes": "padded"},
    "apart, lowest free": APART | {"slot_choice": "lowest_free"},
    "apart, drawn by the device": APART | {"sampling": "device", "skip_masked_kv": "tail",
                                           "batch_sizes": "padded"},
}  # fmt: skip
LONG = [ids(40, seed) for seed in (1, 2)]
PROMPTS = [
    ids(1), ids(3), ids(64, 3), *LONG, ids(60, 2), *(np.append(LONG[0], ids(n, n)) for n in (1, 9)),
    np.append(LONG[1][:39], ids(17, 5)), np.append(LONG[1][:5], ids(2, 6)),
]  # fmt: skip
SAMPLINGS = [Sampling(), Sampling(0.8, 8, 1.0), Sampling(1.5, 0, 1.0)]


def opened(tiny_model, n_ctx: int, n_seqs: int, n_ubatch: int, **toggles: str) -> Engine:
    return wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=n_ctx, n_seqs=n_seqs, threads=1,
        n_ubatch=n_ubatch, n_kv_pad=8, toggles=Toggles(**toggles),
    )  # fmt: skip


@pytest.fixture(scope="module")
def own(tiny_model) -> Iterator[Engine]:
    """For requests that are alone."""
    with opened(tiny_model, 96, 1, 96) as engine:
        yield engine


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def shared(request, tiny_model) -> Iterator[Engine]:
    n = N_SLOTS if request.param.get("kv_cache") == "per_sequence" else 1
    with opened(tiny_model, ROOM * n, N_SLOTS, N_UBATCH, **request.param) as engine:
        yield engine


_known: dict[tuple[bytes, Sampling], Alone] = {}
_scores: dict[bytes, np.ndarray] = {}  # of a prompt: logprobs of each token's whole row


def twin(engine: Engine, ask: Ask, room: int = ROOM) -> Alone:
    key = ask.tokens.tobytes(), ask.sampling
    if key not in _known:
        _known[key] = alone(engine, Ask(0, ask.tokens, MOST, ask.sampling, ask.seed))
    made, _, logits = _known[key]
    made = made[: min(ask.max_tokens, room - len(ask.tokens) + 1)]
    end = next((i for i, token in enumerate(made) if token in ask.ends), None)
    return Alone(made[:end], LENGTH if end is None else STOP, logits[: len(made[:end]) + 1])


def check_row(row: np.ndarray, token: int, ours: Logprobs, n: int) -> None:
    """row: float64 logprobs."""
    assert len(ours.values) == len(ours.tokens) == n and abs(ours.drawn - row[token]) < 2e-3
    assert np.allclose(np.sort(row)[::-1][:n], ours.values, atol=2e-3)
    assert np.allclose(row[ours.tokens], ours.values, atol=2e-3)


def logged(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    return wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)


def check_logprobs(ask: Ask, told: Told, wanted: Alone) -> None:
    found = told.logprobs.get(ask.number, [])
    if ask.n_logprobs is None:
        assert found == [None] * len(wanted.tokens)
        return
    for ours, token, row in zip(found, wanted.tokens, logged(wanted.logits), strict=False):
        check_row(row, token, ours, ask.n_logprobs)


def check_scores(ask: Ask, told: Told, own: Engine, is_whole: bool) -> None:
    """Of a prompt that is scored a logprob of each token but the first, of no other prompt any."""
    found = told.scores.get(ask.number, [])
    n = len(ask.tokens) - 1 if ask.scores_prompt else 0
    assert len(found) == n or (not is_whole and len(found) < n)
    assert told.ended[ask.number].timings.n_cached == 0 or not ask.scores_prompt
    if found and (key := ask.tokens.tobytes()) not in _scores:
        own.reset()
        _scores[key] = logged(own.prefill(ask.tokens.tolist(), outputs="all"))
    for i, ours in enumerate(found):
        check_row(_scores[key][i], ask.tokens[i + 1], ours, ask.n_logprobs)


class Machine(RuleBasedStateMachine):
    own: Engine
    shared: Engine

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.told = Slots(self.shared, N_SLOTS), Told()
        self.asks: list[Ask] = []
        self.order: list[int] = []
        self.broken: dict[int, tuple[str, ...]] = {}  # how a request that was broken off may end
        self.submit, self.shared.submit = self.shared.submit, self.submitted  # of this engine alone

    def submitted(self, work, draws=False):
        """No step is too large, and nobody is left out who has a token, or room for a prompt."""
        n_each = {sequence: len(tokens) for sequence, tokens, _ in work}
        assert len(n_each) == len(work) and 0 < sum(n_each.values()) <= N_UBATCH
        for slot in self.slots.slots:
            if (request := slot.request) is not None and slot.sequence not in n_each:
                assert request.todo or request.planned == request.most
            if request is not None and request.todo and not request.ask.scores_prompt:
                assert sum(n_each.values()) == N_UBATCH
        return self.submit(work, draws)

    @property
    def n_open(self) -> int:
        totals = self.slots.totals()
        return totals.n_running + totals.n_waiting

    @rule(
        which=st.integers(0, len(PROMPTS) - 1), most=st.integers(0, MOST),
        sampling=st.sampled_from(SAMPLINGS), end=st.sampled_from([None, None, 0, 2, 7]),
        late=st.sampled_from([False] * 5 + [True]), n_logprobs=st.sampled_from([None] * 4 + [0, 3]),
        scores=st.booleans(),
    )  # fmt: skip
    def ask(self, which, most, sampling, end, late, n_logprobs, scores):
        scores, limit = scores and n_logprobs is not None, 0.0 if late else None
        ask = Ask(len(self.asks), PROMPTS[which], most, sampling, which, frozenset(), n_logprobs,
                  limit, scores_prompt=scores)  # fmt: skip
        made = twin(self.own, ask).tokens
        if end is not None and end < len(made):
            ask = ask._replace(ends=frozenset({made[end], 1023}))
        assert not self.slots.refusal(ask)
        self.asks.append(ask)
        self.slots.ask(ask)
        if late:
            self.broken[ask.number] = (TIMEOUT, CANCELLED)

    @rule(back=st.integers(0, 6))
    def cancel(self, back):
        number, n_open = len(self.asks) - 1 - back, self.n_open
        self.slots.cancel(number)  # below 0 nobody was
        if self.n_open < n_open:
            assert number not in self.told.ended
            self.broken[number] = (CANCELLED,)

    @rule(n=st.integers(1, 6))
    def step(self, n):
        go_on(self.slots, n, self.told)

    @invariant()
    def every_request_is_somewhere_once(self):
        totals = self.slots.totals()
        n_untold = len(self.asks) - self.n_open - len(self.told.ended)
        assert n_untold >= 0 and totals.n_running <= N_SLOTS
        assert not self.slots.idle or self.n_open == n_untold == 0
        check_cells(self.slots)
        at_work = {slot.request.ask.number for slot in self.slots.slots if slot.request is not None}
        self.order += sorted(at_work - {*self.order})
        assert self.order == sorted(self.order), "who came first begins first"
        assert totals.n_cells_used + totals.n_cells_kept == self.shared.cache.n_used

    def teardown(self):
        try:
            self.ended()
        finally:
            del self.shared.submit

    def ended(self):
        serve(self.slots, (), told=self.told)
        assert [*sorted(self.told.ended)] == [ask.number for ask in self.asks]
        for ask in self.asks:
            found, reason = self.told.tokens.get(ask.number, []), self.told.ended[ask.number].reason
            wanted = twin(self.own, ask)
            check_scores(ask, self.told, self.own, ask.number not in self.broken)
            if ask.number in self.broken:
                assert reason in self.broken[ask.number]
                n = min(len(found), len(wanted.tokens))
                same(ask._replace(ends=frozenset()), found[:n],
                     wanted._replace(tokens=wanted.tokens[:n]))  # fmt: skip
            elif same(ask, found, wanted):
                assert reason == wanted.reason
                check_logprobs(ask, self.told, wanted)


def test_whatever_comes_in_whatever_order(own, shared, monkeypatch):
    monkeypatch.setattr(slots_room, "SCORED", 5)

    class Here(Machine):
        pass

    Here.own, Here.shared = own, shared
    run_state_machine_as_test(
        Here, settings=settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
    )


@pytest.mark.parametrize("n", [0, 5, 5000])
def test_logprobs_are_of_the_whole_row(n):
    row = np.random.default_rng(n).normal(0, 4, 1024).astype(np.float32)
    row[[7, 9]] = row.max() + 1  # ties go to the lowest id
    found, p = logprobs(row, 9, n), np.exp(row.astype(np.float64))
    wanted = np.log(p / p.sum())
    order = np.lexsort((np.arange(1024), -row.astype(np.float64)))[:n]
    assert found.tokens.tolist() == order.tolist()
    assert np.allclose(found.values, wanted[order], atol=1e-6)
    assert abs(found.drawn - wanted[9]) < 1e-9
    known = logprobs(np.array([0, -np.inf, 0], np.float32), 1, 3)  # what cannot come
    assert known.drawn == NEVER and known.values.tolist()[2] == NEVER
    assert known.tokens.tolist() == [0, 2, 1]
