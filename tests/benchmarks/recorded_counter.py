"""The energy counter of an H100 as it was read once, played back on a clock of its own."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READINGS: dict[str, Any] = json.loads(Path(__file__).with_name("energy_readings.json").read_text())


class RecordedCounter:
    """Plays a stretch of readings over and over.

    what: `idle`, `matmul`, `read` (from memory) or `after_read`; or rows of (ns, mJ).
    read_ns: the time of a read, as recorded.
    work_ns: how much later it is at a look at the clock without a read before it, as if work had
        been done.
    """

    name = "a recorded counter"

    def __init__(self, what: str | Sequence[Sequence[int]], work_ns: int = 0, slower: int = 1):
        rows = READINGS[what] if isinstance(what, str) else what
        us = READINGS["read_us"][what] if isinstance(what, str) else 3000
        self.read_ns = int(1e3 * us)
        # the first change is of a part of an update that was missed
        self.ns = [slower * (row[0] - rows[1][0]) for row in rows[1:]]
        self.mj = [slower * (row[1] - rows[1][1]) for row in rows[1:]]
        self.now, self.work_ns = 0, work_ns
        self.n_reads, self._has_read = 0, False

    def now_ns(self) -> int:
        self.now += 0 if self._has_read else self.work_ns
        self._has_read = False
        return self.now

    def read_mj(self) -> int:
        self.now += self.read_ns
        self.n_reads, self._has_read = self.n_reads + 1, True
        whole, at = divmod(self.now, self.ns[-1]) if self.ns[-1] else (0, 0)
        return whole * self.mj[-1] + self.mj[bisect_right(self.ns, at) - 1]

    def watts(self) -> float:
        """The mean power of the stretch."""
        return self.mj[-1] * 1e6 / self.ns[-1]
