"""The front's end of the pipe to its engine process.

Messages are read by the event loop itself, when the pipe has some: a thread that hands them over
would cost two switches a step. Messages are written by a thread, since a pipe that is full makes
its writer wait, and the event loop must not.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Message = Any  # a tuple of messages.py


class Link:
    """A pipe whose messages go to `got`, in order, in the event loop; `lost` is called once, when
    the other side has closed it."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._to_send: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._got: Callable[[Message], None]
        self._lost: Callable[[], None]

    def begin(self, got: Callable[[Message], None], lost: Callable[[], None]) -> None:
        """Called in the event loop."""
        self._got, self._lost = got, lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._read)
        threading.Thread(target=self._write, name="to the engine", daemon=True).start()

    def send(self, message: Message) -> None:
        """Returns at once. A message to an engine process that has died is dropped."""
        self._to_send.put(message)

    def end(self) -> None:
        """Stops both directions; messages that were sent are written first."""
        self._stop_reading()
        self._to_send.put(None)

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._connection.fileno())
            self._loop = None

    def _read(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._stop_reading()
            self._lost()
            return
        self._got(message)

    def _write(self) -> None:
        while (message := self._to_send.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:  # the reader learns that it is closed
                return
