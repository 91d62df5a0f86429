"""A next step like the one under way, made ready while the device computes.

Behind a step the device has nothing to do until the host has made the next one. Where that goes on
by one token for each sequence, all of it but the tokens is known before:

    inputs     `Batches.look_ahead` makes them
    program    is looked up, where it is kept as it is
    launch     with launch_ahead=on the plan is launched, and waits at its gate (`backend/gate.py`)
    writes     the inputs are written to staging memory, once the device has read the inputs of the
               step under way. Only a gate says so; other programs write when they are submitted.
               A gate is behind all earlier steps of its stream, so rings of inputs are free, too

A step that is launched ahead has the very same shape as the one under way. So its inputs lie where
the other's do. If nobody opens the gate, the device computes that step once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.engine import exclusive
from workbench.engine.exclusive import STATE
from workbench.engine.reuse import Key
from workbench.model.inputs import TOKENS
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.backend.issue import Prepared
    from workbench.engine.batch import Batch, Work
    from workbench.engine.engine import Engine
    from workbench.engine.watch import Watch

LATE = frozenset((TOKENS,))  # inputs that are known only when a step is submitted


class NextStep:
    """A step that is ready to be issued; one that was made ahead is, but for its tokens.

    found_ns: what it took to look its program up. is_written: its inputs are in staging memory.
    """

    __slots__ = ("_batch_ns", "batch", "found_ns", "is_written", "program", "watch")

    def __init__(self, batch: Batch, program: Prepared, watch: Watch):
        self.batch, self.program, self.watch = batch, watch.of(program), watch
        self.is_written, self.found_ns, self._batch_ns = False, 0, 0

    def comes(self, engine: Engine, work: Work, draws: bool) -> bool:
        """Whether `work` begins this step, which was made ahead. Its tokens are put in then. Raises
        UsageError as `Engine.submit` does."""
        if STATE.measurement is not None:
            exclusive.check(engine._loaded)
        start = now_ns()
        if engine.under_way or engine._batches.made_ahead(work, draws) is not self.batch:
            return False
        self._batch_ns = now_ns() - start
        return True

    def count(self, engine: Engine) -> None:
        """Counts what has come, once it is issued: until then the device stands still."""
        engine.count("batch", self._batch_ns)
        engine.count("reuse", self.found_ns)
        engine._programs.reused += 1


def look_ahead(engine: Engine, now: NextStep, work: Work) -> int:
    """Makes ready what can be known of a step like the one under way, with its work; the ns it
    took. Only inputs are made where a recorder looks on: its marks would be behind a launch."""
    start = now_ns()
    engine._batches.look_ahead(work, now.batch.shape.draws)
    traced, batch = engine._recorder is not None, engine._batches.next
    engine._expected = None if traced else _next(engine, now, batch)
    return now_ns() - start


def _next(engine: Engine, now: NextStep, batch: Batch | None) -> NextStep | None:
    start = now_ns()
    kept = batch and engine._programs.peek(Key(batch.shape, engine.turn))
    if batch is None or kept is None or batch.shape.draws:  # draws are late, too
        return None
    step = NextStep(batch, kept, now.watch)
    step.found_ns = now_ns() - start
    gated, before = step.program.ahead, now.program.ahead
    if gated is not None and batch.shape == now.batch.shape:
        now.watch.arm(step.program)
        if before is not None and before.has_read:
            step.program.write_ahead(batch.values, LATE)
            step.is_written = True
    return step
