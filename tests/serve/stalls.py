"""How long streams wait beside large bodies: `python -m tests.serve.stalls [MODEL]`.

The server, its engine process and the client that reads four streams are processes of their own.
Printed are the gaps between tokens, in ms: alone, and while each body is on its way. MODEL: a file
to serve; without one the engine process is none, and makes a token in 5 ms.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
N_STREAMS, ALONE_S, STEP_S = 4, 3.0, 0.005
MOST = 16 << 20  # `--max-body`, where nobody says otherwise


def _keys(n: int) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | {f"k{i}": 1 for i in range(n)}).encode()


def bodies(most: int = MOST) -> dict[str, tuple[str, bytes]]:
    """Path and body, by name; each of almost `most` bytes."""
    text = "the engine waits. " * (most // 19)
    ids, lists = (b",".join([b"7"] * (most // 2 - 99)), b",".join([b"[]"] * (most // 3 - 99)))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return {
        "keys": ("/v1/completions", _keys(most // 15)),
        "ids": ("/v1/completions", b'{"max_tokens":1,"prompt":[' + ids + b"]}"),
        "lists": ("/v1/completions", b'{"prompt":[' + lists + b"]}"),
        "text": ("/v1/completions", json.dumps({"prompt": text, "max_tokens": 1}).encode()),
        "chat": ("/v1/chat/completions", json.dumps(chat).encode()),
        "nonsense": ("/v1/completions", b'{"prompt":"' + b"a" * (most - 100)),
        "tokenize": ("/tokenize", json.dumps({"content": text}).encode()),
        "detokenize": ("/detokenize", b'{"tokens":[' + ids + b"]}"),
    }


def head(path: str, n: int, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{more}"
        f"content-length: {n}\r\n\r\n"
    ).encode()


class Streams:
    """Reads streams in a thread, and writes down when something came of each."""

    def __init__(self, url: str, n: int, max_tokens: int):
        at = urlsplit(url)
        self._at = (at.hostname, at.port)
        self.times: list[list[int]] = []
        self._selector = selectors.DefaultSelector()
        asked = {"prompt": [1], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body = json.dumps(asked).encode()
        for _ in range(n):
            sock = socket.create_connection(self._at)
            sock.sendall(head("/v1/completions", len(body)) + body)
            self.times.append([])
            self._selector.register(sock, selectors.EVENT_READ, self.times[-1])
        self._stopped = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.recv(1 << 16):
                    self._selector.unregister(key.fileobj)
                key.data.append(time.perf_counter_ns())

    def gaps_ms(self, begin_ns: int, end_ns: int) -> np.ndarray:
        """Gaps that overlap an interval, of all streams."""
        found = [np.empty(0)]
        for times in self.times:
            at = np.array(times)
            overlaps = (at[1:] > begin_ns) & (at[:-1] < end_ns)
            found.append(np.diff(at)[overlaps] / 1e6)
        return np.concatenate(found)

    def close(self) -> None:
        self._stopped = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()


class Waits(NamedTuple):
    """Gaps between tokens, ms, while something was done for `seconds`; and its status."""

    n: int
    median: float
    p99: float
    most: float
    seconds: float
    status: str = ""


def waits(streams: Streams, work: Callable[[], str]) -> Waits:
    begin = time.perf_counter_ns()
    status = work()
    end = time.perf_counter_ns()
    time.sleep(0.3)
    gaps = streams.gaps_ms(begin, end)
    return Waits(
        len(gaps), float(np.median(gaps)), float(np.percentile(gaps, 99)), float(gaps.max()),
        (end - begin) / 1e9, status,
    )  # fmt: skip


def post(url: str, path: str, body: bytes) -> str:
    """The status of the answer. The whole of it is read."""
    at = urlsplit(url)
    with socket.create_connection((at.hostname, at.port), timeout=300) as sock:
        sock.sendall(head(path, len(body), "connection: close\r\n"))
        sock.sendall(body)
        first = sock.recv(1 << 18)
        while sock.recv(1 << 18):
            pass
    return first[9:12].decode()


@contextmanager
def serving(*arguments: object) -> Iterator[str]:
    """A server, and its address."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments), "--port", "0"], cwd=ROOT, stderr=log,
            stdout=log, start_new_session=True,
        )  # fmt: skip
        try:
            while True:
                log.seek(0)
                if found := re.search(r"ready: \S+ at (\S+)", log.read()):
                    break
                log.seek(0)
                assert process.poll() is None, log.read()
                time.sleep(0.05)
            yield found[1]
        finally:
            process.terminate()
            process.wait()


def measured(url: str, names: list[str], max_tokens: int) -> dict[str, Waits]:
    """Alone, and beside each body."""
    streams = Streams(url, N_STREAMS, max_tokens)
    try:
        time.sleep(1)
        post(
            url, "/tokenize", json.dumps({"content": "a" * (1 << 19)}).encode()
        )  # starts processes
        found = {"alone": waits(streams, lambda: str(time.sleep(ALONE_S) or ""))}
        every = bodies()
        for name in names:
            path, body = every[name]
            found[name] = waits(streams, lambda path=path, body=body: post(url, path, body))
        return found
    finally:
        streams.close()


def main() -> None:
    if len(sys.argv) > 1:
        flags = ["workbench", "serve", "-m", sys.argv[1], "-c", 8 * 4096]
        most = 4000
    else:
        from workbench.model.synth import write_tiny

        model = write_tiny(ROOT / "data" / "models", "tiny-llama", "F16")
        flags = ["tests.serve.command", "-m", model, "-c", 1 << 18]
        most = 1 << 17
    with serving(*flags) as url:
        print(f"{os.cpu_count()} cores\n{'':12}{'gaps':>8}{'median':>9}{'P99':>9}{'most':>9}")
        for name, found in measured(url, list(bodies()), most).items():
            print(
                f"{name:12}{found.n:8}{found.median:9.2f}{found.p99:9.2f}{found.most:9.2f}"
                f"   {found.seconds:.2f} s {found.status}"
            )


if __name__ == "__main__":
    main()
