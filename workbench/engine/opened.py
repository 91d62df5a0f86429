"""The engines of this process, and who is told of each new one.

An engine adds itself once it is whole. It stays here until it is closed or nobody holds it. So a
notebook's magic finds every engine, also one that only a list holds, and traces those made later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from workbench.engine.engine import Engine

_opened: WeakValueDictionary[int, Engine] = WeakValueDictionary()
_numbers = count()
_tells: list[Callable[[Engine], None]] = []


def add(engine: Engine) -> None:
    """Called by an engine that is whole."""
    _opened[next(_numbers)] = engine
    for tell in tuple(_tells):
        tell(engine)


def every() -> list[Engine]:
    """The engines that are open, in the order in which they were made."""
    return [engine for _, engine in sorted(_opened.items()) if is_open(engine)]


def is_open(engine: Engine) -> bool:
    """Whether it was not closed."""
    return engine._loaded is not None


@contextmanager
def told(tell: Callable[[Engine], None]) -> Iterator[None]:
    """In the body tell(engine) is called for each engine that is made, by whichever thread."""
    _tells.append(tell)
    try:
        yield
    finally:
        _tells.remove(tell)
