"""The clauses of the contract that are about memory, launches, copies and the host's waits, and the
table that clauses enter. Those about events and plans are in `conformance_events.py`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from tests.contract.conformance.conformance_rig import (
    ROW_BYTES,
    Rig,
    expect,
    must_be,
    numbers,
    said,
    trying,
)
from workbench.backend.issue.issued import in_order
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Space

# Claims that clauses follow from.
CLAIMS: dict[str, Callable[[Capabilities], bool]] = {
    "any": lambda able: True,
    "no streams": lambda able: able.n_streams == 0,
    "two streams": lambda able: able.n_streams > 1,
    "asynchronous": lambda able: able.n_streams > 1 and able.asynchronous_copies,
    "blocking": lambda able: not able.asynchronous_copies,
    "one order": lambda able: able.one_order,
    "in front": lambda able: able.one_order or not able.asynchronous_copies,
    "events": lambda able: able.events and able.n_streams > 1,
    "plans": lambda able: able.capture and able.events and able.n_streams > 1,
    "several streams": lambda able: able.events and able.one_order and able.n_streams > 2,
    "forked plans": lambda able: able.capture and able.events and able.n_streams > 2,
    "ordered events": lambda able: able.events and able.n_streams > 1 and able.one_order,
}
HOSTS = Space.PINNED, Space.HOST


class Check(NamedTuple):
    """A clause, the name of the claim it follows from, and what finds out; `run` takes the rig, and
    a stream where the clause is checked on each."""

    claim: str
    run: Callable[..., None]
    each_stream: bool


CHECKS: dict[str, Check] = {}  # in the order in which they were entered


def clause(name: str, claim: str, each_stream: bool = True) -> Callable:
    def enter(run: Callable[..., None]) -> Callable[..., None]:
        CHECKS[name] = Check(claim, run, each_stream)
        return run

    return enter


# memory and single commands ----------------------------------------------------------------------


@clause("memory is zeroed and aligned, and the host sees its own", "any", each_stream=False)
def memory_is_zeroed(rig: Rig) -> None:
    for space, nbytes in product(Space, (1, 1000, ROW_BYTES)):
        memory, what = rig.allocate(nbytes, space), f"{nbytes} bytes of {space} memory"
        expect(memory.nbytes == nbytes, f"{what} say that they are {memory.nbytes}")
        expect(memory.address % 64 == 0, f"{what} are not aligned to 64")
        array = memory.array
        expect(array is not None or space == Space.DEVICE, f"{what} have no array")
        if array is not None:
            expect(array.nbytes == nbytes, f"{what} have an array of {array.nbytes}")
            expect(array.ctypes.data == memory.address, f"{what} have an array elsewhere")
            expect(not array.any(), f"{what} are not zeroed")
    must_be(rig.fetch(rig.device()), 0.0, "device memory is not zeroed")


@clause("a copy moves the bytes it is told to and no others", "any")
def copies_of_any_length(rig: Rig, stream: int) -> None:
    most, beside = (1 << 20) + 77, 64
    room = most + 2 * beside
    source, there, back = (rig.allocate(room, s) for s in (Space.PINNED, Space.DEVICE, Space.HOST))
    assert source.array is not None and back.array is not None
    source.array[:] = np.arange(room) % 251 + 1  # no zeros
    copy, stop = rig.backend.copy, rig.backend.sync_stream(stream)
    for n in (0, 1, 63, 64, 65, ROW_BYTES, most):
        back.array[:] = 0
        up = copy(there.address + 1, source.address + 3, n, stream, to_host=False)
        down = copy(back.address + beside, there.address + 1, n, stream, to_host=True)
        in_order([up, stop, down, stop])()
        arrived, expected = back.array[beside : beside + n], source.array[3 : 3 + n]
        expect((arrived == expected).all(), f"a copy of {n} bytes brought others")
        strays = back.array[:beside].any() or back.array[beside + n :].any()
        expect(not strays, f"a copy of {n} bytes wrote beside its destination")


@clause("a prepared copy reads what is there at each call", "any", each_stream=False)
def copies_are_prepared(rig: Rig) -> None:
    for space in HOSTS:
        source, there, copy = rig.taken(0.0, 0, space)
        for value in (1.0, 2.0):
            source[:] = value
            copy()
            must_be(rig.fetch(there), value, f"out of {space} memory")


@clause("launches of a stream run in order, each as often as it is called", "any")
def launches_count(rig: Rig, stream: int) -> None:
    count = rig.long(stream)
    must_be(rig.fetch(rig.counter), count)


@clause("without streams a launch is done when its call returns", "no streams", each_stream=False)
def launches_are_synchronous(rig: Rig) -> None:
    landing = rig.host()
    copy = rig.down(landing, rig.counter, 0)
    count = rig.long(0)
    copy()
    must_be(numbers(landing), count)


# waits of the host -------------------------------------------------------------------------------


@clause("Sync(stream) waits for launches", "two streams")
def sync_drains_launches(rig: Rig, stream: int) -> None:
    count = rig.long(stream)
    rig.backend.sync_stream(stream)()
    must_be(rig.peek(rig.counter, rig.other(stream)), count)


@clause("Sync(stream) waits for copies to the host", "any")
def sync_drains_copies_down(rig: Rig, stream: int) -> None:
    for load in rig.loads:
        landing, copy = rig.brought(stream)
        load(stream)
        copy()
        rig.backend.sync_stream(stream)()
        must_be(landing, 7.0)


@clause("Sync(stream) waits for copies to the device, whose source is free then", "any")
def sync_drains_copies_up(rig: Rig, stream: int) -> None:
    for space, load in product(HOSTS, rig.loads):
        source, there, copy = rig.taken(7.0, stream, space)
        load(stream)
        copy()
        rig.backend.sync_stream(stream)()
        source[:] = 8.0
        must_be(rig.fetch(there), 7.0, f"out of {space} memory")


@clause("synchronize waits for every stream", "any", each_stream=False)
def synchronize_drains_all(rig: Rig) -> None:
    count = rig.long(0)
    rig.backend.synchronize()
    must_be(rig.peek(rig.counter, rig.streams[-1]), count, "launches")
    for stream, load in product(rig.streams, rig.loads):
        landing, copy = rig.brought(stream)
        load(stream)
        copy()
        rig.backend.synchronize()
        must_be(landing, 7.0, f"a copy on stream {stream}")
        rig.settle()


@clause("streams run side by side", "two streams")
def streams_are_independent(rig: Rig, stream: int) -> None:
    if stream:  # the first is kept busy
        act = in_order([rig.uploads(stream), rig.backend.sync_stream(stream)])
        rig.goes_on(act, "a copy waited for the launches of stream 0")


# copies and the host -----------------------------------------------------------------------------


@clause("the call returns before the copy is done", "asynchronous", each_stream=False)
def copies_return_at_once(rig: Rig) -> None:
    rig.goes_on(rig.uploads(0), "the call waited for the work before the copy")


@clause("a copy reads its source at the call or later", "any")
def copies_read_no_earlier(rig: Rig, stream: int) -> None:
    for space in HOSTS:
        source, there, copy = rig.taken(1.0, stream, space)
        rig.long(stream)
        source[:] = 2.0
        copy()
        source[:] = 3.0
        found = rig.fetch(there)
        expect((found >= 2.0).all(), f"out of {space} memory, {said(found)}")


@clause("a blocking copy has read its source when its call returns", "blocking")
def blocking_copies_leave_their_source(rig: Rig, stream: int) -> None:
    for space, load in product(HOSTS, rig.loads):
        source, there, copy = rig.taken(1.0, stream, space)
        load(stream)
        copy()
        source[:] = 2.0
        must_be(rig.fetch(there), 1.0, f"out of {space} memory")


@clause("a blocking copy has arrived when its call returns", "blocking")
def blocking_copies_arrive(rig: Rig, stream: int) -> None:
    for load in rig.loads:
        landing, copy = rig.brought(stream)
        load(stream)
        copy()
        must_be(landing, 7.0)
        rig.settle()


# one order ---------------------------------------------------------------------------------------


@clause("a copy reads what launches in front of it have made", "one order")
def copy_behind_launches(rig: Rig, stream: int) -> None:
    landing = rig.host()
    copy = rig.down(landing, rig.counter, stream)
    count = rig.long(stream)
    copy()
    rig.settle()
    must_be(numbers(landing), count)


@clause("a copy does not overwrite what launches in front of it read", "one order")
def copy_behind_readers(rig: Rig, stream: int) -> None:
    zeros, mend = (rig.up(rig.ones, rig.host(value), stream) for value in (0.0, 1.0))
    count = rig.long(stream)
    zeros()
    must_be(rig.fetch(rig.counter), count)
    mend()


@clause("a launch reads what copies in front of it have brought", "in front")
def launch_behind_copies(rig: Rig, stream: int) -> None:
    for load in rig.loads:
        (_, x, copy), y = rig.taken(7.0, stream), rig.device()
        launch = rig.launch(y, x, stream)
        load(stream)
        in_order([copy, launch])()
        must_be(rig.fetch(y), 8.0)


@clause("copies of a stream run in order", "in front")
def copies_in_order(rig: Rig, stream: int) -> None:
    """Up and down through one device row; each finds what the one before it has left."""
    there, landings = rig.device(), [rig.host() for _ in range(8)]
    copies = []
    for i, landing in enumerate(landings):
        copies.append(rig.up(there, rig.host(float(i)), stream))
        copies.append(rig.down(landing, there, stream))
    rig.long(stream)
    in_order(copies)()
    rig.settle()
    for i, landing in enumerate(landings):
        must_be(numbers(landing), i)


@clause("a copy reads what one in front of it has brought to pinned memory", "in front")
def copy_through_pinned_memory(rig: Rig, stream: int) -> None:
    """So do two devices meet. In pageable memory they must not: it may be read at the call."""
    for load in rig.loads:
        between, there = rig.host(), rig.device()
        down, up = rig.down(between, rig.device(7.0), stream), rig.up(there, between, stream)
        load(stream)
        in_order([down, up])()
        must_be(rig.fetch(there), 7.0)


# the end -----------------------------------------------------------------------------------------


@clause("memory may be freed after a Sync", "any")
def freeing_after_sync(rig: Rig, stream: int) -> None:
    for load in rig.loads:
        source, there = rig.host(7.0), rig.device()
        copy = rig.up(there, source, stream)
        load(stream)
        copy()
        rig.backend.sync_stream(stream)()
        source.free()
        for _ in range(4):
            rig.host(9.0)  # may lie where the source lay
        must_be(rig.fetch(there), 7.0)


@clause("close waits for what is queued", "any")
def close_drains(rig: Rig, stream: int) -> None:
    for i in range(len(rig.loads)):
        ending = Rig(rig.open)
        landing, copy = ending.brought(stream)
        ending.loads[i](stream)
        copy()
        with trying("closing with work queued"):
            ending.backend.close()
        must_be(landing, 7.0)


@clause("teardown may be in any order, and twice", "any", each_stream=False)
def teardown(rig: Rig) -> None:
    for order in permutations(range(3)):
        backend = rig.open()
        memory = [backend.allocate(ROW_BYTES, space) for space in Space]
        addresses, event = [m.address for m in memory], backend.event()
        copy = backend.copy(addresses[2], addresses[0], ROW_BYTES, 0, to_host=False)
        in_order([copy, backend.record(event, 0), backend.synchronize])()
        first, second, last = (memory[i] for i in order)
        with trying("freeing memory after synchronize, each block twice,"):
            in_order([first.free, second.free, first.free, second.free])()
        with trying("closing twice"):
            in_order([backend.close, backend.close])()
        with trying("freeing memory after close, twice,"):
            in_order([last.free, last.free])()
        with trying("letting go of commands and events after close"):
            del copy, event
