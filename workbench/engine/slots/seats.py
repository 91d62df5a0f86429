"""Which slot and which cells a request gets, and which cells stay when it ends.

A slot that is free keeps its cells. A prompt that begins like these cells is computed only from the
token where the two differ.

    a region each    the cells of a slot are its own. A request finds them there, or gets copies
    one region       a request reserves all cells that it may need. Idle slots give up their cells
                     for it; the slot that was used longest ago gives up first

After a step that failed, the slots keep no cells: nobody has computed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.common.errors import UsageError
from workbench.config import SlotChoice
from workbench.engine.slots.asks import Request
from workbench.engine.slots.draws import FED
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.cache.kv_cache import KVCache

LEAST_CELLS = 2  # of a request: for a token of its prompt, and for a token to make
LEAST_GAIN = 32  # tokens that must be saved before cells of another slot are copied


def check_cells(n_cells: int, n_slots: int) -> None:
    """Raises UsageError for a cache in which not all slots can serve a request at once."""
    if n_cells < LEAST_CELLS * n_slots:
        raise UsageError(
            f"{n_slots} slots cannot be used together: the cache has {n_cells} cells (n_ctx), and "
            f"each needs {LEAST_CELLS} at least; use a longer context (--n-ctx), or fewer slots"
        )


class Kept:
    """The tokens of a sequence's cells, in order. The last tokens may be unknown for a while: a
    device has drawn them in a step that is still under way."""

    def __init__(self, n_cells: int):
        self._tokens = np.empty(n_cells, np.int32)
        self._n = self.n_known = 0

    def __len__(self) -> int:
        return self._n

    @property
    def tokens(self) -> np.ndarray:
        """The tokens that are known, (n_known,) int32."""
        return self._tokens[: self.n_known]

    def cut(self, n: int) -> None:
        """Keeps the first n."""
        self._n, self.n_known = min(self._n, n), min(self.n_known, n)

    def extend(self, tokens: np.ndarray) -> None:
        """Adds known tokens. All tokens before them are known."""
        self._tokens[self._n : self._n + len(tokens)] = tokens
        self._n += len(tokens)
        self.n_known = self._n

    def add(self, token: int) -> None:
        """Adds a token; FED where it is not known yet."""
        if token != FED:
            assert self.n_known == self._n
            self._tokens[self._n] = token
            self.n_known += 1
        self._n += 1

    def known(self, token: int, n_later: int) -> None:
        """A token was drawn, and n_later tokens after it were drawn or will be. With the first of
        these the token gets its cell."""
        if n_later:
            self._tokens[self.n_known] = token
            self.n_known += 1


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of a and b."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


class Slot:
    """A sequence, with the request that it serves. kept: the tokens of its cells."""

    def __init__(self, sequence: int, n_cells: int):
        self.sequence = sequence
        self.request: Request | None = None
        self.kept = Kept(n_cells)
        self.used_ns = 0


def slot_for(
    prompt: np.ndarray, free: Sequence[Slot], slots: Sequence[Slot], choice: str
) -> tuple[Slot, Slot | None, int]:
    """The slot of `free` for a prompt, the slot whose cells it copies, and how many tokens of the
    prompt then have cells. The second is None where the slot uses its own cells. The prompt's last
    token is always computed.

    choice: longest_prefix takes the slot that has most of the prompt; of several, the slot that was
        used longest ago (llama.cpp: `get_available_slot`). lowest_free takes the lowest number.
    """
    rest = prompt[:-1]
    alike = {slot.sequence: _common(slot.kept.tokens, rest) for slot in slots}
    if choice == SlotChoice.LOWEST_FREE:
        chosen = min(free, key=lambda slot: slot.sequence)
    else:
        chosen = min(free, key=lambda slot: (-alike[slot.sequence], slot.used_ns, slot.sequence))
    best = max(slots, key=lambda slot: alike[slot.sequence])
    own, most = alike[chosen.sequence], alike[best.sequence]
    return (chosen, best, most) if most >= own + LEAST_GAIN else (chosen, None, own)


class Seats:
    """n slots of a cache. choice: a value of `slot_choice`."""

    def __init__(self, cache: KVCache, n: int, choice: str):
        self.slots = [Slot(i, cache.region_cells) for i in range(n)]
        self._cache, self._choice = cache, choice
        self._n_kept: int | None = 0  # None: it may have changed
        self._reserved = 0  # cells of all running requests, where they share a region

    @property
    def free(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.request is None]

    @property
    def n_kept(self) -> int:
        """How many cells free slots keep."""
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
        """A slot for a request. None where there is no slot, or where some of the cells that the
        request may need are missing. The request's `n_cached` then says how many tokens of its
        prompt have cells already."""
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
        """Takes a request that has ended from its slot. keeps: the slot keeps the cells whose
        tokens are known; otherwise it keeps none."""
        slot.request = None
        self._reserved -= request.cells
        slot.used_ns = now_ns()
        self._keep(slot, slot.kept.n_known if keeps else 0)

    def forget(self) -> None:
        """No slot keeps any cells."""
        for slot in self.slots:
            self._keep(slot, 0)

    def _make_room(self, cells: int, but: Sequence[Slot]) -> None:
        """Takes cells from idle slots until all running requests have the cells that they may need.
        The slot that was used longest ago gives up its cells first.

        cells: of one more request.
        but: slots that keep their cells.
        """
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
