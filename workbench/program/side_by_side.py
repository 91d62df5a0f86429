"""Which launches of a program may run side by side: its regions, and the branches of each.

A branch runs on one stream between a fork and a join: launches without a Record or a Wait of a fork
among them. Two branches are side by side where streams and events give no order between them.
Branches that are linked by such pairs are one region.

    stream 0   norm | Q product . Q rope ----------- | attention
    stream 2        | K product . K rope . K store - |
    region            branch, branch

Pure: a program goes in, numbers of its commands come out.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.program.commands import Launch, Program, Record, Stream, Wait

Number = tuple[int, int]  # a command's number, and its number in its plan; 0 outside of plans


class Branch(NamedTuple):
    """Launches of one stream, in order. numbers: of their commands."""

    stream: Stream
    numbers: tuple[Number, ...]
    launches: tuple[Launch, ...]


class _Piece:
    """What a stream computes between two points that order it with other streams.

    number: of the piece, on its own stream.
    clock: of each stream, how many of its pieces are over when this piece begins.
    """

    def __init__(self, stream: Stream, number: int, clock: dict[Stream, int]):
        self.stream, self.number, self.clock = stream, number, clock
        self.numbers: list[Number] = []
        self.launches: list[Launch] = []

    def beside(self, other: _Piece) -> bool:
        return other.clock.get(self.stream, 0) <= self.number and (
            self.clock.get(other.stream, 0) <= other.number
        )


def regions(program: Program) -> list[list[Branch]]:
    """The regions of a program, in the order of their first launches. A region is the list of its
    branches, in the same order."""
    pieces = _pieces(program)
    region_of = list(range(len(pieces)))  # the first piece of each one's region
    for j, later in enumerate(pieces):
        for i in range(j):
            earlier = pieces[i]
            if earlier.stream != later.stream and earlier.beside(later):
                joined = sorted((region_of[i], region_of[j]))
                region_of = [joined[0] if r == joined[1] else r for r in region_of]
    found: dict[int, list[Branch]] = {}
    for piece, region in zip(pieces, region_of, strict=True):
        branch = Branch(piece.stream, tuple(piece.numbers), tuple(piece.launches))
        found.setdefault(region, []).append(branch)
    return [branches for branches in found.values() if len(branches) > 1]


def _pieces(program: Program) -> list[_Piece]:
    """All pieces that have launches, in the order of the first launch of each."""
    found: list[_Piece] = []
    under_way: dict[Stream, _Piece] = {}
    clocks: dict[Stream, dict[Stream, int]] = {}
    recorded: dict[str, dict[Stream, int]] = {}

    def cut(stream: Stream) -> dict[Stream, int]:
        """Ends the current piece of a stream; returns the stream's clock."""
        clock = clocks.setdefault(stream, {})
        if under_way.pop(stream, None) is not None:
            clock[stream] = clock.get(stream, 0) + 1
        return clock

    for _, index, command, part in program.located():
        match command:
            case Record(forks=True):
                recorded[command.event] = dict(cut(command.stream))
            case Wait(forks=True):
                clock = cut(command.stream)
                for stream, n in recorded[command.event].items():
                    clock[stream] = max(clock.get(stream, 0), n)
            case Launch(by_host=False):
                stream = command.stream
                if stream not in under_way:
                    clock = clocks.setdefault(stream, {})
                    under_way[stream] = _Piece(stream, clock.get(stream, 0), dict(clock))
                    found.append(under_way[stream])
                under_way[stream].numbers.append((index, part or 0))
                under_way[stream].launches.append(command)
    return found
