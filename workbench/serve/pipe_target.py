"""An engine without HTTP: a load over the pipe that a server's front would have.

At its other end is an engine process, or an engine of this process (`own_engine.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from workbench.errors import UsageError, WorkbenchError
from workbench.model.sampler import Sampling
from workbench.serve import messages
from workbench.serve.load import Load, Starts
from workbench.serve.records import (
    FAILED,
    NO_TOKEN,
    OK,
    REFUSED,
    TIMEOUT,
    UNFINISHED,
    RequestRecord,
    Spent,
)
from workbench.serve.targets import GRACE_S, Asking, Offered

TIMER_S = 0.001

_STATUS = {
    messages.STOP: OK, messages.LENGTH: OK, messages.CANCELLED: UNFINISHED,
    messages.TIMEOUT: TIMEOUT, messages.FAILED: FAILED,
}  # fmt: skip


class MessagePipe(Protocol):
    """As a `Connection`: one end of a pipe on which `messages` go."""

    def send(self, message: Any, /) -> None: ...

    def poll(self, timeout: float | None = 0.0, /) -> bool: ...

    def recv(self) -> Any: ...


class _Asked(NamedTuple):
    """A request in the engine process, and when its tokens came, ns from the beginning."""

    request: int
    due_ns: int
    sent_ns: int
    times: list[int]


class PipeTarget:
    """Speaks `messages` from the thread that iterates. The pipe stays its caller's: who began the
    engine process ends it.

    Waits for Ready; raises WorkbenchError where the engine process ends instead.
    """

    def __init__(self, pipe: MessagePipe):
        self._pipe, self._number = pipe, 0
        self.spent: list[Spent] = []
        self.totals: messages.Totals | None = None
        while isinstance(said := _received(pipe), messages.Preparing):
            continue
        if not isinstance(said, messages.Ready):
            raise WorkbenchError("the engine process ended before it was ready; see its error")
        self.ready: messages.Ready = said

    def offer(self, load: Load, asking: Asking, most_s: float = math.inf) -> Offered:
        """See `targets.LoadTarget`. Raises WorkbenchError where the pipe is closed."""
        if not asking.streamed:
            raise UsageError("an engine process sends tokens as they come; leave --whole out")
        work = _Offer(self._pipe, load, asking, self._number)
        self._number += load.n
        try:
            yield from work.records(most_s)
        finally:
            work.cancel()
            self.totals = work.totals or self.totals


class _Offer:
    """One load. number: the last that was used before."""

    def __init__(self, pipe: MessagePipe, load: Load, asking: Asking, number: int):
        self._pipe, self._load = pipe, load
        self.totals: messages.Totals | None = None  # of the engine's last message
        self._starts = Starts(load.due_ns(), load)
        self._asked: dict[int, _Asked] = {}
        self._open = set[int]()  # numbers whose end the engine has not said
        sampling = Sampling(temperature=asking.temperature)
        self._asks = [
            messages.Ask(
                number + 1 + i, load.prompt(i), int(load.n_wanted[i]), sampling,
                load.sampling_seed(i), timeout_s=asking.timeout_s,
            )
            for i in range(load.n)
        ]  # fmt: skip
        self._begin = time.perf_counter_ns()

    def _now(self) -> int:
        return time.perf_counter_ns() - self._begin

    def records(self, most_s: float) -> Iterator[list[RequestRecord]]:
        until_ns = most_s * 1e9
        while (now := self._now()) < until_ns:
            for i, due in self._starts.due(now):
                ask = self._asks[i]
                self._asked[ask.number] = _Asked(i, due, self._now(), [])
                self._open.add(ask.number)
                self._pipe.send(ask)
            next_ns = self._starts.next_ns
            if next_ns is None and not self._asked:
                return
            wake_ns = until_ns if next_ns is None else min(next_ns, until_ns)
            # poll counts in ms; so the last one is spent looking at the clock
            left = (
                None if math.isinf(wake_ns) else max(0.0, (wake_ns - self._now()) / 1e9 - TIMER_S)
            )
            if self._pipe.poll(left) and (found := self._take()):
                yield found
        yield [self._record(n, self._now(), UNFINISHED) for n in list(self._asked)]

    def _take(self) -> list[RequestRecord]:
        """One message: the records of requests that are over with it."""
        said = _received(self._pipe)
        now = self._now()
        self._close(said)
        match said:
            case messages.Made():
                for number in said.numbers.tolist():
                    if asked := self._asked.get(number):
                        asked.times.append(now)
                return [
                    self._record(end.number, now, _STATUS[end.reason], end.reason, end.why)
                    for end in said.ended
                    if end.number in self._asked
                ]
            case messages.Refused() if said.number in self._asked:
                status = FAILED if said.retry_after_s is None else REFUSED
                return [self._record(said.number, now, status, why=said.why)]
            case None:
                raise WorkbenchError(
                    f"the engine process died with {len(self._asked)} requests in flight"
                )
        return []

    def _record(
        self, number: int, now: int, status: str, finish: str = "", why: str = ""
    ) -> RequestRecord:
        asked, load = self._asked.pop(number), self._load
        i, times = asked.request, np.array(asked.times, np.int64)
        if status == OK and not len(times):
            status = NO_TOKEN
        if status != UNFINISHED:
            self._starts.ended(now)
        return RequestRecord(
            i, int(load.n_prompt[i]), int(load.n_wanted[i]), len(times), asked.due_ns,
            asked.sent_ns, now, times, status, finish, why,
        )  # fmt: skip

    def cancel(self) -> None:
        """Lets the engine end what is in flight, so that the next load finds nothing of this."""
        until = time.monotonic() + GRACE_S
        with contextlib.suppress(OSError):  # the engine process has died; then nothing is in flight
            for number in self._open:
                self._pipe.send(messages.Cancel(number))
            while self._open and self._pipe.poll(max(0.0, until - time.monotonic())):
                said = _received(self._pipe)
                if said is None:
                    return
                self._close(said)

    def _close(self, said: Any) -> None:
        """Which requests have had their last message with this one."""
        match said:
            case messages.Made():
                self._open -= {end.number for end in said.ended}
                self.totals = said.totals
            case messages.Refused():
                self._open.discard(said.number)


def _received(pipe: MessagePipe) -> Any:
    """The next message; None where the other end is closed."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
