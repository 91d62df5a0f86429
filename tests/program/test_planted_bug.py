"""Breaking the contract of an asynchronous copy gives wrong numbers; the wait mends it (#17795).

Gates hold the streams of a decode step, as work in flight holds a GPU's. Step n is issued, the host
writes the inputs of step n + 1 into the same staging memory, and the gates open. A copy reads what
is there when it runs. With the wait kept, the host cannot write before the copies are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.gates import hold
from tests.profiles import share
from workbench.backend.issue.prepared import Prepared
from workbench.config import SyncMode, Toggles
from workbench.engine.batch import Batch, make_batch
from workbench.engine.look.phases import Phases
from workbench.engine.programs import Key
from workbench.program import commands as cmd

PROMPT, NEXT = [5, 900, 17, 403, 77], [250, 611]
MODELS = [("tiny-llama", "F32"), ("tiny-qwen3", "Q8_0")]
GATE_S = 0.03  # when gates open by themselves where the host waits behind them
NEVER_S = 30.0  # and where it must not: only a broken test waits so long
# In these the host never waits for the copies themselves, only, at the end, for the logits.
WITHOUT_COPY_WAITS = (
    SyncMode.IMPLICIT, SyncMode.PACKED_IMPLICIT, SyncMode.EVENT_GUARDED, SyncMode.AUTO,
)  # fmt: skip
WAITING = share([mode for mode in SyncMode if mode not in WITHOUT_COPY_WAITS], 4)

pytestmark = pytest.mark.parametrize(("preset", "quant"), MODELS)


Keep = Callable[[cmd.Command], bool]


def everything(command: cmd.Command) -> bool:
    return True


def no_input_waits(command: cmd.Command) -> bool:
    return not (isinstance(command, cmd.Sync) and command.split != cmd.RESULT)


class Step:
    """An engine that has read PROMPT, about to decode NEXT[0] with surgery on its program."""

    def __init__(self, engine: wb.Engine):
        self.engine = engine
        engine.prefill(PROMPT[:-1])
        engine.step(PROMPT[-1:])  # a decode step of this shape, whose inputs are stale now
        self.batch = now = self._batch(NEXT[0])
        undo = engine.cache.store(now.sequences, now.positions, now.cells)
        self.following = self._batch(NEXT[1])  # the inputs of the step after this one
        undo()
        assert self.following.shape == now.shape

    def _batch(self, token: int) -> Batch:
        engine, work = self.engine, [(0, [token], "last")]
        return make_batch(work, engine.cache, engine.model.n_vocab, engine.config.n_ubatch)

    def prepare(self, monkeypatch: pytest.MonkeyPatch, keep: Keep) -> Prepared:
        """The step's program with only the commands that `keep` keeps, bound to its memory."""
        made = self.engine._step_programs
        whole = made.of

        def lower(*shape, **others) -> cmd.Program:
            program = whole(*shape, **others)
            program.commands = [c for c in program.commands if keep(c)]
            return program

        with monkeypatch.context() as patch:
            patch.setattr(made, "of", lower)
            return self.engine.bound.build(Key(self.batch.shape, 0), Phases(self.engine._spent))


@pytest.fixture
def device() -> str:
    """The asynchronous device that is tricked; tests/gpu runs the same cases on cuda."""
    return "embedded"


@pytest.fixture
def step(tiny_model, preset, quant, device) -> Iterator[Callable[..., Step]]:
    """`step(sync, copy_stream)`: a Step under these toggles."""
    with ExitStack() as stack:
        path, off = tiny_model(preset, quant), Toggles()
        engine = wb.Engine.load(path, device=device, n_ctx=256, threads=2, toggles=off)
        stack.enter_context(engine)

        def make(sync: str, copy_stream: str = "own") -> Step:
            variant = engine.variant(Toggles(sync=sync, copy_stream=copy_stream))
            return Step(stack.enter_context(variant))

        yield make


@pytest.fixture
def right(step) -> np.ndarray:
    """Logits of the step with every wait in place and nothing held."""
    return step(SyncMode.PER_COPY).engine.step([NEXT[0]])[0]


def is_wrong(logits: np.ndarray, right: np.ndarray) -> bool:
    """By more than any rounding; a NaN is wrong, too."""
    return not np.allclose(logits, right, rtol=0, atol=1e-3)


@contextmanager
def held(engine: wb.Engine, seconds: float) -> Iterator[Callable[[], None]]:
    """Gates hold both streams. They open when the yielded function is called, the copy stream's
    first and the compute stream's once the copies have landed; or by themselves after `seconds`,
    for which a host that waits for a stream is blocked."""
    backend: Any = engine.backend  # every device that is tricked here has gates
    gates = [hold(backend, stream) for stream in (cmd.COPY_STREAM, cmd.COMPUTE_STREAM)]

    def open_all() -> None:
        for gate in gates:
            gate.open()

    def open_in_order() -> None:
        gates[0].open()
        backend.sync_stream(cmd.COPY_STREAM)()
        gates[1].open()

    timer = threading.Timer(seconds, open_all)
    timer.start()
    try:
        yield open_in_order
    finally:
        timer.cancel()
        timer.join()
        open_all()


def logits(issued: Prepared) -> np.ndarray:
    (raw,) = issued.finish(issued.tail).values()
    return raw.view(np.float32)


def late(step: Step, monkeypatch, keep: Keep, rewritten=True) -> np.ndarray:
    """Issues the step behind gates, overwrites staging with the next step's inputs (`rewritten`),
    and only then opens them (where the host had to wait, they are open by then). The logits."""
    issue = step.prepare(monkeypatch, keep)
    rewrite = step.prepare(monkeypatch, lambda command: isinstance(command, cmd.Write))
    with held(step.engine, GATE_S if keep is everything else NEVER_S) as open_gates:
        issue.run(step.batch.values, issue.head)
        if rewritten:
            rewrite.run(step.following.values, rewrite.head)
        open_gates()
        return logits(issue)


def unheld(step: Step, monkeypatch, keep: Keep) -> np.ndarray:
    """The logits of a step whose copies alone are held: only the compute stream is waited for."""
    issue = step.prepare(monkeypatch, keep)
    with hold(step.engine.backend, cmd.COPY_STREAM):
        issue.run(step.batch.values, issue.head)
        return logits(issue)


@pytest.mark.parametrize("copy_stream", ["own", "compute"])
@pytest.mark.parametrize("sync", WAITING)
def test_staging_overwritten_before_the_copy(step, right, monkeypatch, sync, copy_stream):
    """Without the waits the late copy takes the next step's inputs; with them it cannot."""
    assert is_wrong(late(step(sync, copy_stream), monkeypatch, no_input_waits), right)
    assert np.array_equal(late(step(sync, copy_stream), monkeypatch, everything), right)


def test_the_write_is_what_harms(step, right, monkeypatch):
    """The same gates and the same missing waits with staging left alone: the logits are right."""
    one = step(SyncMode.WRITE_READ_BOUNDARY)
    assert np.array_equal(late(one, monkeypatch, no_input_waits, rewritten=False), right)


def test_launch_before_its_copy_has_landed(step, right, monkeypatch):
    """Copies on a stream of their own: without the wait nothing keeps the launches after them."""
    early, waiting = (step(SyncMode.WRITE_READ_BOUNDARY) for _ in range(2))
    assert is_wrong(unheld(early, monkeypatch, no_input_waits), right)
    assert np.array_equal(late(waiting, monkeypatch, everything, rewritten=False), right)


def test_an_event_orders_launches_and_no_host(step, right, monkeypatch):
    """The compute stream waits for the copies, on the device. The host does not, and what the next
    step writes is in time to be copied: the wait for the step's logits is for that."""
    guarded, other, loose = (step(SyncMode.EVENT_GUARDED) for _ in range(3))
    assert np.array_equal(late(guarded, monkeypatch, no_input_waits, rewritten=False), right)
    assert is_wrong(late(other, monkeypatch, no_input_waits), right)
    no_waits = lambda c: no_input_waits(c) and not isinstance(c, cmd.Wait)  # noqa: E731
    assert is_wrong(unheld(loose, monkeypatch, no_waits), right)
