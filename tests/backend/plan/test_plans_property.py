"""Any lists of kernels and copies on nine streams, with records and waits: a replay computes what
the same commands compute when they are issued one by one, and what NumPy computes in host order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backend.cpu.device_kernels import (
    Part,
    address,
    mix,
    open_backend,
    planned,
    records,
    waits,
)
from tests.gates import hold
from workbench.backend.issue.issued import changed as changed_parts

N_BUFFERS, N_EVENTS, N_STREAMS, WORDS, LAUNCHES = 4, 3, 9, 37, 3
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
    streams = st.integers(0, 1) | st.integers(0, N_STREAMS - 1)
    buffers, events = st.integers(0, 3), st.integers(0, N_EVENTS - 1)
    taken = st.integers(-9, 9), st.integers(1, 3), st.sampled_from([0, 0, 30])
    kernel = st.tuples(streams, st.just("kernel"), buffers, buffers, *taken)
    copy = st.tuples(streams, st.just("copy"), buffers, buffers)
    order = st.tuples(streams, st.sampled_from(["record", "wait"]), events)
    ordered = order.map(lambda t: Do(*t[:2], event=t[2]))
    return (kernel | copy).map(lambda t: Do(*t)) | ordered


def without_races(wanted: Sequence[Do]) -> list[Do]:
    """`wanted` with a Record and a Wait more wherever parts on two streams would race, and without
    the waits for what is not recorded."""
    seen = defaultdict[int, set[int]](set)  # by stream, the parts that it comes after
    recorded: dict[int, set[int]] = {}
    made = list[Do]()
    for do in wanted:
        own = seen[do.stream]
        if do.kind == "record":
            recorded[do.event] = set(own)
        elif do.kind == "wait":
            if do.event not in recorded:
                continue
            own |= recorded[do.event]
        else:
            works = ((i, x) for i, x in enumerate(made) if x.kind in ("kernel", "copy"))
            for i, x in list(works):
                if i not in own and (x.dst in do[2:4] or x.src == do.dst):
                    event = N_EVENTS + x.stream
                    made += [Do(x.stream, "record", event=event),
                             Do(do.stream, "wait", event=event)]  # fmt: skip
                    own |= seen[x.stream]
            own.add(len(made))
        made.append(do)
    return made


def expected(program: Sequence[Do]) -> np.ndarray:
    memory = START.copy()
    for do in [AROUND[0], *program, AROUND[1]] * LAUNCHES:
        if do.kind == "kernel":
            memory[do.dst] = 3 * memory[do.dst] + memory[do.src] + do.value
        elif do.kind == "copy":
            memory[do.dst] = memory[do.src]
    return memory


class Bound:
    """A program bound to memory of its own."""

    def __init__(self, device: Any, program: Sequence[Do], events: Sequence[Any] | None = None):
        self.device, self.memory = device, START.copy()
        self.events = events or [device.event() for _ in range(N_EVENTS + N_STREAMS)]
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

    def around(self, call: Any, held: bool = False) -> np.ndarray:
        """What memory holds after LAUNCHES calls, each between two kernels on stream 0 that read
        and write what the parts do. held: all is queued before the first may run, so streams that
        wait in circles would stay there."""
        first, last = (self.part(do)[0] for do in AROUND)
        with hold(self.device) if held else nullcontext():
            for _ in range(LAUNCHES):
                first(), call(), last()
        self.device.synchronize()
        return self.memory


AROUND = Do(0, "kernel", 0, 1, 5, us=10), Do(0, "kernel", 1, 2, 7)


@pytest.fixture(scope="module", params=[1, 3], ids=lambda n: f"{n} workers")
def device(request):
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


programs = st.lists(does(), min_size=1, max_size=24).map(without_races)
some = programs.filter(lambda program: any(do.kind in ("kernel", "copy") for do in program))


@given(some, st.booleans())
def test_a_replay_computes_what_its_parts_compute(device, program, held):
    wanted = expected(program)
    issued, replayed = (Bound(device, program) for _ in range(2))
    np.testing.assert_array_equal(issued.around(issued.work.call, held), wanted)
    plan = device.capture(replayed.work)
    assert replayed.memory.tolist() == START.tolist()
    np.testing.assert_array_equal(replayed.around(plan.launch, held), wanted)
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


@given(
    some, some, st.lists(st.integers(-9, 9), min_size=60, max_size=60), st.permutations(range(4))
)
def test_an_update_makes_a_plan_what_a_capture_would(device, program, other, values, buffers):
    """To the same program with other values and memory; to another program only where that is of
    one topology with it."""
    first = Bound(device, program)
    plan = device.capture(first.work)
    plan.launch()
    changed = [
        do._replace(value=value, dst=buffers[do.dst], src=buffers[do.src])
        for do, value in zip(program, cycle(values), strict=False)
    ]
    second, third = Bound(device, changed), Bound(device, other)
    assert plan.update(second.work, None)
    np.testing.assert_array_equal(second.around(plan.launch), expected(changed))
    assert plan.update(third.work, None) == (topology(program) == topology(other))
    plan.destroy()


@given(some, st.booleans(), st.integers(0, 1), st.permutations(range(3)))
def test_twins_compute_side_by_side_what_captures_would(device, program, shares, source, order):
    """A plan, a twin of it, and a twin of either, each in memory of its own. They are launched by
    turns, without a wait, and end in any order, with launches queued."""
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
        for (front, last), plan in zip(around, plans, strict=True):
            front(), plan.launch(), last()
    for which in order:
        plans[which].destroy()
    device.synchronize()
    for one in bound:
        np.testing.assert_array_equal(one.memory, expected(program))
