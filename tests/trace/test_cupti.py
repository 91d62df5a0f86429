"""The CUPTI collector against a CUPTI that replays records: complete, spoiled, refused."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import workbench as wb
from tests.oracles.trace_pattern import trace_pattern
from tests.trace.fake_cupti import (
    CUBLAS,
    DIMS,
    FIRST_NODE,
    CuptiError,
    FakeCupti,
    Kind,
    Result,
    engine_on,
    wanted,
)
from workbench.backend.plan import gate
from workbench.common.errors import DeviceError, UsageError
from workbench.graph.ops import touched_bytes
from workbench.program.commands import Copy, Launch, Space
from workbench.trace.cupti import collector
from workbench.trace.cupti.activity import Activity
from workbench.trace.cupti.clock import Clock, Reading, read_clocks
from workbench.trace.cupti.correlate import match
from workbench.trace.profile import profile
from workbench.trace.spans import HOST_LANE

KERNEL, COPY = Kind.CONCURRENT_KERNEL, Kind.MEMCPY
WHOLE = {"plans": "ours", "plan_scope": "step", "sync": "packed_implicit",
         "copy_stream": "compute"}  # fmt: skip
TODAY = "plans of splits, as llama.cpp's"
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "plans of splits": {"plans": "ours"},
    TODAY: {"plans": "today"},
    "a plan of the step": WHOLE,
    "branches": {"streams": "3"},
    "branches in plans": {"plans": "ours", "streams": "3"},
    "branches in a plan of the step": WHOLE | {"streams": "3"},
}


@pytest.fixture(scope="module")
def base(tiny_model) -> Iterator[wb.Engine]:
    path = tiny_model("tiny-llama", "Q8_0")
    with pytest.MonkeyPatch.context() as patch, engine_on(patch, path, FakeCupti()) as made:
        yield made


@pytest.fixture
def cupti(base, monkeypatch) -> FakeCupti:
    base.backend.cupti = FakeCupti().install(monkeypatch)
    return base.backend.cupti


@pytest.fixture
def engine(base, cupti) -> wb.Engine:
    base.reset()
    return base


def traced(engine: wb.Engine, n: int = 3, window: Any = (1, 1), **options: Any) -> Any:
    with profile(engine, window=window, nvtx=False, **options) as prof:
        for token in range(n):
            engine.step([token])
    return prof


def device(prof: Any) -> list[Any]:
    return [s for s in prof.timeline.spans if s.category == "device"]


def ran(prof: Any) -> dict[int, list[tuple[Any, ...]]]:
    """By step, what `fake_cupti.wanted` says of a program."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for s in device(prof):
        what = s.args.get("kernel", s.args.get("bytes"))
        row = s.args["index"], s.args.get("part"), s.name, s.lane, s.args["kind"], str(what)
        found.setdefault(s.args["step"], []).append(row)
    return {step: sorted(rows, key=str) for step, rows in found.items()}


# complete -----------------------------------------------------------------------------------------


def stale(records: list) -> list:
    """A name of an unloaded module's kernel for each that is no product's of cuBLAS."""
    for r in records:
        if r.kind == KERNEL and r.name not in CUBLAS:
            r.name = "add_bias" if r.name == "half_rows" else "half_rows"
    return records


CASES = [*((way, None) for way in WAYS), *((way, stale) for way in WAYS if way != TODAY),
         ("plans of splits", "reversed")]  # fmt: skip


@pytest.mark.parametrize("window", [(0, 1), (1, 2)], ids=["captured", "replayed"])
@pytest.mark.parametrize(("way", "spoil"), CASES)
def test_every_kernel_and_copy_is_a_span_of_its_command(base, cupti, way, window, spoil):
    """Replayed, captured in the window, or issued part by part. Neither names of other kernels nor
    numbers of nodes in another order than the capture's do harm."""
    with base.variant(wb.Toggles(graph_reuse="set_rows", **WAYS[way])) as engine:
        if spoil == "reversed":
            base.backend.graphs.clear()
            engine.step([0])
            engine.reset()
            for graph in base.backend.graphs:
                graph.ids.reverse()
        elif spoil:
            cupti.spoil = spoil
        prof = traced(engine, 4, window)
        program = engine.program(n_past=2)
    assert prof.collector == "cupti" and prof.complete and not prof.missing, prof.missing
    assert not prof.fallback and ("kernels named by their launches" in prof.note) == (
        spoil is stale
    )
    assert list(ran(prof).values()) == [wanted(program)] * window[1]
    lanes = {s.lane for s in device(prof) if s.name in ("Qcur-0", "Kcur-0", "Vcur-0")}
    assert len(lanes) == (3 if "branches" in way else 1)
    slack = prof.windows[0].clock_error_ns
    for step in (s for s in prof.timeline.spans if s.category == "step"):
        mine = [s for s in device(prof) if s.args["step"] == step.args["step"]]
        assert all(step.start_ns - slack <= s.start_ns < s.end_ns <= step.end_ns + slack
                   for s in mine)  # fmt: skip


@pytest.mark.parametrize("ends", [False, True])
def test_kernels_at_a_gate_and_at_the_end_are_no_commands(base, cupti, monkeypatch, ends):
    """With launch_ahead=on a plan begins with a kernel in place of its first copy, with
    plan_end=word it ends with one more."""

    def gated(records: list) -> list:
        for r in records:
            if r.kind == COPY and r.graph_node_id == FIRST_NODE:
                r.kind, r.name = int(KERNEL), gate.KERNEL
                del r.bytes
        return records

    monkeypatch.setattr(base.backend, "ends", ends)
    cupti.spoil = gated
    with base.variant(wb.Toggles(graph_reuse="set_rows", **WHOLE)) as engine:
        prof = traced(engine, 3, (1, 1))
        program = engine.program(n_past=2)
    assert prof.complete and not prof.missing, prof.missing
    assert [*ran(prof).values()] == [wanted(program)]


def test_calls_and_synchronizations_lie_in_their_commands(engine):
    prof = traced(engine)
    host = {s.args["index"]: s for s in prof.timeline.spans if "index" in s.args
            and s.lane == HOST_LANE}  # fmt: skip
    calls = [s for s in prof.timeline.spans if s.category == "call"]
    assert {s.args["api"] for s in calls} == {"driver", "runtime", "sync"}
    names = {s.name for s in calls}
    assert {"cuLaunchKernel", "cudaLaunchKernel", "stream synchronize", "event synchronize"} < names
    slack = prof.windows[0].clock_error_ns
    assert 0 < slack < 1_000_000
    for call in calls:
        command = host[call.args["command"]]
        assert command.start_ns - slack <= call.start_ns <= call.end_ns <= command.end_ns + slack
    waited = max(s.end_ns for s in calls if s.name == "event synchronize")
    assert waited + slack >= max(s.end_ns for s in device(prof))


def test_tables_and_patterns_take_the_spans_as_they_are(engine):
    prof, program = traced(engine, n=6, window=(2, 2)), engine.program(n_past=5)
    assert "cupti" in prof.to_frame().attrs["collector"]
    table, counts = prof.summary(), program.counts()
    for name in ("waits", "copies", "launches", "copied_bytes"):
        assert (table[name] == counts[name]).all() and len(table) == 2, name
    assert trace_pattern(prof) == program.pattern()
    slowdown = prof.slowdown
    assert (slowdown.n_traced, slowdown.n_untraced, slowdown.n_tokens) == (2, 4, 1)
    assert str(slowdown) in prof.note
    # bytes come from the op table; a launch of several kernels is counted once
    launches = [c for c in program.commands if isinstance(c, Launch) and not c.by_host]
    products = [c.node for c in launches if c.node.op == "mul_mat"]
    by_op = prof.kernels().set_index("op")
    assert by_op.loc["mul_mat", "calls"] == 2 * len(products)
    assert by_op.loc["mul_mat", "bytes"] == 2 * sum(map(touched_bytes, products))
    by_kernel = prof.kernels(by="kernel").set_index("kernel")
    assert by_kernel.loc["half_rows", "calls"] == 2 * len(products)
    on_device, ours = (t[t["on"] != HOST_LANE] for t in (by_op, by_kernel))
    assert ours["traced_us"].sum() == pytest.approx(on_device["traced_us"].sum())


def test_long_windows_are_taken_in_parts(engine, cupti, monkeypatch):
    """One that is spoiled makes the profile incomplete. CUPTI is let go behind each."""
    monkeypatch.setattr(collector, "WINDOW_STEPS", 2)
    flushed = []

    def second_only(records: list) -> list:
        flushed.append(1)
        return records[: len(records) // 2] if len(flushed) == 2 else records

    cupti.spoil, first = second_only, engine.n_steps + 1
    prof = traced(engine, n=6, window=(1, 5))
    assert [[n - first for n in w.steps] for w in prof.windows] == [[0, 1], [2, 3], [4]]
    assert [w.complete for w in prof.windows] == [True, False, True] and prof.complete is False
    assert prof.missing == prof.windows[1].missing and len(prof.summary()) == 5
    assert cupti.most_enabled == set(Kind)
    assert not cupti.enabled and not cupti.stack and not cupti.subscribers
    engine.step([1])
    assert not cupti.records


def test_cupti_attaches_before_the_step_that_it_traces(engine, cupti, monkeypatch):
    """And when what was asked of the device before is over. CUPTI's first call to the driver takes
    milliseconds, which are no step's."""
    waited = []
    monkeypatch.setattr(engine.backend, "synchronize", lambda: waited.append(bool(cupti.enabled)))
    with profile(engine, nvtx=False):
        engine.step([0])
        assert waited[-2:] == [False, True]


@pytest.mark.parametrize(("second", "as_one"), [(64, True), (32, False)])
def test_a_copy_through_the_hosts_memory_is_one_copy(tiny_model, second, as_one):
    """Devices that are not connected: one record on each."""
    path = tiny_model("tiny-llama", "F16")
    with wb.Engine.load(path, device="null", n_ctx=64, n_devices=2, toggles=wb.Toggles()) as engine:
        program = engine.program()
    (copy,) = (
        c for c in program.commands
        if isinstance(c, Copy) and c.src.buffer.space == c.dst.buffer.space == Space.DEVICE
    )  # fmt: skip
    program.commands[:], nbytes = [copy], copy.src.nbytes
    rows = [
        Activity("copy", "copy", 1000, 3000, 7, 13, nbytes, device=0),
        Activity("copy", "copy", 2000, 4000, 7, 9, nbytes * second // 64, device=1),
    ]
    found = match(rows, {7: 1}, {1: (0, 0)}, {0: program}, lambda node: [], lambda ns: ns)
    assert any("copy l_out-0: 2 records for 1" in line for line in found.faults) != as_one
    times = [(s.start_ns, s.end_ns) for s in found.spans]
    assert times == ([(1000, 4000)] if as_one else [(1000, 3000), (2000, 4000)])


def test_the_narrowest_bracket_of_both_clocks_counts():
    ticks = iter([0, 100, *[1000 + 50 * i for i in range(4)], *range(10_000, 30_000, 100)])
    # brackets: 0..100, 1000..1050, 1100..1150, then 100 wide
    assert read_clocks(lambda: 5_000, lambda: next(ticks)) == Reading(1025, 5_000, 25)


def test_clocks_that_part_are_interpolated():
    clock = Clock(Reading(1_000, 501_000, 40), Reading(2_100, 502_000, 30))
    assert [clock.to_host(t) for t in (501_000, 501_500, 502_000)] == [1_000, 1_550, 2_100]
    assert clock.error_ns == 40 + 100


# incomplete ---------------------------------------------------------------------------------------


def of_kind(records: list, kind: Kind) -> list:
    return [r for r in records if r.kind == kind]


def edited(kind: Kind, n: int, **changes: Any) -> Callable[[list], list]:
    """Spoils the n-th record of a kind."""

    def spoil(records: list) -> list:
        vars(of_kind(records, kind)[n]).update(changes)
        return records

    return spoil


def more(kind: Kind, **changes: Any) -> Callable[[list], list]:
    def spoil(records: list) -> list:
        first = of_kind(records, kind)[0]
        return [*records, type(first)(**vars(first) | changes)]

    return spoil


def without(gone: Callable[[Any], bool]) -> Callable[[list], list]:
    return lambda records: [r for r in records if not gone(r)]


def out_of_order(records: list) -> list:
    first, second = of_kind(records, COPY)[:2]
    times = vars(first)["start"], vars(first)["end"], second.start, second.end
    second.start, second.end, first.start, first.end = times
    return records


def unreadable(records: list) -> list:
    del of_kind(records, KERNEL)[0].stream_id
    return records


SPOILED: dict[str, tuple[Callable[[list], list], str]] = {
    "the last kernel": (
        lambda records: [r for r in records if r is not of_kind(records, KERNEL)[-1]],
        "1 x command with fewer kernels than launch calls"),
    "half": (lambda records: records[: len(records) // 2], "command not as recorded"),
    "all": (lambda records: [], "command not as recorded"),
    "a part of a product": (
        without(lambda r: getattr(r, "name", "") == "splitKreduce"),
        "fewer kernels than launch calls (first: step "),
    "a second copy": (more(COPY), "2 records for 1"),
    "another kernel": (
        edited(KERNEL, 0, name="memset_kernel", grid_x=99), "kernel memset_kernel (grid 99x"),
    "fewer bytes": (edited(COPY, 0, bytes=5), "copy copy instead of "),
    "a zero end": (edited(KERNEL, 2, end=0), "1 x zero timestamp (first: step "),
    "a call without times": (edited(Kind.DRIVER, 3, start=0, end=0), "1 x zero timestamp"),
    "out of order": (out_of_order, "1 x record out of order"),
    "another stream": (
        edited(KERNEL, 0, stream_id=99),
        "cuda stream 0 has CUPTI's (device, stream) [(0, 13), (0, 99)]"),
    "another device": (
        edited(KERNEL, 0, device_id=1), "has CUPTI's (device, stream) [(0, 13), (1, 13)]"),
    "no correlation": (
        without(lambda r: r.kind == Kind.EXTERNAL_CORRELATION), "kernel of no command (first: "),
    "somebody else's work": (
        more(KERNEL, correlation_id=7, name="theirs"), "1 x kernel of no command (first: theirs)"),
    "unreadable": (unreadable, "a buffer of records was lost"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_window_says_what_is_missing(engine, cupti, what):
    cupti.spoil, said = SPOILED[what]
    prof = traced(engine)
    assert prof.complete is False and said in prof.missing and "\n" not in prof.missing, (
        prof.missing
    )
    assert f"incomplete: {prof.missing}" in prof.note
    assert any(s.category == "step" for s in prof.timeline.spans)
    assert all(s.start_ns and s.end_ns >= s.start_ns for s in prof.timeline.spans)


def test_a_record_before_its_call_shows_in_the_stated_error(engine, cupti):
    def early(records: list) -> list:
        of_kind(records, KERNEL)[0].start -= 30_000_000
        return records

    cupti.spoil = early
    assert traced(engine).windows[0].clock_error_ns > 20_000_000


@pytest.mark.parametrize("window", [(0, 1), (1, 1)], ids=["part by part", "replayed"])
def test_a_plan_with_a_lost_record_is_said_once(base, cupti, window):
    cupti.spoil = without(lambda r: r.kind == KERNEL and r.name == "add_bias")
    with base.variant(wb.Toggles(graph_reuse="set_rows", plans="ours")) as engine:
        prof = traced(engine, n=2, window=window)
    assert not prof.complete and "1 x plan not as recorded (first: step" in prof.missing
    assert "command not as recorded" not in prof.missing
    assert not [s for s in prof.timeline.spans if s.args.get("part") is not None]


def test_dropped_records_are_said(engine, cupti):
    cupti.dropped = 12
    assert "12 records dropped for want of buffers" in traced(engine).missing


def test_a_flush_that_fails_is_said_and_lets_go(engine, cupti):
    cupti.refuse["activity_flush_all"] = CuptiError(Result.ERROR_NOT_INITIALIZED)
    prof = traced(engine)
    assert not prof.complete and "at the end of a window" in prof.missing
    assert not cupti.enabled and not cupti.subscribers


def test_what_nobody_told_of_is_said(engine, monkeypatch):
    monkeypatch.setattr(engine.backend, "kernels_of", lambda node: None)
    assert "the backend does not say which kernels a launch is made" in traced(engine).missing
    monkeypatch.setattr(collector.CuptiRecorder, "runs", lambda self, program, step: None)
    assert "the program of step" in traced(engine).missing


def test_a_failing_body_keeps_its_trace_and_lets_go(engine, cupti, monkeypatch):
    call = cupti.call

    def interrupted(name: str, *nested: str) -> int:
        if name == "cudaLaunchKernel":
            raise KeyboardInterrupt
        return call(name, *nested)

    with pytest.raises(KeyboardInterrupt), profile(engine, nvtx=False) as prof:
        engine.step([0])
        cupti.call = interrupted
        engine.step([1])
    assert engine.recorder is None
    assert not cupti.enabled and not cupti.stack and not cupti.subscribers
    assert prof.complete is False and "launch mul_mat" in prof.missing
    assert len({s.args["step"] for s in device(prof)}) == 2


def test_a_device_that_fails_at_the_end_of_a_window_is_said(engine, monkeypatch):
    def broken() -> None:
        raise DeviceError("the device fell off")

    with profile(engine, nvtx=False) as prof:
        engine.step([0])
        monkeypatch.setattr(engine.backend, "synchronize", broken)
    assert prof.complete is False and "the device fell off" in prof.missing
    assert device(prof)


# refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        ("subscribe_v2", CuptiError(39), "nsys is attached; run without nsys"),
        ("subscribe_v2", CuptiError(15), "libcupti does not fit the driver"),
        ("activity_enable", CuptiError(14), "libcupti does not fit the driver"),
        ("activity_enable", CuptiError(35), "CUPTI refuses activity records"),
        ("subscribe_v2", RuntimeError("only CUDA 13.0 or later driver is supported"), "only CUDA"),
        ("get_timestamp", RuntimeError("function cuptiGetTimestamp is not found"), "is not found"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_refusal_at_the_start_is_answered_with_events(
    engine, cupti, function, error, said, later
):
    """later: a profiler attaches before the window."""
    with profile(engine, window=(1, 1), collector="cupti", nvtx=False) as prof:
        if later:
            engine.step([0])
        cupti.refuse[function] = error
        engine.step([1])
        engine.step([2])
    assert prof.collector == "events" and prof.complete is None
    assert said in prof.fallback and prof.fallback in prof.note and "\n" not in prof.fallback
    assert len({s.args["step"] for s in device(prof)}) == 1
    assert not cupti.enabled and not cupti.subscribers


def test_without_the_package_events_answer(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert "cupti-python cannot be imported" in traced(engine).fallback
    monkeypatch.delattr(FakeCupti, "subscribe_v2")
    FakeCupti().install(monkeypatch)
    prof = traced(engine)
    assert prof.collector == "events" and "has no subscribe_v2" in prof.fallback


def test_events_are_taken_where_asked_for_and_without_cuda(engine, cupti, loaded):
    prof = traced(engine, collector="events")
    assert prof.collector == "events" and not prof.fallback and not cupti.most_enabled
    assert "embedded device" in traced(loaded, collector="cupti").fallback
    assert traced(loaded).fallback == "" and not cupti.most_enabled
    with pytest.raises(UsageError, match="choose one of auto, events, cupti"):
        traced(engine, collector="nsys")


def test_the_real_bindings_have_what_is_asked_for():
    real = pytest.importorskip("cupti.cupti")
    assert [name for name in collector.NEEDED if not hasattr(real, name)] == []
    records = [getattr(real, name) for name in dir(real) if name.startswith("ActivityKernel")]
    assert records and all(field in dir(of) for of in records for field in DIMS)
    assert {k.name: int(k) for k in Kind} == {k.name: int(real.ActivityKind[k.name]) for k in Kind}
    assert {*collector.KINDS, collector.EXTERNAL} == {k.name for k in Kind}
    assert all(int(real.Result[r.name]) == r for r in Result)
    assert real.cuptiError(39).status == 39
    try:
        ctypes.CDLL("libcuda.so.1")  # with it: tests/gpu/test_cuda_cupti.py
    except OSError:
        with pytest.raises(collector.Unavailable, match="driver"):
            collector.probe(real)
