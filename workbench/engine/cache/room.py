"""How many tokens a sequence may have. A cache, a test or a command asks this before it begins.

The cells of a cache are one region for all sequences, or a region for each (`kv_cache`). With a
region for each, a sequence has its part of the cells, and cannot get more.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.common.errors import UsageError


class Room(NamedTuple):
    """The room of a cache.

    n_ctx: the cells of all regions together, as the user asked for them.
    n_regions: how many regions share them.
    """

    n_ctx: int
    n_regions: int = 1

    @property
    def each(self) -> int:
        """The most cells of a region, and so the most tokens of a sequence."""
        return self.n_ctx // self.n_regions

    def check_shared(self) -> None:
        """Raises UsageError where there are fewer cells than regions."""
        if not self.each:
            raise UsageError(
                f"n_ctx={self.n_ctx} cells cannot be shared out to {self.n_regions} sequences "
                "(n_seqs); use a longer context, fewer sequences (--n-seqs), or kv_cache=unified"
            )

    def check(self, n_used: int, n_new: int) -> None:
        """Raises UsageError where n_used + n_new tokens do not fit a region."""
        if n_used + n_new > self.each:
            raise UsageError(
                f"{n_used} + {n_new} tokens do not fit the context of {self.words}; use a longer "
                f"context (--n-ctx){self._fewer} or fewer tokens"
            )

    @property
    def words(self) -> str:
        """`2048`, or `32 that each of 64 sequences has of n_ctx=2048`."""
        if self.n_regions == 1:
            return f"{self.n_ctx}"
        return f"{self.each} that each of {self.n_regions} sequences has of n_ctx={self.n_ctx}"

    @property
    def is_full(self) -> str:
        """One line on a generation that ended because this room is full, and how to get more."""
        if self.n_regions == 1:
            more = f"give -c {2 * self.n_ctx} for more"
            return f"stopped at n_ctx={self.n_ctx}: the context is full; {more}"
        return (
            f"stopped at {self.each} tokens: the context is full, since each of {self.n_regions} "
            f"sequences has its part of n_ctx={self.n_ctx}; give -c {2 * self.n_ctx}, or fewer "
            "sequences (--n-seqs), for more"
        )

    @property
    def _fewer(self) -> str:
        return ", fewer sequences (--n-seqs)" if self.n_regions > 1 else ""


def check_sequence(sequence: int, n_seqs: int) -> None:
    """Raises UsageError where an engine of n_seqs sequences does not have this one."""
    if not 0 <= sequence < n_seqs:
        have = "0 alone" if n_seqs == 1 else f"0 to {n_seqs - 1}"
        raise UsageError(
            f"sequence {sequence} does not exist; this engine has {have} (n_seqs={n_seqs}); load "
            f"it with n_seqs={max(sequence, 0) + 1} or more"
        )
