"""The clauses of the contract that are about plans: what was captured, launched and updated."""

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
    trying,
)
from workbench.backend.base import Captured, Memory
from workbench.backend.issue.bind import plannable
from workbench.common.errors import DeviceError
from workbench.program.commands import Space

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


@clause("a capture runs nothing, and a launch runs every part in order", "plans", each_stream=False)
def a_launch_runs_every_part(rig: Rig) -> None:
    a, b, landing = rig.device(1.0), rig.device(), rig.host()
    parts = [rig.launch(b, a, 0), rig.launch(a, b, 0), rig.down(landing, a, 0)]
    plan, _work = captured(rig, [(part, 0) for part in parts])
    must_be(rig.fetch(a), 1.0, "a capture ran what it recorded")
    for _ in range(3):
        plan.launch()
    must_be(rig.fetch(a), 7.0, "three launches of a plan did not run two parts each, in order")
    must_be(numbers(landing), 7.0, "a plan's copy was not behind its launches")
    expect(plan.nodes == (0, 1, 2), f"a plan of three parts says that its nodes are {plan.nodes}")
    plan.destroy()


@clause("no part of a plan begins before what is in front of it", "plans", each_stream=False)
def a_plan_begins_behind_its_stream(rig: Rig) -> None:
    here, there = rig.device(), rig.device()
    parts = [(rig.launch(there, rig.counter, 1), 1), (rig.launch(here, rig.counter, 0), 0)]
    plan, _work = captured(rig, parts)
    plan.launch()  # the first launch may take longer than what is in front of the second
    rig.settle()
    count = rig.long(0)
    plan.launch()
    must_be(rig.fetch(there), count + 1, "a part on another stream overtook the stream in front")
    must_be(rig.fetch(here), count + 1, "a part overtook what was in front of its plan")
    plan.destroy()


@clause("what is behind a plan waits for its parts on every stream", "plans", each_stream=False)
def a_stream_goes_on_behind_a_plan(rig: Rig) -> None:
    out, other = rig.device(), rig.device()
    busy, counted = chain(rig, 1)
    plan, _work = captured(rig, [*busy, (rig.launch(other, other, 0), 0)])
    behind = rig.launch(out, counted, 0)
    for launches in (1, 2, 3):
        plan.launch()
        behind()
        what = "a launch behind a plan did not wait for its parts on another stream"
        must_be(rig.fetch(out), launches * CHAIN + 1, what)
    plan.destroy()


@clause("a Wait within a plan holds its stream, in every launch", "plans", each_stream=False)
def a_wait_within_a_plan(rig: Rig) -> None:
    event, out = rig.backend.event(), rig.device()
    busy, counted = chain(rig, 1)
    order = [(rig.backend.record(event, 1), 1), (rig.backend.wait(event, 0), 0)]
    plan, _work = captured(rig, [*busy, *order, (rig.launch(out, counted, 0), 0)])
    for launches in (1, 2, 3):
        plan.launch()
        what = "a launch behind a Wait within a plan did not wait for the event"
        must_be(rig.fetch(out), launches * CHAIN + 1, what)
    plan.destroy()


@clause("an update is for later launches, and queued ones run as they were", "plans",
        each_stream=False)  # fmt: skip
def an_update_is_for_later(rig: Rig) -> None:
    a, b, c = rig.device(1.0), rig.device(), rig.device()
    plan, _first = captured(rig, [(rig.launch(b, a, 0), 0), (rig.launch(b, b, 0), 0)])
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
    launch, event = rig.launch(b, a, 0), rig.backend.event()
    front = [(launch, 0), (rig.backend.record(event, 0), 0), (rig.backend.wait(event, 1), 1)]
    aside = (rig.launch(a, a, 1), 1)
    plan, first = captured(rig, [*front, aside, (rig.down(here, b, 0), 0)])
    other, work = captured(rig, [*front, aside, (rig.down(there, b, 0), 0)])
    other.destroy()
    rig.long(0)
    plan.launch()
    twin = plan.twin(work, (4,))
    expect(twin is not None, "a plan of launches and copies has no twin")
    assert twin is not None
    expect(twin.nodes == plan.nodes, "nodes of a twin are not in the order of its plan")
    twin.launch()
    plan.launch()
    rig.settle()
    must_be(numbers(there), 3.0, "a twin did not run behind its plan, or not to its own address")
    must_be(numbers(here), 4.0, "a plan did not do what it had recorded beside its twin")
    second = twin.twin(first, (4,))
    assert second is not None
    plan.destroy()
    twin.launch()
    second.launch()
    rig.settle()
    must_be(numbers(there), 5.0, "a twin did not outlive its plan")
    must_be(numbers(here), 6.0, "a twin of a twin did not go where the first plan goes")
    twin.destroy()
    second.launch()
    must_be(rig.fetch(a), 7.0, "a twin of a twin did not outlive it")
    second.destroy()
    try:
        plan.twin(work, (4,))
    except DeviceError as error:
        expect(len(str(error).splitlines()) == 1, "the refusal of a destroyed plan is long")
    else:
        expect(False, "a destroyed plan has a twin")


@clause("a destroyed plan is over when its launches are", "plans", each_stream=False)
def a_destroyed_plan(rig: Rig) -> None:
    a, b = rig.device(1.0), rig.device()
    plan, _work = captured(rig, [(rig.launch(b, a, 0), 0)])
    rig.long(0)
    plan.launch()
    with trying("destroying a plan twice, with a launch of it queued,"):
        plan.destroy()
        plan.destroy()
    must_be(rig.fetch(b), 2.0, "a queued launch of a plan that was destroyed did not run")
    try:
        plan.launch()
    except DeviceError as error:
        expect(len(str(error).splitlines()) == 1, "the refusal of a destroyed plan is long")
    else:
        expect(False, "a destroyed plan was launched")
