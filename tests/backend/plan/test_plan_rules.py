"""When plans are captured, updated, replayed and given up. The null device records by value, so
each launch is compared with what the work says at that moment."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Issued, Plannable, Words
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.backend.null import open_backend, taken
from workbench.backend.plan.life import (
    COUNTS,
    IDLE_S,
    KEPT,
    SWEEP_S,
    Plans,
    Policy,
    in_words,
    plans_of,
)
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.graph.ir import StepShape

POINTER, VALUE = 0, 1  # the fields of each part's block
RULES = ("ours", "pr", "today")
CALL = ["capture", "launch"]


def nothing() -> None: ...


class Rig:
    """Plans on a null device, and a clock that stands."""

    def __init__(self, rule: str, **toggles: str):
        self.device: Any = open_backend(capture=True)
        self.now = 0.0
        self.plans = Plans(Policy.of(Toggles(plans=rule, **toggles)), lambda: self.now)
        self.landing = Landing(open_backend(), 8)

    def work(self, uid: int, n: int = 3, same: str = "kernel", lands: bool = False) -> Plannable:
        """lands: its last part writes to where results land."""
        log = self.device.log
        parts = [Issued(nothing, (same, i), Words([100 + i, 7], (POINTER,))) for i in range(n)]
        if lands:
            each = [Issued(nothing, ("result",), Words([b.address, 7], (POINTER,)))
                    for b in self.landing.blocks]  # fmt: skip
            parts.append(Issued(nothing, ("result",), LandingBlock(self.landing, each)))
        made = Plannable(nothing, ("replay",), parts=tuple(parts), backend=self.device, uid=uid)
        made.landings = (self.landing,) if lands else ()
        made.call = lambda: log.append(("issue", "parts", 0, taken(made)))
        return made

    def bound(self, *works: Plannable, **of: Any) -> list[Any]:
        """The calls of a program with these works; each checks that what is launched or issued is
        what the work says now."""
        call_of = self.plans.call_of(program(**of))
        return [self._checked(work, work if call_of is None else call_of(work)) for work in works]

    def _checked(self, work: Plannable, call: Any) -> Any:
        def checked() -> None:
            before = len(self.device.log)
            call.call()
            (done,) = [x for x in self.device.log[before:] if x[0] == "issue"]
            assert done[-1] == taken(work)

        return checked

    def verbs(self) -> list[str]:
        """What the device was asked since the last look."""
        names = {"replay": "launch", "parts": "issue"}
        found = [names.get(x[1], x[1]) if x[0] == "issue" else x[0] for x in self.device.log]
        self.device.log.clear()
        return found

    def counts(self) -> dict[str, int]:
        kinds = ("captured", "twinned", "updated", "reinstantiated", "evicted", "issued")
        return {kind: n for kind in kinds if (n := self.plans.counts[f"plans_{kind}"])}

    def tokens(self, call: Any, n: int, held: int = 1) -> None:
        """n calls by a caller who keeps the latest results, or those of `held` calls."""
        kept: list[Any] = []
        for _ in range(n):
            call()
            kept = [self.landing.take(8), *kept][:held]


def program(splits: Sequence[int] = (0, 1), n_tokens: int = 1, n_outputs: int = 1) -> Any:
    shape = StepShape(n_tokens, n_outputs, 256)
    return SimpleNamespace(splits=list(splits), shape=shape, commands=[None] * 9)


@pytest.mark.parametrize("warmup", ["auto", "0", "2"])
@pytest.mark.parametrize("rule", RULES)
def test_equal_work_is_captured_behind_its_warm_up(rule, warmup):
    for uid in (0, 1):  # without a uid a look tells that it is equal
        rig = Rig(rule, plan_warmup=warmup)
        (call,) = rig.bound(rig.work(uid))
        for _ in range(3):
            call()
        warm = warmup == "2" or (warmup == "auto" and rule == "today")
        updates = [] if uid or rule != "pr" else ["update"]  # what may be new is not looked at
        launch = [*updates, "launch"]
        wanted = ["issue", *CALL, *launch] if warm else [*CALL, *launch, *launch]
        assert rig.verbs() == wanted
        assert rig.plans.counts["plans_replayed"] == wanted.count("launch")


CHANGES = {
    "a pointer": lambda work: work.parts[1].block.__setitem__(POINTER, 900),
    "a value": lambda work: work.parts[1].block.__setitem__(VALUE, 8),
    "a shape": lambda work: setattr(work.parts[1], "same", ("kernel", 1, "another shape")),
}


@pytest.mark.parametrize("uid", [0, 5])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", RULES)
def test_a_change_alone_forces_an_update_or_a_plan(rule, change, uid):
    rig = Rig(rule)
    work = rig.work(uid)
    (call,) = rig.bound(work)
    for _ in range(3):
        call()
    rig.verbs()
    CHANGES[change](work)
    work.uid = uid and uid + 1
    for _ in range(3):
        call()
    moved = [x[1] for x in rig.device.log if x[0] == "update"]
    if rule == "ours":
        assert moved == ([[1]] if change == "a pointer" else [])
    verbs = rig.verbs()
    again = {"update", "capture"}.intersection(verbs)
    assert again and (verbs[0] == "issue") == (rule == "today")
    if uid:  # what nobody renewed is not looked at
        work.parts[0].block[VALUE] = 9
        with pytest.raises(AssertionError):
            call()


def test_today_alternating_works_are_never_captured():
    """llama.cpp #28652: alternating shapes under one key reset the warm-up for ever."""
    rig = Rig("today")
    calls = [*rig.bound(rig.work(1)), *rig.bound(rig.work(2, same="another"))]
    for _ in range(4):
        for call in calls:
            call()
    assert set(rig.verbs()) == {"issue"}
    with_outputs, without = Rig("today"), {"n_outputs": 0}  # those are two seats
    calls = [*with_outputs.bound(with_outputs.work(1)),
             *with_outputs.bound(with_outputs.work(2, same="another"), **without)]  # fmt: skip
    for _ in range(4):
        for call in calls:
            call()
    assert with_outputs.counts() == {"captured": 2, "issued": 2}


def test_the_pull_request_updates_by_number():
    """And gives all up where a program has other splits."""
    rig = Rig("pr")
    for uid in (1, 2, 3):  # a program built anew for each token
        first, second = rig.work(uid), rig.work(10 + uid)
        first.parts[1].block[POINTER] = 1000 + uid
        for call in rig.bound(first, second):
            call()
    assert rig.verbs() == CALL * 2 + ["update", "launch"] * 4
    for call in rig.bound(rig.work(4), splits=(0, 1, 2)):
        call()
    assert rig.verbs() == ["destroy", "destroy", *CALL]


def test_ours_takes_plans_of_work_that_is_gone_alone():
    rig = Rig("ours")
    for uid in (1, 2):  # built anew, at the same addresses
        (call,) = rig.bound(rig.work(uid))
        call()
    assert rig.verbs() == [*CALL, "launch"]
    moved = rig.work(3)
    moved.parts[0].block[POINTER] = 900
    (lives,) = rig.bound(moved)
    lives()
    assert rig.verbs() == CALL, "the other work lives"
    del call
    gc.collect()
    again = rig.work(4)
    again.parts[0].block[POINTER] = 901
    rig.bound(again)[0]()
    assert rig.verbs() == ["update", "launch"]


@pytest.mark.parametrize("again", ["declined", "failing"])
def test_an_update_that_cannot_be_costs_a_capture(again):
    rig = Rig("ours")
    work = rig.work(1)
    (call,) = rig.bound(work)
    call()
    work.parts[0].block[POINTER], work.uid = 900, 2
    getattr(rig.device, again).add("update")
    if again == "failing":  # it is told, and the next call captures
        with pytest.raises(DeviceError, match="fails at a update"):
            call()
    call()
    assert rig.verbs() == [*CALL, "destroy", *CALL]
    assert rig.counts() == ({"captured": 1, "reinstantiated": 1} if again == "declined" else
                            {"captured": 2})  # fmt: skip


def test_what_fails_is_told_and_captured_the_next_time():
    rig = Rig("ours")
    (call,) = rig.bound(rig.work(1))
    rig.device.failing.add("capture")
    with pytest.raises(DeviceError, match="fails at a capture"):
        call()
    rig.device.failing.clear()
    call()
    (plan,) = rig.plans
    assert plan.captured is not None
    plan.captured.destroy()  # behind the engine's back
    with pytest.raises(DeviceError, match="this plan is destroyed"):
        call()
    call()
    rig.plans.clear()
    rig.plans.clear()
    call()
    assert rig.verbs() == [*CALL, "destroy", *CALL, "destroy", *CALL]


# twins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "n"), [(1, 3), (0, 2), (2, 3)])
def test_ours_makes_twins_for_all_landings_but_one(held, n):
    """Each behind the launch of the one before, which is what the device computes meanwhile."""
    rig = Rig("ours")
    work = rig.work(1, lands=True)
    (call,) = rig.bound(work)
    rig.tokens(call, 6, held)
    assert rig.device.log[2] == ("twin", [len(work.parts) - 1])
    assert len({x[-1] for x in rig.device.log if x[0] == "issue"}) == n
    assert rig.verbs() == ["capture", *["launch", "twin"] * (n - 1), *["launch"] * (7 - n)]
    assert rig.counts() == {"captured": 1, "twinned": n - 1}
    counts = rig.plans.counts
    assert (counts["plans_capture_ns"], counts["plans_instantiate_ns"]) == (1, n)
    if n == 2:  # a landing whose turn was not foreseen
        rig.tokens(call, 3)
        assert rig.verbs() == ["launch", "launch", "twin", "launch"]


@pytest.mark.parametrize("why", ["pr", "today", "declined", "failing"])
def test_what_has_no_twin_is_captured(why):
    """A twin that fails is told to nobody, for a capture does."""
    rig = Rig(why if why in RULES else "ours")
    if why not in RULES:
        getattr(rig.device, why).add("twin")
    (call,) = rig.bound(rig.work(1, lands=True))
    rig.tokens(call, 9)
    assert rig.plans.counts["plans_captured"] == N_BLOCKS
    assert not rig.plans.counts["plans_twinned"]
    assert ("twin" in rig.verbs()) == (why not in RULES)


# which plans are kept -----------------------------------------------------------------------------


def test_steps_of_several_tokens_have_none_with_batch_one():
    rig = Rig("ours", plan_batch="one")
    calls = [*rig.bound(rig.work(1), n_tokens=8), *rig.bound(rig.work(2)),
             *rig.bound(rig.work(3, same="another"), n_outputs=0)]  # fmt: skip
    for call in calls:
        call()
    assert rig.verbs() == ["issue", *CALL, *CALL]


def test_idle_plans_go():
    rig = Rig("today", plan_warmup="0")
    busy, idle = rig.bound(rig.work(1), rig.work(2))
    busy(), idle()
    while rig.now < IDLE_S + SWEEP_S:
        rig.now += 1
        busy()
    assert rig.verbs().count("destroy") == rig.counts()["evicted"] == 1
    idle()
    assert rig.verbs() == CALL


def test_the_least_recently_replayed_of_too_many_goes():
    rig, calls = Rig("ours"), list[Any]()
    for i in range(KEPT + 1):
        rig.now += 1
        calls += rig.bound(rig.work(i + 1, same=f"kernel {i}"))
        calls[-1]()
        calls[0]()  # never the oldest
    assert rig.counts()["evicted"] == 1
    rig.verbs()
    calls[0]()
    assert rig.verbs() == ["launch"]
    calls[1]()
    assert rig.verbs() == ["destroy", *CALL]


@given(data=st.data())
def test_a_replay_is_what_would_have_been_issued(data):
    """Whatever rule and policy, and whatever changes come between calls."""
    rig = Rig(
        data.draw(st.sampled_from(RULES)),
        plan_warmup=data.draw(st.sampled_from(["auto", "0", "2"])),
        plan_evict=data.draw(st.sampled_from(["auto", "never", "idle", "lru"])),
    )
    next_uid, known, kept = 1, list[tuple[Plannable, Any]](), list[Any]()
    for _ in range(data.draw(st.integers(1, 25))):
        rig.now += data.draw(st.sampled_from([0, 1, 20]))
        rig.device.declined = data.draw(st.sets(st.sampled_from(["update", "twin"])))
        verb = data.draw(st.sampled_from(["new", "call", "call", "patch", "clear", "drop"]))
        if verb == "new" or not known:
            n, lands = data.draw(st.integers(1, 3)), data.draw(st.booleans())
            work = rig.work(next_uid, n, f"k{next_uid % 2}", lands)
            next_uid += 1
            splits = (0, 1) if data.draw(st.integers(0, 3)) else (0, 1, 1)
            known.append((work, rig.bound(work, splits=splits)[0]))
            continue
        index = data.draw(st.integers(0, len(known) - 1))
        work, call = known[index]
        if verb == "patch":
            part = work.parts[data.draw(st.integers(0, len(work.parts) - 1))]
            part.block[data.draw(st.sampled_from([POINTER, VALUE]))] = data.draw(st.integers(0, 3))
            work.uid = data.draw(st.sampled_from([0, next_uid]))
            next_uid += 1  # nobody else has it
        elif verb == "clear":
            rig.plans.clear()
        elif verb == "drop":
            del known[index]
        else:
            call()
            if work.landings:
                kept = [rig.landing.take(8), *kept][: data.draw(st.integers(0, 2))]


def test_what_became_of_plans_is_one_line():
    none = dict.fromkeys(COUNTS, 0)
    assert in_words(none) == in_words({}) == in_words(plans_of(Toggles()).counts) == ""
    few = {"plans_captured": 3, "plans_capture_ns": 1_300_000, "plans_instantiate_ns": 800_000}
    more = {"plans_twinned": 2, "plans_updated": 2, "plans_update_ns": 200_000, "plans_evicted": 4,
            "plans_reinstantiated": 1, "plans_issued": 5, "plans_ahead": 7}  # fmt: skip
    assert in_words(none | few | {"plans_replayed": 61}) == (
        "plans: 3 captured (2.1 ms), 0 updated, 61 replayed"
    )
    assert in_words(none | few | more) == (
        "plans: 3 captured, 2 twinned (2.1 ms), 2 updated (0.2 ms), 0 replayed, "
        "1 instantiated again, 4 evicted, 5 issued part by part, 7 launched ahead"
    )
