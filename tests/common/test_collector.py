"""Python's garbage collector around what is timed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from workbench.benchmarks.compare.rounds import interleave
from workbench.common.collector import only_new_collected


class Knot:
    """An object that only the collector can end: it holds itself."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_what_was_made_before_is_not_looked_at():
    """Old garbage stays until the end, new garbage goes; afterwards the collector has both."""
    before = Knot()
    old = weakref.ref(before)
    with only_new_collected():
        del before
        new = weakref.ref(Knot())
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None


def test_garbage_of_before_is_collected_first():
    gone = weakref.ref(Knot())
    with only_new_collected():
        assert gone() is None


def test_what_the_caller_froze_stays_frozen():
    """A server freezes what it loaded, once."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    with only_new_collected():
        assert gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_rounds_are_measured_so_also_where_one_fails():
    seen = list[bool]()

    def measure(round_: int, arm: int) -> int:
        seen.append(gc.get_freeze_count() > 0)
        if round_ == 1:
            raise KeyboardInterrupt
        return arm

    with pytest.raises(KeyboardInterrupt):
        interleave(range(3), 2, measure)
    assert seen == [True] * 3
