"""An OpenAI-compatible server that computes nothing: known delays, known counts, faults on demand.

It runs in threads of the tests, or as a process: `python -m tests.traffic.fake_server PORT`. The
first token of a prompt is a fault where its id is one of those below.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

# the first id of a prompt -> what becomes of the request
REFUSE, CLOSE, GARBAGE, SHORT, HANG, ERROR_EVENT, BAD_REQUEST = range(901, 908)
NO_TOKEN, HALF, NOT_HTTP, BAD_CHUNK = range(908, 912)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {CLOSE: b"", HALF: b"HTTP/1.1 200", NOT_HTTP: b"SSH-2.0\r\n", BAD_CHUNK: HEAD + b"xyz\r\n"}
DONE = b"data: [DONE]\n\n"


class Delays(NamedTuple):
    """first_s: from the request to its first token. gap_s: between tokens. per_event: tokens that
    share an event. n_slots: requests that are served at once; the others wait. closes: each
    connection after its first answer, without a word in the answer, as some servers do."""

    first_s: float = 0.0
    gap_s: float = 0.0
    per_event: int = 1
    n_slots: int = 1 << 30
    closes: bool = False


class FakeServer(ThreadingHTTPServer):
    """seen: every request's body, in the order it came. most: the largest number that were served
    at once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, delays: Delays, key: str | None, port: int = 0):
        super().__init__(("127.0.0.1", port), _Connection)
        self.delays, self.key = delays, key
        self.seen: list[dict[str, Any]] = []
        self.most = self.now = self.n_connections = 0
        self.slots, self.lock = threading.Semaphore(delays.n_slots), threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    server: FakeServer

    def log_message(self, *more: Any) -> None: ...

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.n_connections += 1

    def _whole(self, status: int, content: dict[str, Any]) -> None:
        """A response that is not streamed."""
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        self.wfile.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        server, key = self.server, self.server.key
        if key is not None and self.headers.get("authorization") != f"Bearer {key}":
            self._whole(401, {"error": {"message": "no such key"}})
        elif self.path == "/health":
            self._whole(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._whole(200, {"data": [{"id": "fake", "meta": {"n_vocab": 800}}]})
        else:
            assert self.path == "/v1/completions"
            server.seen.append(json.loads(body))
            with server.slots:
                with server.lock:
                    server.now += 1
                    server.most = max(server.most, server.now)
                try:
                    self._complete(json.loads(body), server.delays)
                finally:
                    with server.lock:
                        server.now -= 1
        self.close_connection |= server.delays.closes

    do_GET = do_POST = _answer

    def _complete(self, asked: dict[str, Any], delays: Delays) -> None:
        fault, n, reason = asked["prompt"][0], asked["max_tokens"], "length"
        if fault == REFUSE:
            return self._whole(503, {"error": {"message": "all slots are taken"}})
        if fault == BAD_REQUEST:
            return self._whole(400, {"error": {"message": "the prompt is too long"}})
        if fault in BROKEN:
            self.wfile.write(BROKEN[fault])
            self.close_connection = True
            return None
        if fault == SHORT:
            n, reason = n // 2, "stop"
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": n}
        time.sleep(delays.first_s)
        if not asked["stream"]:
            time.sleep(delays.gap_s * (n - 1))
            choice = {"index": 0, "text": "x" * n, "finish_reason": reason}
            return self._whole(200, {"choices": [choice], "usage": usage})
        self.wfile.write(HEAD)
        if fault == HANG:
            time.sleep(60)
        elif fault == GARBAGE:
            self._chunk(b'data: {"choices": [{"tex\n\n')
        elif fault == ERROR_EVENT:
            self._chunk(event({"error": {"message": "the engine process has died"}}))
        elif fault != NO_TOKEN:
            for i in range(0, n, delays.per_event):
                time.sleep(delays.gap_s if i else 0)
                choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": None}
                self._chunk(event({"id": "cmpl-1", "choices": [choice]}))
            last = {"index": 0, "text": "", "finish_reason": reason}
            self._chunk(event({"choices": [last]}))
            self._chunk(event({"choices": [], "usage": usage}) + DONE)
        else:
            self._chunk(DONE)
        return self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextmanager
def serving(delays: Delays | None = None, key: str | None = None) -> Iterator[FakeServer]:
    """A server in threads of its own for the body."""
    with FakeServer(delays or Delays(), key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


if __name__ == "__main__":
    FakeServer(Delays(), None, int(sys.argv[1])).serve_forever()
