"""The open engines of this process, and who is told of each new one.

An engine adds itself once it is complete. It stays here until it is closed or nobody holds it. So a
notebook's magic finds every engine, also one that only a list holds, and can trace engines that are
made later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

E = TypeVar("E")


class Opened(Generic[E]):
    """The open engines, in the order in which they were made."""

    def __init__(self) -> None:
        self._engines: WeakValueDictionary[int, E] = WeakValueDictionary()  # by id
        self._tells: list[Callable[[E], None]] = []

    def add(self, engine: E) -> None:
        """Called by an engine that is complete."""
        self._engines[id(engine)] = engine
        for tell in tuple(self._tells):
            tell(engine)

    def remove(self, engine: E) -> None:
        """Called by an engine that is closed."""
        self._engines.pop(id(engine), None)

    def __iter__(self) -> Iterator[E]:
        return iter([*self._engines.values()])

    def __contains__(self, engine: object) -> bool:
        return id(engine) in self._engines

    @contextmanager
    def told(self, tell: Callable[[E], None]) -> Iterator[None]:
        """In the body tell(engine) is called for each engine that is made, by any thread."""
        self._tells.append(tell)
        try:
            yield
        finally:
            self._tells.remove(tell)
