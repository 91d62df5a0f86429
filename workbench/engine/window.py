"""Sliding windows: what a token does not see any more.

A model may declare a window of W positions (`attention.sliding_window` in its file). A token then
sees itself and the W - 1 positions before it, in every layer. (llama.cpp: `is_masked_swa`, standard
windows. Its llama, qwen2 and qwen3 read no window from a file.) Cells behind the window stay in the
cache. They are masked, and `skip_masked_kv=classes` leaves them unread.
"""

import numpy as np

_HIDDEN = np.float16(-np.inf).view(np.uint16)


def narrow(
    mask: np.ndarray, window: int, positions: np.ndarray, stored: np.ndarray, own: np.ndarray
) -> None:
    """Hides in mask, (T, n_kv) uint16, what lies `window` positions or more before a token; nothing
    where that is 0.

    positions: of the tokens, (T,). stored: of the cells of their sequence, at least n_kv; any for a
    cell that is not the sequence's. own: the tokens' cells, (T,).
    """
    if not window:
        return
    of_cells = stored[: mask.shape[1]].astype(np.int64)
    of_cells[own] = positions
    mask[positions[:, None] - of_cells >= window] = _HIDDEN
