"""The clauses of the contract that are about more than one compute stream: forks, joins, and plans
with both."""

from __future__ import annotations

from tests.contract.conformance.conformance_clauses import clause
from tests.contract.conformance.conformance_plans import CHAIN, Part, captured, chain
from tests.contract.conformance.conformance_rig import Rig, must_be
from workbench.backend.issue.issued import in_order


@clause("a stream that waits holds up no other", "several streams", each_stream=False)
def a_wait_holds_its_stream_alone(rig: Rig) -> None:
    """Stream 1 is left to the glance at the long work."""
    event, last = rig.backend.event(), rig.streams[-1]
    record = rig.backend.record(event, 0)
    waits = [rig.backend.wait(event, stream) for stream in rig.streams[2:-1]]
    copy = rig.up(rig.device(), rig.host(7.0), last)
    act = in_order([record, *waits, copy, rig.backend.sync_stream(last)])
    rig.goes_on(act, "a copy waited for an event that other streams wait for")


@clause("a fork and a join order each branch", "several streams", each_stream=False)
def a_fork_and_a_join(rig: Rig) -> None:
    """All streams begin behind long work on one, and another goes on behind all of them."""
    home, *branches = rig.streams
    out, rows = rig.backend.event(), {stream: rig.device() for stream in branches}
    ends = {stream: rig.backend.event() for stream in branches}
    joined = {stream: rig.device() for stream in branches}
    fork = [rig.backend.record(out, home)]
    for stream in branches:
        fork.append(rig.backend.wait(out, stream))
        fork.append(rig.launch(rows[stream], rig.counter, stream))
        fork.append(rig.backend.record(ends[stream], stream))
    join = [rig.backend.wait(end, home) for end in ends.values()]
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
        event = rig.backend.event()
        calls.append(rig.launch(rows[i + 1], rows[i], stream))
        calls.append(rig.backend.record(event, stream))
        calls += [rig.backend.wait(event, after) for after in order[i + 1 : i + 2]]
    count = rig.long(order[0])
    in_order(calls)()
    must_be(rig.fetch(rows[-1]), count + len(order), "a stream did not wait for the one before it")


@clause("a Record on another stream takes an event over", "several streams", each_stream=False)
def the_latest_record_on_whichever_stream(rig: Rig) -> None:
    event, out, last = rig.backend.event(), rig.device(), rig.streams[-1]
    aside, here = rig.backend.record(event, last), rig.backend.record(event, 0)
    wait, launch = rig.backend.wait(event, 1), rig.launch(out, rig.counter, 1)
    aside()
    count = rig.long(0)
    in_order([here, wait, launch])()
    must_be(rig.fetch(out), count + 1, "a Wait was over at an earlier Record, on another stream")
    copy, drain = rig.up(rig.device(), rig.host(7.0), 1), rig.backend.sync_stream(1)
    what = "a Wait was for an earlier Record than the latest, which was on another stream"
    rig.goes_on(in_order([here, aside, wait, copy, drain]), what)


@clause("a plan with branches does what its parts do one by one", "forked plans",
        each_stream=False)  # fmt: skip
def a_plan_with_branches(rig: Rig) -> None:
    """Three branches, the last one forked from the second; the first is joined, then the others."""
    event, (one, two, three) = rig.backend.event, [*rig.streams[1:], *rig.streams[1:]][-3:]
    streams = {"a": one, "b": two, "c": three}
    begun, x = rig.device(), rig.device()
    seen = {name: rig.device() for name in streams}
    after = {name: rig.device() for name in streams}
    chains = {name: chain(rig, stream) for name, stream in streams.items()}
    out, inner, ends = event(), event(), {name: event() for name in streams}

    def order(kind: str, which: object, stream: int) -> Part:
        return getattr(rig.backend, kind)(which, stream), stream

    def branch(name: str, behind: object) -> list[Part]:
        stream = streams[name]
        first = order("wait", behind, stream), (rig.launch(seen[name], x, stream), stream)
        return [*first, *chains[name][0], order("record", ends[name], stream)]

    def join(name: str) -> list[Part]:
        found = rig.launch(after[name], chains[name][1], 0)
        return [order("wait", ends[name], 0), (found, 0)]

    home = (rig.launch(begun, x, 0), 0), (rig.launch(x, begun, 0), 0), order("record", out, 0)
    second = branch("b", out)
    second[2:2] = [order("record", inner, two)]
    parts = [*home, *branch("a", out), *second, *branch("c", inner), *join("a"), *join("b"),
             *join("c")]  # fmt: skip
    plan, work = captured(rig, parts)
    for n, call in enumerate((work.call, plan.launch, plan.launch, work.call, plan.launch), 1):
        call()
        for name in streams:
            what = "in a plan with branches" if call == plan.launch else "issued one by one"
            must_be(rig.fetch(seen[name]), 2 * n + 1, f"{what}, a branch overtook its fork")
            must_be(rig.fetch(after[name]), n * CHAIN + 1, f"{what}, a join overtook a branch")
    plan.destroy()
