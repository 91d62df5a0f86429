"""Gates: what the host writes to one and reads from it, and which plans can stand behind one."""

from __future__ import annotations

import platform
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.gates import hold
from workbench.backend.cpu.device import signals
from workbench.backend.cpu.device.signals import set_word
from workbench.backend.issue.issued import Plannable
from workbench.backend.null import open_backend
from workbench.backend.plan import gate as words
from workbench.backend.plan.ahead import inputs_of
from workbench.backend.plan.gate import CANCELLED, MOST_BYTES, OPENED, Gate
from workbench.program import commands as c


class Rig:
    """A gate of a null device, and a plan behind it."""

    def __init__(self) -> None:
        self.device: Any = open_backend(capture=True)
        self.counts = dict.fromkeys(("plans_ahead", "plans_ahead_missed"), 0)
        self.gate = Gate(self.device, self.counts)
        self.work = Plannable(
            list, ("replay",), parts=(self.device.copy(1, 2, 8, 0, False),), uid=7,
            backend=self.device, gate=self.gate.copy((1, 2), 8, 0),
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


DOES = ("launch", "arm", "open", "cancel", "run", "limit", "another")


@given(st.lists(st.sampled_from(DOES), max_size=40))
@example(["arm", "cancel", "run", *["launch", "run"] * (2 * words.N_CANCELLED + 1)])
def test_a_step_has_its_own_inputs_or_is_missed(does):
    """Whatever comes in between: what was launched plainly or opened in time copies its inputs; all
    else goes on without, and no gate goes on before it is opened, cancelled or too late."""
    rig = Rig()
    wanted: dict[int, bool] = {}  # launch -> whether it must have gone on open
    ran, opened = 0, 0
    for what in does:
        if what == "launch":
            rig.gate.cancel()
            wanted[rig.launch()] = True
        elif what == "arm":
            rig.arms()
        elif what == "open" and (number := rig.gate.open(rig.plan)):
            wanted[number], opened = True, opened + 1
        elif what == "cancel":
            rig.gate.cancel()
        elif what == "another":  # plan stands at no gate
            assert rig.gate.open(Rig().plan) == rig.gate.open(None) == 0
        elif what in ("run", "limit") and rig.queued:
            went = rig.run(limit=what == "limit")
            if went is not None:
                ran += 1
                assert abs(went) == ran and (went > 0) == wanted.get(ran, False)
                assert rig.gate.has_read(ran) == (went > 0)
    assert rig.counts["plans_ahead"] == opened


def test_a_passed_limit_is_seen_on_either_side_of_a_look():
    rig = Rig()
    rig.arms()
    rig.run(limit=True)
    assert rig.gate.open(rig.plan) == 0  # the host sees it at once
    assert rig.arms()
    rig.run(limit=True)
    with pytest.MonkeyPatch.context() as patch:  # after the device's last look
        patch.setattr(rig.gate, "_went", lambda number: 0)
        number = rig.gate.open(rig.plan)
    assert number == 2 and rig.gate.missed(number)
    assert rig.counts == {"plans_ahead": 0, "plans_ahead_missed": 2}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_gate_is_opened_after_its_inputs(monkeypatch, machine):
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

    def late(times: int = 1) -> None:
        for _ in range(times):
            assert rig.arms()
            rig.run(limit=True)
            assert rig.gate.open(rig.plan) == 0

    for passed in (0, 4, 8, 16, 32, 64, 64):
        late()
        assert not any(rig.arms() for _ in range(passed))
    assert rig.arms()
    number = rig.gate.open(rig.plan)
    rig.run()
    assert number and not rig.gate.missed(number)
    late(2)  # in time once, and all is well
    assert not any(rig.arms() for _ in range(4)) and rig.arms()


@pytest.mark.parametrize(("ahead", "queued"), [(True, False), (True, True), (False, False)])
def test_a_failed_launch_is_looked_for_on_the_device(ahead, queued):
    rig = Rig()
    rig.launch()

    def fails() -> None:
        if queued:
            rig.plan.launch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.gate.arm(rig.plan, fails) if ahead else rig.gate.launch(fails)
    assert not rig.arms()  # not while nobody knows
    rig.launch()
    assert (rig.run() or 0) > 0 and ("synchronize",) in rig.device.log


def test_a_cancelled_gate_copies_nothing(two):
    """Though a later one was opened before the device came to it."""
    gate = Gate(two, {})
    src, to, other = (two.allocate(8, c.Space.PINNED) for _ in range(3))
    src.array[:] = 1
    with hold(two, 0):
        gate.arm(two, gate.copy((to.address, src.address), 8, 0))
        gate.cancel()
        gate.launch(gate.copy((other.address, src.address), 8, 0))
    two.synchronize()
    assert not to.array.any() and other.array.all()


HERE, COPIES, SIDE, BESIDE = (c.Stream(1, i) for i in range(4))
STAGING = c.Buffer("staging", c.Space.PINNED, 1 << 20, 1)
PAGEABLE = c.Buffer("staging", c.Space.HOST, 1 << 20, c.HOST)
ARENA = c.Buffer("arena", c.Space.DEVICE, 1 << 20, 1)


def copy(source: Any, to: Any, stream: c.Stream = HERE, n: int = 256) -> c.Copy:
    return c.Copy(c.Range(to, 0, n), c.Range(source, 0, n), stream, "inputs", 0)


def on(stream: c.Stream) -> c.Copy:
    return copy(ARENA, ARENA, stream)


def forked(event: str, first: c.Stream, other: c.Stream) -> tuple[Any, ...]:
    return c.Record(event, first, 0, forks=True), c.Wait(event, other, 0, forks=True)


INPUTS, RESULTS = copy(STAGING, ARENA), copy(ARENA, STAGING)
CAN = [
    (INPUTS, RESULTS),
    (INPUTS,),
    # branches begin after the copy
    (INPUTS, *forked("a", HERE, SIDE), on(SIDE), on(HERE)),
    (INPUTS, *forked("a", HERE, SIDE), *forked("b", SIDE, BESIDE), on(BESIDE)),
]
CANNOT = [
    (RESULTS, INPUTS),
    (INPUTS, INPUTS),
    (copy(STAGING, ARENA, n=MOST_BYTES + 16), RESULTS),
    (copy(PAGEABLE, ARENA), RESULTS),
    (copy(STAGING, ARENA, COPIES), RESULTS),
    (INPUTS, copy(ARENA, STAGING, COPIES)),
    (INPUTS, on(SIDE)),
    (INPUTS, *forked("a", HERE, SIDE), on(BESIDE)),
    (INPUTS, *forked("a", SIDE, BESIDE), on(BESIDE)),
    (INPUTS, c.Wait("a", SIDE, 0, forks=True), on(SIDE)),
]


@pytest.mark.parametrize("parts", CAN + CANNOT)
def test_one_copy_of_all_inputs_comes_first(parts):
    assert inputs_of(c.Replay(parts, HERE, 0)) is (parts[0] if parts in CAN else None)
