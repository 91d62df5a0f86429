"""Byte ranges cut into pieces: where any range begins or ends, and only where it matters.

Ranges of one buffer overlap in any way (an arena is used again and again). Cut at every end, they
become pieces that each range covers whole or not at all, so that what touches the same bytes is
found by number:

    range a   |---------------|
    range b           |---------------|
    range c                   |-------|          d, read by one stream alone: |-----|
    pieces    |   0   |   1   |   2   |                                       no number
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from workbench.program.commands import Buffer, Range


class Pieces(NamedTuple):
    """of[r] are the numbers of the pieces that range r covers; in all they are 0..n-1."""

    of: dict[Range, range]
    n: int


def cut(touched: Mapping[Range, int], matters: Callable[[int], bool]) -> Pieces:
    """Numbers the pieces of all ranges in `touched`, buffer by buffer, in order of offset.

    touched[r] is a set of bits: who touches r, and how. A piece that its ranges together touch in
    a way that does not matter has no number. n ranges take n log n steps.
    """
    by_buffer: defaultdict[Buffer, list[Range]] = defaultdict(list)
    for r in touched:
        by_buffer[r.buffer].append(r)
    of: dict[Range, range] = {}
    count = 0
    for ranges in by_buffer.values():
        begin: defaultdict[int, list[int]] = defaultdict(list)
        end: defaultdict[int, list[int]] = defaultdict(list)
        for r in ranges:
            begin[r.offset].append(touched[r])
            end[r.offset + r.nbytes].append(touched[r])
        first: dict[int, int] = {}  # of the numbers at or behind an edge
        here: Counter[int] = Counter()  # the bits of each range that covers the place
        for edge in sorted({*begin, *end}):
            first[edge] = count
            here.update(begin.get(edge, ()))
            for bits in end.get(edge, ()):
                here[bits] -= 1
                if not here[bits]:
                    del here[bits]
            together = 0
            for bits in here:
                together |= bits
            count += matters(together)
        for r in ranges:
            of[r] = range(first[r.offset], first[r.offset + r.nbytes])
    return Pieces(of, count)
