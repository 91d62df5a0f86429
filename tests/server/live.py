"""Servers for tests: live ones in a thread, and what is said to them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import openai

from tests.server.fake_worker import FakeWorker
from workbench.model.gguf.file import open_gguf
from workbench.model.tokenizer.tokenizer import load_tokenizer
from workbench.server.server import FrontServer, Listening, serve
from workbench.server.text import TokenTexts
from workbench.server.wire.front import FrontSettings

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = FrontSettings("tiny")
USER = [{"role": "user", "content": "a"}]


def texts_of(path: Path) -> TokenTexts:
    """The texts of a file's tokens, as a server has them."""
    with open_gguf(path) as file:
        return TokenTexts(load_tokenizer(file))


def wait_for(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.005)


def posted(body: Any, path: str = "/v1/completions", version: str = "1.1", *lines: str) -> bytes:
    """A request with a JSON body, or with these bytes, as it is written."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "host: a", "content-type: application/json", *lines]
    return "\r\n".join([*head, f"content-length: {len(content)}", "", ""]).encode() + content


def connected(url: str) -> socket.socket:
    at = urlsplit(url)
    return socket.create_connection((at.hostname, at.port), timeout=20)


def everything(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream, which ends as streams of OpenAI do or with an error."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@contextlib.contextmanager
def beside(work: Callable[..., Any], *args: Any) -> Iterator[list[BaseException]]:
    """The errors of some work, in a thread. It has to end by itself after the body."""
    errors = list[BaseException]()

    def run() -> None:
        try:
            work(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield errors
    thread.join(60)
    assert not thread.is_alive(), "it goes on"


class Live(NamedTuple):
    """A server in a thread, at `url`."""

    url: str
    worker: FakeWorker
    server: FrontServer
    said: list[str]

    def client(self, key: str = "none", **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **settings)

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **settings)

    def complete(self, **body: Any) -> Any:
        """What the `openai` package has of a completion; a list where it streams."""
        made = self.client().completions.create(model="tiny", **body)
        return list(made) if body.get("stream") else made

    def post(self, path: str, **body: Any) -> Any:
        answer = self.answer(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def answer(self, path: str, body: Any, **settings: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **settings)


@contextlib.contextmanager
def live(
    texts: TokenTexts,
    settings: FrontSettings = SETTINGS,
    drain_s: float = 5.0,
    until: str = "ready",
    **fake: Any,
) -> Iterator[Live]:
    """A server with an engine process that is none, until the body ends. until: the body begins
    when a line that begins so was said. fake: of the `FakeWorker`."""
    worker, said, servers = FakeWorker(texts.tokenizer.n_vocab, **fake), list[str](), []
    more = Listening(port=0, drain_s=drain_s), said.append, servers.append
    with beside(serve, worker.start, texts, TEMPLATE, settings, *more) as failed:
        wait_for(lambda: failed or any(line.startswith(until) for line in said), 20)
        wait_for(lambda: failed or servers[0].started)
        try:
            yield Live(said[0].partition(" at ")[2].partition(";")[0], worker, servers[0], said)
        finally:
            servers[0].finish()
    assert not failed
