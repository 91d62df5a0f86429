"""Answers in the making: tokens of the engine become events of a stream, or a whole answer.

An HTTP request is one `Reply` with a `Continuation` for each prompt and each of its `n` answers.
The engine's messages come many times a second. So a continuation does no more than its request
needs: `append` to a list where the request asks for the whole text, a decoder where the request
streams or has stop texts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from workbench.server.api.echo import Echo
from workbench.server.api.faults import ApiError
from workbench.server.api.reading import Prompt, Wanted
from workbench.server.text import MeasuringDecoder, StopSearch, TokenTexts
from workbench.server.wire.messages import (
    FAILED,
    STOP,
    STOP_TEXT,
    Ended,
    Logprobs,
    Timings,
    foremost,
)

MOST_BUFFERED = 1 << 20  # bytes of a stream that its client has not read
MOST_EVENTS = 1 << 16  # likewise events, while the beginning of the answer waits to be sent
SLOW = "the client takes events more slowly than they are made; read faster, or do not stream"


class Form(Protocol):
    """How an endpoint words its answers."""

    def token(self, part: Continuation, text: str) -> bytes:
        """The event of a token. text: the text that is certain now; it may be empty."""

    def end(self, part: Continuation, text: str, last: bool) -> bytes:
        """The event of a continuation's end. last: no other continuation of the reply runs."""

    def last(self, reply: Reply) -> bytes:
        """The events after all others."""

    def whole(self, reply: Reply) -> bytes:
        """The answer of a request that does not stream."""


class Continuation:
    """One answer to one prompt.

    tokens: of the engine so far.
    reason: why the continuation ended, in the client's words.
    echo: the prompt, where the answer begins with it.
    take: takes the next token.
    """

    __slots__ = (
        "_decoder", "_n_logged", "_parts", "_search", "_text", "echo", "index",
        "logprobs", "n_prompt", "number", "reason", "reply", "take", "timings", "tokens",
    )  # fmt: skip

    def __init__(self, reply: Reply, index: int, number: int, prompt: Prompt):
        wanted, texts = reply.wanted, reply.texts
        self.reply, self.index, self.number, self.n_prompt = reply, index, number, len(prompt.ids)
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.echo: Echo | None = None
        if wanted.echo:
            self.echo = Echo(texts, prompt.ids.tolist(), prompt.text, wanted.add_bos)
        self.reason: str | None = None
        self.timings: Timings | None = None
        self._parts: list[str] = []
        self._text: str | None = None
        self._n_logged = 0  # tokens whose logprobs were sent
        self._decoder = texts.decoder() if wanted.n_logprobs is None else texts.measuring()
        self._search = StopSearch(wanted.stop) if wanted.stop else None
        self.take: Callable[[int], None]
        if wanted.stream:
            self.take = self._take_streamed
        else:
            self.take = self._take if wanted.stop else self.tokens.append

    @property
    def text(self) -> str:
        """The whole text of a request that does not stream."""
        if self._text is None:
            self._text = (
                "".join(self._parts) if self._search else self.reply.texts.text(self.tokens)
            )
        return self._text

    @property
    def stop_text(self) -> str:
        """The stop text that ended the continuation; empty where no stop text did."""
        return self._search.found if self._search else ""

    @property
    def offsets(self) -> list[int]:
        """For each token with logprobs: the characters of the answer before it."""
        decoder = self._decoder
        assert isinstance(decoder, MeasuringDecoder)
        for token in self.tokens[len(decoder.offsets) :]:  # of an answer that is decoded as a whole
            decoder.feed(token)
        return decoder.offsets

    @property
    def n_kept(self) -> int:
        """How many tokens with logprobs begin before a stop text, or before text that may still
        become a stop text."""
        if self._search is None:
            return len(self.tokens)
        assert isinstance(self._decoder, MeasuringDecoder)
        return self._decoder.n_before(self._search.n_given)

    def to_log(self) -> tuple[int, int]:
        """The range of tokens whose logprobs the next event carries: first and end."""
        begin = self._n_logged
        self._n_logged = max(begin, self.n_kept)
        return begin, self._n_logged

    def _take(self, token: int) -> None:
        text = self._certain(token)
        if text:
            self._parts.append(text)

    def _take_streamed(self, token: int) -> None:
        self.reply.emit(self.reply.form.token(self, self._certain(token)))

    def _certain(self, token: int) -> str:
        self.tokens.append(token)
        text = self._decoder.feed(token)
        if self._search is None:
            return text
        text = self._search.feed(text)
        if self._is_cut:
            self.reply.cancel(self.number)
        return text

    def end(self, ended: Ended) -> None:
        """Ends the continuation: no more tokens come."""
        rest = ""
        if not self._is_cut:
            rest = self._decoder.flush()
            if self._search is not None:
                rest = self._search.feed(rest) + self._search.flush()
        told = foremost([ended.reason, *[STOP_TEXT] * self._is_cut])
        self.reason = STOP if told == STOP_TEXT else told
        self.timings = ended.timings
        if rest and self._search and not self.reply.wanted.stream:
            self._parts.append(rest)
        self.reply.ended(self, rest, ended)

    @property
    def _is_cut(self) -> bool:
        """Whether a stop text was found."""
        return self._search is not None and self._search.found_at is not None


class Reply:
    """The answer to one HTTP request.

    The reply's coroutine is woken at most once for each message of the engine where the answer is
    streamed, else once at the end. Where a connection can be written to `direct`ly, events need no
    coroutine.

    prompts: each has wanted.n answers, one after another in `parts`.
    numbers: gives each answer its number in the engine.
    touched: gathers replies that have events; their `flush` is called after each message.
    """

    def __init__(
        self,
        wanted: Wanted,
        prompts: Sequence[Prompt],
        form: Form,
        texts: TokenTexts,
        numbers: Iterator[int],
        cancel: Callable[[int], None],
        touched: list[Reply],
    ):
        self.wanted, self.form, self.texts, self.cancel = wanted, form, texts, cancel
        self._touched = touched
        every = [prompt for prompt in prompts for _ in range(wanted.n)]
        self.parts = [Continuation(self, i, next(numbers), each) for i, each in enumerate(every)]
        self.left = len(self.parts)  # continuations that have not ended
        self.error: ApiError | None = None
        self.begun_at = time.perf_counter()
        self.dropped = False  # the client has gone, or reads nothing
        self.abort: Callable[[], None] | None = None  # closes the connection
        # writes events without the coroutine; the coroutine sends the events that it refuses
        self.direct: Callable[[bytes], int] | None = None
        self._events: list[bytes] = []
        self._touches = False  # whether the reply is among `touched`
        self._waiter: asyncio.Future[None] | None = None
        self._awake = False

    @property
    def over(self) -> bool:
        return self.error is not None or self.dropped or self.left == 0

    async def news(self) -> None:
        """Waits until there are events to send, or the reply is over."""
        if not self._awake:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        self._awake = False

    def wake(self) -> None:
        self._awake = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def has_events(self) -> bool:
        """Whether there are events that were not taken."""
        return bool(self._events)

    def taken(self) -> bytes:
        """The events since the last call."""
        body = b"".join(self._events)
        self._events.clear()
        return body

    def emit(self, event: bytes) -> None:
        """Adds an event; `flush` sends it."""
        if not self._touches:
            self._touches = True
            self._touched.append(self)
        self._events.append(event)

    def flush(self) -> None:
        """Sends the events, or wakes the coroutine that sends them. A client that reads too little
        gets an error after the events it has."""
        self._touches = False
        if self.over:
            self.wake()
        elif self.direct is not None:
            if self.direct(self.taken()) > MOST_BUFFERED:
                self.fail(ApiError(408, SLOW, code="slow_client"))
        else:
            self.wake()
            if len(self._events) > MOST_EVENTS:
                self.fail(ApiError(408, SLOW, code="slow_client"))

    def ended(self, part: Continuation, rest: str, ended: Ended) -> None:
        """Notes the end of a continuation."""
        self.left -= 1
        if part.reason == FAILED:
            self.fail(ApiError(500, f"the step failed: {ended.why}"))
        elif self.wanted.stream and not self.dropped and self.error is None:
            self.emit(self.form.end(part, rest, self.left == 0))
        if self.left == 0:
            self.wake()

    def fail(self, error: ApiError) -> None:
        """Ends the reply with an error."""
        if self.error is None:
            self.error = error
            self._cancel_all()
            self.wake()

    def drop(self) -> None:
        """Cancels the rest: the client has gone. A client that does not read is not waited for."""
        self.dropped = True
        self._cancel_all()
        if self.abort is not None:
            self.abort()
        self.wake()

    def _cancel_all(self) -> None:
        for part in self.parts:
            if part.reason is None:
                self.cancel(part.number)
