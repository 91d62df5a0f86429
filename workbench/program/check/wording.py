"""Races in words: the two commands, and what would order them."""

from collections.abc import Sequence
from enum import Enum

from workbench.program.commands import CommandAt, Copy, Launch, Program, Stream


class Missing(Enum):
    """The order that racing accesses lack."""

    WAIT = "a wait in between"
    ORDER_OF_COPIES = "an order of copies within their stream"
    DECLARED_WAIT = "the kernel's own wait for the launch before it"
    STREAM_ORDER_OF_WEIGHTS = "stream order, because weights are read ahead of it"


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
    first: CommandAt, second: CommandAt, lacks: tuple[Missing, Missing], steps: Sequence[Program]
) -> str:
    """One line: that nothing orders two commands that race, and what would order them.

    first: work of a stream. (The host's own work is over when the host goes on.)
    lacks: what the accesses of the first lack, and those of the second.

    A plan is waited for, and waits, as a whole.
    """
    one, other, backends = first.command, second.command, steps[first.step].backends
    assert isinstance(one, (Copy, Launch))
    (own, plan), (own_too, plan_too) = _streams(first, steps), _streams(second, steps)
    assert plan is not None
    stream, loose = plan.describe(backends), "copies keep no order with their stream"
    early = f"; {_EARLY[lacks[1]]}" if lacks[1] in _EARLY and isinstance(one, Launch) else ""
    if first.part is not None and second.part is not None and first[:2] == second[:2]:
        line = (
            f"nothing orders {one.describe(backends)} before {other.describe(backends)} in a plan"
        )
        if early and own == own_too:
            return line + early
        if Missing.ORDER_OF_COPIES in lacks:
            return f"{line}: {loose}, leave the copy out of the plan and sync {stream}"
        assert own_too is not None
        waiting = f"let {own_too.describe(backends)} wait for it"
        return f"{line}: record an event after the {one.kind} in the plan, and {waiting}"
    later = second.step - first.step
    when = {0: "", 1: " of the next step"}.get(later, f" issued {later} steps later")
    line = f"nothing orders {first.describe(backends)} before {second.describe(backends)}{when}"
    if early and (own, plan) == (own_too, plan_too):
        return line + early
    recorded = f"an event recorded after the {one.kind if first.part is None else 'plan'}"
    if Missing.ORDER_OF_COPIES in lacks and isinstance(one, Copy):
        return f"{line}: {loose}, sync {stream} between them"
    if plan_too is None or Missing.ORDER_OF_COPIES in lacks:
        return f"{line}: sync {stream} (or {recorded}) between them"
    waiting = f"let {plan_too.describe(backends)} wait for {recorded}"
    return f"{line}: sync {stream}, or {waiting}, between them"


def _streams(at: CommandAt, steps: Sequence[Program]) -> tuple[Stream | None, Stream | None]:
    """A command's own stream, and the stream on which it waits and is waited for: its plan's, where
    the command is in a plan. Two times None for what the host does itself."""
    if at.command.by_host:
        return None, None
    return at.command.stream, steps[at.step].commands[at.index].stream
