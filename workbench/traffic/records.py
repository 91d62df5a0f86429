"""What a client process is told, and what it reports: first of all, what became of a request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.traffic.load import Load

OK = "ok"
REFUSED = "refused"  # by a server that has no room: 503 or 429
NO_CONNECTION = "no connection"
DISCONNECTED = "disconnected"
TIMEOUT = "timeout"
MALFORMED = "malformed"  # the answer is no HTTP, or no JSON
FAILED = "failed"  # the server says so, in the stream or at its end
NO_TOKEN = "no token"  # it ended well, and empty
UNFINISHED = "unfinished"  # the measuring ended first
NO_TIMES = np.empty(0, np.int64)


class RequestRecord(NamedTuple):
    """One request that has started. Times are ns from the beginning of its setting.

    due_ns: when it should have started; latencies count from here. sent_ns: when the client did.
    times_ns: (k,) int64, when each streamed chunk of tokens came; of an answer that is not streamed
    its end alone. n_made: tokens of the answer by the server's own count, or else by chunks.
    status: OK, another word of this module, or `http 400`. why: in the server's words.
    """

    request: int
    n_prompt: int
    n_wanted: int
    n_made: int
    due_ns: int
    sent_ns: int
    end_ns: int
    times_ns: np.ndarray
    status: str
    finish: str = ""
    why: str = ""


class Spent(NamedTuple):
    """What a client process itself took: seconds of processor and of the clock, chunks it took."""

    cpu_s: float
    wall_s: float
    n_chunks: int


class Job(NamedTuple):
    """What one client process does. It has the requests part, part + parts, ... of the load."""

    url: str
    key: str | None
    model: str
    load: Load
    streamed: bool
    temperature: float
    timeout_s: float
    part: int
    parts: int


class ClientReady(NamedTuple):
    """The client waits for Begin."""


class Begin(NamedTuple):
    at_ns: int


class StopSending(NamedTuple):
    """The measuring is over."""
