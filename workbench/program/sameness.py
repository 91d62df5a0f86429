"""When are two programs the same work? Programs of two engines share no object; their parts are
compared.

The command, its stream and event, the bytes it touches, and of a launch the node with everything
that a kernel is given. The names of events and buffers count, since an executor tells them apart by
name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Any

from workbench.graph.ir import Node
from workbench.program.commands import Command, Launch, Program, Range, Replay, Stream


def same_work(one: Program, other: Program) -> bool:
    """Whether both programs have the same commands, in the same order, on the same bytes."""
    if one.backends != other.backends:
        return False
    return all(a == b for a, b in zip_longest(_parts(one.commands), _parts(other.commands)))


def n_streams(program: Program) -> int:
    """On how many streams of a device the program computes; at least 1."""
    found: dict[int, set[Stream]] = {}
    for command in program.singly():
        if isinstance(command, Launch) and not command.by_host:
            found.setdefault(command.stream.backend, set()).add(command.stream)
    return max((len(streams) for streams in found.values()), default=1)


def _parts(commands: Any) -> Iterator[Hashable]:
    """What tells each command from another, in order; a plan before its parts."""
    for command in commands:
        yield _told(command)
        if isinstance(command, Replay):
            yield from _parts(command.parts)


def _told(command: Command) -> Hashable:
    ranges = tuple(_bytes(r) for r in (*command.reads, *command.writes))
    names = tuple(command.names().items())
    own: Hashable = None
    if isinstance(command, Launch):
        scratch = None if command.scratch is None else _bytes(command.scratch)
        own = command.programmatic, scratch, _node(command.node)
    return command.kind, command.split, command.stream, names, ranges, own


def _bytes(of: Range) -> Hashable:
    b = of.buffer
    return b.name, b.space, b.nbytes, b.backend, of.offset, of.nbytes


def _node(node: Node) -> Hashable:
    """All that decides which kernels compute the node, and how."""
    params = tuple((name, repr(value)) for name, value in sorted(node.params.items()))
    return node.op, params, repr(node.inputs), repr(node.outputs), tuple(map(_node, node.parts))
