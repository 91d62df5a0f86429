"""The front's end of the pipe, against `multiprocessing.connection` at the other end: messages of
any size, a pipe that is full, and ends of either side, on both event loops."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from workbench.server.wire import link as wire
from workbench.server.wire.link import Link, Messages, framed

LARGE = 3_000_000  # bytes, many times what a pipe holds
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LOST = "lost"  # among its messages


@pytest.fixture(params=LOOPS)
def run(request) -> Iterator[Callable[..., Any]]:
    """Runs a front with both ends of a pipe, in either event loop."""
    ours, theirs = Pipe()
    with ours, theirs, asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield lambda front: runner.run(front(ours, theirs))


async def begun(ours: Connection) -> tuple[Link, list[Any]]:
    """A link, and what it says."""
    link, messages = Link(ours), list[Any]()
    await link.begin(messages.append, lambda: messages.append(LOST))
    return link, messages


def test_more_than_a_pipe_holds_waits_for_a_reader(run):
    """uvloop makes the pipe non-blocking: with `Connection.send` at this end messages vanish."""
    sent = [(i, b"a" * 5000) for i in range(1000)]

    async def front(ours: Connection, theirs: Connection) -> None:
        link, messages = await begun(ours)
        for message in sent:
            link.send(message)
        await asyncio.sleep(0.05)
        read = asyncio.to_thread(lambda: [theirs.recv() for _ in sent])
        _, found = await asyncio.gather(link.end(), read)
        assert found == sent and not messages

    run(front)


def test_a_message_that_comes_in_parts_is_whole(run):
    """The end of the other side is told once, after its last message."""
    sent = [b"b" * LARGE, "between", b"c" * LARGE, *range(50)]

    async def front(ours: Connection, theirs: Connection) -> None:
        link, messages = await begun(ours)
        for message in sent:
            await asyncio.to_thread(theirs.send, message)
        theirs.close()
        until = time.monotonic() + 20
        while LOST not in messages and time.monotonic() < until:
            await asyncio.sleep(0.001)
        link.send("nobody reads it")
        await link.end()
        assert messages == [*sent, LOST]

    run(front)


def test_an_end_of_our_own_is_no_loss(run, monkeypatch):
    """And a process that reads nothing does not hold it up."""
    monkeypatch.setattr(wire, "END_S", 0.05)

    async def front(ours: Connection, theirs: Connection) -> None:
        link, messages = await begun(ours)
        link.send("last")
        await link.end()
        assert theirs.recv() == "last" and not theirs.poll() and not messages
        theirs.send("it can still be written to")
        link, _ = await begun(ours)
        link.send(b"d" * LARGE)
        await asyncio.wait_for(link.end(), 5)

    run(front)


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
    monkeypatch.setattr(wire, "MOST_SHORT", 10)  # in place of as many bytes
    raw = framed(b"e" * 100)
    assert raw[:4] == b"\xff" * 4 and int.from_bytes(raw[4:12]) == len(raw) - 12
    assert list(Messages().feed(raw)) == [b"e" * 100]
