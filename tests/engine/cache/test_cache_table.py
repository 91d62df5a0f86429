"""The KV cache against a plain model of it: owners, lengths, free cells, extents, masks, copies and
turns of K. Memory is a list of words, one for each token: what a step stores, and what is copied
before one, is done to the list as a device would."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.common.sizes import round_up
from workbench.engine.batch import Batches, copy_batch, make_batch, shift_batch
from workbench.engine.cache.defrag import defragment
from workbench.engine.cache.kv_cache import EMPTY, KVCache
from workbench.engine.slots.draws import FED
from workbench.graph.ir import F16, F32, I32, I64
from workbench.model.inputs import COPIES, MASK, REGIONS, input_of

N_CTX, PAD, N_SEQS, N_UBATCH = 21, 4, 3, 8
NUMPY = {I32: np.int32, I64: np.int64, F16: np.float16, F32: np.float32}
LAYOUTS = {"shared": (1,), "in a row": (1, True), "regions": (3,)}
LAYOUTS |= {f"window {w}, {n}": (n, False, w) for w, n in ((3, 3), (1, 1), (6, 1), (1, 3))}


def take(cache: KVCache, work):
    return make_batch(work, cache, 10, N_UBATCH)


def stored(cache: KVCache, *work: tuple[int, int]):
    batch = take(cache, [(s, [1] * n, "none") for s, n in work])
    return cache.store(batch.sequences, batch.positions, batch.cells)


def refused(call, match: str | None = None) -> None:
    with pytest.raises(UsageError, match=match) as error:
        call()
    assert "\n" not in str(error.value)


def filled() -> KVCache:
    """Sequence 0 at 0..5, sequence 1 with 2..3 of it and a token of its own, and some K moved."""
    cache = KVCache(N_CTX, PAD, N_SEQS)
    stored(cache, (0, 6))
    stored(cache, (2, 2))
    cache.copy(0, 1, 2, 4)
    stored(cache, (1, 1))
    cache.shift(2, 5)
    return cache


def work(*entries):
    return lambda cache: take(cache, [(s, tokens, "last") for s, tokens in entries])


REFUSED = [
    (lambda c: c.remove(3), "sequence 3 does not exist; this engine has 0 to 2"),
    (lambda c: c.copy(0, 3), "sequence 3 does not exist"),
    (lambda c: c.length(3), "sequence 3 does not exist"),
    (lambda c: c.remove(0, 5, 3), "positions 5 to 3 are no range"),
    (lambda c: c.shift(0, 1, -2, 3), "positions -2 to 3 are no range"),
    (lambda c: c.copy(0, 1), "sequence 1 has a cell at position 2 alr"),
    (lambda c: c.copy(0, 0), "sequence 0 has a cell at"),
    (lambda c: c.shift(2, -6), "would move position 5 of sequence 2 to -1"),
    (lambda c: c.shift(2, 1 << 33), "positions go up to 1073741824"),
    (lambda c: c.shift(0, 2, 0, 2), "to position 2, which another"),
    (lambda c: c.shift(0, 9), "the cell at position 2 with sequence 1"),
    (work((0, [1]), (1, [])), "sequence 1 has no tokens"),
    (work(), "a step takes 1 to 8 tokens, not 0"),
    (work((0, [1] * 5), (1, [1] * 4)), "a step takes 1 to 8 tokens, not 9"),
    (work((1, [1]), (3, [1])), "sequence 3 does not exist"),
    (work((1, [1]), (0, [1]), (1, [1])), "sequence 1 is given twice in one step; give it once"),
    (work((1, [1, 10])), "token id 10 at index 1"),
    (lambda c: take(c, [(1, [1], "first")]), "outputs=.first. does not"),
    (lambda c: KVCache(2, PAD, 3, n_regions=3), "n_ctx=2 cells cannot be shared out to 3 seq"),
]


def looks(cache: KVCache):
    owners = [cache.owners(cell) for cell in range(cache.n_cells)]
    turns = None if cache.moved is None else cache.moved.tolist()
    return owners, turns, [cache.length(s) for s in range(N_SEQS)], cache.n_used


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_refusal_is_one_line_and_changes_nothing(call, match):
    cache = filled()
    before = looks(cache)
    refused(lambda: call(cache), match)
    assert looks(cache) == before
    cache.lost()  # an interrupted rotation loses what moved alone
    assert looks(cache)[1:] == (None, [6, 5, 0], 7)


# whatever is done ---------------------------------------------------------------------------------


class Twin:
    """A cache, and the slow model of it. own: of each sequence position -> cell; words: position ->
    what it should find there. turn: by how many positions the K of a cell has yet to turn."""

    def __init__(self, n_regions: int, in_a_row: bool = False, window: int = 0) -> None:
        self.cache = KVCache(N_CTX, PAD, N_SEQS, in_a_row, n_regions=n_regions, window=window)
        self.window = window or EMPTY
        self.n_regions, self.in_a_row, self.room = n_regions, in_a_row, N_CTX // n_regions
        self.size = round_up(self.room, PAD)
        self.memory, self.new = [-1] * (self.size * n_regions), itertools.count()
        self.clear()

    def used(self, region: int) -> list[int]:
        return sorted(c for c in {*self.cells()} if c // self.size == region)

    def cells(self, but: int = -1) -> list[int]:
        return [c for s, own in enumerate(self.own) if s != but for c in own.values()]

    def free(self, region: int, n: int) -> list[int] | None:
        """The cells that n tokens get."""
        used, first = self.used(region), region * self.size
        there = [c for c in range(first, first + self.size) if c not in used]
        if len(used) + n > self.room:
            return None
        if not self.in_a_row:
            return there[:n]
        rows = [there[i : i + n] for i in range(len(there) - n + 1)]
        return next((row for row in rows if row[-1] - row[0] == n - 1), None)

    def within(self, sequence: int, begin: int, end: int | None) -> list[int]:
        return [p for p in self.own[sequence] if begin <= p < (EMPTY if end is None else end)]

    # what is done. False: it is refused

    def clear(self) -> None:
        self.own: list[dict[int, int]] = [{} for _ in range(N_SEQS)]
        self.words: list[dict[int, int]] = [{} for _ in range(N_SEQS)]
        self.turn: dict[int, int] = {}

    def keep(self, sequence: int) -> None:
        for other in {*range(N_SEQS)} - {sequence}:
            self.remove(other, 0, None)

    def remove(self, sequence: int, begin: int, end: int | None) -> None:
        for p in self.within(sequence, begin, end):
            del self.words[sequence][p]
            cell = self.own[sequence].pop(p)
            if cell not in self.cells():
                self.turn.pop(cell, None)

    def copy(self, source: int, to: int, begin: int, end: int | None) -> bool:
        there = self.within(source, begin, end)
        if source == to or {*there} & {*self.own[to]}:
            return False
        cells = sorted(self.own[source][p] for p in there)
        fresh = cells if self.n_regions == 1 else self.free(to, len(cells))
        if fresh is None:
            return False
        new = dict(zip(cells, fresh, strict=True))
        self.turn |= {to: self.turn.get(cell, 0) for cell, to in new.items()}
        for p in there:
            self.own[to][p] = new[self.own[source][p]]
            self.words[to][p] = self.words[source][p]
        return True

    def shift(self, sequence: int, delta: int, begin: int, end: int | None) -> bool:
        there, own = self.within(sequence, begin, end), self.own[sequence]
        cells, new = {own[p] for p in there}, {p + delta for p in there}
        if {*self.cells(sequence)} & cells or new & ({*own} - {*there}) or min(new, default=0) < 0:
            return False
        for table in (own, self.words[sequence]):
            table |= {p + delta: word for p, word in [(p, table.pop(p)) for p in there]}
        self.turn |= {cell: self.turn.get(cell, 0) + delta for cell in cells}
        return True

    def close(self) -> None:
        """Holes are closed: the last cells move into them. No fewer could."""
        if self.n_regions > 1:
            assert defragment(self.cache) == 0
            return
        used = self.used(0)
        holes = [c for c in range(len(used)) if c not in used]
        new = dict(zip(used[len(used) - len(holes) :], holes, strict=True))
        changes = self.cache.n_changes
        assert defragment(self.cache) == len(holes) and defragment(self.cache) == 0
        assert (self.cache.n_changes > changes) == bool(holes)
        self.own = [{p: new.get(c, c) for p, c in own.items()} for own in self.own]
        self.turn = {new.get(c, c): delta for c, delta in self.turn.items()}

    def copies_are_made(self) -> None:
        """As before a step: those of one round in any order, at once."""
        while self.cache.copied:
            copies, before = self.cache.copied[0], list(self.memory)
            assert not set(copies) & set(copies.values())
            for to, whence in copies.items():
                self.memory[to] = before[whence]
            self.cache.are_copied()

    def step(self, entries: list[tuple[int, int]], fails: bool = False) -> None:
        """A step, which may fail: then the cache is as before."""
        cache, n_each = self.cache, dict(entries)  # one entry for each sequence
        work = [(s, [1] * n, "last") for s, n in n_each.items()]
        n = sum(n_each.values())
        parts = [(0, n)] if self.n_regions == 1 else n_each.items()
        cells = [self.free(region, n) for region, n in parts]
        assert cache.has_room([*n_each.items()]) == (None not in cells)
        if None in cells or n > N_UBATCH:
            refused(lambda: take(cache, work))
            return
        wanted = list(itertools.chain(*cells))
        batch = take(cache, work)
        self.copies_are_made()
        tops = [max([*self.used(r), *wanted_r]) % self.size + 1
                for (r, _), wanted_r in zip(parts, cells, strict=True)]  # fmt: skip
        assert batch.cells.tolist() == wanted
        assert batch.shape.n_kv == round_up(max(tops), PAD)
        assert batch.shape.n_seqs == batch.shape.n_outputs == len(n_each)
        ends = np.cumsum([*n_each.values()])
        assert batch.values["inp_out_ids"].tolist() == (ends - 1).tolist()
        if self.n_regions > 1:
            firsts = [0, *ends[:-1].tolist()]
            assert batch.values[REGIONS].tolist() == [
                [first, s * self.size] for first, s in zip(firsts, n_each, strict=True)
            ]
        begins = {s: self.length(s) for s in n_each}
        positions = [begin + i for s, begin in begins.items() for i in range(n_each[s])]
        assert batch.positions.tolist() == positions
        new: list[dict[int, int]] = [{} for _ in range(N_SEQS)]
        mask = batch.values[MASK]
        assert ((mask == 0) | np.isneginf(mask)).all()
        for row, s, p, cell in zip(mask, batch.sequences, positions, wanted, strict=True):
            new[s][p] = cell  # each token sees what its sequence has up to itself
            there = (self.own[s] | new[s]).items()
            seen = sorted(c % self.size for q, c in there if q > p - self.window)
            assert np.flatnonzero(row == 0).tolist() == seen
        undo = cache.store(batch.sequences, batch.positions, batch.cells)
        for s, made in enumerate(new):
            words = {p: next(self.new) for p in made}
            for p, cell in made.items():
                self.memory[cell] = words[p]
            if not fails:
                self.own[s] |= made
                self.words[s] |= words
        if fails:
            undo()

    def rotated(self) -> None:
        if self.cache.moved is not None:
            moved = shift_batch(self.cache).values["inp_k_shift"]
            assert np.array_equal(moved, self.cache.moved)
        self.turn.clear()

    def length(self, sequence: int) -> int:
        return max(self.own[sequence], default=-1) + 1

    def act(self, name: str, *given) -> None:
        if name in ("step", "close"):
            getattr(self, name)(*given)
        elif name in ("remove", "copy", "shift"):
            *of, (begin, end) = given
            is_range = end is None or begin <= end
            if is_range and getattr(self, name)(*of, begin, end) is not False:
                getattr(self.cache, name)(*of, begin, end)
            else:
                refused(lambda: getattr(self.cache, name)(*of, begin, end))
        else:
            getattr(self, name)(*given)
            getattr(self.cache, name)(*given)

    def agree(self) -> None:
        cache = self.cache
        assert cache.n_used == len({*self.cells()})
        assert [cache.length(s) for s in range(N_SEQS)] == [*map(self.length, range(N_SEQS))]
        for cell in range(cache.n_cells):
            owners = {s for s, own in enumerate(self.own) if cell in own.values()}
            assert cache.owners(cell) == owners
        moved = {c: d for c, d in self.turn.items() if d}
        found = {} if cache.moved is None else dict(enumerate(cache.moved.tolist()))
        assert {c: d for c, d in found.items() if d} == moved
        assert (cache.moved is None) == (not moved)
        for own, words in zip(self.own, self.words, strict=True):
            for p, cell in own.items():
                for copies in reversed(cache.copied):
                    cell = copies.get(cell, cell)
                assert self.memory[cell] == words[p]


WHO, BOUND = st.integers(0, N_SEQS - 1), st.integers(0, 10)
RANGES = st.just((0, None)) | st.tuples(BOUND, st.none() | BOUND)
STEP = st.tuples(
    st.just("step"), st.lists(st.tuples(WHO, st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([False, False, False, True]),
)  # fmt: skip
REMOVE = st.tuples(st.just("remove"), WHO, RANGES)
COPY = st.tuples(st.just("copy"), WHO, WHO, RANGES)
SHIFT = st.tuples(st.just("shift"), WHO, st.integers(-4, 4), RANGES)
OTHERS = st.one_of(
    st.tuples(st.just("keep"), WHO), st.tuples(st.sampled_from(["rotated", "clear"])),
    *[st.tuples(st.just("close"))] * 2,
)  # fmt: skip
ROUND = st.tuples(STEP, COPY, STEP, SHIFT, REMOVE, STEP | SHIFT | COPY, REMOVE | OTHERS)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=examples(200))
@given(rounds=st.lists(ROUND, min_size=1, max_size=5))
def test_whatever_is_done_cache_and_model_agree(layout, rounds):
    twin = Twin(*LAYOUTS[layout])
    for act in itertools.chain(*rounds):
        twin.act(*act)
        twin.agree()


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


def test_copies_read_where_the_words_are_before_they_go():
    """A copy of a copy reads the first source; one over a source comes in a round of its own."""
    twin = Twin(3)
    twin.step([(0, 2), (2, 1)])
    cache = twin.cache
    cache.copy(0, 1)
    cache.remove(2)
    cache.copy(1, 2)
    assert cache.copied == [{8: 0, 9: 1, 16: 0, 17: 1}]
    cache.remove(0)
    cache.copy(2, 0, 1)
    assert cache.copied[1:] == [{0: 17}]


@pytest.mark.parametrize("n", [1, 257, 600])
def test_all_copies_fit_the_step_that_makes_them(n):
    copies = {1000 + i: i for i in range(n)}
    pairs = copy_batch(copies).values[COPIES].tolist()
    assert pairs[:n] == [list(pair) for pair in copies.items()]
    assert all(pair == [-1, -1] for pair in pairs[n:]) and len(pairs) in (256, 512, 1024)


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
            found, said = batch.values[name], input_of(name, batch.shape)
            assert np.array_equal(found, value) and found.dtype == value.dtype, name
            assert (value.shape, value.dtype) == (said.shape, NUMPY[said.dtype]), name
        undo = cache.store(batch.sequences, batch.positions, batch.cells)
        batches.look_ahead(work)
        if event == "step":  # the stand-in for a token that a device draws is none of these
            refused(lambda work=work: batches.take([(s, [FED], "last") for s, *_ in work]), "id")
        if event == "fails":
            undo()
