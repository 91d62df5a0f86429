"""Capture, update, twin, launch and destroy on the embedded device, on lists of small kernels, on
one stream and on nine. What every device's plans keep is in tests/contract."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import address, count_parts, meet, open_backend, rotate
from tests.backend.plan.plannable import Log, Part, planned, records, spins, waits
from tests.gates import hold
from workbench.backend.cpu.device import loops
from workbench.backend.cpu.device.loops import RING_SIZE
from workbench.common.errors import DeviceError
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space, compute_stream

SIDE = [compute_stream(k) for k in range(1, 8)]
ALL = [COMPUTE_STREAM, *SIDE, COPY_STREAM]


def test_a_launch_is_one_entry_of_each_ring(device):
    """However long the plan. Its capture runs nothing, and each launch every part in order."""

    def counts() -> list[tuple[int, int]]:
        return [(ring.words[loops.FILLED // 8], ring.issued) for ring in device.streams]

    log = Log(device)
    plan = device.capture(planned(device, [log.part(v, v % 2) for v in range(300)]))
    device.synchronize()
    assert log.values == []
    before = counts()
    plan.launch()
    grown = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, counts(), strict=True)]
    assert grown == [(1, 152), (1, 152), *[(0, 0)] * 7]
    log(1000)
    device.synchronize()
    assert sorted(log.values) == [*range(300), 1000] and log.values[-1] == 1000
    assert [v for v in log.values if v % 2] == [*range(1, 300, 2)]
    assert plan.nodes == tuple(range(300)) and plan.launches == 1
    assert plan.capture_ns > 0 and plan.instantiate_ns > 0


def test_workers_share_kernels_alone_and_in_plans(device):
    """Every part runs once, and a kernel starts when the one before it is complete: a lost addition
    would be an overlap. More commands than the ring has entries."""
    words, counted, n = np.zeros(8, np.int64), np.zeros(16, np.int64), RING_SIZE // 4 + 500
    ring = device.streams[0]
    turned = [ring.prepare(rotate.address, 8, (address(words), s)) for s in range(8)]
    counts = [ring.prepare(count_parts.address, p, (address(counted),)) for p in (1, 3, 16)]
    plan = device.capture(planned(device, [(call, 0) for call in (*turned[:4], *counts)]))
    for _ in range(n):
        plan.launch()
        for call in (*turned[4:], *counts):
            call()
    device.synchronize()
    np.testing.assert_array_equal(words, 8 * n)
    assert counted.tolist() == [2 * n * sum(p > part for p in (1, 3, 16)) for part in range(16)]


# streams ------------------------------------------------------------------------------------------


def random_parts(device: Any, log: Log, chance: random.Random, n: int) -> tuple[list[Part], Any]:
    """Appends on all streams with Records and Waits between them; and of each append what it comes
    after: the one before it on its stream, and those that events say. Records come before Waits."""
    events = [device.event() for _ in range(4)]
    parts: list[Part] = []
    after: list[set[int]] = []
    reached: dict[int, set[int]] = {stream: set() for stream in ALL}
    recorded: dict[int, set[int]] = {}
    while len(after) < n:
        stream, kind, e = chance.choice(ALL), chance.randrange(4), chance.randrange(4)
        if kind == 0:
            parts.append(records(device, events[e], stream))
            recorded[e] = set(reached[stream])
        elif kind == 1 and e in recorded:
            parts.append(waits(device, events[e], stream))
            reached[stream] |= recorded[e]
        else:
            after.append(set(reached[stream]))
            reached[stream] = {len(after) - 1}
            if chance.random() < 0.3:
                parts.append(spins(device, chance.randrange(60), stream))
            parts.append(log.part(len(after) - 1, stream))
    return parts, after


def in_order(values: list[int], after: list[set[int]]) -> bool:
    place = {value: i for i, value in enumerate(values)}
    return all(place[b] < place[i] for i, before in enumerate(after) for b in before)


@pytest.mark.parametrize("seed", range(6))
def test_random_work_on_nine_streams_keeps_its_order(device, seed):
    """More threads than cores. A plan, its update and its twin run what the parts do one by one,
    each launch after the one before, whoever else is queued. With every other seed all is queued
    before the first may run, so streams that wait in circles would stay there."""
    chance, n, launches = random.Random(seed), 60, 12
    log = Log(device, n * (launches + 1))
    parts, after = random_parts(device, log, chance, n)
    work = planned(device, parts)
    plan = device.capture(work)
    twin = plan.twin(work, [])
    calls = [work.call, plan.launch, twin.launch]
    with hold(device, 0) if seed % 2 else nullcontext():
        for i in range(launches):
            if i == launches // 2:
                assert plan.update(work, None)
            chance.choice(calls)()
    device.synchronize()
    found = np.reshape(log.values, (launches, n)).tolist()
    assert all(sorted(values) == [*range(n)] for values in found)
    assert all(in_order(values, after) for values in found)


@pytest.mark.parametrize("workers", [1, 2])
def test_branches_run_at_the_same_time(workers):
    device = open_backend(threads=workers)
    words, streams = np.zeros(2, np.int64), [0, *SIDE[:2], COPY_STREAM]
    meets = [(device.streams[s].prepare(meet.address, 1, (address(words), 4)), s) for s in streams]
    work = planned(device, meets)
    plan = device.capture(work)
    for call in (work.call, plan.launch):
        words[:] = 0
        call()
        device.synchronize()
        assert words.tolist() == [4, 4], "each saw that the others had begun"
    device.close()


def test_a_stream_that_only_records_in_a_plan_has_threads(two):
    log, event = Log(two), two.event()
    parts = [log.part(1), records(two, event, SIDE[4]), waits(two, event, 0), log.part(2)]
    plan = two.capture(planned(two, parts))
    for _ in range(3):
        plan.launch()
    two.synchronize()
    assert log.values == [1, 2] * 3


@pytest.mark.parametrize("space", [Space.HOST, Space.PINNED])
def test_what_no_plan_can_have_is_refused_in_one_line(space):
    """A copy of pageable memory takes its bytes at the call, so it is issued one by one as ever."""
    device = open_backend(threads=1, pageable="snapshot")
    source, there = device.allocate(64, space), device.allocate(64, Space.DEVICE)
    up = device.copy(there.address, source.address + 32, 8, COPY_STREAM, to_host=False)
    log, event = Log(device), device.event()
    copied = planned(device, [log.part(1), (up, COPY_STREAM)])
    refused = {
        "waits for an event that it": [log.part(1), waits(device, event, COPY_STREAM)],
        "without launches and copies": [records(device, event, 0)],
    }
    works = {says: planned(device, parts) for says, parts in refused.items()}
    works |= {"snapshot copy takes": copied} if space == Space.HOST else {}
    for says, work in works.items():
        with pytest.raises(DeviceError, match=rf"^a .*{says}.*; .*$"):
            device.capture(work)
    assert space == Space.HOST or device.capture(copied)
    device.synchronize()
    assert log.values == []
    copied()
    device.synchronize()
    assert log.values == [1]
    device.close()


# updates ------------------------------------------------------------------------------------------


def test_another_topology_is_refused_and_changes_nothing(two):
    """Any two lists of parts: test_plans_property.py. A part may also wait for another event: both
    waits are for the second after the first patch here."""
    log, first, second, third = Log(two), two.event(), two.event(), two.event()
    parts = [
        log.part(1, COPY_STREAM), records(two, first, COPY_STREAM), log.part(2, COPY_STREAM),
        records(two, second, COPY_STREAM), waits(two, first, 0), log.part(3),
        waits(two, second, 0),
    ]  # fmt: skip
    work = planned(two, parts)
    plan = two.capture(work)
    assert not plan.update(planned(two, [*parts[:5], spins(two, 0), parts[6]]), None), "a function"
    assert not plan.update(planned(two, [*parts, log.part(4, SIDE[0])]), None), "a branch"
    assert not plan.update(planned(two, parts, stream=COPY_STREAM), None)
    plan.launch()
    two.synchronize()
    assert sorted(log.values) == [1, 2, 3]
    work.parts[4].block[0] = second.address
    assert not plan.update(work, [4])
    for part in (3, 4, 6):
        work.parts[part].block[0] = third.address
    assert not plan.update(work, [3, 4, 6])
    work.parts[4].block[0] = first.address
    assert plan.update(work, [3, 6])


# ends ---------------------------------------------------------------------------------------------


def test_memory_of_a_plan_lives_until_its_launches_are_over(two):
    log = Log(two)
    with hold(two):
        for value in range(50):
            plan = two.capture(planned(two, [log.part(value), log.part(value, COPY_STREAM)]))
            plan.launch()
            if value % 2:
                plan.destroy()
                with pytest.raises(DeviceError, match=r"^this plan is destroyed; capture .*$"):
                    plan.launch()
            del plan  # the last reference
            np.full(1 << 12, 0xEE, np.uint8)  # would take the freed block
    two.synchronize()
    assert [v for i, v in enumerate(log.values) if v not in log.values[:i]] == [*range(50)]
    assert len(log.values) == 100


def test_a_device_and_plans_that_nobody_closed_end():
    gc.collect()
    before = threading.active_count()
    device = open_backend(threads=2)
    log = Log(device)  # kernels write until the device ends
    work = planned(device, [log.part(0), log.part(1, SIDE[2]), log.part(2, COPY_STREAM)])
    plan = device.capture(work)
    twin, call = plan.twin(work, []), log.part(3)[0]
    for launch in (plan.launch, twin.launch, call):
        launch()
    log._device = None
    refs = [weakref.ref(thing) for thing in (plan, twin, device)]
    del plan, twin, device, work, launch
    assert [ref() for ref in refs] == [None] * 3 and threading.active_count() == before
    with pytest.raises(DeviceError, match="closed"):
        call()


# times --------------------------------------------------------------------------------------------


def test_spans_of_nodes_are_on_the_host_clock_and_in_order(device):
    before = time.perf_counter_ns()
    parts = [spins(device, 300), spins(device, 200, parts=3), spins(device, 100, COPY_STREAM)]
    plan = device.capture(planned(device, parts))
    assert plan.spans() == []
    begin = device.mark(0)
    plan.launch()
    end = device.mark(0)
    device.synchronize()
    found, whole = plan.spans(), device.resolve(begin, end)
    assert [e - s >= us * 1000 for (s, e), us in zip(found, (300, 200, 100), strict=True)]
    assert before <= min(s for s, _ in found) and found[0][1] <= found[1][0]
    assert max(e for _, e in found) <= time.perf_counter_ns()
    assert whole[0] <= found[0][0] and found[-1][1] <= whole[1]
    with hold(device):
        plan.launch()
        with pytest.raises(DeviceError, match="no stamp"):
            plan.spans()


def test_spans_of_earlier_launches_are_kept_for_a_while(two):
    plan = two.capture(planned(two, [spins(two, 1), spins(two, 1, SIDE[2]), spins(two, 1)]))
    n, first = 2 * loops.N_FIRSTS, loops.N_FIRSTS
    for i in range(n):
        for stream in SIDE[: i % 3]:  # so that numbers of streams differ
            spins(two, 1, stream)[0]()
        plan.launch()
    two.synchronize()
    kept = [plan.spans(i) for i in range(n)]
    assert kept[:first] == [[]] * first and all(len(spans) == 3 for spans in kept[first:])
    for one, following in pairwise(kept[first:]):
        assert max(end for _, end in one) <= min(start for start, _ in following)
    assert kept[-1] == plan.spans() and plan.spans(n) == plan.spans(-1) == []
