"""Who serves the requests of a load, and the one that is reached over HTTP."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from workbench.engine.asks import Totals
from workbench.errors import UsageError, WorkbenchError
from workbench.serve.load import Load
from workbench.serve.records import Begin, ClientReady, Job, RequestRecord, Spent, StopSending

HEAD_START_NS = 20_000_000  # from the last client's being ready to the beginning
GRACE_S = 10.0  # for client processes to say what they have, once they are to stop

Offered = Generator[list[RequestRecord], None, None]


class Asking(NamedTuple):
    """What requests have beside their tokens. timeout_s: of each, to its end."""

    streamed: bool = True
    temperature: float = 0.0
    timeout_s: float = 3600.0


class LoadTarget(Protocol):
    """Serves loads, one after another. spent: of the client processes of the last one, empty where
    there are none. totals: what the engine had counted at its end; None where nobody says."""

    spent: list[Spent]
    totals: Totals | None

    def offer(self, load: Load, asking: Asking, most_s: float = math.inf) -> Offered:
        """Sends the requests and gives records as requests end, until all have or most_s are over.

        What is in flight then, or when the iterator is closed, is UNFINISHED; of requests that did
        not start there is no record. Raises WorkbenchError where the target cannot be used at all.
        """
        ...


class HttpTarget:
    """An OpenAI-compatible server; each offer has client processes of its own.

    model: its name in requests. key: of the API, sent as a bearer token.
    """

    def __init__(self, url: str, model: str, key: str | None = None, processes: int = 1):
        if importlib.util.find_spec("httptools") is None:
            raise UsageError("the client needs httptools; install workbench[serve]")
        self.url, self.model, self.key, self.processes = url, model, key, processes
        self.spent: list[Spent] = []
        self.totals: Totals | None = None

    def offer(self, load: Load, asking: Asking, most_s: float = math.inf) -> Offered:
        most = load.arrivals.in_flight
        parts = min(self.processes, load.n, self.processes if most is None else most)
        pipes, children = [], []
        self.spent = []
        try:
            for part in range(parts):
                pipe, child = _start_client()
                pipes.append(pipe)
                children.append(child)
                pipe.send(
                    Job(self.url, self.key, self.model, load, *asking, part=part, parts=parts)
                )
            for pipe in pipes:
                if not isinstance(receive(pipe), ClientReady):
                    raise WorkbenchError("a client process did not begin; see its error above")
            begin = time.perf_counter_ns() + HEAD_START_NS
            for pipe in pipes:
                pipe.send(Begin(begin))
            yield from self._records(pipes, begin / 1e9 + most_s)
        finally:
            for pipe in pipes:
                pipe.close()  # a client that still runs ends itself then
            for child in children:
                try:
                    child.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()

    def _records(self, pipes: list[Connection], until_s: float) -> Offered:
        """What the clients send, until each has said what it spent."""
        going, stopped = list(pipes), False
        while going:
            left = until_s - time.perf_counter()
            if left <= 0 and not stopped:
                stopped = True
                for pipe in going:
                    pipe.send(StopSending())
            ready = wait(going, None if stopped or math.isinf(left) else left)
            for pipe in [p for p in going if p in ready]:
                said = receive(pipe)
                if isinstance(said, list):
                    yield said
                    continue
                going.remove(pipe)
                if not isinstance(said, Spent):
                    raise WorkbenchError("a client process ended before its requests did")
                self.spent.append(said)


def _start_client() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A client process and the pipe to it. A session of its own keeps Ctrl-C from it."""
    ours, theirs = Pipe()
    with theirs:
        fd = theirs.fileno()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from workbench.serve.client import main; main({fd})"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[fd], start_new_session=True
        )
    return ours, child


def receive(pipe: Connection) -> Any:
    """The next message; None where the other end is closed."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def model_of(url: str, key: str | None = None, timeout_s: float = 10.0) -> tuple[str, int | None]:
    """The first model that a server names, and its vocabulary where the server says so.

    Raises WorkbenchError where the server does not answer, or answers something else.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        asked = urllib.request.Request(f"{url.rstrip('/')}/v1/models", headers=headers)
        with without_proxy().open(asked, timeout=timeout_s) as answer:
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
    """What asks a server itself, whatever proxy the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
