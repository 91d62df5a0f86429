"""What a server's front and its engine process say to each other.

The front speaks HTTP and knows text. The engine process knows tokens. Between them is a pipe
(`multiprocessing.Pipe`), on which each message is one of these tuples. The engine sends one `Made`
for a step, however many requests the step served. Times are seconds.

    front                               engine process
                      <- Ready          the model is loaded
    Ask, Ask, Cancel  ->
                      <- Made           after each step: a token for each request it served
                      <- Refused        of an Ask that cannot be served, or not now
    Finish            ->                no request comes any more
                      <- Made ..        until all that run have ended; then the pipe is closed

Every Ask has exactly one answer: its number comes in one `Ended` or one `Refused`, and in no
message behind that. A pipe that closes earlier says that the engine process has died.
"""

from typing import NamedTuple

import numpy as np

from workbench.model.sampler import Sampling

STOP, LENGTH, CANCELLED, TIMEOUT = "stop", "length", "cancelled", "timeout"  # why a request ended
FAILED = "failed"  # and its step with it: `Ended.why` says of what


class Ask(NamedTuple):
    """A prompt to continue.

    number: the front's own, never used again. tokens: (n,) int32, at least one. ends: tokens after
    which the request is over; they are not part of it. n_logprobs: None for none, else how many of
    the likeliest tokens are wanted beside the one that was drawn. timeout_s: from now until its
    last token; None: no limit.
    """

    number: int
    tokens: np.ndarray
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    ends: frozenset[int] = frozenset()
    n_logprobs: int | None = None
    timeout_s: float | None = None


class Cancel(NamedTuple):
    """Nobody wants the rest of a request. It ends with CANCELLED, if it has not ended already."""

    number: int


class Finish(NamedTuple):
    """No further Ask comes."""


class Ready(NamedTuple):
    """The engine process takes requests. n_ctx: most tokens of a request, prompt and answer
    together. n_waiting: most requests that wait for a slot."""

    model: str
    device: str
    n_vocab: int
    n_ctx: int
    n_slots: int
    n_waiting: int


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities at temperature 1, before anything is cut away.

    drawn: of the token that was drawn. tokens, values: the likeliest, in falling order, (k,) int32
    and (k,) float32.
    """

    drawn: float
    tokens: np.ndarray
    values: np.ndarray


class Timings(NamedTuple):
    """Of one request. n_cached: tokens of the prompt whose cells were there. prompt_s: from its
    first step until its first token. made_s: from there to its last token. sampling_s: of the
    choice of its tokens, on the host or on the device."""

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
    """What the engine process has counted since it began, and what it has now."""

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


class Made(NamedTuple):
    """What a step made. numbers (n,) int64 and tokens (n,) int32: the requests that have a token of
    it, and the token. logprobs: by number, of those that asked. ended: requests that are over."""

    numbers: np.ndarray
    tokens: np.ndarray
    logprobs: dict[int, Logprobs]
    ended: tuple[Ended, ...]
    totals: Totals


class Refused(NamedTuple):
    """A request that is not served. retry_after_s: when to come again, where it was the load; None
    where the request itself cannot be served."""

    number: int
    why: str
    retry_after_s: float | None
