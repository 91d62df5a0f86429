"""A step under way: its results, and the event that guards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from workbench.engine.ahead import NextStep, look_ahead
from workbench.engine.batch import Work
from workbench.errors import UsageError
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


class Pending:
    """Logits on their way to the host. They may be read when `wait` returns.

    A later `submit` of the engine ends this step first (the next one, or with results=behind the
    one after): its results are kept here until they are waited for.
    """

    __slots__ = ("_engine", "_failed", "_logits", "_step", "_undo", "_work")

    def __init__(self, engine: Engine, step: NextStep, work: Work):
        """Issues the step, and notes whose its cells are."""
        self._engine, self._step, self._work = engine, step, work
        self._logits: np.ndarray | None = None
        self._failed = False
        batch, watch = step.batch, step.watch
        if watch.looks_at_batches:
            watch.batch(batch, step.program.program)
        start = now_ns()
        if step.is_written:
            step.program.run_late(watch)
        else:
            step.program.run(batch.values, watch)
        if watch.counts:
            engine.count("issue", now_ns() - start)
        self._undo: Callable[[], None] = engine.cache.store(
            batch.sequences, batch.positions, batch.cells
        )

    @property
    def done(self) -> bool:
        """Whether the step has ended: the results are here."""
        return self._logits is not None

    def wait(self) -> np.ndarray:
        """The step's logits, float32 (n_outputs, n_vocab), in the order of the work. Where the
        device draws: int32 (n_outputs, 2), its tokens, -1 from logits that are not finite, and the
        nanoseconds that each draw took.

        Where the wait fails or is interrupted, the step's cells are free again, and to wait once
        more raises UsageError.
        """
        if self._failed:
            raise UsageError(
                "this step has no results, for its wait failed or its engine was closed; submit "
                "its tokens again"
            )
        if self._logits is None:
            engine, watch, program = self._engine, self._step.watch, self._step.program
            waits = bool(program.tail)
            engine.under_way.end(self, waits)
            if self._failed:
                return self.wait()  # with a step before it
            start, ahead_ns = now_ns(), 0
            try:
                if waits and not engine.under_way.is_ahead:
                    ahead_ns = look_ahead(engine, self._step, self._work)
                early = program.early()
                logits = None if early is None else self._of(early)
                results = program.finish(watch)
                self._logits = self._of(results) if logits is None else logits
            except BaseException:
                engine.under_way.fail()
                self.fail()
                raise
            if watch.counts:
                engine.count("wait", now_ns() - start - ahead_ns)
                engine.n_untraced += 1
            engine.n_steps += 1
            watch.end(waits)
        return self._logits

    def fail(self) -> None:
        """The step has no results. Its cells are free again."""
        self._failed = True
        self._undo()
        self._step.watch.fail()

    def give_up(self) -> None:
        """The engine is closed, and what the results would be read from is freed."""
        self._failed = True
        self._step.watch.fail()

    def each(self) -> list[np.ndarray]:
        """The logits of each entry of the work: float32 (outputs of it, n_vocab)."""
        return np.split(self.wait(), np.cumsum(self._step.batch.counts)[:-1])

    def _of(self, results: dict[str, np.ndarray]) -> np.ndarray:
        shape, n = self._step.batch.shape, sum(self._step.batch.counts)
        row = 2 if shape.draws else self._engine.model.n_vocab
        kind = np.dtype(np.int32 if shape.draws else np.float32)
        if not n:
            return np.empty((0, row), kind)
        (raw,) = results.values()
        found: np.ndarray = raw.view(kind).reshape(shape.n_outputs, row)
        return found[:n]
