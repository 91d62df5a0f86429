"""What is in each step, which is issued before the results of the one before are looked at, and how
requests end; and slots under anything that a server can do: every request ends once, with the
tokens it has alone (a beginning of them where it was broken off), and no cell is lost.

The slow twin of a request has the engine to itself (`tests/served.py`). Among others it has other
cells, and a prompt in other steps, so logits may differ by rounding. A token that differs is right
only where the twin's logits say that rounding decides it (`same`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.profiles import examples, long
from tests.served import APART, BEHIND, Alone, Told, alone, check_cells, go_on, ids, same, serve
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine import step as step_room
from workbench.engine.engine import Engine
from workbench.engine.slots import asks
from workbench.engine.slots import slots as slots_room
from workbench.engine.slots.asks import Ask, Logprobs, logprobs
from workbench.engine.slots.draws import UNKEPT, Draws
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampler, Sampling
from workbench.trace.spans import now_ns


def opened(tiny_model, toggles: dict[str, str], **sizes) -> Engine:
    given = {"n_ctx": 4 * 96, "n_seqs": 4, "n_ubatch": 12} | sizes
    return Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", threads=1, toggles=Toggles(**toggles),
        **given,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[APART, BEHIND], ids=["host", "behind"])
def engine(request, tiny_model) -> Iterator[Engine]:
    with opened(tiny_model, request.param) as made:
        yield made


class Watched(Slots):
    """Slots that note their steps, sequence -> its tokens in a step, and what they tell."""

    def __init__(self, engine: Engine, n: int = 4, on_step=lambda what: None):
        super().__init__(engine, n)
        self.told, self.steps, submit = Told(), list[dict[int, int]](), engine.submit

        def noted(work, draws=False):
            self.steps.append({sequence: len(tokens) for sequence, tokens, _ in work})
            made = submit(work, draws)
            on_step("issue")
            return made

        engine.submit = noted  # of this engine alone

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.submit

    def go(self, n: int) -> None:
        go_on(self, n, self.told)

    def finish(self) -> None:
        serve(self, (), told=self.told)


# prompts beside tokens ----------------------------------------------------------------------------


def test_prompts_fill_a_step_in_the_order_of_beginning(engine):
    with Watched(engine) as made:
        for number, n in enumerate((20, 7, 3)):
            made.ask(Ask(number, ids(n, number), 4))
        made.go(4)
        assert made.steps[:3] == [{0: 12}, {0: 8, 1: 4}, {0: 1, 1: 3, 2: 3}]
        made.finish()


def test_a_step_scores_few_tokens_and_leaves_their_cells(engine, monkeypatch):
    """Each has a row of logits. A scored prompt is computed whole, whatever cells there are, in the
    slot that nobody misses most; one that is cancelled is scored no more."""
    monkeypatch.setattr(slots_room, "SCORED", 5)
    prompt = ids(40, 7)
    with Watched(engine) as made:
        made.ask(Ask(0, prompt, 2))
        made.finish()
        made.ask(Ask(1, prompt, 0, n_logprobs=0, scores_prompt=True))
        n = len(made.steps)
        made.finish()
        assert [sum(step.values()) for step in made.steps[n:]] == [5] * 8
        made.ask(Ask(2, prompt, 2))
        made.ask(Ask(3, ids(40, 1), 1, n_logprobs=0, scores_prompt=True))
        made.go(3)
        made.cancel(3)
        made.finish()
        told = made.told
        assert [told.ended[i].timings.n_cached for i in range(3)] == [0, 0, 39]
        assert told.tokens[2] == told.tokens[0] and len(told.scores[1]) == 39
        with engine.variant(Toggles()) as own:
            check_rows(told.scores[1], prompt[1:], own.prefill(prompt.tolist(), "all"), 0)
        assert 0 < len(told.scores[3]) < 39 and 3 not in told.tokens


# a step ahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toggles", "order", "under_way"),
    [
        (BEHIND | APART, ["issue", *["issue", "look"] * 3, "look"], [1, 1, 1, 1, 0]),
        (APART, ["issue", "look"] * 4, [0] * 4),
        (APART | {"sampling": "device"}, ["issue", "look"] * 4, [0] * 4),
        (BEHIND | APART | {"sampling": "host"}, ["issue", "look"] * 4, [0] * 4),
    ],
    ids=["behind", "host", "device, not behind", "behind, drawn by the host"],
)
def test_a_step_is_issued_ahead_where_results_are_behind(
    tiny_model, monkeypatch, toggles, order, under_way
):
    """When steps are issued and looked at, and how many are under way behind each call."""
    found, counts, wait = list[str](), list[int](), step_room.Pending.wait

    def waits(self):
        found.extend(["look"] * (not self.done))
        return wait(self)

    monkeypatch.setattr(step_room.Pending, "wait", waits)
    with opened(tiny_model, toggles) as engine, Watched(engine, on_step=found.append) as made:
        for number in range(2):
            made.ask(Ask(number, ids(5, number), 4))
        begun = now_ns()
        while not made.idle:
            made.go(1)
            counts.append(len(engine.issuer.under_way))
        # time that two steps share is counted once
        assert 0 < made.totals().step_s <= (now_ns() - begun) / 1e9
    assert found == order and counts == under_way


def test_who_wants_logprobs_has_all_wait_a_while(tiny_model):
    with opened(tiny_model, BEHIND | APART) as engine, Watched(engine) as made:
        made.ask(Ask(0, ids(5), 30))
        made.go(3)
        assert len(engine.issuer.under_way) == 1
        made.ask(Ask(1, ids(5, 1), 3, n_logprobs=2))
        made.go(2)
        assert len(engine.issuer.under_way) == 0
        made.go(3)
        assert 1 in made.told.ended and len(engine.issuer.under_way) == 1
        made.finish()
        # an end is known when the next token is under way already: nobody looks at it
        first = made.told.tokens[0]
        at = max(i for i in range(6) if first[i] not in first[:i])
        with made.engine.variant(engine.toggles) as other, Watched(other, 1) as again:
            again.ask(Ask(0, ids(5), 30, ends=frozenset({first[at]})))
            again.finish()
            assert again.told.tokens.get(0, []) == first[:at] and len(again.steps) == at + 2
            assert len(again.slots[0].kept) == other.cache.n_used == 5 + at


def test_settings_of_draws_are_in_the_rows_of_outputs():
    """Whatever sequences these are; those of a greedy one, and of a row nobody keeps, are 0."""
    samplings = {3: Sampling(0.5), 1: Sampling(0.9), 2: Sampling()}
    draws, twins = Draws(), {s: Sampler(sampling, s) for s, sampling in samplings.items()}
    draws.samplers = {s: Sampler(sampling, s) for s, sampling in samplings.items()}
    found, sequences = draws.values([3, 2, 0, 1, UNKEPT]).values()
    assert sequences.tolist() == [3, 2, 0, 1, UNKEPT]
    for row, s in ((0, 3), (3, 1)):
        assert np.array_equal(found[row], np.asarray(twins[s].settings(), np.float32))
    assert found[0].any() and not found[[1, 2, 4]].any()


# ends ---------------------------------------------------------------------------------------------


def test_a_limit_of_time_ends_what_waits_and_what_runs(engine, monkeypatch):
    """A request that is late as its last token comes ends for its time, not for its length."""
    now, clock = [0], slots_room.now_ns
    monkeypatch.setattr(slots_room, "now_ns", lambda: clock() + now[0])
    with Watched(engine, 1) as made:
        made.ask(Ask(0, ids(5), 60, timeout_s=3600.0))
        made.ask(Ask(1, ids(5), 60, timeout_s=0.0))
        made.go(2)
        assert {n: e.reason for n, e in made.told.ended.items()} == {1: asks.TIMEOUT}
        now[0] = 3601 * 10**9
        made.finish()
        assert made.told.ended[0].reason == asks.TIMEOUT
        assert 1 <= made.told.ended[0].timings.n_made < 60
        wait = step_room.Pending.wait

        def waits(self):
            now[0] = 10**15
            return wait(self)

        made.ask(Ask(2, ids(5), 1, timeout_s=1e5))
        monkeypatch.setattr(step_room.Pending, "wait", waits)
        made.finish()
        assert made.told.ended[2].reason == asks.TIMEOUT


# failures -----------------------------------------------------------------------------------------


def test_logits_not_finite_end_their_request_alone(engine, monkeypatch):
    wait = step_room.Pending.wait

    def broken(self):
        found = wait(self).copy()
        found[1:2] = [-1, 0] if found.dtype == np.int32 else np.nan
        return found

    with Watched(engine, 2) as made:
        made.ask(Ask(0, ids(5), 9))
        made.ask(Ask(1, ids(4, 1), 9))
        made.go(3)
        with monkeypatch.context() as patch:
            patch.setattr(step_room.Pending, "wait", broken)
            made.go(1)
        made.finish()
        end = made.told.ended[1]
        assert end.reason == asks.FAILED and "not finite" in end.why and end.timings.n_made < 9
        assert made.told.ended[0].reason == asks.LENGTH and len(made.told.tokens[0]) == 9
        # what broken cells hold is no prefix of anything
        assert len(made.slots[1].kept) == 0 and engine.cache.length(1) == 0


@pytest.mark.parametrize("where", ["issue", "look"])
def test_a_step_that_fails_ends_all_and_raises(engine, monkeypatch, where):
    with Watched(engine, 2) as made:
        for number in range(3):
            made.ask(Ask(number, ids(5, number), 9))
        made.go(3)

        def fails(*_: object):
            if where == "look":
                engine.issuer.fail()
            raise DeviceError("the device is gone")

        with monkeypatch.context() as patch:
            room = (engine, "submit") if where == "issue" else (step_room.Pending, "wait")
            patch.setattr(*room, fails)
            with pytest.raises(DeviceError, match="gone"):
                made.step()
        assert engine.cache.n_used == 0 and not made.idle
        ends = {end.number: (end.reason, end.why) for end in made.drop()}
        assert ends == dict.fromkeys(range(3), (asks.FAILED, "the step failed: the device is gone"))
        assert made.idle and made.drop() == []
        check_cells(made)


# whatever comes -----------------------------------------------------------------------------------

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
TRIED = [long(of) if n % 2 else of for n, of in enumerate(SETTINGS.values())]
LONG = [ids(40, seed) for seed in (1, 2)]
PROMPTS = [
    ids(1), ids(3), ids(64, 3), *LONG, ids(60, 2), *(np.append(LONG[0], ids(n, n)) for n in (1, 9)),
    np.append(LONG[1][:39], ids(17, 5)), np.append(LONG[1][:5], ids(2, 6)),
]  # fmt: skip
SAMPLINGS = [Sampling(), Sampling(0.8, 8, 1.0), Sampling(1.5, 0, 1.0)]


@pytest.fixture(scope="module")
def own(tiny_model) -> Iterator[Engine]:
    """For requests that are alone."""
    with opened(tiny_model, {}, n_ctx=96, n_seqs=1, n_ubatch=96, n_kv_pad=8) as engine:
        yield engine


@pytest.fixture(scope="module", params=TRIED, ids=SETTINGS)
def shared(request, tiny_model) -> Iterator[Engine]:
    n_ctx = ROOM * (N_SLOTS if "kv_cache" in request.param else 1)
    sizes = {"n_ctx": n_ctx, "n_seqs": N_SLOTS, "n_ubatch": N_UBATCH, "n_kv_pad": 8}
    with opened(tiny_model, request.param, **sizes) as engine:
        yield engine


_known: dict[tuple[bytes, Sampling], Alone] = {}
_scores: dict[bytes, np.ndarray] = {}  # of a prompt: logits of each token


def twin(engine: Engine, ask: Ask) -> Alone:
    key = ask.tokens.tobytes(), ask.sampling
    if key not in _known:
        _known[key] = alone(engine, Ask(0, ask.tokens, MOST, ask.sampling, ask.seed))
    made, _, logits = _known[key]
    made = made[: min(ask.max_tokens, ROOM - len(ask.tokens) + 1)]
    end = next((i for i, token in enumerate(made) if token in ask.ends), None)
    reason = asks.LENGTH if end is None else asks.STOP
    return Alone(made[:end], reason, logits[: len(made[:end]) + 1])


def check_rows(found: Sequence[Logprobs], tokens, logits: np.ndarray, n: int) -> None:
    rows = logits.astype(np.float64)
    rows -= np.logaddexp.reduce(rows, axis=1, keepdims=True)
    for ours, token, row in zip(found, tokens, rows, strict=False):
        assert len(ours.values) == len(ours.tokens) == n and abs(ours.drawn - row[token]) < 2e-3
        assert np.allclose(np.sort(row)[::-1][:n], ours.values, atol=2e-3)
        assert np.allclose(row[ours.tokens], ours.values, atol=2e-3)


def check_scores(ask: Ask, told: Told, own: Engine, is_whole: bool) -> None:
    """Of a prompt that is scored a logprob of each token but the first, of no other prompt any."""
    found = told.scores.get(ask.number, [])
    n = len(ask.tokens) - 1 if ask.scores_prompt else 0
    assert len(found) == n or (not is_whole and len(found) < n)
    assert told.ended[ask.number].timings.n_cached == 0 or not ask.scores_prompt
    if found and (key := ask.tokens.tobytes()) not in _scores:
        own.reset()
        _scores[key] = own.prefill(ask.tokens.tolist(), outputs="all")
    if found:
        check_rows(found, ask.tokens[1:], _scores[key], ask.n_logprobs)


class Machine(RuleBasedStateMachine):
    own: Engine
    shared: Engine
    submit: Callable

    def __init__(self) -> None:
        super().__init__()
        self.slots, self.told = Slots(self.shared, N_SLOTS), Told()
        self.asks: list[Ask] = []
        self.order: list[int] = []
        self.broken: dict[int, tuple[str, ...]] = {}  # how a request that was broken off may end
        self.shared.submit = self.submitted

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
            self.broken[ask.number] = (asks.TIMEOUT, asks.CANCELLED)

    @rule(back=st.integers(0, 6))
    def cancel(self, back):
        number, n_open = len(self.asks) - 1 - back, self.n_open
        self.slots.cancel(number)  # below 0 nobody was
        if self.n_open < n_open:
            assert number not in self.told.ended
            self.broken[number] = (asks.CANCELLED,)

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
        cache, running = self.shared.cache, [slot for slot in self.slots.slots if slot.request]
        held = {(cache.region(s.sequence), c) for s in running for c in cache.cells(s.sequence)}
        assert totals.n_cells_used == len(held), "also where an idle slot shares them"
        assert totals.n_cells_used + totals.n_cells_kept == cache.n_used

    def teardown(self):
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
                known = self.told.logprobs.get(ask.number, [])
                if ask.n_logprobs is None:
                    assert known == [None] * len(wanted.tokens)
                else:
                    check_rows(known, wanted.tokens, wanted.logits, ask.n_logprobs)


def test_whatever_comes_in_whatever_order(own, shared, monkeypatch):
    monkeypatch.setattr(slots_room, "SCORED", 5)
    monkeypatch.setattr(shared, "submit", submit := shared.submit)
    run_state_machine_as_test(
        type("Here", (Machine,), {"own": own, "shared": shared, "submit": staticmethod(submit)}),
        settings=settings(max_examples=examples(30), stateful_step_count=30, deadline=None),
    )


@pytest.mark.parametrize("n", [0, 2, 9])
def test_logprobs_are_of_the_whole_row(n):
    """Ties go to the lowest id. What cannot come has a logarithm, too."""
    row = np.array([0, 1.5, -np.inf, 1.5], np.float32)
    values = [*np.log(np.exp([1.5, 1.5, 0]) / np.exp(row).sum()), asks.NEVER]
    known = logprobs(row, 2, n)
    assert known.tokens.tolist() == [1, 3, 0, 2][:n] and known.drawn == asks.NEVER
    assert np.allclose(known.values, values[:n], atol=1e-6)
