"""One step's tokens as input values: what the host writes into staging memory.

The answer of a sequence does not depend on the sequences beside it. On the devices of a CPU, a step
of several sequences gives the same bits as a step for each of them, with the same cells. A sequence
that is alone in its cache has other cells. Then attention adds the same terms in another order, and
rounds otherwise. A GPU also chooses other kernels for other numbers of tokens.

The next batch is made while the device computes. After a step, the device has nothing to do until
the host has made the next inputs. Where each sequence goes on by one token, all inputs but the
tokens are known in advance. `Batches` makes them then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from workbench.common.errors import UsageError
from workbench.engine.cache.growth import Growth
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.cache.masks import HIDDEN
from workbench.engine.cache.room import Room
from workbench.engine.look.phases import PhaseClock
from workbench.engine.slots.draws import FED, UNKEPT, Draws
from workbench.engine.slots.padding import Rule, Sizes, as_they_are
from workbench.graph.ir import StepShape
from workbench.model.cache_graphs import copy_shape, shift_shape
from workbench.model.inputs import (
    COPIES,
    DELTAS,
    K_CELLS,
    MASK,
    OUT_IDS,
    POSITIONS,
    REGIONS,
    TOKENS,
    V_CELLS,
)

Outputs = Literal["last", "all", "none"]

# sequence, its next tokens, and which of their logits are wanted
Entry = tuple[int, Sequence[int], Outputs]
Work = Sequence[Entry]
Values = dict[str, np.ndarray]  # by input name
NO_CELL = -1  # of a token that is stored nowhere
NOBODY = PhaseClock(lambda phase, start_ns, end_ns: None)
NewMask = Callable[[int, int], np.ndarray]  # (T, n_kv) -> uint16


def n_tokens(work: Work) -> int:
    """The tokens of all entries together."""
    return sum(len(tokens) for _, tokens, _ in work)


def n_outputs(work: Work) -> int:
    """The outputs of all entries together."""
    return sum({"last": 1, "all": len(tokens)}.get(outputs, 0) for _, tokens, outputs in work)


class Batch(NamedTuple):
    """Tokens that are computed together.

    shape: of the step.
    values: the value of each input by name (`model/inputs.py`).
    sequences, positions, cells: of each token, (T,).
    counts: how many outputs each entry of the work has.
    """

    shape: StepShape
    values: Values
    sequences: np.ndarray  # (T,) int64
    positions: np.ndarray  # (T,) int32
    cells: np.ndarray  # (T,) int64
    counts: tuple[int, ...]

    @property
    def first_cell(self) -> int:
        """Where the first token is stored; 0 where there are no tokens."""
        return int(self.cells[0]) if len(self.cells) else 0


def row_values(cells: np.ndarray) -> Values:
    """The inputs that tell set_rows where to store. cells: of a step's tokens, (T,) int64."""
    return {K_CELLS: cells, V_CELLS: cells}


def own_mask(t: int, n_kv: int) -> np.ndarray:
    return np.empty((t, n_kv), np.uint16)


def make_batch(
    work: Work,
    cache: KVCache,
    n_vocab: int,
    n_ubatch: int,
    new_mask: NewMask = own_mask,
    store_values: Callable[[np.ndarray], Values] = row_values,
    sizes: Rule = as_they_are,
    draws: bool = False,
) -> Batch:
    """The next tokens of each sequence of `work`, in its order.

    new_mask: makes memory for a mask, (T, n_kv) uint16.
    store_values: as `Batches` has it.
    sizes: rounds the step's sizes up.
    draws: the device draws tokens; then FED may stand for a token.

    Raises UsageError for no tokens, more than n_ubatch in all, ids outside the vocabulary, a full
    context, too few cells in a row for a store that wants them so, and a sequence that does not
    exist or is given twice. Then nothing has changed.
    """
    lengths = [len(tokens) for _, tokens, _ in work]
    t = sum(lengths)
    if 0 in lengths:
        raise UsageError(
            f"sequence {work[lengths.index(0)][0]} has no tokens in a step; give at least one, or "
            "leave the sequence out"
        )
    if not 0 < t <= n_ubatch:
        raise UsageError(f"a step takes 1 to {n_ubatch} tokens, not {t}; use prefill, or n_ubatch")
    ids = _ids(work, n_vocab, draws)
    cells = cache.find([(sequence, n) for (sequence, *_), n in zip(work, lengths, strict=True)])
    n_kv = cache.extent(cells)
    whose, positions, rows, begin = dict[int, int](), [], [], 0
    for (sequence, _, outputs), n in zip(work, lengths, strict=True):
        if sequence in whose:
            raise UsageError(f"sequence {sequence} is given twice in one step; give it once")
        if outputs not in _ROWS:
            raise UsageError(f"outputs={outputs!r} does not exist; give {', '.join(_ROWS)}")
        past, end = cache.length(sequence), begin + n
        whose[sequence] = begin
        positions.append(np.arange(past, past + n, dtype=np.int32))
        rows.append(_ROWS[outputs](begin, end))
        begin = end
    counts = tuple(map(len, rows))
    size = sizes(Sizes(t, len(work), sum(counts)), n_ubatch)
    mask = _mask_of(cache, whose, positions, cells, new_mask(size.n_tokens, n_kv))
    sequences = np.array([*whose], np.int64)
    if t > len(work):
        sequences = np.repeat(sequences, lengths)
    at, more = _joined(positions), size.n_tokens - t
    values = {
        TOKENS: with_more(ids, more, 0),
        POSITIONS: with_more(at, more, 0),
        MASK: mask.view(np.float16),
        **store_values(with_more(cells, more, NO_CELL)),
        OUT_IDS: with_more(_joined(rows), size.n_outputs - sum(counts), 0),
    }
    if cache.n_regions > 1:
        values[REGIONS] = _regions(whose, t, size, cache)
    shape = StepShape(size.n_tokens, size.n_outputs, n_kv, size.n_seqs, draws)
    return Batch(shape, values, sequences, at, cells, counts)


def _mask_of(
    cache: KVCache,
    whose: dict[int, int],
    positions: list[np.ndarray],
    cells: np.ndarray,
    mask: np.ndarray,
) -> np.ndarray:
    """Fills a mask, (tokens, n_kv) uint16. Tokens that only pad the step see nothing. whose: the
    first token of each sequence."""
    singles: list[int] = []
    for (sequence, begin), own in zip(whose.items(), positions, strict=True):
        if len(own) == 1:
            singles.append(begin)
        else:
            end = begin + len(own)
            cache.mask(sequence, own, cells[begin:end], mask[begin:end])
    if singles:
        alone = {begin: sequence for sequence, begin in whose.items()}
        cache.masks_of_one([alone[begin] for begin in singles], cells, singles, mask)
    mask[len(cells) :] = HIDDEN
    return mask


def with_more(values: np.ndarray, n: int, value: int) -> np.ndarray:
    """`values`, with n times `value` after them."""
    return np.concatenate([values, np.full(n, value, values.dtype)]) if n else values


def _regions(whose: dict[int, int], t: int, size: Sizes, cache: KVCache) -> np.ndarray:
    """The values of input REGIONS (`model/inputs.py`). Sequences that only pad the step come last.
    They have a token each where every sequence has one token; else the first of them has all added
    tokens."""
    firsts, more = [*whose.values()], size.n_seqs - len(whose)
    if size.n_seqs == size.n_tokens:
        firsts += range(t, size.n_tokens)
    elif more:
        firsts += [t, *[size.n_tokens] * (more - 1)]
    return np.array([firsts, [*map(cache.first_cell, whose), *[0] * more]], np.int32).T.copy()


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def shift_batch(cache: KVCache) -> Batch:
    """The step, without tokens, that rotates the stored K of cells that have moved."""
    assert cache.moved is not None
    none = np.empty(0, np.int64)
    shape = shift_shape(cache.n_cells)
    return Batch(shape, {DELTAS: cache.moved}, none, none.astype(np.int32), none, ())


def copy_batch(copies: Mapping[int, int]) -> Batch:
    """The step, without tokens, that copies cells. copies: from each destination to its source."""
    pairs = np.full((size_of_copies(len(copies)), 2), NO_CELL, np.int64)
    pairs[: len(copies)] = [*copies.items()]
    none = np.empty(0, np.int64)
    return Batch(copy_shape(len(pairs)), {COPIES: pairs}, none, none.astype(np.int32), none, ())


def size_of_copies(n: int) -> int:
    """How many cells a step copies where n are to be copied. There are few such numbers, so few
    programs."""
    return max(256, 1 << (n - 1).bit_length())


# which of the tokens begin..end-1 have outputs, int32
_ROWS: dict[Outputs, Callable[[int, int], np.ndarray]] = {
    "last": lambda begin, end: np.array([end - 1], dtype=np.int32),
    "all": lambda begin, end: np.arange(begin, end, dtype=np.int32),
    "none": lambda begin, end: np.empty(0, dtype=np.int32),
}


def step_shape(
    n_tokens: int,
    n_outputs: int,
    n_past: int,
    n_ubatch: int,
    growth: Growth,
    room: Room,
    n_seqs: int = 1,
) -> StepShape:
    """The shape of a step of n_seqs sequences, each with n_past tokens before it. Raises UsageError
    where no step has this shape."""
    if not (1 <= n_tokens <= n_ubatch and 0 <= n_outputs <= n_tokens and n_past >= 0):
        raise UsageError(
            f"n_tokens={n_tokens}, n_outputs={n_outputs}, n_past={n_past}: a step has 1 to "
            f"{n_ubatch} tokens (n_ubatch) and at most an output of each"
        )
    if not 1 <= n_seqs <= n_tokens:
        raise UsageError(
            f"n_seqs={n_seqs}: a step of {n_tokens} tokens has 1 to {n_tokens} sequences"
        )
    in_a_region = 1 if room.n_regions > 1 else n_seqs  # sequences
    used, new = n_past * in_a_region, -(-n_tokens // n_seqs) * in_a_region
    room.check(used, new)
    return StepShape(n_tokens, n_outputs, growth.extent(used + new), n_seqs)


def prompt_shapes(n_prompt: int, n_decoded: int, n_ubatch: int, growth: Growth) -> list[StepShape]:
    """The shapes of a prompt's steps on an empty cache, then of single tokens. The last ubatch and
    each token have an output."""
    sizes = [min(n_ubatch, n_prompt - i) for i in range(0, n_prompt, n_ubatch)]
    made, past = [], 0
    for i, size in enumerate([*sizes, *[1] * n_decoded]):
        past += size
        made.append(StepShape(size, int(i >= len(sizes) - 1), growth.extent(past)))
    return made


def check_prompt(tokens: Sequence[int], n_vocab: int, room: Room) -> None:
    """Raises UsageError for no tokens, for ids outside the vocabulary, and for more tokens than a
    sequence has room for."""
    if not len(tokens):
        raise UsageError("the prompt is empty; give at least one token")
    check_ids(tokens, n_vocab)
    room.check(0, len(tokens))


def check_ids(tokens: Sequence[int], n_vocab: int) -> np.ndarray:
    """Token ids as (T,) int32. Raises UsageError, which names the first outside 0..n_vocab-1."""
    for i, token in enumerate(tokens):
        check_id(token, i, n_vocab)
    return np.array(tokens, dtype=np.int32)


def known_id(token: int, index: int, sequence: int, n_vocab: int, draws: bool) -> int:
    """How a device is told of a token: by its id, or, for a token that the device has drawn, by the
    sequence that has drawn it (-1 - sequence). Raises UsageError as `check_id` does."""
    if draws and token == FED:
        return -1 - sequence
    return check_id(token, index, n_vocab)


def _ids(work: Work, n_vocab: int, draws: bool) -> np.ndarray:
    """How a device is told of the tokens, (T,) int32."""
    if not draws:
        return check_ids([i for _, tokens, _ in work for i in tokens], n_vocab)
    each = ((token, sequence) for sequence, tokens, _ in work for token in tokens)
    found = [known_id(token, i, s, n_vocab, draws) for i, (token, s) in enumerate(each)]
    return np.array(found, np.int32)


def check_id(token: int, index: int, n_vocab: int) -> int:
    """The token id. Raises UsageError for an id outside 0..n_vocab-1. index: its place among the
    given ids."""
    if not 0 <= token < n_vocab:
        raise UsageError(
            f"token id {token} at index {index} is outside the vocabulary of "
            f"0..{n_vocab - 1}; use ids of this model's tokenizer"
        )
    return token


# ahead --------------------------------------------------------------------------------------------


class Batches:
    """The batches of one cache. A batch belongs to the step that it is made for. The step must have
    written the batch's values to staging memory when the next batch is taken.

    clock: told when the making of a batch begins and ends.
    store_values: from cells to the inputs that tell cache stores where to store.
    sizes: rounds the sizes of steps up.
    draws: how tokens are drawn.
    """

    def __init__(
        self,
        cache: KVCache,
        n_vocab: int,
        n_ubatch: int,
        clock: PhaseClock = NOBODY,
        store_values: Callable[[np.ndarray], Values] = row_values,
        sizes: Rule = as_they_are,
    ):
        self._cache = cache
        self._n_vocab = n_vocab
        self._n_ubatch = n_ubatch
        self._clock = clock
        self._store_values = store_values
        self.sizes = sizes
        self.draws = Draws()
        self._next: Batch | None = None
        self._next_is_for: list[tuple[int, Outputs]] | None = None
        self._next_is_of = -1  # the state of the cache
        self._room = np.empty(0, np.uint16)  # for masks of batches that were not made ahead

    def take(self, work: Work, draws: bool = False) -> Batch:
        """As `make_batch`, but a batch that `look_ahead` has made for such work and this state of
        the cache is used. draws: the device draws a token from each output."""
        start = self._clock.begin("batch")
        batch = self.made_ahead(work, draws)
        if batch is None:
            batch = self._made(work, self._mask, draws)
        if draws:
            batch.values.update(self._draws_of(work, batch.shape.n_outputs))
        self._clock.end("batch", start)
        return batch

    def check(self, work: Work, draws: bool) -> None:
        """Raises UsageError where `take` would. Takes nothing."""
        self._made(work, self._mask, draws)

    def _draws_of(self, work: Work, n_outputs: int) -> Values:
        """The inputs of draws. Of several outputs of a sequence the last is kept."""
        rows: list[int] = []
        for sequence, tokens, outputs in work:
            n = {"last": 1, "all": len(tokens)}.get(outputs, 0)
            rows += [UNKEPT] * (n - 1) + [sequence] * (n > 0)
        return self.draws.values(rows + [UNKEPT] * (n_outputs - len(rows)))

    def made_ahead(self, work: Work, draws: bool = False) -> Batch | None:
        """The batch that `look_ahead` has made, with the tokens of `work` put in. None where it is
        for other work, or where the cache has changed. Raises UsageError for ids outside the
        vocabulary."""
        batch, alike, n_vocab = self._next, self._next_is_for, self._n_vocab
        if batch is None or alike is None or self._next_is_of != self._cache.n_changes:
            return None
        if len(work) != len(alike) or batch.shape.draws != draws:
            return None
        ids = batch.values[TOKENS]  # the next step's own, not written yet
        for i, (sequence, tokens, outputs) in enumerate(work):
            if len(tokens) != 1 or (sequence, outputs) != alike[i]:
                return None
            token = tokens[0]  # an id is seen without a call: the device stands still meanwhile
            known = 0 <= token < n_vocab
            ids[i] = token if known else known_id(token, i, sequence, n_vocab, draws)
        return batch

    @property
    def next(self) -> Batch | None:
        """The batch that `look_ahead` has made; None where the cache has changed."""
        return self._next if self._next_is_of == self._cache.n_changes else None

    def _made(self, work: Work, new_mask: NewMask, draws: bool) -> Batch:
        n_vocab, n_ubatch = self._n_vocab, self._n_ubatch
        return make_batch(
            work, self._cache, n_vocab, n_ubatch, new_mask, self._store_values, self.sizes, draws
        )

    def _mask(self, t: int, n_kv: int) -> np.ndarray:
        """Memory for one mask at a time, (t, n_kv) uint16. The memory is kept for the next mask,
        because new pages for 100 MB take tens of ms."""
        if self._room.size < t * n_kv:
            self._room = np.empty(t * n_kv, np.uint16)
        return self._room[: t * n_kv].reshape(t, n_kv)

    def look_ahead(self, work: Work, draws: bool = False) -> int:
        """Makes the next batch, except its tokens, where `work` has one token for each sequence and
        the next step is like it. Returns the ns it took."""
        start, alike = self._clock.begin("batch"), _one_each(work)
        if not alike or not self._cache.has_room([(sequence, 1) for sequence, _ in alike]):
            self._clock.leave()
            return 0
        made = None
        if self._next_is_for == alike and self._next_is_of == self._cache.n_changes - 1:
            assert self._next is not None
            made = _following(self._next, self._cache, self._store_values)
        if made is None:
            following = [(sequence, [0], outputs) for sequence, _, outputs in work]
            made = self._made(following, own_mask, draws)
        self._next, self._next_is_for, self._next_is_of = made, alike, self._cache.n_changes
        return self._clock.end("batch", start) - start


def _following(
    batch: Batch, cache: KVCache, store_values: Callable[[np.ndarray], Values]
) -> Batch | None:
    """The batch that follows a batch of a token for each sequence, when that has been stored and
    nothing else has changed. None where attention has to look at more cells. Uses the arrays of
    `batch` itself: its step has copies of its own, in staging memory."""
    cells = cache.next_cells(batch.sequences)
    if cache.window or cache.extent(cells) != batch.shape.n_kv:  # a window moves with the token
        return None
    mask, at, n = batch.values[MASK], cache.in_region(cells), len(cells)
    if n == 1:
        mask[0, at[0]] = 0
    else:
        mask[np.arange(n), at] = 0
    positions, more = batch.positions + 1, batch.shape.n_tokens - n
    values = {**batch.values, POSITIONS: positions, **store_values(cells)}
    if more:
        values[POSITIONS] = with_more(positions, more, 0)
        values |= store_values(with_more(cells, more, NO_CELL))
    return Batch(batch.shape, values, batch.sequences, positions, cells, batch.counts)


def _one_each(work: Work) -> list[tuple[int, Outputs]] | None:
    """The sequence and outputs of each entry, where each has one token; None for other work."""
    alike = []
    for sequence, tokens, outputs in work:
        if len(tokens) != 1:
            return None
        alike.append((sequence, outputs))
    return alike
