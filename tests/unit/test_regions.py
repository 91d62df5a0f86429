"""A cache with a region for each sequence, against a plain model: memory as a list of words.

Each token is a word of its own. What a step stores, and what is copied before one, is done to the
list as a device would. Whatever is done in whatever order, a sequence's cells hold its own words at
its positions, all of them in its region, and a token's mask shows these cells and no others.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.engine.batch import make_batch
from workbench.engine.batches import Batches
from workbench.engine.cache.kv_cache import EMPTY, KVCache
from workbench.model.inputs import MASK, REGIONS

N_SEQS, N_CTX, PAD, N_UBATCH = 3, 30, 4, 8  # 10 cells of a context for each, 12 with padding
CELLS = 12
SEQUENCES, BOUND = st.integers(0, N_SEQS - 1), st.integers(0, 12)
RANGE = st.tuples(BOUND, st.none() | BOUND)
ACT = st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(SEQUENCES, st.integers(1, 4)), min_size=1,
                                        max_size=3, unique_by=lambda w: w[0])),
    st.tuples(st.just("remove"), SEQUENCES, RANGE),
    st.tuples(st.just("copy"), SEQUENCES, SEQUENCES, RANGE),
    st.tuples(st.just("shift"), SEQUENCES, st.integers(-3, 3), RANGE),
    st.tuples(st.just("keep"), SEQUENCES),
)  # fmt: skip


class Memory:
    """What the cells hold, and what sequences should find there: position -> word."""

    def __init__(self) -> None:
        self.cells: list[int] = [-1] * (N_SEQS * CELLS)
        self.wanted: list[dict[int, int]] = [{} for _ in range(N_SEQS)]
        self.words = itertools.count()

    def copy(self, cache: KVCache) -> None:
        """The copies that come before a step: those of one round in any order, at once."""
        for copies in cache.copied:
            assert not set(copies) & set(copies.values())
            before = list(self.cells)
            for to, whence in copies.items():
                self.cells[to] = before[whence]
        cache.copied = []

    def step(self, cache: KVCache, work: list[tuple[int, int]]) -> None:
        batch = make_batch([(s, [1] * n, "none") for s, n in work], cache, 10, N_UBATCH)
        self.copy(cache)
        check_inputs(batch, cache, work)
        for sequence, position, cell in zip(
            batch.sequences, batch.positions, batch.cells, strict=True
        ):
            self.wanted[sequence][int(position)] = self.cells[cell] = next(self.words)
        cache.store(batch.sequences, batch.positions, batch.cells)


def check_inputs(batch, cache: KVCache, work: list[tuple[int, int]]) -> None:
    """Every token sees what its sequence had, and of the step what is not behind it."""
    firsts = [0, *itertools.accumulate(n for _, n in work)][:-1]
    assert batch.values[REGIONS].tolist() == [
        [first, s * CELLS] for first, (s, _) in zip(firsts, work, strict=True)
    ]
    n_kv = batch.shape.n_kv
    assert n_kv % PAD == 0 and n_kv <= CELLS
    for t, sequence in enumerate(batch.sequences):
        assert sequence * CELLS <= batch.cells[t] < (sequence + 1) * CELLS
        old = np.flatnonzero(cache._positions[sequence] != EMPTY)
        new = [
            c % CELLS
            for s, p, c in zip(batch.sequences, batch.positions, batch.cells, strict=True)
            if s == sequence and p <= batch.positions[t]
        ]
        assert not set(new) & set(old.tolist())
        seen = np.flatnonzero(batch.values[MASK][t] == 0).tolist()
        assert seen == sorted([*old.tolist(), *new])


def agree(cache: KVCache, memory: Memory) -> None:
    for sequence, wanted in enumerate(memory.wanted):
        at, positions = cache._own(sequence)
        assert len(at) == cache.free.used[sequence] == (cache.free.n_owners[sequence] == 1).sum()
        found = dict(zip(positions.tolist(), (at + sequence * CELLS).tolist(), strict=True))
        assert found.keys() == wanted.keys()
        assert cache.length(sequence) == max(wanted, default=-1) + 1
        for position, cell in found.items():
            assert cache.owners(cell) == {sequence}
            for copies in reversed(cache.copied):
                cell = copies.get(cell, cell)
            assert memory.cells[cell] == wanted[position]
    assert cache.n_used == sum(map(len, memory.wanted))


@settings(max_examples=examples(400))
@given(st.lists(ACT, max_size=12))
def test_each_sequence_finds_its_words_in_its_region(acts):
    cache, memory = KVCache(N_CTX, PAD, N_SEQS, n_regions=N_SEQS), Memory()
    cache.reserve(N_SEQS - 1)
    for name, *rest in acts:
        try:
            if name == "step":
                memory.step(cache, rest[0])
            elif name == "keep":
                cache.keep(rest[0])
                memory.wanted = [w if s == rest[0] else {} for s, w in enumerate(memory.wanted)]
            else:
                *of, (begin, end) = rest
                getattr(cache, name)(*of, begin, end)
                _same(memory, name, of, begin, EMPTY if end is None else end)
        except UsageError:
            pass  # what is refused changes nothing: `agree` says so
        agree(cache, memory)


def _same(memory: Memory, name: str, of: list[int], begin: int, end: int) -> None:
    own = memory.wanted[of[0]]
    within = {p: w for p, w in own.items() if begin <= p < end}
    if name == "copy":
        memory.wanted[of[1]] |= within
        return
    for p in within:
        del own[p]
    if name == "shift":
        own |= {p + of[1]: w for p, w in within.items()}


def test_a_copy_whose_source_is_overwritten_comes_in_a_round_before():
    cache, memory = KVCache(N_CTX, PAD, N_SEQS, n_regions=N_SEQS), Memory()
    memory.step(cache, [(0, 3), (2, 2)])
    cache.copy(0, 1)
    cache.remove(0)
    cache.copy(2, 0)
    assert cache.copied == [{12: 0, 13: 1, 14: 2}, {0: 24, 1: 25}]


def test_a_copy_of_a_copy_reads_where_the_words_are():
    cache, memory = KVCache(N_CTX, PAD, N_SEQS, n_regions=N_SEQS), Memory()
    memory.step(cache, [(0, 2)])
    cache.copy(0, 1)
    cache.copy(1, 2)
    assert cache.copied == [{12: 0, 13: 1, 24: 0, 25: 1}]


def test_a_region_that_is_full_refuses_and_the_others_go_on():
    cache, memory = KVCache(N_CTX, PAD, N_SEQS, n_regions=N_SEQS), Memory()
    memory.step(cache, [(0, 8)])
    memory.step(cache, [(0, 2), (1, 1)])
    with pytest.raises(UsageError, match=r"10 \+ 1 tokens do not fit the context of 10"):
        memory.step(cache, [(0, 1)])
    assert cache.has_room([(1, 1), (2, 1)]) and not cache.has_room([(1, 1), (0, 1)])
    memory.step(cache, [(1, 1), (2, 1)])


def test_a_cache_with_fewer_cells_than_sequences_is_refused():
    with pytest.raises(UsageError, match="n_ctx=2 cells cannot be shared out to 3 sequences"):
        KVCache(2, PAD, 3, n_regions=3)


@given(
    st.lists(SEQUENCES, min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["step", "step", "fails", "other", "remove"]), max_size=14),
)
def test_inputs_made_ahead_are_those_made_anew(sequences, events):
    cache = KVCache(N_CTX, PAD, N_SEQS, n_regions=N_SEQS)
    cache.reserve(N_SEQS - 1)
    batches = Batches(cache, 10, N_UBATCH)
    for event in events:
        shift = int(event == "other")
        work = [((s + shift) % N_SEQS, [3], "last") for s in sequences]
        if event == "remove":
            cache.remove(sequences[0], 1, 2)
            continue
        if not cache.has_room([(s, 1) for s, *_ in work]):
            break
        wanted = make_batch(work, cache, 10, N_UBATCH)
        batch = batches.take(work)
        assert batch.shape == wanted.shape and batch.counts == wanted.counts
        assert batch.values.keys() == wanted.values.keys()
        for name, value in wanted.values.items():
            assert np.array_equal(batch.values[name], value), name
        undo = cache.store(batch.sequences, batch.positions, batch.cells)
        batches.look_ahead(work)
        if event == "fails":
            undo()
