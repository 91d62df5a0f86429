"""Which plans can be launched ahead: before their step is submitted (`gate.py`).

A plan can be launched ahead if one copy from pinned memory brings all its inputs. That copy must be
the plan's first part, on the stream that the plan is launched on, and branches on other streams
must begin after it.

Its program must meet three conditions:

* the plan is the only work of a device, apart from records after it;
* the host waits only for events, because a wait for the stream would wait for the gate;
* the step ends with a wait, after which the host looks whether the gate was opened in time.

Nothing else is queued after a gate. Any other plan cancels a waiting plan before it is launched or
issued part by part. So does a program without a plan that can be launched ahead, before anything
else.

The program and its checker see nothing new. A replay takes effect where it stands in the program:
its first part reads the host's memory after the gate, and the host opens the gate where it calls
the replay.
"""

from __future__ import annotations

from workbench.backend.plan.gate import MOST_BYTES
from workbench.program import commands as c

_FREE = (c.Write, c.Read, c.Sync, c.Record)  # commands that a gate does not hold up


def inputs_of(plan: c.Replay) -> c.Copy | None:
    """The copy of a plan that can wait at a gate; None where the plan has no such copy."""
    first, *others = plan.parts
    alone = (
        isinstance(first, c.Copy)
        and first.stream == plan.stream
        and first.src.buffer.space == c.Space.PINNED
        and first.dst.buffer.space == c.Space.DEVICE
        and first.src.nbytes <= MOST_BYTES
        and not any(isinstance(x, c.Copy) and x.src.buffer.space != c.Space.DEVICE for x in others)
        and _all_after_first(plan)
    )
    return first if alone and isinstance(first, c.Copy) else None


def _all_after_first(plan: c.Replay) -> bool:
    """Whether every part comes after the first: on its stream, or on a stream that waits for it."""
    after, recorded = {plan.stream}, set[str]()
    for part in plan.parts:
        if isinstance(part, c.Wait) and part.event in recorded:
            after.add(part.stream)
        if part.stream not in after:
            return False
        if isinstance(part, c.Record):
            recorded.add(part.event)
    return True


def number_ahead(program: c.Program) -> int | None:
    """The number of the plan that can be launched ahead; None where no plan can."""
    commands, n_head = program.commands, program.first_of_tail
    asked = [n for n, x in enumerate(commands) if not (x.by_host or isinstance(x, _FREE))]
    waits = [x for x in commands if isinstance(x, c.Sync)]
    if len(asked) != 1 or n_head == len(commands) or any(x.event is None for x in waits):
        return None
    (plan,) = asked
    if not isinstance(commands[n_head], c.Sync) or not isinstance(commands[plan], c.Replay):
        return None
    if any(not isinstance(x, c.Write | c.Sync | c.Launch) for x in commands[:plan]):
        return None
    return plan
