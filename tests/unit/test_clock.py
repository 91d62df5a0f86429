"""CUPTI's clock and the recorder's: how both are read at once, and what lies between readings."""

from __future__ import annotations

from tests.unit.fake_cupti import OFFSET_NS, FakeCupti
from workbench.trace.cupti.clock import Clock, Reading, read_clocks


def test_the_narrowest_bracket_counts():
    ticks = iter([0, 100, *[1000 + 50 * i for i in range(4)], *range(10_000, 30_000, 100)])
    read = read_clocks(lambda: 5_000, lambda: next(ticks))
    # brackets: 0..100, 1000..1050, 1100..1150, then 100 wide
    assert read == Reading(1025, 5_000, 25)


def test_a_slow_reading_does_not_count():
    cupti = FakeCupti()
    cupti.lags = [2_000_000]
    read = read_clocks(cupti.get_timestamp)
    assert read.error_ns < 500_000
    assert abs(read.host_ns + OFFSET_NS - read.cupti_ns) <= read.error_ns


def test_clocks_that_part_are_interpolated_and_the_error_says_so():
    clock = Clock(Reading(1_000, 501_000, 40), Reading(2_100, 502_000, 30))
    assert [clock.to_host(t) for t in (501_000, 501_500, 502_000)] == [1_000, 1_550, 2_100]
    assert clock.error_ns == 40 + 100
    still = Clock(Reading(1_000, 501_000, 40), Reading(1_000, 501_000, 40))
    assert still.to_host(501_007) == 1_007 and still.error_ns == 40
