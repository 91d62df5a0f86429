"""Which free cells a step's tokens get, and what is said where there are none."""

from __future__ import annotations

import numpy as np

from workbench.errors import UsageError


def in_a_row(free: np.ndarray, n: int) -> np.ndarray:
    """The lowest n of free cells, rising, that are one behind the other. Raises UsageError where
    there are none."""
    at = first_row(free, n)
    if at is None:
        pieces = np.split(free, np.flatnonzero(np.diff(free) > 1) + 1)
        raise UsageError(
            f"a step of {n} tokens finds no {n} free cells in a row: the most in a row of the "
            f"cache's {len(free)} free cells are {max(map(len, pieces))}; remove more sequences "
            "(reset removes all), give fewer tokens at once, or use graph_reuse=set_rows"
        )
    return free[at : at + n]


def first_row(free: np.ndarray, n: int) -> int | None:
    """Where in `free`, rising, the first n begin that are one behind the other."""
    if n > len(free):
        return None
    found = np.flatnonzero(free[n - 1 :] - free[: len(free) - n + 1] == n - 1)
    return int(found[0]) if len(found) else None


def check_room(n_used: int, n_new: int, n_ctx: int) -> None:
    """Raises UsageError where n_used + n_new tokens do not fit a context of n_ctx."""
    if n_used + n_new > n_ctx:
        raise UsageError(
            f"{n_used} + {n_new} tokens do not fit the context of {n_ctx}; "
            "use a longer context (--n-ctx) or fewer tokens"
        )
