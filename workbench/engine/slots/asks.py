"""What a server asks of an engine, what it is told, and a request that waits or runs. Times are
seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from workbench.model.sampler import Sampler, Sampling
from workbench.trace.spans import now_ns

# why a request ended. STOP_TEXT: of what a front has read; the engine knows no text. STOP: a token
# that ends a generation. FAILED: its step has, and `Ended.why` says of what
STOP_TEXT, STOP, LENGTH = "stop_text", "stop", "length"
CANCELLED, TIMEOUT, FAILED = "cancelled", "timeout", "failed"
REASONS = (STOP_TEXT, FAILED, STOP, CANCELLED, TIMEOUT, LENGTH)
NEVER = -9999.0  # OpenAI's value for the logarithm of 0, which JSON does not have


def foremost(reasons: Iterable[str]) -> str:
    """The reason that is told where several hold: the first of REASONS."""
    return min(reasons, key=REASONS.index)


class Ask(NamedTuple):
    """A prompt to continue.

    number: the front's own, never used again. tokens: (n,) int32, at least one. max_tokens: 0 for
    the prompt alone. ends: tokens after which the request is over; they are not part of it.
    n_logprobs: None for none, else how many of the likeliest tokens are wanted beside the one that
    was drawn. timeout_s: from now until its last token; None: no limit. cache_prompt: cells that
    are there already may serve its prompt. scores_prompt: the prompt's tokens have logprobs, too,
    all but the first; it needs n_logprobs.
    """

    number: int
    tokens: np.ndarray
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    ends: frozenset[int] = frozenset()
    n_logprobs: int | None = None
    timeout_s: float | None = None
    cache_prompt: bool = True
    scores_prompt: bool = False


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities at temperature 1, before any token is cut away.

    drawn: of the token that was drawn, or that the prompt has.
    tokens, values: the likeliest tokens in falling order, (k,) int32, and theirs, (k,) float32.
    """

    drawn: float
    tokens: np.ndarray
    values: np.ndarray


class Timings(NamedTuple):
    """The times of one request.

    n_cached: tokens of the prompt whose cells were already there.
    prompt_s: from its first step until its first token.
    made_s: from its first token until its last.
    sampling_s: the choice of its tokens, on the host or on the device.
    """

    queued_s: float
    n_prompt: int
    n_cached: int
    prompt_s: float
    n_made: int
    made_s: float
    sampling_s: float


class Ended(NamedTuple):
    """A request is over. reason: STOP, LENGTH, CANCELLED, TIMEOUT or FAILED."""

    number: int
    reason: str
    timings: Timings
    why: str = ""


class Totals(NamedTuple):
    """What the engine process has counted since it began, and what it has now.

    n_prompt_tokens: tokens of prompts that were computed.
    n_cached_tokens: tokens of prompts that were found in the cache.
    n_cells_used: cells of the cache that running requests hold.
    n_cells_kept: other cells, whose tokens a later prompt may begin with.
    """

    n_steps: int
    n_prompt_tokens: int
    n_cached_tokens: int
    n_made_tokens: int
    step_s: float
    sampling_s: float
    n_running: int
    n_waiting: int
    n_cells_used: int
    n_cells: int
    n_cells_kept: int = 0


# a request that waits or runs --------------------------------------------------------------------


class Token(NamedTuple):
    """A token that a step has made for a request."""

    number: int
    token: int
    logprobs: Logprobs | None


Scores = dict[int, list[Logprobs]]  # by number, of the next tokens of a prompt that is scored


class Stepped(NamedTuple):
    """What a step has made: tokens in the order of its rows, requests that are over, and scores of
    prompts."""

    tokens: list[Token]
    ended: list[Ended]
    scores: Scores


class Request:
    """An Ask that waits or runs. room: the cells that it may have.

    planned: tokens that it has, or that are under way.
    todo: tokens of its prompt that are in no step yet.
    cells: all cells that it may need.
    range: its NVTX range, until it is over.
    """

    range = 0

    def __init__(self, ask: Ask, room: int):
        self.ask, self.asked_ns = ask, now_ns()
        self.prompt = np.asarray(ask.tokens, np.int32)
        self.most = min(ask.max_tokens, room - len(self.prompt) + 1)
        self.cells = len(self.prompt) + max(self.most, 1) - 1
        self.sampler = Sampler(ask.sampling, ask.seed)
        limit = ask.timeout_s
        self.due_ns = None if limit is None else self.asked_ns + int(limit * 1e9)
        self.todo, self.planned, self.made = len(self.prompt), 0, 0
        self.last: int | None = None  # its last token, where the host knows it
        self.n_cached = self.sampling_ns = 0
        self.begun_ns = self.first_ns = self.last_ns = 0

    def is_late(self, now: int) -> bool:
        """Whether its time limit has passed."""
        return self.due_ns is not None and self.due_ns < now

    @property
    def reusable(self) -> np.ndarray:
        """The tokens of its prompt whose cells it may take from others. A prompt that is scored is
        computed whole: cells have no logits."""
        ask = self.ask
        return self.prompt if ask.cache_prompt and not ask.scores_prompt else self.prompt[:0]

    def timings(self) -> Timings:
        now = now_ns()
        first = self.first_ns or now
        return Timings(
            ((self.begun_ns or now) - self.asked_ns) / 1e9,
            len(self.prompt), self.n_cached,
            (first - self.begun_ns) / 1e9 if self.begun_ns else 0.0,
            self.made, max(0, (self.last_ns or first) - first) / 1e9, self.sampling_ns / 1e9,
        )  # fmt: skip


def logprobs(logits: np.ndarray, token: int, n: int) -> Logprobs:
    """Log-probabilities of a row of logits, (n_vocab,) float32: of a token, and the n largest."""
    wide = logits.astype(np.float64)
    top = wide.max()
    total = top + np.log(np.exp(wide - top).sum())
    n = min(n, len(wide))
    least = top if n < 2 else np.partition(logits, len(wide) - n)[len(wide) - n]
    best = np.flatnonzero(logits >= least)  # with all ties at the edge: the lowest ids come first
    best = best[np.lexsort((best, -wide[best]))][:n]
    values = np.maximum(wide[best] - total, NEVER).astype(np.float32)
    return Logprobs(max(float(wide[token] - total), NEVER), best.astype(np.int32), values)
