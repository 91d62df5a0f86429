"""Room for sequences: who asks for it, what is said where there is none, and holes among their
cells: what they cost, and that closing them changes no answer. (That it keeps what each sequence
has: `test_cache_table.py`.)"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.program.check import test_batched_hazards as hazards_room
from tests.served import APART, BEHIND, alone, check_cells, ids, same, serve
from workbench.benchmarks.compare.answers import compare_logits
from workbench.common.errors import UsageError
from workbench.common.sizes import round_up
from workbench.config import KVCacheKind, KVGrowth, Toggles
from workbench.engine.cache.defrag import defragment, pays
from workbench.engine.cache.growth import Growth
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.cache.visits import kv_visits
from workbench.engine.engine import Engine
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.slots import Slots
from workbench.program.check.hazards import races
from workbench.program.commands import Sync, Wait


def opened(tiny_model, n_ctx=256, n_seqs=8, device="embedded", quant="F32", **more) -> Engine:
    toggles = Toggles(**more.pop("toggles", {"graph_reuse": "set_rows"}))
    return Engine.load(
        tiny_model("tiny-llama", quant), device=device, n_ctx=n_ctx, n_seqs=n_seqs, n_ubatch=32,
        n_kv_pad=16, threads=1, toggles=toggles, **more,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KVCacheKind)
@pytest.mark.parametrize("growth", KVGrowth)
def test_generation_ends_where_its_room_does(tiny_model, kind, growth):
    """With its tokens kept, whatever the layout: of 160 cells a region of four has 40."""
    toggles = {"kv_cache": kind, "kv_growth": growth, "graph_reuse": "set_rows"}
    with opened(tiny_model, 160, 4, quant="Q8_0", toggles=toggles) as engine:
        room = 40 if kind == KVCacheKind.PER_SEQUENCE else 160
        for limit, beside in ((None, 0), (500, 30)):
            engine.reset()
            engine.prefill([1] * 30, sequence=1)
            engine.cache.remove(1, beside)
            left = room - (beside if room == 160 else 0)
            made = engine.generate(tokens=[5, 6, 7], max_tokens=limit)
            assert made.stopped == "n_ctx" and len(made.tokens) == left - 3 + 1
            assert engine.cache.length() == left


def test_an_engine_says_what_makes_room_for_sequences(tiny_model):
    """Steps that it proves are of a variant's own configuration: 64 cells, or 4 times 16."""
    with opened(tiny_model, 64, 1, "null", toggles={}) as engine:
        with pytest.raises(UsageError, match=r"has 0 alone \(n_seqs=1\); load it with n_seqs=4 or"):
            engine.submit([(3, [1], "last")])
        with pytest.raises(UsageError, match=r"load it with n_seqs=2 or more"):
            engine.cache.copy(0, 1)
        toggles = Toggles(kv_cache="per_sequence", graph_reuse="set_rows")
        with Engine(engine._open, replace(engine.config, n_seqs=4), toggles) as regions:
            assert {p.shape.n_kv for p in regions.programs(16)} == {16}
            with pytest.raises(UsageError, match=r"0 \+ 17 tokens .* 16 that each of 4"):
                regions.programs(17)
        assert engine.programs(17)


ALONE = ("--device", "embedded", "--threads", 1, "--kv-cache", "per_sequence")
CUT = (*ALONE, "-c", 64, "--n-seqs", 4)  # 16 cells of each
NULL = ("--device", "null", *CUT[2:])
LONG = ("--tokens", ",".join(["1"] * 20))
AB = ("ab", "--toggle", "kv_cache=unified,per_sequence", "--test", "pp40,tg4@b3", "-c", 96)
OF_16 = "tokens do not fit the context of 16 that each of 4 sequences has of n_ctx=64"
ASKED = [  # the command, its exit status, what it says
    (("run", "--tokens", "1,2", "-n", 20, *ALONE), 0, ""),
    (("run", "--tokens", "1,2", "-n", 20, *CUT), 0, "stopped at 16 tokens: the context is full, "),
    (("run", *LONG, *CUT), 2, f"0 + 20 {OF_16}"),
    (("logits", *LONG, "--out", "/dev/null", *CUT), 2, f"0 + 20 {OF_16}"),
    (("check", "--n-tokens", 20, *NULL), 2, OF_16),
    (("program", "--n-past", 20, *NULL), 2, OF_16),
    ((*AB, "--device", "embedded"), 2, "pp40 needs 40 KV cells of a sequence, but each of 3 "
     "(n_seqs) has 32 of n_ctx=96; load it with n_ctx=120 or more, or with fewer sequences"),
    (("bench", "-p", 8, "-n", 2, "-r", 1, "-npl", "1,3", *ALONE), 0, ""),
    (("bench", "-p", 64, "-n", 2, "-r", 1, "-npl", 40, "-pps", *ALONE), 0, ""),
]  # fmt: skip


@pytest.mark.parametrize(("given", "wanted", "said"), ASKED, ids=lambda v: str(v)[:30])
def test_a_command_has_room_or_says_what_would_help(call, tiny_model, given, wanted, said):
    """What has no room is refused before weights are read."""
    command, *rest = given
    status, _, err = call(command, "-m", tiny_model("tiny-llama", "Q8_0"), *rest)
    words = " ".join(err.split())
    assert status == wanted and said in words and ("context is full" in words) <= bool(said), err
    assert wanted == 0 or "device:" not in err or "null" in given


# holes --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("k", "v", "device"),
    [("f16", "f16", "host"), ("bf16", "f32", "embedded"), ("q8_0", "q8_0", "embedded")],
)
def test_a_step_looks_at_fewer_cells_and_finds_the_same(tiny_model, k, v, device):
    """Also of cells whose K has yet to turn, and where holes come again before a step."""
    with opened(tiny_model, device=device, cache_type_k=k, cache_type_v=v) as engine:
        found, looked, cache = [], [], engine.cache
        for close in (lambda cache: 0, defragment):
            engine.reset()
            for sequence in range(8):  # of 9 to 23 cells; of some all go, of one a part
                engine.step(ids(9 + 2 * sequence, sequence), "none", sequence)
            for sequence in (0, 2, 3, 6):
                cache.remove(sequence)
            cache.remove(4, 12)
            cache.shift(7, 5)
            assert bool(close(cache)) == (close is defragment)
            cache.remove(1)
            close(cache)
            rows = engine.submit([(s, ids(4, 50 + s).tolist(), "all") for s in (4, 5, 7)]).each()
            steps = engine.n_steps
            with kv_visits(engine) as table:
                rows += engine.submit([(s, ids(1, s).tolist(), "all") for s in (7, 5, 4)]).each()
            looked.append((table[0].visited, table[0].n_kv))
            found.append(rows)
            assert engine.n_steps == steps + 1 and not cache.copied
        for ours, theirs in zip(*found, strict=True):
            assert compare_logits(theirs, ours, "rounding").holds
        assert looked == [(8, 128), (5, 80)]


def test_a_gap_between_regions_costs_nothing(tiny_model):
    """Sequences 0, 3 and 7 beside 0, 1 and 2: equal programs, visits and answers; nothing moves."""
    toggles = APART | {"skip_masked_kv": "tail", "batch_sizes": "padded", "defrag": "cells"}
    with opened(tiny_model, 8 * 64, toggles=toggles) as engine:
        found = []
        for sequences in ((0, 1, 2), (0, 3, 7)):
            engine.reset()
            for i, sequence in enumerate(sequences):
                engine.step(ids(20 + i, i), "none", sequence)
            built = engine.counters["programs_built"]
            with kv_visits(engine) as table:
                rows = engine.submit([(s, [5], "last") for s in sequences]).wait().tolist()
            found.append((rows, [row[1:] for row in table]))
        assert found[0] == found[1] and engine.counters["programs_built"] == built
        slots = Slots(engine, 4)
        assert len(serve(slots, load()).ended) == 16 and slots.n_moved == 0


def load() -> list[Ask]:
    """Long and short requests: short ones end, and leave holes between the cells of long ones."""
    return [Ask(i, ids(9, i), (60, 3, 5, 40)[i % 4]) for i in range(16)]


@pytest.mark.parametrize(
    ("reuse", "value"),
    [("pointer_table", "off"), ("patch_pointers", "off"), ("pointer_table", "cells")],
)
def test_steps_that_want_cells_in_a_row_find_some(tiny_model, value, reuse):
    """Two long requests and many short ones between, in a cache that is nearly full of them."""
    toggles = {"graph_reuse": reuse, "defrag": value}
    with opened(tiny_model) as own, opened(tiny_model, 64, toggles=toggles) as small:
        slots = Slots(small, 4)
        asks = [Ask(i, ids(5, i), (21, 4, 22, 3)[i % 4]) for i in range(12)]
        told = serve(slots, asks)
        for ask in asks:
            same(ask, told.tokens[ask.number], alone(own, ask))
        assert slots.n_moved > 0
        check_cells(slots)


@pytest.mark.long
def test_cells_that_move_between_steps_race_with_none(tiny_model, monkeypatch):
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
