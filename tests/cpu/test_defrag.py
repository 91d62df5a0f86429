"""Holes among the cells of sequences: what they cost, and that closing them changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.cpu import test_batched_hazards as hazards_room
from tests.profiles import examples
from tests.served import APART, BEHIND, Told, alone, check_cells, go_on, ids, same, serve
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.sizes import round_up
from workbench.config import Toggles
from workbench.engine.cache.defrag import defragment, pays
from workbench.engine.cache.growth import Growth
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.cache.visits import kv_visits
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import LENGTH, Ask
from workbench.engine.slots.slots import Slots
from workbench.program.check.hazards import races
from workbench.program.commands import Sync, Wait

N_SEQS = 8
CACHES = [("f16", "f16"), ("bf16", "f32"), ("q8_0", "q8_0")]


def opened(tiny_model, n_ctx=256, **more) -> Engine:
    toggles = Toggles(**more.pop("toggles", {"graph_reuse": "set_rows"}))
    return wb.Engine.load(
        tiny_model("tiny-llama", "F32"), n_ctx=n_ctx, n_seqs=N_SEQS, n_ubatch=32, n_kv_pad=16,
        threads=1, toggles=toggles, **({"device": "embedded"} | more),
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    with opened(tiny_model) as made:
        yield made


def filled(engine: Engine) -> None:
    """Eight sequences of 9 to 23 cells; of some all are removed, of others a part."""
    engine.reset()
    for sequence in range(N_SEQS):
        engine.step(ids(9 + 2 * sequence, sequence), "none", sequence)
    for sequence in (0, 2, 3, 6):
        engine.cache.remove(sequence)
    engine.cache.remove(4, 12)


# the table ----------------------------------------------------------------------------------------


class Kept:
    """Whose cells a cache has at which positions, whatever cells these are."""

    def __init__(self, cache: KVCache):
        self.of = {s: sorted(cache._own(s)[1].tolist()) for s in range(len(cache._next))}
        self.lengths = cache._next.tolist()
        self.n = cache.n_used
        self.shared = sorted(cache.free.n_owners[cache.free.n_owners > 0].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and vars(self) == vars(other)


@settings(max_examples=examples(300))
@given(st.data())
def test_what_sequences_have_stays_and_holes_go(data):
    """Any state of a table, beside what each sequence has of it."""
    cache = KVCache(60, 8, n_seqs=4)
    for _ in range(data.draw(st.integers(1, 12))):
        sequence = data.draw(st.integers(0, 3))
        what = data.draw(st.sampled_from(["more", "more", "remove", "copy", "shift", "close"]))
        n, length = data.draw(st.integers(1, 9)), cache.length(sequence)
        if what == "more" and cache.n_used + n <= 60:
            at = np.arange(length, length + n, dtype=np.int32)
            cache.store(np.full(n, sequence), at, cache.find([(sequence, n)]))
        elif what == "remove" and length:
            begin = data.draw(st.integers(0, length - 1))
            cache.remove(sequence, begin, begin + n)
        elif what == "copy":
            cache.remove((sequence + 1) % 4)
            cache.copy(sequence, (sequence + 1) % 4, 0, n)
        elif what == "shift" and not (cache.free.n_owners > 1).any():
            cache.shift(sequence, n)
        elif what == "close":
            defragment(cache)
    before, owned = Kept(cache), cache.free.n_owners[0].copy()
    content = cell_of(cache)
    changes, n_holes = cache.n_changes, int(cache.free.ends[0]) - cache.n_used
    moved = defragment(cache)
    assert Kept(cache) == before
    assert int(cache.free.ends[0]) == cache.n_used == int(cache.free.used[0])
    assert moved == int((owned[cache.n_used :] > 0).sum())  # no fewer could
    assert (cache.n_changes > changes) == (n_holes > 0) == (moved > 0)
    assert defragment(cache) == 0
    after = cell_of(cache)
    assert after.keys() == content.keys()
    assert [after[key] for key in content] == [content[key] for key in content]
    for sequence in range(len(cache._next)):
        seen = cache._masks[sequence] == 0
        assert np.array_equal(np.flatnonzero(seen), cache._own(sequence)[0])


def cell_of(cache: KVCache) -> dict[tuple[int, int], tuple[int, int]]:
    """What a sequence has at a position once the copies are done: the cell whose K and V it was
    before all of them, and by how much its K has yet to turn."""
    origin = {c: c for c in range(cache.n_cells)}
    for copies in cache.copied:
        origin |= {to: origin[source] for to, source in copies.items()}
    moved = np.zeros(cache.n_cells, int) if cache.moved is None else cache.moved
    return {
        (s, int(p)): (origin[int(c)], int(moved[c]))
        for s in range(len(cache._next))
        for c, p in zip(*cache._own(s), strict=True)
    }


@settings(max_examples=examples(200))
@given(
    st.integers(0, 60), st.integers(0, 60), st.integers(1, 9), st.sampled_from([4, 16]),
    st.booleans(),
)  # fmt: skip
def test_it_pays_where_the_extent_of_the_step_is_less(used, holes, n_new, pad, geometric):
    """The slow twin closes the holes and asks for the extents."""
    if used + holes + n_new > 60:
        return
    extents, made = [], []
    growth = Growth(pad, round_up(60, pad), geometric)
    for close in (False, True):
        cache = KVCache(60, pad, n_seqs=2, growth=growth)
        cache.reserve(1)
        for sequence, n in ((0, holes), (1, used)):
            at = np.arange(n, dtype=np.int32)
            cache.store(np.full(n, sequence), at, cache.find([(sequence, n)]))
        if used:
            cache.remove(0)
        made.append(pays(cache, n_new))
        if close:
            defragment(cache)
        extents.append(cache.extent(cache.find([(1, n_new)])))
    enough = used > 0 and holes >= 0.1 * (used + holes)
    assert made == [enough and extents[1] < extents[0]] * 2
    assert extents[1] == growth.extent((used or holes) + n_new)


# answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["embedded", "host"])
@pytest.mark.parametrize("types", CACHES, ids="/".join)
def test_answers_are_what_they_were(tiny_model, types, device):
    with opened(tiny_model, cache_type_k=types[0], cache_type_v=types[1], device=device) as engine:
        found = []
        for close in (False, True):
            filled(engine)
            n = defragment(engine.cache) if close else 0
            assert (n > 0) == close
            work = [(s, ids(4, 50 + s).tolist(), "all") for s in (1, 4, 5, 7)]
            rows = engine.submit(work).each()
            steps = engine.n_steps
            following = [(s, ids(1, 60 + s).tolist(), "all") for s in (7, 1, 5, 4)]
            rows += engine.submit(following).each()
            found.append(rows)
            assert engine.n_steps == steps + 1 and not engine.cache.copied
        for ours, theirs in zip(*found, strict=True):
            assert compare_logits(theirs, ours, "rounding").holds


def test_cells_that_have_yet_to_turn_turn_where_they_went(engine):
    filled(engine)
    engine.cache.shift(7, 5)
    wanted = engine.step(ids(4), "all", 7)
    filled(engine)
    engine.cache.shift(7, 5)
    assert defragment(engine.cache)
    assert compare_logits(wanted, engine.step(ids(4), "all", 7), "rounding").holds


def test_holes_that_are_closed_again_and_again_before_a_step(engine):
    filled(engine)
    wanted = engine.step(ids(4), "all", 7)
    filled(engine)
    defragment(engine.cache)
    for sequence in (1, 5):
        engine.cache.remove(sequence)
        defragment(engine.cache)
    assert engine.cache.copied and engine.cache.n_used == engine.cache.free.ends[0] == 35
    assert compare_logits(wanted, engine.step(ids(4), "all", 7), "rounding").holds


# what it saves ------------------------------------------------------------------------------------


def visited(engine: Engine, sequences: list[int]) -> tuple[int, int]:
    """Blocks of cells that a token of each of these looks at, and its n_kv."""
    with kv_visits(engine) as table:
        engine.submit([(s, [5], "last") for s in sequences]).wait()
    return table[0].visited, table[0].n_kv


def test_a_step_looks_at_fewer_cells(engine):
    filled(engine)
    assert engine.cache.n_used == 65 and int(engine.cache.free.ends[0]) == 128
    holes = visited(engine, [1, 4, 5, 7])
    filled(engine)
    defragment(engine.cache)
    assert visited(engine, [1, 4, 5, 7]) == (5, 80) and holes == (8, 128)


def test_a_gap_between_regions_costs_nothing(tiny_model):
    """Sequences 0, 3 and 7 beside 0, 1 and 2: equal programs, extents, visits and answers."""
    toggles = APART | {"skip_masked_kv": "tail", "batch_sizes": "padded"}
    with opened(tiny_model, 8 * 64, toggles=toggles) as engine:
        found = []
        for sequences in ((0, 1, 2), (0, 3, 7)):
            engine.reset()
            for i, sequence in enumerate(sequences):
                engine.step(ids(20 + i, i), "none", sequence)
            built = engine.counters["programs_built"]
            with kv_visits(engine) as table:
                rows = [
                    engine.submit([(s, [5 + i], "last") for s in sequences]).wait().copy()
                    for i in range(3)
                ]
            found.append((rows, [row[1:] for row in table]))
            assert engine.n_steps
        assert engine.counters["programs_built"] == built  # the gap wants no program of its own
        assert all(np.array_equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
        assert [v[0:] for v in found[0][1]] == [v[0:] for v in found[1][1]]
        assert defragment(engine.cache) == 0


def load() -> list[Ask]:
    """Long and short requests: short ones end, and leave holes between the cells of long ones."""
    return [Ask(i, ids(9, i), (60, 3, 5, 40)[i % 4]) for i in range(16)]


@pytest.mark.parametrize("toggles", [{"graph_reuse": "set_rows"}, BEHIND], ids=["host", "behind"])
def test_slots_close_holes_where_the_toggle_says_so(tiny_model, engine, toggles):
    wanted = [alone(engine, ask) for ask in load()]
    cells = []
    for value in Toggles.values("defrag"):
        with engine.variant(Toggles(defrag=value, **toggles)) as variant:
            slots = Slots(variant, 4)
            with kv_visits(variant) as table:
                told = serve(slots, load())
            for ask, twin in zip(load(), wanted, strict=True):
                same(ask, told.tokens[ask.number], twin)
                assert told.ended[ask.number].reason == LENGTH
            assert (slots.defrag.n_moved > 0) == (value == "cells")
            cells.append(sum(row.n_kv for row in table if row.layer == 0))
    assert cells[1] < cells[0]


@pytest.mark.parametrize("value", Toggles.values("defrag"))
@pytest.mark.parametrize("reuse", ["pointer_table", "patch_pointers"])
def test_slots_whose_steps_want_cells_in_a_row_always_find_some(tiny_model, engine, value, reuse):
    """Two long requests and many short ones between, in a cache that is nearly full of them."""
    with opened(tiny_model, 64, toggles={"graph_reuse": reuse, "defrag": value}) as small:
        slots, told = Slots(small, 4), Told()
        asks = [Ask(i, ids(5, i), (21, 4, 22, 3)[i % 4]) for i in range(24)]
        wanted = [alone(engine, ask) for ask in asks]
        serve(slots, asks, told=told)
        for ask, twin in zip(asks, wanted, strict=True):
            same(ask, told.tokens[ask.number], twin)
        assert slots.defrag.n_moved > 0
        check_cells(slots)


def test_regions_have_no_holes_to_close(tiny_model):
    with opened(tiny_model, 8 * 64, toggles=APART | {"defrag": "cells"}) as engine:
        slots, told = Slots(engine, 4), Told()
        serve(slots, load()[:4], told=told)
        slots.ask(Ask(90, ids(40), 9))
        go_on(slots, 2, told)
        slots.cancel(90)
        serve(slots, [load()[5]], told=told)
        assert slots.defrag.n_moved == 0 and len(told.ended) == 6
        assert (engine.cache.free.used == engine.cache.free.ends).all()


def test_steps_between_which_cells_move_are_free_of_races(tiny_model, monkeypatch):
    """A step with results behind it is under way when the next step's cells are copied."""
    monkeypatch.setattr(hazards_room, "serve", lambda engine: serve(Slots(engine, 4), load()))
    with opened(tiny_model, toggles=BEHIND | {"defrag": "cells"}) as engine:
        parts = hazards_room.issued(engine)
        steps = hazards_room.as_programs(engine, parts)
    assert "copy_cells" in hazards_room.ops_of(steps)
    assert not races(steps)
    bare = {
        p: replace(p, commands=[c for c in p.commands if not isinstance(c, Sync | Wait)])
        for p in dict.fromkeys(steps)
    }
    assert races([bare[p] for p in steps])  # and it would see one
