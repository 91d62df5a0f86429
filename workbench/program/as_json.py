"""Programs and their commands as JSON-able values."""

from collections.abc import Iterable, Sequence
from typing import Any

from workbench.program.commands import Command, Launch, Program, Range, Replay


def program_as_json(program: Program) -> dict[str, Any]:
    """Everything in a program but the layout of its tensors."""
    return {
        "pattern": program.pattern(),
        "folded_pattern": program.pattern(fold=True),
        "sync": program.sync,
        "copy_stream": program.copy_stream,
        "shape": program.shape._asdict(),
        "backends": list(program.backends),
        "splits": [program.backends[b] for b in program.splits],
        "counts": program.counts(),
        "buffers": [
            {
                "name": b.name,
                "space": str(b.space),
                "bytes": b.nbytes,
                "backend": program.backends[b.backend],
            }
            for b in program.buffers
        ],
        "commands": [_in_full(c, program.backends) for c in program.commands],
    }


def command_as_json(command: Command, backends: Sequence[str]) -> dict[str, Any]:
    """A command's kind and split, and those of stream, op, event, name and value that it has.

    backends: the program's, by index.
    """
    found: dict[str, Any] = {"kind": command.kind, "split": command.split}
    if command.stream is not None:
        found["stream"] = command.stream.describe(backends)
    return found | command.names()


def _in_full(command: Command, backends: Sequence[str]) -> dict[str, Any]:
    """A command with the ranges that it touches, each [buffer name, offset, bytes]. A plan has its
    parts instead, each in full."""
    found = command_as_json(command, backends)
    if isinstance(command, Replay):
        return found | {"parts": [_in_full(part, backends) for part in command.parts]}
    if isinstance(command, Launch):
        if command.node.parts:
            found["parts"] = [part.op for part in command.node.parts]
        if command.programmatic:
            found["programmatic"] = True
        if command.scratch is not None:
            found["scratch"] = _ranges((command.scratch,))[0]
    return found | {"reads": _ranges(command.reads), "writes": _ranges(command.writes)}


def _ranges(ranges: Iterable[Range]) -> list[list[Any]]:
    return [[r.buffer.name, r.offset, r.nbytes] for r in ranges]
