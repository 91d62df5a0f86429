"""A step under way: its results, and the event that guards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from workbench.backend.issue import Prepared
from workbench.engine.ahead import launch_ahead
from workbench.engine.batch import Batch, Work
from workbench.engine.watch import Watch
from workbench.errors import UsageError
from workbench.trace.spans import now_ns

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


class Pending:
    """Logits on their way to the host. They may be read when `wait` returns.

    The next `submit` of the engine ends this step first: its results are kept here until they are
    waited for.
    """

    __slots__ = ("_batch", "_engine", "_failed", "_logits", "_program", "_undo", "_watch", "_work")

    def __init__(self, engine: Engine, watch: Watch, program: Prepared, batch: Batch, work: Work):
        """Issues the step, and notes whose its cells are."""
        self._engine, self._watch, self._program = engine, watch, program
        self._batch, self._work = batch, work
        self._logits: np.ndarray | None = None
        self._failed = False
        start = now_ns()
        program.run(batch.values, watch)
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
        """The step's logits, float32 (n_outputs, n_vocab), in the order of the work.

        Where the wait fails or is interrupted, the step's cells are free again, and to wait once
        more raises UsageError.
        """
        if self._failed:
            raise UsageError(
                "this step has no results, for its wait failed or its engine was closed; submit "
                "its tokens again"
            )
        if self._logits is None:
            self._engine.ended()
            start, ahead_ns = now_ns(), 0
            waits = bool(self._program.tail)
            try:
                if waits:
                    ahead_ns = self._engine.look_ahead(self._work)
                    if self._program.ahead is not None:
                        ahead_ns += launch_ahead(self._engine, self._batch.shape, self._watch)
                results = self._program.finish(self._watch)
                self._logits = self._of(results)
            except BaseException:
                self._failed = True
                self._undo()
                self._watch.fail()
                raise
            if self._watch.counts:
                self._engine.count("wait", now_ns() - start - ahead_ns)
                self._engine.n_untraced += 1
            self._engine.n_steps += 1
            self._watch.end(waits)
        return self._logits

    def give_up(self) -> None:
        """The engine is closed, and what the results would be read from is freed."""
        self._failed = True

    def each(self) -> list[np.ndarray]:
        """The logits of each entry of the work: float32 (outputs of it, n_vocab)."""
        return np.split(self.wait(), np.cumsum(self._batch.counts)[:-1])

    def _of(self, results: dict[str, np.ndarray]) -> np.ndarray:
        size = (self._batch.shape.n_outputs, self._engine.model.n_vocab)
        if not size[0]:
            return np.empty(size, np.float32)
        (raw,) = results.values()
        return raw.view(np.float32).reshape(size)
