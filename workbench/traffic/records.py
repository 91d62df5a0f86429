"""Messages between a bench and its client processes: jobs, and the records of requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.traffic.load import Load

OK = "ok"
REFUSED = "refused"  # the server has no room: 503 or 429
NO_CONNECTION = "no connection"
DISCONNECTED = "disconnected"
TIMEOUT = "timeout"
MALFORMED = "malformed"  # the answer is no HTTP, or no JSON
FAILED = "failed"  # the server says so, in the stream or at its end
NO_TOKEN = "no token"  # the answer ended well, and was empty
UNFINISHED = "unfinished"  # the measuring ended first


class RequestRecord(NamedTuple):
    """One request that has started. Times are ns from the beginning of its setting.

    due_ns: when the request should have started; latencies count from here.
    sent_ns: when the client sent it.
    times_ns: (k,) int64, when each streamed chunk of tokens came; only the end of an answer that is
        not streamed.
    n_made: tokens of the answer, by the server's own count, or else by chunks.
    status: OK, another word of this module, or `http 400`.
    why: the server's words.
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
    """The cost of a client process: seconds of processor and of the clock, and chunks received."""

    cpu_s: float
    wall_s: float
    n_chunks: int


class Job(NamedTuple):
    """The job of one client process: to send the requests part, part + parts, ... of the load."""

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
    """Says that the client waits for Begin."""


class Begin(NamedTuple):
    at_ns: int


class StopSending(NamedTuple):
    """Says that the measuring is over."""
