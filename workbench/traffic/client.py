"""A process that sends requests to a server and records when each token came back.

`python -m workbench.traffic.client FD` is started by `targets.start_client`, with one end of a
pipe:

    bench                       client process
    Job             ->
                    <- ClientReady  every request is drawn and encoded
    Begin           ->              the time to begin at, on the clock that both read
                    <- [Record]     several times a second, of requests that have ended
    StopSending     ->              or the pipe is closed: requests in flight are UNFINISHED
                    <- Spent        the last message

The client is a process of its own: a client beside the server's work would measure its own waiting.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from workbench.traffic.http1 import NOW_NS, HttpAnswer, HttpConnection
from workbench.traffic.load import Starts
from workbench.traffic.records import (
    NO_CONNECTION,
    TIMEOUT,
    UNFINISHED,
    Begin,
    ClientReady,
    Job,
    RequestRecord,
    Spent,
    StopSending,
)

MOST_IDLE_NS = 2_000_000_000  # servers close a connection that is idle for 5 s
REPORT_EVERY_S = 0.25
TIMER_S = 0.001
COLLECT_AFTER = 100_000  # a collection of garbage is a pause that would be measured


def encode(job: Job, request: int) -> bytes:
    """One request as HTTP."""
    body: dict[str, Any] = {
        "model": job.model,
        "prompt": job.load.prompt(request).tolist(),
        "max_tokens": int(job.load.n_wanted[request]),
        "temperature": job.temperature,
        "ignore_eos": True,
        "seed": job.load.sampling_seed(request),
        "stream": job.streamed,
    }
    if job.streamed:
        body["stream_options"] = {"include_usage": True}
    content = json.dumps(body, separators=(",", ":")).encode()
    to = urlsplit(job.url)
    lines = [
        f"POST {to.path.rstrip('/')}/v1/completions HTTP/1.1", f"Host: {to.netloc}",
        "Content-Type: application/json", f"Content-Length: {len(content)}",
        *([] if job.key is None else [f"Authorization: Bearer {job.key}"]),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


class Flight:
    """A request on its way: its answer, its time limit, and its connection."""

    __slots__ = ("answer", "connecting", "connection", "expiry")

    def __init__(self, answer: HttpAnswer, expiry: asyncio.TimerHandle):
        self.answer, self.expiry = answer, expiry
        self.connection: HttpConnection | None = None
        self.connecting: asyncio.Task[None] | None = None

    def give_up(self, status: str, why: str = "") -> None:
        """Ends the request if it has not ended; the server sees the connection closed."""
        self.answer.over(status, NOW_NS(), why)
        if self.connecting is not None:
            self.connecting.cancel()
        if self.connection is not None:
            self.connection.close()


class HttpClient:
    """Sends one process' share of a load. `done` is set when the last request has ended."""

    def __init__(self, job: Job, begin_ns: int, requests: dict[int, bytes]):
        self._job, self._zero, self._requests = job, begin_ns, requests
        self._starts = Starts(job.load.due_ns(), job.load, job.part, job.parts)
        self._to = urlsplit(job.url)
        self._loop = asyncio.get_running_loop()
        self._free: list[HttpConnection] = []
        self._flights: dict[int, Flight] = {}
        self._next: asyncio.Handle | None = None
        self.records: list[RequestRecord] = []
        self.n_chunks = 0
        self.done = asyncio.Event()

    def start_due(self) -> None:
        """Starts the requests that are due, and schedules itself for the next."""
        for request, due in self._starts.due(NOW_NS() - self._zero):
            self._start(request, due)
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if (due_ns := self._starts.next_ns) is not None:
            left = (self._zero + due_ns - NOW_NS()) / 1e9 - TIMER_S
            # the loop's timers count in ms; so the last one is spent looking at the clock
            if left > 0:
                self._next = self._loop.call_later(left, self.start_due)
            else:
                self._next = self._loop.call_soon(self.start_due)
        elif not self._flights and not self._starts.n_left:
            self.done.set()

    def stop(self) -> None:
        """Ends the requests in flight; no request starts any more."""
        if self._next is not None:
            self._next.cancel()
        for flight in list(self._flights.values()):
            flight.give_up(UNFINISHED)
        self.done.set()

    def _start(self, request: int, due: int) -> None:
        sent = NOW_NS() - self._zero
        answer = HttpAnswer(self._job.streamed, partial(self._ended, request, due, sent))
        expiry = self._loop.call_later(self._job.timeout_s, self._expired, request)
        flight = self._flights[request] = Flight(answer, expiry)
        flight.connection = self._free_connection()
        if flight.connection is None:
            flight.connecting = self._loop.create_task(self._connect(request, flight))
        else:
            self._send(request, flight)

    def _send(self, request: int, flight: Flight) -> None:
        """Sends a request, and keeps it until its answer ends. Where the server had closed an old
        connection before it read the request, the request is sent once more over a new one."""
        assert flight.connection is not None
        again = partial(self._again, request, flight)
        flight.connection.send(self._requests[request], flight.answer, again)

    def _again(self, request: int, flight: Flight) -> None:
        flight.connection = None
        flight.connecting = self._loop.create_task(self._connect(request, flight))

    def _free_connection(self) -> HttpConnection | None:
        oldest = NOW_NS() - MOST_IDLE_NS
        while self._free:
            connection = self._free.pop()
            if connection.is_open and connection.free_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, request: int, flight: Flight) -> None:
        tls = self._to.scheme == "https"
        port = self._to.port or (443 if tls else 80)
        try:
            _, connection = await self._loop.create_connection(
                lambda: HttpConnection(self._free.append),
                self._to.hostname or "",
                port,
                ssl=tls or None,
            )
        except OSError as error:
            flight.answer.over(NO_CONNECTION, NOW_NS(), str(error))
            return
        flight.connection, flight.connecting = connection, None
        self._send(request, flight)

    def _expired(self, request: int) -> None:
        self._flights[request].give_up(TIMEOUT, f"no end within {self._job.timeout_s:g} s")

    def _ended(self, request: int, due: int, sent: int, answer: HttpAnswer) -> None:
        self._flights.pop(request).expiry.cancel()
        del self._requests[request]
        load, now = self._job.load, answer.end - self._zero
        self.records.append(
            RequestRecord(
                request, int(load.n_prompt[request]), int(load.n_wanted[request]), answer.n_made,
                due, sent, now, np.array(answer.times, np.int64) - self._zero, answer.status,
                answer.finish, answer.why,
            )
        )  # fmt: skip
        self.n_chunks += len(answer.times)
        if answer.status != UNFINISHED:
            self._starts.ended(now)
            self.start_due()


async def serve(pipe: Connection) -> None:
    """Reads a job from the pipe, and does it."""
    job: Job = pipe.recv()
    requests = {i: encode(job, i) for i in range(job.part, job.load.n, job.parts)}
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 50, 50)
    pipe.send(ClientReady())
    begin: Begin | StopSending = pipe.recv()
    if isinstance(begin, StopSending):
        return
    client, loop = HttpClient(job, begin.at_ns, requests), asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), client.stop)  # a StopSending, or the other end is closed
    cpu, wall = time.process_time(), time.monotonic()
    client.start_due()
    done = loop.create_task(client.done.wait())
    while not done.done():
        await asyncio.wait([done], timeout=REPORT_EVERY_S)
        if client.records:
            records, client.records = client.records, []
            pipe.send(records)
    loop.remove_reader(pipe.fileno())
    pipe.send(Spent(time.process_time() - cpu, time.monotonic() - wall, client.n_chunks))


def main(fd: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each in flight
    with (
        Connection(fd) as pipe,
        suppress(EOFError, BrokenPipeError),
    ):  # the bench has closed the pipe
        _run(serve(pipe))


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    main(int(sys.argv[1]))
