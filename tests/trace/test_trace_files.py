"""Files of traces made by hand: slices, and arrows, of which both ends exist and none runs
backwards, also where the device's clock is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace import decoded
from workbench.trace import chrome, perfetto
from workbench.trace.flows import EVENT, ISSUE, WAIT, flows_of
from workbench.trace.lanes import nesting_order
from workbench.trace.spans import HOST_LANE, Span

STREAMS = ("cuda stream 0", "cuda stream 1")


class Trace:
    """Spans of commands issued one after the other; the device's clock is `off` ns off."""

    def __init__(self, off: int = 0) -> None:
        self.spans: list[Span] = []
        self.off, self.at, self.index, self.free = off, 10**6, 0, dict.fromkeys(STREAMS, 0)

    def host(self, category: str, took: int = 10, **args: Any) -> Span:
        args = {"step": 0, "split": 1, "index": self.index} | args
        span = Span(category, category, HOST_LANE, self.at, self.at + took, args)
        self.spans.append(span)
        self.at, self.index = self.at + took + 1, self.index + 1
        return span

    def launch(self, on: str, took: int = 50) -> None:
        call = self.host("launch", on=on, op="mul_mat")
        start = max(self.free[on], call.start_ns + 5)
        self.free[on] = start + took
        args = {k: v for k, v in call.args.items() if k != "on"} | {"kind": "launch"}
        times = start + self.off, start + took + self.off
        self.spans.append(Span("launch", "device", on, *times, args))

    def sync(self, on: str | None = None, event: str | None = None, until: int = 0) -> None:
        self.host("sync", took=max(until - self.at, 0) + 3, on=on, event=event)

    def found(self) -> list[tuple[str, str, str]]:
        spans = sorted(self.spans, key=nesting_order)
        return [(f.kind, spans[f.source].category, spans[f.sink].category) for f in flows_of(spans)]


def token(step: int, at: int, n_launches: int = 4) -> list[Span]:
    """The spans of one token: a host split, a copy, a device split, as the engine records them."""
    copy = {"index": 2, "step": step, "split": 1, "stream": 1, "bytes": 4096}
    spans, host = [], HOST_LANE

    def add(name: str, category: str, lane: str, start: int, end: int, **args: Any) -> None:
        spans.append(Span(name, category, lane, at + start, at + end, args))

    add("inp", "write", host, 10, 20, index=0, step=step, split=-1)
    add("embd", "launch", host, 30, 90, index=1, step=step, split=0)
    add("split 0", "split", host, 30, 100, split=0, backend="host")
    add("embd", "copy", host, 100, 110, **copy)
    add("embd", "device", "embedded stream 1", 111, 140, **copy, kind="copy")
    for i in range(n_launches):
        args = {"index": 3 + i, "step": step, "split": 1, "stream": 0, "op": "mul_mat"}
        add(f"node-{i}", "launch", host, 110 + 10 * i, 120 + 10 * i, **args)
        start = 150 + 50 * i
        add(f"node-{i}", "device", "embedded stream 0", start, start + 50, **args, kind="launch")
    end = 150 + 50 * n_launches
    add("split 1", "split", host, 100, 110 + 10 * n_launches, split=1)
    add("logits", "sync", host, 120 + 10 * n_launches, end + 5, index=99, step=step)
    add("step", "step", host, 0, end + 10, step=step, n_tokens=1)
    return spans


def test_a_wait_leads_back_to_the_latest_record_of_its_event() -> None:
    trace = Trace()
    trace.host("wait", on=STREAMS[0], event="e")  # of a record before the trace
    trace.launch(STREAMS[1])
    trace.host("record", on=STREAMS[1], event="e")
    trace.launch(STREAMS[1])
    trace.host("record", on=STREAMS[1], event="e")
    trace.host("wait", on=STREAMS[0], event="e")
    trace.host("wait", on=STREAMS[0], event="another")
    spans = sorted(trace.spans, key=nesting_order)
    (arrow,) = [f for f in flows_of(spans) if f.kind == EVENT]
    assert spans[arrow.source].args["index"] == 4 and spans[arrow.sink].args["index"] == 5


def test_the_host_s_wait_ends_with_the_work_that_it_is_for() -> None:
    trace = Trace()
    trace.launch(STREAMS[0], 500)
    trace.host("record", on=STREAMS[0], event="e")
    trace.launch(STREAMS[0], 70)  # behind the record
    trace.launch(STREAMS[1], 20)
    trace.sync(event="e", until=trace.free[STREAMS[0]] - 70)
    trace.sync(on=STREAMS[0], until=trace.free[STREAMS[0]])
    spans = sorted(trace.spans, key=nesting_order)
    arrows = [f for f in flows_of(spans) if f.kind == WAIT]
    work = [spans[f.source].end_ns - spans[f.source].start_ns for f in arrows]
    assert work == [500, 70] and all(f.from_end and f.to_end for f in arrows)
    assert [k for k, *_ in trace.found()].count(ISSUE) == 3


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["launch", "record", "wait", "sync", "sync event"]),
              st.sampled_from(STREAMS), st.sampled_from(["e", "f"])),
    max_size=25,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.sampled_from([0, 0, 3, -3, 40, -40, 4000, -4000]))
def test_both_ends_of_an_arrow_exist_and_none_runs_backwards(actions, off: int) -> None:
    trace = Trace(off)
    for action, on, event in actions:
        if action == "launch":
            trace.launch(on)
        elif action == "sync":
            trace.sync(on=on, until=trace.free[on])
        elif action == "sync event":
            trace.sync(event=event, until=max(trace.free.values()))
        else:
            trace.host(action, on=on, event=event)
    # asserts that both ends are there, in order
    packed = decoded.perfetto(perfetto.encode(trace.spans))
    plain = decoded.chrome(chrome.encode(trace.spans))
    assert len(packed.arrows) == len(plain.arrows)
    if off == 0:
        launches = sum(action == "launch" for action, *_ in actions)
        assert [k for k, *_ in trace.found()].count(ISSUE) == launches, "none is left out"


# slices -------------------------------------------------------------------------------------------


def test_empty_touching_and_overlapping_spans() -> None:
    spans = [
        Span("step", "step", HOST_LANE, 0, 100, {}),
        Span("a", "launch", HOST_LANE, 10, 50, {"us": 0.5, "fused": False}),
        Span("b", "launch", HOST_LANE, 50, 50, {}),  # touches a, has no length
        Span("c", "launch", HOST_LANE, 50, 100, {}),
        Span("d", "read", HOST_LANE, 100, 100, {}),  # at the end of the step, inside it
        Span("x", "device", STREAMS[0], 10, 40, {}),
        Span("y", "device", STREAMS[0], 30, 60, {}),  # overlaps x: a track of its own
    ]
    slices = {s.name: s for s in decoded.perfetto(perfetto.encode(spans)).slices}
    assert {slices[name].track for name in "abcd"} == {slices["step"].track}
    assert slices["a"].args == spans[1].args and slices["x"].track != slices["y"].track
    found = {(s.name, s.start_ns, s.end_ns, f"{s.process} {s.thread}") for s in slices.values()}
    lanes = {HOST_LANE: "host host"}
    assert found == {(s.name, s.start_ns, s.end_ns, lanes.get(s.lane, s.lane)) for s in spans}


def test_a_command_recorded_twice_keeps_its_pairs(tmp_path: Path) -> None:
    """And a span costs well under 100 bytes."""
    arrows = decoded.perfetto(perfetto.encode(token(0, 0) + token(0, 5000))).arrows
    assert len(arrows) == 10  # per token a copy and four launches; the host's own launch has none
    assert all((a.source.start_ns < 5000) == (a.sink.start_ns < 5000) for a in arrows)
    spans = token(0, 0, 500)
    assert 0 < perfetto.write(spans, tmp_path / "t.pftrace") < 100 * len(spans)
    assert decoded.perfetto(perfetto.encode([])).slices == []
