"""The KV cache: which cells hold which positions, and what attention may see of them."""

from __future__ import annotations

import numpy as np

from workbench.errors import UsageError

EMPTY = np.iinfo(np.int32).max  # a position no token ever sees
_HIDDEN = np.float16(-np.inf).view(np.uint16)


class KVCache:
    """Cells of one sequence. K and V of each layer lie at the same cell, on the device.

    n_ctx is what the user asked for; `n_cells` is padded, so that every padded extent exists.
    """

    def __init__(self, n_ctx: int, pad: int):
        self.n_ctx = n_ctx
        self.pad = pad
        self.n_cells = padded(n_ctx, pad)
        self.positions = np.full(self.n_cells, EMPTY, dtype=np.int32)
        self._held = np.empty_like(self.positions)
        self.n_used = 0
        self.n_changes = 0  # since it was made; what was made for one state serves no other

    def clear(self) -> None:
        self.positions[:] = EMPTY
        self.n_used = 0
        self.n_changes += 1

    def find(self, n: int) -> np.ndarray:
        """Indices of n free cells, (n,) int64; raises UsageError when the context is full."""
        check_room(self.n_used, n, self.n_ctx)
        return np.arange(self.n_used, self.n_used + n, dtype=np.int64)

    def extent(self, n_new: int) -> int:
        """Cells attention looks at once n_new more are filled: padded, at least one pad."""
        return padded(self.n_used + n_new, self.pad)

    def mask(self, positions: np.ndarray, cells: np.ndarray, n_kv: int) -> np.ndarray:
        """(T, n_kv) float16: 0 where a token sees a cell, -inf elsewhere.

        positions (T,) int32 are the tokens' own, cells (T,) int64 where they will be stored. A
        token sees cells of its sequence that hold its own position or an earlier one.
        """
        held = self._held[:n_kv]
        np.copyto(held, self.positions[:n_kv])
        held[cells] = positions
        hidden = held > positions[:, None]
        return (hidden.view(np.uint8) * _HIDDEN).view(np.float16)

    def store(self, positions: np.ndarray, cells: np.ndarray) -> None:
        """Notes that `cells` now hold `positions`."""
        self.positions[cells] = positions
        self.n_used += len(cells)
        self.n_changes += 1

    def take_back(self, cells: np.ndarray) -> None:
        """Undoes the latest `store`, which was of `cells`."""
        self.positions[cells] = EMPTY
        self.n_used -= len(cells)
        self.n_changes += 1


def padded(n: int, pad: int) -> int:
    """The least multiple of `pad` that is n or more."""
    return -(-n // pad) * pad


def check_room(n_used: int, n_new: int, n_ctx: int) -> None:
    """Raises UsageError where n_used + n_new tokens do not fit a context of n_ctx."""
    if n_used + n_new > n_ctx:
        raise UsageError(
            f"{n_used} + {n_new} tokens do not fit the context of {n_ctx}; "
            "use a longer context (--n-ctx) or fewer tokens"
        )
