"""Which slot and which cells a request gets, and what is left of both when it ends.

A slot that is free keeps its cells, so that a prompt which begins alike need not compute them:

    a region each    the cells of a slot are its own. A request finds them free, or gets copies
    one region       what all may need in all is reserved. Idle slots' cells are let go for it, the
                     longest idle first

A step that has failed leaves cells that nobody has computed. They are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.engine.prefixes import Kept, slot_for
from workbench.engine.requests import Request
from workbench.errors import UsageError
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.kv_cache import KVCache

LEAST_CELLS = 2  # of a request: a token of its prompt, and one to make


def check_cells(n_cells: int, n_slots: int) -> None:
    """Raises UsageError for a cache in which not all slots can serve a request at once."""
    if n_cells < LEAST_CELLS * n_slots:
        raise UsageError(
            f"{n_slots} slots cannot be used together: the cache has {n_cells} cells (n_ctx), and "
            f"each needs {LEAST_CELLS} at least; use a longer context (--n-ctx), or fewer slots"
        )


class Slot:
    """A sequence, with the request that it serves. kept: the tokens of its cells."""

    def __init__(self, sequence: int, n_cells: int):
        self.sequence = sequence
        self.request: Request | None = None
        self.kept = Kept(n_cells)
        self.used_ns = 0


class Seats:
    """n slots of a cache. choice: a value of `slot_choice`."""

    def __init__(self, cache: KVCache, n: int, choice: str):
        self.slots = [Slot(i, cache.region_cells) for i in range(n)]
        self._cache, self._choice = cache, choice
        self._n_kept: int | None = 0  # None: it may have changed
        self._reserved = 0  # cells of all that run, where these share a region

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.request is None]

    @property
    def n_kept(self) -> int:
        """Cells that no request holds: the slots that have them are free."""
        if self._n_kept is None:
            idle = [slot for slot in self.free if len(slot.kept)]
            self._n_kept = sum(len(slot.kept) for slot in idle)
            if self._cache.n_regions == 1:  # cells may be shared
                owners = self._cache.free.n_owners[0]
                of_idle = np.zeros_like(owners)
                for slot in idle:
                    of_idle[self._cache.cells(slot.sequence)] += 1
                self._n_kept = int(((of_idle > 0) & (of_idle == owners)).sum())
        return self._n_kept

    def seat(self, request: Request) -> Slot | None:
        """A slot for a request, which has cells for the first `n_cached` tokens of its prompt then.
        None where there is no slot, or not all cells that it may need."""
        free, cache = self.free, self._cache
        if not free or (cache.n_regions == 1 and self._reserved + request.cells > cache.n_ctx_seq):
            return None
        self._n_kept = None
        slot, source, n = slot_for(request.reusable, free, self.slots, self._choice)
        sequence = slot.sequence
        if source is None:
            cache.remove(sequence, n)
            slot.kept.cut(n)
        else:
            cache.remove(sequence)
            slot.kept.cut(0)
            self._make_room(request.cells, (slot, source))
            cache.copy(source.sequence, sequence, 0, n)
            slot.kept.extend(request.prompt[:n])
        self._make_room(request.cells, (slot,))
        self._reserved += request.cells
        slot.request = request
        request.todo, request.n_cached = len(request.prompt) - n, n
        return slot

    def leave(self, slot: Slot, request: Request, keeps: bool) -> None:
        """A request has ended. keeps: its slot keeps the cells whose tokens are known."""
        slot.request = None
        self._reserved -= request.cells
        slot.used_ns = now_ns()
        self._keep(slot, slot.kept.n_known if keeps else 0)

    def forget(self) -> None:
        """Lets all cells go."""
        for slot in self.slots:
            self._keep(slot, 0)

    def _make_room(self, cells: int, but: Sequence[Slot]) -> None:
        """Lets idle slots' cells go, the longest idle first, until those that run have all they
        may need."""
        if self._cache.n_regions > 1:
            return
        idle = [slot for slot in self.free if slot not in but and len(slot.kept)]
        idle.sort(key=lambda slot: slot.used_ns)
        left = sum(len(slot.kept) for slot in idle)
        for slot in idle:
            if self._reserved + cells + left <= self._cache.n_ctx_seq:
                return
            left -= len(slot.kept)
            self._keep(slot, 0)

    def _keep(self, slot: Slot, n: int) -> None:
        slot.kept.cut(n)
        self._cache.remove(slot.sequence, n)
        self._n_kept = None
