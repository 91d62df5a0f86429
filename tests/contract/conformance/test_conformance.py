"""The CPU backends keep every clause of the contract that they claim, and for every clause there is
a device that breaks it and is found out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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
    "one worker": partial(embedded.open_backend, threads=1),
    "two workers": partial(embedded.open_backend, threads=2),
    "snapshot": partial(embedded.open_backend, threads=2, pageable="snapshot"),
}
# on two workers every fifth at once; of the host's and the other devices' fewer
CLAUSES = [(name, check) for check in CHECKS for name in BACKENDS if name != "two workers"]
OF_HOST = {"no streams": True, "blocking": True, "one order": True, "in front": True}
OF_ALL = {"any": True, "one order": True, "in front": True}


@pytest.mark.parametrize(
    ("backend", "check"),
    [*share([("two workers", check) for check in CHECKS], every=5, slow=3),
     *share(CLAUSES, every=16, slow=7)],
)  # fmt: skip
def test_clause(backend, check):
    claim = CHECKS[check].claim
    claimed = claim in OF_ALL or (claim in OF_HOST) == (backend == "host")
    assert run_check(check, BACKENDS[backend]) == claimed


@pytest.mark.parametrize("space", [Space.PINNED, Space.HOST])
@pytest.mark.parametrize("backend", BACKENDS)
def test_when_a_source_is_read(backend, space):
    early = backend == "host" or (backend, space) == ("snapshot", Space.HOST)
    assert reads_late(BACKENDS[backend], space) != early


# the suite finds out -----------------------------------------------------------------------------


def nothing(*_: Any) -> Issue:
    return in_order([])


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
        return lambda: issues.pop()() if issues else None


class NoSyncStream(Broke):
    sync_stream = nothing


class Scribbles(NoSyncStream):
    """Freed memory is somebody else's at once, and Sync(stream) has not waited."""

    def _retire(self, address: int, block: Any) -> None:
        super()._retire(address, block)
        block[:] = 0xA5


class NoSynchronize(Broke):
    synchronize = nothing


class OneQueue(Broke):
    """Its second stream is its first."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        return super().copy(dst, src, nbytes, 0, to_host)

    def sync_stream(self, stream: int) -> Issue:
        return super().sync_stream(0)


class Waiting(Broke):
    """Its copies wait for the work before them."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        copy = super().copy(dst, src, nbytes, stream, to_host)
        return in_order([self.sync_stream(stream), copy])


class ClaimsToBlock(Broke):
    capabilities = replace(LIES, asynchronous_copies=False)


class ClaimsNoStreams(Broke):
    capabilities = replace(LIES, asynchronous_copies=False, events=False, n_streams=0)


class RecordedAtBirth(Broke):
    """A new event stands for whatever is queued when somebody asks."""

    def sync_event(self, event: Event) -> Issue:
        known, everything = super().sync_event(event), self.sync_stream(0)
        return lambda: known() if event.words[0] else everything()


class NoSyncEvent(Broke):
    sync_event = nothing


class SyncsTooMuch(Broke):
    def sync_event(self, event: Event) -> Issue:
        return self.synchronize


class FirstRecord(Broke):
    """An event keeps its first Record."""

    def record(self, event: Event, stream: int) -> Issue:
        record = super().record(event, stream)
        return lambda: None if event.words[0] else record()


class NoWait(Broke):
    wait = nothing


class OneEvent(Broke):
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
        self.launch = in_order([p.call for p in work.parts if p.same[0] not in ("record", "wait")])
        self.nodes = tuple(range(len(work.parts)))

    def update(self, work: Plannable, changed: Sequence[int] | None) -> bool:
        return True

    destroy = nothing


class PlansWithoutOrder(Broke):
    def capture(self, work: Plannable) -> Captured:
        return Careless(work)


class RunsAtCapture(Broke):
    def capture(self, work: Plannable) -> Captured:
        work.call()
        return super().capture(work)


class InPlace(EmbeddedPlan):
    _under_way = False


class UpdatesAtOnce(Broke):
    """Updates a plan in place, whatever is queued."""

    def capture(self, work: Plannable) -> Captured:
        return InPlace(work, self.streams, self._keep)


class Itself(EmbeddedPlan):
    def twin(self, work: Plannable, changed: Sequence[int]) -> Itself:
        self.update(work, changed)
        return self


class TwinsAreOne(Broke):
    """Has the plan itself for a twin."""

    def capture(self, work: Plannable) -> Captured:
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
# of each clause, in the order of CHECKS, a device that breaks it, and what is said of it
BROKEN: list[tuple[Callable[[], Any], str]] = [
    (Dirty, ": 1 bytes of host memory are not zeroed$"),
    (Short, ": a copy of 1 bytes brought others$"),
    (Early, "out of pinned memory, .* is there, not 1$"),
    (Once, ": 2 is there, not "),
    (ClaimsNoStreams, ": 0 is there, not "),
    (NoSyncStream, " is there, not "),
    (NoSyncStream, " is there, not 7$"),
    (NoSyncStream, "out of pinned memory, .* is there, not 7$"),
    (NoSynchronize, ": launches, .* is there, not "),
    (OneQueue, "on stream 1 .* waited for the launches of stream 0$"),
    (Waiting, "the call waited for the work before the copy$"),
    (Early, "out of pinned memory, 1$"),
    (ClaimsToBlock, "out of pinned memory, .* is there, not 1$"),
    (ClaimsToBlock, " is there, not 7$"),
    (out_of_order, " is there, not "),
    (out_of_order, " is there, not "),
    (out_of_order, " is there, not 8$"),
    (out_of_order, " is there, not "),
    (out_of_order, " is there, not 7$"),
    (Scribbles, " is there, not 7$"),
    (Hasty, " is there, not 7$"),
    (ClosesOnce, "closing twice raised DeviceError: closed before$"),
    (RecordedAtBirth, "Sync waited$"),
    (NoSyncEvent, " is there, not "),
    (NoSyncEvent, " is there, not 7$"),
    (SyncsTooMuch, "it waited for launches$"),
    (FirstRecord, "it returned at an earlier Record, "),
    (NoWait, " is there, not "),
    (NoWait, " is there, not "),
    (NoWait, " is there, not 8$"),
    (FirstRecord, "it was over at an earlier Record, "),
    (OneEvent, "Sync waited for the Record of another event$"),
    (WaitsForAll, "a copy waited for an event that other streams wait for$"),
    (NoWait, r"stream \d did not wait for its fork|a join did not wait for stream \d"),
    (NoWait, " is there, not "),
    (FirstRecord, "a Wait was over at an earlier Record, "),
    (RunsAtCapture, "a capture ran what it recorded, 3 is there, not 1$"),
    (PlansWithoutOrder, "a part on stream 1 overtook, "),
    (PlansWithoutOrder, " is there, not "),
    (PlansWithoutOrder, " is there, not "),
    (UpdatesAtOnce, "was not what it was before the update, 0 is there, not 3$"),
    (TwinsAreOne, "a twin did not run behind its plan, or not to its own address, 4 is there"),
    (PlansWithoutOrder, "a destroyed plan was launched$"),
    (PlansWithoutOrder, "in a plan, a (branch|join) overtook "),
]


@pytest.mark.parametrize(("check", "broken"), share(zip(CHECKS, BROKEN, strict=True), 7, slow=4))
def test_a_device_that_breaks_a_clause_is_found_out(check, broken):
    """In one of ten tries: a busy machine may do meanwhile what the device did not wait for. Where
    it did half of it, the row is torn."""
    device, says = broken
    found = next(filter(None, (failures(device, [check]) for _ in range(10))))[check]
    assert re.search(says, found) and check in found and len(found.splitlines()) == 1


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
