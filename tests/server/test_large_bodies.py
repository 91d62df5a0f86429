"""Bodies that take long to read: elsewhere, to the same end, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import select
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from tests.bench import stalls
from tests.server.live import TEMPLATE, connected, everything, live, posted, wait_for
from workbench.server.api import aside
from workbench.server.api.aside import HUGE, LONG, Aside, Readers
from workbench.server.api.faults import ApiError
from workbench.server.api.fields import CHAT, COMPLETIONS, NATIVE
from workbench.server.api.reading import BodyRead, Defaults, Reader, ReaderSpec, wanted_of
from workbench.server.text import TokenTexts
from workbench.server.wire.front import FrontSettings

MOST_BODY, N_CTX = 1 << 24, 4096


@pytest.fixture
def spec(texts: TokenTexts) -> ReaderSpec:
    return ReaderSpec(texts.tokenizer, texts.longest, "tiny", Defaults(), TEMPLATE)


def reading(
    spec: ReaderSpec, work: Callable[[Any], Awaitable[None]], kind: type[Aside | Readers] = Aside
) -> None:
    """Some work with a process that reads bodies, or with those of a server."""

    async def run() -> None:
        process = kind(spec, MOST_BODY)
        try:
            await work(process)
        finally:
            await process.close()

    asyncio.run(run())


def children() -> set[psutil.Process]:
    """Of this process, those that may read bodies."""
    return set(psutil.Process().children())


MESSAGES = {"messages": [{"role": "user", "content": "the engine \ud83d\ude00 waits"}], "n": 2}
LINE = json.dumps({"text": "<user>the engine waits\n" * 300}).encode()
CHATTED = wanted_of({}, CHAT, Defaults())
Body = tuple[str, bytes, tuple[Any, ...]]  # a method of `Reader`, and what it is given


def asked(route: str, body: Any) -> Body:
    return "request", body if isinstance(body, bytes) else json.dumps(body).encode(), (route, N_CTX)


IDS = json.dumps({"tokens": [i % 1000 for i in range(50_000)]}).encode()
LONG_TEXT = json.dumps({"content": "the engine " * 40_000, "with_pieces": True}).encode()
BODIES: list[Body] = [
    asked(COMPLETIONS, {"prompt": ["a b", "c" * 4000], "seed": 3}),
    asked(COMPLETIONS, {"prompt": [[1, 2], [3] * 4000]}),
    asked(COMPLETIONS, {"prompt": ["a", "c" * 9], "echo": True}),
    asked(NATIVE, {"prompt": [5] * 4000, "n_predict": 2}),
    asked(CHAT, MESSAGES),
    ("rendered", LINE, (CHATTED, N_CTX)),
    ("template_values", json.dumps(MESSAGES).encode(), ()),
    ("prompt_answer", LINE, ()),
    ("tokenize", LONG_TEXT, ()),
    ("detokenize", IDS, ()),
]
WRONG: list[Body] = [
    asked(COMPLETIONS, b'{"prompt": "a'),
    asked(COMPLETIONS, {"prompt": [1] * (N_CTX + 1)}),
    asked(COMPLETIONS, {"prompt": "a b " * N_CTX}),
    asked(COMPLETIONS, {"prompt": [1, 1024]}),
    asked(COMPLETIONS, {"prompt": "a", "model": "other"}),
    asked(NATIVE, b"[" * 100_000),
    asked(CHAT, MESSAGES | {"temperature": -1}),
    ("rendered", json.dumps({"error": "roles must alternate"}).encode(), (CHATTED, N_CTX)),
    ("detokenize", json.dumps({"tokens": [1024]}).encode(), ()),
]


def told(read: BodyRead) -> tuple[Any, ...]:
    prompts = [(p.ids.dtype, p.ids.tolist(), *p[1:]) for p in read.prompts]
    return read.wanted, b"".join(read.parts), prompts


@pytest.mark.long
def test_a_body_is_read_elsewhere_as_it_is_here(spec):
    here = Reader(spec)

    async def work(process: Aside) -> None:
        before = children()
        for method, body, args in BODIES:
            parts = [body[at : at + 1000] for at in range(0, len(body), 1000)]
            read = await process.run(parts, method, *args)
            assert told(read) == told(getattr(here, method)(body, *args))
        for method, body, args in WRONG:
            with pytest.raises(ApiError) as there:
                await process.run([body[:5], b"", body[5:]], method, *args)
            with pytest.raises(ApiError) as own:
                getattr(here, method)(body, *args)
            assert vars(there.value) == vars(own.value)
        assert len(children() - before) == 1

    reading(spec, work)


@pytest.mark.long
def test_small_bodies_are_read_here_long_and_huge_aside(spec, monkeypatch):
    """In two processes. Huge ones wait for each other, and not without end."""

    async def work(both: Readers) -> None:
        before = children()
        for n_processes, n in enumerate((100, LONG, HUGE)):
            body = [json.dumps({"content": "a" * n}).encode()]
            await both.run(body, "tokenize")
            assert len(children() - before) == n_processes
        monkeypatch.setattr(aside, "MOST_HUGE", 2)
        made = (both.run(body, "tokenize") for _ in range(6))
        answers = await asyncio.gather(*made, return_exceptions=True)
        late = [one for one in answers if isinstance(one, ApiError)]
        assert len(late) == 4 and {(e.status, e.retry_after_s) for e in late} == {(503, 10.0)}

    reading(spec, work, Readers)


@pytest.mark.long
def test_a_process_that_dies_is_an_error_of_one_body(spec):
    """And who goes away leaves it to the next."""
    method, body, args = BODIES[0]

    async def work(process: Aside) -> None:
        before = children()
        await process.begin()
        (first,) = children() - before
        first.kill()
        with pytest.raises(ApiError) as died:
            await process.run([body], method, *args)
        assert died.value.status == 500 and "died" in died.value.message
        assert (await process.run([body], method, *args)).prompts
        assert len(children() - before - {first}) == 1
        gone = asyncio.ensure_future(process.run([LONG_TEXT], "tokenize"))
        await asyncio.sleep(0.01)
        gone.cancel()
        read = await process.run([IDS], "detokenize")
        assert told(read) == told(Reader(spec).detokenize(IDS)) and process.n_waiting == 0

    reading(spec, work)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such bound")
def test_a_body_that_takes_too_much_memory_is_refused(spec, monkeypatch):
    monkeypatch.setattr(aside, "MOST_BYTES", 300 << 20)
    monkeypatch.setattr(aside, "BYTES_OF_ONE", 0)
    body = b'{"prompt":[' + b",".join([b"[]"] * 4_000_000) + b"]}"

    async def work(process: Aside) -> None:
        with pytest.raises(ApiError, match="too much memory") as refused:
            await process.run([body], "request", COMPLETIONS, N_CTX)
        assert refused.value.status == 400
        assert (await process.run([BODIES[1][1]], "request", COMPLETIONS, N_CTX)).prompts

    reading(spec, work)


@pytest.mark.long
def test_streams_go_on_while_a_body_is_read(texts):
    """The process that reads it is stopped: meanwhile a stream gets its tokens, and nobody else
    answers. How long streams wait beside a body is measured (`tests/bench/stalls.py`)."""
    before, settings = children(), FrontSettings("tiny", reads_at_once=True)
    with live(texts, settings=settings, n_ctx=1 << 20, step_s=0.001) as server:
        wait_for(lambda: len(children() - before) == 2)  # of the template there is another one
        known = children()
        server.post("/tokenize", content="a" * HUGE)
        (reader,) = children() - known
        with server.http() as http:
            asked = {"prompt": [1], "max_tokens": 1 << 19, "stream": True, "ignore_eos": True}
            with http.stream("POST", COMPLETIONS, json=asked) as answer:
                lines = (line for line in answer.iter_lines() if line)
                for path, body in stalls.bodies(2 * HUGE).values():
                    reader.suspend()
                    with connected(server.url) as sock:
                        sock.sendall(posted(body, path, "1.1", "connection: close"))
                        assert all("error" not in next(lines) for _ in range(50))
                        assert not select.select([sock], [], [], 0)[0], f"{path} is answered"
                        reader.resume()
                        assert everything(sock)[9:12] in (b"200", b"400")
    assert children() == before


def test_recorded_streams_wait_at_most_twice_as_long():
    """On four free cores, as `python -m tests.bench.stalls --record` saw it."""
    found = json.loads(stalls.OUT.read_text())
    assert "no engine" in found
    for load, one in found.items():
        assert one["cores"] == stalls.N_CORES and not one["commit"]["dirty"]
        assert set(one["rows"]) == {"alone", *stalls.bodies(1 << 12)}
        most = 2 * one["rows"]["alone"]["p99"]
        assert all(row["p99"] <= most for row in one["rows"].values()), load
