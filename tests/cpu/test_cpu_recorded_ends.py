"""How plans of the embedded device end, and when their nodes run."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
import weakref
from itertools import pairwise

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import open_backend
from tests.backend.plan.plannable import Log, planned, spins
from tests.gates import hold
from workbench.backend.cpu.device import loops
from workbench.common.errors import DeviceError
from workbench.program.commands import COPY_STREAM


def test_a_destroyed_plan_is_not_launched(two):
    log = Log(two)
    plan = two.capture(planned(two, [log.part(1)]))
    launch = plan.launch
    with hold(two):
        launch()
        plan.destroy()
        plan.destroy()
        for call in (plan.launch, launch):
            with pytest.raises(DeviceError, match=r"^this plan is destroyed; capture .*$"):
                call()
        assert two._retired  # what is queued needs it
    two.synchronize()
    assert log.values == [1]
    log(2)
    two.synchronize()
    assert log.values == [1, 2]


def test_memory_of_a_destroyed_plan_lives_until_its_launches_are_over(two):
    log = Log(two)
    with hold(two):
        for value in range(50):
            plan = two.capture(planned(two, [log.part(value), log.part(value, COPY_STREAM)]))
            plan.launch()
            del plan  # the last reference
            np.full(1 << 12, 0xEE, np.uint8)  # would take the freed block
    two.synchronize()
    assert sorted(log.values) == sorted([*range(50), *range(50)])
    assert [v for i, v in enumerate(log.values) if v not in log.values[:i]] == [*range(50)]


def test_a_plan_of_a_closed_device(two):
    log = Log(two)
    plans = [two.capture(planned(two, [log.part(v, v % 2)])) for v in range(2)]
    for plan in plans:
        plan.launch()
    two.close()
    assert sorted(log.values) == [0, 1]
    for plan in plans:
        with pytest.raises(
            DeviceError, match=r"^embedded stream \d is closed; open a new backend$"
        ):
            plan.launch()
        plan.destroy()
        with pytest.raises(DeviceError, match="this plan is destroyed"):
            plan.launch()
    with pytest.raises(DeviceError, match="closed"):
        two.capture(planned(two, [log.part(1)]))


def cycle(order: int, device, log: Log) -> list[weakref.ref]:
    """Captures, launches, updates and destroys a plan; by `order` explicitly, by its last
    reference, or twice."""
    work = planned(device, [log.part(1), log.part(2, COPY_STREAM), spins(device, 0)])
    plan = device.capture(work)
    plan.launch()
    work.parts[0].block[1] = 3
    plan.update(work, [0])
    plan.launch()
    for _ in range(order % 3):
        plan.destroy()
    return [weakref.ref(plan), weakref.ref(work)]


def test_hundreds_of_plans_leave_nothing_behind(two):
    def many(n: int) -> list[weakref.ref]:
        log = Log(two, 4 * n)
        made = [ref for i in range(n) for ref in cycle(i, two, log)]
        two.synchronize()
        assert len(log.values) == 4 * n
        two._keep(None)  # looks what is over
        assert not two._retired
        return made

    def traced() -> int:
        gc.collect()  # empties Python's free lists
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    many(100)
    grown = []
    for _ in range(3):  # what is left behind comes every time; what others begin or end, once
        before = traced()
        gone = [ref() for ref in many(300)]
        assert gone == [None] * 600, "without the collector's help"
        grown.append(traced() - before)
    tracemalloc.stop()
    assert min(grown) < 30_000  # 100 bytes a plan; its nodes alone have 1500


def ended(order: str, plan_goes_first: bool, log: Log) -> list[weakref.ref]:
    """A device and a plan of it, closed and destroyed in an order and then let go in another."""
    log._device = device = open_backend(threads=2)
    plan = device.capture(planned(device, [log.part(1), log.part(2, COPY_STREAM)]))
    plan.launch()
    if order == "plan":
        plan.destroy()
    if order != "neither":
        device.close()
        plan.destroy()
        assert sorted(log.values) == [1, 2]
    log._device = None
    refs = [weakref.ref(plan), weakref.ref(device)]
    if plan_goes_first:
        del plan
    del device
    return refs


@pytest.mark.parametrize("order", ["plan", "device", "neither"])
def test_plans_and_devices_end_in_any_order(order):
    """A hundred cycles in all."""
    gc.collect()
    before = threading.active_count()
    logs = [Log(None) for _ in range(34)]  # where nobody waits, kernels write until a device ends
    refs = [ref for i, log in enumerate(logs) for ref in ended(order, bool(i % 2), log)]
    assert [ref() for ref in refs] == [None] * 68
    assert threading.active_count() == before


# when --------------------------------------------------------------------------------------------


def test_spans_of_each_node_are_on_the_host_clock_and_in_order(device):
    before = time.perf_counter_ns()
    parts = [spins(device, 300), spins(device, 200, parts=3), spins(device, 100, COPY_STREAM)]
    plan = device.capture(planned(device, parts))
    assert plan.spans() == []
    begin = device.mark(0)
    plan.launch()
    end = device.mark(0)
    device.synchronize()
    after = time.perf_counter_ns()
    found = plan.spans()
    assert [e - s >= us * 1000 for (s, e), us in zip(found, (300, 200, 100), strict=True)]
    assert before <= min(s for s, _ in found) < max(e for _, e in found) <= after
    assert found[0][1] <= found[1][0]
    whole = device.resolve(begin, end)
    assert whole[0] <= found[0][0] and found[-1][1] <= whole[1]


def test_spans_of_earlier_launches(two):
    plan = two.capture(planned(two, [spins(two, 1), spins(two, 1, COPY_STREAM), spins(two, 1)]))
    n = 2 * loops.N_FIRSTS
    for _ in range(n):
        plan.launch()
    two.synchronize()
    assert plan.launches == n
    kept = [plan.spans(i) for i in range(n)]
    assert kept[: n - loops.N_FIRSTS] == [[]] * (n - loops.N_FIRSTS)
    late = kept[n - loops.N_FIRSTS :]
    assert all(len(spans) == 3 for spans in late) and late[-1] == plan.spans()
    for one, following in pairwise(late):
        assert max(end for _, end in one) <= min(start for start, _ in following)
    assert plan.spans(n) == plan.spans(-1) == []


def test_spans_of_a_launch_under_way_are_refused(two):
    plan = two.capture(planned(two, [spins(two, 1)]))
    with hold(two):
        plan.launch()
        with pytest.raises(DeviceError, match="no stamp"):
            plan.spans()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_plan_runs_while_python_has_the_gil(workers, no_handover):
    """5 ms of kernels on two streams are one launch; the host then does nothing but Python and
    never gives the GIL up."""
    device = open_backend(threads=workers)
    parts = [spins(device, 50, i % 2) for i in range(100)]
    plan = device.capture(planned(device, parts))
    start = time.perf_counter_ns()
    plan.launch()
    end = device.streams[0].issued
    while (now := time.perf_counter_ns()) < start + 5_000_000 or (
        device.streams[0].completed < end and now < start + 5_000_000_000
    ):
        pass
    assert device.streams[0].completed == end
    found = plan.spans()
    assert len(found) == 100
    assert start <= min(s for s, _ in found) < max(e for _, e in found) <= time.perf_counter_ns()
    device.close()
