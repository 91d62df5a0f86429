"""An OpenAI-compatible server that computes nothing: known delays, known counts, faults on demand.

It runs in a thread of the tests, or as a process: `python -m tests.traffic.fake_server`. The
first token of a prompt is a fault where its id is one of those below.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

# the first id of a prompt -> what becomes of the request
REFUSE, CLOSE, GARBAGE, SHORT, HANG, ERROR_EVENT, BAD_REQUEST = range(901, 908)
NO_TOKEN, HALF, NOT_HTTP, BAD_CHUNK = range(908, 912)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {CLOSE: b"", HALF: b"HTTP/1.1 200", NOT_HTTP: b"SSH-2.0\r\n", BAD_CHUNK: HEAD + b"xyz\r\n"}


class Delays(NamedTuple):
    """first_s: from the request to its first token. gap_s: between tokens. per_event: tokens that
    share an event. n_slots: requests that are served at once; the others wait. closes: each
    connection behind its first answer, without a word in the answer, as some servers do."""

    first_s: float = 0.0
    gap_s: float = 0.0
    per_event: int = 1
    n_slots: int = 1 << 30
    closes: bool = False


NO_DELAYS = Delays()


class FakeServer:
    """seen: every request's body, in the order it came. most: the largest number that were served
    at once."""

    def __init__(self, delays: Delays = NO_DELAYS, key: str | None = None):
        self.delays, self.key = delays, key
        self.seen: list[dict[str, Any]] = []
        self.most = self._now = self.n_connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, ready: Any) -> None:
        self._slots = asyncio.Semaphore(self.delays.n_slots)
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        ready()
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._request(reader, writer) and not self.delays.closes:
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        first, *rest = head.splitlines()
        fields = dict(line.lower().split(": ", 1) for line in rest if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if self.key is not None and fields.get("authorization") != f"bearer {self.key}".lower():
            return await whole(writer, 401, {"error": {"message": "no such key"}})
        match first.split()[:2]:
            case ["GET", "/health"]:
                return await whole(writer, 200, {"status": "ok"})
            case ["GET", "/v1/models"]:
                model = {"id": "fake", "meta": {"n_vocab": 800}}
                return await whole(writer, 200, {"object": "list", "data": [model]})
            case ["POST", "/v1/completions"]:
                self.seen.append(json.loads(body))
                async with self._slots, self._counted():
                    return await self._complete(writer, self.seen[-1])
        return await whole(writer, 404, {"error": {"message": "no such path"}})

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            yield
        finally:
            self._now -= 1

    async def _complete(self, writer: asyncio.StreamWriter, asked: dict[str, Any]) -> bool:
        fault, n = asked["prompt"][0], asked["max_tokens"]
        if fault == REFUSE:
            return await whole(writer, 503, {"error": {"message": "all slots are taken"}})
        if fault == BAD_REQUEST:
            return await whole(writer, 400, {"error": {"message": "the prompt is too long"}})
        if fault in BROKEN:
            writer.write(BROKEN[fault])
            return False
        n = n // 2 if fault == SHORT else n
        reason = "stop" if fault == SHORT else "length"
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": n}
        if not asked["stream"]:
            await asyncio.sleep(self.delays.first_s + self.delays.gap_s * (n - 1))
            choice = {"index": 0, "text": "x" * n, "finish_reason": reason}
            return await whole(writer, 200, {"choices": [choice], "usage": usage})
        writer.write(HEAD)
        if fault == HANG:
            await asyncio.sleep(60)
        await asyncio.sleep(self.delays.first_s)
        if fault == GARBAGE:
            writer.write(chunk(b'data: {"choices": [{"tex\n\n'))
        elif fault == ERROR_EVENT:
            writer.write(chunk(event({"error": {"message": "the engine process has died"}})))
        elif fault == NO_TOKEN:
            writer.write(chunk(b"data: [DONE]\n\n"))
        else:
            for i in range(0, n, self.delays.per_event):
                if i:
                    await asyncio.sleep(self.delays.gap_s)
                choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None}
                writer.write(chunk(event({"id": "cmpl-1", "choices": [choice]})))
                await writer.drain()
            last = {"index": 0, "text": "", "finish_reason": reason}
            writer.write(chunk(event({"choices": [last]})))
            if asked.get("stream_options", {}).get("include_usage"):
                writer.write(chunk(event({"choices": [], "usage": usage})))
            writer.write(chunk(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def whole(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> bool:
    """A response that is not streamed."""
    body = json.dumps(content).encode()
    writer.write(
        b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (status, len(body), body)
    )
    await writer.drain()
    return True


@contextlib.contextmanager
def serving(delays: Delays = NO_DELAYS, key: str | None = None) -> Iterator[FakeServer]:
    """A server in a thread of its own for the body."""
    made, up = FakeServer(delays, key), threading.Event()
    loop = asyncio.new_event_loop()

    def work() -> None:
        asyncio.set_event_loop(loop)
        with contextlib.suppress(asyncio.CancelledError):
            task = loop.create_task(made.serve(up.set))
            made_tasks.append(task)
            loop.run_until_complete(task)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    made_tasks: list[asyncio.Task[None]] = []
    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(10)
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(made_tasks[0].cancel)
        thread.join(10)


if __name__ == "__main__":  # port, first_s, gap_s
    server = FakeServer(Delays(*map(float, sys.argv[2:])))
    server.port = int(sys.argv[1])
    asyncio.run(server.serve(lambda: print(server.url, flush=True)))
