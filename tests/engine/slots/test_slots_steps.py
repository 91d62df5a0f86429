"""What is in each step: tokens of all that generate, prompts in the room beside them, and which
step is issued before the results of the one before are looked at."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.served import APART, BEHIND, Told, check_cells, go_on, ids, serve
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine import step as step_room
from workbench.engine.engine import Engine
from workbench.engine.slots import slots as slots_room
from workbench.engine.slots.asks import FAILED, LENGTH, TIMEOUT, Ask
from workbench.engine.slots.draws import UNKEPT, Draws
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampler, Sampling
from workbench.trace.spans import now_ns

N_SLOTS, N_UBATCH = 4, 12
SETTINGS = {"host": APART, "behind": BEHIND}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=SETTINGS)
def engine(request, tiny_model) -> Iterator[Engine]:
    with opened(tiny_model, request.param) as made:
        yield made


def opened(tiny_model, toggles: dict[str, str]) -> Engine:
    return wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_ctx=N_SLOTS * 96, n_seqs=N_SLOTS,
        n_ubatch=N_UBATCH, threads=1, toggles=Toggles(**toggles),
    )  # fmt: skip


class Watched(Slots):
    """Slots that note their steps, sequence -> its tokens in a step, and what they tell."""

    def __init__(self, engine: Engine, n: int = N_SLOTS, on_step=lambda what: None):
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
            rows = own.prefill(prompt.tolist(), outputs="all").astype(np.float64)
        wanted = [
            row[t] - np.logaddexp.reduce(row) for row, t in zip(rows, prompt[1:], strict=False)
        ]
        assert np.allclose([known.drawn for known in told.scores[1]], wanted, atol=2e-3)
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
        assert {n: e.reason for n, e in made.told.ended.items()} == {1: TIMEOUT}
        now[0] = 3601 * 10**9
        made.finish()
        assert made.told.ended[0].reason == TIMEOUT
        assert 1 <= made.told.ended[0].timings.n_made < 60
        wait = step_room.Pending.wait

        def waits(self):
            now[0] = 10**15
            return wait(self)

        made.ask(Ask(2, ids(5), 1, timeout_s=1e5))
        monkeypatch.setattr(step_room.Pending, "wait", waits)
        made.finish()
        assert made.told.ended[2].reason == TIMEOUT


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
        assert end.reason == FAILED and "not finite" in end.why and end.timings.n_made < 9
        assert made.told.ended[0].reason == LENGTH and len(made.told.tokens[0]) == 9
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
        ends = made.drop()
        assert sorted(end.number for end in ends) == [0, 1, 2]
        assert {end.reason for end in ends} == {FAILED}
        assert all("the device is gone" in end.why for end in ends)
        assert made.idle and made.drop() == []
        check_cells(made)
