"""Where traced time went: kernels, phases and gaps of traces worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fake_cupti import CudaEngine, FakeCupti
from workbench.benchmarks.times import profiling
from workbench.common.errors import UsageError
from workbench.graph.ops import touched_bytes
from workbench.report import profiles
from workbench.trace import analysis
from workbench.trace.profile import Timeline, profile
from workbench.trace.spans import HOST_LANE, LOGITS_WAIT, Span

LANE = "embedded stream 0"


def step(n: int, at: int, late: int = 0) -> list[Span]:
    """us: host   step 0..100: batch 0..5, write 5..8, host launch 8..12, launch 20..22, launch
    30..32, wait 40..90, read 90..95; device launches 25..35 and, `late` us later, 36..86."""
    made: list[Span] = []

    def add(name: str, kind: str, lane: str, start: int, end: int, **args: Any) -> None:
        category = "device" if lane != HOST_LANE else kind
        args = {"step": n, "kind": kind} | args if category == "device" else {"step": n} | args
        made.append(Span(name, category, lane, 1000 * (at + start), 1000 * (at + end), args))

    add("batch", "build", HOST_LANE, 0, 5)
    add("token", "write", HOST_LANE, 5, 8, index=0, split=-1)
    add("embd", "launch", HOST_LANE, 8, 12, index=1, split=0, op="get_rows", bytes=4000,
        on="host stream 0")  # fmt: skip
    for i, (name, op, nbytes) in enumerate(
        (("q-0", "mul_mat", 10_000), ("q-1", "mul_mat", 50_000))
    ):
        what = {"index": 2 + i, "split": 1, "op": op, "bytes": nbytes, "on": LANE}
        add(name, "launch", HOST_LANE, 20 + 10 * i, 22 + 10 * i, **what)
        start, end = ((25, 35), (36 + late, 86 + late))[i]
        add(name, "launch", LANE, start, end, **what)
    add(LOGITS_WAIT, "sync", HOST_LANE, 40, 90, index=4, split=-1)
    add("logits", "read", HOST_LANE, 90, 95, index=5, split=-1)
    add(f"step {n}", "step", HOST_LANE, 0, 100, n_tokens=1)
    return made


def frame(*steps: list[Span]) -> pd.DataFrame:
    return Timeline([s for one in steps for s in one]).to_frame()


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
    assert all(c.startswith("traced") for c in table.columns if c.endswith(("us", "gbps", "share")))


def test_kernels_are_refused_by_what_no_span_tells() -> None:
    with pytest.raises(UsageError, match="only CUPTI does; use by=op"):
        analysis.kernels(frame(step(0, 0)), by="kernel")
    with pytest.raises(UsageError, match="by='layer' does not exist"):
        analysis.kernels(frame(step(0, 0)), by="layer")


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
    assert (first["before"], first["after"]) == ("mul_mat", "mul_mat")
    # the device was through at 86; the next launch was called at 140 and began at 145
    assert (between["host_us"], between["device_us"]) == (54, 5)
    assert (first["host_us"], first["device_us"]) == (0, 1) and last["device_us"] == 5
    kinds = ["build", "write", "launch", "sync", "read", "python", "outside"]
    assert {k: between[k] for k in kinds} == {
        "build": 5, "write": 3, "launch": 6, "sync": 4, "read": 5, "python": 16, "outside": 20,
    }  # fmt: skip
    assert table[kinds].sum(axis=1).tolist() == pytest.approx(table["traced_us"].tolist())


def test_a_gap_is_behind_what_ended_last_on_any_stream() -> None:
    """us: q 0..30, and beside it k 5..10 on another stream; out 40..50."""
    made = []
    for n, (op, lane, start, end) in enumerate(
        (("q", 0, 0, 30), ("k", 2, 5, 10), ("out", 0, 40, 50))
    ):
        args = {"step": 0, "index": n, "split": 1, "op": op, "kind": "launch"}
        on = f"embedded stream {lane}"
        made.append(Span(op, "launch", HOST_LANE, 1000 * n, 1000 * n + 500, args | {"on": on}))
        made.append(Span(op, "device", on, 1000 * start, 1000 * end, args))
    (gap,) = analysis.gaps(frame(made)).to_dict("records")
    assert (gap["before"], gap["after"], gap["traced_us"]) == ("q", "out", 10)


def test_nothing_recorded_gives_empty_tables() -> None:
    for spans in ([], [s for s in step(0, 0) if s.lane == HOST_LANE and s.category != "launch"]):
        empty = Timeline(spans).to_frame()
        assert analysis.kernels(empty).empty and analysis.gaps(empty).empty
        assert "traced_us" in analysis.kernels(empty)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=5))
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
    kinds = [c for c in table if c not in (*analysis.GAPS, "host_us", "device_us")]
    assert (table[kinds].sum(axis=1) - table["traced_us"]).abs().max() < 1e-6
    assert (table[kinds] >= -1e-9).all(axis=None)


def test_bytes_come_from_the_op_table_and_a_launch_of_several_kernels_is_counted_once(
    monkeypatch,
) -> None:
    engine = CudaEngine(FakeCupti().install(monkeypatch))
    with profile(engine, window=(1, 2), nvtx=False) as prof:
        for _ in range(4):
            engine.step()
    nodes = {c.node.name: c.node for c in engine.program.commands if c.kind == "launch"}
    table = prof.kernels().set_index("op")
    assert table.loc["mul_mat", "bytes"] == 2 * touched_bytes(nodes["product"])
    assert table.loc["mul_mat", "calls"] == 2, "one launch a step, of four kernels"
    product = [s for s in prof.timeline.spans if s.category == "device" and s.name == "product"]
    assert {s.args["kernels"] for s in product} == {5}  # a memset among them
    by_kernel = prof.kernels(by="kernel").set_index("kernel")
    assert by_kernel.loc["half_rows", "calls"] == 2 and pd.isna(by_kernel.loc["half_rows", "bytes"])
    assert by_kernel.loc["add", "bytes"] == 2 * touched_bytes(nodes["sum"])
    on_device = table[table["on"] != HOST_LANE]
    device_kernels = by_kernel[by_kernel["on"] != HOST_LANE]
    assert device_kernels["traced_us"].sum() == pytest.approx(on_device["traced_us"].sum())
    assert "steps" in set(prof.gaps()["between"])
    assert "issue" in set(prof.phases()["phase"])


def test_tables_for_reading_name_cupti_s_kernels_and_say_that_they_are_traced(monkeypatch) -> None:
    engine = CudaEngine(FakeCupti().install(monkeypatch))
    with profile(engine, window=(1, 3), nvtx=False) as prof:
        for _ in range(6):
            engine.step()
    us = [[0, 0, 1, 100.0, 50.0, None, None], [0, 1, 1, 100.0, 50.0, 20.0, 70.0]]
    steps = pd.DataFrame(us, columns=profiling.STEPS)
    counted = pd.DataFrame({"n_tokens": 1, **dict.fromkeys(profiling.PHASES, 0.0)}, index=[0, 1])
    counted["issue"] = [11.0, 13.0]
    found = profiling.Profiled(
        "tg3", 1, steps, counted, True, (1, 3), prof,
        profiling.Bandwidth(4000.0, "read bandwidth 4000.0 GB/s"),
    )  # fmt: skip
    (_, time), (title, kernels), (_, host), (_, gaps) = profiles.lines(found, by="kernel")
    assert time["untraced us"].tolist() == ["70.0 (70.0..70.0)"]
    assert time["untraced gap us"].tolist() == ["20.0 (20.0..20.0)"]
    named = kernels["kernel"].dropna().tolist()
    assert {"half_rows", "ampere_gemm", "splitKreduce", "add_bias", "add"} <= set(named)
    assert prof.collector == "cupti" and "4000.0 GB/s" in title and "times as slow" in title
    rows = host.set_index(["phase", "part"])["untraced us"]
    assert rows["issue", "all"] == "12.0" and rows["issue", "launch"] == ""
    assert gaps["between steps"].iloc[0] == "1"
    alone = found._replace(trace=SimpleNamespace(
        to_frame=prof.to_frame, slowdown=None, kernels=prof.kernels, phases=prof.phases,
        gaps=lambda: prof.gaps()[:0],
    ))  # fmt: skip
    *_, (title, none) = profiles.lines(alone)
    assert title.endswith(": none") and none.empty and "slowdown unknown" in title
    for table in (kernels, host, gaps):
        timed = [c for c in table if c.split()[-1] in ("us", "%", "GB/s", "launch", "read")]
        assert timed and all(c.startswith(("traced", "untraced")) for c in timed)


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
    assert gaps.loc["gaps"].tolist() == ["1", "1"]
    assert gaps.loc["all"].tolist() == ["59.0", "1.0"]
    parts = gaps.drop(index=["gaps", "all"])["between steps"].astype(float)
    assert parts[parts.index.str.startswith("meanwhile")].sum() == pytest.approx(59)
