"""Ctrl-C is heeded wherever it strikes.

Python raises KeyboardInterrupt in whatever the main thread runs: in a finalizer too, and in a
callback from compiled code, where nothing can catch it and the interpreter drops it. A generation
that is pressed to stop then goes on.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_S = (
    0.01  # until then the finalizer has ended, or the next interrupt is dropped like the first
)


@contextmanager
def heeded() -> Iterator[None]:
    """Within, an interrupt that is dropped is raised again AGAIN_S seconds later."""
    before = sys.unraisablehook
    again: threading.Timer | None = None

    def raise_again(unraisable: Any) -> None:
        nonlocal again
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
        elif again is None or not again.is_alive():  # several presses are one
            again = threading.Timer(AGAIN_S, _thread.interrupt_main)
            again.daemon = True
            again.start()

    sys.unraisablehook = raise_again
    try:
        yield
    finally:
        sys.unraisablehook = before
