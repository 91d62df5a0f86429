"""Targets of a load: a server over HTTP, or an engine over the pipe of a server's front.

Client processes (`client.py`) send the requests to a server, and report to this process:

    this process                client process
    Job                   ->
                          <-    ClientReady, [RequestRecord] .., Spent

An engine without HTTP gets the same `messages` that a server's front sends, from the thread that
iterates over `offer`. At the other end of the pipe is an engine process, or an engine of this
process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from workbench.common.errors import UsageError, WorkbenchError
from workbench.model.sampler import Sampling
from workbench.server.wire import messages
from workbench.server.wire.messages import Totals
from workbench.traffic.load import Load, Starts
from workbench.traffic.records import (
    FAILED,
    NO_TOKEN,
    OK,
    REFUSED,
    TIMEOUT,
    UNFINISHED,
    Begin,
    ClientReady,
    Job,
    RequestRecord,
    Spent,
    StopSending,
)

HEAD_START_NS = 20_000_000  # from when the last client is ready to the beginning
ANSWER_S = 10.0  # for a server to name its models
GRACE_S = 10.0  # for client processes or an engine to end the requests in flight, after StopSending
TIMER_S = 0.001  # the lateness of a timer; so long before a moment, the clock is polled instead

Offered = Generator[list[RequestRecord], None, None]


class Asking(NamedTuple):
    """The parameters of all requests of a load. timeout_s: the most time of a request, to its
    end."""

    streamed: bool = True
    temperature: float = 0.0
    timeout_s: float = 3600.0


class LoadTarget:
    """Serves loads, one after another (`over_http`, `over_pipe`).

    send: sends a load to the target, as `offer` does.
    about: `model` and `engine` of run.json, as far as they are known.
    n_vocab: tokens of the model's vocabulary; None where it is not known.
    n_slots: requests served at once; None where it is not known.
    spent: the cost of each client process in the last load; empty without client processes.
    totals: the engine's counts at the end of the last load; None where the engine reports none.
    """

    def __init__(
        self,
        send: Callable[[LoadTarget, Load, Asking, float], Offered],
        about: dict[str, Any],
        n_vocab: int | None = None,
        n_slots: int | None = None,
    ):
        self._send, self.about, self.n_vocab, self.n_slots = send, about, n_vocab, n_slots
        self.spent: list[Spent] = []
        self.totals: Totals | None = None

    def offer(self, load: Load, asking: Asking, most_s: float = math.inf) -> Offered:
        """Sends the requests and gives records as requests end, until all have ended or most_s are
        over.

        Requests that are in flight then, or when the iterator is closed, are UNFINISHED. A request
        that did not start has no record. Raises WorkbenchError where the target cannot be used.
        """
        self.spent = []
        return self._send(self, load, asking, most_s)


# --- a server, over HTTP ---------------------------------------------------------------------


def over_http(
    url: str, model: str | None = None, key: str | None = None, processes: int = 1
) -> LoadTarget:
    """An OpenAI-compatible server as a target. Each load has client processes of its own.

    model: the model's name in requests; None: the first that the server names.
    key: of the API, sent as a bearer token.
    Raises UsageError without httptools, and WorkbenchError as `model_of`.
    """
    if importlib.util.find_spec("httptools") is None:
        raise UsageError("the client needs httptools; install workbench[serve]")
    n_vocab = None
    if model is None:
        model, n_vocab = model_of(url, key)
    send = partial(_send_by_clients, url, key, model, processes)
    engine = {"device": "unknown", "url": url}
    return LoadTarget(send, {"model": {"name": model, "quant": None}, "engine": engine}, n_vocab)


def _send_by_clients(
    url: str, key: str | None, model: str, processes: int, target: LoadTarget, load: Load,
    asking: Asking, most_s: float,
) -> Offered:  # fmt: skip
    """Sends a load by client processes, each its share."""
    most = load.arrivals.in_flight
    parts = min(processes, load.n, processes if most is None else most)
    pipes, children = [], []
    try:
        for part in range(parts):
            pipe, child = start_client()
            pipes.append(pipe)
            children.append(child)
            pipe.send(Job(url, key, model, load, *asking, part=part, parts=parts))
        for pipe in pipes:
            if not isinstance(_received(pipe), ClientReady):
                raise WorkbenchError("a client process did not begin; see its error above")
        begin = time.perf_counter_ns() + HEAD_START_NS
        for pipe in pipes:
            pipe.send(Begin(begin))
        yield from _reported(pipes, begin / 1e9 + most_s, target.spent)
    finally:
        for pipe in pipes:
            pipe.close()  # a client that still runs then ends itself
        for child in children:
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _reported(pipes: list[Connection], until_s: float, spent: list[Spent]) -> Offered:
    """The records that clients send, until each client has sent its `Spent`."""
    going, stopped = list(pipes), False
    while going:
        left = until_s - time.perf_counter()
        if left <= 0 and not stopped:
            stopped = True
            for pipe in going:
                pipe.send(StopSending())
        ready = wait(going, None if stopped or math.isinf(left) else left)
        for pipe in [p for p in going if p in ready]:
            said = _received(pipe)
            if isinstance(said, list):
                yield said
                continue
            going.remove(pipe)
            if not isinstance(said, Spent):
                raise WorkbenchError("a client process ended before its requests did")
            spent.append(said)


def start_client() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts a client process, and returns it with the pipe to it. The client has a process session
    of its own, so that Ctrl-C does not reach it."""
    ours, theirs = Pipe()
    with theirs:
        fd = theirs.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from workbench.traffic.client import main; main({fd})"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[fd], start_new_session=True
        )
    return ours, child


def model_of(url: str, key: str | None = None) -> tuple[str, int | None]:
    """The first model that a server names, and the size of its vocabulary where the server names
    it.

    Raises WorkbenchError where the server does not answer, or its answer is no list of models.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        asked = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)
        with without_proxy().open(asked, timeout=ANSWER_S) as answer:
            first = json.load(answer)["data"][0]
        meta = first.get("meta") or {}
        return str(first["id"]), meta.get("n_vocab")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise WorkbenchError(
            f"{url}/v1/models is no list of models; name one: --model-id"
        ) from error
    except (OSError, ValueError) as error:  # HTTPError and URLError are OSErrors
        raise WorkbenchError(f"{url} names no models: {error}; start a server there") from error


def without_proxy() -> urllib.request.OpenerDirector:
    """An opener that asks a server directly, whatever proxy the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


# --- an engine, over the pipe of a front -----------------------------------------------------


class MessagePipe(Protocol):
    """One end of a pipe that carries `messages`, as a `Connection` does."""

    def send(self, message: Any, /) -> None: ...

    def poll(self, timeout: float | None = 0.0, /) -> bool: ...

    def recv(self) -> Any: ...


def over_pipe(pipe: MessagePipe) -> LoadTarget:
    """An engine at the other end of a pipe as a target. The caller keeps the pipe, and ends an
    engine process that it started. Waits for Ready; raises WorkbenchError where the engine process
    ends before."""
    while isinstance(said := _received(pipe), messages.Preparing):
        continue
    if not isinstance(said, messages.Ready):
        raise WorkbenchError("the engine process ended before it was ready; see its error")
    send = partial(_send_by_pipe, pipe, itertools.count(1))
    about = {"model": {"name": said.model, "quant": None}, "engine": {"device": said.device}}
    return LoadTarget(send, about, said.n_vocab, said.n_slots)


_STATUS = {
    messages.STOP: OK, messages.LENGTH: OK, messages.CANCELLED: UNFINISHED,
    messages.TIMEOUT: TIMEOUT, messages.FAILED: FAILED,
}  # fmt: skip


class _Asked(NamedTuple):
    """A request in the engine, and when its tokens came, ns from the beginning."""

    request: int
    due_ns: int
    sent_ns: int
    times: list[int]


def _send_by_pipe(
    pipe: MessagePipe, numbers: Iterator[int], target: LoadTarget, load: Load, asking: Asking,
    most_s: float,
) -> Offered:  # fmt: skip
    """Sends a load from this thread. numbers: gives each request a number that is never reused."""
    if not asking.streamed:
        raise UsageError("an engine process sends tokens as they come; leave --whole out")
    work = _PipeLoad(pipe, numbers, load, asking)
    try:
        yield from work.records(most_s)
    finally:
        work.cancel()
        target.totals = work.totals or target.totals


class _PipeLoad:
    """The requests of a load in an engine."""

    def __init__(self, pipe: MessagePipe, numbers: Iterator[int], load: Load, asking: Asking):
        self._pipe, self._load = pipe, load
        self.totals: Totals | None = None  # of the engine's last message
        self._starts = Starts(load.due_ns(), load)
        self._asked: dict[int, _Asked] = {}  # by number, until the engine reports the end
        sampling = Sampling(temperature=asking.temperature)
        self._asks = [
            messages.Ask(
                next(numbers), load.prompt(i), int(load.n_wanted[i]), sampling,
                load.sampling_seed(i), timeout_s=asking.timeout_s,
            )
            for i in range(load.n)
        ]  # fmt: skip
        self._begin = time.perf_counter_ns()

    def _now(self) -> int:
        return time.perf_counter_ns() - self._begin

    def records(self, most_s: float) -> Offered:
        """Sends the requests that are due, and gives records of requests that have ended."""
        until_ns = most_s * 1e9
        while (now := self._now()) < until_ns:
            for i, due in self._starts.due(now):
                ask = self._asks[i]
                self._asked[ask.number] = _Asked(i, due, self._now(), [])
                with contextlib.suppress(
                    BrokenPipeError
                ):  # the engine process has died: `_take` reports it
                    self._pipe.send(ask)
            next_ns = self._starts.next_ns
            if next_ns is None and not self._asked:
                return
            wake_ns = until_ns if next_ns is None else min(next_ns, until_ns)
            # poll counts in ms; so the last one is spent looking at the clock
            left = (
                None if math.isinf(wake_ns) else max(0.0, (wake_ns - self._now()) / 1e9 - TIMER_S)
            )
            if self._pipe.poll(left) and (found := self._take()):
                yield found
        yield [self._record(asked, self._now(), UNFINISHED) for asked in self._asked.values()]

    def _take(self) -> list[RequestRecord]:
        """Reads one message. Returns the records of requests that it ends."""
        said, now = _received(self._pipe), self._now()
        match said:
            case messages.Made():
                self.totals = said.totals
                for number in said.numbers.tolist():
                    if asked := self._asked.get(number):
                        asked.times.append(now)
                return [
                    self._record(asked, now, _STATUS[end.reason], end.reason, end.why)
                    for end in said.ended
                    if (asked := self._asked.pop(end.number, None))
                ]
            case messages.Refused():
                status = FAILED if said.retry_after_s is None else REFUSED
                return [self._record(self._asked.pop(said.number), now, status, why=said.why)]
            case None:
                raise WorkbenchError(
                    f"the engine process died with {len(self._asked)} requests in flight"
                )
        return []

    def _record(
        self, asked: _Asked, now: int, status: str, finish: str = "", why: str = ""
    ) -> RequestRecord:
        i, times, load = asked.request, np.array(asked.times, np.int64), self._load
        if status == OK and not len(times):
            status = NO_TOKEN
        if status != UNFINISHED:
            self._starts.ended(now)
        return RequestRecord(
            i, int(load.n_prompt[i]), int(load.n_wanted[i]), len(times), asked.due_ns,
            asked.sent_ns, now, times, status, finish, why,
        )  # fmt: skip

    def cancel(self) -> None:
        """Makes the engine end the requests in flight, so that the next load starts with none."""
        until = time.monotonic() + GRACE_S
        # an engine process that has died has nothing in flight
        with contextlib.suppress(OSError, WorkbenchError):
            for number in self._asked:
                self._pipe.send(messages.Cancel(number))
            while self._asked and self._pipe.poll(max(0.0, until - time.monotonic())):
                self._take()


def _received(pipe: MessagePipe) -> Any:
    """The next message; None where the other end is closed."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
