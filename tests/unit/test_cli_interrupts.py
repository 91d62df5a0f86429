"""A Ctrl-C that strikes where nothing can catch it."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from workbench.cli.interrupts import heeded


class Finalized:
    """Is interrupted when it goes, `times` times in all."""

    def __init__(self, left: list[None]):
        self.left = left

    def __del__(self) -> None:
        if self.left:
            self.left.pop()
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_in_a_finalizer_is_raised_again(times: int):
    left: list[None] = [None] * times
    with heeded(), pytest.raises(KeyboardInterrupt):
        for _ in range(times):
            Finalized(left)
        for _ in range(1000):
            time.sleep(0.01)  # one sleep would be slept to its end
    assert not left


def test_other_errors_there_are_reported_as_before(monkeypatch: pytest.MonkeyPatch):
    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    reported: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: reported.append(u.exc_type))
    before = sys.unraisablehook
    with heeded():
        Broken()
    assert reported == [ValueError] and sys.unraisablehook is before
