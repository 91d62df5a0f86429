"""Capture, update, launch and destroy on the embedded device. Any plans: test_plans_property.py;
what every device's plans keep: tests/contract."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from itertools import pairwise

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import (
    Log,
    address,
    count_parts,
    meet,
    open_backend,
    planned,
    records,
    spins,
    waits,
)
from tests.gates import hold
from workbench.backend.cpu.device import loops
from workbench.backend.cpu.device.loops import RING_SIZE
from workbench.common.errors import DeviceError
from workbench.program.commands import COPY_STREAM, Space

SIDE = range(2, 9)  # the compute streams beside the first


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


def test_every_part_runs_once_alone_and_in_plans(device):
    """And a kernel starts when the one before it is complete: a lost addition would be an overlap.
    A full ring makes the host wait: the entry of a kernel with parts left is not written over."""
    words, ring, parts = np.zeros(16, np.int64), device.streams[0], (1, 2, 3, 7, 16)
    calls = [ring.prepare(count_parts.address, p, (address(words),)) for p in parts]
    plan = device.capture(planned(device, [(call, 0) for call in calls]))
    with hold(device, 0) as gate:
        timer = threading.Timer(0.05, gate.open)
        timer.start()
        for _ in range(RING_SIZE):
            for call in (*calls, plan.launch):
                call()
        assert timer.finished.is_set()
    device.synchronize()
    found = [2 * RING_SIZE * sum(p > part for p in parts) for part in range(16)]
    assert words.tolist() == found


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
    log.device = None
    refs = [weakref.ref(thing) for thing in (plan, twin, device)]
    del plan, twin, device, work, launch
    assert [ref() for ref in refs] == [None] * 3 and threading.active_count() == before
    with pytest.raises(DeviceError, match="closed"):
        call()


def test_spans_are_on_the_host_clock_and_kept_for_a_while(two):
    before, n, first = time.perf_counter_ns(), 2 * loops.N_FIRSTS, loops.N_FIRSTS
    us = 300, 200, 100
    parts = [spins(two, us[0]), spins(two, us[1], parts=3), spins(two, us[2], SIDE[2])]
    plan = two.capture(planned(two, parts))
    assert plan.spans() == []
    begin = two.mark(0)
    plan.launch()
    end = two.mark(0)
    two.synchronize()
    found, whole = plan.spans(), two.resolve(begin, end)
    assert all(e - s >= u * 1000 for (s, e), u in zip(found, us, strict=True))
    assert before <= min(s for s, _ in found) and found[0][1] <= found[1][0]
    assert max(e for _, e in found) <= time.perf_counter_ns()
    assert whole[0] <= found[0][0] and found[-1][1] <= whole[1]
    for i in range(1, n):
        for stream in SIDE[: i % 3]:  # so that numbers of streams differ
            spins(two, 1, stream)[0]()
        plan.launch()
    two.synchronize()
    kept = [plan.spans(i) for i in range(n)]
    assert kept[:first] == [[]] * first and all(len(spans) == 3 for spans in kept[first:])
    for one, following in pairwise(kept[first:]):
        assert max(end for _, end in one) <= min(start for start, _ in following)
    assert kept[-1] == plan.spans() and plan.spans(n) == plan.spans(-1) == []
    with hold(two):
        plan.launch()
        with pytest.raises(DeviceError, match="no stamp"):
            plan.spans()
