"""A request that waits or runs in a server, and what a step makes for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.engine.slots.asks import Ask, Ended, Logprobs, Timings
from workbench.model.sampler import Sampler
from workbench.trace.spans import now_ns

NEVER = -9999.0  # OpenAI's value for the logarithm of 0, which JSON does not have


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
