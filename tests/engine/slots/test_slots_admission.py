"""Who gets a slot, which one, with which cells; who waits, or is refused; the shapes of steps; and
what a server does before it takes requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.served import APART, Told, alone, check_cells, go_on, ids, same, serve
from workbench.backend.cpu import compile as compiler
from workbench.backend.cpu.kernels import op_table
from workbench.common.errors import UsageError
from workbench.config import BEST, KVGrowth, TogglePreset, Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots import first_steps as first_steps_room
from workbench.engine.slots.asks import CANCELLED, LENGTH, Ask
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.padding import Sizes, padded
from workbench.engine.slots.seats import LEAST_GAIN
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling
from workbench.server.serving import serving

N_SLOTS, ROOM = 4, 96
PLANNED = {"plans": "ours", "plan_scope": "step"}


def opened(tiny_model, n_ctx: int, device="embedded", quant="F32", **more) -> Engine:
    given = {"n_seqs": N_SLOTS, "n_ubatch": 16, "threads": 1, "toggles": Toggles()} | more
    return Engine.load(tiny_model("tiny-llama", quant), device=device, n_ctx=n_ctx, **given)


@pytest.fixture(scope="module")
def small(tiny_model) -> Iterator[Engine]:
    """A region that all share, with room for 64 cells."""
    with opened(tiny_model, 64) as engine:
        yield engine


@pytest.fixture(scope="module", params=[APART, {}], ids=["apart", "wide"])
def roomy(request, tiny_model) -> Iterator[Engine]:
    """A region of 80 cells for each sequence, or one that all share with room for all."""
    with opened(tiny_model, N_SLOTS * 80, toggles=Toggles(**request.param)) as engine:
        yield engine


def test_what_can_never_fit_is_refused_with_the_reason(small, roomy):
    for engine, room in ((small, 64), (roomy, 80 if roomy.cache.n_regions > 1 else 320)):
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
    ("n", "n_ctx", "n_ubatch", "said"),
    [(0, 64, 16, "0 slots; this engine has 4 sequences"),
     (5, 64, 16, "5 slots; this engine has 4 sequences"), (3, 64, 2, "larger n_ubatch"),
     (4, 7, 16, "4 slots cannot be used together"), (4, 8, 16, "")],
)  # fmt: skip
@pytest.mark.parametrize("toggles", [APART, {}], ids=["apart", "wide"])
def test_more_slots_than_an_engine_serves_are_refused(
    tiny_model, n, n_ctx, n_ubatch, toggles, said
):
    sizes = {"n_ubatch": n_ubatch, "toggles": Toggles(**toggles)}
    with opened(tiny_model, n_ctx, "null", **sizes) as engine:
        if said:
            with pytest.raises(UsageError, match=said):
                Slots(engine, n)
            return
        told = serve(Slots(engine, N_SLOTS), [Ask(n, ids(1, n), 1) for n in range(N_SLOTS)])
        assert {end.reason for end in told.ended.values()} == {LENGTH}


@pytest.mark.parametrize("n_waiting", [0, 3])
def test_a_full_queue_says_so_and_when_to_come_again(roomy, n_waiting):
    slots, n = Slots(roomy, 2, n_waiting), 2 + n_waiting  # two find free slots
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


def test_a_prompt_that_was_cancelled_leaves_what_was_computed(roomy):
    slots, prompt = Slots(roomy, N_SLOTS), ids(40)
    slots.ask(Ask(0, prompt, 30))
    go_on(slots, 1, told := Told())
    slots.cancel(0)
    serve(slots, (), told=told)
    assert slots.slots[0].kept.tokens.tolist() == prompt[:16].tolist()
    assert served_at(slots, 1, prompt) == (0, 16)


def test_idle_cells_go_for_who_needs_them_oldest_first(small):
    """A request's last token was never given to the model."""
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
    serve(slots, [Ask(0, prompt, 4)])
    for number in (1, 2):  # one takes the slot with these cells, the other one a copy
        slots.ask(Ask(number, prompt, 9))
    go_on(slots, 1, told := Told())
    slots.cancel(1)
    (n,) = [len(cache.cells(slot.sequence)) for slot in slots.slots if slot.request is not None]
    totals = slots.totals()
    assert (totals.n_cells_used, totals.n_cells_kept) == (n, cache.n_used - n)
    assert totals.n_cells_kept > 0
    serve(slots, (), told=told)


# shapes of steps ----------------------------------------------------------------------------------


@given(st.data())
def test_as_many_sequences_as_tokens_is_a_token_each(data):
    """Kernels take a step with as many regions as tokens for one of single tokens."""
    n_ubatch = data.draw(st.integers(1, 600))
    n_tokens = data.draw(st.integers(1, n_ubatch))
    n_seqs = data.draw(st.integers(1, n_tokens))
    n_outputs = data.draw(st.integers(0, n_seqs))
    found = padded(Sizes(n_tokens, n_seqs, n_outputs), n_ubatch)
    assert n_tokens <= found.n_tokens <= n_ubatch and n_seqs <= found.n_seqs <= found.n_tokens
    assert n_outputs <= found.n_outputs <= found.n_tokens
    assert (found.n_seqs == found.n_tokens) == (n_seqs == n_tokens)
    if found.n_tokens > n_tokens and n_seqs > 1:  # what is added belongs to none of them
        assert found.n_seqs > n_seqs


def test_a_server_has_few_shapes():
    """Whatever mixture of prompts and sequences a step has."""
    every = {
        padded(Sizes(n_tokens, n_seqs, n_outputs), 512)
        for n_tokens in range(1, 513)
        for n_seqs in range(1, min(n_tokens, 128) + 1, 3)
        for n_outputs in {0, 1, n_seqs // 2, n_seqs}
    }
    mixed = {found for found in every if found.n_seqs != found.n_tokens}
    assert len(every) - len(mixed) <= 2 * 11 and len(mixed) <= 200
    assert {found.n_tokens for found in mixed} == {16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512}


# first steps --------------------------------------------------------------------------------------


@pytest.fixture
def unhurried(monkeypatch):
    """There is no limit of time for first steps, which a busy machine would reach."""
    monkeypatch.setattr(first_steps_room, "AT_MOST_S", 600.0)
    monkeypatch.setattr(first_steps_room, "BUILDING_S", 600.0)


@pytest.fixture
def served(tiny_model, unhurried):
    """`served(device, **toggles)`: an engine with a server's toggles."""
    return lambda device="embedded", **more: opened(
        tiny_model, N_SLOTS * ROOM, device, "Q8_0", n_kv_pad=32,
        toggles=serving(device, TogglePreset(BEST, more)),
    )  # fmt: skip


@pytest.mark.parametrize("more", [{}, PLANNED], ids=["plain", "planned"])
def test_first_requests_build_little_and_compile_nothing(served, monkeypatch, more):
    """And get the same tokens as of an engine that took no first steps; nothing is left behind."""
    compiled, compile_kernel = list[str](), compiler.compile_kernel

    def noted(name, body):
        compiled.append(name)
        return compile_kernel(name, body)

    monkeypatch.setattr(compiler, "compile_kernel", noted)
    sizes = np.random.default_rng(1).integers((1, 1), (60, 30), (16, 2)).tolist()
    asks = [Ask(i, ids(n, 99 + i), most, Sampling(0.8), i) for i, (n, most) in enumerate(sizes)]
    with served(**more) as engine, engine.variant(engine.toggles) as other:
        slots, plain, cache = Slots(engine, N_SLOTS), Slots(other, N_SLOTS), engine.cache
        op_table.kernel.cache_clear()
        n_ready = first_steps(engine, N_SLOTS)
        assert cache.n_used == 0 and slots.totals() == plain.totals()
        assert not engine.issuer.under_way and cache.moved is None and not cache.copied
        before, n_compiled = engine.counters, len(compiled)
        assert n_compiled > 5 and n_ready == before["programs_built"] // engine.period
        found = serve(slots, asks).tokens
        made = Counter(engine.counters)
        made.subtract(before)
        assert len(compiled) == n_compiled, compiled[n_compiled:]
        assert made["steps"] > 60 and made["programs_built"] < made["steps"] / 10
        assert made["plans_captured"] <= made["programs_built"]
        assert not more or before["plans_captured"] >= n_ready
        assert found == serve(plain, asks).tokens


@pytest.mark.parametrize("kv_cache", ["per_sequence", "unified"])
@pytest.mark.parametrize("each", [(5, 3), (14, 30)], ids=str)
def test_requests_of_one_length_build_nothing(tiny_model, unhurried, kv_cache, each):
    """However they come: one by one, and several at once."""
    toggles = serving("embedded", TogglePreset(BEST, {"kv_cache": kv_cache}))
    some, asked = np.random.default_rng(2), 0
    with opened(
        tiny_model, N_SLOTS * ROOM, quant="Q8_0", n_kv_pad=32, n_ubatch=64, toggles=toggles
    ) as engine:
        slots = Slots(engine, N_SLOTS)
        assert first_steps(engine, N_SLOTS, each) > 6
        before = engine.counters["programs_built"]
        while asked < 60 or not slots.idle:
            n_come = int(some.choice((0, 0, 0, 0, 1, 2, 6))) if asked < 60 else 0
            for _ in range(max(n_come, slots.idle)):
                slots.ask(Ask(asked, ids(each[0], 99 + asked), each[1]))
                asked += 1
            slots.step()
        assert engine.counters["programs_built"] == before


def test_copies_of_cells_and_logits_find_all_made(served, monkeypatch):
    """Neither a copy of cells nor an answer with log-probabilities drops the programs kept."""
    with served() as engine:
        slots, dropped, told = Slots(engine, N_SLOTS), list[str](), Told()
        first_steps(engine, N_SLOTS)
        n_kept, forget = len(engine.steps.programs._kept), engine.bound.workspace._on_grow
        monkeypatch.setattr(
            engine.bound.workspace, "_on_grow", lambda: (dropped.append("all"), forget())
        )
        for number in range(N_SLOTS):
            slots.ask(Ask(number, np.arange(3, 60, dtype=np.int32), 8, n_logprobs=2))
            go_on(slots, 1, told)
        scored = np.arange(3, 90, dtype=np.int32)
        serve(slots, [Ask(N_SLOTS, scored, 1, n_logprobs=2, scores_prompt=True)], told=told)
        assert slots.totals().n_cached_tokens > 50 and not dropped
        assert len(engine.steps.programs._kept) >= n_kept


@pytest.mark.parametrize("growth", KVGrowth)
def test_every_extent_and_width_is_made_ready(served, growth, monkeypatch):
    with served(kv_growth=growth) as engine:
        first_steps(engine, N_SLOTS)
        built, pads = engine.counters["programs_built"], engine.cache.growth
        for extent in {pads.extent(n) for n in range(1, ROOM)}:
            for n in range(1, N_SLOTS + 1):
                engine.reset()
                for s in range(n):
                    engine.prefill([5] * (min(extent, ROOM) - 2), "none", sequence=s)
                before = engine.counters["programs_built"]
                for _ in range(2):
                    engine.submit([(s, [5], "last") for s in range(n)], engine.can_draw).wait()
                assert engine.counters["programs_built"] == before, (extent, n)
        assert built > 6
    monkeypatch.setattr(first_steps_room, "BUILDING_S", 0.0)
    with served("host") as engine:  # which a limit of time ends
        assert first_steps(engine, N_SLOTS) <= 1
        assert engine.cache.n_used == 0
