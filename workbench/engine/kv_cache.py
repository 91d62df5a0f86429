"""The KV cache: each cell's position and its sequences, and what attention may see.

K and V of each layer lie at the same cell, on the device. Here is only who owns a cell. A cell can
have several owners (`copy`), which then share its K and V; it is free when it has none. Operations
change this table at once and memory never: a step that is still under way has its mask already, and
the stores of a later step come behind its reads in stream order. (llama.cpp: `llama_kv_cells`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.config import EngineConfig, KVGrowth, Toggles
from workbench.errors import UsageError
from workbench.sizes import round_up

EMPTY = np.iinfo(np.int32).max  # a position no token ever sees
MOST_POSITION = 1 << 30  # of a shift; tokens behind it have positions below EMPTY
_HIDDEN = np.float16(-np.inf).view(np.uint16)


def kv_pad(toggles: Toggles, config: EngineConfig) -> int:
    """What the extent of a step is a multiple of, in cells: with kv_growth=full the whole cache."""
    if toggles.kv_growth == KVGrowth.FULL:
        return round_up(config.n_ctx, config.n_kv_pad)
    return config.n_kv_pad


class KVCache:
    """Cells and their owners. n_ctx is what the user asked for; `n_cells` is padded, so that every
    extent, a multiple of `pad`, exists. Sequences have the numbers 0..n_seqs-1; each has positions
    of its own.

    in_a_row: the tokens of a step want cells one behind the other.
    n_used: cells with an owner. n_changes: since it was made; what was made for one state of the
    cache serves no other.
    """

    def __init__(self, n_ctx: int, pad: int, n_seqs: int = 1, in_a_row: bool = False):
        self.n_ctx = n_ctx
        self.pad = pad
        self.n_seqs = n_seqs
        self._in_a_row = in_a_row
        self.n_cells = round_up(n_ctx, pad)
        self.n_used = 0
        self.n_changes = 0
        self._end = 0  # behind the last cell with an owner
        self._n_owners = np.zeros(self.n_cells, dtype=np.int32)
        # by sequence and cell: the position, EMPTY where the cell is not the sequence's; and the
        # mask for a token behind all of the sequence (float16 as uint16)
        self._positions = np.full((1, self.n_cells), EMPTY, dtype=np.int32)
        self._masks = np.full((1, self.n_cells), _HIDDEN, dtype=np.uint16)
        self._next = np.zeros(1, dtype=np.int64)  # by sequence: the position of its next token
        # by how many positions each cell has moved since the stored K was rotated, (n_cells,)
        # int32; None where no cell has
        self.moved: np.ndarray | None = None

    # what a step asks and tells ---------------------------------------------------------------

    def length(self, sequence: int = 0) -> int:
        """The position of the next token of a sequence: 0 where it has none."""
        if not 0 <= sequence < len(self._next):
            self.reserve(sequence)
        return int(self._next[sequence])

    def owners(self, cell: int) -> set[int]:
        """The sequences that own a cell."""
        return set(np.flatnonzero(self._positions[:, cell] != EMPTY).tolist())

    def find(self, n: int) -> np.ndarray:
        """Indices of the n lowest free cells, (n,) int64, or of the lowest n in a row. Raises
        UsageError where there are none."""
        check_room(self.n_used, n, self.n_ctx)
        if self.n_used == self._end:  # no holes
            return np.arange(self._end, self._end + n, dtype=np.int64)
        free = np.flatnonzero(self._n_owners == 0)
        return (in_a_row(free, n) if self._in_a_row else free[:n]).astype(np.int64)

    def has_room(self, n: int) -> bool:
        """Whether `find` finds n cells."""
        if self.n_used + n > self.n_ctx:
            return False
        if not self._in_a_row or self.n_used == self._end:
            return True
        return _first_row(np.flatnonzero(self._n_owners == 0), n) is not None

    def check_steps(self, n: int, n_ubatch: int) -> None:
        """Raises UsageError where steps of n_ubatch tokens each, n in all, do not find cells in a
        row. That n cells are free is known."""
        if self._in_a_row and self.n_used != self._end:
            free = np.flatnonzero(self._n_owners == 0)
            for begin in range(0, n, n_ubatch):
                taken = in_a_row(free, min(n_ubatch, n - begin))
                free = np.setdiff1d(free, taken, assume_unique=True)

    def extent(self, cells: np.ndarray) -> int:
        """Cells attention looks at once `cells` are filled, too: padded, at least one pad."""
        return round_up(max(self._end, int(cells[-1]) + 1), self.pad)

    def mask(
        self, sequence: int, positions: np.ndarray, cells: np.ndarray, out: np.ndarray
    ) -> None:
        """Fills out, (T, n_kv) uint16: float16 bits, 0 where a token sees a cell, else -inf.

        positions (T,) int32 has the next tokens' positions in `sequence`, and cells (T,) int64 the
        cells they will have. A token sees its sequence's cells up to its own position.
        """
        # all that the sequence has lies before these tokens, so only they differ among themselves
        out[:] = self._masks[sequence, : out.shape[1]]
        first, behind = int(cells[0]), int(cells[-1]) + 1
        own = slice(first, behind) if behind - first == len(cells) else cells
        out[:, own] = np.multiply((positions > positions[:, None]).view(np.uint8), _HIDDEN)

    def masks_of_one(
        self, sequences: np.ndarray, cells: np.ndarray, rows: Sequence[int], out: np.ndarray
    ) -> None:
        """As `mask`, for rows of out whose token is the only one of its sequence: the token sees
        all cells of the sequence, and its own."""
        n_kv = out.shape[1]
        for row in rows:
            out[row] = self._masks[sequences[row], :n_kv]
            out[row, cells[row]] = 0

    def store(
        self, sequences: np.ndarray, positions: np.ndarray, cells: np.ndarray
    ) -> Callable[[], None]:
        """Notes the owner and position of free cells, all (T,), in rising positions. Returns what
        takes these cells from these sequences again; call it before others are stored."""
        if not len(cells):
            return lambda: None
        if len(cells) == 1:  # scalars are twice as fast
            sequence, cell = sequences[0], cells[0]
            self._positions[sequence, cell] = positions[0]
            self._masks[sequence, cell] = 0
            self._n_owners[cell] = 1
            self._next[sequence] = positions[0] + 1
        else:
            self._positions[sequences, cells] = positions
            self._masks[sequences, cells] = 0
            self._n_owners[cells] = 1
            self._next[sequences] = positions + 1  # the last one counts
        self.n_used += len(cells)
        self._end = max(self._end, int(cells[-1]) + 1)
        self.n_changes += 1

        def undo() -> None:
            still = self._positions[sequences, cells] != EMPTY
            self._let_go(sequences[still], cells[still])

        return undo

    def reserve(self, sequence: int) -> None:
        """Makes room in the table for a sequence. Raises UsageError where it cannot exist."""
        self._check(sequence)
        have = len(self._next)
        if sequence < have:
            return
        more = min(max(2 * have, sequence + 1), self.n_seqs) - have
        rows = np.full((more, self.n_cells), EMPTY, np.int32)
        self._positions = np.concatenate([self._positions, rows])
        hidden = np.full((more, self.n_cells), _HIDDEN, np.uint16)
        self._masks = np.concatenate([self._masks, hidden])
        self._next = np.concatenate([self._next, np.zeros(more, np.int64)])

    # what a user does with sequences ----------------------------------------------------------

    def clear(self) -> None:
        """Removes every sequence."""
        self._positions[:] = EMPTY
        self._masks[:] = _HIDDEN
        self._n_owners[:] = 0
        self._next[:] = 0
        self.n_used = self._end = 0
        self.moved = None
        self.n_changes += 1

    def remove(self, sequence: int, begin: int = 0, end: int | None = None) -> None:
        """Takes the cells at positions begin..end-1 (None: all from begin on) from a sequence. The
        next token comes behind the last position that is left."""
        cells = self._cells(sequence, begin, end)
        self._let_go(np.full(len(cells), sequence), cells)

    def keep(self, sequence: int) -> None:
        """Removes every other sequence."""
        self._check(sequence)
        for other in range(len(self._next)):
            if other != sequence:
                self.remove(other)

    def copy(self, source: int, to: int, begin: int = 0, end: int | None = None) -> None:
        """Makes `to` an owner of the source's cells at positions begin..end-1. Nothing is copied in
        memory. Raises UsageError where `to` has cells at these positions already."""
        self._check(to)
        cells = self._cells(source, begin, end)
        self.reserve(to)
        positions = self._positions[source, cells]
        taken = np.intersect1d(positions, self._own(to)[1])
        if source == to or len(taken):
            at = f"position {taken[0]}" if len(taken) else "every position"
            raise UsageError(
                f"sequence {to} has a cell at {at} already; remove its cells before copying "
                f"sequence {source} into it"
            )
        self._positions[to, cells] = positions
        self._masks[to, cells] = 0
        self._n_owners[cells] += 1
        self._set_next(to)
        self.n_changes += 1

    def shift(self, sequence: int, delta: int, begin: int = 0, end: int | None = None) -> None:
        """Moves positions begin..end-1 of a sequence by delta. Before the next step the stored K is
        rotated as far (`moved`). Raises UsageError where a position would be negative, too large or
        taken by the sequence's other cells, and for cells that another sequence owns, too."""
        cells = self._cells(sequence, begin, end)
        new = self._positions[sequence, cells].astype(np.int64) + delta
        shared = cells[self._n_owners[cells] > 1]
        if len(shared):
            others = sorted(self.owners(int(shared[0])) - {sequence})
            raise UsageError(
                f"sequence {sequence} shares the cell at position "
                f"{self._positions[sequence, shared[0]]} with sequence {others[0]}; remove one of "
                "them before shifting"
            )
        if len(new) and new.min() < 0:
            raise UsageError(
                f"a shift by {delta} would move position {new.min() - delta} of sequence "
                f"{sequence} to {new.min()}; remove the positions below {-delta} first"
            )
        if len(new) and new.max() > MOST_POSITION:
            raise UsageError(
                f"a shift by {delta} would move position {new.max() - delta} of sequence "
                f"{sequence} to {new.max()}; positions go up to {MOST_POSITION}"
            )
        mine, positions = self._own(sequence)
        taken = np.intersect1d(new, positions[~np.isin(mine, cells)])
        if len(taken):
            raise UsageError(
                f"a shift by {delta} would move a cell of sequence {sequence} to position "
                f"{taken[0]}, which another of its cells has; remove that one first"
            )
        self._positions[sequence, cells] = new
        self._set_next(sequence)
        moved = np.zeros(self.n_cells, np.int32) if self.moved is None else self.moved
        moved[cells] += delta if len(cells) else 0
        self.moved = moved if moved.any() else None
        self.n_changes += 1

    def rotated(self) -> None:
        """The stored K is where the positions are."""
        self.moved = None

    def lost(self) -> None:
        """Nobody knows how far the K of moved cells is: takes these from their sequences."""
        if self.moved is None:
            return
        moved = np.flatnonzero(self.moved)  # each has one owner or more
        for sequence in range(len(self._next)):
            own = moved[self._positions[sequence, moved] != EMPTY]
            self._let_go(np.full(len(own), sequence), own)
        self.moved = None

    # inside -----------------------------------------------------------------------------------

    def _check(self, sequence: int) -> None:
        if not 0 <= sequence < self.n_seqs:
            raise UsageError(
                f"sequence {sequence} does not exist; this engine has 0 to {self.n_seqs - 1} "
                "(n_seqs)"
            )

    def _own(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """A sequence's cells and their positions."""
        row = self._positions[sequence]
        cells = np.flatnonzero(row != EMPTY)
        return cells, row[cells]

    def _cells(self, sequence: int, begin: int, end: int | None) -> np.ndarray:
        """A sequence's cells at positions begin..end-1."""
        self.reserve(sequence)
        cells, positions = self._own(sequence)
        last = EMPTY if end is None else end
        if not 0 <= begin <= last:
            raise UsageError(
                f"positions {begin} to {end} are no range; give 0 <= begin <= end, or end=None"
            )
        return cells[(begin <= positions) & (positions < last)]

    def _let_go(self, sequences: np.ndarray, cells: np.ndarray) -> None:
        """Takes cells from their sequences, (n,) each."""
        self._positions[sequences, cells] = EMPTY
        self._masks[sequences, cells] = _HIDDEN
        self._n_owners[cells] -= 1
        free = cells[self._n_owners[cells] == 0]
        self.n_used -= len(free)
        if self.moved is not None:
            self.moved[free] = 0
            self.moved = self.moved if self.moved.any() else None
        used = np.flatnonzero(self._n_owners[: self._end])
        self._end = int(used[-1]) + 1 if len(used) else 0
        for sequence in np.unique(sequences).tolist():
            self._set_next(sequence)
        self.n_changes += 1

    def _set_next(self, sequence: int) -> None:
        _, positions = self._own(sequence)
        self._next[sequence] = int(positions.max()) + 1 if len(positions) else 0


def in_a_row(free: np.ndarray, n: int) -> np.ndarray:
    """The lowest n of free cells, rising, that are one behind the other. Raises UsageError where
    there are none."""
    at = _first_row(free, n)
    if at is None:
        pieces = np.split(free, np.flatnonzero(np.diff(free) > 1) + 1)
        raise UsageError(
            f"a step of {n} tokens finds no {n} free cells in a row: the most in a row of the "
            f"cache's {len(free)} free cells are {max(map(len, pieces))}; remove more sequences "
            "(reset removes all), give fewer tokens at once, or use graph_reuse=set_rows"
        )
    return free[at : at + n]


def _first_row(free: np.ndarray, n: int) -> int | None:
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
