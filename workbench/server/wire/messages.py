"""The messages between a server's front and its engine process.

The front speaks HTTP and knows text. The engine process knows tokens. Between them is a pipe
(`multiprocessing.Pipe`), on which each message is one of these tuples. The engine sends one `Made`
for a step, however many requests the step served. While steps are made, a `Made` comes at least
every 0.25 s; it may have no tokens, and then carries the counts alone. Times are seconds.

    front                               engine process
                      <- Preparing      the model is loaded; kernels and first steps come next
                      <- Ready          the engine takes requests
    Ask, Ask, Cancel  ->
                      <- Made           after each step: a token for each request it served
                      <- Refused        for an Ask that cannot be served, or not now
    Finish            ->                no request comes any more
                      <- Made ..        until all requests have ended; then the pipe is closed

Every Ask has exactly one answer: its number comes in one `Ended` or one `Refused`, and in no
message after that. A pipe that closes earlier means that the engine process has died.
"""

from typing import NamedTuple

import numpy as np

from workbench.engine.slots.asks import CANCELLED as CANCELLED
from workbench.engine.slots.asks import FAILED as FAILED
from workbench.engine.slots.asks import LENGTH as LENGTH
from workbench.engine.slots.asks import STOP as STOP
from workbench.engine.slots.asks import STOP_TEXT as STOP_TEXT
from workbench.engine.slots.asks import TIMEOUT as TIMEOUT
from workbench.engine.slots.asks import Ask as Ask
from workbench.engine.slots.asks import Ended as Ended
from workbench.engine.slots.asks import Logprobs as Logprobs
from workbench.engine.slots.asks import Timings as Timings
from workbench.engine.slots.asks import Totals as Totals
from workbench.engine.slots.asks import foremost as foremost


class Cancel(NamedTuple):
    """Cancels a request, which ends with CANCELLED if it has not ended already."""

    number: int


class Finish(NamedTuple):
    """No further Ask comes."""


class Preparing(NamedTuple):
    """The model is loaded. The engine now compiles and captures for the first requests."""


class Ready(NamedTuple):
    """The engine process takes requests.

    n_ctx: most tokens of a request, prompt and answer together.
    n_waiting: most requests that wait for a slot.
    """

    model: str
    device: str
    n_vocab: int
    n_ctx: int
    n_slots: int
    n_waiting: int


class Made(NamedTuple):
    """The results of a step.

    numbers, tokens: (n,) int64 requests that got a token, and (n,) int32 their tokens.
    logprobs: by number, of requests that asked for them.
    ended: requests that have ended.
    scores: by number, of the next tokens of prompts that are scored; None: no prompt is.
    """

    numbers: np.ndarray
    tokens: np.ndarray
    logprobs: dict[int, Logprobs]
    ended: tuple[Ended, ...]
    totals: Totals
    scores: dict[int, list[Logprobs]] | None = None


class Refused(NamedTuple):
    """A request that is not served. retry_after_s: when to try again, where the server was full;
    None where the request itself cannot be served."""

    number: int
    why: str
    retry_after_s: float | None
