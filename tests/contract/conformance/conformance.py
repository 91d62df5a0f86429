"""What a backend promises by its `Capabilities`, checked through its protocol and nothing else.

A check is one clause of the contract (`backend/base.py`, `program/commands.py`) and a few commands
that a backend gets right only by keeping it. It runs where the backend claims the clause; a backend
that claims less is asked for less (CLAIMS):

    claim                what follows from it
    n_streams = 0        every command is done when its call returns
    n_streams > 0        Sync(stream) and `synchronize` drain launches and copies; of two or more
                         streams none waits for another
    one_order            copies and launches of a stream run in issue order, and an event stands for
                         the copies before its Record too; without it nothing orders a copy but a
                         Sync on its stream
    asynchronous_copies  the call returns before the copy is done, and the source is read at the
                         call or later; without it the copy is done when the call returns
    events               Record, Wait and Sync mean the latest Record in host order, or nothing
    events, one_order,   streams beside the first two are streams like the first: events alone order
    n_streams > 2        them, forks and joins wait for every branch, also within a plan
    capture              a plan's launches run its parts as they were captured or updated last, each
                         behind its stream, and its stream goes on behind all of them

`failures` runs all checks and gives a line for each that a backend fails. How commands are made
slow enough to be overtaken is in `conformance_rig.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.contract.conformance import conformance_events  # noqa: F401
from tests.contract.conformance.conformance_clauses import CHECKS, CLAIMS
from tests.contract.conformance.conformance_rig import Broken, Open, Rig
from workbench.program.commands import Space


def run_check(name: str, open_backend: Open) -> bool:
    """Runs one check on a backend of its own; False where it does not claim the clause.

    Raises Broken, with one line that says what the backend did wrong.
    """
    check, rig = CHECKS[name], Rig(open_backend)
    try:
        if not CLAIMS[check.claim](rig.able):
            return False
        for stream in rig.streams if check.each_stream else [None]:
            try:
                check.run(rig, *(() if stream is None else (stream,)))
            except Broken as broken:
                where = "" if stream is None else f"on stream {stream} "
                raise Broken(f"{where}not kept: {name}: {broken}") from None
            rig.settle()
        return True
    finally:
        rig.close()


def failures(open_backend: Open, names: Iterable[str] = CHECKS) -> dict[str, str]:
    """What is wrong with a backend: names of clauses to messages; empty where it keeps its word."""
    found = {}
    for name in names:
        try:
            run_check(name, open_backend)
        except Broken as broken:
            found[name] = str(broken)
    return found


def reads_late(open_backend: Open, space: Space) -> bool:
    """Whether a copy out of `space` that is queued behind long work reads its source when it runs,
    not at the call. No clause: a backend may do either."""
    rig = Rig(open_backend)
    try:
        source, there, copy = rig.taken(1.0, 0, space)
        for _ in rig.tries():
            source[:] = 1.0
            rig.long(0)
            copy()
            source[:] = 2.0
            if (rig.fetch(there) == 2.0).all():
                return True
        return False
    finally:
        rig.close()
