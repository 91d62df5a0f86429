"""Runs made by hand, for the hazard checker: a few ranges and streams, and a line for a command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from workbench.graph.ir import F32, Node, StepShape, Tensor
from workbench.graph.ops import make
from workbench.program.check.hazards import races
from workbench.program.commands import (
    Buffer,
    Command,
    CommandAt,
    Copy,
    Launch,
    Program,
    Range,
    Record,
    Space,
    Stream,
    Sync,
    Wait,
)

A, B, C, OTHER = Stream(1, 0), Stream(1, 1), Stream(1, 2), Stream(2, 0)
ADD = make("add", "sum", Tensor("a", F32, (4,)), Tensor("b", F32, (4,)))


def memory(name: str, nbytes: int = 64) -> Range:
    return Range(Buffer(name, Space.DEVICE, nbytes, 1), 0, nbytes)


def part(whole: Range, offset: int, nbytes: int) -> Range:
    return Range(whole.buffer, whole.offset + offset, nbytes)


def program(*commands: Command) -> Program:
    backends = ("host", "dev", "two")
    return Program(list(commands), [], [], [1], backends, StepShape(1, 1, 256), "by_hand", "own")


def copy(dst: Range, src: Range, stream: Stream, name: str = "x") -> Copy:
    return Copy(dst, src, stream, name, 0)


def launch(
    stream: Stream, reads: Sequence[Range] = (), writes: Sequence[Range] = (), node: Node = ADD,
    programmatic: bool = False,
) -> Launch:  # fmt: skip
    return Launch(node, stream, tuple(reads), tuple(writes), None, 0, programmatic)


def record(event: int, stream: Stream) -> Record:
    return Record(str(event), stream, 0)


def wait(event: int, stream: Stream) -> Wait:
    return Wait(str(event), stream, 0)


def sync(stream: Stream | None = None, event: int | None = None) -> Sync:
    return Sync(0, stream=stream, event=None if event is None else str(event))


def pairs(*commands: Command, laps: int = 1, **how: Any) -> list[tuple[int, int]]:
    """The racing pairs of one program, by index."""
    found = races([program(*commands)] * laps, **how)
    return sorted({(race.first.index, race.second.index) for race in found})


def indices(found: Iterable[CommandAt]) -> list[int]:
    return [at.index for at in found]


S, X, Y, Z = memory("staging"), memory("x"), memory("y"), memory("z")
LAND, USE = copy(X, S, B, "inp"), launch(A, [X], [Y])
