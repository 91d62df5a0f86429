"""The front's end of the pipe, against `multiprocessing.connection` at the other end: messages of
any size, a pipe that is full, and ends of either side, on both event loops."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from workbench.server.wire import link
from workbench.server.wire.link import Link, Messages, framed

LARGE = 3_000_000  # bytes, many times what a pipe holds
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=LOOPS)
def run(request) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield runner.run


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


class Heard:
    """What a link says."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.n_lost = 0
        self.news = asyncio.Event()

    def got(self, message: Any) -> None:
        self.messages.append(message)
        self.news.set()

    def lost(self) -> None:
        self.n_lost += 1
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.news.clear()
                await self.news.wait()


def test_more_than_a_pipe_holds_waits_for_a_reader(run, pipe):
    """uvloop makes the pipe non-blocking: with `Connection.send` at this end messages vanish."""
    sent = [(i, b"a" * 5000) for i in range(1000)]
    found: list[Any] = []

    async def front() -> None:
        ours, theirs = pipe
        heard, made = Heard(), Link(ours)
        await made.begin(heard.got, heard.lost)
        for message in sent:
            made.send(message)
        await asyncio.sleep(0.05)
        reader = threading.Thread(target=lambda: found.extend(theirs.recv() for _ in sent))
        reader.start()
        await made.end()
        await asyncio.to_thread(reader.join)
        assert not heard.n_lost

    run(front())
    assert found == sent


def test_a_message_that_comes_in_parts_is_whole(run, pipe):
    """The end of the other side is told once, behind its last message."""
    sent = [b"b" * LARGE, "between", b"c" * LARGE, *range(50)]

    def say(theirs: Connection) -> None:
        for message in sent:
            theirs.send(message)
        theirs.close()

    async def front() -> None:
        ours, theirs = pipe
        heard, made = Heard(), Link(ours)
        await made.begin(heard.got, heard.lost)
        await asyncio.to_thread(say, theirs)
        await heard.until(lambda: heard.n_lost > 0)
        assert heard.messages == sent
        made.send("nobody reads it")
        await made.end()
        assert heard.n_lost == 1

    run(front())


def test_an_end_of_our_own_is_no_loss(run, pipe):
    async def front() -> None:
        ours, theirs = pipe
        heard, made = Heard(), Link(ours)
        await made.begin(heard.got, heard.lost)
        made.send("last")
        await made.end()
        assert theirs.recv() == "last" and not theirs.poll() and not heard.n_lost
        theirs.send("it can still be written to")

    run(front())


def test_a_process_that_reads_nothing_holds_no_end_up(run, pipe, monkeypatch):
    monkeypatch.setattr(link, "END_S", 0.05)

    async def front() -> None:
        heard, made = Heard(), Link(pipe[0])
        await made.begin(heard.got, heard.lost)
        made.send(b"d" * LARGE)
        async with asyncio.timeout(5):
            await made.end()

    run(front())


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 60), min_size=1))
def test_messages_are_the_same_however_their_bytes_are_cut(messages, cuts):
    data, found, at = b"".join(map(framed, messages)), [], 0
    reader = Messages()
    for i in range(len(data)):
        if at >= len(data):
            break
        n = cuts[i % len(cuts)]
        found += reader.feed(data[at : at + n])
        at += n
    assert found == messages


def test_a_message_of_more_than_2_gib_has_the_long_length(monkeypatch):
    monkeypatch.setattr(link, "MOST_SHORT", 10)  # in place of as many bytes
    message = b"e" * 100
    raw = framed(message)
    assert raw[:4] == b"\xff" * 4
    assert int.from_bytes(raw[4:12]) == len(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
    assert list(Messages().feed(raw)) == [message]
