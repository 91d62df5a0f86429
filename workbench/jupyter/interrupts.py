"""Jupyter's interrupt reaches a run that no cell is waiting for.

A kernel heeds the signal only while a cell runs, in its main thread; a panel's run is in another.
So for as long as it lasts the kernel's main thread is given a handler. A cell that runs meanwhile
has the signal to itself, as ever.
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

    To be called from any thread. Handlers are set by the kernel's own loop, between two messages:
    around each it sets one of its own and puts the one before back.
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
