"""An engine process that computes nothing, at the other end of a pipe: `messages`, step by step."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from workbench.server.wire import messages as msg

READY = msg.Ready("fake", "null", 800, 4096, 4, 8)
TOTALS = msg.Totals(0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0)
REFUSED_ID, TOO_LONG_ID, FAILED_ID, ENDLESS_ID = 901, 902, 903, 904


class FakeEngine:
    """steps: requests that each step served. asked: every Ask in its order. dies_after: steps,
    behind which the pipe is closed."""

    def __init__(self, step_s: float = 0.001, n_slots: int = 4, dies_after: int = 1 << 30):
        self.step_s, self.n_slots, self.dies_after = step_s, n_slots, dies_after
        self.steps: list[int] = []
        self.asked: list[msg.Ask] = []
        self.cancelled: list[int] = []

    def work(self, pipe: Connection) -> None:
        pipe.send(READY)
        waiting: list[msg.Ask] = []
        running: dict[int, list[int]] = {}  # number -> tokens made, tokens wanted
        with contextlib.suppress(EOFError, OSError):
            while len(self.steps) < self.dies_after:
                while pipe.poll(None if not running and not waiting else 0):
                    said = pipe.recv()
                    if isinstance(said, msg.Finish):
                        return
                    if isinstance(said, msg.Cancel):
                        self.cancelled.append(said.number)
                        if running.pop(said.number, None) is not None:
                            pipe.send(made([], [ended(said.number, msg.CANCELLED)]))
                        continue
                    self.asked.append(said)
                    if said.tokens[0] in (REFUSED_ID, TOO_LONG_ID):
                        again = 1.0 if said.tokens[0] == REFUSED_ID else None
                        pipe.send(msg.Refused(said.number, "no room", again))
                    else:
                        waiting.append(said)
                while waiting and len(running) < self.n_slots:
                    ask = waiting.pop(0)
                    endless = ask.tokens[0] == ENDLESS_ID
                    running[ask.number] = [0, 1 << 30 if endless else ask.max_tokens]
                    if ask.tokens[0] == FAILED_ID:
                        running.pop(ask.number)
                        pipe.send(made([], [ended(ask.number, msg.FAILED, "a bad step")]))
                time.sleep(self.step_s)
                numbers = list(running)
                over = []
                for number in numbers:
                    running[number][0] += 1
                    if running[number][0] == running[number][1]:
                        running.pop(number)
                        over.append(ended(number, msg.LENGTH))
                if numbers:
                    self.steps.append(len(numbers))
                    pipe.send(made(numbers, over))


def made(numbers: list[int], over: list[msg.Ended]) -> msg.Made:
    tokens = np.zeros(len(numbers), np.int32)
    return msg.Made(np.array(numbers, np.int64), tokens, {}, tuple(over), TOTALS)


def ended(number: int, reason: str, why: str = "") -> msg.Ended:
    return msg.Ended(number, reason, msg.Timings(0.0, 0, 0, 0.0, 0, 0.0, 0.0), why)


@contextlib.contextmanager
def running(engine: FakeEngine) -> Iterator[Connection]:
    """The front's end of the pipe to an engine in a thread."""
    ours, theirs = Pipe()

    def work() -> None:
        with theirs:
            engine.work(theirs)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.send(msg.Finish())
        ours.close()
        thread.join(10)
