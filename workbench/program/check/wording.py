"""Commands in words: as findings name them, and what would order two that race."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from workbench.program.commands import (
    HOST,
    Command,
    Copy,
    Launch,
    Read,
    Record,
    Stream,
    Sync,
    Wait,
    Write,
)


class Missing(Enum):
    """What accesses lack that race."""

    WAIT = "a wait in between"
    ORDER_OF_COPIES = "an order of copies within their stream"
    DECLARED_WAIT = "the kernel's own wait for the launch in front of it"
    STREAM_ORDER_OF_WEIGHTS = "stream order, for weights are read ahead of it"


_EARLY = {
    Missing.DECLARED_WAIT: (
        "the second is programmatic and its kernel declares no griddepcontrol.wait: launch it "
        "without pdl"
    ),
    Missing.STREAM_ORDER_OF_WEIGHTS: (
        "the second is programmatic and may read weights before its turn: launch it without pdl"
    ),
}


def worded(command: Command, backends: Sequence[str]) -> str:
    """A command in a few words: `copy inp_pos on cuda:1`, `sync of cuda:0`.

    backends: the program's, by index.
    """
    match command:
        case Launch():
            where = "the host" if on_host(command) else stream_name(command.stream, backends)
            return f"launch {command.node.op} {command.node.name} on {where}"
        case Copy():
            return f"copy {command.name} on {stream_name(command.stream, backends)}"
        case Write() | Read():
            return f"{command.kind} {command.value}"
        case Record():
            return f"record of {_quoted(command.event)} on {stream_name(command.stream, backends)}"
        case Wait():
            return f"wait of {stream_name(command.stream, backends)} for {_quoted(command.event)}"
        case Sync():
            of = _quoted(command.event)
            if command.stream is not None:
                of = stream_name(command.stream, backends)
            blocks = "" if command.blocks is None else f" behind copy {command.blocks.name}"
            return f"sync of {of}{blocks}"
    return command.kind


def _quoted(event: str | None) -> str:
    return f'"{event}"'


def on_host(command: Command) -> bool:
    """Whether the host itself does it, at its place."""
    stream = getattr(command, "stream", None)
    return isinstance(command, (Write, Read)) or (
        isinstance(command, Launch) and stream is not None and stream.backend == HOST
    )


def unordered(
    first: Command,
    second: Command,
    later: int,
    lacks: Collection[Missing],
    backends: Sequence[str],
) -> str:
    """One line: that nothing orders two commands that race, and what would.

    first: work of a stream, for what the host does itself is over when it goes on. later: how many
    steps after it the second is issued.
    """
    assert isinstance(first, (Copy, Launch))
    when = {0: "", 1: " of the next step"}.get(later, f" issued {later} steps later")
    line = f"nothing orders {worded(first, backends)} before {worded(second, backends)}{when}"
    stream = stream_name(first.stream, backends)
    behind = f"an event recorded behind the {first.kind}"
    if on_host(second):
        other = None
    else:
        assert isinstance(second, (Copy, Launch))
        other = second.stream
    for reason, words in _EARLY.items():
        if reason in lacks and other == first.stream and isinstance(first, Launch):
            return f"{line}; {words}"
    if Missing.ORDER_OF_COPIES in lacks and isinstance(first, Copy):
        return f"{line}: copies keep no order with their stream, sync {stream} between them"
    if other is None or Missing.ORDER_OF_COPIES in lacks:
        return f"{line}: sync {stream} (or {behind}) between them"
    waiting = f"let {stream_name(other, backends)} wait for {behind}"
    return f"{line}: sync {stream}, or {waiting}, between them"


def stream_name(stream: Stream, backends: Sequence[str]) -> str:
    """`cuda:1`."""
    return f"{backends[stream.backend]}:{stream.id}"
