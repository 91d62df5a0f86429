"""Byte ranges, cut into pieces where races are possible. Overlapping ranges share a tag.

Ranges of one buffer overlap in any way (an arena is used again and again). Cut at every end, they
become pieces that each range covers whole or not at all:

    range a   |---------------|
    range b           |---------------|
    range c                   |-------|          d, read by one stream alone: |-----|
    pieces    |   0   |   1   |   2   |                                       no number

A range may cover very many pieces. So pieces are the leaves of a binary tree, and a range is the
fewest nodes of it that cover its pieces. Two ranges overlap where they use the same node, or where
one uses a node inside of a node that the other uses.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from workbench.program.commands import Buffer, Range


class Pieces(NamedTuple):
    """of[r]: the numbers of the pieces that range r covers, each in 0..n-1."""

    of: dict[Range, range]
    n: int


class Tags(NamedTuple):
    """An access to range r leaves its mark in the tags marks[r], and looks for the marks of others
    in the tags looks[r]. Tags are numbered 0..n-1.

    Two ranges overlap exactly where the marks of either share a tag with the looks of the other.
    """

    looks: dict[Range, tuple[int, ...]]
    marks: dict[Range, tuple[int, ...]]
    n: int


def cut(touched: Mapping[Range, int], matters: Callable[[int], bool]) -> Pieces:
    """Numbers the pieces of all ranges in `touched`, buffer by buffer, in order of offset.

    touched[r]: a set of bits that says who touches r, and how.
    matters: whether a piece with these bits can race. A piece that cannot has no number.

    n ranges take n log n steps.
    """
    by_buffer: defaultdict[Buffer, list[Range]] = defaultdict(list)
    for r in touched:
        by_buffer[r.buffer].append(r)
    of: dict[Range, range] = {}
    numbered = 0
    for ranges in by_buffer.values():
        begin: defaultdict[int, list[int]] = defaultdict(list)
        end: defaultdict[int, list[int]] = defaultdict(list)
        for r in ranges:
            begin[r.offset].append(touched[r])
            end[r.offset + r.nbytes].append(touched[r])
        first: dict[int, int] = {}  # by edge: the first number of the pieces from there on
        here: Counter[int] = Counter()  # the bits of each range that covers the bytes from an edge
        for edge in sorted({*begin, *end}):
            first[edge] = numbered
            here.update(begin.get(edge, ()))
            for bits in end.get(edge, ()):
                here[bits] -= 1
                if not here[bits]:
                    del here[bits]
            together = 0
            for bits in here:
                together |= bits
            numbered += matters(together)
        for r in ranges:
            of[r] = range(first[r.offset], first[r.offset + r.nbytes])
    return Pieces(of, numbered)


def tags(pieces: Pieces) -> Tags:
    """The tags of ranges that are cut into n pieces: about log n tags for a range, however many
    pieces it covers.

    A node that ranges use has a tag of its own. Where ranges use nodes inside of that node, it has
    a second tag, `inside`, in which those ranges leave their marks too.
    """
    n_leaves = 1 << max(pieces.n - 1, 0).bit_length()
    nodes = {covered: tuple(_nodes(covered, n_leaves)) for covered in set(pieces.of.values())}
    used = {node for some in nodes.values() for node in some}
    around: dict[int, tuple[int, ...]] = {1: ()}  # of a node, the used ones that it lies inside of
    for node in used:
        _find_around(node, used, around)
    numbers = count()
    own = {node: next(numbers) for node in used}
    outer = {a for node in used for a in around[node]}
    inside = {node: next(numbers) for node in outer}
    looks, marks = {}, {}
    for covered, some in nodes.items():
        above = {a for node in some for a in around[node]}
        mine = [own[node] for node in some]
        looks[covered] = (
            *mine,
            *(inside[x] for x in some if x in inside),
            *(own[a] for a in above),
        )
        marks[covered] = (*mine, *(inside[a] for a in above))
    return Tags(
        {r: looks[covered] for r, covered in pieces.of.items()},
        {r: marks[covered] for r, covered in pieces.of.items()},
        len(own) + len(inside),
    )


def _nodes(covered: range, n_leaves: int) -> Iterator[int]:
    """The fewest nodes that cover these leaves. Node 1 is the root; x has 2x and 2x+1 below it."""
    begin, end = covered.start + n_leaves, covered.stop + n_leaves
    while begin < end:
        if begin & 1:
            yield begin
            begin += 1
        if end & 1:
            end -= 1
            yield end
        begin, end = begin >> 1, end >> 1


def _find_around(node: int, used: Collection[int], around: dict[int, tuple[int, ...]]) -> None:
    """Enters the used nodes around `node`, and around every node on the way to it."""
    way = []
    while node not in around:
        way.append(node)
        node >>= 1
    for below in reversed(way):
        parent = below >> 1
        around[below] = (*around[parent], parent) if parent in used else around[parent]
