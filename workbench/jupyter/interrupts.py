"""Jupyter's interrupt reaches a run that no cell is waiting for.

A kernel reacts to the signal only while a cell runs, in its main thread. A panel's run is in
another thread. So during a run the kernel's main thread has a handler. A cell that runs meanwhile
gets the signal as usual.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def heeded(stop: Callable[[], Any]) -> Iterator[None]:
    """In the body an interrupt of the idle kernel calls `stop`. Does nothing without a kernel.

    Any thread may call it. The kernel's own loop sets the handler, between two messages, because
    around each message the loop sets a handler of its own and then restores the previous one.
    """
    loop = _loop_of_kernel()
    if loop is None:
        yield
        return
    before: list[Any] = []

    def heed(*_: Any) -> None:
        stop()

    def install() -> None:
        before.append(signal.signal(signal.SIGINT, heed))

    def restore() -> None:
        if before and signal.getsignal(signal.SIGINT) is heed:
            signal.signal(signal.SIGINT, before.pop())

    loop.add_callback(install)
    try:
        yield
    finally:
        loop.add_callback(restore)


def _loop_of_kernel() -> Any:
    """The loop of the kernel's main thread; None where there is no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(getattr(shell, "kernel", None), "io_loop", None)
