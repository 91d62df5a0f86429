"""ROOM #14924: cells of sequences are moved together, so that attention looks at fewer cells.

Where sequences share a region, a sequence that ends leaves holes among the cells of the others. A
step looks at all cells up to the last cell that has an owner:

    before   0 0 . . 1 1 . . . 0 1 . . . . .      an extent of 11 cells, 5 of them holes
    after    0 0 0 1 1 1 . . . . . . . . . .      an extent of 6

Where n cells are used, the used cells after the first n move to the holes among the first n. No
smaller number of cells could move. K and V are copied in a step without tokens, before the next
step. (llama.cpp had this as `--defrag-thold`; its caches of one stream still leave holes.)

Moving pays where masked cells are read, because attention looks at fewer cells. With
skip_masked_kv=tail attention can look at more cells: new tokens no longer fill low holes, so a
sequence reaches further.

Where each sequence has a region, there are no holes: a sequence has the first cells of its region.
Regions of idle sequences cost nothing either. A step names the first cell of each of its sequences,
so no other region is looked at. (llama.cpp cuts a step where the numbers of its sequences have a
gap.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.config import Defrag, Toggles

if TYPE_CHECKING:
    from workbench.engine.cache.kv_cache import KVCache

LEAST_HOLES = 0.1  # the share of holes from which moving pays (llama.cpp: 0.1)


def defragment(cache: KVCache) -> int:
    """Moves cells until the shared region has no holes. Returns how many have moved; 0 for a cache
    with a region for each sequence."""
    n, end = int(cache.free.used[0]), int(cache.free.ends[0])
    if cache.n_regions > 1 or n == end:
        return 0
    owned = cache.free.n_owners[0, :end] > 0
    to, cells = np.flatnonzero(~owned[:n]), n + np.flatnonzero(owned[n:])
    cache.move(cells, to)
    return len(cells)


def pays(cache: KVCache, n_new: int) -> bool:
    """Whether closing holes pays before a step of n_new tokens: there are enough holes, and
    attention then looks at fewer cells of the shared region."""
    used, end = int(cache.free.used[0]), int(cache.free.ends[0])
    if end - used < LEAST_HOLES * end:
        return False
    last = max(end, used + n_new)  # the lowest free cells are filled first
    return cache.growth.extent(used + n_new) < cache.growth.extent(last)


def make_way(cache: KVCache, n_new: int, toggles: Toggles) -> int:
    """Moves cells before a step of n_new tokens, as the toggle `defrag` says. Where the step needs
    its cells in a row and finds none, holes are closed whatever the toggle says, because the step
    would fail otherwise. Returns how many cells have moved."""
    if cache.n_regions > 1:
        return 0
    if (toggles.defrag == Defrag.CELLS and pays(cache, n_new)) or not cache.has_room([(0, n_new)]):
        return defragment(cache)
    return 0
