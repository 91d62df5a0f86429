"""Who gets a slot, which one, with which cells; and who waits, or is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.served import APART, Told, alone, check_cells, go_on, ids, same, serve
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import CANCELLED, LENGTH, Ask
from workbench.engine.slots.seats import LEAST_GAIN
from workbench.engine.slots.slots import Slots

N_SLOTS = 4


def opened(tiny_model, n_ctx: int, n_ubatch: int = 16, device="embedded", **toggles: str) -> Engine:
    return wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device=device, n_seqs=N_SLOTS, n_ubatch=n_ubatch,
        n_ctx=n_ctx, threads=1, toggles=Toggles(**toggles),
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(tiny_model) -> Iterator[Engine]:
    """A region that all share, with room for 64 cells."""
    with opened(tiny_model, 64) as engine:
        yield engine


@pytest.fixture(scope="module")
def apart(tiny_model) -> Iterator[Engine]:
    """A region of 80 cells for each sequence."""
    with opened(tiny_model, N_SLOTS * 80, **APART) as engine:
        yield engine


@pytest.fixture(scope="module", params=[APART, {}], ids=["apart", "wide"])
def roomy(request, tiny_model) -> Iterator[Engine]:
    """A region for each, and one that all share with room for all."""
    with opened(tiny_model, N_SLOTS * 80, **request.param) as engine:
        yield engine


def test_what_can_never_fit_is_refused_with_the_reason(small, apart):
    for engine, room in ((small, 64), (apart, 80)):
        slots, n = Slots(engine, N_SLOTS), engine.model.n_vocab
        assert not slots.refusal(Ask(0, ids(room), 1))
        too_long = f"{room + 1} tokens, and the context of a request is {room}"
        for tokens, most, why in (
            (ids(room + 1), 1, too_long), (ids(3), -1, "give at least 1, and 0"),
            (ids(0), 1, "give at least 1, and 0"), ([5, n], 1, f"token id {n} is outside"),
            ([-1], 1, "token id -1 is outside"),
        ):  # fmt: skip
            assert why in slots.refusal(Ask(0, np.array(tokens, np.int32), most))


@pytest.mark.parametrize(
    ("n_slots", "n_ctx", "n_ubatch", "toggles", "said"),
    [(0, 64, 16, {}, "0 slots; this engine has 4 sequences"),
     (5, 64, 16, {}, "5 slots; this engine has 4 sequences"),
     (3, 64, 2, {}, "larger n_ubatch"), (4, 7, 16, {}, "4 slots cannot be used together"),
     (4, 7, 16, APART, "4 slots cannot be used together"),
     (4, 8, 16, {}, ""), (4, 8, 16, APART, "")],
)  # fmt: skip
def test_more_slots_than_an_engine_serves_are_refused(
    tiny_model, n_slots, n_ctx, n_ubatch, toggles, said
):
    with opened(tiny_model, n_ctx, n_ubatch, "null", **toggles) as engine:
        if said:
            with pytest.raises(UsageError, match=said):
                Slots(engine, n_slots)
            return
        told = serve(Slots(engine, N_SLOTS), [Ask(n, ids(1, n), 1) for n in range(N_SLOTS)])
        assert {end.reason for end in told.ended.values()} == {LENGTH}


@pytest.mark.parametrize("n_waiting", [0, 3])
def test_a_full_queue_says_so_and_when_to_come_again(apart, n_waiting):
    slots, n = Slots(apart, 2, n_waiting), 2 + n_waiting  # two find free slots
    for number in range(n):
        assert not slots.is_full
        slots.ask(Ask(number, ids(3), 40))
    assert slots.is_full
    assert slots.retry_after_s() == 1.0  # nobody knows how long a step takes
    go_on(slots, 1, told := Told())
    assert slots.is_full and slots.totals().n_waiting == n_waiting
    slots.recent_ns = 2e9
    assert slots.retry_after_s() == pytest.approx(2 * (40 * n - slots.n_made) / 2)
    slots.cancel(n - 1)
    assert not slots.is_full
    serve(slots, (), told=told)
    assert told.ended[n - 1].reason == CANCELLED and len(told.ended) == n


# which slot ---------------------------------------------------------------------------------------


def served_at(slots: Slots, number: int, prompt: np.ndarray, **more) -> tuple[int, int]:
    """The sequence that a request gets, and how many tokens it finds there; it is served."""
    slots.ask(Ask(number, prompt, 2, **more))
    go_on(slots, 1, told := Told())
    (found,) = [slot.sequence for slot in slots.slots if slot.request is not None]
    serve(slots, (), told=told)
    return found, told.ended[number].timings.n_cached


def test_the_slot_with_most_of_a_prompt_or_longest_idle(roomy):
    slots = Slots(roomy, N_SLOTS)
    prompts = [ids(20, seed) for seed in range(4)]
    given = [
        *((prompt, i, 0) for i, prompt in enumerate(prompts)),  # those never used come first
        (np.concatenate([prompts[2], ids(3, 9)]), 2, 20),
        (ids(5, 77), 0, 0), (ids(5, 78), 1, 0),  # the longest idle
        (prompts[3], 3, 19),  # a prompt's last token is always computed
        (ids(5, 79), 2, 0),
    ]  # fmt: skip
    for number, (prompt, *wanted) in enumerate(given):
        assert served_at(slots, number, prompt) == tuple(wanted)
    assert served_at(slots, 20, prompts[3], cache_prompt=False)[1] == 0  # who wants none has none
    assert served_at(slots, 21, prompts[3])[1] == 19
    assert slots.n_cached == 20 + 19 + 19


@pytest.mark.parametrize("gain", [LEAST_GAIN - 1, LEAST_GAIN + 5])
def test_a_prefix_of_another_sequence_is_copied_or_shared(roomy, gain):
    """Where the gain is worth a copy; while the source runs, and once it is idle."""
    asks = [Ask(i, np.append(ids(gain), ids(4, 50 + i)), 6) for i in range(3)]
    wanted = [alone(roomy, ask) for ask in asks]
    slots = Slots(roomy, N_SLOTS)
    slots.ask(asks[0])
    go_on(slots, 3, told := Told())
    assert slots.totals().n_running == 1 and slots.n_cached == 0
    serve(slots, asks[1:], told=told)
    cached = gain if gain >= LEAST_GAIN else 0
    for ask, twin in zip(asks[1:], wanted[1:], strict=True):
        assert told.ended[ask.number].timings.n_cached == cached
        same(ask, told.tokens[ask.number], twin)
    assert slots.n_cached == slots.totals().n_cached_tokens == 2 * cached
    assert slots.n_prompt == sum(len(a.tokens) for a in asks) - 2 * cached


# what is kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [CANCELLED, LENGTH])
@pytest.mark.parametrize("n_steps", [1, 3, 6])
def test_cells_that_are_kept_are_of_tokens_that_are_known(apart, how, n_steps):
    """Of a prompt, which takes three steps, and of its tokens but the last, which was never given
    to the model."""
    slots, prompt, told = Slots(apart, N_SLOTS), ids(40), Told()
    slots.ask(Ask(0, prompt, 30 if how == CANCELLED else 4))
    go_on(slots, n_steps, told)
    if how == CANCELLED:
        slots.cancel(0)
    serve(slots, (), told=told)
    n = min(40, 16 * n_steps) if how == CANCELLED else 40
    kept = slots.slots[0].kept.tokens.tolist()
    assert kept == [*prompt[:n], *told.tokens.get(0, [])[:-1]]
    assert apart.cache.n_used == len(kept)
    check_cells(slots)
    again = Ask(1, prompt, 6)
    told = serve(slots, [again])  # goes on from there
    assert told.ended[1].timings.n_cached == min(n, 39)
    same(again, told.tokens[1], alone(apart, again))


def test_idle_cells_go_for_who_needs_them_oldest_first(small):
    slots = Slots(small, N_SLOTS)
    for number in range(3):  # 15 cells each
        serve(slots, [Ask(number, ids(12, number), 4)])
    assert [len(s.kept) for s in slots.slots] == [15, 15, 15, 0]
    serve(slots, [Ask(9, ids(18, 9), 8)])  # 25 cells beside 39 that are left
    assert [len(s.kept) for s in slots.slots] == [0, 15, 15, 25]
    assert small.cache.n_used == 55


def test_cells_that_a_prompt_is_to_share_do_not_go_for_it(small):
    """They are an idle slot's, which would be the one to give up its cells."""
    with small.variant(Toggles(slot_choice="lowest_free")) as engine:
        slots = Slots(engine, N_SLOTS)
        assert [served_at(slots, 10 + i, ids(9, i))[0] for i in range(3)] == [0, 0, 0]
        serve(slots, [Ask(0, ids(3, 1), 4), Ask(1, ids(37), 4)])
        again = Ask(2, np.append(ids(36), ids(4, 5)), 5)
        told = serve(slots, [again], check_cells)
    assert told.ended[2].timings.n_cached == 36
    same(again, told.tokens[2], alone(small, again))


def test_cells_of_who_runs_are_told_from_those_kept(roomy):
    """Also where a request shares cells with what an idle slot keeps: these are held."""
    slots, prompt, cache = Slots(roomy, N_SLOTS), ids(LEAST_GAIN + 10), roomy.cache

    def counted() -> tuple[int, int, int]:
        totals = slots.totals()
        return totals.n_running, totals.n_cells_used, totals.n_cells_kept

    serve(slots, [Ask(0, prompt, 4)])
    assert counted() == (0, 0, len(prompt) + 3)
    for number in (1, 2):  # one takes the slot with these cells, the other one a copy
        slots.ask(Ask(number, prompt, 9))
    go_on(slots, 1, told := Told())
    assert counted() == (2, cache.n_used, 0)
    slots.cancel(1)
    owned = [cache.owners(c) for c in range(cache.n_cells) if cache.owners(c)]
    (held,) = (slot.sequence for slot in slots.slots if slot.request is not None)
    n_held = sum(held in owners for owners in owned)
    assert counted() == (1, n_held, len(owned) - n_held) and n_held < len(owned)
    serve(slots, (), told=told)
    assert counted() == (0, 0, cache.n_used) and cache.n_used
