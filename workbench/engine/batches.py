"""The batches of an engine. The next batch is made while the device computes.

While a device computes a step, the host has nothing to do. After the step, the device has nothing
to do until the host has made the next inputs. Where each sequence goes on by one token, all inputs
but the tokens are known in advance. `Batches` makes them while the device computes.
"""

from collections.abc import Callable

import numpy as np

from workbench.engine.batch import (
    NO_CELL,
    Batch,
    NewMask,
    Outputs,
    Values,
    Work,
    known_id,
    make_batch,
    own_mask,
    row_values,
    with_more,
)
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.look.phases import PhaseClock
from workbench.engine.slots.draws import UNKEPT, Draws
from workbench.engine.slots.padding import Rule, as_they_are
from workbench.model.inputs import MASK, POSITIONS, TOKENS

NOBODY = PhaseClock(lambda phase, start_ns, end_ns: None)


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
        batch, alike = self.next, self._next_is_for
        if batch is None or alike is None or len(work) != len(alike) or batch.shape.draws != draws:
            return None
        ids = batch.values[TOKENS]  # the next step's own, not written yet
        for i, (sequence, tokens, outputs) in enumerate(work):
            if len(tokens) != 1 or (sequence, outputs) != alike[i]:
                return None
            ids[i] = known_id(tokens[0], i, sequence, self._n_vocab, draws)
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
