"""Steps without tokens, which bring the cache's cells to where its table says they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.engine.ahead import NextStep
from workbench.engine.batch import Batch, copy_batch, shift_batch
from workbench.engine.pending import Pending
from workbench.engine.reuse import Key

if TYPE_CHECKING:
    from workbench.engine.engine import Engine


def change_cells(engine: Engine) -> None:
    """Copies cells, and turns the stored K to the positions that cells have been shifted to. Cells
    that an interrupted step has changed are lost."""
    cache = engine.cache
    while cache.copied:
        _change(engine, copy_batch(cache.copied[0]), cache.are_copied)
    if cache.moved is not None:
        _change(engine, shift_batch(cache), cache.rotated)


def _change(engine: Engine, batch: Batch, done: Callable[[], None]) -> None:
    """Issues a step without tokens. done: tells the cache of it, once it is issued."""
    with engine._begin(()) as watch:
        program = engine._programs.get(Key(batch.shape, engine.turn), batch.first_cell)
        try:
            step = NextStep(batch, program, watch)
            pending = engine.under_way.add(Pending(engine, step, ()))
        except BaseException:
            engine.cache.lost()  # cells, where it was interrupted midway
            raise
        done()
    pending.wait()
