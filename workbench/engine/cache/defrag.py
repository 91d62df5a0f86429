"""ROOM #14924: cells of sequences moved together, so that attention looks at fewer.

Where sequences share a region, one that ends leaves holes among the cells of the others, and a step
looks at all cells up to the last that anybody has:

    before   0 0 . . 1 1 . . . 0 1 . . . . .      an extent of 11 cells, 5 of them holes
    after    0 0 0 1 1 1 . . . . . . . . . .      an extent of 6

The cells behind the first n go to the holes among the first n, n being how many are used. No fewer
could move. K and V are copied in a step without tokens, before the next one. (llama.cpp had it as
`--defrag-thold`; its caches of one stream still leave holes.)

It pays where masked cells are read: attention looks at fewer. With skip_masked_kv=tail it can look
at more, since new tokens no longer fill low holes, and a sequence reaches further.

Where each sequence has a region, there are no holes: a sequence has the first cells of its own. Nor
do regions of idle sequences between them cost anything. A step names the first cell of each of its
sequences, so no other region is looked at. (llama.cpp cuts a step where the numbers of its
sequences have a gap.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.config import Defrag

if TYPE_CHECKING:
    from workbench.config import Toggles
    from workbench.engine.cache.kv_cache import KVCache

LEAST_HOLES = 0.1  # of the cells up to the last one, that moving pays for (llama.cpp: 0.1)


def defragment(cache: KVCache) -> int:
    """Moves cells until the shared region has no holes; returns how many have moved. Of a cache of
    regions none do."""
    n, end = int(cache.free.used[0]), int(cache.free.ends[0])
    if cache.n_regions > 1 or n == end:
        return 0
    owned = cache.free.n_owners[0, :end] > 0
    to, cells = np.flatnonzero(~owned[:n]), n + np.flatnonzero(owned[n:])
    cache.move(cells, to)
    return len(cells)


def pays(cache: KVCache, n_new: int) -> bool:
    """Whether attention looks at fewer cells of a shared region in a step of n_new tokens where its
    holes are closed, and there are enough of them."""
    used, end = int(cache.free.used[0]), int(cache.free.ends[0])
    if end - used < LEAST_HOLES * end:
        return False
    behind = max(end, used + n_new)  # the lowest free cells are filled first
    return cache.growth.extent(used + n_new) < cache.growth.extent(behind)


class Defragmenting:
    """Before each step, by a value of `defrag`. n_moved: cells that have moved."""

    def __init__(self, toggles: Toggles):
        self._wanted = toggles.defrag == Defrag.CELLS
        self.n_moved = 0

    def __call__(self, cache: KVCache, n_new: int) -> None:
        """A step of n_new tokens comes. Where it wants its cells in a row and finds none, holes are
        closed whatever the toggle says: the alternative is no step."""
        if cache.n_regions > 1:
            return
        if (self._wanted and pays(cache, n_new)) or not cache.has_room([(0, n_new)]):
            self.n_moved += defragment(cache)
