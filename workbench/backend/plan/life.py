"""ROOM #16548: the life of a plan.

Where a program has a plan (`program/plans.py`), it has a *work*: a `Plannable`, the commands that
the plan stands for. A `Plan` holds what the device has recorded of a work. An engine keeps its
plans in `Plans`. A policy says which plan is for which work, and when it is captured:

    pr       the plan with the same number in its step. All plans are dropped where splits or
             backends change
    today    the plan with the same number in its step, apart for steps with and without outputs.
             Captured at the second equal call; a call that differs from the call before it is
             issued part by part
    ours     the plan of equal work; else a twin of a plan whose results land in another block; else
             a plan whose work is gone, if only addresses differ; else a new plan

Which plans are evicted is said by `plan_evict`, whatever the rule.

`Planned` calls a work that has a plan. In each call:

    it fits          the plan has recorded the work as it is now         -> replay
    it does not fit  `Plans.arrive` finds the plan that the policy has for the work
      warm-up        the policy wants more equal calls first             -> parts, one by one
      twin           there is a plan of the same work, for another landing  -> replay
      update         the device takes other addresses, or other work     -> replay
      capture        else                                                -> replay
    after a replay   the plan for the next landing is made, while the device computes
    at any time      plans that were not used for long, or are too many, are evicted

`Gated` calls a work whose plan can be launched before its step is submitted (`gate.py`). In each
call:

    armed            the plan waits at its gate, and fits                -> the gate opens
    not armed        what waits at the gate is cancelled; then as above  -> with an open gate
    arm              the plan of the next call is launched, and waits

Two works are equal only if everything in them is (`issue/issued.py`). Two calls with one `uid` are
equal without a look; uid 0 is equal to nothing. Results land in several blocks by turns, and each
block has a plan. `ours` captures one of these plans and makes the others as its twins. A twin is
another executable form of the same recording, with other addresses.

Sources: llama.cpp #16548 (pr), #19754 (today's warm-up), #21764 (uid), #18583 (what is compared).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from workbench.backend.base import Backend, Captured
from workbench.backend.issue.issued import Identity, Plannable, changed
from workbench.backend.issue.landing import landing_in, nobody
from workbench.backend.plan.gate import COUNTS as GATE_COUNTS
from workbench.backend.plan.gate import Gate
from workbench.common.errors import DeviceError
from workbench.config import (
    LaunchAhead,
    PlanBatch,
    PlanEnd,
    PlanEvict,
    PlanRule,
    Toggles,
)
from workbench.program.commands import Program

R = TypeVar("R")

KEPT = 256  # plans of an engine, as many as programs; then the least recently used is evicted
IDLE_S, SWEEP_S = 10.0, 5.0  # llama.cpp's
COUNTS = (
    "plans_captured", "plans_twinned", "plans_updated", "plans_reinstantiated", "plans_replayed",
    "plans_issued", "plans_evicted", "plans_capture_ns", "plans_instantiate_ns", "plans_update_ns",
)  # fmt: skip

Seat = tuple[Hashable, ...]  # which plan of a step: its number, and whether the step has outputs


class Policy(NamedTuple):
    """What the toggles `plans`, `plan_warmup`, `plan_evict` and `plan_batch` say, settled."""

    rule: str
    warmup: int  # calls up to the one that is captured
    evict: str
    batch: str


class Plan:
    """The recording of a device, if there is one yet, and the latest work that came to it.

    captured: the recording.
    identity: of the latest work.
    recorded: the identity of what is recorded.
    fits: the two identities are equal.
    uid, queue: as the work has them.
    alike: how many calls in a row, up to the latest, the rule takes for equal.
    work: returns the work; None once it is gone.
    settled: the plan was launched, and the plan for the next landing was looked for.
    """

    __slots__ = (
        "alike", "captured", "fits", "identity", "queue", "recorded", "settled", "uid", "used",
        "work",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self.fits = self.settled = False
        self.identity: Identity | None = None
        self.recorded: Identity | None = None
        self.uid = self.alike = 0
        self.used = 0.0
        self.work: Callable[[], Plannable | None] = nobody
        self.queue: Callable[[Callable[[], Any]], Any] | None = None

    def launch(self) -> None:
        """Queues the recording."""
        captured, queue = self.captured, self.queue
        assert captured is not None, "what fits is captured"
        if queue is None:
            captured.launch()
        else:
            queue(captured.launch)

    def ask(self, act: Callable[..., R], *given: Any) -> R:
        """Calls `act`, a method of the recording. Where it fails, the plan is destroyed, so that
        the next call captures anew."""
        try:
            return act(*given)
        except DeviceError:
            self.destroy()
            raise

    def destroy(self) -> None:
        captured, self.captured, self.recorded, self.fits = self.captured, None, None, False
        if captured is not None:
            captured.destroy()


# calls ------------------------------------------------------------------------------------------


class Planned:
    """Issues a work: by a replay of its plan, where the plan fits, else part by part.

    replayed: the recording that the latest call launched; None where the parts were issued.
    """

    __slots__ = ("_by_landing", "_plans", "_seat", "replayed", "work")

    def __init__(self, plans: Plans, work: Plannable, seat: Seat):
        """plans: the engine's. seat: the work's place in its step."""
        self._plans, self.work, self._seat = plans, work, seat
        self._by_landing: dict[Hashable, Plan] = {}
        self.replayed: Captured | None = None

    def call(self, launch: Callable[[Plan], None] | None = None) -> None:
        """Issues the work. After the first replay of a plan, the plan for the next landing is made.
        All of this is one function, because the device stands still until the launch.

        launch: launches the plan of a `Gated`, which makes the plan for the next landing itself.
        """
        work, plans = self.work, self._plans
        landing = tuple([landing.now for landing in work.landings])  # as `work.landing`
        plan = self._by_landing.get(landing)
        if plan is None or not (plan.fits and plan.uid == work.uid != 0):  # as `fits` has it
            plan = self._by_landing[landing] = plans.arrive(work, self._seat, plan or Plan())
        self.replayed = plan.captured if plan.fits else None
        if self.replayed is None:  # the policy is still warming up
            plans.use(plan)
            plans.counts["plans_issued"] += 1
            work.call()
            return
        try:  # as in `Plan.ask`
            if launch is None:
                plan.launch()
            else:
                launch(plan)
        except DeviceError:
            plan.destroy()
            raise
        plans.use(plan)
        plans.counts["plans_replayed"] += 1
        if launch is None and not plan.settled:
            plan.settled = True
            self.next()

    def fits(self, plan: Plan) -> bool:
        """Whether the plan has recorded the work as it is now. The work's uid tells."""
        return plan.fits and plan.uid == self.work.uid != 0

    def next(self) -> tuple[Plan, Hashable] | None:
        """The plan for the landing of the next call, and that landing. If it is missing, it is made
        as a twin while the device is busy; None where it cannot be."""
        work = self.work
        reserved = tuple([landing.reserve() for landing in work.landings])
        if not reserved or None in reserved:
            return None
        plan = self._by_landing.get(reserved)
        if plan is None or plan.captured is None:
            plan = self._plans.twin_for(work, reserved)
            if plan is None:
                return None
            self._by_landing[reserved] = plan
        return plan, reserved

    def replays(self, plan: Plan) -> None:
        """Counts a call whose plan had been launched before."""
        self.replayed = plan.captured
        self._plans.counts["plans_replayed"] += 1

    def use(self, plan: Plan) -> None:
        """See `Plans.use`."""
        self._plans.use(plan)


class Gated:
    """Issues a work whose plan may have been launched ahead. If this plan waits at the engine's
    gate and fits, the gate is opened. Else whatever waits there is cancelled before anything is
    queued.

    has_gate: whether the plan begins with a gate.
    """

    __slots__ = ("_armed", "_gate", "_number", "_opened", "_planned", "has_gate")

    def __init__(self, planned: Planned, gate: Gate):
        self._planned, self._gate = planned, gate
        self.has_gate = planned.work.gate is not None
        self._armed: tuple[Plan, Hashable] | None = None  # the next call's plan, and its landing
        self._number = 0  # of the gate of the latest launch; 0: the plan has none
        self._opened = 0  # the same number, where the plan was launched ahead

    @property
    def replayed(self) -> Captured | None:
        """As `Planned.replayed`."""
        return self._planned.replayed

    def call(self) -> None:
        armed, self._armed = self._armed, None
        if armed is None or not self._opens(*armed):
            self._gate.cancel()
            self._number = self._opened = 0
            self._planned.call(self._launch_open if self.has_gate else Plan.launch)

    def _launch_open(self, plan: Plan) -> None:
        self._number = self._gate.launch(plan.launch)

    def _opens(self, plan: Plan, reserved: Hashable) -> bool:
        """Opens the gate for the plan that was launched ahead, with results in `reserved`. False
        where another plan is wanted now, or where it has waited for too long."""
        planned = self._planned
        if not planned.fits(plan) or planned.work.landing != reserved:
            return False
        self._opened = self._number = self._gate.open(plan.captured)
        if not self._opened:
            return False
        planned.replays(plan)
        return True

    def arm(self) -> None:
        """Launches the plan of the next call now, and so chooses the block of its results. Does
        nothing where that plan is not captured and cannot be made as a twin, or where an address
        changes with every step."""
        planned, coming = self._planned, None if self._planned.work.moves else self._planned.next()
        if coming is None:
            return
        plan, _ = coming
        if planned.fits(plan) and plan.captured is not None:
            planned.use(plan)
            plan.ask(self._gate.arm, plan.captured, plan.launch)
            self._armed = coming

    @property
    def has_read(self) -> bool:
        """Whether the device has read the inputs of the latest call, so that the host may write the
        next ones."""
        return self._gate.has_read(self._number)

    def ended(self) -> bool:
        """Waits for the end of the latest launch. False where only the device's events tell."""
        return self._gate.ended(self._number)

    def missed(self) -> bool:
        """Whether the latest launch, which is over, found its gate closed."""
        opened, self._opened = self._opened, 0
        return bool(opened) and self._gate.missed(opened)


# an engine's plans ----------------------------------------------------------------------------


class Plans:
    """The plans of one engine. They hold addresses of the engine's memory, so `clear` must be
    called before that memory changes.

    policy: None where no plan is ever captured.
    counts: plans that were captured, made as twins, updated, captured again because the device
        refused an update, replayed, evicted; calls that issued their parts one by one; ns of each
        kind of work.
    """

    def __init__(self, policy: Policy | None, clock: Callable[[], float] = time.monotonic):
        self.policy = policy
        self._rule = PlanRule.OFF if policy is None else policy.rule
        self._sweeps = policy is not None and policy.evict == PlanEvict.IDLE
        self._clock = clock
        self._kept: dict[Hashable, Plan] = {}
        self._splits: tuple[int, ...] = ()
        self._next_sweep = clock() + SWEEP_S
        self.counts: dict[str, int] = {} if policy is None else dict.fromkeys(COUNTS, 0)

    def __iter__(self) -> Iterator[Plan]:
        """Every plan that is kept."""
        return iter(list(self._kept.values()))

    def call_of(
        self, program: Program, gate: Gate | None = None
    ) -> Callable[[Plannable], Planned | Gated] | None:
        """A function that makes the call of each plan of a program, asked in the order of the
        plans; None where the program replays none. gate: of an engine that launches ahead."""
        if self.policy is None:
            return None
        if self._rule == PlanRule.PR and self._splits != tuple(program.splits):
            self.clear(gate)
            self._splits = tuple(program.splits)
        shape = program.shape
        if self.policy.batch != PlanBatch.ANY and shape.n_tokens != 1:
            return None
        numbers = iter(range(len(program.commands)))

        def call_of(work: Plannable) -> Planned | Gated:
            planned = Planned(self, work, (next(numbers), shape.n_outputs > 0))
            return planned if gate is None else Gated(planned, gate)

        return call_of

    # rules --------------------------------------------------------------------------------------

    def arrive(self, work: Plannable, seat: Seat, had: Plan) -> Plan:
        """The plan for work that may differ from what its plan has recorded. It is captured where
        the rule wants that. had: the plan of the work before it changed."""
        assert self.policy is not None, "who plans has a policy"
        identity = work.identity
        plan = self._find(work, seat, identity, had)
        before = plan.identity
        self._take_in(plan, work, identity)
        plan.alike = plan.alike + 1 if self._alike(before, identity) else 1
        if not plan.fits and plan.alike >= self.policy.warmup:
            self._record(plan, work)
            plan.recorded, plan.fits = identity, True
        return plan

    def _take_in(self, plan: Plan, work: Plannable, identity: Identity) -> None:
        plan.identity, plan.uid, plan.work = identity, work.uid, weakref.ref(work)
        plan.queue = work.queue
        # as the pull request has it, new work is updated without a comparison
        plan.fits = plan.recorded == identity and self._rule != PlanRule.PR

    def _find(self, work: Plannable, seat: Seat, identity: Identity, had: Plan) -> Plan:
        if self._rule != PlanRule.OURS:
            number, outputs = seat
            also = () if self._rule == PlanRule.PR else (outputs,)
            # works of one program have one queue, whether it counts or not
            key = (number, work.landing, work.queue, *also)
            return self._keep(key, self._kept.get(key) or Plan())
        found = self._for_the_same(identity) or self._for_other_addresses(work, identity, had)
        return self._keep(id(found), found)

    def _keep(self, key: Hashable, found: Plan) -> Plan:
        assert self.policy is not None, "who plans has a policy"
        self._kept[key] = found
        while self.policy.evict == PlanEvict.LRU and len(self._kept) > KEPT:
            others = {other: plan.used for other, plan in self._kept.items() if plan is not found}
            self._give_up(min(others, key=others.__getitem__))
        return found

    def _for_the_same(self, identity: Identity) -> Plan | None:
        return next((plan for plan in self._kept.values() if plan.identity == identity), None)

    def _for_other_addresses(self, work: Plannable, identity: Identity, had: Plan) -> Plan:
        """A plan that differs from `identity` only in addresses: the work's own before a patch, or
        a plan whose work is gone. Else a new plan, also where it can become a twin."""
        if had.captured is None and any(self._siblings(work, identity)):
            return Plan()
        for plan in (had, *self._kept.values()):
            free = plan is had or plan.work() is None
            if free and changed(plan.identity, identity) is not None:
                return plan
        return Plan()

    def _alike(self, before: Identity | None, now: Identity) -> bool:
        """Whether a call counts as equal to the call before it, for the warm-up."""
        if before is None or self._rule == PlanRule.PR:
            return before is not None
        if self._rule == PlanRule.TODAY:
            return before == now
        return changed(before, now) is not None

    # twins --------------------------------------------------------------------------------------

    def _siblings(self, work: Plannable, identity: Identity) -> Iterator[tuple[Plan, list[int]]]:
        """The plans of `work` for other landings, each with the parts whose addresses differ."""
        for plan in list(self._kept.values()):
            moved = changed(plan.recorded, identity) if plan.work() is work else None
            if plan.captured is not None and moved is not None:
                yield plan, moved

    def _twin(self, plan: Plan, work: Plannable, identity: Identity) -> bool:
        """Makes `plan` a twin of a sibling. False where it must be captured."""
        for other, moved in self._siblings(work, identity):
            assert other.captured is not None, "a sibling is captured"
            try:
                made = other.captured.twin(work, moved)
            except DeviceError:
                return False  # a capture may work, or says what is wrong
            if made is not None:
                plan.captured, plan.recorded, plan.used = made, identity, self._clock()
                self.counts["plans_twinned"] += 1
                self.counts["plans_instantiate_ns"] += made.instantiate_ns
                return True
        return False

    def twin_for(self, work: Plannable, blocks: Sequence[int]) -> Plan | None:
        """The plan for results in these blocks of the landings; None where it must be captured."""
        if self._rule != PlanRule.OURS:
            return None
        with landing_in(work.landings, blocks):
            identity = work.identity
            found = self._for_the_same(identity) or Plan()
            if found.captured is None and not self._twin(found, work, identity):
                return None  # the step that wants it captures it
            self._take_in(self._keep(id(found), found), work, identity)
            return found

    # capture, update, eviction ------------------------------------------------------------------

    def _record(self, plan: Plan, work: Plannable) -> None:
        counts, captured = self.counts, plan.captured
        if captured is not None:
            start = time.perf_counter_ns()
            looked = self._rule != PlanRule.PR
            moved = changed(plan.recorded, plan.identity) if looked else None
            done = plan.ask(captured.update, work, moved)
            counts["plans_update_ns"] += time.perf_counter_ns() - start
            if done:
                counts["plans_updated"] += 1
                return
            plan.destroy()
        elif self._rule == PlanRule.OURS:
            assert plan.identity is not None, "it has arrived"
            if self._twin(plan, work, plan.identity):
                return
        plan.captured = made = work.backend.capture(work)
        counts["plans_reinstantiated" if captured is not None else "plans_captured"] += 1
        counts["plans_capture_ns"] += made.capture_ns
        counts["plans_instantiate_ns"] += made.instantiate_ns

    def use(self, plan: Plan) -> None:
        """Tells that a plan is launched. Evicts plans that nobody has used for long,
        where the policy says so."""
        plan.used = now = self._clock()
        if self._sweeps and now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            for key in [key for key, kept in self._kept.items() if now - kept.used >= IDLE_S]:
                self._give_up(key)

    def _give_up(self, key: Hashable) -> None:
        self.counts["plans_evicted"] += 1
        self._kept.pop(key).destroy()

    def clear(self, gate: Gate | None) -> None:
        """Destroys every plan. Works that are called later are captured anew. gate: the engine's,
        if it has one. A plan that waits there is cancelled first."""
        if gate is not None:
            gate.cancel()
        kept, self._kept = list(self._kept.values()), {}
        for plan in kept:
            plan.destroy()


def plans_of(toggles: Toggles) -> Plans:
    """The plans of an engine with these settled toggles."""
    rule, warmup = toggles.plans, toggles.plan_warmup
    if rule == PlanRule.OFF:
        return Plans(None)
    return Plans(Policy(rule, int(warmup), toggles.plan_evict, toggles.plan_batch))


def gate_of(toggles: Toggles, device: Backend, plans: Plans) -> Callable[[], Gate] | None:
    """A function that makes the gate of an engine that launches ahead; None for other engines."""
    if toggles.launch_ahead != LaunchAhead.ON:
        return None
    plans.counts.update(dict.fromkeys(GATE_COUNTS, 0))
    return partial(Gate, device, plans.counts, by_word=toggles.plan_end == PlanEnd.WORD)


def in_words(counts: Mapping[str, int]) -> str:
    """A line on plans, as `plans: 3 captured (2.1 ms), 0 updated, 61 replayed`; empty where there
    are none. counts: `Plans.counts`, perhaps with others."""
    if not any(counts.get(name) for name in COUNTS):
        return ""
    made_ns = counts["plans_capture_ns"] + counts["plans_instantiate_ns"]
    updated = f"{counts['plans_updated']} updated"
    if counts["plans_updated"]:
        updated += f" ({counts['plans_update_ns'] / 1e6:.1f} ms)"
    twinned = counts.get("plans_twinned")  # older runs do not count twins
    made = f"{counts['plans_captured']} captured" + (f", {twinned} twinned" if twinned else "")
    said = [
        f"{made} ({made_ns / 1e6:.1f} ms)",
        updated,
        f"{counts['plans_replayed']} replayed",
    ]
    for name, words in (
        ("reinstantiated", "instantiated again"),
        ("evicted", "evicted"),
        ("issued", "issued part by part"),
        ("ahead", "launched ahead"),
        ("ahead_missed", "launched ahead for nothing"),
    ):
        said += [f"{n} {words}" for n in [counts.get(f"plans_{name}")] if n]
    return f"plans: {', '.join(said)}"
