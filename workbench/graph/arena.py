"""The arena: which offset each activation gets, from lifetimes.

Nodes are walked in order. A tensor takes bytes at the node that makes it, and gives them back after
the last node that reads it. So tensors that are never alive together share bytes. Inputs come first
and keep their bytes for the whole step: their copies are in flight while the step before may still
compute. This is right where nodes are computed in order, on one stream.
"""

from bisect import insort
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

from workbench.graph.forks import Branches, Clock
from workbench.graph.ir import ALIGN, Kind, Node, Tensor
from workbench.sizes import round_up


class ArenaLayout(NamedTuple):
    """Offsets in bytes by storage tensor, scratch offsets by node, and the bytes needed in all."""

    offsets: dict[Tensor, int]
    scratch: dict[Node, tuple[int, int]]  # node -> offset, bytes
    nbytes: int


class FreeList:
    """Free ranges of an unbounded arena, best fit, neighbours merged."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (offset, bytes), by offset
        self.end = 0

    def take(self, nbytes: int) -> int:
        """An offset with `nbytes` (rounded up to ALIGN) free behind it; may grow the end."""
        need = round_up(nbytes, ALIGN)
        best = -1
        for i, (_, size) in enumerate(self._free):
            if size >= need and (best < 0 or size < self._free[best][1]):
                best = i
        if best >= 0:
            offset, size = self._free.pop(best)
            if size > need:
                insort(self._free, (offset + need, size - need))
            return offset
        if self._free and sum(self._free[-1]) == self.end:  # the last gap can grow
            offset, _ = self._free.pop()
        else:
            offset = self.end
        self.end = offset + need
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Returns a range that `take` gave."""
        size = round_up(nbytes, ALIGN)
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if start + length == offset:
                offset, size = start, size + length
            elif offset + size == start:
                size += length
            else:
                merged.append((start, length))
        self._free = merged
        insort(self._free, (offset, size))


class Visibility(NamedTuple):
    """What streams know of each other: the stream of each node, and its clock (`forks.clocks`)."""

    streams: Sequence[int]
    clocks: Sequence[Clock]


def visibility(branches: Branches) -> Visibility | None:
    """Of nodes on several streams; None where one has them all."""
    if branches.n_streams == 1:
        return None
    return Visibility(branches.streams, branches.clocks())


def layout(
    nodes: Sequence[Node],
    inputs: Iterable[Tensor],
    keep: Iterable[Tensor],
    scratch_bytes: Callable[[Node], int],
    elsewhere: Container[Tensor] = (),
    visible: Visibility | None = None,
) -> ArenaLayout:
    """Offsets for every activation that `nodes` make, for `inputs`, and for scratch.

    inputs: tensors written before the first node (kept all through). keep: tensors that are read
    after the last node. elsewhere: activations that have a range outside of the arena. They are
    passed over, as weights and caches are.
    """
    last_use: dict[Tensor, int] = {}
    for i, node in enumerate(nodes):
        for t in node.inputs:
            last_use[t.storage] = i
    for t in keep:
        last_use[t.storage] = len(nodes)

    free = FreeList()
    offsets: dict[Tensor, int] = {}
    scratch: dict[Node, tuple[int, int]] = {}
    for t in inputs:
        offsets[t.storage] = free.take(t.nbytes)

    made_here: set[Tensor] = set()
    for i, node in enumerate(nodes):
        made = [t.storage for t in node.outputs]
        for out in made:
            homeless = out not in offsets and out not in elsewhere
            if homeless and out.kind in (Kind.ACTIVATION, Kind.OUTPUT):
                offsets[out] = free.take(out.nbytes)
                made_here.add(out)
        need = scratch_bytes(node)
        if need:
            offset = free.take(need)
            scratch[node] = (offset, need)
            free.give(offset, need)
        for s in {t.storage for t in node.inputs}:
            if last_use[s] == i and s in made_here:
                free.give(offsets[s], s.nbytes)
        for out in made:
            if out in made_here and last_use.get(out, -1) < i:  # made and never read
                free.give(offsets[out], out.nbytes)
                made_here.discard(out)
    return ArenaLayout(offsets, scratch, free.end)
