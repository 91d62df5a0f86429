"""The requests of a load: lengths, prompts and arrival times, drawn from a seed.

Every function here is pure. So each client process draws its own share, and two runs with the same
seed send the same tokens at the same times.

Lengths are written as `1024`, `uniform:16-512` or `rng-0-19000`. The last form is llama.cpp's
(`scripts/server-bench.py`): request i draws from Python's own generator. Its seed is
3 * (seed + 1000 * i) for the prompt, plus 1 for the answer; plus 2 gives the sampling seed.
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workbench.common.errors import UsageError
from workbench.model.gguf.file import open_gguf

PROMPT, ANSWER, SAMPLING = 0, 1, 2  # the three draws of a request
FIXED, UNIFORM, RNG = "fixed", "uniform", "rng"
POISSON, CONSTANT, CLOSED = "poisson", "constant", "concurrency"
MOST_REQUESTS = 1_000_000
NORMAL = 1  # of `tokenizer.ggml.token_type`
DEFAULT_IDS = (100, 10_000)  # llama.cpp's server-bench.py draws prompts from this range
_LENGTHS = {
    FIXED: re.compile(r"(\d+)", re.ASCII),
    UNIFORM: re.compile(r"uniform:(\d+)-(\d+)", re.ASCII),
    RNG: re.compile(r"rng-(\d+)-(\d+)", re.ASCII),
}


class Lengths(NamedTuple):
    """The range of lengths of prompts or answers: from `low` to `high` tokens, both included."""

    kind: str
    low: int
    high: int

    def __str__(self) -> str:
        if self.kind == FIXED:
            return str(self.low)
        return f"{self.kind}{':' if self.kind == UNIFORM else '-'}{self.low}-{self.high}"

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, n: int, seed: int, part: int) -> np.ndarray:
        """The lengths of n requests, int64 (n,), each at least 1. part: PROMPT or ANSWER."""
        if self.kind == RNG:
            drawn = [
                random.Random(server_bench_seed(seed, i, part)).randint(self.low, self.high)
                for i in range(n)
            ]
            found = np.array(drawn, np.int64)
        else:
            rng = np.random.default_rng([seed, part])
            found = rng.integers(self.low, self.high, n, endpoint=True)
        return np.maximum(found, 1)


def lengths(flag: str, text: str) -> Lengths:
    """Reads a text of lengths. Raises UsageError, naming `flag`."""
    for kind, pattern in _LENGTHS.items():
        if found := pattern.fullmatch(text.strip()):
            low, high = int(found[1]), int(found[found.re.groups])
            if low <= high and high:
                return Lengths(kind, low, high)
    raise UsageError(f"{flag} {text!r} is no length; write it as 1024, uniform:16-512 or rng-0-512")


def server_bench_seed(seed: int, request: int, part: int) -> int:
    """The seed of a draw in llama.cpp's server-bench.py; `seed` is its --seed_offset."""
    return 3 * (seed + 1000 * request) + part


class Arrivals(NamedTuple):
    """When requests come.

    POISSON, CONSTANT: `value` requests a second; inf: all at once.
    CLOSED: `value` requests are in flight; the next starts when a request ends.
    """

    kind: str
    value: float

    @property
    def name(self) -> str:
        if self.kind == CLOSED:
            return f"concurrency={self.value:g}"
        return f"rate={self.value:g}" + (" constant" if self.kind == CONSTANT else "")

    @property
    def in_flight(self) -> int | None:
        """The most requests in flight; None where the arrivals set no limit."""
        return int(self.value) if self.kind == CLOSED else None

    def due_ns(self, n: int, seed: int) -> np.ndarray | None:
        """When n requests are due, int64 (n,) ns from the beginning, rising. None for CLOSED, whose
        requests are due when others end.

        A Poisson process has exponential gaps of mean 1 / value. The first request of a constant
        rate is due at once.
        """
        if self.kind == CLOSED:
            return None
        if math.isinf(self.value):
            return np.zeros(n, np.int64)
        if self.kind == CONSTANT:
            return (np.arange(n) * (1e9 / self.value)).astype(np.int64)
        gaps = np.random.default_rng([seed, 3]).exponential(1e9 / self.value, n)
        return np.cumsum(gaps).astype(np.int64)


def arrivals(kind: str, rates: str | None, concurrencies: str | None) -> list[Arrivals]:
    """Arrivals for each value of two lists, `1,2.5,inf` and `1,8`; all at once where both are None.

    kind: of the rates, POISSON or CONSTANT. Raises UsageError for a text that is no such list.
    """
    if kind not in (POISSON, CONSTANT):
        raise UsageError(f"--arrivals {kind!r}: choose {POISSON} or {CONSTANT}")
    if rates is None and concurrencies is None:
        rates = "inf"
    found = [Arrivals(kind, _rate(part)) for part in _parts(rates)]
    found = [a._replace(kind=POISSON) if math.isinf(a.value) else a for a in found]
    for part in _parts(concurrencies):
        if part == "inf":
            found.append(Arrivals(POISSON, math.inf))
        elif re.fullmatch(r"[1-9]\d{0,5}", part, re.ASCII):
            found.append(Arrivals(CLOSED, int(part)))
        else:
            raise UsageError(f"--concurrency {part!r} is no number of requests; write it as 1,8,32")
    return list(dict.fromkeys(found))


def _parts(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",")]


def _rate(part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UsageError(f"--rate {part!r} is no rate; write requests a second as 0.5,2,inf")
    return value


class Load(NamedTuple):
    """The requests of one setting.

    n_prompt, n_wanted: (n,) int64 tokens.
    ids: (k,) int32, the token ids that prompts are drawn from.
    n_shared: tokens that all prompts begin with.
    row: the number of the setting. Prompts of two settings differ, so that a cache of prefixes
        helps no later setting.
    """

    arrivals: Arrivals
    n_prompt: np.ndarray
    n_wanted: np.ndarray
    ids: np.ndarray
    n_shared: int
    seed: int
    row: int

    @property
    def n(self) -> int:
        return len(self.n_prompt)

    def prompt(self, request: int) -> np.ndarray:
        """The tokens of a prompt, int32 (n_prompt[request],)."""
        n = int(self.n_prompt[request])
        n_shared = min(self.n_shared, n)
        shared, own = (
            np.random.default_rng([self.seed, 4, self.row, which]).integers(len(self.ids), size=k)
            for which, k in ((0, self.n_shared), (1 + request, n - n_shared))
        )
        return self.ids[np.concatenate([shared[:n_shared], own])]

    def sampling_seed(self, request: int) -> int:
        return server_bench_seed(self.seed, request, SAMPLING)

    def due_ns(self) -> np.ndarray | None:
        return self.arrivals.due_ns(self.n, self.seed)


def draw(
    arriving: Arrivals,
    n: int,
    of_prompt: Lengths,
    of_answer: Lengths,
    ids: np.ndarray,
    *,
    n_shared: int = 0,
    seed: int = 0,
    row: int = 0,
) -> Load:
    """Draws the load of n requests. Raises UsageError for no request and for no ids."""
    if not 1 <= n <= MOST_REQUESTS:
        raise UsageError(f"--n-requests {n} must be 1 to {MOST_REQUESTS:,}")
    if not len(ids):
        raise UsageError("prompts have no token ids to be made of; give a range as --ids 100-10000")
    return Load(
        arriving, of_prompt.draw(n, seed, PROMPT), of_answer.draw(n, seed, ANSWER),
        np.asarray(ids, np.int32), n_shared, seed, row,
    )  # fmt: skip


def normal_ids(path: str | Path) -> np.ndarray:
    """The ids of a file's normal tokens, int32: no control, unknown or byte tokens.

    Raises ModelFileError for a file without a vocabulary.
    """
    with open_gguf(path) as file:
        types = np.asarray(file.get("tokenizer.ggml.token_type", list))
    return np.flatnonzero(types == NORMAL).astype(np.int32)


def id_range(text: str | None, n_vocab: int | None) -> np.ndarray:
    """Token ids from `100-10000`, int32, both ends included, and below n_vocab where that is known.

    None: DEFAULT_IDS below n_vocab. Raises UsageError for a text that is no such range.
    """
    if text is None:
        high = DEFAULT_IDS[1] if n_vocab is None else min(DEFAULT_IDS[1], n_vocab - 1)
        return np.arange(min(DEFAULT_IDS[0], high // 2), high + 1, dtype=np.int32)
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise UsageError(f"--ids {text!r} is no range of token ids; write it as 100-10000")
    if n_vocab is not None and int(last) >= n_vocab:
        raise UsageError(f"--ids {text} goes beyond the vocabulary of {n_vocab} tokens")
    return np.arange(int(first), int(last) + 1, dtype=np.int32)


class Starts:
    """Which requests may start now. One client process has the requests part, part + parts, ... of
    a load, and its share of a limit on requests in flight.

    Times are ns from the beginning. A request that waits for room is due when a request ends.
    """

    def __init__(self, due_ns: np.ndarray | None, load: Load, part: int = 0, parts: int = 1):
        self._requests = deque(range(part, load.n, parts))
        limit = load.arrivals.in_flight
        share = self._requests if limit is None else range(part, limit, parts)
        times = [0] * len(share) if due_ns is None else [int(due_ns[i]) for i in self._requests]
        self._due = deque(times)
        self._closed = due_ns is None

    @property
    def n_left(self) -> int:
        """Requests that have not started."""
        return len(self._requests)

    @property
    def next_ns(self) -> int | None:
        """When the next request is due. None: none is left, or the next waits for an end."""
        return self._due[0] if self._due and self._requests else None

    def due(self, now_ns: int) -> list[tuple[int, int]]:
        """Starts the requests that are due: (request, when it was due)."""
        found = []
        while self._due and self._requests and self._due[0] <= now_ns:
            found.append((self._requests.popleft(), self._due.popleft()))
        return found

    def ended(self, now_ns: int) -> None:
        """Notes that a started request has ended."""
        if self._closed:
            self._due.append(now_ns)
