"""Capture, update, launch and destroy on the embedded device, on lists of small kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import address, append, count_parts, open_backend, rotate
from tests.backend.plan.plannable import Log, planned, records, spins, waits
from tests.gates import hold
from workbench.backend.cpu.device import loops, signals
from workbench.backend.cpu.device.loops import RING_SIZE
from workbench.backend.cpu.device.ring import aligned_zeros
from workbench.backend.issue.issued import together
from workbench.common.errors import DeviceError
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space


def entries(ring) -> int:
    """Entries pushed into a ring so far."""
    return ring.words[loops.FILLED // 8]


# order -------------------------------------------------------------------------------------------


def test_capture_runs_nothing_and_every_launch_runs_every_part_in_order(device):
    log = Log(device)
    plan = device.capture(planned(device, [log.part(v) for v in range(20)]))
    device.synchronize()
    assert log.values == []
    for i in range(10):
        log(100 + i)
        plan.launch()
    log(1000)
    device.synchronize()
    assert log.values == [v for i in range(10) for v in (100 + i, *range(20))] + [1000]
    assert plan.nodes == tuple(range(20)) and plan.launches == 10
    assert plan.capture_ns > 0 and plan.instantiate_ns > 0


def test_a_launch_is_one_entry_of_each_ring_however_long_the_plan(device):
    log = Log(device)
    plan = device.capture(planned(device, [log.part(v, v % 2) for v in range(300)]))
    before = [(entries(ring), ring.issued) for ring in device.streams]
    plan.launch()
    after = [(entries(ring), ring.issued) for ring in device.streams]
    others = [0] * (len(after) - 2)
    assert [b[0] - a[0] for a, b in zip(before, after, strict=True)] == [1, 1, *others]
    assert [b[1] - a[1] for a, b in zip(before, after, strict=True)] == [152, 152, *others]
    device.synchronize()
    assert sorted(log.values) == list(range(300))


def test_workers_share_the_kernels_of_a_plan(device):
    """Every part runs once, and a kernel starts when the one before it is complete: a lost addition
    would be an overlap. More launches than the ring has entries, beside single kernels."""
    words, counted, n = np.zeros(8, np.int64), np.zeros(16, np.int64), RING_SIZE + 500
    ring = device.streams[0]
    parts = [(ring.prepare(rotate.address, 8, (address(words), s)), 0) for s in range(4)]
    parts += [(ring.prepare(count_parts.address, p, (address(counted),)), 0) for p in (1, 3, 16)]
    plan = device.capture(planned(device, parts))
    alone = ring.prepare(rotate.address, 8, (address(words), 5))
    for _ in range(n):
        plan.launch()
        alone()
    device.synchronize()
    np.testing.assert_array_equal(words, 5 * n)
    assert counted.tolist() == [n * sum(p > part for p in (1, 3, 16)) for part in range(16)]


def test_the_parts_of_parts_are_nodes_of_their_part(two):
    log = Log(two)
    fused = together([log.part(1)[0], together([log.part(2)[0], log.part(3)[0]], ("in",))])
    plan = two.capture(planned(two, [log.part(0), (fused, 0), log.part(4)]))
    plan.launch()
    two.synchronize()
    assert log.values == [0, 1, 2, 3, 4] and plan.nodes == (0, 1, 1, 1, 2)


def test_a_full_ring_makes_a_launch_wait(two):
    log = Log(two, 2 * (RING_SIZE + 100))
    plan = two.capture(planned(two, [log.part(0), log.part(1, COPY_STREAM)]))
    with hold(two, 0) as gate:
        threading.Timer(0.1, gate.open).start()
        for _ in range(RING_SIZE + 100):
            plan.launch()
    two.synchronize()
    assert log.words[0] == 2 * (RING_SIZE + 100)


def test_a_ring_that_empties_itself_while_the_host_looks_at_it_has_room(two, monkeypatch):
    """The host may be put aside between any two looks. It waits for no kernel that nobody queued:
    `completed` here opens the gate and comes back when the ring is empty."""
    ring, log = two.streams[0], Log(two, RING_SIZE + 100)
    completed, waited = type(ring).completed.fget, []

    def drained(ring):
        gate.open()
        while completed(ring) < ring.issued:
            time.sleep(0.001)
        return completed(ring)

    def wait(ring, number):
        waited.append(number <= ring.issued)

    with hold(two, 0) as gate:
        one = log.part(0)[0]
        while ring.words[loops.FILLED // 8] - ring.words[loops.OVER // 8] < RING_SIZE:
            one()
        with monkeypatch.context() as patch:
            patch.setattr(type(ring), "completed", property(drained))
            patch.setattr(type(ring), "wait", wait)
            ring.await_room()
    assert all(waited) and ring.completed == ring.issued


# two streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False])
def test_no_part_begins_before_what_is_in_front_of_the_plan(two, captured):
    """Also no part on another stream, on which nothing is queued; also where the parts are issued
    one by one."""
    log = Log(two)
    work = planned(two, [log.part(2, COPY_STREAM), log.part(3)])
    plan = two.capture(work)
    with hold(two, COMPUTE_STREAM):
        log(1)
        (plan.launch if captured else work.call)()
        time.sleep(0.01)
        assert log.values == []
    two.synchronize()
    assert log.values[0] == 1 and sorted(log.values) == [1, 2, 3]


@pytest.mark.parametrize("captured", [True, False])
def test_what_is_behind_a_plan_waits_for_its_parts_on_every_stream(two, captured):
    log = Log(two)
    work = planned(two, [log.part(2, COPY_STREAM), log.part(1)])
    plan = two.capture(work)
    with hold(two, COPY_STREAM):
        (plan.launch if captured else work.call)()
        log(3)
        two.streams[0].wait(two.streams[0].issued - 2)  # all but the end of the plan and the 3
        assert log.values == [1]
    two.synchronize()
    assert log.values == [1, 2, 3]


def test_a_plan_on_the_copy_stream_is_ordered_there(two):
    log = Log(two)
    plan = two.capture(planned(two, [log.part(2), log.part(3, COPY_STREAM)], stream=COPY_STREAM))
    with hold(two, COPY_STREAM):
        log(1, COPY_STREAM)
        plan.launch()
        log(4, COPY_STREAM)
        time.sleep(0.01)
        assert log.values == []
    two.synchronize()
    assert log.values[0] == 1 and log.values[3] == 4


def copy_and_use(device, ordered: bool, copies: int = COPY_STREAM):
    """A plan that copies `source` up, and down again from the compute stream; and the arrays.
    ordered: the compute stream waits for an event behind the first copy."""
    source, there, result = (device.allocate(64, s) for s in
                             (Space.PINNED, Space.DEVICE, Space.PINNED))  # fmt: skip
    up = device.copy(there.address, source.address, 64, copies, to_host=False)
    down = device.copy(result.address, there.address, 64, COMPUTE_STREAM, to_host=True)
    event = device.event()
    order = [records(device, event, copies), waits(device, event, COMPUTE_STREAM)]
    parts = [(up, copies), *(order if ordered else []), (down, COMPUTE_STREAM)]
    return planned(device, parts), source, result, there


def test_a_copy_recorded_on_the_wrong_stream_gives_a_wrong_answer(two):
    """The planted bug: nothing in the plan orders the copy in front of what reads it. The same plan
    with the event is right, behind the same gate; and so is the copy on the right stream."""
    work, source, result, _kept = copy_and_use(two, ordered=False)
    plan = two.capture(work)
    source.array[:] = 7
    with hold(two, COPY_STREAM):
        plan.launch()
        two.streams[0].wait(two.streams[0].issued - 1)  # all but the end of the plan
    two.synchronize()
    assert (result.array == 0).all()

    for ordered, copies in ((True, COPY_STREAM), (False, COMPUTE_STREAM)):
        work, source, result, _kept = copy_and_use(two, ordered, copies)
        plan = two.capture(work)
        for value in (7, 8):  # a wait is for the same launch of the plan, not for the first
            source.array[:] = value
            with hold(two, COPY_STREAM):
                plan.launch()
                time.sleep(0.005)
            two.synchronize()
            assert (result.array == value).all()


def test_a_copy_of_a_plan_reads_its_source_late(two):
    work, source, result, _kept = copy_and_use(two, ordered=True)
    plan = two.capture(work)
    source.array[:] = 1
    with hold(two, COMPUTE_STREAM):
        plan.launch()
        source.array[:] = 2  # breaks the contract
    two.synchronize()
    assert (result.array == 2).all()


def test_streams_of_a_plan_run_side_by_side(two):
    plan = two.capture(planned(two, [spins(two, 20_000), spins(two, 20_000, COPY_STREAM)]))
    plan.launch()
    two.synchronize()
    (start0, end0), (start1, end1) = plan.spans()
    assert max(start0, start1) < min(end0, end1)


def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; fails after five seconds."""
    end = time.perf_counter() + 5
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.0001)


def test_a_wait_is_for_the_latest_record_before_it(two):
    """Recorded twice, with a gate in between: the first wait does not wait for the second record,
    and the second does."""
    log, event, ring = Log(two), two.event(), two.streams[COPY_STREAM]
    gate = aligned_zeros(signals.SIGNAL_BYTES)
    signals.init_signal(address(gate))
    held = ring.prepare(loops.AWAIT, 1, (address(gate), 1, ring.address))
    parts = [
        log.part(1, COPY_STREAM), records(two, event, COPY_STREAM), waits(two, event, 0),
        log.part(2), (held, COPY_STREAM), log.part(3, COPY_STREAM),
        records(two, event, COPY_STREAM), waits(two, event, 0), waits(two, event, COPY_STREAM),
        log.part(4),
    ]  # fmt: skip
    plan = two.capture(planned(two, parts))
    assert plan.nodes == (0, 3, 4, 5, 9)
    plan.launch()
    until(lambda: log.values == [1, 2])
    signals.publish(address(gate), 1)
    for _ in range(20):
        plan.launch()
    two.synchronize()
    launches = np.reshape(log.values, (21, 4)).tolist()
    assert launches[0] == [1, 2, 3, 4] and all(sorted(v) == [1, 2, 3, 4] for v in launches)
    assert all(v.index(1) < v.index(2) and v.index(3) < v.index(4) for v in launches)


def test_what_no_plan_can_have_is_refused_in_one_line(two):
    log, event = Log(two), two.event()
    with pytest.raises(DeviceError, match=r"^a plan waits for an event that it does not record.*$"):
        two.capture(planned(two, [log.part(1), waits(two, event, COPY_STREAM)]))
    with pytest.raises(DeviceError, match=r"^a plan without launches and copies.*$"):
        two.capture(planned(two, [records(two, event, 0)]))
    two.synchronize()
    assert log.values == []


@pytest.mark.parametrize(("space", "refused"), [(Space.HOST, True), (Space.PINNED, False)])
def test_a_copy_that_takes_its_bytes_at_the_call_is_in_no_plan(space, refused):
    device = open_backend(threads=1, pageable="snapshot")
    source, there = device.allocate(64, space), device.allocate(64, Space.DEVICE)
    up = device.copy(there.address, source.address, 64, COPY_STREAM, to_host=False)
    log = Log(device)
    work = planned(device, [log.part(1), (up, COPY_STREAM)])
    if refused:
        with pytest.raises(DeviceError, match=r"^a snapshot copy .* use host_source=pinned.*$"):
            device.capture(work)
        assert not device._retired
        work()  # which is issued one by one as ever
    else:
        plan = device.capture(work)
        plan.launch()
    device.synchronize()
    assert log.values == [1]
    device.close()


# update ------------------------------------------------------------------------------------------


def test_an_update_patches_what_changed(device):
    one, other = Log(device), Log(device)
    work = planned(device, [one.part(1), spins(device, 0), one.part(2, COPY_STREAM)])
    plan = device.capture(work)
    plan.launch()
    work.parts[2].block[0] = address(other.words)
    plan.launch()  # a recording has copies of the arguments
    device.synchronize()
    assert one.values.count(2) == 2
    assert plan.update(work, [2])
    plan.launch()
    device.synchronize()
    assert one.values.count(1) == 3 and one.values.count(2) == 2 and other.values == [2]
    work.parts[0].block[1] = 5
    assert plan.update(work, None)
    plan.launch()
    device.synchronize()
    assert one.values[-1] == 5 and other.values == [2, 2]


def test_what_is_queued_runs_as_it_was(device):
    log = Log(device)
    work = planned(device, [log.part(1), log.part(2)])
    plan = device.capture(work)
    with hold(device):
        for value in range(3, 8):
            plan.launch()
            work.parts[1].block[1] = value
            assert plan.update(work, [1])
        plan.launch()
    device.synchronize()
    assert log.values == [v for value in range(2, 8) for v in (1, value)]


def test_another_topology_is_refused_and_changes_nothing(two):
    log, event = Log(two), two.event()
    up, back = records(two, event, COPY_STREAM), waits(two, event, 0)
    parts = [log.part(1, COPY_STREAM), up, back, log.part(2), log.part(3)]
    work = planned(two, parts)
    plan = two.capture(work)
    other = spins(two, 0)
    again = two.streams[0].prepare(append.address, 2, (address(log.words), 2)), 0
    for changed in (
        [log.part(1), *parts[1:]],  # a stream
        [*parts[:3], parts[4]],  # a part less
        [*parts, other],  # a part more
        [*parts[:4], other],  # a function
        [*parts[:3], again, parts[4]],  # the parts of a kernel
        [parts[0], *parts[2:], up][:1] + parts[3:],  # no events
        [parts[0], up, parts[3], back, parts[4]],  # the order of an event
    ):
        assert not plan.update(planned(two, changed), None)
    assert not plan.update(planned(two, parts, stream=COPY_STREAM), None)
    plan.launch()
    two.synchronize()
    assert log.values == [1, 2, 3]
    assert plan.update(planned(two, parts), None)


def test_a_changed_event_is_looked_at_as_a_topology(two):
    """Both waits are for the second event after the patch: other signals, so another topology."""
    log, first, second = Log(two), two.event(), two.event()
    parts = [
        log.part(1, COPY_STREAM), records(two, first, COPY_STREAM), log.part(2, COPY_STREAM),
        records(two, second, COPY_STREAM), waits(two, first, 0), log.part(3),
        waits(two, second, 0),
    ]  # fmt: skip
    work = planned(two, parts)
    plan = two.capture(work)
    work.parts[4].block[0] = second.address
    assert not plan.update(work, [4])
    third = two.event()
    for part in (3, 4, 6):
        work.parts[part].block[0] = third.address
    assert not plan.update(work, [3, 4, 6])
    work.parts[4].block[0] = first.address
    assert plan.update(work, [3, 6])
