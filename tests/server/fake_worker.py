"""An engine process that is none: a thread, whose slots make tokens without a model.

A prompt's tokens say what is made of it: after a prompt whose last token is t come t+1, t+2, ...
within the vocabulary, or the given `script`. All else is the engine process's own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np

from workbench.engine.slots import asks
from workbench.engine.slots.asks import Ask, Ended, Logprobs, Request, Stepped, Token, Totals
from workbench.server.wire.messages import Preparing
from workbench.server.wire.worker import EngineCore
from workbench.trace.spans import now_ns


class FakeWorker:
    """Process and slots.

    step_s: of a step. load_s, prepare_s: the longest until it has loaded, and is prepared; `loaded`
    and `prepared` end it. script: tokens that every answer is made of, in turn; None: counting.
    asked, cancelled: what came, for tests to look at."""

    def __init__(
        self, n_vocab: int, n_ctx: int = 512, n_slots: int = 8, n_waiting: int = 64,
        step_s: float = 0.0, script: Sequence[int] | None = None,
        fails: Callable[[Ask], bool] = lambda ask: False, load_s: float = 0.0,
        prepare_s: float = 0.0,
    ):  # fmt: skip
        model = SimpleNamespace(name="fake.gguf", n_vocab=n_vocab)
        self.engine = SimpleNamespace(model=model, device="no device")
        self.room, self.slots, self.n_waiting = n_ctx, range(n_slots), n_waiting
        self.step_s, self.script, self.fails = step_s, script, fails
        self.load_s, self.prepare_s = load_s, prepare_s
        self.asked, self.cancelled = list[Ask](), list[int]()
        self.finished, self.loaded, self.prepared = (threading.Event() for _ in range(3))
        self.killed = False
        self._requests: dict[int, Request] = {}  # those that come first have slots
        self._ended: list[Ended] = []
        self._n_steps = self._n_made = self._n_prompt = 0

    # the process

    def start(self, n_fronts: int = 1) -> tuple[list[Connection], FakeWorker]:
        """As `server.Start`, for one front."""
        assert n_fronts == 1
        front, self._own = Pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.join, self.is_alive = self._thread.join, self._thread.is_alive
        return [front], self

    def kill(self) -> None:
        """It dies at once, whatever runs."""
        self.killed = True

    def _serve(self) -> None:
        with self._own, suppress(SystemExit):
            self.loaded.wait(self.load_s)
            if self.prepare_s:
                self._own.send(Preparing())
                self.prepared.wait(self.prepare_s)
            if not self.killed:
                EngineCore(self, [self._own]).run()  # type: ignore[arg-type]
                self.finished.set()

    # its slots

    @property
    def idle(self) -> bool:
        if self.killed:
            sys.exit()
        return not (self._requests or self._ended)

    @property
    def is_full(self) -> bool:
        return len(self._requests) >= len(self.slots) + self.n_waiting

    def refusal(self, ask: Ask) -> str:
        return "too long" if len(ask.tokens) + ask.max_tokens > self.room else ""

    def retry_after_s(self) -> float:
        return 1.5

    def ask(self, ask: Ask) -> None:
        self.asked.append(ask)
        self._requests[ask.number] = Request(ask, self.room)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        self._end(number, asks.CANCELLED)

    def _end(self, number: int, reason: str, why: str = "") -> None:
        if request := self._requests.pop(number, None):
            self._ended.append(Ended(number, reason, request.timings(), why))

    def drop(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def _running(self) -> list[Request]:
        return [*self._requests.values()][: len(self.slots)]

    def totals(self) -> Totals:
        running = self._running()
        return Totals(
            self._n_steps, self._n_prompt, 0, self._n_made, 0.0, 0.0, len(running),
            len(self._requests) - len(running), sum(r.made for r in running), 4096,
        )  # fmt: skip

    def step(self) -> Stepped:
        time.sleep(self.step_s)
        self._n_steps += 1
        found, now = Stepped([], [], {}), now_ns()
        for request in self._running():
            ask, number, n = request.ask, request.ask.number, request.ask.n_logprobs
            if not request.begun_ns:
                request.begun_ns = request.first_ns = now
                self._n_prompt += len(ask.tokens)
                if ask.scores_prompt:
                    found.scores[number] = [self._logprobs(t, n or 0) for t in ask.tokens[1:]]
            token = (int(ask.tokens[-1]) + request.made + 1) % self.engine.model.n_vocab
            if self.script is not None:
                token = self.script[request.made % len(self.script)]
            if self.fails(ask):
                self._end(number, asks.FAILED, "the fake was told to")
            elif not request.most or token in ask.ends:
                self._end(number, asks.STOP if request.most else asks.LENGTH)
            else:
                request.made, request.last_ns = request.made + 1, now
                known = None if n is None else self._logprobs(token, n)
                found.tokens.append(Token(number, token, known))
                late = request.is_late(now)
                if late or request.made == request.most:
                    self._end(number, asks.TIMEOUT if late else asks.LENGTH)
        self._n_made += len(found.tokens)
        return found._replace(ended=self.drop())

    def _logprobs(self, token: int, n: int) -> Logprobs:
        others = (int(token) + np.arange(n)) % self.engine.model.n_vocab
        return Logprobs(-0.5, others.astype(np.int32), -0.5 - np.arange(n, dtype=np.float32))
