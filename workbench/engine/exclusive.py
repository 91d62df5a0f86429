"""Who may use engines: every thread, or, while a thread measures, only that thread.

Jupyter runs the callbacks of widgets in a thread of their own, so a cell can use an engine while a
panel measures. Any engine of a process spoils the times of any other: they share the host's cores,
Python's lock, and mostly a device. So a measurement takes all engines for itself:

    with measuring("the panel", engine) as measurement:  # UsageError while a cell uses an engine
        ...                                              # this thread alone may use engines
    measurement.stop()                                   # from any thread: its next step ends it

A use and a measurement each register first and then look for the other. So at least one of them
sees the other, without a lock: a measurement finds the uses that began before it, and a use that
begins later finds the measurement.

`Engine.submit` does not register, because it lies between the logits of one token and the first
launch of the next. So a measurement may begin while a bare `submit` is at its step; the next one is
refused. `step`, `prefill`, `generate` and a server's step register, and call it.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from workbench.common.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Stopped(Exception):
    """The measurement was told to stop. Only steps of the thread that measures raise this."""


class Measurement:
    """One thread's exclusive use of all engines. `who` measures, on `loaded`, for messages."""

    def __init__(self, who: str, loaded: object):
        self.who, self.loaded = who, loaded
        self.thread = threading.get_ident()
        self.stops = False

    def stop(self) -> None:
        """Ends the measurement: the next step or variant that its thread begins raises Stopped."""
        self.stops = True


class State:
    """The measurement of this process; None where nothing is being measured."""

    measurement: Measurement | None = None


STATE = State()
_begins = threading.Lock()  # held while a measurement begins
USERS: dict[int, str] = {}  # thread -> the outermost function in which it uses an engine


def door(function: _Function) -> _Function:
    """Marks a function that uses an engine. While a thread is in it, no other thread can measure.
    The function itself calls `check`, which refuses it where another thread measures."""

    name = function.__qualname__

    @functools.wraps(function)
    def entered(*args: Any, **named: Any) -> Any:
        thread = threading.get_ident()
        if thread in USERS:
            return function(*args, **named)
        try:
            USERS[thread] = name
            return function(*args, **named)
        finally:
            USERS.pop(thread, None)

    return cast(_Function, entered)


def check(loaded: object = None) -> None:
    """Raises UsageError where another thread measures, and Stopped where this thread must stop.

    loaded: the model and backends of the engine in question; None where there is no engine yet.
    """
    now = STATE.measurement
    if now is None:
        return
    if now.thread != threading.get_ident():
        where = "this engine"
        if loaded is not now.loaded:
            where = "another engine, and this one would spoil its times"
        raise UsageError(f"{now.who} is measuring on {where}; press Stop or wait")
    if now.stops:
        raise Stopped


def check_others(loaded: object) -> None:
    """Raises UsageError where another thread measures on `loaded`."""
    now = STATE.measurement
    if now is not None and now.loaded is loaded and now.thread != threading.get_ident():
        check(loaded)


def stop() -> bool:
    """Stops the measurement of this process. Returns whether there was one."""
    if (now := STATE.measurement) is not None:
        now.stop()
    return now is not None


@contextmanager
def measuring(who: str, engine: Any) -> Iterator[Measurement]:
    """In the body only this thread may use engines; it measures on `engine`. Raises UsageError
    where another thread is measuring, or is using an engine."""
    loaded = engine._loaded
    with _begins:
        check(loaded)
        _refuse_users(who)
        STATE.measurement = made = Measurement(who, loaded)
    try:
        _refuse_users(who)  # a thread may have begun meanwhile
        yield made
    finally:
        STATE.measurement = None


def _refuse_users(who: str) -> None:
    """Raises UsageError where another thread uses an engine, naming the function that it is in."""
    own = threading.get_ident()
    for name in (name for thread, name in dict(USERS).items() if thread != own):
        raise UsageError(
            f"{who} cannot measure while a cell is in {name}: each would spoil the other's "
            "times; wait for the cell or interrupt it"
        )
