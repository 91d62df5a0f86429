"""Converts times of CUPTI's clock to the recorder's clock.

CUPTI uses CLOCK_REALTIME, also for the device's times; the recorder uses the monotonic clock. Both
are read at each end of a window, in brackets: host, CUPTI, host. The narrowest of many brackets
counts. Between the two readings the offset is interpolated. CUPTI could instead use the recorder's
clock, through a callback for timestamps. But it would call for every record, and with such a
callback CUPTI 12.6 to 13.0 writes zero timestamps (pytorch#192021).
"""

from collections.abc import Callable
from typing import NamedTuple

from workbench.trace.spans import now_ns

BRACKETS = 64  # readings of both clocks; the narrowest counts


class Reading(NamedTuple):
    """Both clocks at one moment. error_ns: half the bracket, the largest error of that moment."""

    host_ns: int
    cupti_ns: int
    error_ns: int


def read_clocks(timestamp: Callable[[], int], now: Callable[[], int] = now_ns) -> Reading:
    """The reading with the narrowest of BRACKETS brackets."""
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
    """The conversion between two readings."""

    first: Reading
    last: Reading

    def to_host(self, ns: int) -> int:
        """The recorder's time for CUPTI's time `ns`. It is linear in `ns`, also outside of the
        readings, because the clocks drift apart slowly."""
        start, end = self.first, self.last
        offset = start.host_ns - start.cupti_ns
        passed = end.cupti_ns - start.cupti_ns
        if passed <= 0:
            return ns + offset
        drift = end.host_ns - end.cupti_ns - offset
        return ns + offset + round(drift * (ns - start.cupti_ns) / passed)

    @property
    def error_ns(self) -> int:
        """The largest error of `to_host` between the readings: the wider bracket, plus the whole
        drift, because the clocks may have drifted in one moment."""
        start, end = self.first, self.last
        drift = (end.host_ns - end.cupti_ns) - (start.host_ns - start.cupti_ns)
        return max(start.error_ns, end.error_ns) + abs(drift)
