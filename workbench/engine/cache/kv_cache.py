"""The KV cache: each cell's position and its sequences, and what attention may see.

K and V of each layer lie at the same cell, on the device. This module only knows who owns a cell. A
cell without an owner is free. Operations change this table at once, and never memory: a step that
is still under way already has its mask, and the stores of a later step come after its reads in
stream order. (llama.cpp: `llama_kv_cells`.)

The cells are one region for all sequences, or a region for each (`kv_cache`):

    unified        a cell can have several owners, which share its K and V (`copy`). A mask spans
                   the cells of all sequences.
    per_sequence   a mask spans the cells of one sequence. A cell has one owner, so `copy` lets K
                   and V be copied before the next step (`copied`). (llama.cpp: streams.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.common.errors import UsageError
from workbench.common.sizes import round_up
from workbench.config import EngineConfig, KVCacheKind, Toggles
from workbench.engine.cache.free_cells import FreeCells
from workbench.engine.cache.growth import Growth
from workbench.engine.cache.masks import HIDDEN, fill, narrow
from workbench.engine.cache.room import Room, check_sequence

EMPTY = np.iinfo(np.int32).max  # a position that no token ever sees
MOST_POSITION = 1 << 30  # of a shift; tokens after it still have positions below EMPTY


def n_regions(toggles: Toggles, config: EngineConfig) -> int:
    """Into how many regions the cells are divided."""
    return config.n_seqs if toggles.kv_cache == KVCacheKind.PER_SEQUENCE else 1


class KVCache:
    """Cells and their owners.

    n_ctx: the cells that the user asked for. Each of n_regions regions has an equal part of them,
        `n_ctx_seq`. A region's cells are padded, so that every extent of `growth` exists.
    n_seqs: sequences have the numbers 0..n_seqs-1. Each has positions of its own.
    in_a_row: the tokens of a step need cells in a row.
    window: the model's sliding window (`masks.py`); 0: none.
    n_cells: the cells of all regions.
    free: which cells have no owner.
    n_changes: how often the cache has changed. Whatever was made for another state is not valid.
    """

    def __init__(
        self, n_ctx: int, pad: int, n_seqs: int = 1, in_a_row: bool = False, n_regions: int = 1,
        growth: Growth | None = None, window: int = 0,
    ):  # fmt: skip
        self.room = Room(n_ctx, n_regions)
        self.room.check_shared()
        self.n_ctx_seq = self.room.each  # most cells of a sequence
        self.pad = pad
        self.n_seqs, self.n_regions, self.window = n_seqs, n_regions, window
        self.region_cells = round_up(self.n_ctx_seq, pad)
        self.n_cells = n_regions * self.region_cells
        self.growth = growth or Growth(pad, self.region_cells)
        self.free = FreeCells(self.region_cells, self.room, in_a_row)
        self.n_changes = 0
        # by sequence and cell of its region: the position, EMPTY where the sequence does not own
        # the cell; and the mask of a token after all of the sequence (float16 as uint16)
        self._positions = np.full((1, self.region_cells), EMPTY, dtype=np.int32)
        self._masks = np.full((1, self.region_cells), HIDDEN, dtype=np.uint16)
        self._next = np.zeros(1, dtype=np.int64)  # by sequence: the position of its next token
        # how many positions each cell has moved since the stored K was rotated, (n_cells,) int32;
        # None where no cell has moved
        self.moved: np.ndarray | None = None
        # rounds of copies before the next step: from a cell to the cell whose K and V it gets
        self.copied: list[dict[int, int]] = []

    # what a step asks and tells ---------------------------------------------------------------

    def length(self, sequence: int = 0) -> int:
        """The position of the next token of a sequence: 0 where it has none."""
        if not 0 <= sequence < len(self._next):
            self.reserve(sequence)
        return int(self._next[sequence])

    def owners(self, cell: int) -> set[int]:
        """The sequences that own a cell."""
        region, at = divmod(cell, self.region_cells)
        owning = np.flatnonzero(self._positions[:, at] != EMPTY)
        return {s for s in owning.tolist() if self.region(s) == region}

    def cells(self, sequence: int) -> np.ndarray:
        """The cells of a sequence, in its region, rising, (n,) int64."""
        return self._own(sequence)[0]

    @property
    def n_used(self) -> int:
        """Cells with an owner."""
        return self.free.n_used

    def region(self, sequence: int) -> int:
        """The region that a sequence's cells are in."""
        return sequence if self.n_regions > 1 else 0

    def first_cell(self, sequence: int) -> int:
        """The first cell of a sequence's region."""
        return self.region(sequence) * self.region_cells

    def find(self, work: Sequence[tuple[int, int]]) -> np.ndarray:
        """Cells for the next tokens of sequences, (T,) int64: the lowest free cells, or the lowest
        in a row. work: each sequence with its number of tokens. Raises UsageError where there are
        not enough."""
        if self.n_regions == 1:
            return self.free.find(0, sum(n for _, n in work))
        for sequence, _ in work:
            self._check(sequence)
        return np.concatenate([self.free.find(self.region(s), n) for s, n in work])

    def next_cells(self, sequences: np.ndarray) -> np.ndarray:
        """As `find`, for one token of each sequence."""
        if self.n_regions == 1:
            return self.free.find(0, len(sequences))
        cells = self.free.next_of_each(sequences)
        if cells is not None:
            return cells
        return self.find([(s, 1) for s in sequences.tolist()])

    def has_room(self, work: Sequence[tuple[int, int]]) -> bool:
        """Whether `find` finds cells for this work."""
        if self.n_regions == 1:
            return self.free.has_room(0, sum(n for _, n in work))
        return all(self.free.has_room(self.region(s), n) for s, n in work)

    def left(self, sequence: int = 0) -> int:
        """How many more tokens a sequence has room for."""
        return self.free.left(self.region(sequence))

    def check_steps(self, sequence: int, n: int, n_ubatch: int) -> None:
        """Raises UsageError where a sequence's next n tokens do not fit, or where steps of n_ubatch
        tokens each do not find cells in a row."""
        self.free.check_steps(self.region(sequence), n, n_ubatch)

    def extent(self, cells: np.ndarray) -> int:
        """How many cells of a region attention looks at once `cells` are filled too: padded, at
        least one pad."""
        if self.n_regions == 1:
            most = max(int(self.free.ends[0]), int(cells[-1]) + 1)
        else:
            regions, at = np.divmod(cells, self.region_cells)
            most = max(int(self.free.ends[regions].max()), int(at.max()) + 1)
        return self.growth.extent(most)

    def mask(
        self, sequence: int, positions: np.ndarray, cells: np.ndarray, out: np.ndarray
    ) -> None:
        """Fills out, (T, n_kv) uint16: float16 bits, 0 where a token sees a cell, else -inf.

        positions (T,) int32 has the next tokens' positions in `sequence`, cells (T,) int64 the
        cells they will have; both rise. A token sees its sequence's cells up to its own position.
        """
        # all other cells of the sequence come before these tokens, so the rows differ only at these
        at = cells - self.first_cell(sequence)
        fill(out, self._masks[sequence, : out.shape[1]], at)
        narrow(out, self.window, positions, self._positions[sequence], at)

    def masks_of_one(
        self, sequences: Sequence[int], cells: np.ndarray, rows: Sequence[int], out: np.ndarray
    ) -> None:
        """As `mask`, for rows of `out` whose token is the only one of its sequence. Such a token
        sees all cells of the sequence, and its own.

        sequences: of these rows. cells: of all rows.
        """
        n_kv, at = out.shape[1], self.in_region(cells)
        for row, sequence in zip(rows, sequences, strict=True):
            out[row] = self._masks[sequence, :n_kv]
            out[row, at[row]] = 0
            if self.window:
                one, stored = slice(row, row + 1), self._positions[sequence]
                narrow(out[one], self.window, self._next[[sequence]], stored, at[one])

    def in_region(self, cells: np.ndarray) -> np.ndarray:
        """The numbers of cells within their regions."""
        return cells if self.n_regions == 1 else cells % self.region_cells

    def store(
        self, sequences: np.ndarray, positions: np.ndarray, cells: np.ndarray
    ) -> Callable[[], None]:
        """Notes the owner and the position of free cells, all (T,), in rising positions. Returns a
        function that undoes it; call that before other cells are stored."""
        if not len(cells):
            return lambda: None
        if len(cells) == 1:  # scalars are twice as fast
            sequence, cell = sequences[0], int(cells[0])
            region, at = divmod(cell, self.region_cells)
            self._positions[sequence, at] = positions[0]
            self._masks[sequence, at] = 0
            self._next[sequence] = positions[0] + 1
            self.free.take_one(region, at)
        else:
            regions, within = np.divmod(cells, self.region_cells)
            self._positions[sequences, within] = positions
            self._masks[sequences, within] = 0
            self._next[sequences] = positions + 1  # the last one counts
            self.free.take(regions, within)
        self.n_changes += 1

        def undo() -> None:
            at = self.in_region(cells)
            still = self._positions[sequences, at] != EMPTY
            self._let_go(sequences[still], at[still])

        return undo

    def reserve(self, sequence: int) -> None:
        """Makes room in the table for a sequence. Raises UsageError where it cannot exist."""
        self._check(sequence)
        have = len(self._next)
        if sequence < have:
            return
        more = min(max(2 * have, sequence + 1), self.n_seqs) - have
        rows = np.full((more, self.region_cells), EMPTY, np.int32)
        self._positions = np.concatenate([self._positions, rows])
        hidden = np.full((more, self.region_cells), HIDDEN, np.uint16)
        self._masks = np.concatenate([self._masks, hidden])
        self._next = np.concatenate([self._next, np.zeros(more, np.int64)])

    # what a user does with sequences ----------------------------------------------------------

    def clear(self) -> None:
        """Removes every sequence."""
        self._positions[:] = EMPTY
        self._masks[:] = HIDDEN
        self._next[:] = 0
        self.free.clear()
        self.moved, self.copied = None, []
        self.n_changes += 1

    def remove(self, sequence: int, begin: int = 0, end: int | None = None) -> None:
        """Takes the cells at positions begin..end-1 (None: all from begin on) from a sequence. The
        next token comes after the last position that is left."""
        cells = self._cells(sequence, begin, end)
        self._let_go(np.full(len(cells), sequence), cells)

    def keep(self, sequence: int) -> None:
        """Removes every other sequence."""
        self._check(sequence)
        for other in range(len(self._next)):
            if other != sequence:
                self.remove(other)

    def copy(self, source: int, to: int, begin: int = 0, end: int | None = None) -> None:
        """Makes `to` an owner of the source's cells at positions begin..end-1. Where `to` has a
        region of its own, it gets as many cells there, and K and V are copied before the next step
        (`copied`). Raises UsageError where `to` has cells at these positions already, or no
        room."""
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
        if self.n_regions > 1:
            cells = self._copies(source, to, cells)
        else:
            self.free.n_owners[0, cells] += 1
        self._positions[to, cells] = positions
        self._masks[to, cells] = 0
        self._set_next(to)
        self.n_changes += 1

    def _copies(self, source: int, to: int, cells: np.ndarray) -> np.ndarray:
        """Cells of `to` that will be copies of the source's `cells`. All are numbers within
        regions."""
        if not len(cells):
            return cells
        region = self.region(to)
        fresh = self.free.find(region, len(cells))
        whence = cells + self.first_cell(source)
        if self.moved is not None:
            self.moved[fresh] = self.moved[whence]
        self._copy(whence, fresh)
        at = fresh - region * self.region_cells
        self.free.take(np.full(len(at), region), at)
        return at

    def _copy(self, cells: np.ndarray, to: np.ndarray) -> None:
        """K and V of `cells`, (n,), are copied to the cells `to` before the next step."""
        if not self.copied or set(to.tolist()) & set(self.copied[-1].values()):
            self.copied.append({})  # a copy onto a source comes after the copy from it
        last = self.copied[-1]
        last.update(zip(to.tolist(), [last.get(c, c) for c in cells.tolist()], strict=True))

    def move(self, cells: np.ndarray, to: np.ndarray) -> None:
        """Moves owners, positions, K and V of `cells` to free cells, (n,) each, in the region that
        all sequences share."""
        for table, none in ((self._positions, EMPTY), (self._masks, HIDDEN)):
            table[:, to] = table[:, cells]
            table[:, cells] = none
        if self.moved is not None:
            self.moved[to], self.moved[cells] = self.moved[cells], 0
        self.free.move(cells, to)
        self._copy(cells, to)
        self.n_changes += 1

    def shift(self, sequence: int, delta: int, begin: int = 0, end: int | None = None) -> None:
        """Moves positions begin..end-1 of a sequence by delta. The stored K is rotated by as much
        before the next step (`moved`). Raises UsageError where a position would be negative, too
        large, or that of another cell of the sequence; and for cells that another sequence owns
        too."""
        cells = self._cells(sequence, begin, end)
        new = self._positions[sequence, cells].astype(np.int64) + delta
        shared = cells[self.free.n_owners[self.region(sequence), cells] > 1]
        if len(shared):  # of a region that several sequences have
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
        moved[cells + self.first_cell(sequence)] += delta if len(cells) else 0
        self.moved = moved if moved.any() else None
        self.n_changes += 1

    def rotated(self) -> None:
        """The stored K has been rotated to the positions."""
        self.moved = None

    def are_copied(self) -> None:
        """The first round of copies has been issued."""
        del self.copied[0]

    def lost(self) -> None:
        """A step was interrupted. So nobody knows how far the K of moved cells is rotated, or which
        copies have been made. Takes these cells from their sequences."""
        unknown = np.zeros(self.n_cells, bool) if self.moved is None else self.moved != 0
        for copies in self.copied:
            unknown[list(copies)] = True
        self.copied = []
        if unknown.any():
            for sequence in range(len(self._next)):
                first = self.first_cell(sequence)
                gone = unknown[first : first + self.region_cells]
                own = np.flatnonzero(gone & (self._positions[sequence] != EMPTY))
                self._let_go(np.full(len(own), sequence), own)
        self.moved = None

    # inside -----------------------------------------------------------------------------------

    def _check(self, sequence: int) -> None:
        check_sequence(sequence, self.n_seqs)

    def _own(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """A sequence's cells, in its region, and their positions."""
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
        """Takes cells, in their regions, from their sequences, (n,) each."""
        regions = sequences if self.n_regions > 1 else np.zeros_like(sequences)
        self._positions[sequences, cells] = EMPTY
        self._masks[sequences, cells] = HIDDEN
        free = self.free.let_go(regions, cells)
        if self.moved is not None:
            self.moved[(regions * self.region_cells + cells)[free]] = 0
            self.moved = self.moved if self.moved.any() else None
        for sequence in np.unique(sequences).tolist():
            self._set_next(sequence)
        self.n_changes += 1

    def _set_next(self, sequence: int) -> None:
        _, positions = self._own(sequence)
        self._next[sequence] = int(positions.max()) + 1 if len(positions) else 0
