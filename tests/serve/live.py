"""Servers for tests: a live one in a thread, and the application alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import openai

from tests.serve.fake_worker import FakeWorker
from workbench.server.app import build
from workbench.server.chat import ChatTemplate
from workbench.server.server import FrontServer, Listening, serve
from workbench.server.text import TokenTexts
from workbench.server.wire.front import SERVING, Front, FrontSettings
from workbench.server.wire.link import Link

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


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


@contextlib.contextmanager
def live(
    texts: TokenTexts,
    worker: FakeWorker | None = None,
    template: str | None = TEMPLATE,
    settings: FrontSettings | None = None,
    drain_s: float = 5.0,
    dies: str | None = None,
) -> Iterator[Live]:
    """A server with an engine process that is none, until the body ends. dies: what the server ends
    with, by itself."""
    worker = worker or FakeWorker(texts.tokenizer.n_vocab)
    said: list[str] = []
    servers: list[FrontServer] = []
    ready = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            ready.set()

    failed: list[BaseException] = []

    def run() -> None:
        try:
            serve(
                worker.start, texts, template, settings or FrontSettings("tiny"),
                Listening(port=0, drain_s=drain_s), say, servers.append,
            )  # fmt: skip
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(20), (said, failed)
        yield Live(said[0].partition(" at ")[2].partition(";")[0], worker, servers[0], said)
    finally:
        if servers and servers[0]._until is None and not dies:
            servers[0].finish()
        thread.join(20)
    assert not thread.is_alive() and [str(error) for error in failed] == [dies] * bool(dies)


@contextlib.asynccontextmanager
async def in_process(
    texts: TokenTexts,
    worker: FakeWorker | None = None,
    template: str | None = TEMPLATE,
    settings: FrontSettings | None = None,
) -> AsyncIterator[tuple[httpx.AsyncClient, Front]]:
    """A client of the application alone, without a socket."""
    worker = worker or FakeWorker(texts.tokenizer.n_vocab)
    (connection,), _ = worker.start()
    front = Front(Link(connection), texts, settings or FrontSettings("tiny"))
    chat = ChatTemplate(template, texts.tokenizer, front.settings.template_s)
    app = build(front, chat)
    await front.begin()
    while front.state != SERVING:
        await asyncio.sleep(0.001)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            yield client, front
    finally:
        await front.finish()
        await chat.close()
