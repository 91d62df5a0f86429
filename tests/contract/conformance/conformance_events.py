"""The clauses of the contract that are about events: Record, Wait, and Sync on an event."""

from __future__ import annotations

from tests.contract.conformance.conformance_clauses import clause
from tests.contract.conformance.conformance_rig import Rig, expect, must_be, numbers, said
from workbench.backend.issue.issued import in_order


@clause("an event never recorded holds nobody up", "events", each_stream=False)
def an_event_never_recorded(rig: Rig) -> None:
    event = rig.backend.event()
    stop, wait = rig.backend.sync_event(event), rig.backend.wait(event, 1)
    rig.goes_on(stop, "Sync of an event that was never recorded waited")
    copy = rig.up(rig.device(), rig.host(7.0), 1)
    act = in_order([wait, copy, rig.backend.sync_stream(1)])
    rig.goes_on(act, "Wait for an event that was never recorded held its stream up")


@clause("Sync(event) waits for the launches before its Record", "events")
def sync_event_drains_launches(rig: Rig, stream: int) -> None:
    event = rig.backend.event()
    record, stop = rig.backend.record(event, stream), rig.backend.sync_event(event)
    count = rig.long(stream)
    record()
    stop()
    found = rig.peek(rig.counter, rig.other(stream))
    must_be(found, count, "Sync(event) returned before launches in front of its Record were done")


@clause("Sync(event) waits for the copies before its Record", "ordered events")
def sync_event_drains_copies(rig: Rig, stream: int) -> None:
    event = rig.backend.event()
    record, stop = rig.backend.record(event, stream), rig.backend.sync_event(event)
    for load in rig.loads:
        landing = rig.host()
        copy = rig.down(landing, rig.device(7.0), stream)
        load(stream)
        copy()
        record()
        stop()
        found = numbers(landing).copy()
        must_be(found, 7.0, "Sync(event) returned before a copy in front of its Record was done")


@clause("Sync(event) does not wait for what is behind its Record", "events", each_stream=False)
def sync_event_goes_no_further(rig: Rig) -> None:
    event = rig.backend.event()
    record, stop = rig.backend.record(event, 0), rig.backend.sync_event(event)
    rig.goes_on(stop, "Sync(event) waited for launches behind its Record", before=record)


@clause("Sync(event) means the latest Record", "events", each_stream=False)
def sync_event_means_the_latest(rig: Rig) -> None:
    event = rig.backend.event()
    record, elsewhere = rig.backend.record(event, 0), rig.backend.record(event, 1)
    stop = rig.backend.sync_event(event)
    record()
    count = rig.long(0)
    record()
    stop()
    must_be(rig.peek(rig.counter, 1), count, "Sync(event) returned at an earlier Record")
    what = "Sync(event) waited for an earlier Record, on another stream"
    rig.goes_on(in_order([record, elsewhere, stop]), what)


@clause("Wait(event) holds later launches of its stream", "events")
def wait_holds_launches(rig: Rig, stream: int) -> None:
    event, out, other = rig.backend.event(), rig.device(), rig.other(stream)
    launch = rig.launch(out, rig.counter, other)
    record, wait = rig.backend.record(event, stream), rig.backend.wait(event, other)
    count = rig.long(stream)
    record()
    wait()
    launch()
    must_be(rig.fetch(out), count + 1, "a launch behind a Wait did not wait for the event")


@clause("Wait(event) holds later copies of its stream", "ordered events")
def wait_holds_copies(rig: Rig, stream: int) -> None:
    event, landing, other = rig.backend.event(), rig.host(), rig.other(stream)
    copy = rig.down(landing, rig.counter, other)
    record, wait = rig.backend.record(event, stream), rig.backend.wait(event, other)
    count = rig.long(stream)
    record()
    wait()
    copy()
    rig.settle()
    must_be(numbers(landing), count, "a copy behind a Wait did not wait for the event")


@clause("an event stands for the copies before its Record", "ordered events")
def wait_guards_copies(rig: Rig, stream: int) -> None:
    """The pattern `aaaarw`: copies on one stream, launches that read what they bring on another."""
    event, other = rig.backend.event(), rig.other(stream)
    record, wait = rig.backend.record(event, stream), rig.backend.wait(event, other)
    what = "a launch waited for an event, and ran before the copy in front of the event's Record"
    for load in rig.loads:
        x, y = rig.device(), rig.device()
        copy, launch = rig.up(x, rig.host(7.0), stream), rig.launch(y, x, other)
        load(stream)
        copy()
        record()
        wait()
        launch()
        must_be(rig.fetch(y), 8.0, what)


@clause("Wait(event) means the latest Record before it", "events", each_stream=False)
def wait_means_the_latest(rig: Rig) -> None:
    event, out = rig.backend.event(), rig.device()
    record, wait = rig.backend.record(event, 0), rig.backend.wait(event, 1)
    launch = rig.launch(out, rig.counter, 1)
    record()
    count = rig.long(0)
    record()
    wait()
    launch()
    must_be(rig.fetch(out), count + 1, "a Wait was over at an earlier Record than the latest")
    copy, drain = rig.up(rig.device(), rig.host(7.0), 1), rig.backend.sync_stream(1)
    what = "a Wait was for a Record that the host issued after it"
    rig.goes_on(in_order([record, copy, drain]), what, before=in_order([record, wait]))


@clause("several events keep a point each", "events", each_stream=False)
def several_events(rig: Rig) -> None:
    made = [rig.backend.event() for _ in range(4)]
    records = [rig.backend.record(event, 0) for event in made]
    stops = [rig.backend.sync_event(event) for event in made]
    for order in (range(4), reversed(range(4))):
        counts = []
        for record in records:
            counts.append(rig.long(0))
            record()
        for i in order:
            stops[i]()
            found = rig.peek(rig.counter, 1)
            what = f"Sync(event) returned at {said(found)}, event {i} of 4 stands at {counts[i]:g}"
            expect((found >= counts[i]).all(), what)
        rig.settle()
    act = in_order([rig.backend.record(made[1], 0), stops[0]])
    what = "Sync(event) waited for the Record of another event"
    rig.goes_on(act, what, before=records[0])
