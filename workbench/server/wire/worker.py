"""The engine process of a server: requests in, one message a step out.

`EngineCore` serves the requests of the process. A load in a notebook has the same core without a
process (`OwnEngine`).

The process has the engine to itself, so no work of a front delays a step. Between two steps the
process reads messages. Without requests it waits for the pipes. It ends when every front has sent
Finish or is gone, and all requests have ended. Requests of a front that is gone are cancelled.
Where a step fails, all requests end with FAILED, and the process ends with an error.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.common.errors import WorkbenchError
from workbench.common.progress import shown_on
from workbench.config import BEST, EngineConfig, TogglePreset
from workbench.engine.slots.asks import FAILED, Ask, Ended, Scores, Stepped, Timings, Token, Totals
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.slots import Slots
from workbench.server.serving import serving
from workbench.server.wire.messages import Cancel, Finish, Made, Preparing, Ready, Refused

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from workbench.engine.engine import Engine

TELL_S = 0.25  # while steps are made, every front gets the counts at least so often
IDLE_S = 1.0  # how long to wait for requests before the pipes are checked again


class WorkerSettings(NamedTuple):
    """The settings of an engine process.

    toggles: by `serving` where they begin with preset best.
    n_slots: requests served together.
    n_waiting: most requests that wait for a slot.
    """

    model: str
    config: EngineConfig
    n_slots: int
    toggles: TogglePreset = TogglePreset(BEST)
    n_waiting: int = 1024


def start(settings: WorkerSettings, n_fronts: int = 1) -> tuple[list[Connection], SpawnProcess]:
    """Starts the process. Returns it with one end of a pipe for each front."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(n_fronts)]
    theirs = [pipe[1] for pipe in pipes]
    process = context.Process(target=main, args=(theirs, settings), name="engine")
    process.start()
    for end in theirs:
        end.close()
    return [pipe[0] for pipe in pipes], process


def main(fronts: list[Connection], settings: WorkerSettings) -> None:
    """Runs the process. An error that stops it is a line on stderr."""
    for sent_to_the_group in (signal.SIGINT, signal.SIGTERM):  # by a terminal, by a supervisor
        signal.signal(sent_to_the_group, signal.SIG_IGN)  # a front sends Finish
    try:
        with open_engine(settings) as engine:
            slots = Slots(engine, settings.n_slots, settings.n_waiting)
            core = EngineCore(slots, fronts)
            with shown_on(sys.stderr):
                core.prepare()
            core.run()
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def open_engine(settings: WorkerSettings) -> Engine:
    """Opens the engine of these settings."""
    from workbench.engine.engine import Engine

    wanted = serving(settings.config.device, settings.toggles)
    return Engine.load(settings.model, config=settings.config, toggles=wanted)


class EngineCore:
    """Serves the requests of some fronts with some slots.

    fronts: pipes to them. Without `run`, any object with a `send` can stand for a pipe.
    Each front numbers its own requests; the slots have other numbers.
    """

    def __init__(self, slots: Slots, fronts: Sequence[Any]):
        self.slots = slots
        self._fronts = dict(enumerate(fronts))
        self._asking = set(self._fronts)  # fronts that may ask for more
        # for each request of the slots: its front, and its number in that front
        self._of: dict[int, tuple[int, int]] = {}
        self._here: dict[tuple[int, int], int] = {}
        self._next = 0
        self._told_s = 0.0  # when all fronts got the counts last

    def prepare(self) -> None:
        """Makes ready the steps of the first requests, before the engine takes requests."""
        for front in [*self._fronts]:
            self._send(front, Preparing())
        first_steps(self.slots.engine, len(self.slots.slots))
        # programs are many objects, which stay: a collection that visits them would delay tokens
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Serves until every front has finished and all requests have ended."""
        self.say_ready()
        try:
            while self._asking or not self.slots.idle:
                self._read(IDLE_S if self.slots.idle else 0)
                if not self.slots.idle:
                    self.step()
        except BaseException:
            self._tell(Stepped([], self.slots.drop(), {}))
            raise
        finally:
            for pipe in self._fronts.values():
                pipe.close()

    # from the fronts ---------------------------------------------------------------------------

    def _read(self, timeout_s: float) -> None:
        """Handles the messages of the fronts; waits up to timeout_s for the first."""
        ready = wait([*self._fronts.values()], timeout_s)
        for front, pipe in [*self._fronts.items()]:
            if pipe not in ready:
                continue
            try:
                while front in self._fronts and pipe.poll():
                    self.hear(front, pipe.recv())
            except (EOFError, OSError):
                self._gone(front)

    def hear(self, front: int, message: Any) -> None:
        """Handles a message of a front."""
        if isinstance(message, Ask):
            try:
                self._ask(front, message)
            except Exception as error:  # concerns this request alone: no step has it
                traceback.print_exc()
                self._send(front, _failed(message, str(error), self.slots.totals()))
        elif isinstance(message, Cancel):
            here = self._here.get((front, message.number))
            if here is not None:
                self.slots.cancel(here)
        elif isinstance(message, Finish):
            self._asking.discard(front)
        else:
            raise TypeError(f"front {front} said {type(message).__name__}, which means nothing")

    def _ask(self, front: int, ask: Ask) -> None:
        why, after = self.slots.refusal(ask), None
        if not why and self.slots.is_full:
            why, after = "the server is busy; try again later", self.slots.retry_after_s()
        if why:
            self._send(front, Refused(ask.number, why, after))
            return
        here, self._next = self._next, self._next + 1
        self.slots.ask(ask._replace(number=here))
        self._of[here], self._here[front, ask.number] = (front, ask.number), here

    def _gone(self, front: int) -> None:
        """Cancels the requests of a front that has closed its pipe."""
        self._asking.discard(front)
        pipe = self._fronts.pop(front, None)
        if pipe is not None:
            pipe.close()
        for here, (whose, _) in list(self._of.items()):
            if whose == front:
                self.slots.cancel(here)

    # to the fronts -----------------------------------------------------------------------------

    def say_ready(self) -> None:
        """Tells the fronts that the engine takes requests."""
        slots, engine = self.slots, self.slots.engine
        ready = Ready(
            engine.model.name or str(engine.model.path), engine.device, engine.model.n_vocab,
            slots.room, len(slots.slots), slots.n_waiting,
        )  # fmt: skip
        for front in [*self._fronts]:
            self._send(front, ready)

    def step(self) -> None:
        """Takes a step, and sends its results. Raises the error of a step that fails; the next call
        then reports that all requests have ended with FAILED."""
        self._tell(self.slots.step())

    def _tell(self, results: Stepped) -> None:
        """Sends the results to their fronts, and now and then the counts to all fronts."""
        tokens: dict[int, list[Token]] = {}
        ended: dict[int, list[Ended]] = {}
        scores: dict[int, Scores] = {}
        for here, found in results.scores.items():
            front, number = self._of[here]
            scores.setdefault(front, {})[number] = found
        for token in results.tokens:
            front, number = self._of[token.number]
            tokens.setdefault(front, []).append(token._replace(number=number))
        for end in results.ended:
            front, number = self._of.pop(end.number)
            del self._here[front, number]
            ended.setdefault(front, []).append(end._replace(number=number))
        fronts = tokens.keys() | ended.keys() | scores.keys()
        if (now := time.monotonic()) - self._told_s > TELL_S:
            self._told_s, fronts = now, self._fronts.keys() | fronts
        totals = self.slots.totals() if fronts else None
        for front in sorted(fronts):
            made = tokens.get(front, [])
            assert totals is not None
            self._send(front, Made(
                np.array([t.number for t in made], np.int64),
                np.array([t.token for t in made], np.int32),
                {t.number: t.logprobs for t in made if t.logprobs is not None},
                tuple(ended.get(front, ())), totals, scores.get(front, {}),
            ))  # fmt: skip

    def _send(self, front: int, message: Any) -> None:
        pipe = self._fronts.get(front)
        if pipe is None:
            return
        try:
            pipe.send(message)
        except (BrokenPipeError, OSError):
            self._gone(front)


class OwnEngine:
    """An engine of this process that looks like the pipe to an engine process, for a load without
    HTTP. (A second process would load the weights again.) There is one thread: `poll` and `recv`
    take the steps that bring their messages.

    n_slots: requests served together, each by a sequence of the engine. Raises UsageError where the
    engine has fewer sequences. The engine's cache is emptied. A front calls `send`, `poll` and
    `recv`, as those of a `Connection`.
    """

    def __init__(self, engine: Engine, n_slots: int):
        self.slots, self._said = Slots(engine, n_slots), _Said()
        self._core = EngineCore(self.slots, [self._said])
        self._core.say_ready()

    def send(self, message: Ask | Cancel, /) -> None:
        self._core.hear(0, message)

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """Whether there is a message. Takes a step where there is none; waits where there is no
        request either."""
        if not self._said:
            if not self.slots.idle:
                self._core.step()
            elif timeout:
                time.sleep(timeout)
        return bool(self._said)

    def recv(self) -> Any:
        """The next message. Raises EOFError where no message can come."""
        while not self._said:
            if self.slots.idle:
                raise EOFError
            self._core.step()
        return self._said.popleft()


class _Said(deque[Any]):
    """The pipe to a front of this process: a list of messages."""

    send = deque.append


def _failed(ask: Ask, why: str, totals: Totals) -> Made:
    """The message about a request that could not be taken."""
    ended = Ended(ask.number, FAILED, Timings(0.0, len(ask.tokens), 0, 0.0, 0, 0.0, 0.0), why)
    return Made(np.empty(0, np.int64), np.empty(0, np.int32), {}, (ended,), totals)
