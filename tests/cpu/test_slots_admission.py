"""Who gets a slot, which one, with which cells; and who waits, or is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from tests.served import APART, Told, alone, check_cells, go_on, ids, same, serve
from workbench.common.errors import UsageError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import CANCELLED, LENGTH, TIMEOUT, Ask
from workbench.engine.slots.seats import LEAST_GAIN
from workbench.engine.slots.slots import Slots

N_SLOTS = 4


def opened(tiny_model, n_ctx: int, **toggles: str) -> Engine:
    return wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_seqs=N_SLOTS, n_ubatch=16,
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


@pytest.fixture(scope="module")
def wide(tiny_model) -> Iterator[Engine]:
    """A region that all share, with room for all."""
    with opened(tiny_model, N_SLOTS * 80) as engine:
        yield engine


def begun(slots: Slots) -> list[int]:
    """The numbers of all that run, in the order in which they began."""
    return [*slots._running]


# cells --------------------------------------------------------------------------------------------


def test_a_request_waits_until_all_of_its_cells_are_free(small):
    slots = Slots(small, N_SLOTS)
    for number in range(4):  # 20 + 6 - 1 cells each: two fit 64
        slots.ask(Ask(number, ids(20, number), 6))
    slots.step()
    assert begun(slots) == [0, 1] and slots.totals().n_waiting == 2
    told = serve(slots, ())
    assert {end.reason for end in told.ended.values()} == {LENGTH} and len(told.ended) == 4


def test_none_overtakes_the_first_that_waits(small):
    """A small request behind a large one waits, too: else the large one might wait for ever."""
    slots = Slots(small, N_SLOTS)
    slots.ask(Ask(0, ids(20), 6))
    slots.ask(Ask(1, ids(50, 1), 8))
    slots.ask(Ask(2, ids(2, 2), 2))
    slots.step()
    assert begun(slots) == [0]
    order = []
    serve(slots, (), each=lambda s: order.extend(n for n in begun(s) if n not in order))
    assert order == [0, 1, 2]


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 70)), min_size=1, max_size=14))
def test_a_cache_too_small_for_all_serves_all_in_their_order(small, sizes):
    slots, order = Slots(small, N_SLOTS), list[int]()

    def each(s: Slots) -> None:
        check_cells(s)
        order.extend(n for n in begun(s) if n not in order)
        assert sum(r.cells for _, r in s._running.values()) <= s.room
        assert small.cache.n_used <= s.room

    told = serve(slots, [Ask(i, ids(n, i), m) for i, (n, m) in enumerate(sizes)], each)
    for i, (n, m) in enumerate(sizes):
        assert len(told.tokens[i]) == min(m, 64 - n + 1)
    numbers = [i for i in order if i in told.ended]
    assert numbers == sorted(numbers)


def test_what_can_never_fit_is_refused_with_the_reason(small, apart):
    for engine, room in ((small, 64), (apart, 80)):
        slots = Slots(engine, N_SLOTS)
        assert not slots.refusal(Ask(0, ids(room), 1))
        why = slots.refusal(Ask(0, ids(room + 1), 1))
        assert f"{room + 1} tokens" in why and f"is {room}" in why
        assert "give at least 1, and 0" in slots.refusal(Ask(0, ids(3), -1))
        assert "give at least 1, and 0" in slots.refusal(Ask(0, ids(0), 1))
        for bad in (-1, engine.model.n_vocab):
            why = slots.refusal(Ask(0, np.array([5, bad], np.int32), 1))
            assert f"token id {bad} " in why and str(engine.model.n_vocab) in why


def test_more_slots_than_sequences_or_tokens_of_a_step_are_refused(small, tiny_model):
    for n in (0, N_SLOTS + 1):
        with pytest.raises(UsageError, match=f"{n} slots; this engine has 4 sequences"):
            Slots(small, n)
    with wb.Engine.load(
        tiny_model("tiny-llama", "F32"), device="embedded", n_seqs=4, n_ubatch=2, n_ctx=64,
        toggles=Toggles(),
    ) as engine, pytest.raises(UsageError, match="larger n_ubatch"):  # fmt: skip
        Slots(engine, 3)


def test_a_full_queue_says_so_and_when_to_come_again(apart):
    slots = Slots(apart, 2, n_waiting=3)
    for number in range(5):  # two find free slots, three wait
        assert not slots.is_full
        slots.ask(Ask(number, ids(3), 40))
    assert slots.is_full
    assert slots.retry_after_s() == 1.0  # nobody knows how long a step takes
    told = Told()
    go_on(slots, 1, told)
    assert slots.is_full and slots.totals().n_waiting == 3
    slots.recent_ns = 2e9
    left = 5 * 40 - sum(r.made for _, r in slots._running.values())
    assert slots.retry_after_s() == pytest.approx(2 * left / 2)
    slots.cancel(4)
    assert not slots.is_full
    serve(slots, (), told=told)
    assert told.ended[4].reason == CANCELLED and len(told.ended) == 5


def test_what_the_engine_had_before_is_gone(small):
    small.step(ids(16))
    small.step(ids(16), "none", 3)
    slots = Slots(small, N_SLOTS)
    assert small.cache.n_used == 0
    serve(slots, [Ask(0, ids(60), 4)])


def test_where_none_may_wait_as_many_come_as_there_are_slots(apart):
    slots = Slots(apart, 2, n_waiting=0)
    for number in range(2):
        assert not slots.is_full
        slots.ask(Ask(number, ids(3), 2))
    assert slots.is_full
    told = serve(slots, ())
    assert not slots.is_full and len(told.ended) == 2


# which slot ---------------------------------------------------------------------------------------


def served_at(slots: Slots, ask: Ask) -> int:
    """The sequence that a request gets, which is served to its end."""
    told = Told()
    slots.ask(ask)
    go_on(slots, 1, told)
    ((slot, _),) = slots._running.values()
    serve(slots, (), told=told)
    return slot.sequence


@pytest.mark.parametrize("room", ["apart", "wide"])
def test_the_slot_that_has_most_of_a_prompt_else_the_longest_idle(request, room):
    slots = Slots(request.getfixturevalue(room), N_SLOTS)
    prompts = [ids(20, seed) for seed in range(4)]
    # slots that were never used come first, in their order
    assert [served_at(slots, Ask(i, p, 2)) for i, p in enumerate(prompts)] == [0, 1, 2, 3]
    longer = np.concatenate([prompts[2], ids(3, 9)])
    assert served_at(slots, Ask(4, longer, 2)) == 2
    assert slots.n_cached == 20
    assert served_at(slots, Ask(5, ids(5, 77), 2)) == 0  # the longest idle
    assert served_at(slots, Ask(6, ids(5, 78), 2)) == 1
    assert served_at(slots, Ask(7, prompts[3], 2)) == 3
    assert slots.n_cached == 20 + 19  # a prompt's last token is always computed
    assert served_at(slots, Ask(8, ids(5, 79), 2)) == 2


def test_who_wants_no_kept_cells_has_its_whole_prompt_computed(apart):
    slots, prompt = Slots(apart, N_SLOTS), ids(LEAST_GAIN + 9)
    told = serve(slots, [Ask(0, prompt, 3)])
    served_at(slots, Ask(1, prompt, 3, cache_prompt=False))
    assert slots.n_cached == 0
    again = serve(slots, [Ask(2, prompt, 3, cache_prompt=False)])
    assert again.ended[2].timings.n_cached == slots.n_cached == 0
    assert again.tokens[2] == told.tokens[0]
    kept = serve(slots, [Ask(3, prompt, 3)])  # its cells serve those who want them
    assert kept.ended[3].timings.n_cached == len(prompt) - 1


def test_a_time_limit_is_told_before_a_length(apart):
    """The last token of a budget comes late: both hold, and the first of the rule is told."""
    slots = Slots(apart, N_SLOTS)
    slots.ask(Ask(0, ids(5), 1, timeout_s=1000.0))
    slots._waiting[0].is_late = lambda now: slots._running != {}
    told = serve(slots, ())
    assert told.ended[0].reason == TIMEOUT and len(told.tokens[0]) == 1


def test_the_lowest_slot_that_is_free(apart):
    with apart.variant(Toggles(slot_choice="lowest_free", **APART)) as engine:
        slots = Slots(engine, N_SLOTS)
        assert [served_at(slots, Ask(i, ids(9, i), 2)) for i in range(3)] == [0, 0, 0]
        for number in (10, 11, 12):
            slots.ask(Ask(number, ids(9, number), 9))
        go_on(slots, 1, told := Told())
        slots.cancel(11)
        slots.ask(Ask(13, ids(9, 13), 9))
        go_on(slots, 1, told)
        assert slots._running[13].slot.sequence == 1
        serve(slots, (), told=told)


@pytest.mark.parametrize("room", ["apart", "wide"])
@pytest.mark.parametrize("choice", Toggles.values("slot_choice"))
def test_a_prefix_that_another_sequence_has_is_copied_or_shared(request, room, choice):
    """While the source runs, and once it is idle; the tokens are what they are without."""
    base = request.getfixturevalue(room)
    toggles = Toggles(slot_choice=choice, **(APART if room == "apart" else {}))
    with base.variant(toggles) as engine:
        prefix = ids(LEAST_GAIN + 5)
        asks = [Ask(i, np.concatenate([prefix, ids(4, 50 + i)]), 6) for i in range(3)]
        wanted = [alone(base, ask) for ask in asks]
        slots = Slots(engine, N_SLOTS)
        slots.ask(asks[0])
        go_on(slots, 3, told := Told())
        assert 0 in slots._running and slots.n_cached == 0
        serve(slots, asks[1:], told=told)
        for ask, twin in zip(asks[1:], wanted[1:], strict=True):
            assert told.ended[ask.number].timings.n_cached == len(prefix)
            same(ask, told.tokens[ask.number], twin)
        assert slots.n_cached == slots.totals().n_cached_tokens == 2 * len(prefix)
        assert slots.n_prompt == sum(len(a.tokens) for a in asks) - 2 * len(prefix)


def test_a_short_gain_is_not_worth_a_copy(apart):
    slots = Slots(apart, N_SLOTS)
    prefix = ids(LEAST_GAIN - 1)
    slots.ask(Ask(0, np.concatenate([prefix, [5]]), 30))
    go_on(slots, 3, told := Told())
    serve(slots, [Ask(1, np.concatenate([prefix, [6]]), 2)], told=told)
    assert told.ended[1].timings.n_cached == 0


# what is kept -------------------------------------------------------------------------------------


def test_cells_of_what_has_ended_are_of_its_prompt_and_its_tokens(apart):
    slots = Slots(apart, N_SLOTS)
    prompt = ids(9)
    told = serve(slots, [Ask(0, prompt, 5)])
    kept = slots.slots[0].kept
    # its last token was never given to the model
    assert kept.tokens.tolist() == [*prompt, *told.tokens[0][:-1]] and len(kept) == 13
    assert apart.cache.n_used == 13


@pytest.mark.parametrize("how", [CANCELLED, TIMEOUT])
@pytest.mark.parametrize("n_steps", [1, 2, 3, 6])
def test_cells_of_what_was_broken_off_are_of_tokens_that_are_known(apart, how, n_steps):
    slots = Slots(apart, N_SLOTS)
    prompt = ids(40)  # three steps
    made: list[int] = []
    slots.ask(Ask(0, prompt, 30, timeout_s=3600.0))
    for _ in range(n_steps):
        made += [token.token for token in slots.step().tokens]
    if how == CANCELLED:
        slots.cancel(0)
    else:
        slots._running[0].request.due_ns = 0
    (end,) = slots.step().ended
    assert end.reason == how and slots.idle
    n = min(40, 16 * n_steps)
    assert slots.slots[0].kept.tokens.tolist() == [*prompt[:n], *made[:-1]]
    check_cells(slots)
    again = Ask(1, prompt, 6)
    told = serve(slots, [again])  # goes on from there
    assert told.ended[1].timings.n_cached == min(n, 39)
    wanted = alone(apart, again)
    same(again, told.tokens[1], wanted)


def test_idle_cells_go_for_who_needs_them_the_longest_idle_first(small):
    slots = Slots(small, N_SLOTS)
    for number in range(3):  # 15 cells each
        serve(slots, [Ask(number, ids(12, number), 4)])
    assert [len(s.kept) for s in slots.slots] == [15, 15, 15, 0]
    serve(slots, [Ask(9, ids(18, 9), 8)])  # 25 cells beside 39 that are left
    assert [len(s.kept) for s in slots.slots] == [0, 15, 15, 25]
    assert small.cache.n_used == 55


# what is counted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["apart", "wide"])
def test_cells_of_requests_that_run_are_told_from_those_that_are_kept(layout, request):
    """Also where a request shares cells with what an idle slot keeps: these are held."""
    engine = request.getfixturevalue(layout)
    slots = Slots(engine, N_SLOTS)
    prompt = ids(LEAST_GAIN + 10)

    def counted() -> tuple[int, int, int]:
        totals = slots.totals()
        return totals.n_running, totals.n_cells_used, totals.n_cells_kept

    serve(slots, [Ask(0, prompt, 4)])
    n_kept = len(prompt) + 3
    assert counted() == (0, 0, n_kept)
    for number in (1, 2):  # one takes the slot with these cells, the other one a copy
        slots.ask(Ask(number, prompt, 9))
    slots.step()
    n_running, n_used, n_kept = counted()
    assert (n_running, n_kept) == (2, 0) and n_used == engine.cache.n_used
    slots.cancel(1)
    n_running, n_used, n_kept = counted()
    assert n_running == 1 and n_used + n_kept == engine.cache.n_used
    owned = {c for c in range(engine.cache.n_cells) if engine.cache.owners(c)}
    (row,) = slots._running.values()
    held = {c for c in owned if row.slot.sequence in engine.cache.owners(c)}
    assert n_used == len(held) and n_kept == len(owned - held) > 0
    while not slots.idle:
        slots.step()
    assert counted() == (0, 0, engine.cache.n_used) and engine.cache.n_used


@pytest.mark.parametrize(
    ("layout", "n_ctx", "fits"),
    [("shared", 7, False), ("shared", 8, True), ("apart", 7, False), ("apart", 8, True)],
)
def test_fewer_cells_than_the_slots_can_use_are_an_error(tiny_model, layout, n_ctx, fits):
    with opened(tiny_model, n_ctx, **(APART if layout == "apart" else {})) as engine:
        if fits:
            told = serve(Slots(engine, N_SLOTS), [Ask(n, ids(1, n), 1) for n in range(N_SLOTS)])
            assert {end.reason for end in told.ended.values()} == {LENGTH}
        else:
            with pytest.raises(UsageError, match="4 slots cannot be used together"):
                Slots(engine, N_SLOTS)
