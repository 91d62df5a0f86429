"""The shapes that steps will have, found before any step is computed.

A shape follows from the step's sizes and from the cells that the cache has by then. So the steps
are rehearsed on the table of a cache: nothing is computed, and no memory is touched. The kernels of
their programs can then be compiled before a clock runs (`Engine.make_ready`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from workbench.engine.batch import Work, n_outputs, n_tokens, size_of_copies
from workbench.engine.cache.kv_cache import KVCache
from workbench.engine.slots.padding import Rule, Sizes
from workbench.graph.ir import StepShape
from workbench.model.cache_graphs import copy_shape

Act = Work | Callable[[KVCache], object]  # a step, or a change of the cache between two steps


def empty_like(cache: KVCache) -> KVCache:
    """An empty table for a cache like this one."""
    return KVCache(
        cache.room.n_ctx, cache.pad, cache.n_seqs, cache.free.in_a_row, cache.n_regions,
        cache.growth, cache.window,
    )  # fmt: skip


def take(work: Work, cache: KVCache) -> None:
    """Gives the tokens of a step their cells, as if the step had been computed."""
    lengths = [(sequence, len(tokens)) for sequence, tokens, _ in work]
    cells = cache.find(lengths)
    past = [cache.length(sequence) for sequence, _ in lengths]
    each = [np.arange(at, at + n) for at, (_, n) in zip(past, lengths, strict=True)]
    sequences, counts = np.array(lengths, np.int64).T
    cache.store(np.repeat(sequences, counts), np.concatenate(each).astype(np.int32), cells)


class Rehearsal:
    """The shapes of an engine's steps.

    cache: the engine's; it stays as it is.
    sizes: as its batches have it.
    n_ubatch: the most tokens of a step.
    """

    def __init__(self, cache: KVCache, sizes: Rule, n_ubatch: int):
        self._cache, self._sizes, self._n_ubatch = cache, sizes, n_ubatch

    def from_empty(self, acts: Iterable[Act]) -> list[StepShape]:
        """The shapes of steps that begin with an empty cache, each once, in their order.
        Raises UsageError where a step finds no cells."""
        cache, found = empty_like(self._cache), dict[StepShape, None]()
        for act in acts:
            if callable(act):
                act(cache)
                continue
            for copies in cache.copied:
                found[copy_shape(size_of_copies(len(copies)))] = None
            cache.copied.clear()
            found[self.shape_of(act, cache)] = None
            take(act, cache)
        return [*found]

    def shape_of(self, work: Work, cache: KVCache, draws: bool = False) -> StepShape:
        """The shape that a step would have with this cache."""
        cells = cache.find([(sequence, len(tokens)) for sequence, tokens, _ in work])
        exact = Sizes(n_tokens(work), len(work), n_outputs(work))
        size = self._sizes(exact, self._n_ubatch)
        return StepShape(size.n_tokens, size.n_outputs, cache.extent(cells), size.n_seqs, draws)

    def alone(self, sequence: int, parts: Sequence[tuple[int, int]]) -> list[StepShape]:
        """The shapes of the next steps of one sequence, with the cache as it is. parts: the tokens
        and the outputs of each step."""
        cache = self._cache
        region = cache.region(sequence)
        used, end = int(cache.free.used[region]), int(cache.free.ends[region])
        found = []
        for tokens, outputs in parts:
            used += tokens
            end = max(end, used)  # holes are filled first
            size = self._sizes(Sizes(tokens, 1, outputs), self._n_ubatch)
            extent = cache.growth.extent(end)
            found.append(StepShape(size.n_tokens, size.n_outputs, extent, size.n_seqs))
        return found
