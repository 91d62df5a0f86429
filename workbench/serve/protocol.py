"""uvicorn's HTTP/1.1 connection, with the limits that it lacks and errors in JSON.

It can also write a part of a body at once. ASGI would wake the coroutine of the response for each
part, which costs more than the part.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from workbench.serve.faults import ApiError

HEADERS_S = 20.0  # from the first byte of a request to the end of its headers
MAX_HEADERS = 64 << 10  # bytes of a request before its body
MAX_CONNECTIONS = 4096
LINGER_S = 1.0  # closed with bytes unread, a connection is reset and its client sees no answer


class FrontProtocol(HttpToolsProtocol):
    """A connection. In its scope's state are `abort`, which closes it without waiting for its
    client, `write_part`, and `backlog`, the bytes that wait for the client."""

    _n_headers = 0
    _late: asyncio.TimerHandle | None = None
    _in_headers = True
    _refused = False
    _running: RequestResponseCycle | None = None  # the request that is being answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(ApiError(503, "too many connections; come again", retry_after_s=1))
        else:
            self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        was_in_headers = self._in_headers
        super().data_received(data)
        if was_in_headers and self._in_headers:
            self._n_headers += len(data)
            if self._n_headers > MAX_HEADERS:
                self._refuse(ApiError(431, f"the headers have more than {MAX_HEADERS} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._n_headers = True, 0
        self.scope["state"] |= {
            "abort": self.transport.abort, "write_part": self.write_part,
            "backlog": self.transport.get_write_buffer_size,
        }  # fmt: skip
        if self._late is None:
            self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._on_time()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is no HTTP request"))

    def write_part(self, data: bytes) -> int:
        """Writes a part of a body of unknown length that was begun, and is not at its end. Returns
        how many bytes wait for the client."""
        if self.transport.is_closing():
            return 0
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
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
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError) -> None:
        """Answers what is no request, and closes. An answer under way, to a request before it, is
        the last one of the connection instead."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not running.more_body:
                running.keep_alive = False
                self.pipeline.clear()
                return
            running.disconnected = True  # what is wrong is in its own body
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
