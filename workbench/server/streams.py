"""Sends replies to clients, whole or as server-sent events; drops clients that go or do not
read."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workbench.server.api.faults import FAILED_HERE, ApiError
from workbench.server.reply import Reply

STUCK_S = 30.0  # a client that reads nothing for so long, while data waits for it, is dropped
SWEEP_S = 5.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks a proxy not to buffer the events
]


async def answered(request: Request, reply: Reply, streams: OpenStreams) -> Response:
    """The response to a client: a stream from the reply's first event on, or all at the end.

    Raises the reply's ApiError where the error comes before the first event, and ClientDisconnect
    where the client of a whole answer has gone.
    """
    reply.abort = request.scope.get("state", {}).get("abort")
    watch = asyncio.ensure_future(_watched(request.receive, reply))
    handed_on = False
    try:
        await reply.news()
        while not (reply.wanted.stream or reply.over):
            await reply.news()
        if reply.error is not None:
            raise reply.error
        if reply.wanted.stream:
            handed_on = True
            return EventStream(reply, watch, streams)
        if reply.dropped:
            raise ClientDisconnect
        return Response(reply.form.whole(reply), media_type="application/json")
    finally:
        if not handed_on:
            watch.cancel()
            if not reply.over:
                reply.drop()


async def _watched(receive: Receive, reply: Reply) -> None:
    """Drops a reply when its client goes away."""
    while (await receive())["type"] != "http.disconnect":
        continue
    if not reply.over:
        reply.drop()


class OpenStreams:
    """The event streams that are open."""

    def __init__(self) -> None:
        self.open: set[EventStream] = set()

    async def sweep(self) -> None:
        """Drops clients that have read nothing for STUCK_S seconds."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.drop_stuck(time.monotonic())

    def drop_stuck(self, now: float) -> None:
        for stream in list(self.open):
            if stream.is_stuck(now):
                stream.reply.drop()


class EventStream(Response):
    """The events of a reply as a body: a part has all events since the last part."""

    def __init__(self, reply: Reply, watch: asyncio.Future[None], streams: OpenStreams):
        self.status_code, self.background = 200, None
        self.raw_headers = HEADERS
        self.reply, self._watch, self._streams = reply, watch, streams
        self.sending_since: float | None = None
        self._backlog: Callable[[], int] = int
        self._waited = 0  # bytes that waited for the client at the last check

    def is_stuck(self, now: float) -> bool:
        """Whether the client has read nothing for STUCK_S seconds."""
        if self.sending_since is None:
            return False
        waits = self._backlog()
        if waits < self._waited:
            self.sending_since = now
        self._waited = waits
        return now - self.sending_since > STUCK_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        reply, direct = self.reply, state.get("write_part")
        self._backlog = state.get("backlog", int)
        self._streams.open.add(self)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            while not reply.dropped:
                over, body = reply.over, reply.taken()
                if over:
                    body += self._last()
                self.sending_since = time.monotonic()
                await send({"type": "http.response.body", "body": body, "more_body": not over})
                self.sending_since = None
                if over:
                    break
                if not reply.has_events:
                    reply.direct = direct
                await reply.news()
        finally:
            reply.direct = None
            self._streams.open.discard(self)
            self._watch.cancel()
            if not reply.over:
                reply.drop()

    def _last(self) -> bytes:
        error = self.reply.error
        if error is None:
            try:
                return self.reply.form.last(self.reply)
            except Exception as its:
                traceback.print_exception(its, file=sys.stderr)
                error = ApiError(500, FAILED_HERE)
        return b"data: " + error.body + b"\n\n"
