"""Which free cells a step's tokens get, and the refusal where there are not enough."""

from __future__ import annotations

import numpy as np

from workbench.common.errors import UsageError
from workbench.engine.cache.room import Room


class FreeCells:
    """Which cells of each region have owners, and how many.

    room: how many cells of a region may have owners.
    in_a_row: a step needs cells in a row.
    n_owners: by region and cell.
    used: how many cells of each region have an owner.
    ends: for each region, the end of the last cell that has an owner.
    n_used: how many cells of all regions have an owner.
    """

    def __init__(self, region_cells: int, room: Room, in_a_row: bool):
        n_regions = room.n_regions
        self.region_cells, self._room, self.in_a_row = region_cells, room, in_a_row
        self.n_owners = np.zeros((n_regions, region_cells), np.int32)
        self.used = np.zeros(n_regions, np.int64)
        self.ends = np.zeros(n_regions, np.int64)
        self.n_used = 0

    def find(self, region: int, n: int) -> np.ndarray:
        """The n lowest free cells of a region, (n,) int64, or the lowest n in a row. Raises
        UsageError where there are not enough."""
        used, end = int(self.used[region]), int(self.ends[region])
        self._room.check(used, n)
        first = region * self.region_cells
        if used == end:  # no holes
            return np.arange(first + end, first + end + n, dtype=np.int64)
        free = self._free(region)
        return (in_a_row(free, n) if self.in_a_row else free[:n]).astype(np.int64) + first

    def next_of_each(self, regions: np.ndarray) -> np.ndarray | None:
        """A free cell of each of these regions, (n,) int64; None where a region has holes, or no
        room."""
        ends = self.ends[regions]
        if (self.used[regions] != ends).any() or (ends >= self._room.each).any():
            return None
        cells: np.ndarray = regions * self.region_cells + ends
        return cells

    def left(self, region: int) -> int:
        """How many more cells of a region may have an owner."""
        return self._room.each - int(self.used[region])

    def has_room(self, region: int, n: int) -> bool:
        """Whether `find` finds n cells."""
        if n > self.left(region):
            return False
        if not self.in_a_row or self.used[region] == self.ends[region]:
            return True
        return first_row(self._free(region), n) is not None

    def check_steps(self, region: int, n: int, n_ubatch: int) -> None:
        """Raises UsageError where n tokens do not fit, or where a step of n_ubatch tokens finds no
        cells in a row."""
        self._room.check(int(self.used[region]), n)
        if self.in_a_row and self.used[region] != self.ends[region]:
            free = self._free(region)
            for begin in range(0, n, n_ubatch):
                taken = in_a_row(free, min(n_ubatch, n - begin))
                free = np.setdiff1d(free, taken, assume_unique=True)

    def _free(self, region: int) -> np.ndarray:
        return np.flatnonzero(self.n_owners[region] == 0)

    def take_one(self, region: int, cell: int) -> None:
        """Gives a free cell of a region its first owner."""
        self.n_owners[region, cell] = 1
        self.used[region] += 1
        self.ends[region] = max(self.ends[region], cell + 1)
        self.n_used += 1

    def take(self, regions: np.ndarray, cells: np.ndarray) -> None:
        """Gives free cells of regions, (n,) each, their first owners."""
        self.n_owners[regions, cells] = 1
        np.add.at(self.used, regions, 1)
        np.maximum.at(self.ends, regions, cells + 1)
        self.n_used += len(cells)

    def let_go(self, regions: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Takes an owner from cells of regions, (n,) each. Returns which cells are free now, (n,)
        bool."""
        self.n_owners[regions, cells] -= 1
        free: np.ndarray = self.n_owners[regions, cells] == 0
        self.n_used -= int(free.sum())
        for region in np.unique(regions).tolist():
            owned = np.flatnonzero(self.n_owners[region, : self.ends[region]])
            self.used[region] = len(owned)
            self.ends[region] = int(owned[-1]) + 1 if len(owned) else 0
        return free

    def move(self, cells: np.ndarray, to: np.ndarray) -> None:
        """Moves the owners of `cells` to the free cells `to`, (n,) each, in the first region."""
        self.n_owners[0, to] = self.n_owners[0, cells]
        self.n_owners[0, cells] = 0
        owned = np.flatnonzero(self.n_owners[0])
        self.ends[0] = int(owned[-1]) + 1 if len(owned) else 0

    def clear(self) -> None:
        """All cells are free."""
        self.n_owners[:] = self.used[:] = self.ends[:] = self.n_used = 0


def in_a_row(free: np.ndarray, n: int) -> np.ndarray:
    """The lowest n cells in a row. free: all free cells, rising. Raises UsageError where no n cells
    are in a row."""
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
    """Where in `free`, rising, the first n cells in a row begin; None where there are no n."""
    if n > len(free):
        return None
    found = np.flatnonzero(free[n - 1 :] - free[: len(free) - n + 1] == n - 1)
    return int(found[0]) if len(found) else None
