"""The engine process of a server: requests in, one message a step out.

`EngineCore` serves the requests, `EngineProcess` has the pipes. A load in a notebook has the same
core without a process (`OwnEngine`).

The process has the engine to itself, so nothing that a front does holds a step up. Between two
steps it reads what has come; while there is nothing to do it waits for the pipes. It ends when
every front has said Finish, or is gone, and all that runs has ended. A front that is gone has its
requests cancelled. Where a step fails, all requests end with FAILED, and the process with an error.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.config import BEST, EngineConfig, TogglePreset
from workbench.engine.asks import FAILED, Ask, Ended, Timings, Totals
from workbench.engine.first_steps import first_steps
from workbench.engine.requests import Scores, Stepped, Token
from workbench.engine.slots import Slots
from workbench.errors import WorkbenchError
from workbench.progress import shown_on
from workbench.serve.messages import Cancel, Finish, Made, Preparing, Ready, Refused
from workbench.serve.serving import serving

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from workbench.engine.engine import Engine

TELL_S = 0.25  # every front hears at least so often what steps have counted
IDLE_S = 1.0  # how long to wait for requests before the pipes are looked at again


class WorkerSettings(NamedTuple):
    """What an engine process is started with. toggles: of `serving`'s where they begin with preset
    best. n_slots: requests served together. n_waiting: most that wait for a slot."""

    model: str
    config: EngineConfig
    n_slots: int
    toggles: TogglePreset = TogglePreset(BEST)
    n_waiting: int = 1024


def start(
    settings: WorkerSettings, n_fronts: int = 1, target: Callable[..., None] | None = None
) -> tuple[list[Connection], SpawnProcess]:
    """Starts the process; one end of a pipe for each front. Its first message is Ready."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(n_fronts)]
    theirs = [pipe[1] for pipe in pipes]
    process = context.Process(target=target or main, args=(theirs, settings), name="engine")
    process.start()
    for end in theirs:
        end.close()
    return [pipe[0] for pipe in pipes], process


def main(fronts: list[Connection], settings: WorkerSettings) -> None:
    """The process. What stops it is said on stderr, in a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a front says when to finish
    try:
        with open_engine(settings) as engine:
            slots = Slots(engine, settings.n_slots, settings.n_waiting)
            process = EngineProcess(slots, fronts)
            with shown_on(sys.stderr):
                process.prepare()
            process.run()
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def open_engine(settings: WorkerSettings) -> Engine:
    """The engine of these settings."""
    from workbench.engine.engine import Engine

    wanted = serving(settings.config.device, settings.toggles)
    return Engine.load(settings.model, config=settings.config, toggles=wanted)


class EngineCore:
    """The requests of some fronts in the slots of an engine, and what each front is told of them.

    It knows no pipe: an engine process has one to each front (`EngineProcess`), and an engine of
    this process none (`OwnEngine`).

    fronts: their numbers. Each front numbers its requests itself; the slots have other numbers.
    say(front, message): takes what a front is told.
    """

    def __init__(self, slots: Slots, fronts: Iterable[int], say: Callable[[int, Any], None]):
        self.slots, self._fronts, self._say = slots, {*fronts}, say
        # of each request here: its front, and its number there
        self._of: dict[int, tuple[int, int]] = {}
        self._here: dict[tuple[int, int], int] = {}
        self._next = 0
        self._told_s = 0.0  # when all fronts were told last

    def say_ready(self) -> None:
        """Tells all fronts that requests are taken."""
        slots, engine = self.slots, self.slots.engine
        ready = Ready(
            engine.model.name or str(engine.model.path), engine.device, engine.model.n_vocab,
            slots.room, len(slots.slots), slots.n_waiting,
        )  # fmt: skip
        for front in sorted(self._fronts):
            self._say(front, ready)

    def hear(self, front: int, message: Ask | Cancel) -> None:
        """Takes a request of a front, or that nobody wants the rest of one."""
        if isinstance(message, Cancel):
            here = self._here.get((front, message.number))
            if here is not None:
                self.slots.cancel(here)
            return
        try:
            self._ask(front, message)
        except Exception as error:  # of this request alone: no step has seen it
            traceback.print_exc()
            self._say(front, _failed(message, str(error), self.slots.totals()))

    def _ask(self, front: int, ask: Ask) -> None:
        why, after = self.slots.refusal(ask), None
        if not why and self.slots.is_full:
            why, after = "the server is busy; try again later", self.slots.retry_after_s()
        if why:
            self._say(front, Refused(ask.number, why, after))
            return
        here, self._next = self._next, self._next + 1
        self.slots.ask(ask._replace(number=here))
        self._of[here], self._here[front, ask.number] = (front, ask.number), here

    def gone(self, front: int) -> None:
        """Nobody waits for the requests of a front any more."""
        self._fronts.discard(front)
        for here, (whose, _) in list(self._of.items()):
            if whose == front:
                self.slots.cancel(here)

    def step(self) -> None:
        """Takes a step, and tells what it has made. Where it fails its error is raised, and all
        requests have ended with FAILED: `drop` tells of them, or the next step."""
        self._tell(self.slots.step())

    def drop(self) -> None:
        """Ends all requests with FAILED: the engine has broken."""
        self._tell(Stepped([], self.slots.drop(), {}))

    def _tell(self, results: Stepped) -> None:
        """A message to each front that the results are for, and now and then to all."""
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
            self._told_s, fronts = now, self._fronts | fronts
        totals = self.slots.totals() if fronts else None
        for front in sorted(fronts):
            made = tokens.get(front, [])
            assert totals is not None
            self._say(front, Made(
                np.array([t.number for t in made], np.int64),
                np.array([t.token for t in made], np.int32),
                {t.number: t.logprobs for t in made if t.logprobs is not None},
                tuple(ended.get(front, ())), totals, scores.get(front, {}),
            ))  # fmt: skip


class EngineProcess:
    """An engine and the pipes of its fronts, until none of them can ask for more."""

    def __init__(self, slots: Slots, fronts: list[Connection]):
        self._pipes = dict(enumerate(fronts))
        self._asking = set(self._pipes)  # fronts that may ask for more
        self._core = EngineCore(slots, self._pipes, self._send)

    def prepare(self) -> None:
        """Makes ready what the first requests need, before they may come."""
        slots = self._core.slots
        for front in [*self._pipes]:
            self._send(front, Preparing())
        first_steps(slots.engine, len(slots.slots))
        # their programs are many objects, which stay: to look through them would hold up tokens
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Until there is nothing more to do."""
        core, slots = self._core, self._core.slots
        core.say_ready()
        try:
            while self._asking or not slots.idle:
                self._read(IDLE_S if slots.idle else 0)
                if not slots.idle:
                    core.step()
        except BaseException:
            core.drop()
            raise
        finally:
            for pipe in self._pipes.values():
                pipe.close()

    def _read(self, timeout_s: float) -> None:
        """Does what the fronts have said; waits up to timeout_s for the first."""
        ready = wait([*self._pipes.values()], timeout_s)
        for front, pipe in [*self._pipes.items()]:
            if pipe not in ready:
                continue
            try:
                while front in self._pipes and pipe.poll():
                    self._hear(front, pipe.recv())
            except (EOFError, OSError):
                self._gone(front)

    def _hear(self, front: int, message: Any) -> None:
        if isinstance(message, Ask | Cancel):
            self._core.hear(front, message)
        elif isinstance(message, Finish):
            self._asking.discard(front)
        else:
            raise TypeError(f"front {front} said {type(message).__name__}, which means nothing")

    def _send(self, front: int, message: Any) -> None:
        pipe = self._pipes.get(front)
        if pipe is None:
            return
        try:
            pipe.send(message)
        except (BrokenPipeError, OSError):
            self._gone(front)

    def _gone(self, front: int) -> None:
        """A front has closed its pipe."""
        self._asking.discard(front)
        pipe = self._pipes.pop(front, None)
        if pipe is not None:
            pipe.close()
        self._core.gone(front)


class OwnEngine:
    """An engine of this process behind the pipe that an engine process has, for a load without
    HTTP: a second process would load the weights again. There is one thread: whoever waits for a
    message takes the steps that bring it.

    n_slots: requests served together, of the engine's sequences. Raises UsageError where the engine
    has fewer. The cache of the engine is emptied. A front sends with `send`, and hears with `poll`
    and `recv`, as with a `Connection`.
    """

    def __init__(self, engine: Engine, n_slots: int):
        self._said = deque[Any]()
        self.slots = Slots(engine, n_slots)
        self._core = EngineCore(self.slots, [0], lambda _, message: self._said.append(message))
        self._core.say_ready()

    def send(self, message: Ask | Cancel, /) -> None:
        self._core.hear(0, message)

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """Whether there is a message. Takes a step for it; waits where nothing is to be done."""
        if not self._said:
            if not self.slots.idle:
                self._core.step()
            elif timeout:
                time.sleep(timeout)
        return bool(self._said)

    def recv(self) -> Any:
        """The next message; raises EOFError where nothing can bring one."""
        while not self._said:
            if self.slots.idle:
                raise EOFError
            self._core.step()
        return self._said.popleft()


def _failed(ask: Ask, why: str, totals: Totals) -> Made:
    """What is said of a request that could not be taken."""
    ended = Ended(ask.number, FAILED, Timings(0.0, len(ask.tokens), 0, 0.0, 0, 0.0, 0.0), why)
    return Made(np.empty(0, np.int64), np.empty(0, np.int32), {}, (ended,), totals)
