"""An engine process that is none: speaks `messages.py` from a thread, makes tokens without a model.

A prompt's tokens say what is made of it: after a prompt whose last token is t come t+1, t+2, ...
within the vocabulary, or the given `script`. Everything else is as the engine's: slots, a queue,
one message for a step, cancellation, timeouts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from workbench.engine.slots import asks
from workbench.engine.slots.asks import Ask, Ended, Logprobs, Timings, Totals
from workbench.server.wire.messages import Cancel, Finish, Made, Preparing, Ready, Refused


class _Seat:
    """A request under way."""

    def __init__(self, ask: Ask):
        self.ask, self.n_made, self.began = ask, 0, time.perf_counter()
        self.last = int(ask.tokens[-1])


class FakeWorker:
    """Both ends of the pipe, and the thread at one of them.

    step_s: of a step. load_s, prepare_s: the longest until it has loaded, and is prepared; `loaded`
    and `prepared` end it. script: tokens that every answer is made of, in turn; None: counting.
    asked, cancelled: what came, for tests to look at."""

    def __init__(
        self, n_vocab: int, n_ctx: int = 512, n_slots: int = 8, n_waiting: int = 64,
        step_s: float = 0.0, script: Sequence[int] | None = None,
        fails: Callable[[Ask], bool] = lambda ask: False, load_s: float = 0.0,
        prepare_s: float = 0.0,
    ):  # fmt: skip
        self.ready = Ready("fake.gguf", "no device", n_vocab, n_ctx, n_slots, n_waiting)
        self.step_s, self.script, self.fails = step_s, script, fails
        self.load_s, self.prepare_s = load_s, prepare_s
        self.asked: list[Ask] = []
        self.cancelled: list[int] = []
        self.finished, self.loaded, self.prepared = (threading.Event() for _ in range(3))
        self.killed = self._no_more = False
        self._seats: dict[int, _Seat] = {}
        self._waiting: deque[Ask] = deque()
        self._ended: list[Ended] = []
        self._steps = self.n_made = self._prompt = 0

    def start(self, n_fronts: int = 1) -> tuple[list[Connection], FakeWorker]:
        """As `server.Start`, for one front."""
        assert n_fronts == 1
        self.front, self.own = Pipe()
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        return [self.front], self

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        """It dies at once, whatever runs."""
        self.killed = True

    def serve(self) -> None:
        """What the thread does: all of a life at `own`."""
        try:
            self.loaded.wait(self.load_s)
            if not self.killed and self.prepare_s:
                self.own.send(Preparing())
                self.prepared.wait(self.prepare_s)
            if not self.killed:
                self.own.send(self.ready)
            while not self.killed and not (self._no_more and not self._seats and not self._waiting):
                self._read()
                self._step()
            self.finished.set()
        except (EOFError, OSError):
            return  # the front has gone
        finally:
            self.own.close()

    def _read(self) -> None:
        idle = not (self._seats or self._waiting or self._ended)
        while self.own.poll(0.002 if idle else 0):
            message, idle = self.own.recv(), False
            if isinstance(message, Ask):
                self._asked(message)
            elif isinstance(message, Cancel):
                self.cancelled.append(message.number)
                for ask in [a for a in self._waiting if a.number == message.number]:
                    self._waiting.remove(ask)
                    self._end(_Seat(ask), asks.CANCELLED)
                if message.number in self._seats:
                    self._end(self._seats[message.number], asks.CANCELLED)
            elif isinstance(message, Finish):
                self._no_more = True

    def _asked(self, ask: Ask) -> None:
        self.asked.append(ask)
        if len(ask.tokens) + ask.max_tokens > self.ready.n_ctx:
            self.own.send(Refused(ask.number, "too long for the cache", None))
        elif len(self._waiting) >= self.ready.n_waiting:
            self.own.send(Refused(ask.number, "too many requests wait", 1.5))
        else:
            self._waiting.append(ask)

    def _end(self, seat: _Seat, reason: str, why: str = "") -> None:
        self._seats.pop(seat.ask.number, None)
        took = (time.perf_counter() - seat.began) / 2
        timings = Timings(0.0, len(seat.ask.tokens), 0, took, seat.n_made, took, 0.0)
        self._ended.append(Ended(seat.ask.number, reason, timings, why))

    def _step(self) -> None:
        while self._waiting and len(self._seats) < self.ready.n_slots:
            ask = self._waiting.popleft()
            self._seats[ask.number] = _Seat(ask)
            self._prompt += len(ask.tokens)
        if not self._seats and not self._ended:
            return
        if self.step_s:
            time.sleep(self.step_s)
        made: dict[int, int] = {}
        logprobs, scores = {}, {}
        for number, seat in list(self._seats.items()):
            ask, n = seat.ask, seat.ask.n_logprobs
            if self.fails(ask):
                self._end(seat, asks.FAILED, "the fake was told to")
                continue
            if ask.scores_prompt and not seat.n_made:
                scores[number] = [self._logprobs(t, n or 0) for t in ask.tokens[1:].tolist()]
            token = self._next(seat)
            if not ask.max_tokens or token in ask.ends:
                self._end(seat, asks.STOP if ask.max_tokens else asks.LENGTH)
                continue
            seat.n_made += 1
            made[number] = token
            if n is not None:
                logprobs[number] = self._logprobs(token, n)
            late = ask.timeout_s is not None and time.perf_counter() - seat.began > ask.timeout_s
            if late or seat.n_made == ask.max_tokens:
                self._end(seat, asks.TIMEOUT if late else asks.LENGTH)
        self._steps += 1
        self.n_made += len(made)
        ended, self._ended = tuple(self._ended), []
        n_used = sum(s.n_made for s in self._seats.values())
        totals = Totals(
            self._steps, self._prompt, 0, self.n_made, 0.0, 0.0, len(self._seats),
            len(self._waiting), n_used, 4096,
        )  # fmt: skip
        numbers, tokens = np.array([*made], np.int64), np.array([*made.values()], np.int32)
        self.own.send(Made(numbers, tokens, logprobs, ended, totals, scores))

    def _next(self, seat: _Seat) -> int:
        if self.script is not None:
            return self.script[seat.n_made % len(self.script)]
        seat.last = (seat.last + 1) % self.ready.n_vocab
        return seat.last

    def _logprobs(self, token: int, n: int) -> Logprobs:
        others = (token + np.arange(n)) % self.ready.n_vocab
        return Logprobs(-0.5, others.astype(np.int32), -0.5 - np.arange(n, dtype=np.float32))
