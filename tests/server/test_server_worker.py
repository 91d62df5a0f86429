"""The engine process: a process of its own, with a tiny model on the embedded device."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.served import Alone, alone, ids, same
from workbench.common.errors import DeviceError
from workbench.config import BEST, EngineConfig, TogglePreset, Toggles
from workbench.engine import engine as engine_room
from workbench.engine.slots.asks import CANCELLED, FAILED, LENGTH, STOP, Ask, Ended
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling
from workbench.program.commands import Program
from workbench.server.wire import worker
from workbench.server.wire.messages import Cancel, Finish, Made, Preparing, Ready, Refused
from workbench.server.wire.worker import WorkerSettings, start

N_SLOTS, ROOM, LONG = 3, 512, 400
PATIENCE_S = 60.0
FLOAT = TogglePreset(BEST, {"activations": "float"})


class Front:
    """A front's end of the pipe, and what has come. Each request is answered once."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.begun: list[Any] = []
        self.tokens: dict[int, list[int]] = {}
        self.over: dict[int, Ended | Refused] = {}
        self.made: list[Made] = []

    def ask(self, number: int, n_prompt: int = 5, most: int = 4, **more: Any) -> Ask:
        ask = Ask(number, ids(n_prompt, number), most, **more)
        self.pipe.send(ask)
        return ask

    def hear(self) -> None:
        assert self.pipe.poll(PATIENCE_S), "the engine process says nothing"
        message = self.pipe.recv()
        if isinstance(message, Preparing | Ready):
            self.begun.append(message)
            assert [type(one) for one in self.begun] == [Preparing, Ready][: len(self.begun)]
            return
        assert len(self.begun) == 2, "it is ready before anything else"
        if isinstance(message, Refused):
            self._end(message)
            return
        self.made.append(message)
        numbers = message.numbers.tolist()
        # a step has a token for each; where all begin to wait for results, two steps come at once
        assert len(numbers) == len(message.tokens) <= 2 * len({*numbers})
        for number, token in zip(numbers, message.tokens.tolist(), strict=True):
            assert number not in self.over
            self.tokens.setdefault(number, []).append(token)
        for end in message.ended:
            self._end(end)

    def _end(self, end: Ended | Refused) -> None:
        assert end.number not in self.over, f"{end.number} is over"
        self.over[end.number] = end

    def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.hear()

    def to_the_end(self, says_finish: bool = True) -> None:
        """Says that nothing more will be asked, and hears the rest, until the pipe is closed."""
        if says_finish:
            self.pipe.send(Finish())
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                self.hear()


def settings(path: Path, n_waiting: int = 64, **more: Any) -> WorkerSettings:
    config = EngineConfig(
        device="embedded", n_ctx=N_SLOTS * ROOM, n_seqs=N_SLOTS, n_ubatch=32, threads=1
    )
    return WorkerSettings(str(path), config, N_SLOTS, FLOAT, n_waiting)._replace(**more)


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "F32")


@pytest.fixture(scope="module")
def twin(model) -> Iterator[Callable[[Ask], Alone]]:
    with wb.Engine.load(
        model, device="embedded", n_ctx=ROOM, n_seqs=1, n_ubatch=ROOM, threads=1, toggles=Toggles()
    ) as engine:
        yield lambda ask: alone(engine, ask)


@contextmanager
def running(
    wanted: WorkerSettings, n_fronts: int = 1, target: Callable[..., None] | None = None
) -> Iterator[tuple[list[Front], Any]]:
    """The process, which has to end by itself when the body has ended."""
    pipes, process = start(wanted, n_fronts, target)
    try:
        yield [Front(pipe) for pipe in pipes], process
        process.join(PATIENCE_S)
        assert not process.is_alive(), "it goes on"
    finally:
        process.kill()
        process.join()
        for pipe in pipes:
            pipe.close()


def test_each_request_has_its_answer_as_alone(model, twin):
    """Of two fronts, which have numbers of their own, and one message of each step."""
    with running(settings(model), 2) as ((front, other), process):
        front.until(lambda: len(front.begun) == 2)
        ready = front.begun[-1]
        assert (ready.n_ctx, ready.n_slots, ready.n_waiting) == (ROOM, N_SLOTS, 64)
        assert (ready.device, ready.n_vocab) == ("embedded", 1024) and "tiny" in ready.model
        os.kill(process.pid, signal.SIGINT)  # from the keyboard: the fronts' to handle
        asks = []
        for i in range(10):
            sampling = Sampling(0.8 * (i % 2), 8, 1.0)
            asks.append((front, front.ask(i, 1 + 7 * i, 1 + i, sampling=sampling, seed=i)))
        stop = twin(asks[9][1]).tokens[3]
        asks.append((front, front.ask(9 + 100, 1, 5, ends=frozenset({stop}), n_logprobs=2)))
        asks += [(other, other.ask(i, 3 + i, 6)) for i in range(4)]
        other.pipe.send(Finish())
        front.to_the_end()  # is the end behind all that was asked
        other.to_the_end(False)
    assert process.exitcode == 0
    for to, ask in asks:
        end, tokens = to.over[ask.number], to.tokens[ask.number]
        if same(ask, tokens, twin(ask)):
            assert end.reason in (LENGTH, STOP)
        assert (end.timings.n_prompt, end.timings.n_made) == (len(ask.tokens), len(tokens))
    n_known = sum(109 in made.logprobs for made in front.made)
    assert n_known == len(front.tokens[109]) and all(m.logprobs.keys() <= {109} for m in front.made)
    for to in (front, other):
        steps = [made.totals.n_steps for made in to.made if len(made.numbers)]
        assert steps == sorted(steps) and len(steps) <= steps[-1]
    last = max(front.made[-1].totals, other.made[-1].totals, key=lambda totals: totals.n_steps)
    n_made = sum(len(to.tokens[ask.number]) for to, ask in asks)
    assert (last.n_made_tokens, last.n_running, last.n_waiting) == (n_made, 0, 0)
    assert (len(front.over), len(other.over)) == (11, 4)


def test_a_cancelled_request_frees_its_slot(model, capfd):
    """A request that cannot be served is refused for good, or until later; one that cannot be taken
    fails alone."""
    target = partial(main_that_breaks, ZeroDivisionError("thirteen"), 13)
    with running(settings(model, n_waiting=2), 1, target) as ((front,), process):
        over = front.over
        front.ask(13, 13)
        front.until(lambda: 13 in over)
        assert (over.pop(13).why, 13 in front.tokens) == ("thirteen", False)
        front.ask(100, ROOM + 1)
        front.ask(101, 5, -1)
        front.until(lambda: len(over) == 2)
        assert over[100].retry_after_s is None is over[101].retry_after_s
        assert f"{ROOM + 1} tokens" in over[100].why
        for number in range(N_SLOTS):
            front.ask(number, 5, LONG)
        front.until(lambda: len(front.tokens) == N_SLOTS)
        for number in (10, 11, 50):
            front.ask(number, 5, 2)
        front.until(lambda: 50 in over)
        assert "busy" in over[50].why and over[50].retry_after_s >= 1 and len(over) == 3
        for number in (0, 0, 77):  # twice, and one that nobody asked
            front.pipe.send(Cancel(number))
        front.until(lambda: {0, 10, 11} <= over.keys())
        assert [over[n].reason for n in (0, 10, 11)] == [CANCELLED, LENGTH, LENGTH]
        assert 0 < len(front.tokens[0]) < LONG and len(over) == 6
        for number in (1, 2):
            front.pipe.send(Cancel(number))
        front.to_the_end()
    assert {over[n].reason for n in (1, 2)} == {CANCELLED} and process.exitcode == 0
    assert capfd.readouterr().err.count("ZeroDivisionError: thirteen") == 1


def test_a_front_that_is_gone_has_its_requests_cancelled(model):
    with running(settings(model), 2) as ((stays, goes), process):
        for number in range(2 * N_SLOTS):  # half of them wait
            goes.ask(number, 5, LONG)
        goes.until(lambda: len(goes.tokens) == N_SLOTS)
        goes.pipe.close()
        stays.ask(0, 5, 20)
        stays.until(lambda: 0 in stays.over)
        totals = stays.made[-1].totals
        assert (totals.n_running, totals.n_waiting) == (0, 0)
        assert totals.n_made_tokens < N_SLOTS * LONG  # nobody made what nobody reads
        stays.ask(1, 5, LONG)
        stays.pipe.close()  # the last: the process ends
    assert process.exitcode == 0 and len(stays.tokens[0]) == 20


# how it ends badly --------------------------------------------------------------------------------


def main_that_breaks(
    error: BaseException, n_prompt: int, fronts: list[Connection], wanted: WorkerSettings
) -> None:
    """The engine of this process fails in its tenth step (it takes no first ones); or where
    n_prompt is given, a request of so many tokens cannot be taken."""
    if n_prompt:
        take = Slots.ask

        def takes(self: Any, ask: Ask) -> None:
            if len(ask.tokens) == n_prompt:
                raise error
            take(self, ask)

        Slots.ask = takes  # type: ignore[method-assign]
    else:
        worker.first_steps = lambda engine, n_slots: 0  # type: ignore[assignment]
        submit, left = engine_room.Engine.submit, itertools.count()

        def fails(self: Any, *more: Any) -> Any:
            if next(left) >= 9:
                raise error
            return submit(self, *more)

        engine_room.Engine.submit = fails  # type: ignore[method-assign]
    worker.main(fronts, wanted)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (DeviceError("the device is gone"), DeviceError.exit_status, "error: the device is gone"),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_a_step_that_fails_ends_all(model, capfd, error, status, line):
    """Each request is told, and the process ends."""
    target = partial(main_that_breaks, error, 0)
    with running(settings(model), 2, target) as (fronts, process):
        for front in fronts:
            for number in range(3):
                front.ask(number, 5, LONG)
        for front in fronts:
            front.to_the_end(False)
    assert process.exitcode == status
    ends = [end for front in fronts for end in front.over.values()]
    assert len(ends) == 6 and {end.reason for end in ends} == {FAILED}
    assert all(str(end.why).startswith("the step failed: ") for end in ends)
    assert capfd.readouterr().err.strip().splitlines()[-1] == line


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"model": "no/such.gguf"}, "no/such.gguf"),
        ({"n_slots": N_SLOTS + 1}, f"this engine has {N_SLOTS} sequences"),
        ({"toggles": TogglePreset(BEST, {"graph_reuse": "pointer_table"})}, "clash"),
    ],
)
def test_what_cannot_begin_says_why_in_a_line(model, capfd, change, line):
    ours, theirs = Pipe()
    with ours, pytest.raises(SystemExit) as ended:
        worker.main([theirs], settings(model)._replace(**change))
    assert ended.value.code not in (0, None)
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("error: ") and line in said[0]


def test_the_collector_leaves_first_programs_alone(model):
    """Or a full collection looks through the programs of every shape while streams wait."""

    def programs() -> int:
        return sum(type(one) is Program for one in gc.get_objects())

    with worker.open_engine(settings(model)) as engine:
        assert engine.toggles.kv_cache == "per_sequence" and engine.issuer.is_ahead
        assert Slots(engine, N_SLOTS).room == ROOM  # of the engine, not of the settings
        try:
            before = programs()
            worker.EngineCore(Slots(engine, N_SLOTS), []).prepare()
            assert programs() <= before and engine.counters["programs_built"] > 0
        finally:
            gc.unfreeze()
        assert programs() > before
