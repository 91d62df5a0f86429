"""uvicorn's HTTP/1.1 connection, with the limits that uvicorn lacks, and errors in JSON.

The connection can also write a part of a body at once. ASGI would wake the coroutine of the
response for each part, which costs more than the part.

A client that has sent its request may close its half of the connection. Such a client looks like a
client that has gone. Only a write shows the difference: the system of a client that has gone
refuses the bytes. A stream writes often. Where the answer is whole, the connection writes `100
Continue` now and then, which every client of HTTP/1.1 skips.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from workbench.server.api.faults import ApiError

HEADERS_S = 20.0  # from the first byte of a request to the end of its headers
MAX_HEADERS = 64 << 10  # bytes of a request before its body
MAX_CONNECTIONS = 4096
LINGER_S = 1.0  # closed with bytes unread, a connection is reset and its client sees no answer
PROBE_S = 0.5  # between two probes of a client that has closed its half
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHUNKED_BYTES = 4096  # how much of a body in chunks is parsed at once
HEAD_END = b"\r\n\r\n"


class FrontProtocol(HttpToolsProtocol):
    """A connection. Its scope's state holds:

    abort: closes the connection without waiting for the client.
    write_part: writes a part of a body at once.
    refuse: answers a request whose body is not read.
    backlog: the bytes that wait for the client.
    """

    _n_headers = 0  # bytes of a request so far, until its headers end
    _rest = b""  # received bytes that are parsed later
    _n_body = 0  # bytes of its body that are still to come; 0 for a chunked one
    _late: asyncio.TimerHandle | None = None
    _in_headers = True
    _refused = False
    _running: RequestResponseCycle | None = None  # the request that is being answered
    _probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, "too many connections; come again", retry_after_s=1))
        else:
            self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_time()
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            return
        while data and not (self._refused or self.transport.is_closing()):
            n = self._piece(data)
            if n == 0:
                self._refuse(ApiError(431, f"the headers have more than {MAX_HEADERS} bytes"))
                return
            in_chunks = not (self._in_headers or self._n_body)
            if self._in_headers:
                self._n_headers += n
            super().data_received(data[:n])
            data = data[n:]
            if data and in_chunks:
                self._rest = data
                self.transport.pause_reading()
                self.loop.call_soon(self._go_on)
                return

    def _piece(self, data: bytes) -> int:
        """How many bytes are parsed at once; 0 where the headers are too long.

        A piece ends where headers or a body end. So the next request begins a piece, and its
        headers are counted from their first byte. Only after a body in chunks is that end not
        known: then counting begins with the next piece. A chunk may be one byte, and costs a call
        of Python. So such a body is parsed in small pieces, and other connections get the event
        loop between two pieces.
        """
        if self._in_headers:
            end = data.find(HEAD_END)
            most = len(data) if end < 0 else end + len(HEAD_END)
            return min(most, MAX_HEADERS - self._n_headers)
        return min(len(data), self._n_body or CHUNKED_BYTES)

    def _go_on(self) -> None:
        """Parses the bytes that were left for later."""
        rest, self._rest = self._rest, b""
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self.data_received(rest)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for an answer under way."""
        while self._rest:
            self._go_on()
        running = self._running
        if running is None or running.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False  # the client's last request
        if self._probing is None and self.scope["http_version"] == "1.1":
            self._probe()
        return True

    def _probe(self) -> None:
        running = self._running
        assert running is not None
        self._probing = self.loop.call_later(PROBE_S, self._probe)
        if not (running.response_started or self.transport.is_closing()):
            self.transport.write(PROBE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._n_body = 0
        self.scope["state"] |= {
            "abort": self.transport.abort, "write_part": self.write_part, "refuse": self._refuse,
            "backlog": self.transport.get_write_buffer_size,
        }  # fmt: skip
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def on_headers_complete(self) -> None:
        self._in_headers, self._n_headers = False, 0
        self._on_time()
        n_hosts = sum(name == b"host" for name, _ in self.headers)
        if n_hosts != 1 and self.parser.get_http_version() == "1.1":
            self._refuse(ApiError(400, f"the request has {n_hosts} Host headers; send one"))
            return
        said = next((value for name, value in self.headers if name == b"content-length"), b"0")
        self._n_body = int(said) if said.isdigit() else 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._n_body = max(0, self._n_body - len(body))
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP request"))

    def write_part(self, data: bytes) -> int:
        """Writes a part of a body of unknown length, after its begin and before its end. Returns
        how many bytes wait for the client."""
        if self.transport.is_closing():
            return 0
        in_chunks = self._running is not None and self._running.chunked_encoding
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if in_chunks else data)
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def _on_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        self._refuse(ApiError(408, f"no request came within {HEADERS_S:g} s"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError) -> None:
        """Answers bytes that are no request, and closes. Where the answer to an earlier request is
        under way, that answer is the connection's last instead."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self.flow.resume_reading()  # received bytes are dropped
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not running.more_body:
                running.keep_alive = False
                self.pipeline.clear()
                return
            running.disconnected = True  # the error is in this request's own body
            running.message_event.set()
        headers: dict[str, Any] = error.headers | {
            "content-type": "application/json",
            "content-length": len(error.body),
            "connection": "close",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + error.body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """`app` for a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends where
    the connection ends."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        async def plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                if b"content-length" not in names:
                    cycle.chunked_encoding = False
            elif cycle.expected_content_length == 0:  # of unknown length
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, plain)

    return answers
