"""Who may use engines: every thread, or while one of them measures only that one.

Jupyter runs the callbacks of widgets in a thread of their own, so a cell can use an engine while a
panel measures. Any engine of the process spoils the times of any other: they share the host's
cores, Python's lock, and mostly a device. So a measurement takes all of them:

    with measuring("the panel", engine) as measurement:  # UsageError while a cell uses an engine
        ...                                              # this thread alone may use engines
    measurement.stop()                                   # from any thread: its next step ends it

Nobody else pays for that. A step asks whether `STATE.measurement` is None, and that is all.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

from workbench.errors import UsageError

SETTLE_S = 0.05  # how long a thread may take to meet the measurement that begins beside it

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Stopped(Exception):
    """The measurement was told to stop. Only steps of the thread that measures raise this."""


class Measurement:
    """One thread's exclusive use of all engines. `who` measures, on `loaded`, for messages."""

    def __init__(self, who: str, loaded: object):
        self.who, self.loaded = who, loaded
        self.thread = threading.get_ident()
        self._stop = False

    def stop(self) -> None:
        """Ends it: the next step or variant that its thread begins raises Stopped."""
        self._stop = True

    def check(self, loaded: object) -> None:
        """Raises UsageError in other threads than its own, Stopped there once it is to stop."""
        self.check_others(loaded)
        if self._stop:
            raise Stopped

    def check_others(self, loaded: object) -> None:
        """Raises UsageError in other threads than its own."""
        if threading.get_ident() == self.thread:
            return
        if loaded is self.loaded:
            raise UsageError(f"{self.who} is measuring on this engine; press Stop or wait")
        raise UsageError(
            f"{self.who} is measuring on another engine, and this one would spoil its times; "
            "press Stop or wait"
        )


class State:
    """What is being measured in this process, None for nothing."""

    __slots__ = ("measurement",)

    def __init__(self) -> None:
        self.measurement: Measurement | None = None


STATE = State()
_beginning = threading.Lock()
_doors: dict[CodeType, str] = {}  # the functions that use engines, and their names


def door(function: _Function) -> _Function:
    """Marks a function that uses an engine: while a thread is in it, no other can measure. Calls
    cost nothing: what threads are in is looked at when a measurement begins."""
    _doors[function.__code__] = function.__qualname__
    return function


def check(loaded: object = None) -> None:
    """Raises UsageError where another thread measures, and Stopped where this one is to stop.

    loaded: the model and backends of the engine in question; None where there is no engine yet.
    """
    if (now := STATE.measurement) is not None:
        now.check(loaded)


def check_engine(engine: Any) -> None:
    """`check` for what uses an engine, before it has done anything."""
    check(engine._loaded)


def check_others(loaded: object) -> None:
    """Raises UsageError where another thread measures on `loaded`."""
    if (now := STATE.measurement) is not None and now.loaded is loaded:
        now.check_others(loaded)


def stop() -> bool:
    """Stops whatever is being measured, by whomever; whether there was anything."""
    if (now := STATE.measurement) is not None:
        now.stop()
    return now is not None


@contextmanager
def measuring(who: str, engine: Any) -> Iterator[Measurement]:
    """In the body this thread alone may use engines, `engine` among them. Raises UsageError where
    another thread is measuring, or is using one."""
    loaded = engine._loaded
    with _beginning:
        check(loaded)
        _refuse_users(who)
        STATE.measurement = made = Measurement(who, loaded)
    try:
        # a thread that went through a door meanwhile either meets the measurement or is seen here
        time.sleep(SETTLE_S)
        _refuse_users(who)
        yield made
    finally:
        STATE.measurement = None


def _refuse_users(who: str) -> None:
    """Raises UsageError that names the outermost function through which another thread is using an
    engine, if one is."""
    own = threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame, found = top, ""
        while thread != own and frame is not None:
            found = _doors.get(frame.f_code, found)
            frame = frame.f_back  # type: ignore[assignment]
        if found:
            raise UsageError(
                f"{who} cannot measure while a cell is in {found}: each would spoil the other's "
                "times; wait for the cell or interrupt it"
            )
