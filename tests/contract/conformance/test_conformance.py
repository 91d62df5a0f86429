"""The CPU backends keep every clause of the contract that they claim, and for every clause there is
a device that breaks it and is found out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.contract.conformance.conformance import CHECKS, failures, reads_late, run_check
from tests.contract.conformance.hostile import LIES, OutOfOrderCopies
from tests.profiles import share
from workbench.backend.base import Backend, Captured, Issue
from workbench.backend.cpu.device import embedded, host
from workbench.backend.cpu.device.embedded import EmbeddedDevice, Event
from workbench.backend.cpu.device.recorded import EmbeddedPlan
from workbench.backend.issue.issued import Plannable, in_order
from workbench.common.errors import DeviceError
from workbench.program.commands import Space

BACKENDS: dict[str, Callable[[], Backend]] = {
    "host": partial(host.open_backend, threads=2),
    "embedded, 1 worker": partial(embedded.open_backend, threads=1),
    "embedded, 2 workers": partial(embedded.open_backend, threads=2),
    "embedded, snapshot": partial(embedded.open_backend, threads=2, pageable="snapshot"),
}
WHOLE = "embedded, 2 workers"


# on two workers every third at once; of the host's and the other devices' fewer
CLAUSES = [(name, check) for check in CHECKS for name in BACKENDS if name != WHOLE]


@pytest.mark.parametrize(
    ("backend", "check"),
    [*share([(WHOLE, check) for check in CHECKS], every=3), *share(CLAUSES, every=7, slow=3)],
)
def test_clause(backend, check):
    claimed = run_check(check, BACKENDS[backend])
    asked = {
        "no streams": backend == "host",
        "blocking": backend == "host",
        "any": True,
        "in front": True,
        "one order": True,
    }
    assert claimed == asked.get(CHECKS[check].claim, backend != "host")


@pytest.mark.parametrize(
    ("backend", "space", "late"),
    [
        ("embedded, 1 worker", Space.PINNED, True),
        ("embedded, 2 workers", Space.PINNED, True),
        ("embedded, 2 workers", Space.HOST, True),
        ("embedded, snapshot", Space.PINNED, True),
        ("embedded, snapshot", Space.HOST, False),
        ("host", Space.PINNED, False),
    ],
)
def test_when_a_source_is_read(backend, space, late):
    assert reads_late(BACKENDS[backend], space) == late


# the suite finds out -----------------------------------------------------------------------------


class Broke(EmbeddedDevice):
    """An embedded device with two workers and one thing that is broken."""

    def __init__(self) -> None:
        super().__init__(threads=2)


class Dirty(Broke):
    """Its memory holds what somebody left there."""

    def allocate(self, nbytes: int, space: Space):
        memory = super().allocate(nbytes, space)
        memory._block[:] = 0xA5
        return memory


class Short(Broke):
    """Its copies leave the last byte out."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        return super().copy(dst, src, max(nbytes - 1, 0), stream, to_host)


class Early(Broke):
    """Its copies take the source when they are prepared."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        taken = self.allocate(nbytes, Space.HOST)
        if not to_host:
            super().copy(taken.address, src, nbytes, stream, to_host=True)()
            super().sync_stream(stream)()
            src = taken.address
        issue = super().copy(dst, src, nbytes, stream, to_host)

        def keep(_taken=taken) -> None:
            issue()

        return keep


class Once(Broke):
    """Its launches run at their first call only."""

    def launch(self, *args: Any, **options: Any) -> Issue:
        issues = [super().launch(*args, **options)]

        def issue() -> None:
            if issues:
                issues.pop()()

        return issue


class NoSyncStream(Broke):
    def sync_stream(self, stream: int) -> Issue:
        return in_order([])


class Scribbles(NoSyncStream):
    """Freed memory is somebody else's at once, and Sync(stream) has not waited."""

    def _retire(self, address: int, block: np.ndarray) -> None:
        super()._retire(address, block)
        block[:] = 0xA5


class NoSynchronize(Broke):
    def synchronize(self) -> None:
        """Waits for nothing."""


class OneQueue(Broke):
    """Its second stream is its first."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        return super().copy(dst, src, nbytes, 0, to_host)

    def sync_stream(self, stream: int) -> Issue:
        return super().sync_stream(0)


class Waiting(Broke):
    """Its copies wait for what is in front of them."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        copy = super().copy(dst, src, nbytes, stream, to_host)
        return in_order([self.sync_stream(stream), copy])


class ClaimsToBlock(Broke):
    capabilities = replace(LIES, asynchronous_copies=False)


class ClaimsNoStreams(Broke):
    capabilities = replace(LIES, asynchronous_copies=False, events=False, n_streams=0)


class RecordedAtBirth(Broke):
    """A new event stands behind whatever is queued, when somebody asks."""

    def sync_event(self, event: Event) -> Issue:
        known, everything = super().sync_event(event), self.sync_stream(0)
        return lambda: known() if event.words[0] else everything()


class NoSyncEvent(Broke):
    def sync_event(self, event: Event) -> Issue:
        return in_order([])


class SyncsTooMuch(Broke):
    """Sync(event) is `synchronize`."""

    def sync_event(self, event: Event) -> Issue:
        return self.synchronize


class FirstRecord(Broke):
    """An event keeps its first Record."""

    def record(self, event: Event, stream: int) -> Issue:
        record = super().record(event, stream)
        return lambda: None if event.words[0] else record()


class NoWait(Broke):
    def wait(self, event: Event, stream: int) -> Issue:
        return in_order([])


class OneEvent(Broke):
    """Its events are all the same."""

    def __init__(self) -> None:
        super().__init__()
        self._only = Event()

    def event(self) -> Event:
        return self._only


class WaitsForAll(Broke):
    """A Wait holds up every compute stream beside the first."""

    def wait(self, event: Event, stream: int) -> Issue:
        held = [super(WaitsForAll, self).wait(event, s) for s in range(2, len(self.streams))]
        return in_order([*held, super().wait(event, stream)])


class Careless(Captured):
    """A plan that is issued part by part, and knows no order but each stream's own."""

    def __init__(self, work: Plannable):
        ordering = ("record", "wait")
        self.launch = in_order([p.call for p in work.parts if p.same[0] not in ordering])
        self.nodes = tuple(range(len(work.parts)))

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        return True

    def destroy(self) -> None:
        """There is nothing to give back."""


class PlansWithoutOrder(Broke):
    def capture(self, work: Plannable) -> Captured:
        return Careless(work)


class RunsAtCapture(Broke):
    def capture(self, work: Plannable) -> Captured:
        work.call()
        return super().capture(work)


class UpdatesAtOnce(Broke):
    """Updates a plan in place, whatever is queued."""

    def capture(self, work: Plannable) -> Captured:
        class InPlace(EmbeddedPlan):
            _under_way = False

        return InPlace(work, self.streams, self._keep)


class TwinsAreOne(Broke):
    """Has the plan itself for a twin."""

    def capture(self, work: Plannable) -> Captured:
        class Itself(EmbeddedPlan):
            def twin(self, work: Plannable, changed: Sequence[int]) -> Itself:
                self.update(work, changed)
                return self

        return Itself(work, self.streams, self._keep)


class Hasty(Broke):
    """Closes at once, whatever is queued."""

    def close(self) -> None:
        self._end()


class ClosesOnce(Broke):
    def close(self) -> None:
        if self.streams[0].closed:
            raise DeviceError("closed before")
        super().close()


out_of_order = partial(OutOfOrderCopies, 2, capabilities=LIES)

BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "memory is zeroed and aligned, and the host sees its own": (
        Dirty, "1 bytes of host memory are not zeroed"),
    "a copy moves the bytes it is told to and no others": (
        Short, "a copy of 1 bytes brought others"),
    "a prepared copy reads what is there at each call": (
        Early, "a copy out of pinned memory did not bring .* it was called: .* is there, not 1"),
    "launches of a stream run in order, each as often as it is called": (
        Once, "launches did not count as often as they were called: 2 is there, not "),
    "without streams a launch is done when its call returns": (
        ClaimsNoStreams, "a launch was not done when its call had returned: 0 is there, not "),
    "Sync(stream) waits for launches": (
        NoSyncStream, r"Sync\(stream\) returned before launches of the stream were done"),
    "Sync(stream) waits for copies to the host": (
        NoSyncStream, r"Sync\(stream\) returned before a copy to the host was done: .* is there"),
    "Sync(stream) waits for copies to the device, whose source is free then": (
        NoSyncStream, "returned before a copy out of pinned memory was done: .* is there, not 7"),
    "synchronize waits for every stream": (
        NoSynchronize, "synchronize returned before launches were done"),
    "streams run side by side": (
        OneQueue, "stream 1: a copy waited for the launches of stream 0"),
    "the call returns before the copy is done": (
        Waiting, "a copy's call returned only when the work in front of it was done"),
    "a copy reads its source at the call or later": (
        Early, "a copy out of pinned memory brought 1, there before the call"),
    "a blocking copy has read its source when its call returns": (
        ClaimsToBlock, "a copy said to block read pinned memory after its call had returned"),
    "a blocking copy has arrived when its call returns": (
        ClaimsToBlock, "a copy said to block had not arrived when its call returned"),
    "a copy reads what launches in front of it have made": (
        out_of_order, "a copy overtook the launches in front of it"),
    "a copy does not overwrite what launches in front of it read": (
        out_of_order, "a copy overwrote what the launches in front of it had yet to read"),
    "a launch reads what copies in front of it have brought": (
        out_of_order, "a launch did not wait for the copy in front of it: .* is there, not 8"),
    "copies of a stream run in order": (
        out_of_order, "a copy did not wait for the copy in front of it"),
    "a copy reads what one in front of it has brought to pinned memory": (
        out_of_order, "a copy read pinned memory that the one in front of it had yet to write"),
    "memory may be freed after a Sync": (
        Scribbles, r"a copy read memory that was freed after Sync\(stream\)"),
    "close waits for what is queued": (
        Hasty, "close returned before a copy was done: .* is there, not 7"),
    "teardown may be in any order, and twice": (
        ClosesOnce, "closing twice raised DeviceError: closed before"),
    "an event never recorded holds nobody up": (
        RecordedAtBirth, "Sync of an event that was never recorded waited"),
    "Sync(event) waits for the launches before its Record": (
        NoSyncEvent, r"Sync\(event\) returned before launches in front of its Record were done"),
    "Sync(event) waits for the copies before its Record": (
        NoSyncEvent, r"Sync\(event\) returned before a copy in front of its Record was done"),
    "Sync(event) does not wait for what is behind its Record": (
        SyncsTooMuch, r"Sync\(event\) waited for launches behind its Record"),
    "Sync(event) means the latest Record": (
        FirstRecord, r"Sync\(event\) returned at an earlier Record"),
    "Wait(event) holds later launches of its stream": (
        NoWait, "a launch behind a Wait did not wait for the event"),
    "Wait(event) holds later copies of its stream": (
        NoWait, "a copy behind a Wait did not wait for the event"),
    "an event stands for the copies before its Record": (
        NoWait, "a launch waited for an event, and ran before the copy"),
    "Wait(event) means the latest Record before it": (
        FirstRecord, "a Wait was over at an earlier Record than the latest"),
    "several events keep a point each": (
        OneEvent, r"Sync\(event\) waited for the Record of another event"),
    "a capture runs nothing, and a launch runs every part in order": (
        RunsAtCapture, "a capture ran what it recorded: 3 is there, not 1"),
    "no part of a plan begins before what is in front of it": (
        PlansWithoutOrder, "a part on another stream overtook the stream in front: "),
    "what is behind a plan waits for its parts on every stream": (
        PlansWithoutOrder, "a launch behind a plan did not wait for its parts on another stream: "),
    "a Wait within a plan holds its stream, in every launch": (
        PlansWithoutOrder, "a launch behind a Wait within a plan did not wait for the event: "),
    "an update is for later launches, and queued ones run as they were": (
        UpdatesAtOnce, "a queued launch was not what it was before the update: 0 is there, not 3"),
    "a twin has its own addresses, and leaves the plan that it is of as it is": (
        TwinsAreOne, "a twin did not run behind its plan, or not to its own address: 4 is there"),
    "a stream that waits holds up no other": (
        WaitsForAll, "a copy waited for an event that other streams wait for"),
    "a fork and a join order each branch": (
        NoWait, r"stream \d did not wait for its fork|a join did not wait for stream \d"),
    "events order streams one behind the other": (
        NoWait, "a stream did not wait for the one before it: "),
    "a Record on another stream takes an event over": (
        FirstRecord, "a Wait was over at an earlier Record, on another stream: "),
    "a plan with branches does what its parts do one by one": (
        PlansWithoutOrder, "in a plan with branches, a (branch|join) overtook "),
    "a destroyed plan is over when its launches are": (
        PlansWithoutOrder, "a destroyed plan was launched"),
}  # fmt: skip


def test_every_clause_has_a_device_that_breaks_it():
    assert BROKEN.keys() == CHECKS.keys()


@pytest.mark.parametrize("check", share(BROKEN, every=3, slow=2))
def test_a_device_that_breaks_a_clause_is_found_out(check):
    """In one of ten tries: a busy machine may do meanwhile what the device did not wait for. Where
    it did half of it, the row is torn."""
    device, message = BROKEN[check]
    found = next(filter(None, (failures(device, [check]) for _ in range(10))))[check]
    assert re.search(message, found) and len(found.splitlines()) == 1


@pytest.mark.slow
def test_failures_name_what_is_broken_and_nothing_else():
    events = [name for name, check in CHECKS.items() if "events" in check.claim]
    found = set().union(*(failures(NoSyncEvent, events) for _ in range(3)))
    assert found == {
        "Sync(event) waits for the launches before its Record",
        "Sync(event) waits for the copies before its Record",
        "Sync(event) means the latest Record",
        "several events keep a point each",
    }
