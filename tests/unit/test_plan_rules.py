"""When plans are captured, updated, replayed and given up: the rules, on a device that only notes
what it is asked."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.backend.base import Captured
from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Issued, Plannable, Words
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.backend.null import open_backend
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


def what(work: Plannable) -> tuple[Any, ...]:
    """All that a recording of `work` would fix."""
    return work.key, work.addresses


class Noted(Captured):
    """What a device has recorded, by value; a launch is noted with it."""

    def __init__(self, device: Device, work: Plannable):
        self.device, self.what, self.alive = device, what(work), True
        self.nodes = tuple(range(len(work.parts)))
        self.capture_ns = self.instantiate_ns = 1
        self.launch = self._launch

    def _launch(self) -> None:
        assert self.alive
        self.device.did.append(("launch", self.what))

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        assert self.alive
        if self.device.refuses:
            return False
        self.device.did.append(("update", changed))
        self.what = what(work)
        return True

    def twin(self, work: Plannable, changed: Sequence[int]) -> Noted | None:
        assert self.alive
        self.device.did.append(("twin", list(changed)))
        if self.device.has_no_twins:
            return None
        if self.device.fails_twins:
            raise DeviceError("no twin today; use plans=off")
        return Noted(self.device, work)

    def destroy(self) -> None:
        assert self.alive, "twice"
        self.alive = False
        self.device.did.append(("destroy",))


class Device:
    """Notes captures, and what is launched or issued."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []
        self.refuses = self.fails = self.has_no_twins = self.fails_twins = False

    def capture(self, work: Plannable) -> Noted:
        if self.fails:
            raise DeviceError("no capture today; use plans=off")
        self.did.append(("capture",))
        return Noted(self, work)

    def work(self, uid: int, n: int = 3, same: str = "kernel") -> Plannable:
        parts = tuple(
            Issued(lambda: None, (same, i), Words([100 + i, 7], (POINTER,))) for i in range(n)
        )
        made = Plannable(lambda: None, ("replay",), parts=parts, backend=self, uid=uid)
        made.call = lambda: self.did.append(("issue", what(made)))
        return made

    def landing_work(self, uid: int, landing: Landing) -> Plannable:
        """Work whose last part writes to where results land."""
        made = self.work(uid)
        each = [
            Issued(lambda: None, ("result",), Words([block.address, 7], (POINTER,)))
            for block in landing.blocks
        ]
        last = Issued(lambda: None, ("result",), LandingBlock(landing, each))
        made.parts = (*made.parts, last)
        made.landings = (landing,)
        return made

    def verbs(self) -> list[str]:
        found, self.did = [did[0] for did in self.did], []
        return found


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def policy(plans: str, **toggles: str) -> Policy:
    return Policy.of(Toggles(plans=plans, **toggles))


def program(splits: Sequence[int] = (0, 1), n_tokens: int = 1, n_outputs: int = 1) -> Any:
    return SimpleNamespace(
        splits=list(splits), shape=StepShape(n_tokens, n_outputs, 256), commands=[None] * 9
    )


def bound(plans: Plans, *works: Plannable, of: Any = None) -> list[Any]:
    """The calls of a program with these works."""
    call_of = plans.call_of(of or program())
    made = [None if call_of is None else call_of(work) for work in works]
    return [
        work.call if call is None else call.call for call, work in zip(made, works, strict=True)
    ]


def test_without_plans_every_work_is_issued():
    device = Device()
    work = device.work(1)
    (call,) = bound(plans_of(Toggles()), work)
    call()
    assert device.verbs() == ["issue"]


@pytest.mark.parametrize(
    ("rule", "verbs"),
    [
        ("pr", ["capture", "launch", "launch", "launch"]),
        ("today", ["issue", "capture", "launch", "launch"]),
        ("ours", ["capture", "launch", "launch", "launch"]),
    ],
)
def test_the_same_work_three_times(rule, verbs):
    device = Device()
    plans = Plans(policy(rule))
    (call,) = bound(plans, device.work(1))
    for _ in range(3):
        call()
    assert device.verbs() == verbs
    assert plans.counts["plans_captured"] == 1
    assert plans.counts["plans_replayed"] == verbs.count("launch")
    assert plans.counts["plans_issued"] == verbs.count("issue")


@pytest.mark.parametrize("rule", ["pr", "today", "ours"])
@pytest.mark.parametrize("warmup", ["0", "2"])
def test_warm_up_is_a_switch_of_its_own(rule, warmup):
    device = Device()
    (call,) = bound(Plans(policy(rule, plan_warmup=warmup)), device.work(1))
    call()
    call()
    assert device.verbs() == (
        ["capture", "launch", "launch"] if warmup == "0" else ["issue", "capture", "launch"]
    )


def test_today_a_change_goes_back_to_launches_and_recovers():
    device = Device()
    work = device.work(1)
    (call,) = bound(Plans(policy("today")), work)
    call()
    call()
    work.parts[0].block[POINTER] = 500
    work.uid = 2
    call()
    call()
    call()
    assert device.verbs() == [
        "issue", "capture", "launch", "issue", "update", "launch", "launch",
    ]  # fmt: skip


def test_today_two_works_that_alternate_in_one_seat_are_never_captured():
    """llama.cpp #28652: alternating shapes under one key reset the warm-up for ever."""
    device, plans = Device(), Plans(policy("today"))
    one, other = device.work(1), device.work(2, same="another")
    calls = [*bound(plans, one), *bound(plans, other)]
    for _ in range(4):
        for call in calls:
            call()
    assert set(device.verbs()) == {"issue"}


@pytest.mark.parametrize("rule", ["today", "ours"])
def test_steps_with_outputs_and_without_have_plans_of_their_own(rule):
    device, plans = Device(), Plans(policy(rule))
    (with_outputs,) = bound(plans, device.work(1))
    (without,) = bound(plans, device.work(2, same="another"), of=program(n_outputs=0))
    for _ in range(4):
        with_outputs()
        without()
    assert plans.counts["plans_captured"] == 2
    assert "update" not in device.verbs()


def test_the_pull_request_updates_what_has_the_same_number_and_gives_all_up_for_other_splits():
    device, plans = Device(), Plans(policy("pr"))
    for uid in (1, 2, 3):  # a program built anew for each token
        first, second = device.work(uid), device.work(10 + uid)
        first.parts[1].block[POINTER] = 1000 + uid
        for call in bound(plans, first, second):
            call()
    assert plans.counts["plans_captured"] == 2
    assert device.verbs() == ["capture", "launch"] * 2 + ["update", "launch"] * 4
    for call in bound(plans, device.work(4), of=program(splits=(0, 1, 2))):
        call()
    assert device.verbs() == ["destroy", "destroy", "capture", "launch"]


@pytest.mark.parametrize("uid", [0, 5])
@pytest.mark.parametrize("rule", ["pr", "today", "ours"])
@pytest.mark.parametrize(
    "change",
    [
        lambda work: work.parts[1].block.__setitem__(POINTER, 900),
        lambda work: work.parts[1].block.__setitem__(VALUE, 8),
        lambda work: setattr(work.parts[1], "same", ("kernel", 1, "another shape")),
    ],
    ids=["a pointer", "a parameter", "a shape"],
)
def test_any_difference_forces_an_update(rule, uid, change):
    device = Device()
    work = device.work(uid)
    (call,) = bound(Plans(policy(rule)), work)
    for _ in range(3):
        call()
    device.verbs()
    change(work)
    work.uid = uid and uid + 1
    for _ in range(3):
        call()
    assert all(did[1] == what(work) for did in device.did if did[0] in ("launch", "issue"))
    assert {"update", "capture"} & set(device.verbs())


def test_without_a_uid_equal_work_is_found_equal_by_a_look():
    device = Device()
    (call,) = bound(Plans(policy("ours")), device.work(0))
    for _ in range(3):
        call()
    assert device.verbs() == ["capture", "launch", "launch", "launch"]


@pytest.mark.parametrize("rule", ["pr", "today", "ours"])
def test_a_work_that_says_which_parts_move_is_looked_at_there_alone(rule):
    device = Device()
    work = device.work(1, n=4)
    work.moves = (1, 3)
    (call,) = bound(Plans(policy(rule, plan_warmup="0")), work)
    for uid in range(1, 6):
        for i in work.moves:
            work.parts[i].block[POINTER] = 900 + uid + i
        work.uid = uid
        call()
        assert device.did[-1] == ("launch", what(work))
    assert device.verbs() == ["capture", "launch"] + ["update", "launch"] * 4


def test_an_update_names_the_parts_that_have_other_addresses():
    device = Device()
    work = device.work(1, n=4)
    (call,) = bound(Plans(policy("ours")), work)
    call()
    for i in (1, 3):
        work.parts[i].block[POINTER] = 900 + i
    work.uid = 2
    call()
    assert ("update", [1, 3]) in device.did


def test_a_refused_update_is_captured_again_and_counted():
    device = Device()
    work, plans = device.work(1), Plans(policy("ours"))
    (call,) = bound(plans, work)
    call()
    work.parts[0].block[POINTER], work.uid, device.refuses = 900, 2, True
    call()
    assert device.verbs() == ["capture", "launch", "destroy", "capture", "launch"]
    assert plans.counts["plans_captured"] == plans.counts["plans_reinstantiated"] == 1
    assert not plans.counts["plans_updated"]


def test_each_block_that_results_land_in_has_a_plan():
    device, landing = Device(), SimpleNamespace(now=0, reserve=lambda: None)
    work = device.work(1)
    work.landings = (landing,)
    (call,) = bound(Plans(policy("ours")), work)
    for landing.now in (0, 1, 0, 1, 2):
        work.parts[2].block[POINTER] = 100 + landing.now
        call()
    assert device.verbs() == [
        "capture", "launch", "twin", "launch", "launch", "launch", "twin", "launch",
    ]  # fmt: skip


def tokens(call: Any, landing: Landing, n: int, held: int = 1) -> None:
    """n calls by a caller who keeps the latest results, or those of `held` calls."""
    kept: list[Any] = []
    for _ in range(n):
        call()
        kept = [landing.take(8), *kept][:held]


@pytest.mark.parametrize(("held", "n"), [(1, 3), (0, 2), (2, 3)])
def test_ours_captures_one_landing_and_makes_twins_for_the_others(held, n):
    """Each behind the launch of the one before, which is what the device computes meanwhile."""
    device, landing = Device(), Landing(open_backend(), 8)
    work, plans = device.landing_work(1, landing), Plans(policy("ours"))
    (call,) = bound(plans, work)
    tokens(call, landing, 6, held)
    twins = ["launch", "twin"] * (n - 1)
    assert device.did[2] == ("twin", [len(work.parts) - 1])
    launched = [what for verb, *what in device.did if verb == "launch"]
    assert len({str(what) for what in launched}) == n
    assert device.verbs() == ["capture", *twins, *["launch"] * (6 - n + 1)]
    counts = {k: v for k, v in plans.counts.items() if v and not k.endswith("update_ns")}
    assert counts == {
        "plans_captured": 1, "plans_twinned": n - 1, "plans_replayed": 6, "plans_capture_ns": 1,
        "plans_instantiate_ns": n,
    }  # fmt: skip


@pytest.mark.parametrize("rule", ["pr", "today"])
def test_reproductions_capture_each_landing(rule):
    device, landing = Device(), Landing(open_backend(), 8)
    (call,) = bound(plans := Plans(policy(rule)), device.landing_work(1, landing))
    tokens(call, landing, 9)
    assert plans.counts["plans_captured"] == N_BLOCKS and not plans.counts["plans_twinned"]
    assert "twin" not in device.verbs()


def test_a_landing_whose_turn_was_not_foreseen_gets_its_twin_when_it_comes():
    device, landing = Device(), Landing(open_backend(), 8)
    (call,) = bound(plans := Plans(policy("ours")), device.landing_work(1, landing))
    tokens(call, landing, 4, held=0)  # two blocks
    device.verbs()
    tokens(call, landing, 3)  # and the third
    assert device.verbs() == ["launch", "launch", "twin", "launch"]
    assert plans.counts["plans_captured"] == 1 and plans.counts["plans_twinned"] == 2


def test_behind_a_warm_up_the_first_capture_is_the_only_one():
    """Each landing's first call issues its parts."""
    device, landing = Device(), Landing(open_backend(), 8)
    plans = Plans(policy("ours", plan_warmup="2"))
    (call,) = bound(plans, device.landing_work(1, landing))
    tokens(call, landing, 9)
    assert device.verbs() == [
        *["issue"] * 3, "capture", "launch", "twin", "launch", "twin", *["launch"] * 4,
    ]  # fmt: skip
    assert plans.counts["plans_captured"] == 1 and plans.counts["plans_issued"] == N_BLOCKS


def test_what_has_no_twin_is_captured():
    device, landing = Device(), Landing(open_backend(), 8)
    (call,) = bound(plans := Plans(policy("ours")), device.landing_work(1, landing))
    device.has_no_twins = True
    tokens(call, landing, 6)
    assert plans.counts["plans_captured"] == N_BLOCKS and not plans.counts["plans_twinned"]


def test_a_twin_that_fails_costs_a_capture():
    """Whether behind a launch or where a step wants it. Nobody is told, for a capture does."""
    device, landing = Device(), Landing(open_backend(), 8)
    (call,) = bound(plans := Plans(policy("ours")), device.landing_work(1, landing))
    device.fails_twins = True
    tokens(call, landing, 6)
    failed = ["launch", "twin", "twin", "capture"]
    assert device.verbs()[:9] == ["capture", *failed, *failed]
    assert plans.counts["plans_captured"] == N_BLOCKS and not plans.counts["plans_twinned"]
    plans.clear()
    device.fails_twins = False
    tokens(call, landing, 6)
    assert plans.counts["plans_captured"] == N_BLOCKS + 1
    assert plans.counts["plans_twinned"] == N_BLOCKS - 1


def test_works_that_are_built_anew_share_the_twins():
    device, landing = Device(), Landing(open_backend(), 8)
    plans, kept = Plans(policy("ours")), []
    for uid in range(1, 9):
        work = device.landing_work(uid, landing)
        bound(plans, work)[0]()
        kept = [landing.take(8)]
    assert kept and device.verbs().count("launch") == 8
    counts = plans.counts
    assert (counts["plans_captured"], counts["plans_twinned"]) == (1, N_BLOCKS - 1)
    assert not counts["plans_updated"]


def test_patched_work_with_landings_is_updated_and_its_twins_with_it():
    device, landing = Device(), Landing(open_backend(), 8)
    work, plans = device.landing_work(1, landing), Plans(policy("ours"))
    work.moves = (0,)
    (call,) = bound(plans, work)
    kept = []
    for uid in range(1, 9):
        work.parts[0].block[POINTER], work.uid = 900 + uid, uid
        call()
        launched = [did for did in device.did if did[0] == "launch"][-1]
        assert launched[1] == what(work)
        kept = [landing.take(8)]
    assert kept
    counts = plans.counts
    assert (counts["plans_captured"], counts["plans_twinned"]) == (1, N_BLOCKS - 1)
    assert counts["plans_updated"] == 7


def test_ours_takes_the_plan_of_equal_work_or_of_work_that_is_gone():
    device, plans = Device(), Plans(policy("ours"))
    for uid in (1, 2):  # built anew, at the same addresses
        (call,) = bound(plans, device.work(uid))
        call()
    assert device.verbs() == ["capture", "launch", "launch"]
    del call
    gc.collect()
    moved = device.work(3)
    moved.parts[0].block[POINTER] = 900
    (call,) = bound(plans, moved)
    call()
    assert device.verbs() == ["update", "launch"]


def test_steps_of_several_tokens_have_no_plans_with_plan_batch_one():
    device = Device()
    plans = Plans(policy("ours", plan_batch="one"))
    (many,) = bound(plans, device.work(1), of=program(n_tokens=8))
    (one,) = bound(plans, device.work(2))
    many()
    one()
    assert device.verbs() == ["issue", "capture", "launch"]


def test_idle_plans_go():
    device, clock = Device(), Clock()
    plans = Plans(policy("today", plan_warmup="0"), clock)
    busy, idle = device.work(1), device.work(2)
    calls = bound(plans, busy, idle)
    for call in calls:
        call()
    while clock.now < IDLE_S + SWEEP_S:
        clock.now += 1
        calls[0]()
    assert device.verbs().count("destroy") == plans.counts["plans_evicted"] == 1
    calls[1]()
    assert device.verbs() == ["capture", "launch"]


def test_the_least_recently_replayed_of_too_many_goes():
    device, clock = Device(), Clock()
    plans = Plans(policy("ours"), clock)
    calls = []
    for i in range(KEPT + 1):
        clock.now += 1
        calls += bound(plans, device.work(i + 1, same=f"kernel {i}"))
        calls[-1]()
        calls[0]()  # never the oldest
    assert plans.counts["plans_evicted"] == 1
    device.verbs()
    calls[0]()
    assert device.verbs() == ["launch"]
    calls[1]()
    assert device.verbs() == ["destroy", "capture", "launch"]


def test_cleared_plans_are_captured_anew():
    device, plans = Device(), Plans(policy("ours"))
    (call,) = bound(plans, device.work(1))
    call()
    plans.clear()
    plans.clear()
    call()
    assert device.verbs() == ["capture", "launch", "destroy", "capture", "launch"]


def test_a_capture_that_fails_is_said_and_tried_again():
    device, plans = Device(), Plans(policy("ours"))
    (call,) = bound(plans, device.work(1))
    device.fails = True
    with pytest.raises(DeviceError, match="no capture today"):
        call()
    device.fails = False
    call()
    assert device.verbs() == ["capture", "launch"]


@given(data=st.data())
def test_what_is_replayed_is_what_would_have_been_issued(data):
    """Whatever rule and policy, and whatever changes come between calls."""
    device, clock = Device(), Clock()
    plans = Plans(
        policy(
            data.draw(st.sampled_from(["pr", "today", "ours"])),
            plan_warmup=data.draw(st.sampled_from(["auto", "0", "2"])),
            plan_evict=data.draw(st.sampled_from(["auto", "never", "idle", "lru"])),
        ),
        clock,
    )
    next_uid, known = 1, list[tuple[Plannable, Any]]()
    landing, kept = Landing(open_backend(), 8), list[Any]()
    for _ in range(data.draw(st.integers(1, 25))):
        clock.now += data.draw(st.sampled_from([0, 1, 20]))
        device.refuses, device.has_no_twins = data.draw(st.booleans()), data.draw(st.booleans())
        verb = data.draw(st.sampled_from(["new", "call", "call", "patch", "clear", "drop"]))
        if verb == "new" or not known:
            work = device.work(next_uid, data.draw(st.integers(1, 3)), f"k{next_uid % 2}")
            if data.draw(st.booleans()):
                work = device.landing_work(next_uid, landing)
            next_uid += 1
            splits = (0, 1) if data.draw(st.integers(0, 3)) else (0, 1, 1)
            known.append((work, bound(plans, work, of=program(splits))[0]))
            continue
        index = data.draw(st.integers(0, len(known) - 1))
        work, call = known[index]
        if verb == "patch":
            part = work.parts[data.draw(st.integers(0, len(work.parts) - 1))]
            part.block[data.draw(st.sampled_from([POINTER, VALUE]))] = data.draw(st.integers(0, 3))
            work.uid = data.draw(st.sampled_from([0, next_uid]))
            next_uid += 1  # nobody else has it
        elif verb == "clear":
            plans.clear()
        elif verb == "drop":
            del known[index]
        else:
            device.did.clear()
            wanted = what(work)
            call()
            (does,) = [did for did in device.did if did[0] in ("launch", "issue")]
            assert does[1] == wanted
            if work.landings:
                kept = [landing.take(8), *kept][: data.draw(st.integers(0, 2))]


def test_what_became_of_plans_is_one_line():
    none = dict.fromkeys(COUNTS, 0)
    assert in_words(none) == in_words({}) == in_words(plans_of(Toggles()).counts) == ""
    few = {"plans_captured": 3, "plans_capture_ns": 1_300_000, "plans_instantiate_ns": 800_000}
    assert in_words(none | few | {"plans_replayed": 61}) == (
        "plans: 3 captured (2.1 ms), 0 updated, 61 replayed"
    )
    assert in_words(none | few | {"plans_twinned": 2}) == (
        "plans: 3 captured, 2 twinned (2.1 ms), 0 updated, 0 replayed"
    )
    more = {"plans_updated": 2, "plans_update_ns": 200_000, "plans_reinstantiated": 1}
    assert in_words(none | few | more | {"plans_evicted": 4, "plans_issued": 5}) == (
        "plans: 3 captured (2.1 ms), 2 updated (0.2 ms), 0 replayed, 1 instantiated again, "
        "4 evicted, 5 issued part by part"
    )
