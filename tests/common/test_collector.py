"""Python's garbage collector around what is timed."""

from __future__ import annotations

import gc

import pytest

from workbench.benchmarks.compare.rounds import interleave


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_off_while_an_arm_is_measured(on):
    """Between two arms, and after a failure, it is as the caller had it."""
    during, between = list[bool](), list[bool]()

    def rounds():
        for round_ in range(3):
            between.append(gc.isenabled())
            yield round_

    def measure(round_: int, arm: int) -> int:
        during.append(gc.isenabled())
        if (round_, arm) == (2, 1):
            raise KeyboardInterrupt
        return arm

    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(KeyboardInterrupt):
            interleave(rounds(), 2, measure)
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()
    assert between == [on] * 3 and not any(during) and len(during) == 5
