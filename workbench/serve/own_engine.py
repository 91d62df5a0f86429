"""An engine of this process behind the pipe that an engine process has: a load without a process.

A notebook has an engine already. So a load can be served by it, where a second process would load
the weights again. There is one thread: whoever waits for a message takes the steps that bring it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

from workbench.engine.asks import Ask
from workbench.engine.engine import Engine
from workbench.engine.slots import Slots
from workbench.serve.messages import Cancel, Made, Ready, Refused


class OwnEngine:
    """One end of a pipe, as `PipeTarget` wants it; `send` and `poll` are its front's.

    n_slots: requests served together, of the engine's sequences. Raises UsageError where the engine
    has fewer. The cache of the engine is emptied.
    """

    def __init__(self, engine: Engine, n_slots: int):
        engine.reset()
        self.slots = Slots(engine, n_slots)
        self._said: deque[Any] = deque()
        self._said.append(
            Ready(
                engine.model.name or str(engine.model.path), engine.device, engine.model.n_vocab,
                self.slots.room, n_slots, self.slots.n_waiting,
            )
        )  # fmt: skip

    def send(self, message: Ask | Cancel, /) -> None:
        """Takes a request, or that nobody wants the rest of one."""
        if isinstance(message, Cancel):
            self.slots.cancel(message.number)
            return
        why, after = self.slots.refusal(message), None
        if not why and self.slots.is_full:
            why, after = "the engine is busy", self.slots.retry_after_s()
        if why:
            self._said.append(Refused(message.number, why, after))
        else:
            self.slots.ask(message)

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """Whether there is a message. Takes a step for it; waits where nothing is to be done."""
        if not self._said:
            if not self.slots.idle:
                self._step()
            elif timeout:
                time.sleep(timeout)
        return bool(self._said)

    def recv(self) -> Any:
        """The next message; raises EOFError where nothing can bring one."""
        while not self._said:
            if self.slots.idle:
                raise EOFError
            self._step()
        return self._said.popleft()

    def _step(self) -> None:
        tokens, ended, scores = self.slots.step()
        if tokens or ended or scores:
            self._said.append(
                Made(
                    np.array([t.number for t in tokens], np.int64),
                    np.array([t.token for t in tokens], np.int32),
                    {t.number: t.logprobs for t in tokens if t.logprobs is not None},
                    tuple(ended), self.slots.totals(), scores,
                )
            )  # fmt: skip
