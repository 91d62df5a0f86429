"""The KV cache against plain models of it: who owns which cell at which position, and what a step
sees of it.

A region for all sequences is a dict, cell -> {sequence: position}. Of a region for each, memory is
a list of words, one for each token: what a step stores, and what is copied before one, is done to
the list as a device would. Whatever is done in whatever order, cache and model agree on owners,
lengths, free cells, extents, masks, copies and turns of K; and what is refused changes nothing.
"""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.engine.batch import copy_batch, make_batch, shift_batch
from workbench.engine.batches import Batches
from workbench.engine.cache.kv_cache import EMPTY, MOST_POSITION, KVCache
from workbench.engine.slots.draws import FED
from workbench.model.inputs import COPIES, MASK, REGIONS

N_CTX, PAD, N_SEQS, N_UBATCH = 21, 8, 4, 8
N_CELLS = 24
HIDDEN = np.float16(-np.inf)


class Model:
    """The cache as a dict of dicts. in_a_row: the cells of a step are one behind the other."""

    def __init__(self, in_a_row: bool = False) -> None:
        self.in_a_row = in_a_row
        self.cells: dict[int, dict[int, int]] = {}
        self.turn: dict[int, int] = {}  # by how many positions the K of a cell has yet to turn

    def of(self, sequence: int) -> dict[int, int]:
        return {c: owners[sequence] for c, owners in self.cells.items() if sequence in owners}

    def length(self, sequence: int) -> int:
        return max(self.of(sequence).values(), default=-1) + 1

    def free(self, n: int) -> list[int]:
        """The cells of a step of n tokens; fewer where it has none."""
        if not self.in_a_row:
            return [c for c in range(N_CTX) if c not in self.cells][:n]
        rows = [list(range(first, first + n)) for first in range(N_CELLS - n + 1)]
        return next((row for row in rows if not self.cells.keys() & row), [])

    def within(self, sequence: int, begin: int, end: int | None) -> list[int]:
        last = EMPTY if end is None else end
        return [c for c, p in self.of(sequence).items() if begin <= p < last]

    def remove(self, sequence: int, begin: int, end: int | None) -> None:
        for cell in self.within(sequence, begin, end):
            del self.cells[cell][sequence]
            if not self.cells[cell]:
                del self.cells[cell]
                self.turn.pop(cell, None)

    def copy(self, source: int, to: int, begin: int, end: int | None) -> bool:
        taken, there = self.of(to).values(), self.within(source, begin, end)
        if source == to or any(self.cells[c][source] in taken for c in there):
            return False
        for cell in there:
            self.cells[cell][to] = self.cells[cell][source]
        return True

    def shift(self, sequence: int, delta: int, begin: int, end: int | None) -> bool:
        there = self.within(sequence, begin, end)
        new = [self.cells[c][sequence] + delta for c in there]
        others = [p for c, p in self.of(sequence).items() if c not in there]
        shared = any(len(self.cells[c]) > 1 for c in there)
        if shared or any(p < 0 or p > MOST_POSITION or p in others for p in new):
            return False
        for cell, position in zip(there, new, strict=True):
            self.cells[cell][sequence] = position
            self.turn[cell] = self.turn.get(cell, 0) + delta
        return True

    def mask(self, sequence: int, positions: list[int], cells: list[int], n_kv: int) -> np.ndarray:
        """Each token sees its sequence's cells with positions up to its own."""
        of = self.of(sequence) | dict(zip(cells, positions, strict=True))
        seen = np.full((len(positions), n_kv), HIDDEN)
        for row, own in zip(seen, positions, strict=True):
            row[[c for c, p in of.items() if p <= own]] = 0
        return seen


def agree(cache: KVCache, model: Model) -> None:
    assert cache.n_used == len(model.cells)
    assert [cache.owners(c) for c in range(N_CELLS)] == [
        set(model.cells.get(c, ())) for c in range(N_CELLS)
    ]
    assert [cache.length(s) for s in range(N_SEQS)] == [model.length(s) for s in range(N_SEQS)]
    moved = {c: d for c, d in model.turn.items() if d}
    found = {} if cache.moved is None else dict(enumerate(cache.moved.tolist()))
    assert {c: d for c, d in found.items() if d} == moved
    assert (cache.moved is None) == (not moved)


def refused(call, match: str | None = None) -> None:
    with pytest.raises(UsageError, match=match) as error:
        call()
    assert "\n" not in str(error.value)


SEQUENCES = st.integers(0, N_SEQS - 1)
RANGES = st.just((0, None)) | st.tuples(st.integers(0, 12), st.none() | st.integers(0, 14))
STEP = st.tuples(
    st.just("step"), st.lists(st.tuples(SEQUENCES, st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
REMOVE = st.tuples(st.just("remove"), SEQUENCES, RANGES)
COPY = st.tuples(st.just("copy"), SEQUENCES, SEQUENCES, RANGES)
SHIFT = st.tuples(st.just("shift"), SEQUENCES, st.integers(-6, 6), RANGES)
OTHERS = st.one_of(
    st.tuples(st.just("keep"), SEQUENCES), st.tuples(st.just("rotated")),
    st.tuples(st.just("clear")),
)  # fmt: skip
ROUND = st.tuples(STEP, COPY, STEP, SHIFT, REMOVE, STEP | SHIFT, REMOVE | OTHERS)


def take(cache: KVCache, work):
    return make_batch(work, cache, 10, N_UBATCH)


def stored(cache: KVCache, *work: tuple[int, int]):
    batch = take(cache, [(s, [1] * n, "none") for s, n in work])
    return cache.store(batch.sequences, batch.positions, batch.cells)


def do_step(cache: KVCache, model: Model, entries: list[tuple[int, int]], fails: bool) -> None:
    """A step, which may fail: then the cache is as before."""
    sizes = dict(entries)  # one entry for each sequence
    work = [(sequence, [1] * n, "last") for sequence, n in sizes.items()]
    n = sum(sizes.values())
    there = n <= N_CTX - len(model.cells) and len(model.free(n)) == n
    assert cache.has_room([(0, n)]) == there
    if not there or n > N_UBATCH:
        refused(lambda: take(cache, work))
        return
    batch = take(cache, work)
    wanted = model.free(sum(sizes.values()))
    assert batch.cells.tolist() == wanted
    top = max([*model.cells, *wanted]) + 1
    assert batch.shape.n_kv == -(-top // PAD) * PAD
    assert batch.shape.n_seqs == len(sizes) == batch.shape.n_outputs
    masks, at = [], 0
    for sequence, n in sizes.items():
        start = model.length(sequence)
        positions, cells = list(range(start, start + n)), wanted[at : at + n]
        assert batch.positions[at : at + n].tolist() == positions
        masks.append(model.mask(sequence, positions, cells, batch.shape.n_kv))
        at += n
    assert np.array_equal(batch.values[MASK], np.concatenate(masks))
    assert batch.values["inp_out_ids"].tolist() == (np.cumsum([*sizes.values()]) - 1).tolist()
    undo = cache.store(batch.sequences, batch.positions, batch.cells)
    if fails:
        undo()
        return
    for owner, position, cell in zip(batch.sequences, batch.positions, wanted, strict=True):
        model.cells[cell] = {int(owner): int(position)}


@settings(max_examples=examples(400))
@given(st.lists(ROUND, min_size=1, max_size=5), st.booleans())
def test_a_shared_region_is_what_a_dict_of_cells_is(rounds, in_a_row):
    cache, model = KVCache(N_CTX, PAD, N_SEQS, in_a_row), Model(in_a_row)
    assert cache.n_cells == N_CELLS
    for name, *arguments in itertools.chain(*rounds):
        if name == "step":
            do_step(cache, model, *arguments)
        elif name in ("remove", "copy", "shift"):
            *of, (begin, end) = arguments
            call, twin = getattr(cache, name), getattr(model, name)
            if (end is not None and end < begin) or twin(*of, begin, end) is False:
                refused(lambda f=call, a=(*of, begin, end): f(*a))
            else:
                call(*of, begin, end)
        elif name == "keep":
            cache.keep(*arguments)
            for other in set(range(N_SEQS)) - set(arguments):
                model.remove(other, 0, None)
        elif name == "rotated":
            if cache.moved is not None:
                assert np.array_equal(shift_batch(cache).values["inp_k_shift"], cache.moved)
            cache.rotated()
            model.turn.clear()
        else:
            cache.clear()
            model.cells.clear()
            model.turn.clear()
        agree(cache, model)


def with_holes(taken: set[int]) -> KVCache:
    cache, cells = KVCache(N_CTX, PAD, N_SEQS, in_a_row=True), np.arange(N_CTX)
    cache.store(np.zeros(N_CTX, np.int64), cells.astype(np.int32), cells)
    for cell in set(range(N_CTX)) - taken:
        cache.remove(0, cell, cell + 1)
    return cache


@settings(max_examples=examples(100))
@given(st.sets(st.integers(0, N_CTX - 1)), st.data())
def test_steps_that_find_no_cells_are_known_before(taken, data):
    """A prompt is refused before its first step where a later one finds no cells in a row."""
    n = data.draw(st.integers(0, N_CTX - len(taken)))
    n_ubatch, cache = data.draw(st.integers(1, N_UBATCH)), with_holes(taken)
    fits, rest, at = contextlib.nullcontext(), n, cache.length()
    try:
        while rest:
            found = cache.find([(0, min(rest, n_ubatch))])
            assert np.array_equal(found, np.arange(len(found)) + found[0])
            cache.store(np.zeros(len(found), np.int64), (at + found).astype(np.int32), found)
            rest -= len(found)
    except UsageError:
        fits = pytest.raises(UsageError, match="in a row")
    with fits:
        with_holes(taken).check_steps(0, n, n_ubatch)


# a region for each --------------------------------------------------------------------------------

OF_REGIONS, CELLS = 3, 12  # sequences, and cells of each: 10 of a context, and padding
WHO, BOUND = st.integers(0, OF_REGIONS - 1), st.integers(0, CELLS)
RANGE = st.tuples(BOUND, st.none() | BOUND)
ACT = st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(WHO, st.integers(1, 4)), min_size=1,
                                        max_size=3, unique_by=lambda w: w[0])),
    st.tuples(st.just("remove"), WHO, RANGE),
    st.tuples(st.just("copy"), WHO, WHO, RANGE),
    st.tuples(st.just("shift"), WHO, st.integers(-3, 3), RANGE),
    st.tuples(st.just("keep"), WHO),
)  # fmt: skip


class Memory:
    """What the cells hold, and what sequences should find there: position -> word."""

    def __init__(self) -> None:
        self.cache = KVCache(30, 4, OF_REGIONS, n_regions=OF_REGIONS)
        self.cells: list[int] = [-1] * (OF_REGIONS * CELLS)
        self.wanted: list[dict[int, int]] = [{} for _ in range(OF_REGIONS)]
        self.words = itertools.count()

    def copy(self) -> None:
        """The copies that come before a step: those of one round in any order, at once."""
        while self.cache.copied:
            copies, before = self.cache.copied[0], list(self.cells)
            assert not set(copies) & set(copies.values())
            for to, whence in copies.items():
                self.cells[to] = before[whence]
            self.cache.are_copied()

    def step(self, *work: tuple[int, int]) -> None:
        batch = take(self.cache, [(s, [1] * n, "none") for s, n in work])
        self.copy()
        self.check_inputs(batch, work)
        new = zip(batch.sequences, batch.positions, batch.cells, strict=True)
        for sequence, position, cell in new:
            self.wanted[sequence][int(position)] = self.cells[cell] = next(self.words)
        self.cache.store(batch.sequences, batch.positions, batch.cells)

    def check_inputs(self, batch, work) -> None:
        """Every token sees what its sequence had, and of the step what is not behind it."""
        firsts = [0, *itertools.accumulate(n for _, n in work)][:-1]
        assert batch.values[REGIONS].tolist() == [
            [first, s * CELLS] for first, (s, _) in zip(firsts, work, strict=True)
        ]
        assert batch.shape.n_kv % 4 == 0 and batch.shape.n_kv <= CELLS
        for t, sequence in enumerate(batch.sequences):
            assert sequence * CELLS <= batch.cells[t] < (sequence + 1) * CELLS
            own = (batch.sequences == sequence) & (batch.positions <= batch.positions[t])
            old, new = self.cache.cells(sequence), batch.cells[own] % CELLS
            assert not set(new) & set(old)
            assert np.flatnonzero(batch.values[MASK][t] == 0).tolist() == sorted([*old, *new])

    def act(self, name: str, *of) -> None:
        """Also what is refused: it changes nothing."""
        if name == "step":
            self.step(*of[0])
        elif name == "keep":
            self.cache.keep(*of)
            self.wanted = [w if s == of[0] else {} for s, w in enumerate(self.wanted)]
        else:
            *of, (begin, end) = of
            getattr(self.cache, name)(*of, begin, end)
            own, last = self.wanted[of[0]], EMPTY if end is None else end
            within = {p: w for p, w in own.items() if begin <= p < last}
            if name == "copy":
                self.wanted[of[1]] |= within
                return
            for p in within:
                del own[p]
            own |= {p + of[1]: w for p, w in within.items() if name == "shift"}

    def agree(self) -> None:
        assert self.cache.n_used == sum(map(len, self.wanted))
        for sequence, wanted in enumerate(self.wanted):
            assert self.cache.length(sequence) == max(wanted, default=-1) + 1
            cells = (self.cache.cells(sequence) + sequence * CELLS).tolist()
            assert all(self.cache.owners(cell) == {sequence} for cell in cells)
            for copies in reversed(self.cache.copied):
                cells = [copies.get(cell, cell) for cell in cells]
            assert sorted(self.cells[cell] for cell in cells) == sorted(wanted.values())


@settings(max_examples=examples(400))
@given(st.lists(ACT, max_size=12))
def test_each_sequence_finds_its_words_in_its_region(acts):
    memory = Memory()
    for act in acts:
        with contextlib.suppress(UsageError):
            memory.act(*act)
        memory.agree()


def test_copies_read_where_the_words_are_before_they_go():
    """A copy of a copy reads the first source; one over a source comes in a round of its own."""
    memory = Memory()
    memory.step((0, 2), (2, 1))
    cache = memory.cache
    cache.copy(0, 1)
    cache.remove(2)
    cache.copy(1, 2)
    assert cache.copied == [{12: 0, 13: 1, 24: 0, 25: 1}]
    cache.remove(0)
    cache.copy(2, 0, 1)
    assert cache.copied[1:] == [{0: 25}]


def test_a_shift_of_cells_that_are_let_go_is_none():
    memory = Memory()
    memory.step((0, 3), (1, 2))
    memory.cache.shift(1, 4)
    memory.cache.remove(1)
    assert memory.cache.moved is None


def test_a_region_that_is_full_refuses_and_others_go_on():
    memory = Memory()
    memory.step((0, 8))
    memory.step((0, 2), (1, 1))
    with pytest.raises(UsageError, match=r"10 \+ 1 tokens do not fit the context of 10"):
        memory.step((0, 1))
    cache = memory.cache
    assert cache.has_room([(1, 1), (2, 1)]) and not cache.has_room([(1, 1), (0, 1)])
    memory.step((1, 1), (2, 1))
    with pytest.raises(UsageError, match="n_ctx=2 cells cannot be shared out to 3 sequences"):
        KVCache(2, PAD, 3, n_regions=3)


@pytest.mark.parametrize("n", [1, 256, 257, 600])
def test_all_copies_fit_the_step_that_makes_them(n):
    copies = {1000 + i: i for i in range(n)}
    pairs = copy_batch(copies).values[COPIES].tolist()
    assert pairs[:n] == [list(pair) for pair in copies.items()]
    assert all(pair == [-1, -1] for pair in pairs[n:]) and len(pairs) in (256, 512, 1024)


# what is refused ----------------------------------------------------------------------------------


def filled() -> KVCache:
    """Sequence 0 at 0..5, sequence 1 with 2..3 of it and a token of its own, and some K moved."""
    cache = KVCache(N_CTX, PAD, N_SEQS)
    stored(cache, (0, 6))
    stored(cache, (2, 2))
    cache.copy(0, 1, 2, 4)
    stored(cache, (1, 1))
    cache.shift(2, 5)
    return cache


REFUSED = {
    "remove of none": (lambda c: c.remove(4), "sequence 4 does not exist; this engine has 0 to 3"),
    "copy to none": (lambda c: c.copy(0, 4), "sequence 4 does not exist"),
    "length of none": (lambda c: c.length(4), "sequence 4 does not exist"),
    "range reversed": (lambda c: c.remove(0, 5, 3), "positions 5 to 3 are no range"),
    "range below 0": (lambda c: c.shift(0, 1, -2, 3), "positions -2 to 3 are no range"),
    "copy into cells in use": (lambda c: c.copy(0, 1), "sequence 1 has a cell at position 2 alr"),
    "copy onto itself": (lambda c: c.copy(0, 0), "sequence 0 has a cell at"),
    "shift below 0": (lambda c: c.shift(2, -6), "would move position 5 of sequence 2 to -1"),
    "shift too far": (lambda c: c.shift(2, 1 << 33), "positions go up to 1073741824"),
    "shift into cells in use": (lambda c: c.shift(0, 2, 0, 2), "to position 2, which another"),
    "shift of shared cells": (lambda c: c.shift(0, 9), "the cell at position 2 with sequence 1"),
    "no tokens of one": (lambda c: take(c, [(0, [1], "last"), (1, [], "last")]),
                         "sequence 1 has no tokens"),
    "no work": (lambda c: take(c, []), "a step takes 1 to 8 tokens, not 0"),
    "too many for a step": (lambda c: take(c, [(0, [1] * 5, "last"), (3, [1] * 4, "last")]),
                            "a step takes 1 to 8 tokens, not 9"),
    "a step of none": (lambda c: take(c, [(3, [1], "last"), (4, [1], "last")]),
                       "sequence 4 does not exist"),
    "a sequence twice": (lambda c: take(c, [(3, [1], "last"), (0, [1], "last"), (3, [1], "all")]),
                         "sequence 3 is given twice in one step; give it once"),
    "no token of the model": (lambda c: take(c, [(3, [1, 10], "last")]), "token id 10 at index 1"),
    "outputs that are none": (lambda c: take(c, [(3, [1], "first")]), "outputs=.first. does not"),
}  # fmt: skip


def looks(cache: KVCache):
    owners = [cache.owners(cell) for cell in range(cache.n_cells)]
    turns = None if cache.moved is None else cache.moved.tolist()
    return owners, turns, [cache.length(s) for s in range(N_SEQS)], cache.n_used


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_one_line_and_changes_nothing(what):
    call, match = REFUSED[what]
    cache = filled()
    before = looks(cache)
    refused(lambda: call(cache), match)
    assert looks(cache) == before


def test_more_tokens_than_the_cache_has_left_are_refused():
    cache = filled()
    stored(cache, (3, 8))
    stored(cache, (0, 3))
    assert cache.n_used == 20
    refused(lambda: take(cache, [(0, [1], "last"), (2, [1], "last")]),
            r"20 \+ 2 tokens do not fit the context of 21")  # fmt: skip
    take(cache, [(2, [1], "last")])


def test_an_interrupted_rotation_loses_what_moved_alone():
    cache = filled()
    cache.lost()
    assert cache.moved is None and [cache.length(s) for s in range(3)] == [6, 5, 0]
    assert cache.n_used == 7


# inputs that are changed instead of made ----------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["step", "step", "fails", "other", "remove", "prompt"]), max_size=14),
    st.sampled_from([1, 3]), st.sampled_from([0, 3]),
)  # fmt: skip
@example([0, 2], ["step"] * 9, 1, 3)
@example([1], ["step"] * 9, 3, 3)
def test_inputs_made_ahead_are_those_made_anew(sequences, events, n_regions, window):
    """Whether a step is like the one before, fails, or the cache changes between."""
    cache = KVCache(30, 4, 3, n_regions=n_regions, window=window)
    cache.reserve(2)
    batches = Batches(cache, 10, N_UBATCH)
    for event in events:
        if event == "remove":
            cache.remove(sequences[0], 1, 2)
            continue
        work = [((s + (event == "other")) % 3, [3], "last") for s in sequences]
        if event == "prompt":
            work = [(sequences[0], [1, 2, 3], "all")]
        if not cache.has_room([(s, len(tokens)) for s, tokens, _ in work]):
            break
        wanted, batch = take(cache, work), batches.take(work)
        assert batch.shape == wanted.shape and batch.counts == wanted.counts
        assert batch.values.keys() == wanted.values.keys()
        for name, value in wanted.values.items():
            assert np.array_equal(batch.values[name], value), name
            assert batch.values[name].dtype == value.dtype, name
        undo = cache.store(batch.sequences, batch.positions, batch.cells)
        batches.look_ahead(work)
        if event == "fails":
            undo()


def test_where_nothing_changed_a_mask_is_changed_in_place():
    cache = KVCache(N_CTX, 32, N_SEQS)
    batches, masks, work = Batches(cache, 10, N_UBATCH), [], [(2, [1], "last"), (0, [1], "last")]
    for _ in range(4):
        batch = batches.take(work)
        masks.append(batch.values[MASK])
        cache.store(batch.sequences, batch.positions, batch.cells)
        batches.look_ahead(work)
    assert np.shares_memory(masks[1], masks[2]) and np.shares_memory(masks[2], masks[3])
    refused(lambda: batches.take([(2, [1], "last"), (0, [FED], "last")]), f"token id {FED} at")
