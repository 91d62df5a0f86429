"""Any lists of kernels and copies on two streams, with records and waits: a replay computes what
the same commands compute when they are issued one by one, and what NumPy computes in host order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.cpu.device_kernels import address, mix, open_backend
from tests.backend.plan.plannable import Part, planned, records, waits
from workbench.backend.issue.issued import changed as changed_parts

N_BUFFERS, N_EVENTS, WORDS, LAUNCHES = 4, 3, 37, 3
START = np.arange(N_BUFFERS * WORDS).reshape(N_BUFFERS, WORDS)


class Do(NamedTuple):
    """What a part does. value: of a kernel; parts 0: a copy. event: of a record or a wait."""

    stream: int
    kind: str
    dst: int = 0
    src: int = 0
    value: int = 0
    parts: int = 1
    us: int = 0
    event: int = 0


def does() -> st.SearchStrategy[Do]:
    streams, buffers = st.integers(0, 1), st.integers(0, N_BUFFERS - 1)
    events, values = st.integers(0, N_EVENTS - 1), st.integers(-9, 9)
    taken = st.tuples(values, st.integers(1, 3), st.sampled_from([0, 0, 30]))
    kernel = st.tuples(streams, buffers, buffers, taken).map(
        lambda t: Do(t[0], "kernel", t[1], t[2], *t[3])
    )
    copy = st.tuples(streams, buffers, buffers).map(lambda t: Do(t[0], "copy", *t[1:]))
    order = st.tuples(streams, st.sampled_from(["record", "wait"]), events).map(
        lambda t: Do(t[0], t[1], event=t[2])
    )
    return st.one_of(kernel, copy, order)


class Clocks:
    """What each stream is ordered behind: how many parts of either stream."""

    def __init__(self) -> None:
        self.own = [[0, 0], [0, 0]]
        self.recorded: dict[int, list[int]] = {}

    def record(self, stream: int, event: int) -> None:
        self.recorded[event] = list(self.own[stream])

    def wait(self, stream: int, event: int) -> None:
        self.own[stream] = list(map(max, self.own[stream], self.recorded[event]))

    def done(self, stream: int) -> tuple[int, int]:
        """A part more on `stream`: its stream and number."""
        self.own[stream][stream] += 1
        return stream, self.own[stream][stream]

    def behind(self, stream: int, of: tuple[int, int]) -> bool:
        return self.own[stream][of[0]] >= of[1]


def without_races(wanted: Sequence[Do]) -> list[Do]:
    """`wanted` with a Record and a Wait more wherever two parts on two streams would race, and
    without the waits for what is not recorded."""
    clocks, made = Clocks(), list[Do]()
    wrote: dict[int, tuple[int, int]] = {}
    read: dict[int, list[tuple[int, int]]] = {b: [] for b in range(N_BUFFERS)}
    for do in wanted:
        if do.kind == "record":
            clocks.record(do.stream, do.event)
        elif do.kind == "wait":
            if do.event not in clocks.recorded:
                continue
            clocks.wait(do.stream, do.event)
        else:
            before = [wrote[b] for b in (do.dst, do.src) if b in wrote] + read[do.dst]
            if not all(clocks.behind(do.stream, of) for of in before):
                made += [Do(1 - do.stream, "record", event=N_EVENTS),
                         Do(do.stream, "wait", event=N_EVENTS)]  # fmt: skip
                clocks.record(1 - do.stream, N_EVENTS)
                clocks.wait(do.stream, N_EVENTS)
            now = clocks.done(do.stream)
            wrote[do.dst] = now
            read[do.dst] = []
            read[do.src].append(now)
        made.append(do)
    return made


def in_numpy(program: Sequence[Do], memory: np.ndarray) -> None:
    for do in program:
        if do.kind == "kernel":
            memory[do.dst] = 3 * memory[do.dst] + memory[do.src] + do.value
        elif do.kind == "copy":
            memory[do.dst] = memory[do.src]


class Bound:
    """A program bound to memory of its own."""

    def __init__(self, device: Any, program: Sequence[Do], events: Sequence[Any] | None = None):
        self.device, self.memory = device, START.copy()
        self.events = events or [device.event() for _ in range(N_EVENTS + 1)]
        self.work = planned(device, [self.part(do) for do in program])

    def part(self, do: Do) -> Part:
        device, stream = self.device, do.stream
        dst, src = (address(self.memory[b]) for b in (do.dst, do.src))
        match do.kind:
            case "record":
                return records(device, self.events[do.event], stream)
            case "wait":
                return waits(device, self.events[do.event], stream)
            case "copy":
                return device.copy(dst, src, WORDS * 8, stream, to_host=False), stream
        args = (dst, src, WORDS, do.value, 1000 * do.us)
        return device.streams[stream].prepare(mix.address, do.parts, args, (0, 1)), stream

    def around(self, call: Any) -> np.ndarray:
        """What memory holds after LAUNCHES calls, each between two kernels on stream 0 that read
        and write what the parts do."""
        front, behind = (self.part(do)[0] for do in AROUND)
        for _ in range(LAUNCHES):
            front()
            call()
            behind()
        self.device.synchronize()
        return self.memory


AROUND = Do(0, "kernel", 0, 1, 5, us=10), Do(0, "kernel", 1, 2, 7)


def expected(program: Sequence[Do]) -> np.ndarray:
    memory = START.copy()
    for _ in range(LAUNCHES):
        in_numpy([AROUND[0], *program, AROUND[1]], memory)
    return memory


@pytest.fixture(scope="module", params=[1, 3], ids=lambda n: f"{n} workers")
def device(request):
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


programs = st.lists(does(), min_size=1, max_size=24).map(without_races)
some = programs.filter(lambda program: any(do.kind in ("kernel", "copy") for do in program))


@settings(deadline=None, max_examples=60)
@given(program=some)
def test_a_replay_computes_what_its_parts_compute(device, program):
    wanted = expected(program)
    issued, replayed = (Bound(device, program) for _ in range(2))
    np.testing.assert_array_equal(issued.around(issued.work.call), wanted)
    plan = device.capture(replayed.work)
    assert replayed.memory.tolist() == START.tolist()
    np.testing.assert_array_equal(replayed.around(plan.launch), wanted)
    plan.destroy()


def topology(program: Sequence[Do]) -> list[Any]:
    """What an update cannot change: the streams; of each part its kind; of each wait its record.
    A wait for the own stream does nothing."""
    recorded: dict[int, tuple[int, int]] = {}  # event -> part, stream
    found: list[Any] = [{do.stream for do in program} | {0}]
    for part, do in enumerate(program):
        if do.kind == "record":
            recorded[do.event] = part, do.stream
        if do.kind != "wait":
            found.append((part, do.stream, do.kind, do.parts))
        elif recorded[do.event][1] != do.stream:
            found.append((part, do.stream, do.kind, recorded[do.event]))
    return found


@settings(deadline=None, max_examples=40)
@given(
    program=some,
    other=some,
    values=st.lists(st.integers(-9, 9), min_size=60, max_size=60),
    buffers=st.permutations(range(N_BUFFERS)),
)
def test_an_update_makes_a_plan_what_a_capture_would(device, program, other, values, buffers):
    """To the same program with other values and memory; to another program only where that is of
    one topology with it."""
    first = Bound(device, program)
    plan = device.capture(first.work)
    plan.launch()
    changed = [
        do._replace(value=value, dst=buffers[do.dst], src=buffers[do.src])
        for do, value in zip(program, values, strict=False)
    ]
    second = Bound(device, changed)
    assert plan.update(second.work, None)
    np.testing.assert_array_equal(second.around(plan.launch), expected(changed))
    third = Bound(device, other)
    assert plan.update(third.work, None) == (topology(program) == topology(other))
    plan.destroy()


@settings(deadline=None, max_examples=40)
@given(
    program=some, shares=st.booleans(), source=st.integers(0, 1), order=st.permutations(range(3)),
)  # fmt: skip
def test_twins_compute_side_by_side_what_captures_would(device, program, shares, source, order):
    """A plan, a twin of it, and a twin of either, each in memory of its own. They are launched by
    turns, without a wait, and end in any order."""
    first = Bound(device, program)
    bound = [first, *(Bound(device, program, first.events if shares else None) for _ in range(2))]
    plans = [device.capture(first.work)]
    for of, other in ((0, bound[1]), (source, bound[2])):
        moved = changed_parts(bound[of].work.identity, other.work.identity)
        assert moved is not None
        plans.append(plans[of].twin(other.work, moved))
        assert plans[-1].nodes == plans[0].nodes and plans[-1].launches == 0
    around = [[one.part(do)[0] for do in AROUND] for one in bound]
    for _ in range(LAUNCHES):
        for (front, behind), plan in zip(around, plans, strict=True):
            front()
            plan.launch()
            behind()
    for which in order:
        plans[which].destroy()
    device.synchronize()
    for one in bound:
        np.testing.assert_array_equal(one.memory, expected(program))
