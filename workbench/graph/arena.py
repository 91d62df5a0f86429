"""ROOM #16991, lifetimes: which offset each activation gets in the arena.

Nodes are walked in the order in which they are issued. A tensor takes bytes at the node that makes
it, and gives them back after the last node that reads it. Tensors that are never alive together
share bytes. Inputs come first and keep theirs for the whole step: their copies are in flight while
the step before may still compute.

On one stream a node begins when the node before it is over, so bytes that were given back are free.
On several streams such bytes are free only for a node that *sees* them: its stream knows, whatever
the timing, that all nodes which wrote or read there are over. Given-back bytes remember these
nodes:

    stream 0   norm   Q      rope Q ....... attention      norm's result: read by Q and K
    stream 1     `--- K ---- store K ---.'                 rope Q sees that Q is over, but not K: it
                                                           may not use norm's bytes; attention may

So reads are protected as writes are. (llama.cpp's allocator takes the nodes of branches by turns.
It protects what a branch writes from later nodes of other branches, but not what a branch reads.)
"""

from bisect import bisect
from collections.abc import Callable, Container, Iterable, Sequence
from operator import lt
from typing import NamedTuple

from workbench.common.sizes import round_up
from workbench.graph.forks import Branches, Clock
from workbench.graph.ir import ALIGN, Kind, Node, Tensor


class ArenaLayout(NamedTuple):
    """Offsets in bytes by storage tensor, scratch offsets by node, and the bytes needed in all."""

    offsets: dict[Tensor, int]
    scratch: dict[Node, tuple[int, int]]  # node -> offset, bytes
    nbytes: int


ALL: Clock = ()  # of bytes that every node may use, and of a node that may use all bytes


class FreeList:
    """Free ranges of an unbounded arena, best fit.

    Each range has a clock: how many nodes of each stream must be over before the range is used.
    Neighbours with equal clocks are merged.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Clock]] = []  # offset, bytes, clock; by offset
        self.end = 0

    def take(self, nbytes: int, sees: Clock = ALL) -> int:
        """The offset of `nbytes` (rounded up to ALIGN) that are free for a node; may grow the end.
        0 for no bytes. sees: how many nodes of each stream the node knows to be over."""
        need = round_up(nbytes, ALIGN)
        if not need:
            return 0
        best, best_size = -1, self.end + 1  # the smallest gap that is large enough
        first = end = size = 0  # of the gap at hand: its first range, its end, its bytes
        for i, (at, length, clock) in enumerate(self._free):
            if clock and any(map(lt, sees, clock)):
                continue
            if at == end and size:
                size += length
            else:
                if need <= size < best_size:
                    best, best_size = first, size
                first, size = i, length
            end = at + length
        if need <= size < best_size:
            best = first
        if best >= 0:
            return self._cut(best, need)
        if size and end == self.end:  # the last gap can grow
            offset = self.end - size
            del self._free[first:]
        else:
            offset = self.end
        self.end = offset + need
        return offset

    def _cut(self, first: int, need: int) -> int:
        """Takes `need` bytes from range `first` and the ranges after it; returns their offset."""
        offset, stop = self._free[first][0], first
        end = offset + need
        while stop < len(self._free) and self._free[stop][0] < end:
            at, length, clock = self._free[stop]
            stop += 1
        left = at + length - end
        self._free[first:stop] = [(end, left, clock)] if left else []
        return offset

    def give(self, offset: int, nbytes: int, clock: Clock = ALL) -> None:
        """Returns a range that `take` gave. clock: what must be over before it is used again."""
        size = round_up(nbytes, ALIGN)
        if not size:
            return
        i = bisect(self._free, (offset,))
        if i < len(self._free) and self._free[i][::2] == (offset + size, clock):
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1][:2]) == offset and self._free[i - 1][2] == clock:
            offset, before, _ = self._free.pop(i := i - 1)
            size += before
        self._free.insert(i, (offset, size, clock))


def layout(
    nodes: Sequence[Node],
    inputs: Iterable[Tensor],
    keep: Iterable[Tensor],
    scratch_bytes: Callable[[Node], int],
    elsewhere: Container[Tensor] = (),
    visible: Branches | None = None,
) -> ArenaLayout:
    """Offsets for every activation that `nodes` make, for `inputs`, and for scratch.

    inputs: tensors written before the first node. They keep their bytes for the whole step.
    keep: tensors that are read after the last node.
    elsewhere: activations that have a range outside of the arena. They get no offset, as weights
        and caches get none.
    visible: the nodes on their streams; None: all nodes are on one stream.
    """
    touched = [{t.storage for t in node.inputs} for node in nodes]
    last_use = {s: i for i, read in enumerate(touched) for s in read}
    for t in keep:
        last_use[t.storage] = len(nodes)

    free, now = FreeList(), _Now(visible)
    offsets: dict[Tensor, int] = {}
    scratch: dict[Node, tuple[int, int]] = {}
    for t in inputs:
        offsets[t.storage] = free.take(t.nbytes)

    users: dict[Tensor, list[int]] = {}  # of each tensor in the arena: its users, as a clock
    for i, node in enumerate(nodes):
        sees = now.begin(i)
        for out in [t.storage for t in node.outputs]:
            homeless = out not in offsets and out not in elsewhere
            if homeless and out.kind in (Kind.ACTIVATION, Kind.OUTPUT):
                offsets[out] = free.take(out.nbytes, sees)
                users[out] = now.nobody()
            touched[i].add(out)
        need = scratch_bytes(node)
        if need:
            offset = free.take(need, sees)
            scratch[node] = (offset, need)
            free.give(offset, need, tuple(now.join(now.nobody())))
        for s in touched[i]:
            if s in users:
                now.join(users[s])
                if last_use.get(s, i) == i:  # read for the last time, or never
                    free.give(offsets[s], s.nbytes, tuple(users.pop(s)))
    return ArenaLayout(offsets, scratch, free.end)


class _Now:
    """The node at hand, and what it sees. On one stream every clock is ALL."""

    def __init__(self, visible: Branches | None):
        self._visible = visible if visible and visible.n_streams > 1 else None
        self._clocks = self._visible.clocks() if self._visible else []
        # nodes of each stream so far, this one included
        self._begun = [0] * (self._visible.n_streams if self._visible else 0)
        self._stream = 0

    def begin(self, i: int) -> Clock:
        """Node i is at hand from now on. Returns what it sees."""
        if self._visible is None:
            return ALL
        self._stream = self._visible.streams[i]
        self._begun[self._stream] += 1
        return self._clocks[i]

    def nobody(self) -> list[int]:
        """The clock of bytes that no node has used."""
        return [0] * len(self._begun)

    def join(self, users: list[int]) -> list[int]:
        """Adds the node at hand to the clock `users`, and returns it."""
        if users:
            users[self._stream] = self._begun[self._stream]
        return users
