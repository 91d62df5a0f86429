"""How long each tensor lies in the arena, and which bytes are overwritten while they are in use: a
layout as data, for tables and drawings.

    stream 0   norm   Q0 Q1        Q1 lies where norm lay: in the order of issue, K is over by then.
    stream 1     `--- K            On two streams K may still read when Q1 writes: norm is lost.

What is alive together follows from clocks alone (`Branches.clocks`), not from a timing. The layout
may be of any order of the nodes; the branches say in which they are issued.

Pure: numbers go in, numbers come out.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import lt
from typing import NamedTuple

from workbench.graph.arena import ArenaLayout
from workbench.graph.forks import Branches, Clock
from workbench.graph.ir import Node, Tensor

BEFORE = -1  # in place of a node's number: written before the first node


class Lifetime(NamedTuple):
    """How long a range of the arena belongs to a tensor, or to a node as its scratch.

    offset, nbytes: the range.
    first: the number of the first node that writes it; BEFORE for what is given to the nodes.
    last: the number of the last node that reads or writes it, in the order of issue; the number of
        all nodes for a tensor that is kept.
    users: the numbers of all nodes that read or write it.
    streams: the streams of these nodes, each once.
    """

    of: Tensor | Node
    offset: int
    nbytes: int
    first: int
    last: int
    users: tuple[int, ...]
    streams: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"scratch of {self.of.name}" if isinstance(self.of, Node) else self.of.name


class Overwritten(NamedTuple):
    """Bytes that `by` writes while `lost` may still be in use. offset, nbytes: the bytes that both
    lie in."""

    lost: Lifetime
    by: Lifetime
    offset: int
    nbytes: int


def lifetimes(made: ArenaLayout, branches: Branches, keep: Iterable[Tensor] = ()) -> list[Lifetime]:
    """The lifetimes of all that lies in the arena, by first node, then by offset. Tensors that no
    node makes stay from begin to end. keep: as `arena.layout` had it."""
    users: dict[Tensor | Node, list[int]] = {t: [] for t in made.offsets}
    makers = dict[Tensor | Node, int]()
    for i, node in enumerate(branches.nodes):
        for t in dict.fromkeys(t.storage for t in (*node.inputs, *node.outputs)):
            if t in users:
                users[t].append(i)
        for t in node.outputs:
            makers.setdefault(t.storage, i)
        if node in made.scratch:
            users[node], makers[node] = [i], i
    stay, end = {t.storage for t in keep} | (users.keys() - makers.keys()), len(branches.nodes)
    ranges: dict[Tensor | Node, tuple[int, int]] = {
        t: (offset, t.nbytes) for t, offset in made.offsets.items()
    }
    found = [
        Lifetime(
            of, *where, makers.get(of, BEFORE), end if of in stay else users[of][-1],
            tuple(users[of]), tuple(sorted({branches.streams[i] for i in users[of]})),
        )
        for of, where in (ranges | made.scratch).items()
    ]  # fmt: skip
    return sorted(found, key=lambda each: (each.first, each.offset))


def overwritten(found: Sequence[Lifetime], branches: Branches) -> list[Overwritten]:
    """Every pair that shares bytes although neither is certainly over when the other begins. A
    layout by visibility has no such pair, nor has a layout for one stream. found: as `lifetimes`
    gives them."""
    return [
        Overwritten(lost, by, begin, end - begin)
        for lost, by in alive_together(found, branches)
        if (begin := max(lost.offset, by.offset))
        < (end := min(lost.offset + lost.nbytes, by.offset + by.nbytes))
    ]


def alive_together(
    found: Sequence[Lifetime], branches: Branches
) -> Iterator[tuple[Lifetime, Lifetime]]:
    """Pairs that may be in use together; first comes the one that is issued first."""
    clocks = branches.clocks()
    seen_by_all = branches.known_from()
    after, never = list(_afters(branches)), (len(clocks) + 1,) * branches.n_streams
    alive: list[tuple[Lifetime, Clock]] = []
    sees = (0,) * branches.n_streams
    for by in found:
        if by.first != BEFORE:
            sees, all_see = clocks[by.first], seen_by_all[by.first]
            alive = [(lost, over) for lost, over in alive if _hides(over, all_see)]
        yield from ((lost, by) for lost, over in alive if _hides(over, sees))
        ends = dict(after[i] for i in by.users)
        stays = by.last == len(clocks)
        alive.append((by, never if stays else tuple(ends.get(s, 0) for s in range(len(sees)))))


def _afters(branches: Branches) -> Iterator[tuple[int, int]]:
    """The stream of each node, and how many nodes of this stream are over after it."""
    count = [0] * branches.n_streams
    for stream in branches.streams:
        count[stream] += 1
        yield stream, count[stream]


def _hides(over: Clock, sees: Clock) -> bool:
    """Whether something that `over` counts is not known to be over."""
    return any(map(lt, sees, over))
