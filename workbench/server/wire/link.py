"""The front's end of the pipe to its engine process.

Messages go through a transport of the event loop. The event loop must not wait: with a transport,
neither a full pipe nor half a message makes it wait. (A thread would cost two switches a step.)

Only the event loop uses the file descriptor. uvloop makes a watched descriptor non-blocking, and a
`Connection` that meets a full pipe there raises BlockingIOError in the middle of a message.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

Message = Any  # a tuple of messages.py
LENGTH_BYTES = 4  # before each message, as multiprocessing.connection writes it: signed, big-endian
LONG_BYTES = 8  # the true length, after a length of -1
MOST_SHORT = 2**31 - 1
END_S = 2.0  # how long sent messages have to be written


def framed(message: Message) -> bytes:
    """The bytes of a message, as `Connection.recv` reads them."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(body) <= MOST_SHORT:
        return len(body).to_bytes(LENGTH_BYTES) + body
    return (-1).to_bytes(LENGTH_BYTES, signed=True) + len(body).to_bytes(LONG_BYTES) + body


class Messages:
    """Finds messages in bytes that come in parts, as `Connection.send` writes them."""

    def __init__(self) -> None:
        self._parts = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now."""
        parts = self._parts
        parts += data
        at = 0
        while (found := self._bounds(at)) is not None:
            begin, end = found
            at = end
            with memoryview(parts) as view, view[begin:end] as body:
                message = pickle.loads(body)
            yield message
        del parts[:at]

    def _bounds(self, at: int) -> tuple[int, int] | None:
        """Begin and end of the message whose length stands at `at`; None: it is not complete."""
        parts = self._parts
        begin = at + LENGTH_BYTES
        n = int.from_bytes(parts[at:begin], signed=True)
        if n == -1:
            begin += LONG_BYTES
            n = int.from_bytes(parts[begin - LONG_BYTES : begin])
        return (begin, begin + n) if begin + n <= len(parts) else None


class Link(asyncio.Protocol):
    """A pipe in the event loop. Its messages go to `got`, in order. `lost` is called once, when the
    other side has closed the pipe."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._messages = Messages()
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.Event()
        self._ending = False
        self._got: Callable[[Message], None]
        self._lost: Callable[[], None]

    async def begin(self, got: Callable[[Message], None], lost: Callable[[], None]) -> None:
        """Called in the event loop."""
        self._got, self._lost = got, lost
        # closing the transport must not close the pipe: the pipe's owner closes it
        end = socket.socket(fileno=os.dup(self._connection.fileno()))
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Message) -> None:
        """Returns at once. A message to an engine process that has died is dropped."""
        if self._transport is not None and not self._ending:
            self._transport.write(framed(message))

    async def end(self) -> None:
        """Stops both directions. Messages that were sent are written first, if the other side reads
        them."""
        self._ending = True
        if self._transport is not None:
            self._transport.close()
            try:
                await asyncio.wait_for(self._closed.wait(), END_S)
            except TimeoutError:
                self._transport.abort()

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, or asyncio's

    def data_received(self, data: bytes) -> None:
        for message in self._messages.feed(data):
            self._got(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._closed.set()
        if not self._ending:
            self._lost()
