"""Launches ahead without a device that computes: what the host writes to a gate and reads from it,
which plans are launched ahead, and what a capture records in place of a copy."""

from __future__ import annotations

import platform
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gates import hold
from tests.unit.fake_cuda import fake_backend
from workbench.backend.base import NO_PART, Captured
from workbench.backend.cpu.device import signals
from workbench.backend.cpu.device.embedded import open_backend as open_device
from workbench.backend.cpu.device.signals import await_word, set_word
from workbench.backend.issue.bind import LandingBlock
from workbench.backend.issue.issued import Issued, Plannable, Words
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.backend.null import open_backend
from workbench.backend.plan import gate as words
from workbench.backend.plan.ahead import inputs_of
from workbench.backend.plan.gate import (
    CANCELLED,
    CONTROL_BYTES,
    MOST_BYTES,
    N_CANCELLED,
    N_WENT,
    OPENED,
    RAN,
    WENT,
    Gate,
)
from workbench.backend.plan.life import Gated, Planned, Plans, Policy, in_words
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


class Device:
    """Runs gates as a device does, when it is told to."""

    def __init__(self) -> None:
        array = np.zeros(CONTROL_BYTES, np.uint8)
        self.words = array.view(np.int64)
        self.memory = SimpleNamespace(array=array, address=4096, free=lambda: None)
        self.queued = self.synchronized = 0

    def allocate(self, nbytes: int, space: Space) -> Any:
        assert nbytes == CONTROL_BYTES and space == Space.PINNED
        return self.memory

    def launch(self) -> None:
        self.queued += 1

    def run(self, limit: bool) -> int | None:
        """What the next gate does: its number if it was open, or the negative; None: it waits."""
        number = int(self.words[RAN // 8]) + 1
        cancelled = bool(int(self.words[CANCELLED // 8]) >> number % N_CANCELLED & 1)
        is_open = self.words[OPENED // 8] >= number and not cancelled
        if not (is_open or limit or cancelled):
            return None
        self.queued -= 1
        went = number if is_open else -number
        self.words[WENT // 8 + number % N_WENT], self.words[RAN // 8] = went, number
        return went

    def synchronize(self) -> None:
        self.synchronized += 1
        while self.queued:
            self.run(limit=True)


def rig() -> tuple[Device, Gate, Any]:
    device: Any = Device()
    counts = dict.fromkeys(("plans_ahead", "plans_ahead_missed"), 0)
    return device, Gate(device, counts), SimpleNamespace(launch=device.launch)


def test_a_plain_launch_finds_its_gate_open():
    device, gate, plan = rig()
    for number in (1, 2, 3):
        gate.launch(plan.launch)
        assert device.run(limit=False) == number
    gate.launch(plan.launch)
    gate.launch(plan.launch)  # a train of two
    assert device.run(limit=False) == 4 and device.run(limit=False) == 5


def test_a_launch_ahead_waits_until_it_is_opened():
    device, gate, plan = rig()
    gate.launch(plan.launch)
    gate.arm(plan, plan.launch)  # before the device has begun with the first
    assert device.run(limit=False) == 1
    assert device.run(limit=False) is None
    assert gate.open(plan) == 2
    assert device.run(limit=False) == 2 and not gate.missed(2)
    assert gate.open(plan) == 0  # nothing stands there any more


def test_one_that_is_cancelled_copies_nothing_and_the_next_is_open():
    device, gate, plan = rig()
    gate.arm(plan, plan.launch)
    assert gate.open(SimpleNamespace(launch=device.launch)) == 0  # type: ignore[arg-type]
    assert gate.open(None) == 0
    gate.cancel()
    assert device.run(limit=False) == -1
    gate.launch(plan.launch)
    assert device.run(limit=False) == 2


def test_one_whose_limit_passes_is_missed_before_or_behind_its_wait():
    device, gate, plan = rig()
    gate.arm(plan, plan.launch)
    device.run(limit=True)
    assert gate.open(plan) == 0  # the host sees it at once
    gate.arm(plan, plan.launch)
    number = gate.open(plan)
    assert number == 2
    device.words[OPENED // 8] = 1  # as if it had been opened behind the device's last look
    device.run(limit=True)
    assert gate.missed(number)
    assert gate._counts == {"plans_ahead": 0, "plans_ahead_missed": 2}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_gate_is_opened_behind_its_inputs_on_any_processor(monkeypatch, machine):
    """One that orders stores by itself, and one whose store has to wait for those before it."""
    stored = []
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(signals, "set_word", lambda *of: stored.append(of) or set_word(*of))
    device: Any = Device()
    device.memory.address = device.memory.array.ctypes.data
    gate = Gate(device, dict.fromkeys(("plans_ahead", "plans_ahead_missed"), 0))
    plan: Any = SimpleNamespace(launch=device.launch)
    gate.launch(plan.launch)
    gate.arm(plan, plan.launch)
    assert device.run(limit=False) == 1 and device.run(limit=False) is None
    assert gate.open(plan) == device.run(limit=False) == 2
    gate.arm(plan, plan.launch)
    gate.cancel()
    assert device.run(limit=False) == -3
    at = device.memory.address
    words = [(at + OPENED, 1), (at + OPENED, 2), (at + CANCELLED, 1 << 3)]
    assert stored == (words if machine == "aarch64" else [])


def test_a_host_that_is_late_again_and_again_launches_ahead_ever_less():
    device, gate, plan = rig()

    def armed() -> bool:
        before = device.queued
        gate.arm(plan, plan.launch)
        return device.queued > before

    for passed in (0, 4, 8, 16, 32, 64, 64):
        assert armed()
        device.run(limit=True)
        assert gate.open(plan) == 0
        gate.launch(plan.launch)
        device.run(limit=False)
        assert not any(armed() for _ in range(passed))
    assert armed()
    number = gate.open(plan)
    device.run(limit=False)
    assert number and not gate.missed(number)
    for _ in range(2):  # in time once, and all is well
        assert armed()
        device.run(limit=True)
        assert gate.open(plan) == 0
    assert not any(armed() for _ in range(4)) and armed()


def test_a_launch_that_fails_is_looked_for_on_the_device():
    device, gate, plan = rig()
    gate.launch(plan.launch)

    def fails() -> None:
        raise KeyboardInterrupt

    def fails_behind_it() -> None:
        device.launch()
        raise KeyboardInterrupt

    for launch, ahead in ((fails, True), (fails_behind_it, True), (fails, False)):
        with pytest.raises(KeyboardInterrupt):
            if ahead:
                gate.arm(plan, launch)
            else:
                gate.launch(launch)
        gate.arm(plan, plan.launch)  # not while nobody knows
        assert device.queued <= 2
        gate.launch(plan.launch)
        found = device.run(limit=False)
        assert found is not None and found > 0
    assert device.synchronized == 3


@given(st.lists(st.sampled_from(["launch", "arm", "open", "cancel", "run", "limit"]), max_size=40))
def test_a_step_is_computed_from_its_own_inputs_or_known_to_be_missed(does):
    """Whatever comes in between: what was launched plainly or opened in time copies its inputs."""
    device, gate, plan = rig()
    wanted: dict[int, bool] = {}  # launch -> whether it must have gone on open
    for what in does:
        if what == "launch":
            gate.cancel()
            gate.launch(plan.launch)
            wanted[gate._launched] = True
        elif what == "arm":
            gate.arm(plan, plan.launch)
        elif what == "open":
            wanted[gate.open(plan)] = True
        elif what == "cancel":
            gate.cancel()
        elif device.queued:
            number = int(device.words[RAN // 8]) + 1
            went = device.run(limit=what == "limit")
            if went is not None:
                assert abs(went) == number and (went > 0) == wanted.get(number, False)


def test_ends_are_told_by_number_in_time_or_not_at_all(monkeypatch):
    monkeypatch.setattr(words, "WORD_NS", 1_000_000)
    backend: Any = open_device(threads=1)
    counts = dict.fromkeys(("plans_ahead", "plans_ahead_missed"), 0)
    plain, gate = Gate(backend, counts), Gate(backend, counts, by_word=True)
    try:
        assert plain.end(0, False) is None and not plain.ended(1)
        end = gate.end(0, False)
        assert end is not None
        assert not gate.ended(0) and not gate.ended(1)  # of no launch; of one that does not come
        for number in (1, 2, 3):
            with hold(backend, 0) as held:
                end()
                assert not gate.ended(number)
                threading.Timer(0.01, held.open).start()
                monkeypatch.setattr(words, "WORD_NS", 10 * 10**9)
                assert gate.ended(number) and gate.ended(number - 1) == (number > 1)
                monkeypatch.setattr(words, "WORD_NS", 1_000_000)
        assert not gate.ended(4)
    finally:
        for made in (plain, gate):
            made.free()
        backend.close()


def test_who_waits_for_a_word_leaves_python_to_others():
    memory = np.zeros(1, np.int64)
    threading.Timer(0.02, lambda: set_word(memory.ctypes.data, 7)).start()
    assert await_word(memory.ctypes.data, 7, 20 * 10**9)  # with the GIL it would be in vain
    assert not await_word(memory.ctypes.data, 8, 1_000_000)


# which plans --------------------------------------------------------------------------------------

HERE, COPIES = Stream(1, 0), Stream(1, 1)
STAGING = Buffer("staging", Space.PINNED, 1 << 20, 1)
PAGEABLE = Buffer("staging", Space.HOST, 1 << 20, HOST)
ARENA = Buffer("arena", Space.DEVICE, 1 << 20, 1)


def copy(n: int = 256, source: Buffer = STAGING, to: Buffer = ARENA, stream: Stream = HERE) -> Copy:
    return Copy(Range(to, 0, n), Range(source, 0, n), stream, "inputs", 0)


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
    ],
)
def test_one_copy_of_all_inputs_comes_first(parts, can):
    assert inputs_of(Replay(parts, HERE, 0)) is (parts[0] if can else None)


class Recorded(Captured):
    """What `Device` has recorded: a launch is one more that is queued."""

    def __init__(self, device: Device):
        self.launch, self.nodes = device.launch, ()

    def update(self, work: Plannable, changed: Any) -> bool:
        return False

    def destroy(self) -> None:
        """Nothing is recorded."""


def gated(landings: int = 1, **fields: Any) -> tuple[Device, Gated, Any]:
    """A call whose plan has been captured for each block where results land."""
    device, gate, _ = rig()
    landing = Landing(open_backend(), 64)
    backend = SimpleNamespace(capture=lambda work: Recorded(device))
    last = Issued(lambda: None, ("results",), LandingBlock(landing, [
        Issued(lambda: None, ("results",), Words([block.address], (0,))) for block in landing.blocks
    ]))  # fmt: skip
    work = Plannable(
        lambda: None, ("replay",), parts=(last,), uid=7, gate=Issued(lambda: None, ("gate",)),
        landings=(landing,) * landings, backend=backend, **fields,
    )  # fmt: skip
    plans = Plans(Policy.of(Toggles(plans="ours")))
    call = Gated(Planned(plans, work, (0, True)), gate)
    held = []
    for _ in range(N_BLOCKS):
        call.call()
        device.run(limit=False)
        held = [landing.take(64)]
    return device, call, SimpleNamespace(work=work, landing=landing, held=held, plans=plans)


def test_a_plan_is_launched_ahead_into_the_block_that_comes_next():
    device, call, rest = gated()
    call.call()
    call.arm()
    assert device.queued == 2 and rest.landing._reserved != rest.landing.now
    device.run(limit=False)
    rest.landing.take(64)
    call.call()  # opens; launches nothing
    assert device.queued == 1 and device.run(limit=False) == N_BLOCKS + 2
    assert not call.missed() and not call.missed()
    counts = rest.plans.counts
    assert (counts["plans_replayed"], counts["plans_issued"]) == (N_BLOCKS + 2, 0)


@pytest.mark.parametrize("why", ["held", "moves", "uid", "unfit", "no landing"])
def test_nothing_is_launched_ahead_that_may_be_other_work(why):
    device, call, rest = gated(landings=0 if why == "no landing" else 1)
    call.call()
    match why:
        case "held":
            rest.held += [rest.landing.take(64) for _ in range(N_BLOCKS)]
        case "moves":
            rest.work.moves = (1,)
        case "uid":
            rest.work.uid = 8
        case "unfit":
            for plan in rest.plans:
                plan.fits = False
    queued = device.queued
    call.arm()
    assert device.queued == queued


def test_another_landing_than_the_reserved_one_cancels():
    """As where the wait for a step was interrupted: nobody took its results."""
    device, call, _ = gated()
    call.call()
    call.arm()
    device.run(limit=False)
    call.call()
    assert device.run(limit=False) == -(N_BLOCKS + 2)  # of the launch ahead
    assert device.run(limit=False) == N_BLOCKS + 3


def test_words_on_plans_name_launches_ahead():
    counts = dict.fromkeys(
        ("plans_captured", "plans_updated", "plans_reinstantiated", "plans_replayed",
         "plans_issued", "plans_evicted", "plans_capture_ns", "plans_instantiate_ns",
         "plans_update_ns"), 0,
    )  # fmt: skip
    counts["plans_replayed"] = 9
    assert "ahead" not in in_words(counts)
    found = in_words(counts | {"plans_ahead": 7, "plans_ahead_missed": 1})
    assert found.endswith("9 replayed, 7 launched ahead, 1 launched ahead for nothing")


# the cuda backend ---------------------------------------------------------------------------------


def test_a_capture_has_the_gate_in_place_of_the_copy(monkeypatch):
    backend, _ = fake_backend(monkeypatch)
    api: Any = backend._driver.api
    first = backend.copy(1 << 40, 1 << 41, 256, 0, to_host=False)
    behind = backend.copy(1 << 42, 1 << 40, 64, 0, to_host=True)
    work = Plannable(
        lambda: None, ("replay",), parts=(first, behind), backend=backend, streams=(0, 0), uid=1
    )
    plain = backend.capture(work)
    work.gate = backend.gate_copy(*first.addresses, 256, 4096, 500, 0)
    assert work.gate.addresses == first.addresses and work.recorded == (work.gate, behind)
    graph = backend.capture(work)
    assert plain.nodes == graph.nodes == (0, 1)
    api.log.clear()
    graph.launch()
    assert [c.function for c in api.log] == ["cuLaunchKernel", "cuMemcpyDtoHAsync"]
    first.block[0] = work.gate.block[0] = 1 << 43  # other memory: the node of the gate is set
    assert graph.update(work, [0]) and graph.nodes_set == 1
    api.log.clear()
    graph.launch()
    assert 1 << 43 in api.log[0].args
    for made in (plain, graph):
        made.destroy()


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_capture_ends_with_what_tells_the_host(monkeypatch, programmatic):
    """Behind the last command, and of none; a twin and an update keep it."""
    backend, _ = fake_backend(monkeypatch)
    api: Any = backend._driver.api
    first = backend.copy(1 << 40, 1 << 41, 256, 0, to_host=False)
    last = backend.gate_copy(1 << 42, 1 << 43, 64, 4096, 500, 0)  # any kernel
    work = Plannable(
        lambda: None, ("replay",), parts=(first, last), backend=backend, streams=(0, 0), uid=1
    )
    work.end = backend.gate_end(1 << 44, 1 << 45, 0, programmatic)
    graph = backend.capture(work)
    assert graph.nodes == (0, 1, NO_PART)
    last.block[0] = 1 << 46
    twin = graph.twin(work, [1])
    assert twin is not None and graph.update(work, [1])
    launch = "cuLaunchKernelEx" if programmatic else "cuLaunchKernel"
    for made in (graph, twin):
        api.log.clear()
        made.launch()
        assert [c.function for c in api.log] == ["cuMemcpyHtoDAsync", "cuLaunchKernel", launch]
        assert {1 << 44, 1 << 45} <= set(api.log[2].args) and 1 << 46 in api.log[1].args
        made.destroy()


def test_a_gate_s_block_has_its_arguments(monkeypatch):
    backend, _ = fake_backend(monkeypatch)
    issued = backend.gate_copy(1 << 40, 1 << 41, 256, 4096, 500, 0)
    assert isinstance(issued.block, Words)
    assert list(issued.block) == [1 << 40, 1 << 41, 256, 4096, 500]


SIDE, BESIDE = Stream(1, 2), Stream(1, 3)


def moved(stream: Stream) -> Copy:
    return copy(source=ARENA, stream=stream)


def forked(event: str, *streams: Stream) -> list[Record | Wait]:
    """The first stream's record, and the others' waits for it."""
    first, *others = streams
    return [Record(event, first, 0, forks=True), *(Wait(event, s, 0, forks=True) for s in others)]


@pytest.mark.parametrize(
    ("parts", "can"),
    [
        ((*forked("a", HERE, SIDE), moved(SIDE), moved(HERE)), True),
        ((*forked("a", HERE, SIDE), *forked("b", SIDE, BESIDE), moved(BESIDE)), True),
        ((moved(SIDE),), False),
        ((*forked("a", HERE, SIDE), moved(BESIDE)), False),
        ((*forked("a", SIDE, BESIDE), moved(BESIDE)), False),
        ((Wait("a", SIDE, 0, forks=True), moved(SIDE)), False),
    ],
)
def test_no_branch_begins_in_front_of_the_inputs(parts, can):
    inputs = copy()
    assert inputs_of(Replay((inputs, *parts), HERE, 0)) is (inputs if can else None)
