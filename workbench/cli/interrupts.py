"""Ctrl-C, SIGTERM and SIGHUP end a command cleanly at any time. They arrive as KeyboardInterrupt,
so that finished measurements are kept, and nothing is left half written.

Python raises KeyboardInterrupt in whatever the main thread runs. That may be a finalizer, or a
callback from compiled code. There nothing can catch it, and the interpreter drops it: a generation
that was told to stop would go on. So an interrupt that was dropped is raised again.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench.common.errors import Kept

AGAIN_S = 0.01  # by then the finalizer has ended, or the next interrupt is dropped too
WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
}


class Stop:
    """The latest signal."""

    def __init__(self) -> None:
        self.signal = signal.SIGINT

    @property
    def status(self) -> int:
        """The exit status, as shells define it."""
        return 128 + self.signal

    def words(self, interrupt: KeyboardInterrupt) -> str:
        """The message, which tells whether anything was kept."""
        kept = "; what was finished is kept" if isinstance(interrupt, Kept) else ""
        return WORDS[self.signal] + kept

    def strike(self, number: int, frame: Any) -> None:
        self.signal = signal.Signals(number)
        raise KeyboardInterrupt


@contextmanager
def heeded(stop: Stop | None = None) -> Iterator[None]:
    """In the body the signals of WORDS raise KeyboardInterrupt, and `stop` notes which signal came.
    Ignored signals stay ignored. A dropped interrupt is raised again AGAIN_S seconds later."""
    before = sys.unraisablehook
    stop = stop or Stop()
    again: threading.Timer | None = None

    def raise_again(unraisable: Any) -> None:
        nonlocal again
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
        elif again is None or not again.is_alive():  # several presses are one
            again = threading.Timer(AGAIN_S, _thread.interrupt_main, [stop.signal])
            again.daemon = True
            again.start()

    handled = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                handled[number] = signal.signal(number, stop.strike)
    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number, handler in handled.items():
            signal.signal(number, handler)
