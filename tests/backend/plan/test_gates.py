"""Gates without a device that computes: what the host writes to one and reads from it, and which
plans can stand behind one."""

from __future__ import annotations

import platform
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gates import hold
from workbench.backend.cpu.device import signals
from workbench.backend.cpu.device.embedded import open_backend as open_device
from workbench.backend.cpu.device.signals import set_word
from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Issued, Plannable, Words
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.backend.null import open_backend
from workbench.backend.plan import gate as words
from workbench.backend.plan.ahead import inputs_of
from workbench.backend.plan.gate import CANCELLED, MOST_BYTES, OPENED, Gate
from workbench.backend.plan.life import Gated, Planned, Plans, Policy
from workbench.config import Toggles
from workbench.program.commands import (
    HOST,
    Buffer,
    Copy,
    Range,
    Record,
    Replay,
    Space,
    Stream,
    Wait,
)


class Rig:
    """A gate of a null device, and a plan behind it. Further fields are the work's."""

    def __init__(self, **fields: Any):
        self.device: Any = open_backend(capture=True)
        self.counts = dict.fromkeys(("plans_ahead", "plans_ahead_missed"), 0)
        self.gate = Gate(self.device, self.counts)
        self.work = Plannable(
            lambda: None, ("replay",), parts=(self.device.copy(1, 2, 8, 0, False),), uid=7,
            backend=self.device, gate=self.gate.copy((1, 2), 8, 0), **fields,
        )  # fmt: skip
        self.plan = self.device.capture(self.work)
        self.run = self.device.run_gate

    @property
    def queued(self) -> int:
        return len(self.device.gates)

    def launch(self) -> int:
        return self.gate.launch(self.plan.launch)

    def arms(self) -> bool:
        """Whether the plan is launched ahead, where it may be."""
        before = self.queued
        self.gate.arm(self.plan, self.plan.launch)
        return self.queued > before


def test_a_plain_launch_finds_its_gate_open():
    rig = Rig()
    assert [rig.launch() for _ in range(2)] == [1, 2]  # a train of two
    assert rig.run() == 1 and rig.run() == 2


def test_a_launch_ahead_waits_until_it_is_opened():
    rig = Rig()
    rig.launch()
    assert rig.arms()  # before the device has begun with the first
    assert rig.run() == 1 and rig.run() is None
    assert rig.gate.open(rig.plan) == 2
    assert rig.run() == 2 and not rig.gate.missed(2) and rig.gate.has_read(2)
    assert rig.gate.open(rig.plan) == 0  # nothing stands there any more


def test_a_cancelled_launch_copies_nothing():
    rig = Rig()
    rig.gate.arm(rig.plan, rig.plan.launch)
    assert rig.gate.open(Rig().plan) == rig.gate.open(None) == 0
    rig.gate.cancel()
    assert rig.run() == -1
    for number in range(2, 2 * words.N_CANCELLED + 2):  # its bit comes round
        rig.launch()
        assert rig.run() == number


def test_a_passed_limit_is_seen_before_or_behind_the_wait():
    rig = Rig()
    rig.gate.arm(rig.plan, rig.plan.launch)
    rig.run(limit=True)
    assert rig.gate.open(rig.plan) == 0  # the host sees it at once
    assert rig.arms()
    rig.run(limit=True)
    went, rig.gate._went = rig.gate._went, lambda number: 0  # type: ignore[method-assign]
    number = rig.gate.open(rig.plan)  # behind the device's last look
    rig.gate._went = went  # type: ignore[method-assign]
    assert number == 2 and rig.gate.missed(number)
    assert rig.counts == {"plans_ahead": 0, "plans_ahead_missed": 2}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_gate_is_opened_behind_its_inputs(monkeypatch, machine):
    """On a processor that orders stores by itself, and where a store has to wait for others."""
    stored = []
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(signals, "set_word", lambda *of: stored.append(of) or set_word(*of))
    rig = Rig()
    rig.launch()
    assert rig.arms() and rig.run() == 1 and rig.run() is None
    assert rig.gate.open(rig.plan) == rig.run() == 2
    rig.arms()
    at = rig.device.gates[0]
    rig.gate.cancel()
    assert rig.run() == -3
    wanted = [(at + OPENED, 1), (at + OPENED, 2), (at + CANCELLED, 1 << 3)]
    assert stored == (wanted if machine == "aarch64" else [])


def test_a_host_that_is_late_again_launches_ever_less():
    rig = Rig()
    for passed in (0, 4, 8, 16, 32, 64, 64):
        assert rig.arms()
        rig.run(limit=True)
        assert rig.gate.open(rig.plan) == 0
        rig.launch()
        rig.run()
        assert not any(rig.arms() for _ in range(passed))
    assert rig.arms()
    number = rig.gate.open(rig.plan)
    rig.run()
    assert number and not rig.gate.missed(number)
    for _ in range(2):  # in time once, and all is well
        assert rig.arms()
        rig.run(limit=True)
        assert rig.gate.open(rig.plan) == 0
    assert not any(rig.arms() for _ in range(4)) and rig.arms()


def test_a_failed_launch_is_looked_for_on_the_device():
    rig = Rig()
    rig.launch()

    def fails() -> None:
        raise KeyboardInterrupt

    def fails_behind_it() -> None:
        rig.plan.launch()
        raise KeyboardInterrupt

    for launch, ahead in ((fails, True), (fails_behind_it, True), (fails, False)):
        with pytest.raises(KeyboardInterrupt):
            if ahead:
                rig.gate.arm(rig.plan, launch)
            else:
                rig.gate.launch(launch)
        assert not rig.arms()  # not while nobody knows
        rig.launch()
        found = rig.run()
        assert found is not None and found > 0
    assert rig.device.log.count(("synchronize",)) == 3


@given(st.lists(st.sampled_from(["launch", "arm", "open", "cancel", "run", "limit"]), max_size=40))
def test_a_step_has_its_own_inputs_or_is_missed(does):
    """Whatever comes in between: what was launched plainly or opened in time copies its inputs."""
    rig = Rig()
    wanted: dict[int, bool] = {}  # launch -> whether it must have gone on open
    ran = 0
    for what in does:
        if what == "launch":
            rig.gate.cancel()
            wanted[rig.launch()] = True
        elif what == "arm":
            rig.gate.arm(rig.plan, rig.plan.launch)
        elif what == "open":
            wanted[rig.gate.open(rig.plan)] = True
        elif what == "cancel":
            rig.gate.cancel()
        elif rig.queued:
            went = rig.run(limit=what == "limit")
            if went is not None:
                ran += 1
                assert abs(went) == ran and (went > 0) == wanted.get(ran, False)


def test_ends_are_told_by_number_or_not_at_all(monkeypatch):
    monkeypatch.setattr(words, "WORD_NS", 1_000_000)
    backend: Any = open_device(threads=1)
    counts = dict.fromkeys(("plans_ahead", "plans_ahead_missed"), 0)
    plain, gate = Gate(backend, counts), Gate(backend, counts, by_word=True)
    try:
        assert plain.end(0, False) is None and not plain.ended(1)
        end = gate.end(0, False)
        assert end is not None
        assert not gate.ended(0) and not gate.ended(1)  # of no launch; of one that does not come
        for number in (1, 2):
            with hold(backend, 0) as held:
                end()
                assert not gate.ended(number)
                threading.Timer(0.01, held.open).start()
                monkeypatch.setattr(words, "WORD_NS", 10 * 10**9)
                assert gate.ended(number) and gate.ended(number - 1) == (number > 1)
                monkeypatch.setattr(words, "WORD_NS", 1_000_000)
    finally:
        for made in (plain, gate):
            made.free()
        backend.close()


# a step's call ------------------------------------------------------------------------------------


class GatedRig(Rig):
    """A call whose plan has been captured for each block where results land."""

    def __init__(self, lands: bool = True):
        super().__init__()
        self.landing = Landing(open_backend(), 64)
        results = [Issued(lambda: None, ("results",), Words([block.address], (0,)))
                   for block in self.landing.blocks]  # fmt: skip
        last = Issued(lambda: None, ("results",), LandingBlock(self.landing, results))
        self.work.parts, self.work.landings = (last,), (self.landing,) * lands
        self.plans = Plans(Policy.of(Toggles(plans="ours")))
        self.call = Gated(Planned(self.plans, self.work, (0, True)), self.gate)
        self.held: list[Any] = []
        for _ in range(N_BLOCKS):
            self.call.call()
            self.run()
            self.held = [self.landing.take(64)]
        self.call.call()


def test_a_plan_is_launched_ahead_into_the_next_block():
    rig = GatedRig()
    rig.call.arm()
    assert rig.queued == 2
    rig.run()
    rig.landing.take(64)
    rig.call.call()  # opens; launches nothing
    assert rig.queued == 1 and rig.run() == N_BLOCKS + 2
    assert not rig.call.missed() and not rig.call.missed()
    counts = rig.plans.counts
    assert (counts["plans_replayed"], counts["plans_issued"]) == (N_BLOCKS + 2, 0)
    rig.call.arm()
    rig.call.call()  # nobody took the results of the step before, as where its wait was interrupted
    assert rig.run() == -(N_BLOCKS + 3) and rig.run() == N_BLOCKS + 4


@pytest.mark.parametrize("why", ["held", "moves", "uid", "unfit", "no landing"])
def test_nothing_that_may_be_other_work_is_launched(why):
    rig = GatedRig(lands=why != "no landing")
    match why:
        case "held":
            rig.held += [rig.landing.take(64) for _ in range(N_BLOCKS)]
        case "moves":
            rig.work.moves = (1,)
        case "uid":
            rig.work.uid = 8
        case "unfit":
            for plan in rig.plans:
                plan.fits = False
    queued = rig.queued
    rig.call.arm()
    assert rig.queued == queued


# which plans --------------------------------------------------------------------------------------

HERE, COPIES, SIDE, BESIDE = (Stream(1, i) for i in range(4))
STAGING = Buffer("staging", Space.PINNED, 1 << 20, 1)
PAGEABLE = Buffer("staging", Space.HOST, 1 << 20, HOST)
ARENA = Buffer("arena", Space.DEVICE, 1 << 20, 1)


def copy(n: int = 256, source: Buffer = STAGING, to: Buffer = ARENA, stream: Stream = HERE) -> Copy:
    return Copy(Range(to, 0, n), Range(source, 0, n), stream, "inputs", 0)


def moved(stream: Stream) -> Copy:
    return copy(source=ARENA, stream=stream)


def forked(event: str, *streams: Stream) -> list[Record | Wait]:
    """The first stream's record, and the others' waits for it."""
    first, *others = streams
    return [Record(event, first, 0, forks=True), *(Wait(event, s, 0, forks=True) for s in others)]


RESULTS = copy(source=ARENA, to=STAGING)


@pytest.mark.parametrize(
    ("parts", "can"),
    [
        ((copy(), RESULTS), True),
        ((copy(),), True),
        ((RESULTS, copy()), False),
        ((copy(), copy()), False),
        ((copy(MOST_BYTES + 16), RESULTS), False),
        ((copy(source=PAGEABLE), RESULTS), False),
        ((copy(stream=COPIES), RESULTS), False),
        ((copy(), copy(source=ARENA, to=STAGING, stream=COPIES)), False),
        # branches begin behind the copy
        ((copy(), *forked("a", HERE, SIDE), moved(SIDE), moved(HERE)), True),
        ((copy(), *forked("a", HERE, SIDE), *forked("b", SIDE, BESIDE), moved(BESIDE)), True),
        ((copy(), moved(SIDE)), False),
        ((copy(), *forked("a", HERE, SIDE), moved(BESIDE)), False),
        ((copy(), *forked("a", SIDE, BESIDE), moved(BESIDE)), False),
        ((copy(), Wait("a", SIDE, 0, forks=True), moved(SIDE)), False),
    ],
)
def test_one_copy_of_all_inputs_comes_first(parts, can):
    assert inputs_of(Replay(parts, HERE, 0)) is (parts[0] if can else None)
