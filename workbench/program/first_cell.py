"""The program that a kept program becomes when its cache stores are patched for another first cell.

Where cache stores are copies to views (`copy_to_view`), the first cell that a step stores is a
parameter of the stores' nodes, and an address in their arguments. A kept program is patched for the
next cell. This module says which program then runs, ranges included, so that it can be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.graph import ops
from workbench.graph.ir import Node
from workbench.program import commands as c

CELL = "cell"  # the parameter


def is_view(node: Node) -> bool:
    """Whether the node has, as a parameter, the cell from which on it stores."""
    return CELL in node.params


def first_cell(program: c.Program) -> int | None:
    """The first cell that the program stores; None where that is no parameter of any node."""
    for command in program.singly():
        if isinstance(command, c.Launch) and is_view(command.node):
            return int(command.node.params[CELL])
    return None


def at_cell(program: c.Program, cell: int) -> c.Program:
    """The program of a step with first cell `cell`, as if it had been built for it; the program
    itself where it stores from there already. Raises UsageError for cells outside of the cache."""
    if first_cell(program) in (None, cell):
        return program
    return replace(program, commands=_moved(program, program.commands, cell))


def _moved(program: c.Program, commands: Sequence[c.Command], cell: int) -> list[c.Command]:
    made: list[c.Command] = []
    for command in commands:
        if isinstance(command, c.Replay):
            command = replace(command, parts=tuple(_moved(program, command.parts, cell)))
        elif isinstance(command, c.Launch) and is_view(command.node):
            command = _stored_at(program, command, cell)
        made.append(command)
    return made


def _stored_at(program: c.Program, launch: c.Launch, cell: int) -> c.Launch:
    old = launch.node
    params = {**old.params, CELL: cell}
    node = ops.make_of(old.op, old.name, old.inputs, old.layer, params)
    ((tensor, offset, nbytes),) = ops.writes(node)
    base = program.layout[launch.stream.backend][tensor]
    view = c.Range(base.buffer, base.offset + offset, nbytes)
    return replace(launch, node=node, writes=(view, *launch.writes[1:]))
