"""The front's end of the pipe, against `multiprocessing.connection` at the other end: messages of
any size, a pipe that is full, and ends of either side, on both event loops."""

from __future__ import annotations

import asyncio
import itertools
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
    """A link, and what it says."""

    def __init__(self, ours: Connection) -> None:
        self.link, self.messages, self.n_lost = Link(ours), list[Any](), 0
        self.end = asyncio.Event()

    def lost(self) -> None:
        self.n_lost += 1
        self.end.set()

    async def begun(self) -> Heard:
        await self.link.begin(self.messages.append, self.lost)
        return self


def test_more_than_a_pipe_holds_waits_for_a_reader(run, pipe):
    """uvloop makes the pipe non-blocking: with `Connection.send` at this end messages vanish."""
    sent = [(i, b"a" * 5000) for i in range(1000)]
    ours, theirs = pipe

    async def front() -> None:
        heard = await Heard(ours).begun()
        for message in sent:
            heard.link.send(message)
        await asyncio.sleep(0.05)
        read = asyncio.to_thread(lambda: [theirs.recv() for _ in sent])
        _, found = await asyncio.gather(heard.link.end(), read)
        assert found == sent and not heard.n_lost

    run(front())


def test_a_message_that_comes_in_parts_is_whole(run, pipe):
    """The end of the other side is told once, behind its last message."""
    sent = [b"b" * LARGE, "between", b"c" * LARGE, *range(50)]
    ours, theirs = pipe

    def say() -> None:
        for message in sent:
            theirs.send(message)
        theirs.close()

    async def front() -> None:
        heard = await Heard(ours).begun()
        await asyncio.to_thread(say)
        await asyncio.wait_for(heard.end.wait(), 20)
        assert heard.messages == sent
        heard.link.send("nobody reads it")
        await heard.link.end()
        assert heard.n_lost == 1

    run(front())


def test_an_end_of_our_own_is_no_loss(run, pipe, monkeypatch):
    """And a process that reads nothing does not hold it up."""
    monkeypatch.setattr(link, "END_S", 0.05)
    ours, theirs = pipe

    async def front() -> None:
        heard = await Heard(ours).begun()
        heard.link.send("last")
        await heard.link.end()
        assert theirs.recv() == "last" and not theirs.poll() and not heard.n_lost
        theirs.send("it can still be written to")
        heard = await Heard(ours).begun()
        heard.link.send(b"d" * LARGE)
        await asyncio.wait_for(heard.link.end(), 5)

    run(front())


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 60), min_size=1))
def test_messages_are_the_same_however_their_bytes_are_cut(messages, cuts):
    data, found, sizes = b"".join(map(framed, messages)), [], itertools.cycle(cuts)
    reader = Messages()
    while data:
        n = next(sizes)
        found += reader.feed(data[:n])
        data = data[n:]
    assert found == messages


def test_a_message_of_more_than_2_gib_has_the_long_length(monkeypatch):
    monkeypatch.setattr(link, "MOST_SHORT", 10)  # in place of as many bytes
    raw = framed(b"e" * 100)
    assert raw[:4] == b"\xff" * 4 and int.from_bytes(raw[4:12]) == len(raw) - 12
    assert list(Messages().feed(raw)) == [b"e" * 100]
