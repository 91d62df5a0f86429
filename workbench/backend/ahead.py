"""Launches ahead: a plan that is launched before its step is submitted (`backend/gate.py`).

A plan can be where one copy from pinned memory brings all inputs, first of all, on the stream that
the plan is launched on. Its branches on other streams must begin behind that. A program can be
where that plan is all that a device is asked for, but for records behind it; where the host waits
for events alone (a wait for the stream would wait for the gate); and where the step ends with a
wait, behind which the host looks whether the gate was opened in time.

Nothing else queues behind a gate. A plan that does not stand there lets go what does, before it is
launched or issued part by part. A program without a plan that can be launched ahead does so first.

The program and its checker see nothing new. A replay takes effect where it stands in the program:
its first part reads the host's memory behind the gate, and the host opens the gate where the replay
is called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from workbench.backend.base import Issue
from workbench.backend.gate import MOST_BYTES, Gate
from workbench.backend.issue import Prepared, SplitWork
from workbench.backend.issued import Plannable, in_order
from workbench.program import commands as c

if TYPE_CHECKING:
    from workbench.backend.plan import Plan

COUNTS = ("plans_ahead", "plans_ahead_missed")


def inputs_of(plan: c.Replay) -> c.Copy | None:
    """The copy of a plan that can stand behind a gate."""
    first, *others = plan.parts
    alone = (
        isinstance(first, c.Copy)
        and first.stream == plan.stream
        and first.src.buffer.space == c.Space.PINNED
        and first.dst.buffer.space == c.Space.DEVICE
        and first.src.nbytes <= MOST_BYTES
        and not any(isinstance(x, c.Copy) and x.src.buffer.space != c.Space.DEVICE for x in others)
        and _all_behind(plan)
    )
    return first if alone and isinstance(first, c.Copy) else None


def _all_behind(plan: c.Replay) -> bool:
    """Whether every part is behind the first: on its stream, or on one that waits for it."""
    behind, recorded = {plan.stream}, set[str]()
    for part in plan.parts:
        if isinstance(part, c.Wait) and part.event in recorded:
            behind.add(part.stream)
        if part.stream not in behind:
            return False
        if isinstance(part, c.Record):
            recorded.add(part.event)
    return True


class GatedCall:
    """What issues a plan in an engine that launches ahead: a replay, or parts one by one.

    arrive: finds the plan of the work where the one from before does not fit. make_next: makes the
    plan for other blocks where results land, if that takes no capture. use: told of every plan that
    is called. counts: `Plans.counts`.
    """

    def __init__(
        self,
        gate: Gate,
        work: Plannable,
        arrive: Callable[[Plan | None], Plan],
        make_next: Callable[[Sequence[int]], Plan | None],
        use: Callable[[Plan], None],
        counts: dict[str, int],
    ):
        self._gate, self._work = gate, work
        self._arrive, self._make_next, self._use = arrive, make_next, use
        self._counts = counts
        self._plans: dict[Hashable, Plan] = {}  # by landing
        self._armed: tuple[Plan, Hashable] | None = None  # for the next call, and its landing
        self._number = 0  # of the gate of the latest launch; 0: the plan has none
        self._opened = 0  # the same, where it was launched ahead

    def __call__(self) -> None:
        armed, self._armed = self._armed, None
        if armed is None or not self._opens(*armed):
            self._gate.cancel()
            self._issue()

    def _opens(self, plan: Plan, reserved: Hashable) -> bool:
        """Lets the plan go on that was launched ahead for the landing `reserved`; False where it is
        not what is wanted now, or has waited for too long."""
        work = self._work
        if not self._fits(plan) or work.landing() != reserved:
            return False
        self._opened = self._number = self._gate.open(plan.captured)
        if not self._opened:
            return False
        work.replayed = plan.captured
        self._counts["plans_replayed"] += 1
        return True

    def _issue(self) -> None:
        """Launches the plan now, or issues its parts."""
        gate, work, counts = self._gate, self._work, self._counts
        landing = work.landing()
        plan = self._plans.get(landing)
        if plan is None or not self._fits(plan):
            plan = self._plans[landing] = self._arrive(plan)
        self._use(plan)
        self._opened = self._number = 0
        work.replayed = captured = plan.captured if plan.fits else None
        if captured is None:
            counts["plans_issued"] += 1
            work.call()
            return
        if work.gate is None:
            plan.ask(captured.launch)
        else:
            self._number = plan.ask(gate.launch, captured)
        counts["plans_replayed"] += 1

    @property
    def is_gated(self) -> bool:
        """Whether the plan begins with a gate."""
        return self._work.gate is not None

    def _fits(self, plan: Plan) -> bool:
        return plan.fits and plan.uid == self._work.uid != 0

    def arm(self) -> None:
        """Launches the plan of the next call now, where it is captured or a twin of it can be made,
        and no address changes with the step. The block of its results is chosen with it."""
        work = self._work
        reserved = tuple([landing.reserve() for landing in work.landings])
        if not reserved or None in reserved or work.moves:
            return
        plan = self._plans.get(reserved)
        if plan is None or plan.captured is None:
            plan = self._make_next(reserved)
            if plan is not None:
                self._plans[reserved] = plan
        if plan is not None and self._fits(plan) and plan.captured is not None:
            self._use(plan)
            plan.ask(self._gate.arm, plan.captured)
            self._armed = plan, reserved

    @property
    def has_read(self) -> bool:
        """Whether the device has read the inputs of the latest call: the host may write others."""
        return self._gate.has_read(self._number)

    def ended(self) -> bool:
        """Waits for the end of the latest launch; False where only the device's events tell."""
        return self._gate.ended(self._number)

    def missed(self) -> bool:
        """Whether the latest launch, which is over, found its gate closed."""
        opened, self._opened = self._opened, 0
        return bool(opened) and self._gate.missed(opened)


def prepare_ahead(prepared: Prepared, cancel: Issue) -> None:
    """Lets the plan of a program be launched ahead, where it can be. See the module. Any other
    program begins with `cancel`, so that none of its commands queues behind a gate."""
    at = _number_of_call(prepared)
    if at is None:
        first, *others = prepared.head
        prepared.head = (in_order([cancel, first]), *others)
        return
    call = prepared.head[at]
    assert isinstance(call, GatedCall)
    wait_for_event, again = prepared.tail[0], prepared.head[at:]

    def wait() -> None:
        if not call.ended():
            wait_for_event()

    def wait_or_again() -> None:
        wait()
        if call.missed():
            for each in again:
                each()
            wait()

    prepared.ahead, prepared.tail = call, (wait_or_again, *prepared.tail[1:])


def _number_of_call(prepared: Prepared) -> int | None:
    """Which call of the head can be launched ahead; None where none can be."""
    commands, n_head = prepared.program.commands, len(prepared.head)
    asked = {
        n for s in prepared.segments if isinstance(s, SplitWork) for n in s.commands
        if not isinstance(commands[n], c.Record)
    }  # fmt: skip
    waits = [x for x in commands if isinstance(x, c.Sync)]
    if len(asked) != 1 or not prepared.tail or any(x.event is None for x in waits):
        return None
    (plan,) = asked
    at = prepared.firsts.index(plan)  # a call performs one command
    call = prepared.head[at]
    ends_with_wait = isinstance(commands[prepared.firsts[n_head]], c.Sync)
    if not (isinstance(call, GatedCall) and call.is_gated and ends_with_wait):
        return None
    if any(not isinstance(x, c.Write | c.Sync | c.Launch) for x in commands[:plan]):
        return None
    return at
