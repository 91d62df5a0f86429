"""The critical path of a step and the difference of two traces: by hand, and of real traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.profiles import examples
from tests.trace.test_trace_files import ACTIONS, STREAMS, Trace, step
from tests.trace.test_trace_imports import FILES, REAL
from workbench.common.errors import UsageError
from workbench.report import differences
from workbench.trace import diff as diffs
from workbench.trace.critical import BOUNDS, COLUMNS, critical_path
from workbench.trace.profile import profile
from workbench.trace.spans import HOST_LANE, LOGITS_WAIT, Recorded, Span

A, B = STREAMS


def prof(*spans: list[Span], tool: str = "events") -> wb.Profile:
    return wb.Profile(Recorded([s for part in spans for s in part], tool, source="by hand"))


def whole(found: pd.DataFrame, wanted_us: float) -> None:
    """Asserts that the parts follow each other, and are the step."""
    assert list(found.columns) == COLUMNS and set(found["bound"]) <= set(BOUNDS)
    assert found["dur_us"].sum() == pytest.approx(wanted_us, abs=1e-3)
    assert found.attrs["step_us"] == pytest.approx(wanted_us, abs=1e-3)
    ends = (found["start_us"] + found["dur_us"]).to_numpy()[:-1]
    np.testing.assert_allclose(ends, found["start_us"].to_numpy()[1:], atol=1e-3)
    assert (found["dur_us"] > 0).all()
    sums = found.groupby("bound")["dur_us"].sum()
    assert found.attrs["bounds"] == pytest.approx(dict.fromkeys(BOUNDS, 0.0) | sums.to_dict())
    assert sum(found.attrs["bounds"].values()) == pytest.approx(wanted_us, abs=1e-3)
    assert sum(found.attrs["host"].values()) == pytest.approx(found.attrs["bounds"]["host"])
    on_path = found.attrs["bounds"]["kernel"] + found.attrs["bounds"]["copy"]
    assert found.attrs["device_us"] >= on_path - 1e-3


# the critical path --------------------------------------------------------------------------------


def test_the_path_of_a_step_names_what_bounds_each_part() -> None:
    """us: the host up to the launch of q-0 (20..22), whose kernel (25..35) delays q-1 (36..86)."""
    found = prof(step(0, 0)).critical_path()
    whole(found, 100)
    assert found[["what", "bound", "dur_us"]].to_numpy().tolist() == [
        ["batch", "host", 5], ["token", "host", 3], ["embd", "host", 4], ["python", "host", 8],
        ["q-0", "host", 2], ["q-0", "launch", 3], ["q-0", "kernel", 10],
        ["q-1", "launch", 1], ["q-1", "kernel", 50], [LOGITS_WAIT, "wait", 4],
        ["logits", "host", 5], ["python", "host", 5],
    ]  # fmt: skip
    assert found.attrs["line"] == (
        "step 0: 100.0 us = host 32.0 us (32%) + launch 4.0 us (4%) + copy 0.0 us (0%) + "
        "kernel 60.0 us (60%) + wait 4.0 us (4%); of host: python 13.0 us, issue 9.0 us, "
        "build 5.0 us, results 5.0 us; the device worked 60.0 us, 60.0 us of it on the path"
    )
    late = prof(step(0, 0), step(1, 120, late=4)).critical_path(step=1)
    assert late.set_index(["what", "bound"])["dur_us"]["q-1", "launch"] == 5


def made(*rows: tuple[str, str, str, float, float, dict[str, Any]]) -> wb.Profile:
    """Spans of step 0 from (name, category, lane, start us, end us, args)."""
    return prof([
        Span(name, kind, lane, int(1000 * a), int(1000 * b), args | {"step": 0})
        for name, kind, lane, a, b, args in rows
    ])  # fmt: skip


def test_the_path_goes_over_an_event_to_the_stream_that_was_waited_for() -> None:
    """us: a copy on B 5..40; A's kernel waits for it and begins at 42, not after A's own work."""
    work = {"kind": "launch"}
    found = made(
        ("step", "step", HOST_LANE, 0, 60, {}),
        ("k0", "launch", HOST_LANE, 0, 2, {"index": 0, "on": A}),
        ("c", "copy", HOST_LANE, 2, 4, {"index": 1, "on": B}),
        ("record", "record", HOST_LANE, 4, 5, {"index": 2, "on": B, "event": "e"}),
        ("wait", "wait", HOST_LANE, 5, 6, {"index": 3, "on": A, "event": "e"}),
        ("k1", "launch", HOST_LANE, 6, 8, {"index": 4, "on": A}),
        ("sync", "sync", HOST_LANE, 8, 58, {"index": 5, "on": A}),
        ("k0", "device", A, 3, 10, {"index": 0} | work),
        ("c", "device", B, 5, 40, {"index": 1, "kind": "copy"}),
        ("k1", "device", A, 42, 55, {"index": 4} | work),
    ).critical_path()
    whole(found, 60)
    assert found[["lane", "what", "bound"]].to_numpy().tolist() == [
        [HOST_LANE, "k0", "host"], [HOST_LANE, "c", "host"], [B, "c", "launch"],
        [B, "c", "copy"], [A, "k1", "launch"], [A, "k1", "kernel"],
        [HOST_LANE, "sync", "wait"], [HOST_LANE, "python", "host"],
    ]  # fmt: skip


def test_a_host_that_is_late_bounds_the_path_and_a_wait_that_waits_for_nothing_does_not() -> None:
    work = {"kind": "launch"}
    found = made(
        ("step", "step", HOST_LANE, 0, 50, {}),
        ("k0", "launch", HOST_LANE, 0, 2, {"index": 0, "on": A}),
        ("early", "sync", HOST_LANE, 20, 22, {"index": 1, "on": A}),
        ("k1", "launch", HOST_LANE, 30, 32, {"index": 2, "on": A}),
        ("sync", "sync", HOST_LANE, 32, 50, {"index": 3, "on": A}),
        ("k0", "device", A, 3, 10, {"index": 0} | work),
        ("k1", "device", A, 33, 45, {"index": 2} | work),
    ).critical_path()
    whole(found, 50)
    assert found[["what", "bound", "dur_us"]].to_numpy().tolist() == [
        ["k0", "host", 2], ["python", "host", 18], ["early", "host", 2], ["python", "host", 8],
        ["k1", "host", 2], ["k1", "launch", 1], ["k1", "kernel", 12], ["sync", "wait", 5],
    ]  # fmt: skip
    assert (found.attrs["device_us"], found.attrs["late_us"]) == (19, 0)


def test_a_device_that_was_through_is_beside_the_path_and_the_line_says_by_how_much() -> None:
    """us: the kernel is over at 10, the host comes to wait for it at 40."""
    found = made(
        ("step", "step", HOST_LANE, 0, 50, {}),
        ("k0", "launch", HOST_LANE, 0, 2, {"index": 0, "on": A}),
        ("sync", "sync", HOST_LANE, 40, 42, {"index": 1, "on": A}),
        ("k0", "device", A, 3, 10, {"index": 0, "kind": "launch"}),
    ).critical_path()
    whole(found, 50)
    assert set(found["bound"]) == {"host"}
    assert (found.attrs["device_us"], found.attrs["late_us"]) == (7, 30)
    assert found.attrs["line"].endswith(
        "of host: python 46.0 us, issue 4.0 us; the device worked 7.0 us, 0.0 us of "
        "it on the path; it was through 30.0 us before the host came to wait for it"
    )


def test_a_call_that_only_queued_its_copy_is_the_hosts_though_the_copy_is_over() -> None:
    """us: the call lasts 50, the copy 1 of them; a call of 50 that copies for 40 waited."""
    for copied, wanted in ((1, {"host": 60}), (40, {"host": 10, "launch": 8, "copy": 40})):
        found = made(
            ("step", "step", HOST_LANE, 0, 60, {}),
            ("c", "copy", HOST_LANE, 5, 55, {"index": 0, "on": A}),
            ("c", "device", A, 13, 13 + copied, {"index": 0, "kind": "copy"}),
        ).critical_path()
        whole(found, 60)
        bounds = {bound: us for bound, us in found.attrs["bounds"].items() if us}
        assert bounds == pytest.approx(wanted if copied == 1 else wanted | {"wait": 2})


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=9),
    st.booleans(),
)
def test_kernels_that_begin_early_are_a_chain_of_ends(drawn, plan: bool) -> None:
    """us: kernels of one stream, each begun up to 30 before the kernel before it ended, and over
    after it: the path has each from the end before it, and no time between them. `plan`: all are
    parts of a plan, else each has a call."""
    rows: list[Any] = []
    begin, ended = 119, 120
    for n, (early, took) in enumerate(drawn):
        begin, end = max(begin + 1, ended - (early if n else 0)), ended + took
        args = {"index": 0, "part": n} if plan else {"index": n}
        rows.append((f"k{n}", "device", A, begin, end, args | {"kind": "launch"}))
        ended = end
    calls = [("plan", "replay")] if plan else [(f"k{n}", "launch") for n in range(len(drawn))]
    for n, (name, category) in enumerate(calls):
        rows.append((name, category, HOST_LANE, 5 * n, 5 * n + 4, {"index": n, "on": A}))
    rows.append(("sync", "sync", HOST_LANE, 50, ended + 3, {"index": len(calls), "on": A}))
    found = made(("step", "step", HOST_LANE, 0, ended + 3, {}), *rows).critical_path()
    whole(found, ended + 3)
    kernels = found[found["bound"] == "kernel"]
    assert kernels["what"].tolist() == [f"k{n}" for n in range(len(drawn))]
    assert kernels["dur_us"].tolist() == pytest.approx([took for _, took in drawn])
    assert (found["bound"] == "launch").sum() == 1, "to the first kernel"
    assert found.attrs["device_us"] == pytest.approx(found.attrs["bounds"]["kernel"])


def test_a_long_build_before_a_copy_that_the_host_waits_for_is_the_hosts() -> None:
    """us: A is idle from 0, the end of the step before, through the build to the copy at 901."""
    found = made(
        ("step", "step", HOST_LANE, 0, 1000, {}),
        ("program", "build", HOST_LANE, 1, 900, {}),
        ("embd", "copy", HOST_LANE, 900, 904, {"index": 0, "on": A}),
        ("k", "launch", HOST_LANE, 904, 906, {"index": 1, "on": A}),
        ("out", "copy", HOST_LANE, 906, 999, {"index": 2, "on": A}),
        ("before", "device", A, -5, 0, {"kind": "launch"}),
        ("embd", "device", A, 901, 903, {"index": 0, "kind": "copy"}),
        ("k", "device", A, 907, 990, {"index": 1, "kind": "launch"}),
        ("out", "device", A, 991, 998, {"index": 2, "kind": "copy"}),
    ).critical_path()
    whole(found, 1000)
    bounds = {"host": 904, "launch": 3, "copy": 9, "kernel": 83, "wait": 2}
    assert found.attrs["bounds"]["host"] >= 900
    assert found.attrs["bounds"] == pytest.approx(bounds, abs=3)


def test_in_a_plan_the_part_that_ended_last_counts() -> None:
    """us: parts on two streams, 10..20 and 10..40; the third begins at 41 on the first stream."""
    part = {"index": 0, "kind": "launch"}
    found = made(
        ("step", "step", HOST_LANE, 0, 62, {}),
        ("plan", "replay", HOST_LANE, 0, 5, {"index": 0, "on": A}),
        ("sync", "sync", HOST_LANE, 5, 61, {"index": 1, "on": A}),
        ("q", "device", A, 10, 20, part | {"part": 0}),
        ("k", "device", B, 10, 40, part | {"part": 1}),
        ("out", "device", A, 41, 60, part | {"part": 2}),
    ).critical_path()
    whole(found, 62)
    assert found["what"].tolist() == ["plan", "k", "k", "out", "out", "sync", "python"]


@settings(max_examples=examples(600), deadline=None)
@given(ACTIONS, st.sampled_from([0, 0, 3, -3, 40, -40, 4000, -4000]), st.integers(0, 50))
def test_the_parts_of_a_path_add_up_to_the_step(actions, off: int, rest: int) -> None:
    """Also where the device's clock is off, so that work seems to begin before its call."""
    trace = Trace(off)
    begin = trace.at
    for action, on, event in actions:
        if action == "launch":
            trace.launch(on)
        elif action == "sync":
            trace.sync(on=on, until=trace.free[on])
        elif action == "sync event":
            trace.sync(event=event, until=max(trace.free.values()))
        else:
            trace.host(action, on=on, event=event)
    end = trace.at + rest
    trace.spans.append(Span("step", "step", HOST_LANE, begin, end, {"step": 0}))
    whole(critical_path(trace.spans), (end - begin) / 1e3)


@pytest.mark.parametrize("name", REAL)
def test_the_path_of_every_step_of_a_real_file(name: str) -> None:
    trace = wb.Profile.load(FILES / name, step=REAL[name][1])
    steps = trace.to_frame().query("category == 'step'").set_index("step")["dur_us"]
    for number, us in steps.items():
        whole(trace.critical_path(step=int(number)), us)
    found = trace.critical_path()
    assert found.attrs["step"] in steps.index
    if name.startswith("nsys-llama"):
        assert found.attrs["bounds"]["kernel"] > 0.5 * found.attrs["step_us"]


def test_an_eager_step_of_a_gpu_is_the_hosts_and_says_why() -> None:
    """An H100 was through with a step's 375 kernels before the host had made the next batch."""
    trace = wb.Profile.load(FILES / "ours-eager.pftrace.gz")
    table = trace.to_frame()
    device = table[table["category"] == "device"]
    (wait,) = table[table["name"] == LOGITS_WAIT]["start_us"]
    late = wait - (device["start_us"] + device["dur_us"]).max()
    found = trace.critical_path()
    (step_us,) = table[table["category"] == "step"]["dur_us"]
    whole(found, step_us)
    assert set(found["bound"]) == {"host"} and set(found["lane"]) == {HOST_LANE}
    assert late > 100 and found.attrs["late_us"] == pytest.approx(late, abs=1e-3)
    assert found.attrs["device_us"] == pytest.approx(device["dur_us"].sum(), abs=1e-3)
    build = table[table["category"] == "build"]["dur_us"].sum()
    assert next(iter(found.attrs["host"].items())) == ("build", pytest.approx(build))
    (call,) = table.query("category == 'copy' and name == 'inp_embd'")["dur_us"]
    rows = found[found["what"] == "inp_embd"].query("dur_us > 50")
    assert rows["dur_us"].tolist() == pytest.approx([call]), "a call that queues is one part"


def test_a_plan_of_kernels_that_begin_early_is_kernels_from_begin_to_end() -> None:
    """On an H100, one stream with programmatic launches never idles between its kernels."""
    trace = wb.Profile.load(FILES / "ours-plan.pftrace.gz")
    table = trace.to_frame()
    device = table[table["category"] == "device"]
    found = trace.critical_path()
    (step_us,) = table[table["category"] == "step"]["dur_us"]
    whole(found, step_us)
    worked = (device["start_us"] + device["dur_us"]).max() - device["start_us"].min()
    bounds, late = found.attrs["bounds"], found.attrs["late_us"]
    assert bounds["kernel"] + bounds["copy"] == pytest.approx(worked, abs=1e-3)
    assert (late, found.attrs["device_us"]) == (0, pytest.approx(worked, abs=1e-3))
    assert found["what"][found["bound"] == "launch"].tolist() == ["inputs"]
    on_path = found[found["bound"].isin(["kernel", "copy"])]["what"].tolist()
    assert on_path == device["name"].tolist() and on_path[-1] == "result_output"
    assert found["what"].iloc[found.index[found["bound"] == "wait"][0]] == LOGITS_WAIT


@pytest.mark.parametrize("toggles", [{}, {"plans": "ours", "streams": "3"}, {"sync": "packed"}])
def test_the_path_of_a_run(loaded: Any, toggles: dict[str, str]) -> None:
    with loaded.variant(wb.Toggles(**toggles)) as engine:
        engine.prefill([1, 2, 3])
        with profile(engine, nvtx=False) as trace:
            for token in range(3):
                engine.step([token])
    times = trace.summary()["step_us"]
    for number, us in times.items():
        found = trace.critical_path(step=int(number))
        whole(found, us)
        assert found["bound"].iloc[-1] == "host"
        (at,) = np.flatnonzero(found["what"] == LOGITS_WAIT)[-1:]
        # the host may come so late that the device is through
        waited = found["bound"].iloc[at] == "wait"
        assert (found["bound"].iloc[at - 1] in ("kernel", "copy")) == waited
    assert trace.critical_path().attrs["step_us"] == pytest.approx(sorted(times)[1])


def test_a_path_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="the trace has no step 7; its steps are 0"):
        prof(step(0, 0)).critical_path(step=7)
    with pytest.raises(UsageError, match="no spans"):
        prof([]).critical_path()


# the difference -----------------------------------------------------------------------------------


def longer(spans: list[Span], name: str, us: int) -> list[Span]:
    """The step with the device's span of this name `us` longer."""
    return [
        s._replace(end_ns=s.end_ns + 1000 * us)
        if s.name == name and s.category == "device" else s
        for s in spans
    ]  # fmt: skip


def test_what_takes_longer_comes_first_by_op_and_layer() -> None:
    before = prof(step(0, 0), step(1, 120), step(2, 240))
    after = prof(*(longer(step(n, 120 * n), "q-0", 20) for n in range(3)))
    found = wb.diff(before, after)
    assert {c: str(t) for c, t in found.dtypes.items()} == diffs.COLUMNS
    first = found.iloc[0]
    assert (first["where"], first["what"], first["layer"]) == ("device", "mul_mat", 0)
    assert (first["us_before"], first["us_after"], first["delta_us"]) == (10, 30, 20)
    assert (first["calls_before"], first["calls_after"], first["share"]) == (1, 1, 0.2)
    other = found[(found["what"] == "mul_mat") & (found["layer"] == 1)].iloc[0]
    assert (other["us_before"], other["delta_us"]) == (50, 0)
    sizes = found["delta_us"].abs().tolist()
    assert sizes == sorted(sizes, reverse=True)
    host = found[found["where"] == "host"]
    assert set(host["what"]) >= {"issue launch", "results sync", "build batch", "rest python"}
    said = "the host's rows are a step, without the 20 us between two steps, which are not its own"
    assert host["us_before"].sum() == pytest.approx(100), said
    idle = found[found["what"] == "no kernel runs"].iloc[0]
    every = before.gaps().groupby("step")[["traced_us", "outside"]].sum()
    assert idle["us_before"] == (every["traced_us"] - every["outside"]).median()
    assert found.attrs["line"].startswith("a step, traced: 100.0 us before, 100.0 us after")
    back = wb.diff(after, before).set_index(["where", "what", "layer"])["delta_us"]
    there = found.set_index(["where", "what", "layer"])["delta_us"]
    pd.testing.assert_series_equal(back.sort_index(), -there.sort_index(), check_names=False)
    by_node = wb.diff(before, after, by="node")
    assert by_node.iloc[0]["what"] == "mul_mat q"


def test_what_only_one_trace_has_is_a_row_too() -> None:
    other = [s._replace(args=s.args | {"op": "fused"} if s.name == "q-1" else s.args)
             for s in step(0, 0)]  # fmt: skip
    found = wb.diff(prof(step(0, 0)), prof(other)).set_index(["what", "layer"])
    assert found.loc[("fused", 1), "calls_before"] == 0
    assert found.loc[("fused", 1), "us_after"] == 50
    assert found.loc[("mul_mat", 1), "us_after"] == 0


def test_a_step_in_which_an_op_did_not_run_counts_as_nothing() -> None:
    other = [s._replace(args=s.args | {"op": "fused"} if s.name == "q-1" else s.args)
             for s in step(0, 0)]  # fmt: skip
    plain = prof(step(0, 0))
    found = wb.diff(plain, prof(other, step(1, 120), step(2, 240))).set_index(["what", "layer"])
    assert found.loc[("fused", 1), "calls_after"] == pytest.approx(1 / 3)
    assert found.loc[("fused", 1), "us_after"] == 0, "the median of 50, 0 and 0"
    assert found.loc[("mul_mat", 1), "us_after"] == 50


def test_a_share_is_of_the_step_before() -> None:
    slower = [s._replace(end_ns=s.end_ns + 300_000) if s.category == "step" else s
              for s in step(0, 0)]  # fmt: skip
    for before, after, share in ((step(0, 0), slower, 3.0), (slower, step(0, 0), -0.75)):
        first = wb.diff(prof(before), prof(after)).iloc[0]
        assert (first["where"], first["what"], first["share"]) == ("host", "rest python", share)


@pytest.mark.long
def test_foreign_traces_are_aligned_by_kernel() -> None:
    nodes, graph, torch, ours = (
        wb.Profile.load(FILES / f"{name}.gz", step=step)
        for name, step in (
            ("nsys-llama-node.sqlite", "cudaGraphLaunch"),
            ("nsys-llama-graph.sqlite", "cudaGraphLaunch"),
            ("kineto-eager.json", None), ("nsys-ours-node.sqlite", None),
        )
    )  # fmt: skip
    alone = wb.diff(nodes, nodes)
    assert (alone["delta_us"] == 0).all() and alone.attrs["by"] == "kernel"
    launches = nodes.to_frame().query("kind == 'launch' and category == 'device'")
    rows = alone[(alone["where"] == "device") & alone["what"].isin(set(launches["kernel"]))]
    inside = launches[launches["step"].notna()]
    assert rows["calls_before"].sum() == pytest.approx(len(inside) / 5)
    whole_graph = wb.diff(nodes, graph).set_index("what")
    assert whole_graph.loc["replay", "calls_after"] == 1
    beside = wb.diff(nodes, ours).set_index("what")
    assert beside.loc["product_norm", "us_before"] == 0 < beside.loc["product_norm", "us_after"]
    short = wb.diff(nodes, torch)
    assert "mul_mat_vec_q" in set(short["what"]), "tools write template arguments differently"
    assert not short["what"].str.contains("<").any()


def test_paths_do_as_well_and_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    prof(step(0, 0)).save(tmp_path / "a.json")
    prof(step(0, 0)).save(tmp_path / "b.pftrace.gz")
    found = wb.diff(tmp_path / "a.json", str(tmp_path / "b.pftrace.gz"))
    assert (found["delta_us"] == 0).all() and found.attrs["names"][1].endswith("b.pftrace.gz")
    with pytest.raises(UsageError, match="by='layer' does not exist; choose one of auto, op, node"):
        wb.diff(tmp_path / "a.json", tmp_path / "a.json", by="layer")
    no_steps = FILES / "nsys-llama-node.sqlite.gz"
    with pytest.raises(UsageError, match=r"llama-node.* has no steps .* step='cudaGraphLaunch'"):
        wb.diff(no_steps, tmp_path / "a.json")
    assert wb.diff(no_steps, no_steps).attrs["line"].startswith("a whole trace, traced: ")
    prompt = [s._replace(args=s.args | ({"n_tokens": 64} if s.category == "step" else {}))
              for s in step(0, 0)]  # fmt: skip
    with pytest.raises(UsageError, match="steps of 1 and 64 tokens"):
        wb.diff(prof(step(0, 0)), prof(prompt))


def test_a_page_of_a_difference_escapes_what_files_say() -> None:
    found = wb.diff(prof(step(0, 0)), prof(step(0, 0)))
    found.attrs["names"] = ["<b>.json", "b.json"]
    page = differences.page_of(found, ["a <i> line"])
    assert "&lt;b&gt;.json" in page and "<i>" not in page and "mul_mat, layer 1" in page
    short = differences.table_of(found.assign(what="x" * 99), short=True)
    assert short["what"].str.len().max() <= differences.WIDEST + len(", layer 1")
    assert len(short) <= differences.SHOWN
    for function, name in (
        ("void f<(int)1>(const char *, g(*)(int))", "f<(int)1>"), ("mul_mat", "mul_mat"),
        ("(anonymous)", "(anonymous)"), ("void f<int>", "f<int>"),
    ):  # fmt: skip
        assert (
            differences.table_of(found.assign(what=function))["what"]
            .str.contains(name, regex=False)
            .all()
        )
        assert (
            not differences.table_of(found.assign(what=function))["what"].str.contains("char").any()
        )
