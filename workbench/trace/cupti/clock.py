"""CUPTI's clock on the recorder's.

CUPTI stamps with CLOCK_REALTIME (and brings the device's own times to it), the recorder with the
monotonic clock. One reading at each end of a window takes the narrowest of many brackets host,
CUPTI, host; in between the offset is interpolated. CUPTI could call back for its timestamps and so
use the recorder's clock. But it would call for every record, and with such a callback CUPTI 12.6 to
13.0 writes zero timestamps (pytorch#192021).
"""

from collections.abc import Callable
from typing import NamedTuple

from workbench.trace.spans import now_ns

BRACKETS = 64  # readings of both clocks; the narrowest counts


class Reading(NamedTuple):
    """Both clocks at one moment; error_ns: half the bracket, the most that moment can be off."""

    host_ns: int
    cupti_ns: int
    error_ns: int


def read_clocks(timestamp: Callable[[], int], now: Callable[[], int] = now_ns) -> Reading:
    """The narrowest of BRACKETS brackets."""
    best: Reading | None = None
    for _ in range(BRACKETS):
        before = now()
        there = timestamp()
        after = now()
        error = (after - before + 1) // 2
        if best is None or error < best.error_ns:
            best = Reading((before + after) // 2, there, error)
    assert best is not None
    return best


class Clock(NamedTuple):
    """CUPTI's clock on the recorder's, between two readings."""

    first: Reading
    last: Reading

    def to_host(self, ns: int) -> int:
        """Linear between the readings (and beyond): the two clocks are slewed apart slowly."""
        start, end = self.first, self.last
        offset = start.host_ns - start.cupti_ns
        passed = end.cupti_ns - start.cupti_ns
        if passed <= 0:
            return ns + offset
        drift = end.host_ns - end.cupti_ns - offset
        return ns + offset + round(drift * (ns - start.cupti_ns) / passed)

    @property
    def error_ns(self) -> int:
        """The most that `to_host` can be off between the readings: the wider bracket, and all
        that the clocks moved apart, because they may have moved at one moment."""
        start, end = self.first, self.last
        drift = (end.host_ns - end.cupti_ns) - (start.host_ns - start.cupti_ns)
        return max(start.error_ns, end.error_ns) + abs(drift)
