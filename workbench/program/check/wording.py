"""Commands in words: as findings name them, and what would order two that race."""

from collections.abc import Sequence
from enum import Enum

from workbench.program.commands import Command, Copy, Launch


class Missing(Enum):
    """What accesses lack when they race."""

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
        "the second is programmatic and may read weights ahead of it: launch it without pdl"
    ),
}


def unordered(
    first: Command,
    second: Command,
    later: int,
    lacks: tuple[Missing, Missing],
    backends: Sequence[str],
) -> str:
    """One line: that nothing orders two commands that race, and what would.

    first: work of a stream; what the host does itself is over when it goes on. later: how many
    steps after it the second is issued. lacks: what the first's accesses lack, and the second's.
    """
    assert isinstance(first, (Copy, Launch))
    when = {0: "", 1: " of the next step"}.get(later, f" issued {later} steps later")
    line = f"nothing orders {first.words(backends)} before {second.words(backends)}{when}"
    stream = first.stream.words(backends)
    behind = f"an event recorded behind the {first.kind}"
    other = None if second.by_host else second.stream
    if lacks[1] in _EARLY and other == first.stream and isinstance(first, Launch):
        return f"{line}; {_EARLY[lacks[1]]}"
    if Missing.ORDER_OF_COPIES in lacks and isinstance(first, Copy):
        return f"{line}: copies keep no order with their stream, sync {stream} between them"
    if other is None or Missing.ORDER_OF_COPIES in lacks:
        return f"{line}: sync {stream} (or {behind}) between them"
    waiting = f"let {other.words(backends)} wait for {behind}"
    return f"{line}: sync {stream}, or {waiting}, between them"
