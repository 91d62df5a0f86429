"""The KV cache against a plain model of it: who owns which cell at which position.

The model is a dict, cell -> {sequence: position}. Whatever is done in whatever order, both agree on
owners, lengths, free cells, extents, masks and on how far each cell's K has to turn; and what is
refused changes nothing.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.engine.batch import make_batch, shift_batch
from workbench.engine.batches import Batches
from workbench.engine.cache.kv_cache import EMPTY, MOST_POSITION, KVCache
from workbench.model.inputs import MASK

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
    for cell in range(cache.n_cells):
        assert cache.owners(cell) == set(model.cells.get(cell, ()))
    for sequence in range(N_SEQS):
        assert cache.length(sequence) == model.length(sequence)
    moved = {c: d for c, d in model.turn.items() if d}
    found = {} if cache.moved is None else dict(enumerate(cache.moved.tolist()))
    assert {c: d for c, d in found.items() if d} == moved
    assert (cache.moved is None) == (not moved)


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


def do_step(cache: KVCache, model: Model, entries: list[tuple[int, int]], fails: bool) -> None:
    """A step, which may fail: then the cache is as before."""
    sizes = dict(entries)  # one entry for each sequence
    work = [(sequence, [1] * n, "last") for sequence, n in sizes.items()]
    n = sum(sizes.values())
    there = n <= N_CTX - len(model.cells) and len(model.free(n)) == n
    assert cache.has_room([(0, n)]) == there
    if not there or n > N_UBATCH:
        refused(cache, lambda: make_batch(work, cache, 10, N_UBATCH))
        return
    batch = make_batch(work, cache, 10, N_UBATCH)
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


def state(cache: KVCache) -> dict:
    """All of it but how many rows its table has room for."""
    found = copy.deepcopy(vars(cache))
    rows = max((s + 1 for s in range(cache.n_seqs) if cache.length(s)), default=0)
    return found | {name: found[name][:rows] for name in ("_positions", "_masks", "_next")}


def refused(cache: KVCache, call, match: str | None = None) -> None:
    before = pickle.dumps(state(cache))
    with pytest.raises(UsageError, match=match) as error:
        call()
    assert "\n" not in str(error.value)
    assert pickle.dumps(state(cache)) == before


@settings(max_examples=examples(400))
@given(st.lists(ROUND, min_size=1, max_size=5), st.booleans())
def test_it_is_what_a_dict_of_cells_is(rounds, in_a_row):
    cache, model = KVCache(N_CTX, PAD, N_SEQS, in_a_row), Model(in_a_row)
    assert cache.n_cells == N_CELLS
    for name, *arguments in itertools.chain(*rounds):
        if name == "step":
            do_step(cache, model, *arguments)
        elif name == "remove":
            sequence, (begin, end) = arguments
            if end is not None and end < begin:
                refused(cache, lambda s=sequence, r=(begin, end): cache.remove(s, *r), "no range")
                continue
            cache.remove(sequence, begin, end)
            model.remove(sequence, begin, end)
        elif name in ("copy", "shift"):
            *of, (begin, end) = arguments
            call, twin = getattr(cache, name), getattr(model, name)
            if (end is not None and end < begin) or not twin(*of, begin, end):
                refused(cache, lambda f=call, a=(*of, begin, end): f(*a))
                continue
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


@settings(max_examples=examples(100))
@given(st.sets(st.integers(0, N_CTX - 1)), st.integers(1, N_CTX), st.integers(1, N_UBATCH))
def test_steps_that_find_their_cells_are_known_before(taken, n, n_ubatch):
    """A prompt is refused before its first step where a later one finds no cells in a row."""
    cache = KVCache(N_CTX, PAD, N_SEQS, in_a_row=True)
    cells = np.arange(N_CTX)
    cache.store(np.zeros(N_CTX, np.int64), cells.astype(np.int32), cells)
    for cell in set(range(N_CTX)) - taken:
        cache.remove(0, cell, cell + 1)
    if not 0 < n <= N_CTX - len(taken):
        return
    rest, at = n, cache.length()
    try:
        while rest:
            found = cache.find([(0, min(rest, n_ubatch))])
            assert np.array_equal(found, np.arange(len(found)) + found[0])
            cache.store(np.zeros(len(found), np.int64), (at + found).astype(np.int32), found)
            rest -= len(found)
    except UsageError as error:
        said = str(error)
    else:
        said = ""
    for cell in set(range(N_CELLS)) - taken:  # as it was
        own = cache._positions[0, cell]
        if own != EMPTY:
            cache.remove(0, int(own), int(own) + 1)
    if said:
        with pytest.raises(UsageError, match="in a row"):
            cache.check_steps(0, n, n_ubatch)
    else:
        cache.check_steps(0, n, n_ubatch)


# what is refused ----------------------------------------------------------------------------------


def filled() -> KVCache:
    """Sequence 0 at 0..5, sequence 1 with 2..3 of it and a token of its own, and some K moved."""
    cache = KVCache(N_CTX, PAD, N_SEQS)
    for work in ([(0, [1] * 6, "last")], [(2, [1, 1], "none")]):
        batch = make_batch(work, cache, 10, N_UBATCH)
        cache.store(batch.sequences, batch.positions, batch.cells)
    cache.copy(0, 1, 2, 4)
    batch = make_batch([(1, [1], "last")], cache, 10, N_UBATCH)
    cache.store(batch.sequences, batch.positions, batch.cells)
    cache.shift(2, 5)
    return cache


REFUSED = {
    "remove of none": (lambda c: c.remove(4), "sequence 4 does not exist; this engine has 0 to 3"),
    "remove below none": (lambda c: c.remove(-1), "sequence -1 does not exist"),
    "keep of none": (lambda c: c.keep(4), "sequence 4 does not exist"),
    "copy to none": (lambda c: c.copy(0, 4), "sequence 4 does not exist"),
    "copy of none": (lambda c: c.copy(9, 0), "sequence 9 does not exist"),
    "shift of none": (lambda c: c.shift(4, 1), "sequence 4 does not exist"),
    "length of none": (lambda c: c.length(4), "sequence 4 does not exist"),
    "range reversed": (lambda c: c.remove(0, 5, 3), "positions 5 to 3 are no range"),
    "range below 0": (lambda c: c.shift(0, 1, -2, 3), "positions -2 to 3 are no range"),
    "copy into cells in use": (lambda c: c.copy(0, 1), "sequence 1 has a cell at position 2 alr"),
    "copy onto itself": (lambda c: c.copy(0, 0), "sequence 0 has a cell at"),
    "shift below 0": (lambda c: c.shift(2, -6), "would move position 5 of sequence 2 to -1"),
    "shift too far": (lambda c: c.shift(2, 1 << 33), "positions go up to 1073741824"),
    "shift into cells in use": (lambda c: c.shift(0, 2, 0, 2), "to position 2, which another"),
    "shift of shared cells": (lambda c: c.shift(0, 9), "the cell at position 2 with sequence 1"),
    "no tokens": (lambda c: take(c, [(0, [], "last")]), "sequence 0 has no tokens"),
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


def take(cache: KVCache, work) -> None:
    make_batch(work, cache, 10, N_UBATCH)


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_is_one_line_and_changes_nothing(what):
    call, match = REFUSED[what]
    cache = filled()
    refused(cache, lambda: call(cache), match)


def test_a_batch_of_more_than_the_cache_has_left():
    cache = filled()
    for n, sequence in ((8, 3), (3, 0)):
        batch = make_batch([(sequence, [1] * n, "none")], cache, 10, N_UBATCH)
        cache.store(batch.sequences, batch.positions, batch.cells)
    assert cache.n_used == 20
    refused(cache, lambda: take(cache, [(0, [1], "last"), (2, [1], "last")]),
            r"20 \+ 2 tokens do not fit the context of 21")  # fmt: skip
    take(cache, [(2, [1], "last")])


# masks that are changed instead of made -----------------------------------------------------------


@given(
    st.lists(SEQUENCES, min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["step", "step", "fails", "other", "remove", "prompt"]), max_size=14),
)
def test_inputs_made_ahead_are_those_made_anew(sequences, events):
    """Whether a step is like the one before, fails, or the cache changes between."""
    cache = KVCache(N_CTX, PAD, N_SEQS)
    batches = Batches(cache, 10, N_UBATCH)
    for event in events:
        work = [(s, [3], "last") for s in sequences]
        if event == "other":
            work = [((s + 1) % N_SEQS, [2], "last") for s in sequences]
        if event == "prompt":
            work = [(sequences[0], [1, 2, 3], "all")]
        if event == "remove":
            cache.remove(sequences[0], 1, 2)
            continue
        if cache.n_used + sum(len(tokens) for _, tokens, _ in work) > N_CTX:
            break
        wanted = make_batch(work, cache, 10, N_UBATCH)
        batch = batches.take(work)
        assert batch.shape == wanted.shape and batch.counts == wanted.counts
        for name, value in wanted.values.items():
            assert np.array_equal(batch.values[name], value) and (
                batch.values[name].dtype == value.dtype
            ), name
        undo = cache.store(batch.sequences, batch.positions, batch.cells)
        batches.look_ahead(work)
        if event == "fails":
            undo()


def test_where_nothing_changed_the_mask_is_changed_in_place():
    cache = KVCache(N_CTX, 32, N_SEQS)
    batches = Batches(cache, 10, N_UBATCH)
    masks = []
    for _ in range(4):
        batch = batches.take([(2, [1], "last"), (0, [1], "last")])
        masks.append(batch.values[MASK])
        cache.store(batch.sequences, batch.positions, batch.cells)
        batches.look_ahead([(2, [1], "last"), (0, [1], "last")])
    assert np.shares_memory(masks[1], masks[2]) and np.shares_memory(masks[2], masks[3])


def test_cells_of_an_interrupted_rotation_are_lost_and_no_others():
    cache = filled()
    assert cache.length(2) == 7
    cache.lost()
    assert cache.moved is None and cache.length(2) == 0
    assert (cache.length(0), cache.length(1)) == (6, 5)
    assert cache.n_used == 7
