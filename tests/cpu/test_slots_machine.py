"""Slots under anything that a server can do, beside a model of dicts: every request ends once, in
its order, with a beginning of the tokens it has alone, and no cell is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import workbench as wb
from tests.profiles import examples
from tests.served import APART, BEHIND, Alone, Told, alone, check_cells, go_on, ids, near
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import CANCELLED, LENGTH, STOP, TIMEOUT, Ask
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling

N_SLOTS, ROOM = 3, 64
SETTINGS = {
    "shared": {},
    "shared, cells moved": BEHIND | {"defrag": "cells", "batch_sizes": "padded"},
    "apart": BEHIND | APART | {"batch_sizes": "padded"},
    "apart, lowest free": APART | {"slot_choice": "lowest_free"},
}
PROMPTS = [
    ids(n, seed) for n, seed in ((1, 0), (3, 0), (17, 1), (40, 2), (44, 2), (60, 2), (64, 3))
]


@pytest.fixture(scope="module")
def own(tiny_model) -> Iterator[Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=ROOM, n_seqs=1, n_ubatch=ROOM,
        threads=1, toggles=Toggles(),
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def shared(request, tiny_model) -> Iterator[Engine]:
    apart = request.param.get("kv_cache") == "per_sequence"
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_seqs=N_SLOTS, n_ubatch=8, threads=1,
        n_ctx=ROOM * (N_SLOTS if apart else 1), n_kv_pad=8, toggles=Toggles(**request.param),
    ) as engine:  # fmt: skip
        yield engine


_known: dict[int, Alone] = {}


class Machine(RuleBasedStateMachine):
    own: Engine
    shared: Engine

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.told = Slots(self.shared, N_SLOTS), Told()
        self.asks: list[Ask] = []
        self.which: list[int] = []  # of each request, its prompt
        self.broken: dict[int, str] = {}  # that a request was broken off, and how
        self.begun: list[int] = []

    def twin(self, number: int) -> Alone:
        which = self.which[number]
        if which not in _known:
            _known[which] = alone(self.own, Ask(0, PROMPTS[which], 20))
        return _known[which]

    @rule(
        which=st.integers(0, len(PROMPTS) - 1), most=st.integers(1, 20),
        end=st.sampled_from([None, None, 0, 2, 7]), late=st.sampled_from([False] * 5 + [True]),
        n_logprobs=st.sampled_from([None] * 5 + [1]),
    )  # fmt: skip
    def ask(self, which, most, end, late, n_logprobs):
        number = len(self.asks)
        self.which.append(which)
        made = self.twin(number).tokens
        ends = frozenset() if end is None or end >= len(made) else frozenset({made[end]})
        ask = Ask(
            number, PROMPTS[which], most, Sampling(), 0, ends, n_logprobs, 0.0 if late else None
        )
        assert not self.slots.refusal(ask)
        self.asks.append(ask)
        self.slots.ask(ask)
        if late:
            self.broken[number] = TIMEOUT

    @rule(back=st.integers(0, 6))
    def cancel(self, back):
        number = len(self.asks) - 1 - back
        gone = any(end.number == number for end in self.slots._ended)
        self.slots.cancel(number)  # below 0 nobody was
        if number >= 0 and number not in self.told.ended and not gone:
            self.broken[number] = CANCELLED

    @rule(n=st.integers(1, 6))
    def step(self, n):
        for _ in range(n):
            go_on(self.slots, 1, self.told)
            self.begun += [i for i in self.slots._running if i not in self.begun]

    @invariant()
    def every_request_is_somewhere_once(self):
        slots = self.slots
        running, waiting = set(slots._running), set(slots._waiting)
        untold = {end.number for end in slots._ended}
        ended = set(self.told.ended)
        assert len(running) + len(waiting) + len(untold) + len(ended) == len(self.asks)
        assert running | waiting | untold | ended == set(range(len(self.asks)))
        assert sum(slot.request is not None for slot in slots.slots) == len(running) <= N_SLOTS
        totals = slots.totals()
        assert (totals.n_running, totals.n_waiting) == (len(running), len(waiting))

    @invariant()
    def cells_are_those_that_slots_keep(self):
        check_cells(self.slots)
        cache, seats = self.shared.cache, self.slots._seats
        assert seats._reserved == sum(r.cells for _, r in self.slots._running.values())
        if cache.n_regions == 1:
            idle = sum(len(slot.kept) for slot in seats.free)
            assert seats._reserved + idle <= cache.n_ctx_seq

    def teardown(self):
        while not self.slots.idle:
            self.step(1)
        self.every_request_is_somewhere_once()
        assert self.begun == sorted(self.begun)  # who came first began first
        for number, ask in enumerate(self.asks):
            self.check(ask, self.told.tokens.get(number, []), self.told.ended[number].reason)
        assert self.shared.cache.n_used <= sum(len(s.kept) for s in self.slots.slots)
        self.slots._seats.forget()
        cache = self.shared.cache
        assert cache.n_used == 0 == cache.free.ends.sum() and not cache.free.n_owners.any()

    def check(self, ask: Ask, found: list[int], reason: str) -> None:
        wanted = self.twin(ask.number)
        most = min(ask.max_tokens, ROOM - len(ask.tokens) + 1)
        for i, token in enumerate(found):
            if token != wanted.tokens[i]:
                assert token in near(wanted.logits[i], ask.sampling, 0.0)
                return
        if ask.number in self.broken:
            assert reason in (self.broken[ask.number], CANCELLED, TIMEOUT) and len(found) <= most
        elif reason == STOP:
            assert wanted.tokens[len(found)] in ask.ends
        else:
            assert reason == LENGTH and len(found) == most


def test_whatever_comes_in_whatever_order(own, shared):
    class Here(Machine):
        pass

    Here.own, Here.shared = own, shared
    run_state_machine_as_test(
        Here, settings=settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
    )
