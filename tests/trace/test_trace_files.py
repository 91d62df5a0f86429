"""Traces made by hand: their files, in which arrows have both ends and run forwards; and tables."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace import decoded
from workbench.common.errors import UsageError
from workbench.report import profiles
from workbench.trace import analysis, chrome, perfetto
from workbench.trace.flows import EVENT, ISSUE, WAIT, Flow, flows_of
from workbench.trace.lanes import nesting_order
from workbench.trace.profile import COLUMNS, Timeline, profile
from workbench.trace.spans import HOST_LANE, LOGITS_WAIT, Recorder, Span

STREAMS = ("cuda stream 0", "cuda stream 1")


class Trace:
    """Spans of commands issued one after the other; the device's clock is `off` ns off."""

    def __init__(self, off: int = 0) -> None:
        self.spans: list[Span] = []
        self.off, self.at, self.index, self.free = off, 10**6, 0, dict.fromkeys(STREAMS, 0)

    def host(self, category: str, took: int = 10, **args: Any) -> Span:
        args = {"step": 0, "split": 1, "index": self.index} | args
        self.spans.append(Span(category, category, HOST_LANE, self.at, self.at + took, args))
        self.at, self.index = self.at + took + 1, self.index + 1
        return self.spans[-1]

    def launch(self, on: str, took: int = 50) -> None:
        call = self.host("launch", on=on, op="mul_mat")
        start = max(self.free[on], call.start_ns + 5)
        self.free[on] = start + took
        args = {k: v for k, v in call.args.items() if k != "on"} | {"kind": "launch"}
        times = start + self.off, start + took + self.off
        self.spans.append(Span("launch", "device", on, *times, args))

    def sync(self, on: str | None = None, event: str | None = None, until: int = 0) -> None:
        self.host("sync", took=max(until - self.at, 0) + 3, on=on, event=event)

    def flows(self, kind: str) -> list[tuple[Span, Span, Flow]]:
        spans = sorted(self.spans, key=nesting_order)
        return [(spans[f.source], spans[f.sink], f) for f in flows_of(spans) if f.kind == kind]


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
    ((record, wait, _),) = trace.flows(EVENT)
    assert (record.args["index"], wait.args["index"]) == (4, 5)


def test_the_host_s_wait_ends_with_the_work_that_it_is_for() -> None:
    trace = Trace()
    trace.launch(STREAMS[0], 500)
    trace.host("record", on=STREAMS[0], event="e")
    trace.launch(STREAMS[0], 70)  # behind the record
    trace.launch(STREAMS[1], 20)
    trace.sync(event="e", until=trace.free[STREAMS[0]] - 70)
    trace.sync(on=STREAMS[0], until=trace.free[STREAMS[0]])
    arrows = trace.flows(WAIT)
    assert [work.end_ns - work.start_ns for work, *_ in arrows] == [500, 70]
    assert all(f.from_end and f.to_end for *_, f in arrows)
    assert len(trace.flows(ISSUE)) == 3


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
    launches = sum(action == "launch" for action, *_ in actions)
    assert off or len(trace.flows(ISSUE)) == launches, "none is left out"


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


LANE = "embedded stream 0"


def step(n: int, at: int, late: int = 0) -> list[Span]:
    """us: host   step 0..100: batch 0..5, write 5..8, host launch 8..12, launch 20..22, launch
    30..32, wait 40..90, read 90..95; device launches 25..35 and, `late` us later, 36..86."""
    first = {"index": 2, "split": 1, "op": "mul_mat", "bytes": 10_000, "on": LANE}
    second = first | {"index": 3, "bytes": 50_000}
    embd = {"index": 1, "split": 0, "op": "get_rows", "bytes": 4000, "on": "host stream 0"}
    rows: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("batch", "build", 0, 5, {}),
        ("token", "write", 5, 8, {"index": 0, "split": -1}),
        ("embd", "launch", 8, 12, embd),
        ("q-0", "launch", 20, 22, first),
        ("q-0", "device", 25, 35, first | {"kind": "launch"}),
        ("q-1", "launch", 30, 32, second),
        ("q-1", "device", 36 + late, 86 + late, second | {"kind": "launch"}),
        (LOGITS_WAIT, "sync", 40, 90, {"index": 4, "split": -1}),
        ("logits", "read", 90, 95, {"index": 5, "split": -1}),
        (f"step {n}", "step", 0, 100, {"n_tokens": 1}),
    ]
    return [
        Span(name, kind, LANE if kind == "device" else HOST_LANE, 1000 * (at + a), 1000 * (at + b),
             args | {"step": n})
        for name, kind, a, b, args in rows
    ]  # fmt: skip


def frame(*steps: list[Span]) -> pd.DataFrame:
    return Timeline([s for one in steps for s in one]).to_frame()


def test_a_recorder_keeps_order_times_and_a_failing_body() -> None:
    recorder = Recorder(nvtx=False)
    with pytest.raises(OSError), recorder.span("step", "step", step=3):
        with recorder.span("a", "copy", bytes=8):
            pass
        raise OSError
    inner, outer = recorder.spans
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    assert (inner.args, outer.args) == ({"bytes": 8}, {"step": 3})


def test_slowdown_compares_steps_of_as_many_tokens() -> None:
    recorder = Recorder((0, 4), nvtx=False)
    for n, (tokens, us) in enumerate([(64, 9000), (1, 300), (1, 320), (1, 310)]):
        recorder.add(f"step {n}", "step", HOST_LANE, 0, 1000 * us, step=n, n_tokens=tokens)
    for ns in (200_000, 150_000, 155_000):
        recorder.untraced(1, ns)
    recorder.untraced(64, 1)
    slowdown = recorder.slowdown
    assert slowdown == (1, 310.0, 3, 155.0, 3, 0.0) and slowdown.ratio == 2.0
    assert "between" not in str(slowdown)
    for ns in (90_000, 80_000, 70_000):
        recorder.read(ns)
    assert recorder.slowdown == slowdown._replace(reading_us=80.0)
    assert "; 80 us between two traced steps are the trace's own" in str(recorder.slowdown)


def test_a_trace_by_marks_tells_what_reading_them_took(engine: Any) -> None:
    """That time lies between the steps, where it would look like the device's waiting."""
    with profile(engine, window=(2, 3), nvtx=False, collector="events") as prof:
        engine.generate(tokens=[1, 2, 3], max_tokens=8)
    steps = [s for s in prof.recorder.spans if s.category == "step"]
    between = [b.start_ns - a.end_ns for a, b in itertools.pairwise(steps)]
    assert 0 < prof.slowdown.reading_us * 1e3 <= max(between)


def test_the_recorder_before_is_put_back(engine: Any) -> None:
    """A body that fails keeps its trace."""
    engine.recorder = before = Recorder(nvtx=False)
    try:
        with pytest.raises(OSError), profile(engine, nvtx=False) as prof:
            engine.step([1])
            raise OSError
        assert engine.recorder is before and not before.spans
        assert len(prof.summary()) == 1
    finally:
        engine.recorder = None


def test_a_frame_and_a_summary_of_two_steps() -> None:
    made = Timeline([*step(0, 0), *step(1, 120)])
    assert {c: str(t) for c, t in made.to_frame().dtypes.items()} == COLUMNS
    table = made.summary()
    row = table.loc[1]
    assert (row.waits, row.copies, row.launches, row.n_tokens) == (1, 0, 3, 1)
    assert (row.step_us, row.build_us, row.host_us, row.wait_us) == (100, 5, 16, 50)
    # device work 25..35 and 36..86, then nothing until 145
    assert (row.device_us, row.idle_us, row.gap_us) == (60, 1, 145 - 86)
    assert pd.isna(table.loc[0].gap_us)
    host = Timeline([s for s in step(0, 0) if s.lane == HOST_LANE]).summary().loc[0]
    assert host.launches == 3 and pd.isna(host.device_us) and pd.isna(host.gap_us)


def test_kernels_by_op_and_by_node() -> None:
    table = analysis.kernels(frame(step(0, 0), step(1, 120)), read_gbps=2.0).set_index("op")
    product, rows = table.loc["mul_mat"], table.loc["get_rows"]
    assert (product["calls"], product["traced_us"], product["bytes"]) == (4, 120, 120_000)
    assert product["traced_us_per_step"] == 60 and product["traced_us_per_call"] == 30
    assert product["traced_gbps"] == pytest.approx(1.0)
    assert product["traced_share_of_read"] == pytest.approx(0.5)
    assert product["traced_launch_to_start_us"] == pytest.approx(5.5)  # 5 and 6, twice each
    assert (rows["on"], rows["traced_us"]) == ("host", 8) and pd.isna(rows["traced_share_of_read"])
    assert pd.isna(rows["traced_launch_to_start_us"]), "what ran in the call was not launched"
    assert table["traced_share"].sum() == pytest.approx(1)
    named = analysis.kernels(frame(step(0, 0)), by="node")
    assert list(named["node"]) == ["q", "embd"], "the layers of a model are one row"
    for by, words in (("kernel", "only CUPTI does; use by=op"), ("layer", "does not exist")):
        with pytest.raises(UsageError, match=words):
            analysis.kernels(frame(step(0, 0)), by=by)


def test_phases_are_the_host_s_and_add_up() -> None:
    table = analysis.phases(frame(step(0, 0), step(1, 120)))
    us = table.set_index(["phase", "part"])["traced_us_per_step"].to_dict()
    assert us == {
        ("build", "batch"): 5, ("issue", "write"): 3, ("issue", "launch"): 8,
        ("results", "sync"): 50, ("results", "read"): 5, ("rest", "python"): 29,
        ("rest", "outside"): 20,
    }  # fmt: skip
    calls = table.set_index("part")["traced_calls_per_step"]
    assert calls["launch"] == 3 and calls["batch"] == 1
    assert table["traced_share"].sum() == pytest.approx(1)


def test_gaps_and_who_is_to_blame() -> None:
    table = analysis.gaps(frame(step(0, 0), step(1, 120, late=4)))
    assert list(table["between"]) == ["launches", "steps", "launches"]
    assert list(table["traced_us"]) == [1, 59, 5]
    first, between, last = table.to_dict("records")
    # the device was through at 86; the next launch was called at 140 and began at 145
    assert (between["host_us"], between["device_us"]) == (54, 5)
    assert (first["host_us"], first["device_us"]) == (0, 1) and last["device_us"] == 5
    kinds = ["build", "write", "launch", "sync", "read", "python", "outside"]
    assert {k: between[k] for k in kinds} == {
        "build": 5, "write": 3, "launch": 6, "sync": 4, "read": 5, "python": 16, "outside": 20,
    }  # fmt: skip


def test_a_gap_is_behind_what_ended_last_on_any_stream() -> None:
    """us: q 0..30, and beside it k 5..10 on another stream; out 40..50."""
    made = []
    for n, (op, k, start, end) in enumerate((("q", 0, 0, 30), ("k", 2, 5, 10), ("out", 0, 40, 50))):
        args = {"step": 0, "index": n, "split": 1, "op": op, "kind": "launch"}
        lane = f"embedded stream {k}"
        made.append(Span(op, "launch", HOST_LANE, 1000 * n, 1000 * n + 500, args | {"on": lane}))
        made.append(Span(op, "device", lane, 1000 * start, 1000 * end, args))
    (gap,) = analysis.gaps(frame(made)).to_dict("records")
    assert (gap["before"], gap["after"], gap["traced_us"]) == ("q", "out", 10)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=5))
@pytest.mark.long
def test_gaps_are_what_kernels_leave_of_the_time(starts: list[tuple[int, int]]) -> None:
    """pauses between steps, and lateness of each step's second kernel."""
    at, steps = 0, []
    for n, (pause, late) in enumerate(starts):
        steps.append(step(n, at, late))
        at += 120 + pause
    made = frame(*steps)
    device = made[made["category"] == "device"]
    whole = (device["start_us"] + device["dur_us"]).max() - device["start_us"].min()
    table = analysis.gaps(made)
    assert table["traced_us"].sum() == pytest.approx(whole - device["dur_us"].sum())
    assert (table[["host_us", "device_us"]].sum(axis=1) - table["traced_us"]).abs().max() < 1e-6
    kinds = [c for c in table if c not in analysis.GAPS]
    assert (table[kinds].sum(axis=1) - table["traced_us"]).abs().max() < 1e-6
    assert (table[kinds] >= -1e-9).all(axis=None)


def test_one_disturbed_step_does_not_stand_for_all() -> None:
    """Of five steps the fourth has a kernel that takes 300 us longer; then the host pauses."""
    steps = [step(n, 120 * n + 400 * (n > 3)) for n in range(5)]
    late = [s.name == "q-1" and s.category == "device" for s in steps[3]]
    steps[3] = [
        s._replace(end_ns=s.end_ns + 300_000 * slow) for s, slow in zip(steps[3], late, strict=True)
    ]
    made = frame(*steps)
    kernels = analysis.kernels(made).set_index("op").loc["mul_mat"]
    assert kernels["traced_us"] == 5 * 60 + 300 and kernels["traced_us_per_step"] == 60
    assert kernels["traced_gbps"] == pytest.approx(1.0)
    host = analysis.phases(made).set_index("part")["traced_us_per_step"]
    assert host["outside"] == 20 and host["sync"] == 50
    gaps = profiles.gaps_table(analysis.gaps(made), 5).set_index("traced us")
    assert gaps.loc["gaps (count)"].tolist() == ["1", "1"]
    assert gaps.loc["all"].tolist() == ["59.0", "1.0"]
    parts = gaps.drop(index=["gaps (count)", "all"])["between steps"].astype(float)
    assert parts[parts.index.str.startswith("meanwhile")].sum() == pytest.approx(59)


def test_a_kernel_of_a_single_step_of_three_takes_nothing_in_a_step() -> None:
    once = [s._replace(args=s.args | {"op": "fused"} if s.name == "q-1" else s.args)
            for s in step(0, 0)]  # fmt: skip
    kernels = analysis.kernels(frame(once, step(1, 120), step(2, 240))).set_index("op")
    assert kernels.loc["fused", "traced_us"] == 50
    assert kernels.loc["fused", "traced_us_per_step"] == 0, "the median of 50, 0 and 0"
