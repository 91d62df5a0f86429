"""Plans in a trace: a replay's parts have spans of their own, and tables know every command."""

from __future__ import annotations

import json
from typing import Any

import pytest

import workbench as wb
from tests.oracles.trace_pattern import LETTERS, trace_pattern
from workbench.benchmarks.times.gaps import host_gaps
from workbench.benchmarks.times.profiling import profile_test, runs_on_device
from workbench.benchmarks.workload import Workload
from workbench.program import commands
from workbench.program.commands import Command, Copy, Launch, Program, Replay
from workbench.report.timelines import LOOKS, timeline
from workbench.trace import chrome
from workbench.trace.flows import ISSUE, WAIT, flows_of
from workbench.trace.profile import profile
from workbench.trace.spans import CATEGORIES, HOST_LANE

SCOPES: dict[str, dict[str, Any]] = {
    "split": {"plans": "ours"},
    "step": {"plans": "ours", "plan_scope": "step", "sync": "implicit", "copy_stream": "compute"},
    "step, two streams": {
        "plans": "ours", "plan_scope": "step", "sync": "event_guarded", "copy_stream": "own",
    },
    "split, branches": {"plans": "ours", "streams": "3"},
    "step, branches anywhere": {
        "plans": "ours", "plan_scope": "step", "sync": "implicit", "copy_stream": "compute",
        "streams": "8", "fork": "any",
    },
}  # fmt: skip
STEPS = 3


@pytest.fixture(scope="module")
def base(tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=64, toggles=wb.Toggles()
    ) as engine:
        yield engine


def traced(base: wb.Engine, **toggles: str) -> tuple[Any, Program]:
    """A profile of STEPS tokens, and the program of each."""
    with base.variant(wb.Toggles(graph_reuse="set_rows", **toggles)) as engine:
        engine.prefill([1, 2, 3])
        with profile(engine, collector="events") as made:
            for token in range(STEPS):
                engine.step([5 + token])
        return made, engine.program()


@pytest.fixture(scope="module", params=SCOPES)
def planned(request, base):
    return traced(base, **SCOPES[request.param])


def test_every_part_has_a_span_of_its_own(planned):
    made, program = planned
    frame = made.to_frame()
    (number,) = [i for i, c in enumerate(program.commands) if isinstance(c, Replay)]
    parts = program.commands[number].parts
    wanted = {n: part for n, part in enumerate(parts) if isinstance(part, (Copy, Launch))}
    device = frame[(frame["category"] == "device") & frame["part"].notna()]
    assert set(device["index"]) == {number}
    for _, step in device.groupby("step"):
        assert sorted(step["part"]) == sorted(wanted)
        for row in step.itertuples():
            part = wanted[row.part]
            assert (row.name, row.kind, row.split) == (part.label, part.kind, part.split)
            assert row.lane == f"embedded stream {part.stream.id}"
            assert row.op == part.node.op if isinstance(part, Launch) else row.bytes
        by_lane = step.sort_values("start_us").groupby("lane")["part"]
        assert all(list(numbers) == sorted(numbers) for _, numbers in by_lane)
    replays = [s for s in made.timeline.spans if s.category == "replay"]
    assert {(s.lane, s.args["parts"], s.args["plan"]) for s in replays} == {
        (HOST_LANE, len(parts), 0)
    }
    assert not ((frame["category"] == "device") & (frame["kind"] == "replay")).any()


def test_tables_of_a_trace_with_plans_are_those_of_a_trace_without(planned, base):
    made, program = planned
    plain, without = traced(base, sync=program.sync, copy_stream=program.copy_stream)
    ours, theirs = (p.kernels().set_index("op").sort_index() for p in (made, plain))
    assert ours[["calls", "bytes"]].equals(theirs[["calls", "bytes"]])
    summary = made.summary()
    assert list(summary["replays"]) == [1] * STEPS and "replays" not in plain.summary()
    assert list(summary["copied_bytes"]) == list(plain.summary()["copied_bytes"])
    counts = program.counts()
    for name in ("waits", "copies", "launches", "replays", "copied_bytes"):
        assert list(summary[name]) == [counts[name]] * STEPS
    gaps, phases = made.gaps(), made.phases()
    assert {"replay"} <= set(gaps.columns) and "replay" in set(phases["part"])
    assert set(gaps["after"]) <= set(ours.index) | {"replay"}
    assert trace_pattern(made) == program.pattern() != without.pattern()


def test_arrows_go_into_a_replay_and_out_of_it(planned):
    made, _ = planned
    spans = sorted(made.timeline.spans, key=lambda s: s.start_ns)
    arrows = flows_of(spans)
    for n, span in enumerate(spans):
        if span.category == "replay":
            (into,) = [a for a in arrows if a.kind == ISSUE and a.source == n]
            assert spans[into.sink].args["part"] >= 0
    (waited,) = {spans[a.source].name for a in arrows
                 if a.kind == WAIT and spans[a.sink].name == "wait logits"}  # fmt: skip
    assert waited == "result_output"


def test_pictures_and_files_show_replays(planned):
    made, _ = planned
    labels = [text.get_text() for text in timeline(made).legends[0].get_texts()]
    assert LOOKS["replay"].word in labels
    events = json.loads(chrome.encode(made.timeline.spans))["traceEvents"]
    assert {e["args"]["parts"] for e in events if e.get("cat") == "replay"}
    assert any("part" in e.get("args", {}) for e in events if e.get("cat") == "device")


def test_a_plan_issued_part_by_part_is_one_span_and_no_op_s(base):
    made, _ = traced(base, plans="ours", plan_batch="one", plan_warmup="2", plan_evict="never")
    frame = made.to_frame()
    whole = frame[(frame["category"] == "device") & (frame["kind"] == "replay")]
    assert len(whole) == 1  # then two equal calls have come
    by_op = made.kernels().set_index("op")
    assert by_op.loc["replay", "calls"] == 1 and by_op["bytes"].isna()["replay"]
    assert by_op.loc["mul_mat", "calls"] > 1


def test_every_kind_of_command_is_known_to_all_that_draw_it():
    kinds = {
        found.kind
        for found in vars(commands).values()
        if isinstance(found, type) and issubclass(found, Command) and "kind" in vars(found)
    }
    assert kinds == {"write", "read", "copy", "launch", "record", "wait", "sync", "replay"}
    assert kinds <= set(CATEGORIES) and kinds <= set(LOOKS)
    assert kinds - {"write", "read"} == set(LETTERS)


@pytest.mark.slow
def test_what_measures_takes_a_replay_for_work_of_the_device(base):
    toggles = {name: wb.Toggles(graph_reuse="set_rows", **SCOPES["step"] | {"sync": sync})
               for name, sync in (("one", "implicit"), ("another", "packed_implicit"))}  # fmt: skip
    with base.variant(toggles["one"]) as engine:
        assert runs_on_device(engine)
        found = profile_test(engine, Workload(0, 12), repetitions=1)
        assert (found.steps["kernels_us"] > 0).all() and found.steps["gap_us"].notna().sum() > 0
        gaps = host_gaps(engine, toggles, n_tokens=4, rounds=2)
    assert set(gaps.table()["arm"]) >= {"one", "another"}
