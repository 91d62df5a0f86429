"""How many blocks of cells attention visits in a step, and how many it leaves unread (`kv_visits`).

The host counts, from the mask of each step. So the numbers say what skipping leaves out, and cost
the device nothing. A CPU's kernel visits exactly these blocks; a test counts them there.

    block   16 cells, for a group of up to 8 tokens of one region (one token with attn_kernel=vec):
            a tile of a CPU. A GPU's tiles are larger, so a GPU visits a few more cells

All kv heads of a layer visit the same blocks, so the blocks are counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.common.tables import Table
from workbench.config import AttnKernel, SkipMaskedKV
from workbench.engine.cache.extent import UNSEEN, classes, extents
from workbench.engine.look.watch import Watch
from workbench.graph.shapes import CLASS_CELLS
from workbench.model.inputs import MASK, REGIONS
from workbench.program.commands import Launch, Program

if TYPE_CHECKING:
    from workbench.engine.batch import Batch
    from workbench.engine.engine import Engine
    from workbench.graph.ir import Node

CELLS, TOKENS = 16, 8  # of a block


class Visits(NamedTuple):
    """The blocks of one attention node.

    way: its value of `skip_masked_kv`; `off` where `skip_gate` leaves this step alone.
    n_regions: sequences with cells of their own; 0 where all tokens share one region.
    visited, skipped: how many blocks.
    """

    step: int
    layer: int | None
    way: str
    n_tokens: int
    n_kv: int
    n_regions: int
    visited: int
    skipped: int


class VisitTable(list[Visits]):
    """A row for each attention of each step, in the order of their issue."""

    @property
    def visited(self) -> int:
        return sum(row.visited for row in self)

    @property
    def skipped(self) -> int:
        return sum(row.skipped for row in self)

    def steps(self) -> Table:
        """A row for each step: its shape, and the blocks of all its layers."""
        found: dict[int, list[Visits]] = {}
        for row in self:
            found.setdefault(row.step, []).append(row)
        rows = [
            (step, of[0].n_tokens, of[0].n_kv, max(1, of[0].n_regions), of[0].way,
             sum(one.visited for one in of), sum(one.skipped for one in of))
            for step, of in found.items()
        ]  # fmt: skip
        columns = ["step", "tokens", "n_kv", "regions", "skip_masked_kv", "visited", "skipped"]
        return Table(rows, columns=columns)

    def _repr_html_(self) -> str:
        return self.steps()._repr_html_()


def groups(
    n_tokens: int, firsts: np.ndarray | None = None, kernel: str = AttnKernel.AUTO
) -> np.ndarray:
    """The first token of each group of rows, (groups,) int64: every 8th token, and the first token
    of each region.

    firsts: the first tokens of the regions, (regions,); None where all tokens share one region.
    kernel: a value of `attn_kernel`.
    """
    every = np.arange(0, n_tokens, 1 if kernel == AttnKernel.VEC else TOKENS)
    if firsts is None:
        return every
    inside = firsts[firsts < n_tokens]
    return np.union1d(every, inside)


def visited(
    mask: np.ndarray,
    way: str,
    firsts: np.ndarray | None = None,
    kernel: str = AttnKernel.AUTO,
) -> np.ndarray:
    """Which blocks a way of `skip_masked_kv` visits, (groups, tiles of 16 cells) bool.

    mask: (T, n_kv) float16, -inf where a token does not see a cell. firsts, kernel: as `groups` has
    them.
    """
    t, n_kv = mask.shape
    begins = np.arange(0, n_kv, CELLS)
    of_group = groups(t, firsts, kernel)
    if way == SkipMaskedKV.OFF:
        return np.ones((len(of_group), len(begins)), bool)
    return _KNOWN[way](mask, of_group, begins)


def _in_loop(mask: np.ndarray, of_group: np.ndarray, begins: np.ndarray) -> np.ndarray:
    rows = np.logical_or.reduceat(mask != -np.inf, of_group, axis=0)
    return np.logical_or.reduceat(rows, begins, axis=1)


def _tail(mask: np.ndarray, of_group: np.ndarray, begins: np.ndarray) -> np.ndarray:
    return begins < np.maximum.reduceat(extents(mask), of_group)[:, None]


def _classes(mask: np.ndarray, of_group: np.ndarray, begins: np.ndarray) -> np.ndarray:
    some = np.maximum.reduceat(classes(mask), of_group, axis=0) != UNSEEN
    return some[:, begins // CLASS_CELLS]


_KNOWN: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    SkipMaskedKV.IN_LOOP: _in_loop,
    SkipMaskedKV.TAIL: _tail,
    SkipMaskedKV.CLASSES: _classes,
}


@contextmanager
def kv_visits(engine: Engine) -> Iterator[VisitTable]:
    """Counts the blocks of every step of `engine` in the body, from its mask (`with`). Other steps
    pay nothing for it. A recorder is set aside meanwhile, because counting would be in the trace.

    The body is given a VisitTable, a list with a row for each attention of each step: step, layer,
    way, n_tokens, n_kv, n_regions, visited and skipped (blocks of 16 cells)."""
    found, before, untraced = VisitTable(), engine.recorder, engine.untraced
    engine.look(None, _Counting(engine, found))
    try:
        yield found
    finally:
        engine.look(before, untraced)


class _Counting(Watch):
    looks_at_batches = True

    def __init__(self, engine: Engine, found: VisitTable):
        self._engine, self._found = engine, found

    def batch(self, batch: Batch, program: Program) -> None:
        mask, regions = batch.values.get(MASK), batch.values.get(REGIONS)
        if mask is None:  # a step without tokens
            return
        firsts = None if regions is None else regions[:, 0]
        known: dict[str, tuple[int, int]] = {}  # by way: all layers have one mask
        for node in attentions(program):
            way = str(node.params.get("skip", SkipMaskedKV.OFF))
            if way not in known:
                of_way = visited(mask, way, firsts, node.params.get("kernel", AttnKernel.AUTO))
                n = int(of_way.sum())
                known[way] = n, of_way.size - n
            n_tokens, n_kv = mask.shape
            n_regions = 0 if firsts is None else len(firsts)
            step, (n_visited, n_skipped) = self._engine.n_steps, known[way]
            self._found.append(
                Visits(step, node.layer, way, n_tokens, n_kv, n_regions, n_visited, n_skipped)
            )


def attentions(program: Program) -> Iterator[Node]:
    """The attention nodes of a program, also those that are parts of fused ones."""
    for command in program.singly():
        if isinstance(command, Launch):
            nodes = command.node.parts or (command.node,)
            yield from (node for node in nodes if node.op == "attention")
