"""What an engine process does, with a tiny model on the embedded device: in a thread, but for how
the process ends."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.served import Alone, alone, ids, same
from tests.server.live import beside
from workbench.common.errors import DeviceError
from workbench.config import BEST, EngineConfig, TogglePreset, Toggles
from workbench.engine.engine import Engine
from workbench.engine.slots import asks
from workbench.engine.slots.asks import Ask, Ended
from workbench.engine.slots.slots import Slots
from workbench.model.sampler import Sampling
from workbench.program.commands import Program
from workbench.server.wire import worker
from workbench.server.wire.messages import Cancel, Finish, Made, Ready, Refused
from workbench.server.wire.worker import EngineCore, WorkerSettings

N_SLOTS, ROOM, LONG = 3, 512, 400


def settings(path: Path, **more: Any) -> WorkerSettings:
    config = EngineConfig(
        device="embedded", n_ctx=N_SLOTS * ROOM, n_seqs=N_SLOTS, n_ubatch=32, threads=1
    )
    toggles = TogglePreset(BEST, {"activations": "float"})
    return WorkerSettings(str(path), config, N_SLOTS, toggles)._replace(**more)


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("tiny-llama", "F32")


@pytest.fixture(scope="module")
def engine(model) -> Iterator[Engine]:
    with worker.open_engine(settings(model)) as made:
        yield made


@pytest.fixture(scope="module")
def twin(model) -> Iterator[Callable[[Ask], Alone]]:
    with wb.Engine.load(
        model, device="embedded", n_ctx=ROOM, n_seqs=1, n_ubatch=ROOM, threads=1, toggles=Toggles()
    ) as engine:
        yield lambda ask: alone(engine, ask)


class Front:
    """A front's end of the pipe, and what has come. Each request is answered once."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.ready: Ready | None = None
        self.tokens: dict[int, list[int]] = {}
        self.over: dict[int, Ended | Refused] = {}
        self.made: list[Made] = []

    def ask(self, number: int, n_prompt: int = 5, most: int = 4, **more: Any) -> Ask:
        ask = Ask(number, ids(n_prompt, number), most, **more)
        self.pipe.send(ask)
        return ask

    def hear(self) -> None:
        assert self.pipe.poll(60), "the engine process says nothing"
        message = self.pipe.recv()
        assert (self.ready is None) == isinstance(message, Ready), "ready once, before all else"
        if isinstance(message, Ready):
            self.ready = message
            return
        ended = [message] if isinstance(message, Refused) else message.ended
        if isinstance(message, Made):
            self.made.append(message)
            numbers = message.numbers.tolist()
            # a step has a token for each; where all begin to wait for results, two steps come
            assert len(numbers) == len(message.tokens) <= 2 * len({*numbers})
            for number, token in zip(numbers, message.tokens.tolist(), strict=True):
                assert number not in self.over
                self.tokens.setdefault(number, []).append(token)
        for end in ended:
            assert end.number not in self.over, f"{end.number} is over"
            self.over[end.number] = end

    def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.hear()

    def to_the_end(self) -> None:
        """Until the pipe is closed."""
        with pytest.raises((EOFError, ConnectionResetError)):
            while True:
                self.hear()


@contextmanager
def running(engine: Engine, n_fronts: int = 1, n_waiting: int = 64) -> Iterator[Any]:
    """Fronts of an engine, and the errors it ends with. It has to end by itself after the body."""
    pipes = [Pipe() for _ in range(n_fronts)]
    core = EngineCore(Slots(engine, N_SLOTS, n_waiting), [theirs for _, theirs in pipes])
    with beside(core.run) as errors:
        yield [Front(ours) for ours, _ in pipes], errors


def test_each_request_has_its_answer_as_alone(engine, twin):
    """Of two fronts, which have numbers of their own, and one message of each step."""
    with running(engine, 2) as ((front, other), errors):
        asked = []
        for i in range(10):
            drawn = {"sampling": Sampling(0.8 * (i % 2), 8, 1.0), "seed": i}
            asked.append((front, front.ask(i, 1 + 7 * i, 1 + i, **drawn)))
        stop = twin(asked[9][1]).tokens[3]
        asked.append((front, front.ask(109, 1, 5, ends=frozenset({stop}), n_logprobs=2)))
        asked += [(other, other.ask(i, 3 + i, 6)) for i in range(4)]
        for to in (front, other):  # is the end behind all that was asked
            to.pipe.send(Finish())
        for to in (front, other):
            to.to_the_end()
    ready = front.ready
    assert not errors and (ready.n_ctx, ready.n_slots, ready.n_waiting) == (ROOM, N_SLOTS, 64)
    assert (ready.device, ready.n_vocab) == ("embedded", 1024) and "tiny" in ready.model
    for to, ask in asked:
        end, tokens = to.over[ask.number], to.tokens[ask.number]
        if same(ask, tokens, twin(ask)):
            assert end.reason in (asks.LENGTH, asks.STOP)
        assert (end.timings.n_prompt, end.timings.n_made) == (len(ask.tokens), len(tokens))
    known = [number for made in front.made for number in made.logprobs]
    assert known == [109] * len(front.tokens[109])
    for to in (front, other):
        steps = [made.totals.n_steps for made in to.made if len(made.numbers)]
        assert steps == sorted(steps) and len(steps) <= steps[-1]
    # the results of the last step are told in a message after that of its issue
    last = max((to.made[-1].totals for to in (front, other)), key=lambda t: t.n_made_tokens)
    n_made = sum(len(to.tokens[ask.number]) for to, ask in asked)
    assert (last.n_made_tokens, last.n_running, last.n_waiting) == (n_made, 0, 0)
    assert (len(front.over), len(other.over)) == (11, 4)


def test_a_cancelled_request_frees_its_slot(engine, monkeypatch, capfd):
    """A request that cannot be served is refused for good, or until later; one that cannot be taken
    fails alone."""
    take = Slots.ask

    def takes(self: Slots, ask: Ask) -> None:
        assert len(ask.tokens) != 13, "thirteen"
        take(self, ask)

    monkeypatch.setattr(Slots, "ask", takes)
    with running(engine, n_waiting=2) as ((front,), errors):
        over = front.over
        for n, (n_prompt, most) in enumerate(((ROOM + 1, 4), (5, -1), (13, 4))):
            front.ask(100 + n, n_prompt, most)
        front.until(lambda: len(over) == 3)
        assert over[100].retry_after_s is None is over[101].retry_after_s
        assert f"{ROOM + 1} tokens" in over[100].why
        assert over[102].reason == asks.FAILED and over[102].why.startswith("thirteen")
        for number in range(N_SLOTS):
            front.ask(number, 5, LONG)
        front.until(lambda: len(front.tokens) == N_SLOTS)
        for number in (10, 11, 50):
            front.ask(number, 5, 2)
        front.until(lambda: 50 in over)
        assert "busy" in over[50].why and over[50].retry_after_s >= 1 and len(over) == 4
        for number in (0, 0, 77):  # twice, and one that nobody asked
            front.pipe.send(Cancel(number))
        front.until(lambda: {0, 10, 11} <= over.keys())
        assert [over[n].reason for n in (0, 10, 11)] == [asks.CANCELLED, asks.LENGTH, asks.LENGTH]
        assert 0 < len(front.tokens[0]) < LONG and len(over) == 7
        for message in (Cancel(1), Cancel(2), Finish()):
            front.pipe.send(message)
        front.to_the_end()
    assert not errors and {over[n].reason for n in (1, 2)} == {asks.CANCELLED}
    assert capfd.readouterr().err.count("AssertionError: thirteen") == 1


def test_a_front_that_is_gone_has_its_requests_cancelled(engine):
    with running(engine, 2) as ((stays, goes), errors):
        stays.ask(0, 5, 100)
        for number in range(2 * N_SLOTS):  # half of them wait
            goes.ask(number, 5, LONG)
        goes.until(lambda: len(goes.tokens) >= N_SLOTS - 1)
        goes.pipe.close()
        stays.until(lambda: 0 in stays.over)
        stays.ask(1, 5, 20)
        stays.until(lambda: 1 in stays.over)
        assert [stays.over[n].reason for n in (0, 1)] == [asks.LENGTH] * 2
        totals = stays.made[-1].totals
        assert (totals.n_running, totals.n_waiting) == (0, 0)
        assert totals.n_made_tokens < N_SLOTS * LONG  # nobody made what nobody reads
        stays.ask(2, 5, LONG)
        stays.pipe.close()  # the last: it ends
    assert not errors and len(stays.tokens[0]) == 100


def test_a_step_that_fails_ends_all(engine, monkeypatch):
    """Each request is told."""
    submit, left = Engine.submit, [*range(1, 9), 0]
    monkeypatch.setattr(Engine, "submit", lambda *more: 1 / left.pop(0) and submit(*more))
    with running(engine, 2) as (fronts, errors):
        for front in fronts:
            for number in range(3):
                front.ask(number, 5, LONG)
        for front in fronts:
            front.to_the_end()
    ends = [end for front in fronts for end in front.over.values()]
    assert len(ends) == 6 and {end.reason for end in ends} == {asks.FAILED}
    assert all(str(end.why).startswith("the step failed: ") for end in ends)
    assert str(*errors) == "division by zero"


@pytest.mark.parametrize(
    ("change", "error", "status", "line"),
    [
        ({"model": "no/such.gguf"}, None, 1, "no/such.gguf"),
        ({"n_slots": N_SLOTS + 1}, None, 2, f"this engine has {N_SLOTS} sequences"),
        ({"toggles": TogglePreset(BEST, {"graph_reuse": "pointer_table"})}, None, 2, "clash"),
        ({}, DeviceError("it is gone"), DeviceError.exit_status, "error: it is gone"),
        ({}, ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug"),
    ],
)
def test_what_ends_a_process_is_said_in_a_line(
    model, capfd, monkeypatch, change, error, status, line
):
    def breaks(self: EngineCore) -> None:
        raise error

    monkeypatch.setattr(EngineCore, "run", breaks)
    monkeypatch.setattr(worker, "first_steps", lambda engine, n_slots: 0)
    ours, theirs = Pipe()
    before = signal.getsignal(signal.SIGINT)
    with ours, pytest.raises(SystemExit) as ended:
        worker.main([theirs], settings(model, **change))
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN  # the fronts' to handle
    assert ended.value.code == status
    said = capfd.readouterr().err.strip().splitlines()
    assert line in said[-1] and (len(said) == 1 or isinstance(error, ZeroDivisionError))


def test_the_collector_leaves_first_programs_alone(model):
    """Or a full collection looks through the programs of every shape while streams wait."""

    def programs() -> int:
        return sum(type(one) is Program for one in gc.get_objects())

    with worker.open_engine(settings(model)) as engine:
        assert engine.toggles.kv_cache == "per_sequence" and engine.issuer.is_ahead
        assert Slots(engine, N_SLOTS).room == ROOM  # of the engine, not of the settings
        try:
            before = programs()
            EngineCore(Slots(engine, N_SLOTS), []).prepare()
            assert programs() <= before and engine.counters["programs_built"] > 0
        finally:
            gc.unfreeze()
        assert programs() > before
