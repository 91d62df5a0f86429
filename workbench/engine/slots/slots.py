"""ROOM #14924: continuous batching. Requests share an engine, each in a slot, step by step.

A slot is a sequence of the engine's cache with a place in every step. A request waits until a slot
is free, and until cells for all of its tokens are free. So no request has to give way later:

    waiting   requests wait in the order in which they came; the first waits for what it needs
    prompt    the tokens of prompts go into steps as there is room. A step first has a token of each
              slot that generates. Then prompts fill it up to n_ubatch, in the order in which they
              began
    tokens    one in each step, until the last token, an end token, a time limit, or a cancellation

A prompt that is scored has logits of every token, which the host looks at. They are many bytes, so
a step has at most SCORED tokens of such prompts.

With sampling=device and results=behind, a step is issued before the host knows the tokens of the
step before. The host looks at those tokens while the device computes:

    device  | step n          | step n + 1      | step n + 2
    host     n + 1   n - 1     n + 2   n         n + 3   n + 1       issue .. look at results

So a request that turns out to be over has one more token under way. Nobody looks at that token, and
its cell is freed. With other toggles the host draws, and waits for each step.

A free slot keeps its cells. A prompt that begins like the tokens of a slot (its own, or another,
whose cells are copied or shared) is computed from the token where the two differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.common.errors import UsageError
from workbench.engine import exclusive
from workbench.engine.batch import Entry, Outputs, n_tokens
from workbench.engine.cache.defrag import make_way
from workbench.engine.slots.asks import (
    CANCELLED,
    FAILED,
    LENGTH,
    STOP,
    TIMEOUT,
    Ask,
    Ended,
    Logprobs,
    Request,
    Scores,
    Stepped,
    Token,
    Totals,
    foremost,
    logprobs,
)
from workbench.engine.slots.draws import FED
from workbench.engine.slots.seats import Seats, Slot, check_cells
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine
    from workbench.engine.step import Pending

RECENT = 1 / 16  # the weight of the last step in the average time of a step
SCORED = 32  # rows of logits of a step that score prompts: 16 MB at 128,000 tokens

NOT_FINITE = "its logits are not finite; the model or its cache is broken"


class _Row(NamedTuple):
    slot: Slot
    request: Request


class _Output(NamedTuple):
    """A row of a step's outputs, with its slot and request.

    scores: the number of the prompt's token that its logits score; 0: a token is drawn from them.
    """

    slot: Slot
    request: Request
    scores: int = 0


class _Step(NamedTuple):
    """A step under way. over: requests that end with their prompt, whose last token is in it."""

    pending: Pending
    rows: list[_Output]
    draws: bool
    begun_ns: int
    over: list[_Row]


class Slots:
    """n_slots slots of an engine. n_waiting: the most requests that wait for a slot.

    `ask` takes a request. `step` issues a step, and returns what an earlier step has made. The
    caller numbers requests, and gives each number once. The engine's cache is emptied.
    """

    def __init__(self, engine: Engine, n_slots: int, n_waiting: int = 1024):
        if not 0 < n_slots <= engine.cache.n_seqs:
            raise UsageError(
                f"{n_slots} slots; this engine has {engine.cache.n_seqs} sequences (n_seqs), and a "
                "server at least 1 slot"
            )
        if n_slots > engine.config.n_ubatch:
            raise UsageError(
                f"{n_slots} slots want a token each in a step, which has up to "
                f"{engine.config.n_ubatch} (n_ubatch); use fewer slots, or a larger n_ubatch"
            )
        shares = engine.cache.n_regions == 1
        check_cells(engine.cache.n_ctx_seq * (1 if shares else n_slots), n_slots)
        self.engine, self.n_waiting = engine, n_waiting
        self.room = engine.cache.n_ctx_seq  # cells that a request may have
        engine.reset()
        self._seats = Seats(engine.cache, n_slots, engine.toggles.slot_choice)
        self.slots = self._seats.slots
        self._on_device = engine.can_draw
        self._running: dict[int, _Row] = {}  # by number, in the order in which they began
        self._waiting: dict[int, Request] = {}
        self._under_way: deque[_Step] = deque()
        self._ended: list[Ended] = []
        self.n_steps = self.n_prompt = self.n_cached = self.n_made = self.n_moved = 0
        self.step_ns = self.sampling_ns = self._busy_until = 0
        self.recent_ns = 0.0  # average time of a step; the first, slow steps fade out of it

    # requests ----------------------------------------------------------------------------------

    def refusal(self, ask: Ask) -> str:
        """Why a request can never be served; empty where it can."""
        n = len(ask.tokens)
        if n > self.room:
            return f"the prompt has {n} tokens, and the context of a request is {self.room}"
        if not n or ask.max_tokens < 0:
            return f"{n} tokens of a prompt, {ask.max_tokens} to make; give at least 1, and 0"
        bad = next((t for t in np.asarray(ask.tokens).tolist() if not self._is_id(t)), None)
        if bad is not None:
            return f"token id {bad} is outside the vocabulary of {self.engine.model.n_vocab}"
        return ""

    def _is_id(self, token: int) -> bool:
        return 0 <= token < self.engine.model.n_vocab

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait. Requests that find a free slot do not wait."""
        return len(self._waiting) >= self.n_waiting + len(self._seats.free)

    def ask(self, ask: Ask) -> None:
        """Takes a request for which `refusal` is empty."""
        request = self._waiting[ask.number] = Request(ask, self.room)
        request.range = self.engine.ranges.start("request", "request", ask.number)

    def cancel(self, number: int) -> None:
        """Ends a request with CANCELLED, if it has not ended."""
        self._end(number, CANCELLED)

    def retry_after_s(self) -> float:
        """In how many seconds a slot will probably be free: from the recent time of a step, and the
        tokens that all requests here still have to make."""
        each_s = self.recent_ns / 1e9
        left = [request.most - request.made for _, request in self._running.values()]
        left += [request.most for request in self._waiting.values()]
        return max(1.0, each_s * sum(left) / len(self.slots))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._running or self._waiting or self._under_way or self._ended)

    def totals(self) -> Totals:
        cache, n_kept = self.engine.cache, self._seats.n_kept
        return Totals(
            self.n_steps, self.n_prompt, self.n_cached, self.n_made, self.step_ns / 1e9,
            self.sampling_ns / 1e9, len(self._running), len(self._waiting),
            cache.n_used - n_kept, cache.n_cells, n_kept,
        )  # fmt: skip

    # a step ------------------------------------------------------------------------------------

    @exclusive.door
    def step(self) -> Stepped:
        """Issues a step if there is work. Returns what the step before has made, or this step where
        the host waits for it. Where a step fails, its error is raised, and all requests have ended
        with FAILED; `drop` or the next `step` returns them."""
        with self.engine.ranges.scope("server step", "server", len(self._running)):
            return self._step()

    def _step(self) -> Stepped:
        self._expire()
        self._admit()
        draws = self._on_device and all(
            request.ask.n_logprobs is None for _, request in self._running.values()
        )
        found = Stepped([], [], {})
        if self._under_way and not (draws and self._under_way[-1].draws):
            self._complete(0, found)  # the host must know its tokens
        work, rows, over = self._work(draws)
        if work:
            begun = now_ns()
            with self._failing():
                self.n_moved += make_way(self.engine.cache, n_tokens(work), self.engine.toggles)
                pending = self.engine.submit(work, draws)
            self._under_way.append(_Step(pending, rows, draws, begun, over))
            self.n_steps += 1
        ahead = bool(work) and draws and self.engine.issuer.is_ahead
        self._complete(1 if ahead else 0, found)
        ended, self._ended = self._ended, []
        return found._replace(ended=ended)

    def _expire(self) -> None:
        now = now_ns()
        every = [*self._waiting.values(), *(request for _, request in self._running.values())]
        for request in every:
            if request.is_late(now):
                self._end(request.ask.number, TIMEOUT)

    def _admit(self) -> None:
        """Gives slots to waiting requests, in their order, as long as there are slots and cells."""
        while self._waiting:
            number, request = next(iter(self._waiting.items()))
            slot = self._seats.seat(request)
            if slot is None:
                return
            del self._waiting[number]
            self._running[number] = _Row(slot, request)
            request.begun_ns = now_ns()
            self.n_cached += request.n_cached
            self.engine.draws.samplers[slot.sequence] = request.sampler

    def _work(self, draws: bool) -> tuple[list[Entry], list[_Output], list[_Row]]:
        """The work of the next step: a token of each slot that generates, then as many tokens of
        prompts as fit. With it, the requests of its rows, and requests that end with their
        prompt."""
        work: list[Entry] = []
        rows: list[_Output] = []
        over: list[_Row] = []
        room, scored = self.engine.config.n_ubatch, SCORED
        begun = [row for row in self._running.values() if row.request.todo]
        for slot, request in self._running.values():
            if request.todo or request.planned >= request.most:
                continue
            token = FED if request.last is None else request.last
            if token == FED and not draws:
                raise AssertionError(f"the host does not know the last token of {slot.sequence}")
            work.append((slot.sequence, (token,), "last"))
            self._plan(slot, request, rows)
            slot.kept.add(token)
            room -= 1
        for row in begun:
            slot, request = row
            scores = request.ask.scores_prompt
            at, n = len(request.prompt) - request.todo, min(room, request.todo)
            if scores:
                n = min(n, scored)
                scored -= n
            if not n:
                continue
            tokens = request.prompt[at : at + n]
            request.todo -= n
            makes = not request.todo and request.most > 0
            outputs: Outputs = "all" if scores else "last" if makes else "none"
            work.append((slot.sequence, tokens.tolist(), outputs))
            if scores:
                ends = range(at + 1, at + n + (not makes))
                rows += [_Output(slot, request, end) for end in ends]
            slot.kept.extend(tokens)
            self.n_prompt += n
            room -= n
            if makes:
                self._plan(slot, request, rows)
            elif not request.todo:
                over.append(row)
        return work, rows, over

    def _plan(self, slot: Slot, request: Request, rows: list[_Output]) -> None:
        rows.append(_Output(slot, request))
        request.planned += 1
        request.last = None

    # results -----------------------------------------------------------------------------------

    def _complete(self, n: int, found: Stepped) -> None:
        """Looks at the results of all steps under way except the last n."""
        while len(self._under_way) > n:
            step = self._under_way.popleft()
            with self._failing():
                results = step.pending.wait()
            now = now_ns()
            own = now - max(step.begun_ns, self._busy_until)
            self.step_ns += own
            self.recent_ns += (own - self.recent_ns) * (RECENT if self.recent_ns else 1)
            self._busy_until = now
            if step.draws:
                took = int(results[:, 1].max(initial=0))
                self.sampling_ns += took
                for row, token in zip(step.rows, results[:, 0].tolist(), strict=True):
                    self._take(row, token, took, now, None, found.tokens)
            else:
                for row, logits in zip(step.rows, results, strict=True):
                    if row.scores:
                        self._score(row, logits, found.scores)
                        continue
                    begun = now_ns()
                    token = self.engine.draws.draw(row.slot.sequence, logits)
                    took = now_ns() - begun
                    self.sampling_ns += took
                    wanted = row.request.ask.n_logprobs
                    known = None if wanted is None else logprobs(logits, token, wanted)
                    self._take(row, token, took, now, known, found.tokens)
            for slot, request in step.over:
                if slot.request is request:
                    request.first_ns = request.last_ns = now
                    self._end_full(request, now)

    def _score(self, row: _Output, logits: np.ndarray, found: Scores) -> None:
        """Gives a request the logprobs of a token of its prompt, if it still runs."""
        request = row.request
        if row.slot.request is not request or row.scores == len(request.prompt):
            return
        number, wanted = request.ask.number, request.ask.n_logprobs or 0
        if not np.isfinite(logits.max()):
            self._end(number, FAILED, NOT_FINITE)
            return
        known = logprobs(logits, int(request.prompt[row.scores]), wanted)
        found.setdefault(number, []).append(known)

    def _take(
        self,
        row: _Output,
        token: int,
        took: int,
        now: int,
        known: Logprobs | None,
        found: list[Token],
    ) -> None:
        """Gives a request its token, if it still runs."""
        request, slot = row.request, row.slot
        if slot.request is not request:
            return
        number = request.ask.number
        request.sampling_ns += took
        if not self._is_id(token):
            self._end(number, FAILED, NOT_FINITE)
            return
        request.first_ns, request.last_ns = request.first_ns or now, now
        if token in request.ask.ends:
            self._end(number, STOP)
            return
        request.made += 1
        self.n_made += 1
        slot.kept.known(token, request.planned - request.made)
        if request.planned == request.made:
            request.last = token
        found.append(Token(number, token, known))
        if request.made == request.most:
            self._end_full(request, now)

    def _end_full(self, request: Request, now: int) -> None:
        """Ends a request that has all of its tokens."""
        reasons = [LENGTH, *[TIMEOUT] * request.is_late(now)]
        self._end(request.ask.number, foremost(reasons))

    def _end(self, number: int, reason: str, why: str = "") -> None:
        """Ends a request, if it has not ended. Its slot keeps the cells whose tokens are known."""
        request = self._waiting.pop(number, None)
        row = self._running.pop(number, None)
        if row is not None:
            request = row.request
            self._seats.leave(row.slot, request, keeps=reason != FAILED)
        if request is not None:
            self.engine.ranges.stop(request.range)
            self._ended.append(Ended(number, reason, request.timings(), why))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Where the body fails, all requests end with FAILED."""
        try:
            yield
        except BaseException as error:
            self._fail(f"the step failed: {error}")
            raise

    def _fail(self, why: str) -> None:
        self._under_way.clear()
        for number in [*self._running, *self._waiting]:
            self._end(number, FAILED, why)
        self._seats.forget()

    def drop(self) -> list[Ended]:
        """Ends all requests with FAILED, because the engine has failed. Returns them."""
        self._fail("the engine failed")
        ended, self._ended = self._ended, []
        return ended
