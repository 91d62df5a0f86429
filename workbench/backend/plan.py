"""ROOM #16548: when a plan is captured, updated, replayed and given up.

A program has a `Plannable` where it has a plan (`program/plans.py`). Called as it is, it issues its
parts one by one. A `Plan` is what the device recorded of one, and one call replays it. A rule says
which plan is for which work, and when it is captured:

    pr       the plan with the same number in its step; all go where splits or backends change
    today    the plan with the same number in its step, of steps with outputs or without; captured
             at the second equal call, and not replayed where a call differs from the one before
    ours     the plan of equal work; else a twin of one whose results land in another block; else
             one whose work is gone, if only addresses differ; else a new one. The least recently
             used of too many goes

Equal is strict (`identity.py`). Two calls of one `uid` are equal without a look; uid 0 is equal to
nothing.

Results land in several blocks by turns, and each has a plan. `ours` captures one of them. A twin is
another executable form of the same recording, with other addresses. It is made while the device
computes the step before, so nobody waits for it.

With launch_ahead=on the next step's plan is launched while the device computes (`ahead.py`).

Sources: llama.cpp #16548 (pr), #19754 (today's warm-up), #21764 (uid), #18583 (what is compared).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from workbench.backend import ahead
from workbench.backend.ahead import GatedCall, inputs_of, prepare_ahead
from workbench.backend.base import Backend, Issue
from workbench.backend.gate import Gate
from workbench.backend.identity import Identity, changed
from workbench.backend.issue import Executed, Executor, Prepared, SplitWork
from workbench.backend.issued import Plannable
from workbench.backend.kept import Plan
from workbench.backend.landing import landing_in
from workbench.backend.no_plans import NoPlans
from workbench.backend.stamps import StampRings
from workbench.config import (
    LaunchAhead,
    PlanBatch,
    PlanEnd,
    PlanEvict,
    PlanRule,
    PlanWarmup,
    Toggles,
)
from workbench.errors import DeviceError
from workbench.program.commands import Launch, Program, Replay

KEPT = 256  # plans of an engine, as many as programs; then the least recently used goes
IDLE_S, SWEEP_S = 10.0, 5.0  # llama.cpp's

Seat = tuple[Hashable, ...]  # which plan of a step


class Policy(NamedTuple):
    """What the toggles `plans`, `plan_warmup`, `plan_evict` and `plan_batch` say."""

    rule: str
    warmup: int  # calls up to the one that is captured
    evict: str
    batch: str

    @classmethod
    def of(cls, toggles: Toggles) -> Policy:
        """`auto` becomes what the rule has by itself."""
        warmup, evict = _OWN[toggles.plans]
        if toggles.plan_warmup != PlanWarmup.AUTO:
            warmup = toggles.plan_warmup
        if toggles.plan_evict != PlanEvict.AUTO:
            evict = toggles.plan_evict
        return cls(toggles.plans, int(warmup), evict, toggles.plan_batch)


_OWN: dict[str, tuple[str, str]] = {
    PlanRule.PR: (PlanWarmup.NONE, PlanEvict.NEVER),
    PlanRule.TODAY: (PlanWarmup.TWO, PlanEvict.IDLE),
    PlanRule.OURS: (PlanWarmup.NONE, PlanEvict.LRU),
}


class Plans(NoPlans):
    """The plans of one engine. They name the engine's memory, so `clear` comes before it changes.

    counts: plans captured, made as twins, updated where they are, made launchable again because the
    device refused an update, replayed, evicted; calls that issued their parts one by one; ns of
    each kind of work.
    """

    replays = True

    def __init__(
        self,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
        device: Backend | None = None,
        by_word: bool = False,
    ):
        """device: of plans that are launched ahead; None where none is. by_word: they tell the host
        of their ends."""
        self._policy, self._device, self._by_word = policy, device, by_word
        self.launches_ahead = device is not None
        self._gate: Gate | None = None
        self._rings = StampRings()
        self._clock = clock
        self._kept: dict[Hashable, Plan] = {}
        self._splits: tuple[int, ...] = ()
        self._next_sweep = clock() + SWEEP_S
        self.counts = dict.fromkeys(COUNTS if device is None else (*COUNTS, *ahead.COUNTS), 0)

    def executor(self, program: Program) -> Executor:
        if self._policy.rule == PlanRule.PR and self._splits != tuple(program.splits):
            self.clear()
            self._splits = tuple(program.splits)
        call_of = self._call if self._device is None else self._gated_of(program)
        shape, numbers = program.shape, iter(range(len(program.commands)))
        planned = self._policy.batch == PlanBatch.ANY or shape.n_tokens == 1

        def execute(works: Sequence[SplitWork]) -> Executed:
            calls: list[Issue] = []
            for issued in (i for work in works for i in work.issued):
                if planned and isinstance(issued, Plannable):
                    calls.append(call_of(issued, (next(numbers), shape.n_outputs > 0)))
                else:
                    calls.append(issued.call)
            return calls, [1] * len(calls)

        return execute

    def _call(self, work: Plannable, seat: Seat) -> Issue:
        """What issues `work`: a replay of its plan, where it has one that fits."""
        plans: dict[Hashable, Plan] = {}  # by landing
        none, landing, counts, clock = Plan(), work.landing, self.counts, self._clock
        sweeps = self._policy.evict == PlanEvict.IDLE

        def call() -> None:
            plan = plans.get(landing(), none)
            if not plan.fits or plan.uid != work.uid or not work.uid:
                plan = plans[landing()] = self._arrive(work, seat, plan)
            plan.used = now = clock()
            if sweeps and now >= self._next_sweep:
                self._sweep(now)
            work.replayed = captured = plan.captured if plan.fits else None
            if captured is not None:
                plan.ask(captured.launch)
                counts["plans_replayed"] += 1
                if not plan.settled:
                    self._settle(plan, work, plans)
            else:
                counts["plans_issued"] += 1
                work.call()

        return call

    # launches ahead -----------------------------------------------------------------------------

    def _gated_of(self, program: Program) -> Callable[[Plannable, Seat], Issue]:
        """As `_call`, for the plans of a program in their order."""
        assert self._device is not None
        self._device.attach()
        if self._gate is None:
            self._gate = Gate(self._device, self.counts, by_word=self._by_word)
        gate, counts = self._gate, self.counts
        plans = iter([command for command in program.commands if isinstance(command, Replay)])

        def call_of(work: Plannable, seat: Seat) -> Issue:
            plan = next(plans)
            copy, last = inputs_of(plan), plan.parts[-1]
            if copy is not None:
                addresses = work.parts[0].addresses
                work.gate = gate.copy(addresses, copy.src.nbytes, work.stream)
                early = isinstance(last, Launch) and last.programmatic
                work.end = gate.end(work.stream, early)
            none = Plan()

            def arrive(had: Plan | None) -> Plan:
                return self._arrive(work, seat, had or none)

            def make_next(blocks: Sequence[int]) -> Plan | None:
                return self._make_next(work, blocks)

            return GatedCall(gate, work, arrive, make_next, self._use, counts)

        return call_of

    def _use(self, plan: Plan) -> None:
        plan.used = now = self._clock()
        if self._policy.evict == PlanEvict.IDLE and now >= self._next_sweep:
            self._sweep(now)

    def _ready(self, prepared: Prepared) -> Prepared:
        if self._gate is not None:
            prepare_ahead(prepared, self._gate.cancel)
        return prepared

    def stamped(self, prepared: Prepared) -> Prepared:
        if prepared.stamped is None:
            self.release()  # rings are new memory
            prepared.stamped = self._ready(self._rings.twin(prepared, self.executor))
        return prepared.stamped

    def release(self) -> None:
        if self._gate is not None:
            self._gate.cancel()

    def free(self) -> None:
        self.clear()
        self._rings.free()
        if self._gate is not None:
            self._gate.free()
            self._gate = None

    # rules --------------------------------------------------------------------------------------

    def _arrive(self, work: Plannable, seat: Seat, had: Plan) -> Plan:
        """The plan for work that is not known to be what its plan has, captured where the rule
        wants it. had: of the work as it was before."""
        identity = work.identity
        plan = self._find(work, (*seat, work.landing()), identity, had)
        before = plan.identity
        self._take_in(plan, work, identity)
        plan.alike = plan.alike + 1 if self._alike(before, identity) else 1
        if not plan.fits and plan.alike >= self._policy.warmup:
            self._record(plan, work)
            plan.recorded, plan.fits = identity, True
        return plan

    def _take_in(self, plan: Plan, work: Plannable, identity: Identity) -> None:
        plan.identity, plan.uid, plan.work = identity, work.uid, weakref.ref(work)
        # as proposed, what is new is updated without a look
        plan.fits = plan.recorded == identity and self._policy.rule != PlanRule.PR

    def _find(self, work: Plannable, seat: Seat, identity: Identity, had: Plan) -> Plan:
        number, outputs, landing = seat
        if self._policy.rule != PlanRule.OURS:
            also = () if self._policy.rule == PlanRule.PR else (outputs,)  # and stamped or not
            return self._kept.setdefault((number, landing, type(work), *also), Plan())
        found = self._for_the_same(identity)
        return self._keep(found or self._for_other_addresses(work, identity, had))

    def _keep(self, found: Plan) -> Plan:
        self._kept[id(found)] = found
        while self._policy.evict == PlanEvict.LRU and len(self._kept) > KEPT:
            others = {key: plan.used for key, plan in self._kept.items() if plan is not found}
            self._give_up(min(others, key=others.__getitem__))
        return found

    def _for_the_same(self, identity: Identity) -> Plan | None:
        return next((plan for plan in self._kept.values() if plan.identity == identity), None)

    def _for_other_addresses(self, work: Plannable, identity: Identity, had: Plan) -> Plan:
        """A plan that only its addresses tell from `identity`: the work's own before a patch, or
        one whose work is gone. Else a new plan, also where it can be a twin."""
        if had.captured is None and any(self._siblings(work, identity)):
            return Plan()
        for plan in (had, *self._kept.values()):
            free = plan is had or plan.work() is None
            if free and changed(plan.identity, identity) is not None:
                return plan
        return Plan()

    def _alike(self, before: Identity | None, now: Identity) -> bool:
        """Whether a call counts as the one before, for the warm-up."""
        if before is None or self._policy.rule == PlanRule.PR:
            return before is not None
        if self._policy.rule == PlanRule.TODAY:
            return before == now
        return changed(before, now) is not None

    # twins --------------------------------------------------------------------------------------

    def _siblings(self, work: Plannable, identity: Identity) -> Iterator[tuple[Plan, list[int]]]:
        """Plans of `work` for other landings, each with the parts that have other addresses."""
        for plan in list(self._kept.values()):
            moved = changed(plan.recorded, identity) if plan.work() is work else None
            if plan.captured is not None and moved is not None:
                yield plan, moved

    def _twin(self, plan: Plan, work: Plannable, identity: Identity) -> bool:
        """Gives `plan` a twin of a sibling. False where only a capture does."""
        for other, moved in self._siblings(work, identity):
            assert other.captured is not None, "a sibling is captured"
            try:
                made = other.captured.twin(work, moved)
            except DeviceError:
                return False  # a capture does, or it says what is wrong
            if made is not None:
                plan.captured, plan.recorded, plan.used = made, identity, self._clock()
                self.counts["plans_twinned"] += 1
                self.counts["plans_instantiate_ns"] += made.instantiate_ns
                return True
        return False

    def _make_next(self, work: Plannable, blocks: Sequence[int]) -> Plan | None:
        """The plan for results in these blocks of the landings, where a twin does. The device is
        busy meanwhile, and the next step finds it."""
        if self._policy.rule != PlanRule.OURS:
            return None
        with landing_in(work.landings, blocks):
            identity = work.identity
            found = self._for_the_same(identity) or Plan()
            if found.captured is None and not self._twin(found, work, identity):
                return None  # the step that wants it captures it
            self._take_in(self._keep(found), work, identity)
            return found

    def _settle(self, plan: Plan, work: Plannable, plans: dict[Hashable, Plan]) -> None:
        """Behind the first launch of a plan: makes the plan for the landing that comes next. plans:
        of the work, by landing."""
        plan.settled = True
        blocks = tuple([landing.reserve() for landing in work.landings])
        if not blocks or None in blocks:
            return
        had = plans.get(blocks)
        if had is None or had.captured is None:
            made = self._make_next(work, blocks)
            if made is not None:
                plans[blocks] = made

    # capture and update ----------------------------------------------------------------------

    def _record(self, plan: Plan, work: Plannable) -> None:
        counts, captured = self.counts, plan.captured
        if captured is not None:
            start = time.perf_counter_ns()
            looked = self._policy.rule != PlanRule.PR
            moved = changed(plan.recorded, plan.identity) if looked else None
            done = plan.ask(captured.update, work, moved)
            counts["plans_update_ns"] += time.perf_counter_ns() - start
            if done:
                counts["plans_updated"] += 1
                return
            plan.destroy()
        elif self._policy.rule == PlanRule.OURS:
            assert plan.identity is not None, "it has arrived"
            if self._twin(plan, work, plan.identity):
                return
        plan.captured = made = work.backend.capture(work)
        counts["plans_reinstantiated" if captured is not None else "plans_captured"] += 1
        counts["plans_capture_ns"] += made.capture_ns
        counts["plans_instantiate_ns"] += made.instantiate_ns

    def _sweep(self, now: float) -> None:
        self._next_sweep = now + SWEEP_S
        for key in [key for key, plan in self._kept.items() if now - plan.used >= IDLE_S]:
            self._give_up(key)

    def _give_up(self, key: Hashable) -> None:
        self.counts["plans_evicted"] += 1
        self._kept.pop(key).destroy()

    def clear(self) -> None:
        self.release()
        kept, self._kept = list(self._kept.values()), {}
        for plan in kept:
            plan.destroy()


def plans_of(toggles: Toggles, device: Backend | None = None) -> NoPlans:
    """What an engine with these toggles has. device: where plans are launched ahead, if wanted."""
    if toggles.plans == PlanRule.OFF:
        return NoPlans()
    is_ahead = toggles.launch_ahead == LaunchAhead.ON
    by_word = toggles.plan_end == PlanEnd.WORD
    return Plans(Policy.of(toggles), device=device if is_ahead else None, by_word=by_word)


COUNTS = (
    "plans_captured", "plans_twinned", "plans_updated", "plans_reinstantiated", "plans_replayed",
    "plans_issued", "plans_evicted", "plans_capture_ns", "plans_instantiate_ns", "plans_update_ns",
)  # fmt: skip
