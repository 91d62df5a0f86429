"""The clauses of the contract that are about events, plans, and more than one compute stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.contract.conformance.conformance_clauses import clause
from tests.contract.conformance.conformance_rig import (
    ROW_BYTES,
    Rig,
    expect,
    must_be,
    numbers,
    said,
    trying,
)
from workbench.backend.base import Captured, Memory
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import in_order
from workbench.common.errors import DeviceError
from workbench.program.commands import Space


@clause("an event never recorded holds nobody up", "events", each_stream=False)
def an_event_never_recorded(rig: Rig) -> None:
    _, stop, wait = rig.point(0, 1)
    rig.goes_on(stop, "Sync waited")
    act = in_order([wait, rig.uploads(1), rig.backend.sync_stream(1)])
    rig.goes_on(act, "Wait held its stream up")


@clause("Sync(event) waits for the launches before its Record", "events")
def sync_event_drains_launches(rig: Rig, stream: int) -> None:
    record, stop, _ = rig.point(stream, stream)
    count = rig.long(stream)
    in_order([record, stop])()
    must_be(rig.peek(rig.counter, rig.other(stream)), count)


@clause("Sync(event) waits for the copies before its Record", "ordered events")
def sync_event_drains_copies(rig: Rig, stream: int) -> None:
    record, stop, _ = rig.point(stream, stream)
    for load in rig.loads:
        landing, copy = rig.brought(stream)
        load(stream)
        in_order([copy, record, stop])()
        must_be(landing, 7.0)


@clause("Sync(event) does not wait for what is behind its Record", "events", each_stream=False)
def sync_event_goes_no_further(rig: Rig) -> None:
    record, stop, _ = rig.point(0, 1)
    rig.goes_on(stop, "it waited for launches", before=record)


@clause("Sync(event) means the latest Record", "events", each_stream=False)
def sync_event_means_the_latest(rig: Rig) -> None:
    event = rig.backend.event()
    record, elsewhere = rig.backend.record(event, 0), rig.backend.record(event, 1)
    stop = rig.backend.sync_event(event)
    record()
    count = rig.long(0)
    in_order([record, stop])()
    must_be(rig.peek(rig.counter, 1), count, "it returned at an earlier Record")
    rig.goes_on(in_order([record, elsewhere, stop]), "it waited for one on another stream")


@clause("Wait(event) holds later launches of its stream", "events")
def wait_holds_launches(rig: Rig, stream: int) -> None:
    out, other = rig.device(), rig.other(stream)
    launch = rig.launch(out, rig.counter, other)
    record, _, wait = rig.point(stream, other)
    count = rig.long(stream)
    in_order([record, wait, launch])()
    must_be(rig.fetch(out), count + 1)


@clause("Wait(event) holds later copies of its stream", "ordered events")
def wait_holds_copies(rig: Rig, stream: int) -> None:
    landing, other = rig.host(), rig.other(stream)
    copy = rig.down(landing, rig.counter, other)
    record, _, wait = rig.point(stream, other)
    count = rig.long(stream)
    in_order([record, wait, copy])()
    rig.settle()
    must_be(numbers(landing), count)


@clause("an event stands for the copies before its Record", "ordered events")
def wait_guards_copies(rig: Rig, stream: int) -> None:
    """The pattern `aaaarw`: copies on one stream, launches that read what they bring on another."""
    other = rig.other(stream)
    record, _, wait = rig.point(stream, other)
    for load in rig.loads:
        (_, x, copy), y = rig.taken(7.0, stream), rig.device()
        launch = rig.launch(y, x, other)
        load(stream)
        in_order([copy, record, wait, launch])()
        must_be(rig.fetch(y), 8.0)


@clause("Wait(event) means the latest Record before it", "events", each_stream=False)
def wait_means_the_latest(rig: Rig) -> None:
    out, (record, _, wait) = rig.device(), rig.point(0, 1)
    launch = rig.launch(out, rig.counter, 1)
    record()
    count = rig.long(0)
    in_order([record, wait, launch])()
    must_be(rig.fetch(out), count + 1, "it was over at an earlier Record")
    act = in_order([record, rig.uploads(1), rig.backend.sync_stream(1)])
    rig.goes_on(act, "it was for a Record after it", before=in_order([record, wait]))


@clause("several events keep a point each", "events", each_stream=False)
def several_events(rig: Rig) -> None:
    points = [rig.point(0, 1) for _ in range(4)]
    for order in (range(4), reversed(range(4))):
        counts = []
        for record, *_ in points:
            counts.append(rig.long(0))
            record()
        for i in order:
            points[i][1]()
            found = rig.peek(rig.counter, 1)
            what = f"Sync returned at {said(found)}, event {i} of 4 stands at {counts[i]:g}"
            expect((found >= counts[i]).all(), what)
        rig.settle()
    act = in_order([points[1][0], points[0][1]])
    rig.goes_on(act, "Sync waited for the Record of another event", before=points[0][0])


# several compute streams -------------------------------------------------------------------------


@clause("a stream that waits holds up no other", "several streams", each_stream=False)
def a_wait_holds_its_stream_alone(rig: Rig) -> None:
    """Stream 1 is left to the glance at the long work."""
    event, last = rig.backend.event(), rig.streams[-1]
    waits = [rig.backend.wait(event, stream) for stream in rig.streams[2:-1]]
    act = [rig.backend.record(event, 0), *waits, rig.uploads(last), rig.backend.sync_stream(last)]
    rig.goes_on(in_order(act), "a copy waited for an event that other streams wait for")


@clause("a fork and a join order each branch", "several streams", each_stream=False)
def a_fork_and_a_join(rig: Rig) -> None:
    """All streams begin behind long work on one, and another goes on behind all of them."""
    home, *branches = rig.streams
    out, rows = rig.backend.event(), {stream: rig.device() for stream in branches}
    joined = {stream: rig.device() for stream in branches}
    fork, join = [rig.backend.record(out, home)], []
    for stream in branches:
        end, _, wait = rig.point(stream, home)
        fork += [rig.backend.wait(out, stream), rig.launch(rows[stream], rig.counter, stream), end]
        join.append(wait)
    join += [rig.launch(joined[stream], rows[stream], home) for stream in branches]
    count = rig.long(home)
    in_order([*fork, *join])()
    for stream in branches:
        must_be(rig.fetch(rows[stream]), count + 1, f"stream {stream} did not wait for its fork")
        must_be(rig.fetch(joined[stream]), count + 2, f"a join did not wait for stream {stream}")


@clause("events order streams one behind the other", "several streams", each_stream=False)
def a_chain_of_streams(rig: Rig) -> None:
    """Through all streams, the last first, so that every one waits when the next is queued."""
    order = [*reversed(rig.streams)]
    rows = [rig.counter, *(rig.device() for _ in order)]
    calls = []
    for i, stream in enumerate(order):
        record, _, wait = rig.point(stream, order[(i + 1) % len(order)])
        calls += [rig.launch(rows[i + 1], rows[i], stream), record, wait]
    count = rig.long(order[0])
    in_order(calls)()
    must_be(rig.fetch(rows[-1]), count + len(order))


@clause("a Record on another stream takes an event over", "several streams", each_stream=False)
def the_latest_record_on_whichever_stream(rig: Rig) -> None:
    event, out, last = rig.backend.event(), rig.device(), rig.streams[-1]
    aside, here = rig.backend.record(event, last), rig.backend.record(event, 0)
    wait, launch = rig.backend.wait(event, 1), rig.launch(out, rig.counter, 1)
    aside()
    count = rig.long(0)
    in_order([here, wait, launch])()
    must_be(rig.fetch(out), count + 1, "a Wait was over at an earlier Record")
    act = in_order([here, aside, wait, rig.uploads(1), rig.backend.sync_stream(1)])
    rig.goes_on(act, "a Wait was for an earlier Record than the latest")


# plans -------------------------------------------------------------------------------------------

Part = tuple[Any, int]  # what a backend prepared, and its stream
CHAIN, ROWS = 40, 256  # launches that keep a stream busy within a plan, and rows of each


def captured(rig: Rig, parts: Sequence[Part]) -> tuple[Captured, Any]:
    """A plan of `parts` that is launched on stream 0, and its work."""
    work = plannable(rig.backend, [part for part, _ in parts], 0, [stream for _, stream in parts])
    return rig.backend.capture(work), work


def chain(rig: Rig, stream: int) -> tuple[list[Part], Memory]:
    """Launches that take a while on `stream`, and where they have counted to CHAIN in the end."""
    a, b = (rig.allocate(ROWS * ROW_BYTES, Space.DEVICE) for _ in range(2))
    pair = [rig.launch(b, a, stream, ROWS), rig.launch(a, b, stream, ROWS)]
    return [(part, stream) for part in pair] * (CHAIN // 2), a


def refused(act: Any, what: str) -> None:
    try:
        act()
    except DeviceError as error:
        expect(len(str(error).splitlines()) == 1, "the refusal of a destroyed plan is long")
    else:
        expect(False, what)


@clause("a capture runs nothing, and a launch runs every part in order", "plans", each_stream=False)
def a_launch_runs_every_part(rig: Rig) -> None:
    a, b, landing = rig.device(1.0), rig.device(), rig.host()
    parts = [rig.launch(b, a, 0), rig.launch(a, b, 0), rig.down(landing, a, 0)]
    plan, _ = captured(rig, [(part, 0) for part in parts])
    must_be(rig.fetch(a), 1.0, "a capture ran what it recorded")
    in_order([plan.launch] * 3)()
    must_be(rig.fetch(a), 7.0, "three launches did not run two parts each, in order")
    must_be(numbers(landing), 7.0, "the copy was not behind the launches")
    expect(plan.nodes == (0, 1, 2), f"a plan of three parts says that its nodes are {plan.nodes}")
    plan.destroy()


@clause("no part of a plan begins before what is in front of it", "plans", each_stream=False)
def a_plan_begins_behind_its_stream(rig: Rig) -> None:
    rows = [rig.device(), rig.device()]
    plan, _ = captured(rig, [(rig.launch(rows[s], rig.counter, s), s) for s in (1, 0)])
    plan.launch()  # the first launch may take longer than what is in front of the second
    rig.settle()
    count = rig.long(0)
    plan.launch()
    for stream in (1, 0):
        must_be(rig.fetch(rows[stream]), count + 1, f"a part on stream {stream} overtook")
    plan.destroy()


@clause("what is behind a plan waits for its parts on every stream", "plans", each_stream=False)
def a_stream_goes_on_behind_a_plan(rig: Rig) -> None:
    out, other = rig.device(), rig.device()
    busy, counted = chain(rig, 1)
    plan, _ = captured(rig, [*busy, (rig.launch(other, other, 0), 0)])
    behind = rig.launch(out, counted, 0)
    for launches in (1, 2, 3):
        in_order([plan.launch, behind])()
        must_be(rig.fetch(out), launches * CHAIN + 1)
    plan.destroy()


@clause("a Wait within a plan holds its stream, in every launch", "plans", each_stream=False)
def a_wait_within_a_plan(rig: Rig) -> None:
    out, (busy, counted) = rig.device(), chain(rig, 1)
    record, _, wait = rig.point(1, 0)
    after = [(record, 1), (wait, 0), (rig.launch(out, counted, 0), 0)]
    plan, _ = captured(rig, [*busy, *after])
    for launches in (1, 2, 3):
        plan.launch()
        must_be(rig.fetch(out), launches * CHAIN + 1)
    plan.destroy()


@clause("an update is for later launches, and queued ones run as they were", "plans",
        each_stream=False)  # fmt: skip
def an_update_is_for_later(rig: Rig) -> None:
    a, b, c = rig.device(1.0), rig.device(), rig.device()
    plan, _ = captured(rig, [(rig.launch(b, a, 0), 0), (rig.launch(b, b, 0), 0)])
    moved = plannable(rig.backend, [rig.launch(c, a, 0), rig.launch(c, c, 0)], 0, (0, 0))
    shorter = plannable(rig.backend, [rig.launch(c, a, 0)], 0, (0,))
    rig.long(0)
    plan.launch()
    expect(plan.update(moved, (0, 1)), "an update of addresses was refused")
    must_be(rig.fetch(b), 3.0, "a queued launch was not what it was before the update")
    must_be(rig.fetch(c), 0.0, "a queued launch ran as it was updated later")
    plan.launch()
    must_be(rig.fetch(c), 3.0, "a launch was not what the plan was updated to")
    expect(not plan.update(shorter, None), "an update of another topology was not refused")
    plan.destroy()


@clause("a twin has its own addresses, and leaves the plan that it is of as it is", "plans",
        each_stream=False)  # fmt: skip
def a_twin_has_its_own_addresses(rig: Rig) -> None:
    """The results of one go here, those of the other there, and either may be destroyed first."""
    a, b, here, there = rig.device(1.0), rig.device(), rig.host(), rig.host()
    record, _, wait = rig.point(0, 1)
    parts = [(rig.launch(b, a, 0), 0), (record, 0), (wait, 1), (rig.launch(a, a, 1), 1)]
    plan, first = captured(rig, [*parts, (rig.down(here, b, 0), 0)])
    other, work = captured(rig, [*parts, (rig.down(there, b, 0), 0)])
    other.destroy()
    rig.long(0)
    plan.launch()
    twin = plan.twin(work, (4,))
    expect(twin is not None, "a plan of launches and copies has no twin")
    assert twin is not None
    expect(twin.nodes == plan.nodes, "nodes of a twin are not in the order of its plan")
    in_order([twin.launch, plan.launch])()
    rig.settle()
    must_be(numbers(there), 3.0, "a twin did not run behind its plan, or not to its own address")
    must_be(numbers(here), 4.0, "a plan did not do what it had recorded beside its twin")
    second = twin.twin(first, (4,))
    assert second is not None
    in_order([plan.destroy, twin.launch, second.launch])()
    rig.settle()
    must_be(numbers(there), 5.0, "a twin did not outlive its plan")
    must_be(numbers(here), 6.0, "a twin of a twin did not go where the first plan goes")
    in_order([twin.destroy, second.launch])()
    must_be(rig.fetch(a), 7.0, "a twin of a twin did not outlive it")
    second.destroy()
    refused(lambda: plan.twin(work, (4,)), "a destroyed plan has a twin")


@clause("a destroyed plan is over when its launches are", "plans", each_stream=False)
def a_destroyed_plan(rig: Rig) -> None:
    a, b = rig.device(1.0), rig.device()
    plan, _ = captured(rig, [(rig.launch(b, a, 0), 0)])
    rig.long(0)
    plan.launch()
    with trying("destroying a plan twice, with a launch of it queued,"):
        in_order([plan.destroy, plan.destroy])()
    must_be(rig.fetch(b), 2.0, "a queued launch of a plan that was destroyed did not run")
    refused(plan.launch, "a destroyed plan was launched")


@clause("a plan with branches does what its parts do one by one", "forked plans",
        each_stream=False)  # fmt: skip
def a_plan_with_branches(rig: Rig) -> None:
    """Three branches, the last one forked from the second; the first is joined, then the others."""
    streams = [*rig.streams[1:], *rig.streams[1:]][-3:]
    begun, x, out, inner = rig.device(), rig.device(), rig.backend.event(), rig.backend.event()
    seen, after = [rig.device() for _ in streams], [rig.device() for _ in streams]
    chains = [chain(rig, stream) for stream in streams]
    ends = [rig.point(stream, 0) for stream in streams]

    def branch(n: int, behind: object) -> list[Part]:
        first = rig.backend.wait(behind, streams[n]), rig.launch(seen[n], x, streams[n])
        return [*((part, streams[n]) for part in first), *chains[n][0], (ends[n][0], streams[n])]

    home = rig.launch(begun, x, 0), rig.launch(x, begun, 0), rig.backend.record(out, 0)
    second = branch(1, out)
    second[2:2] = [(rig.backend.record(inner, streams[1]), streams[1])]
    joins = [(part, 0) for n in range(3)
             for part in (ends[n][2], rig.launch(after[n], chains[n][1], 0))]  # fmt: skip
    parts = [*((part, 0) for part in home), *branch(0, out), *second, *branch(2, inner), *joins]
    plan, work = captured(rig, parts)
    for n, call in enumerate((work.call, plan.launch, plan.launch, work.call, plan.launch), 1):
        call()
        what = "in a plan" if call == plan.launch else "one by one"
        for row, joined in zip(seen, after, strict=True):
            must_be(rig.fetch(row), 2 * n + 1, f"{what}, a branch overtook its fork")
            must_be(rig.fetch(joined), n * CHAIN + 1, f"{what}, a join overtook a branch")
    plan.destroy()
