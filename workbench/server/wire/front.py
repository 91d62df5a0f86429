"""The front: it hands requests to the engine process, and tokens to the replies under way."""

from __future__ import annotations

import itertools
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from workbench.server.api.faults import FAILED_HERE, ApiError, bad
from workbench.server.api.reading import Defaults, Prompt, Wanted
from workbench.server.metrics import Counted
from workbench.server.reply import Continuation, Form, Reply
from workbench.server.text import TokenTexts
from workbench.server.wire.link import Link, Message
from workbench.server.wire.messages import (
    Ask,
    Cancel,
    Ended,
    Finish,
    Made,
    Preparing,
    Ready,
    Refused,
    Totals,
)

LOADING, PREPARING, SERVING = "loading", "preparing", "serving"
FINISHING, DEAD = "finishing", "dead"
BEGINNING = (LOADING, PREPARING)  # no request is taken yet
NOT_NOW = {
    LOADING: "the model is being loaded; come again",
    PREPARING: "kernels are being compiled and first steps are taken; come again",
    FINISHING: "the server is shutting down",
    DEAD: "the engine process has died; start the server again",
}


class FrontSettings(NamedTuple):
    """Limits and defaults. Sizes are bytes, times are seconds.

    keys: a request must carry one of them; empty: no key is needed.
    origins: pages of these origins may send requests; *: pages of all origins.
    reads_at_once: the process that reads long bodies starts with the server, not with the first
        long body.
    """

    model: str
    defaults: Defaults = Defaults()
    keys: tuple[bytes, ...] = ()
    max_body: int = 16 << 20
    body_s: float = 30.0
    max_pending: int = 4096
    template_s: float = 5.0
    origins: tuple[str, ...] = ()
    reads_at_once: bool = False


class Front:
    """Hands requests to the engine process, and each token to the request it belongs to."""

    def __init__(self, link: Link, texts: TokenTexts, settings: FrontSettings):
        self.texts, self.settings, self.counted = texts, settings, Counted()
        self.state = LOADING
        self.ready: Ready | None = None
        self.totals: Totals | None = None
        # called when the engine prepares, serves, is dead
        self.on_state: Callable[[], None] = _nothing
        self._link = link
        self._numbers = itertools.count()
        self._parts: dict[int, Continuation] = {}
        self._take: dict[int, Callable[[int], None]] = {}
        self._touched: list[Reply] = []  # by the present message
        self._n_first = 0  # tokens of the present message that are first tokens
        self._last_s: float | None = None  # the time of the last tokens

    async def begin(self) -> None:
        """Called in the event loop, before any request."""
        await self._link.begin(self._got, self._lost)

    @property
    def n_pending(self) -> int:
        return len(self._parts)

    def check_serving(self) -> Ready:
        """Raises ApiError (503) where the server takes no request now."""
        if self.state != SERVING or self.ready is None:
            retry = 1.0 if self.state in BEGINNING else None
            raise ApiError(503, NOT_NOW[self.state], code=self.state, retry_after_s=retry)
        return self.ready

    def open(self, wanted: Wanted, prompts: Sequence[Prompt], form: Form) -> Reply:
        """Asks the engine for the answers to a request. Raises ApiError where the server serves no
        request of so many answers, or none now."""
        ready = self.check_serving()
        n, most = len(prompts) * wanted.n, self.settings.max_pending
        at_once = min(most, ready.n_slots + ready.n_waiting)
        if n > at_once:
            raise bad(f"the request wants {n} answers; ask for {at_once} at most")
        if len(self._parts) + n > most:
            raise ApiError(503, "too many requests wait; come again", retry_after_s=1)
        reply = Reply(
            wanted, prompts, form, self.texts, self._numbers, self.cancel, self._touched
        )  # fmt: skip
        first_seed = secrets.randbits(48) if wanted.seed is None else wanted.seed
        for at, part in enumerate(reply.parts):
            which, i = divmod(at, wanted.n)
            self._parts[part.number] = part
            self._take[part.number] = partial(self._first, part)
            self._link.send(
                Ask(
                    part.number, prompts[which].ids, prompts[which].most, wanted.sampling,
                    (first_seed + i) % 2**63, wanted.ends, wanted.n_logprobs, wanted.timeout_s,
                    wanted.cache_prompt, wanted.echo and wanted.n_logprobs is not None,
                )
            )  # fmt: skip
        return reply

    def cancel(self, number: int) -> None:
        """Cancels a request in the engine, which answers with an `Ended`."""
        if self._take.get(number, _nothing_of) is not _nothing_of:
            self._take[number] = _nothing_of
            self._link.send(Cancel(number))

    def refuse_new(self) -> None:
        """Refuses new requests; requests under way go on."""
        if self.state in (*BEGINNING, SERVING):
            self.state = FINISHING

    def give_up(self) -> None:
        """Ends the requests under way: their time is over."""
        for part in list(self._parts.values()):
            part.reply.fail(ApiError(503, NOT_NOW[FINISHING], code=FINISHING))

    async def finish(self) -> None:
        """Tells the engine process to end."""
        self._link.send(Finish())
        await self._link.end()

    # --- messages of the engine ----------------------------------------------------------------

    def _got(self, message: Message) -> None:
        if isinstance(message, Made):
            self._made(message)
        elif isinstance(message, Refused):
            self._refused(message)
        elif isinstance(message, Preparing):
            if self.state == LOADING:
                self.state = PREPARING
                self.on_state()
        elif isinstance(message, Ready):
            self.ready = message
            if self.state in BEGINNING:
                self.state = SERVING
                self.on_state()
        else:
            raise TypeError(f"the engine process sent {type(message).__name__}")

    def _made(self, made: Made) -> None:
        self.totals = made.totals
        n, now = len(made.numbers), time.perf_counter()
        for number, scores in (made.scores or {}).items():
            if (echo := self._parts[number].echo) is not None:
                echo.logprobs += scores
        for number, logprobs in made.logprobs.items():
            self._parts[number].logprobs.append(logprobs)
        self._n_first = 0
        take = self._take
        for number, token in zip(made.numbers.tolist(), made.tokens.tolist(), strict=True):
            try:
                take[number](token)
            except Exception as error:
                self._broken(self._parts[number].reply, error)
        if n:
            self.counted.n_made += n
            if self._last_s is not None:
                self.counted.between_tokens.add(now - self._last_s, n - self._n_first)
            self._last_s = now
        self._ended(made.ended)
        for reply in self._touched:
            try:
                reply.flush()
            except Exception as error:
                self._broken(reply, error)
        self._touched.clear()

    def _ended(self, ended: Iterable[Ended]) -> None:
        for each in ended:
            part = self._parts.pop(each.number)
            del self._take[each.number]
            try:
                part.end(each)
            except Exception as error:
                self._broken(part.reply, error)
            self.counted.ended(part, each)
        if not self._parts:
            self._last_s = None

    def _broken(self, reply: Reply, error: Exception) -> None:
        """Ends a reply whose events could not be written. All other replies go on."""
        if reply.error is None:
            traceback.print_exception(error, file=sys.stderr)
            reply.fail(ApiError(500, FAILED_HERE))

    def _first(self, part: Continuation, token: int) -> None:
        """Takes the first token of a continuation."""
        self._n_first += 1
        self.counted.first_token.add(time.perf_counter() - part.reply.begun_at)
        self._take[part.number] = part.take
        part.take(token)

    def _refused(self, refused: Refused) -> None:
        part = self._parts.pop(refused.number)
        del self._take[refused.number]
        part.reason = "refused"
        self.counted.outcomes["refused"] += 1
        status = 400 if refused.retry_after_s is None else 503
        part.reply.left -= 1
        part.reply.fail(ApiError(status, refused.why, retry_after_s=refused.retry_after_s))

    def _lost(self) -> None:
        """Ends all replies: the pipe was closed."""
        self.state = DEAD
        if self.totals is not None:  # its counts stay; its requests are gone
            self.totals = self.totals._replace(
                n_running=0, n_waiting=0, n_cells_used=0, n_cells_kept=0
            )
        parts = list(self._parts.values())
        self._parts.clear()
        self._take.clear()
        for part in parts:
            self.counted.outcomes["failed"] += 1
            part.reply.fail(ApiError(503, NOT_NOW[DEAD], code=DEAD))
        self.on_state()


def _nothing() -> None:
    pass


def _nothing_of(token: int) -> None:
    """Takes a token of a continuation that has ended."""
