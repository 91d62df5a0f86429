"""What a server asks of an engine, and what it is told. Times are seconds."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from workbench.model.sampler import Sampling

# why a request ended. STOP_TEXT: of what a front has read; the engine knows no text. STOP: a token
# that ends a generation. FAILED: its step has, and `Ended.why` says of what
STOP_TEXT, STOP, LENGTH = "stop_text", "stop", "length"
CANCELLED, TIMEOUT, FAILED = "cancelled", "timeout", "failed"
REASONS = (STOP_TEXT, FAILED, STOP, CANCELLED, TIMEOUT, LENGTH)


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
