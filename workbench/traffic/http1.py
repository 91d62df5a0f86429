"""One connection to an OpenAI-compatible server, and the answer that comes over the connection.

A streamed token costs one read, a pass of httptools' C parser, a search in bytes, and one number in
a list: 5 us on one core of an EPYC. JSON is parsed only where an event is not of the common kind.
With the event loop and the system's calls, a token that comes alone costs 40 us of processor. With
64 requests in flight a token costs 20 us. httpx takes 200 us.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

import httptools

from workbench.traffic.records import (
    DISCONNECTED,
    FAILED,
    MALFORMED,
    NO_TOKEN,
    OK,
    REFUSED,
)

NOW_NS = time.perf_counter_ns  # one clock for all processes of a machine
GOING_ON = (b'"finish_reason":null', b'"finish_reason": null')  # in each token's event
DATA, DONE = b"data:", b"[DONE]"
MOST_WHY = 300  # letters of a server's error that are kept


class HttpAnswer:
    """The answer of a server to one request.

    times: ns by NOW_NS, a number for each event with tokens.
    on_end: called once with the answer, when `status` is known.
    """

    __slots__ = (
        "_buffer", "_code", "_done", "end", "finish", "n_made", "on_end", "status", "streamed",
        "times", "why",
    )  # fmt: skip

    def __init__(self, streamed: bool, on_end: Callable[[HttpAnswer], None]):
        self.streamed, self.on_end = streamed, on_end
        self.times: list[int] = []
        self.status = self.finish = self.why = ""
        self.n_made = self.end = self._code = 0
        self._buffer = b""
        self._done = False

    def head(self, code: int) -> None:
        self._code = code

    def body(self, data: bytes, now: int) -> None:
        """Takes a part of the body, decoded from its chunks."""
        if self._buffer:
            data = self._buffer + data
        if not self.streamed or self._code != 200:
            self._buffer = data
            return
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if data.endswith(b"\n\n"):
            self._buffer = b""
            events = data.split(b"\n\n")
        else:
            *events, self._buffer = data.split(b"\n\n")
        for event in events:
            if GOING_ON[0] in event or GOING_ON[1] in event:
                self.times.append(now)
            elif event:
                self._rare(event, now)

    def _rare(self, event: bytes, now: int) -> None:
        """Takes an event that is not just tokens: the last events, an error, a comment."""
        for line in event.split(b"\n"):
            if not line.startswith(DATA):
                continue
            content = line[len(DATA) :].strip()
            if content == DONE:
                self._done = True
                continue
            if self._take(content):
                self.times.append(now)

    def _take(self, content: bytes) -> bool:
        """Reads a JSON object of the stream. Returns whether it has text."""
        try:
            return self._take_object(json.loads(content))
        except (ValueError, TypeError, AttributeError):  # no JSON, or not of this kind
            self.status = self.status or MALFORMED
            self.why = self.why or content[:MOST_WHY].decode(errors="replace")
            return False

    def _take_object(self, found: dict[str, Any]) -> bool:
        if usage := found.get("usage"):
            self.n_made = int(usage.get("completion_tokens") or 0)
        if "error" in found:
            self.status, self.why = FAILED, _message(found)
        has_text = False
        for choice in found.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            has_text = has_text or bool(text)
        return has_text

    def complete(self, now: int) -> None:
        """Ends the answer: the response is whole."""
        if self._code != 200:
            self.why = _reason(self._buffer)
            status = REFUSED if self._code in (429, 503) else f"http {self._code}"
            return self.over(status, now)
        if not self.streamed:
            if self._take(self._buffer):
                self.times.append(now)
        elif not self._done and not self.finish and not self.status:
            return self.over(DISCONNECTED, now, "the stream ended without [DONE]")
        self.n_made = self.n_made or len(self.times)
        return self.over(self.status or (OK if self.times else NO_TOKEN), now)

    def lost(self, now: int, why: str) -> None:
        """Ends the answer: the connection is lost."""
        if self._code == 200 and self._done:
            self.complete(now)
        else:
            self.over(DISCONNECTED, now, why)

    def over(self, status: str, now: int, why: str = "") -> None:
        """Ends the answer with a status, once."""
        if not self.end:
            self.status, self.end, self.why = status, now, self.why or why
            self.n_made = self.n_made or len(self.times)
            self.on_end(self)


def _reason(body: bytes) -> str:
    """The message of an answer that is an error."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    return _message(found) if isinstance(found, dict) else str(found)[:MOST_WHY]


def _message(found: dict[str, Any]) -> str:
    """The message of an error object."""
    error = found.get("error", found)
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:MOST_WHY]


class HttpConnection(asyncio.Protocol):
    """A connection that carries one request after another.

    on_free: called with the connection when an answer has ended and the next request may follow.
    free_since: the time of that.

    A server may close a connection after an answer without a word in the answer. Then the server
    never read the next request, and the request can be sent again over another connection.
    """

    def __init__(self, on_free: Callable[[HttpConnection], None]):
        self._on_free = on_free
        self._answer: HttpAnswer | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now = self.free_since = 0
        self._reused = self._heard = False  # had an answer before; a byte came for the present one
        self._unheard: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self, request: bytes, answer: HttpAnswer, unheard: Callable[[], None] | None = None
    ) -> None:
        """Sends a request.

        request: head and body.
        unheard: called in place of ending the answer, where the connection had an answer before and
            the server closed it without a byte for this request.
        """
        assert self._transport is not None and self._answer is None
        self._answer, self._unheard, self._heard = answer, unheard, False
        self._transport.write(request)

    def close(self) -> None:
        """Ends the connection, and the answer in progress."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, or asyncio's

    def data_received(self, data: bytes) -> None:
        self._now, self._heard = NOW_NS(), True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # of this program
        except httptools.HttpParserError as error:
            self._fail(MALFORMED, str(error))

    def connection_lost(self, error: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._reused and not self._heard and self._unheard is not None:
            self._unheard()
        else:
            answer.lost(NOW_NS(), str(error or "the server closed the connection"))

    def _fail(self, status: str, why: str) -> None:
        answer = self._answer
        self.close()
        if answer is not None:
            answer.over(status, self._now, why)

    # callbacks of httptools

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.head(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.body(body, self._now)

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        if answer is None:
            return
        self._reused = True
        if self._parser.should_keep_alive():
            self.free_since = self._now
            self._on_free(self)
        else:
            self.close()
        answer.complete(self._now)
