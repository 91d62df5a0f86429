"""The embedded device's compute streams beside the first: threads of their own, started at first
use; order by events alone, outside and inside plans; and any end."""

from __future__ import annotations

import _thread
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.backend.cpu.device_kernels import address, open_backend, spin
from tests.backend.plan.plannable import Log, Part, planned, records, spins, waits
from tests.gates import hold
from workbench.backend.cpu.device.embedded import SHARE
from workbench.common.errors import DeviceError
from workbench.program.commands import COPY_STREAM, Space, compute_stream

SIDE = [compute_stream(k) for k in range(1, 8)]
COMPUTE = [compute_stream(0), *SIDE]
ALL = [*COMPUTE, COPY_STREAM]


@pytest.fixture
def one():
    """The embedded device with one worker."""
    backend = open_backend(threads=1)
    yield backend
    backend.close()


def threads_of(device: Any) -> int:
    return sum(len(ring._threads) for ring in device.streams)


# threads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_nobody_pays_for_a_stream_that_no_program_uses(workers):
    device, share = open_backend(threads=workers), max(1, workers // SHARE)
    before = workers + 1
    assert threads_of(device) == before
    event = device.event()
    device.record(event, SIDE[0])()
    device.sync_stream(SIDE[1])()
    device.synchronize()
    device.sync_event(event)()
    assert threads_of(device) == before, "nothing is to be done on them"
    for n, stream in enumerate(SIDE, start=1):
        for _ in range(2):
            spins(device, 0, stream)[0]()
        assert threads_of(device) == before + n * share
    device.close()
    assert not any(t.is_alive() for ring in device.streams for t in ring._threads)


def test_threads_of_a_stream_are_started_once_by_whoever_comes_first(two):
    for stream in SIDE:
        begin = threading.Barrier(4)

        def use(stream: int = stream, begin: threading.Barrier = begin) -> None:
            begin.wait()
            spins(two, 0, stream)[0]()

        users = [threading.Thread(target=use) for _ in range(4)]
        for user in users:
            user.start()
        for user in users:
            user.join()
    two.synchronize()
    assert threads_of(two) == 3 + len(SIDE)


def test_idle_side_streams_cost_next_to_nothing(two):
    for stream in ALL:
        spins(two, 0, stream)[0]()
    two.synchronize()
    time.sleep(0.02)  # past the time they stay awake
    cpu, wall = time.process_time(), time.perf_counter()
    time.sleep(0.5)
    assert (time.process_time() - cpu) / (time.perf_counter() - wall) < 0.03


def test_streams_that_wait_for_an_event_sleep_and_hold_no_worker(one):
    event, log = one.event(), Log(one)
    with hold(one, SIDE[0]):
        one.record(event, SIDE[0])()
        for stream in [COPY_STREAM, *SIDE[1:6]]:
            one.wait(event, stream)()
            log(1, stream)
        time.sleep(0.02)
        cpu = time.process_time()
        log(0)
        log(0, SIDE[6])
        one.sync_stream(0)()
        one.sync_stream(SIDE[6])()
        time.sleep(0.3)
        assert log.values == [0, 0] and time.process_time() - cpu < 0.05
    one.synchronize()
    assert log.values == [0, 0, *[1] * 6]


FORKED = """
import os, signal
from tests.gates import hold
from workbench.backend.cpu.device import loops
from workbench.backend.cpu.device.embedded import open_backend
from workbench.common.errors import DeviceError
device = open_backend(threads=1)
device.synchronize()
if os.fork():
    print(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    signal.alarm(20)
    for stream in (0, 3):  # one that was used before, one that was not
        try:
            hold(device, stream)
            device.sync_stream(stream)()
        except DeviceError as error:
            print(error, flush=True)
    os._exit(7)
"""


def test_a_process_forked_behind_the_device_is_told_of_every_stream():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60
    )
    lost = "embedded stream {} has lost its threads; open the backend after a fork, not before"
    assert done.stdout.splitlines() == [lost.format(0), lost.format(3), "7"], done.stderr


# order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_nine_streams_that_wait_for_each_other_in_any_order_never_deadlock(one, seed):
    """Each waits for the one before it in an order that changes from round to round, so that
    streams wait for each other in circles. The first is held, so everything is queued by then."""
    chance, log = random.Random(seed), Log(one)
    made = {stream: one.event() for stream in ALL}
    before, n = None, 0
    with hold(one, ALL[0]):
        for number in range(20):
            order = random.Random(seed).sample(ALL[1:], 8) if number == 0 else chance.sample(ALL, 9)
            for stream in [ALL[0], *order] if number == 0 else order:
                if before is not None:
                    one.wait(made[before], stream)()
                log(n, stream)
                one.record(made[stream], stream)()
                before, n = stream, n + 1
        assert log.values == []
    one.synchronize()
    assert log.values == [*range(n)]


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


@pytest.mark.parametrize("seed", range(12))
def test_random_work_on_nine_streams_keeps_its_order_one_by_one_and_in_plans(device, seed):
    """More threads than cores. A plan, its update and its twin run what the parts do one by one,
    each launch behind the one before, whoever else is queued."""
    chance, n, launches = random.Random(seed), 60, 12
    log = Log(device, n * (launches + 1))
    parts, after = random_parts(device, log, chance, n)
    work = planned(device, parts)
    plan = device.capture(work)
    twin = plan.twin(work, [])
    calls = [work.call, plan.launch, twin.launch]
    for i in range(launches):
        if i == launches // 2:
            assert plan.update(work, None)
        chance.choice(calls)()
    device.synchronize()
    found = np.reshape(log.values, (launches, n)).tolist()
    assert all(sorted(values) == [*range(n)] for values in found)
    assert all(in_order(values, after) for values in found)


def nested(device: Any, log: Log) -> list[Part]:
    """A fork in a branch: 0 -> (2 -> (3, 4) -> 2), 5 -> 0."""
    out, inner, back, end, aside = (device.event() for _ in range(5))
    third = device.event()
    return [
        log.part(0), records(device, out, 0),
        waits(device, out, 2), log.part(1, 2), records(device, inner, 2),
        waits(device, inner, 3), log.part(2, 3), records(device, back, 3),
        waits(device, inner, 4), log.part(3, 4), records(device, third, 4),
        waits(device, back, 2), waits(device, third, 2), log.part(4, 2), records(device, end, 2),
        waits(device, out, 5), log.part(5, 5), records(device, aside, 5),
        waits(device, end, 0), waits(device, aside, 0), log.part(6),
    ]  # fmt: skip


def staggered(device: Any, log: Log) -> list[Part]:
    """Branches 2, 3 and 4; 2 and 3 are joined, and then 4."""
    out, *ends = (device.event() for _ in range(4))
    parts = [log.part(0), records(device, out, 0)]
    for i, stream in enumerate((2, 3, 4)):
        parts += [waits(device, out, stream), log.part(1 + i, stream)]
        parts += [records(device, ends[i], stream)]
    return [
        *parts, waits(device, ends[0], 0), waits(device, ends[1], 0), log.part(4),
        waits(device, ends[2], 0), log.part(5),
    ]  # fmt: skip


AFTER = {
    nested: [set(), {0}, {1}, {1}, {2, 3}, {0}, {4, 5}],
    staggered: [set(), {0}, {0}, {0}, {1, 2}, {3, 4}],
}


@pytest.mark.parametrize("held", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [nested, staggered], ids=lambda f: f.__name__)
def test_joins_wait_for_their_branches_and_for_no_others(device, shape, held):
    log, after = Log(device), AFTER[shape]
    parts = shape(device, log)
    work = planned(device, parts)
    plan = device.capture(work)
    on = [part[1] for part in parts if part[0].same[0] not in ("record", "wait")]
    stuck: set[int] = set()
    for i, before in enumerate(after):
        if on[i] == held or before & stuck:
            stuck.add(i)
    for call in (work.call, plan.launch):
        log.words[:] = 0
        if held == 0:  # then nothing of a plan begins
            stuck = set(range(len(after)))
        with hold(device, held):
            call()
            end = time.perf_counter() + 5
            while len(log.values) < len(after) - len(stuck) and time.perf_counter() < end:
                time.sleep(0.001)
            time.sleep(0.002)
            assert set(log.values) == set(range(len(after))) - stuck
        device.synchronize()
        assert sorted(log.values) == [*range(len(after))] and in_order(log.values, after)


@pytest.mark.parametrize("captured", [False, True], ids=["one by one", "in a plan"])
@pytest.mark.parametrize("workers", [1, 2])
def test_branches_run_at_the_same_time(captured, workers):
    device = open_backend(threads=workers)
    streams = [0, *SIDE[:2]]
    work = planned(device, [spins(device, 30_000, stream) for stream in streams])
    plan = device.capture(work)
    begin = [device.mark(stream) for stream in streams]
    (plan.launch if captured else work.call)()
    end = [device.mark(stream) for stream in streams]
    device.synchronize()
    if captured:
        found = plan.spans()
    else:
        found = [device.resolve(*marks) for marks in zip(begin, end, strict=True)]
    assert max(start for start, _ in found) < min(end for _, end in found)
    device.close()


def test_a_stream_that_only_records_in_a_plan_has_threads(two):
    log, event = Log(two), two.event()
    parts = [log.part(1), records(two, event, SIDE[4]), waits(two, event, 0), log.part(2)]
    plan = two.capture(planned(two, parts))
    for _ in range(3):
        plan.launch()
    two.synchronize()
    assert log.values == [1, 2] * 3


def test_an_event_means_its_latest_record_whichever_stream_that_was_on(two):
    log, event = Log(two), two.event()
    with hold(two, SIDE[0]):
        two.record(event, SIDE[0])()
        two.record(event, SIDE[1])()
        two.wait(event, SIDE[2])()
        log(1, SIDE[2])
        two.sync_stream(SIDE[2])()
        two.sync_event(event)()
        two.record(event, SIDE[0])()
        two.wait(event, SIDE[2])()
        log(2, SIDE[2])
        time.sleep(0.005)
        assert log.values == [1]
    two.synchronize()
    assert log.values == [1, 2]


# updates and twins of forked plans ----------------------------------------------------------------


def test_what_is_queued_of_a_forked_plan_runs_as_it_was(device):
    log = Log(device)
    work = planned(device, staggered(device, log))
    plan = device.capture(work)
    (number,) = [i for i, part in enumerate(work.parts) if part.block and 2 in list(part.block)[1:]]
    twins = []
    with hold(device, SIDE[1]):
        for value in range(100, 108):
            plan.launch()
            work.parts[number].block[1] = value
            assert plan.update(work, [number])
            twins.append(plan.twin(work, []))
        for twin in twins:
            twin.launch()
    device.synchronize()
    found = np.reshape(log.values, (16, 6))
    taken = [{*row} - {0, 1, 3, 4, 5} for row in found.tolist()]
    assert taken == [{value} for value in (2, *range(100, 107), *range(100, 108))]
    assert all(row.index(0) == 0 and row[-1] == 5 for row in found.tolist())


def test_a_forked_plan_refuses_work_forked_otherwise(two):
    log = Log(two)
    plan = two.capture(planned(two, staggered(two, log)))
    assert not plan.update(planned(two, nested(two, log)), None)
    same = planned(two, staggered(two, log))
    assert plan.update(same, None)
    plan.launch()
    two.synchronize()
    assert sorted(log.values) == [*range(6)]


# time --------------------------------------------------------------------------------------------


def test_marks_and_spans_of_streams_that_were_started_later(two):
    before = [two.mark(stream) for stream in SIDE]
    spins(two, 200, SIDE[2])[0]()
    after = [two.mark(stream) for stream in SIDE]
    two.synchronize()
    found = [two.resolve(*marks) for marks in zip(before, after, strict=True)]
    assert [end - start >= 200_000 for start, end in found] == [i == 2 for i in range(7)]
    assert [pair for i, pair in enumerate(found) if i != 2] == [(0, 0)] * 6


def test_spans_of_launches_are_of_each_stream_s_own(two):
    parts = [spins(two, 100 * (1 + i), stream) for i, stream in enumerate([0, *SIDE[:3]])]
    plan = two.capture(planned(two, [*parts, *parts]))
    for i in range(5):
        for stream in SIDE[: i % 3]:  # so that numbers of streams differ
            spins(two, 1, stream)[0]()
        plan.launch()
    two.synchronize()
    launches = [plan.spans(i) for i in range(5)]
    for spans in launches:
        assert [(e - s) // 100_000 >= 1 + i % 4 for i, (s, e) in enumerate(spans)] == [True] * 8
        assert all(spans[i][1] <= spans[i + 4][0] for i in range(4))
    for earlier, later in pairwise(launches):
        assert max(end for _, end in earlier) <= min(start for start, _ in later)


# memory and ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [SIDE[0], SIDE[-1]])
def test_memory_freed_too_early_stays_until_a_side_stream_is_done(two, stream):
    source, result = (two.allocate(400_000, space) for space in (Space.PINNED, Space.PINNED))
    source.array[:] = 3
    with hold(two, stream):
        two.copy(result.address, source.address, source.nbytes, stream, to_host=True)()
        source.free()
        two._keep(None)
        assert two._retired
        np.zeros(400_000, np.uint8)[:] = 5  # would take the freed block
    two.sync_stream(stream)()
    assert (result.array == 3).all()
    two._keep(None)
    assert not two._retired


def test_closing_drains_streams_that_wait_for_each_other(device):
    log, made = Log(device), {stream: device.event() for stream in ALL}
    for stream in reversed(ALL):
        hold(device, stream)  # closing opens them
    for before, stream in pairwise(reversed(ALL)):
        device.record(made[before], before)()
        device.wait(made[before], stream)()
        log(stream, stream)
    device.close()
    assert log.values == [*reversed(ALL)][1:]
    device.close()
    with pytest.raises(DeviceError, match=r"^embedded stream 5 is closed; open a new backend$"):
        log(1, 5)


def test_an_interrupted_close_ends_every_stream_however_stuck(two):
    """The gate stays shut: only its stream's end lets the kernel there go."""
    close, log = two.close, Log(two)
    hold(two, SIDE[2])
    event = two.event()
    two.record(event, SIDE[2])()
    for stream in (0, COPY_STREAM, SIDE[0], SIDE[6]):
        two.wait(event, stream)()
        log(stream, stream)
    threading.Timer(0.1, _thread.interrupt_main).start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        close()
    assert time.perf_counter() - start < 5 and log.values == []
    assert not any(t.is_alive() for ring in two.streams for t in ring._threads)
    close()


def ended(how: str, log: Log) -> list[weakref.ref]:
    log._device = device = open_backend(threads=2)
    plan = device.capture(planned(device, nested(device, log)))
    twin = plan.twin(planned(device, nested(device, log)), [])
    for _ in range(3):
        plan.launch()
        twin.launch()
    if how == "plan first":
        plan.destroy()
        device.close()
    elif how == "device first":
        device.close()
        twin.destroy()
        plan.destroy()
    if how != "nobody":
        assert len(log.values) == 6 * 7
    log._device = None
    return [weakref.ref(thing) for thing in (plan, twin, device)]


@pytest.mark.parametrize("how", ["plan first", "device first", "nobody"])
def test_devices_and_forked_plans_end_in_any_order_with_work_queued(how):
    gc.collect()
    before = threading.active_count()
    logs = [Log(None) for _ in range(15)]  # where nobody waits, kernels write until a device ends
    refs = [ref for log in logs for ref in ended(how, log)]
    assert [ref() for ref in refs] == [None] * len(refs)
    assert threading.active_count() == before


def test_a_device_that_nobody_closed_ends_with_its_side_streams_stuck():
    before = threading.active_count()
    device = open_backend(threads=1)
    words = np.zeros(8, np.int64)
    for stream in SIDE:
        device.streams[stream].push(spin.address, 1, (1000,))
    event = device.event()
    gate = hold(device, SIDE[3])
    device.record(event, SIDE[3])()
    for stream in (0, SIDE[0]):
        device.wait(event, stream)()
    assert threading.active_count() == before + 9 and address(words)
    device._end()  # what its last reference does
    assert threading.active_count() == before
    gate.open()
