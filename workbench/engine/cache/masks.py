"""Masks: which cells of the KV cache a token sees. float16 bits: 0 where it sees a cell, else
HIDDEN.

Among the tokens of one step, each sees itself and those before it.

A model may declare a sliding window of W positions (`attention.sliding_window` in its file). Then a
token sees itself and the W - 1 positions before it, in every layer. (llama.cpp: `is_masked_swa`,
standard windows. Its llama, qwen2 and qwen3 read no window from a file.) Cells that the window has
passed stay in the cache. They are masked, and `skip_masked_kv=classes` leaves them unread.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

HIDDEN = np.float16(-np.inf).view(np.uint16)


def fill(out: np.ndarray, seen: np.ndarray, own: np.ndarray) -> None:
    """Fills out, (T, n_kv) uint16, for T tokens in the order of their positions.

    seen: the mask that all of them have in common, (n_kv,) uint16.
    own: the tokens' cells, (T,) int64, rising.
    """
    first, end = int(own[0]), int(own[-1]) + 1
    if end - first == len(own):
        out[:, :first], out[:, end:] = seen[:first], seen[end:]
        out[:, first:end] = _causal(len(own))
    else:
        out[:] = seen
        out[:, own] = _causal(len(own))


def _causal(n: int) -> np.ndarray:
    """A mask (n, n) uint16 whose row i hides everything after i. All rows are windows of one line
    of 2n - 1 values, so no matrix is made."""
    line = np.full(2 * n - 1, HIDDEN)
    line[:n] = 0
    return sliding_window_view(line, n)[::-1]


def narrow(
    mask: np.ndarray, window: int, positions: np.ndarray, stored: np.ndarray, own: np.ndarray
) -> None:
    """Hides in mask, (T, n_kv) uint16, the cells that are `window` positions or more before a
    token. Hides nothing where `window` is 0.

    positions: of the tokens, (T,).
    stored: the positions of the cells of their sequence, at least n_kv; any value for a cell that
        the sequence does not own.
    own: the tokens' cells, (T,).
    """
    if not window:
        return
    of_cells = stored[: mask.shape[1]].astype(np.int64)
    of_cells[own] = positions
    mask[positions[:, None] - of_cells >= window] = HIDDEN
