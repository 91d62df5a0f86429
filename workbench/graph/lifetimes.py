"""When tensors lie in the arena, and what would be overwritten there: a layout as data, for tables
and drawings.

    stream 0   norm   Q0 Q1        Q1 lies where norm lay: free behind K in the order of issue.
    stream 1     `--- K            Here K may still read when Q1 writes: norm is overwritten.

What is alive together follows from clocks alone (`Branches.clocks`), not from a timing. The layout
may be of any order of the nodes; the branches say in which they are issued.

Pure: numbers go in, numbers come out.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import lt
from typing import NamedTuple

from workbench.common.sizes import round_up
from workbench.graph.arena import ArenaLayout
from workbench.graph.forks import Branches, Clock
from workbench.graph.ir import ALIGN, Node, Tensor

BEFORE = -1  # in place of a node's number: written in front of the first node


class Lifetime(NamedTuple):
    """How long a range of the arena is a tensor's, or a node's as scratch.

    offset, nbytes: the range. first: the number of the node that writes it first, BEFORE for what
    is given to the nodes. last: of the last that reads or writes it, as they are issued; the number
    of nodes for what stays. users: of all that do. streams: of these, each once.
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
    """Bytes that `by` writes while `lost` may still be in use. offset, nbytes: what both have."""

    lost: Lifetime
    by: Lifetime
    offset: int
    nbytes: int


def lifetimes(made: ArenaLayout, branches: Branches, keep: Iterable[Tensor] = ()) -> list[Lifetime]:
    """All that lies in the arena, by first node, then by offset. keep: as `arena.layout` had it.
    What no node makes stays from begin to end."""
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
    """Every two that share bytes though neither is over, whatever the timing, when the other
    begins. found: as `lifetimes` gives them. None by visibility; none on one stream."""
    return [
        Overwritten(lost, by, begin, end - begin)
        for lost, by in _alive_together(found, branches)
        if (begin := max(lost.offset, by.offset))
        < (end := min(lost.offset + lost.nbytes, by.offset + by.nbytes))
    ]


def least_bytes(found: Sequence[Lifetime], branches: Branches) -> int:
    """What an arena needs that overwrites nothing, however it is laid out: the most bytes of ranges
    that are in use together, each with each. The search is exhaustive, with bounds: it is quick
    where few are, as in decoders."""
    nbytes = {one.of: round_up(one.nbytes, ALIGN) for one in found}
    beside: dict[Tensor | Node, list[Tensor | Node]] = {one.of: [] for one in found}
    for lost, by in _alive_together(found, branches):
        beside[by.of].append(lost.of)

    def most(all_of: int, others: Sequence[Tensor | Node], known: int) -> int:
        """The bytes of the heaviest set, or `known` where none has more. all_of: bytes that are in
        the set. others: what goes with all in it, by first node."""
        known, left = max(known, all_of), sum(map(nbytes.__getitem__, others))
        for one in reversed(others):
            if all_of + left <= known:
                break
            left -= nbytes[one]
            with_one = set(beside[one])
            known = most(all_of + nbytes[one], [t for t in others if t in with_one], known)
        return known

    least = 0
    for of, others in beside.items():
        least = most(nbytes[of], others, least)
    return least


def _alive_together(
    found: Sequence[Lifetime], branches: Branches
) -> Iterator[tuple[Lifetime, Lifetime]]:
    """Pairs, the one that begins first in the order of issue in front."""
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
    """Of each node its stream, and how many nodes of that are over behind it."""
    count = [0] * branches.n_streams
    for stream in branches.streams:
        count[stream] += 1
        yield stream, count[stream]


def _hides(over: Clock, sees: Clock) -> bool:
    """Whether not all that `over` counts is seen to be over."""
    return any(map(lt, sees, over))
