"""Which tokens a slot's cells are of, and which slot a prompt should have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.config import SlotChoice
from workbench.engine.draws import FED

if TYPE_CHECKING:
    from workbench.engine.seats import Slot

LEAST_GAIN = 32  # tokens that cells of another sequence must save to be copied


class Kept:
    """The tokens of a sequence's cells, in order. The last ones may be known only later: a device
    has drawn them, and the step that tells is under way."""

    def __init__(self, n_cells: int):
        self._tokens = np.empty(n_cells, np.int32)
        self._n = self.n_known = 0

    def __len__(self) -> int:
        return self._n

    @property
    def tokens(self) -> np.ndarray:
        """Those that are known, (n_known,) int32."""
        return self._tokens[: self.n_known]

    def cut(self, n: int) -> None:
        """Keeps the first n."""
        self._n, self.n_known = min(self._n, n), min(self.n_known, n)

    def extend(self, tokens: np.ndarray) -> None:
        """Tokens that are known; all before them are."""
        self._tokens[self._n : self._n + len(tokens)] = tokens
        self._n += len(tokens)
        self.n_known = self._n

    def add(self, token: int) -> None:
        """One more, FED for one that is not known yet."""
        if token != FED:
            assert self.n_known == self._n
            self._tokens[self._n] = token
            self.n_known += 1
        self._n += 1

    def known(self, token: int, n_behind: int) -> None:
        """A token was drawn; n_behind have been drawn behind it, or will be. The cell of the first
        of these is its own."""
        if n_behind:
            self._tokens[self.n_known] = token
            self.n_known += 1


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens a and b begin with alike."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def slot_for(
    prompt: np.ndarray, free: Sequence[Slot], slots: Sequence[Slot], choice: str
) -> tuple[Slot, Slot | None, int]:
    """The slot of `free` for a prompt; the slot whose cells it should copy, None for its own; and
    of how many tokens it has the cells then. The prompt's last token is always computed.

    longest_prefix: the slot that has most of the prompt, else the one that was used longest ago
    (llama.cpp: `get_available_slot`).
    """
    rest = prompt[:-1]
    alike = {slot.sequence: common(slot.kept.tokens, rest) for slot in slots}
    if choice == SlotChoice.LOWEST_FREE:
        chosen = min(free, key=lambda slot: slot.sequence)
    else:
        chosen = min(free, key=lambda slot: (-alike[slot.sequence], slot.used_ns, slot.sequence))
    best = max(slots, key=lambda slot: alike[slot.sequence])
    own, most = alike[chosen.sequence], alike[best.sequence]
    return (chosen, best, most) if most >= own + LEAST_GAIN else (chosen, None, own)
