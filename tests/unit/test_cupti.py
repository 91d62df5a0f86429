"""The CUPTI collector against a CUPTI that replays records: complete, spoiled, refused."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

import workbench as wb
from tests.oracles.trace_pattern import trace_pattern
from tests.unit import spoiled
from tests.unit.fake_cupti import (
    DIMS,
    FIRST_NODE,
    ActivityKind,
    CudaEngine,
    CuptiBackend,
    CuptiError,
    FakeCupti,
    Result,
)
from workbench.backend.base import NO_PART, KernelName
from workbench.backend.plan import gate
from workbench.common.errors import DeviceError, UsageError
from workbench.program.commands import Copy, Launch, Replay, Space
from workbench.trace.cupti import collector
from workbench.trace.cupti.activity import Activity
from workbench.trace.cupti.correlate import match
from workbench.trace.cupti.parted import parted
from workbench.trace.profile import profile
from workbench.trace.spans import HOST_LANE

KERNELS = ["half_rows", "ampere_gemm", "splitKreduce", "add_bias", "add"]


@pytest.fixture
def cupti(monkeypatch) -> FakeCupti:
    return FakeCupti().install(monkeypatch)


@pytest.fixture
def engine(cupti) -> CudaEngine:
    return CudaEngine(cupti)


def traced(engine: CudaEngine, n: int = 3, window: Any = (1, 1), **options: Any):
    with profile(engine, window=window, nvtx=False, **options) as prof:
        for _ in range(n):
            engine.step()
    return prof


# complete -----------------------------------------------------------------------------------------


def test_every_kernel_and_copy_is_a_span_of_its_command(engine):
    prof = traced(engine)
    assert prof.collector == "cupti" and prof.complete and not prof.missing and not prof.fallback
    device = [s for s in prof.timeline.spans if s.category == "device"]
    commands = engine.program.commands
    last = {type(c): i for i, c in enumerate(commands)}  # the last of each type
    kernels = [s for s in device if s.args["kind"] == "launch"]
    assert [s.args["kernel"] for s in kernels] == [KERNELS[0], "memset", *KERNELS[1:]]
    assert {s.name for s in kernels} == {"product", "sum"}
    assert all(commands[s.args["index"]].node.name == s.name for s in kernels)
    assert {s.lane for s in kernels} == {"cuda stream 0"}
    copies = [s for s in device if s.args["kind"] == "copy"]
    assert [(s.name, s.lane, s.args["bytes"]) for s in copies] == [
        ("x", "cuda stream 1", 256), ("embd", "cuda stream 1", 256), ("sum", "cuda stream 0", 256),
    ]  # fmt: skip
    assert copies[-1].args["index"] == last[Copy] and kernels[-1].args["index"] == last[Launch]
    assert {s.args["step"] for s in device} == {1}
    (step,) = [s for s in prof.timeline.spans if s.category == "step"]
    slack = prof.windows[0].clock_error_ns
    assert 0 < slack < 1_000_000
    assert all(
        step.start_ns - slack <= s.start_ns < s.end_ns <= step.end_ns + slack for s in device
    )


def test_calls_and_synchronizations_lie_in_their_commands(engine):
    prof = traced(engine)
    host = {s.args["index"]: s for s in prof.timeline.spans if "index" in s.args
            and s.lane == HOST_LANE}  # fmt: skip
    calls = [s for s in prof.timeline.spans if s.category == "call"]
    assert {s.args["api"] for s in calls} == {"driver", "runtime", "sync"}
    names = {s.name for s in calls}
    assert {"cuLaunchKernel", "cudaLaunchKernel", "stream synchronize", "event synchronize"} < names
    slack = prof.windows[0].clock_error_ns
    for call in calls:
        command = host[call.args["command"]]
        assert command.start_ns - slack <= call.start_ns <= call.end_ns <= command.end_ns + slack
    waited = [s for s in calls if s.name == "event synchronize"]
    device = [s for s in prof.timeline.spans if s.category == "device"]
    assert max(s.end_ns for s in waited) + slack >= max(s.end_ns for s in device)


def test_frame_summary_pattern_and_perfetto_take_the_spans_as_they_are(engine, tmp_path):
    prof = traced(engine, n=4, window=(1, 2))
    frame = prof.to_frame()
    assert (frame["category"] == "device").sum() == 2 * (len(KERNELS) + 1 + 3)
    assert "cupti" in frame.attrs["collector"]
    table, counts = prof.summary(), engine.program.counts()
    assert list(table.index) == [1, 2]
    for name in ("waits", "copies", "launches", "copied_bytes"):
        assert (table[name] == counts[name]).all(), name
    assert (table["device_us"] >= 200).all() and table.loc[2, "gap_us"] > 0
    assert prof.save(tmp_path / "t.pftrace") > 1000
    assert trace_pattern(prof, 1) == engine.program.pattern() == "h aasrwg"
    assert trace_pattern(prof, fold=True) == engine.program.pattern(fold=True)


def test_a_copy_that_holds_the_host_is_a_hidden_wait(cupti):
    free, held = (CudaEngine(cupti, held=h, lead=2) for h in (False, True))
    prof = traced(free, n=7, window=(1, 6))
    # the times are real: where the system puts this thread aside in a call, the call looks held,
    # and where it does so in front of a call, nothing is left to be held by
    assert free.program.pattern() in [trace_pattern(prof, step) for step in range(1, 7)]
    prof = traced(held, n=7, window=(1, 6))
    # the first waits for two kernels; behind it the stream is idle, and nothing is held
    assert "h ga(s)asrwg" in [trace_pattern(prof, step) for step in range(1, 7)]


def test_steps_outside_the_window_are_untraced_and_give_the_slowdown(engine):
    prof = traced(engine, n=6, window=(4, 2))
    slowdown = prof.slowdown
    assert (slowdown.n_traced, slowdown.n_untraced, slowdown.n_tokens) == (2, 4, 1)
    assert slowdown.ratio == slowdown.traced_us / slowdown.untraced_us > 0.5
    assert str(slowdown) in prof.note and "slowdown unknown" not in prof.note
    assert {s.args["step"] for s in prof.timeline.spans if s.category == "step"} == {4, 5}
    without = traced(engine, window=None)
    assert without.slowdown is None and "slowdown unknown" in without.note


def test_long_windows_are_taken_in_parts(engine, monkeypatch):
    monkeypatch.setattr(collector, "WINDOW_STEPS", 2)
    prof = traced(engine, n=6, window=(1, 5))
    assert [w.steps for w in prof.windows] == [(1, 2), (3, 4), (5,)] and prof.complete
    assert set(prof.summary().index) == {1, 2, 3, 4, 5}


def test_cupti_is_let_go_outside_the_window(engine, cupti):
    prof = traced(engine, n=2, window=None)
    assert prof.complete and prof.windows[0].steps == (0, 1)
    assert not cupti.enabled and not cupti.stack and not cupti.subscribers
    assert cupti.most_enabled == set(ActivityKind)
    engine.step()
    assert not cupti._records


def test_a_record_before_its_call_shows_in_the_stated_error(engine, cupti):
    cupti.spoil = spoiled.with_an_early_kernel
    prof = traced(engine)
    assert prof.windows[0].clock_error_ns > 20_000_000  # the machine may be busy in between


# plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("scope", ["split", "step"])
@pytest.mark.parametrize("window", [(0, 1), (1, 2)])
@pytest.mark.parametrize("plans", ["ours", "today"])
def test_a_replayed_kernel_or_copy_is_a_span_of_its_part(cupti, plans, window, scope, lead):
    """Replayed, captured in the window, or issued part by part: named as without a plan."""
    prof = traced(CudaEngine(cupti, lead=lead, plans=plans, scope=scope), n=4, window=window)
    assert prof.complete and not prof.missing, prof.missing
    plain = traced(CudaEngine(cupti, lead=lead), n=4, window=window)

    def about(spans: Any) -> list[tuple[Any, ...]]:
        found = [s for s in spans if s.category == "device"]
        keys = ("kernel", "bytes", "op", "kind", "stream", "step", "split")
        return sorted(
            (s.name, s.lane, *(str(s.args.get(key)) for key in keys)) for s in found
        )  # fmt: skip

    assert about(prof.timeline.spans) == about(plain.timeline.spans)
    engine = CudaEngine(cupti, lead=lead, plans=plans, scope=scope)
    device = [s for s in prof.timeline.spans if s.category == "device"]
    plans_at = [i for i, c in enumerate(engine.program.commands) if isinstance(c, Replay)]
    assert plans_at
    for at in plans_at:
        parts, inside = (
            engine.program.commands[at].parts,
            [s for s in device if s.args["index"] == at],
        )
        for span in inside:
            part = parts[span.args["part"]]
            assert (span.args["kind"], span.name) == (part.kind, part.label)
        work = {i for i, part in enumerate(parts) if isinstance(part, Copy | Launch)}
        assert {s.args["part"] for s in inside} == work


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("window", [(0, 1), (1, 2)])
@pytest.mark.parametrize("plans", ["off", "ours", "today"])
def test_a_stale_name_is_taken_for_none(cupti, plans, window, lead):
    """A kernel has the name of its launch where CUPTI gives it another, and the note says so."""
    plain, stale = (
        traced(CudaEngine(cupti, plans=plans, lead=lead), n=4, window=window)
        for cupti.spoil in (lambda records: records, spoiled.with_stale_names)
    )
    assert plain.complete and stale.complete and not stale.missing, stale.missing

    def about(prof: Any) -> list[tuple[Any, ...]]:
        spans = [s for s in prof.timeline.spans if s.category == "device"]
        return [(s.name, *(s.args.get(k) for k in ("kernel", "index", "part"))) for s in spans]

    assert about(stale) == about(plain)
    n = sum(name in ("half_rows", "add_bias", "add") for _, name, *_ in about(plain))
    assert f"{n} kernels named by their launches: CUPTI had other names" in stale.note
    assert "named" not in plain.note


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("window", [(0, 1), (1, 2)])
def test_the_kernel_at_a_gate_is_the_copy_of_the_inputs(cupti, window, stale):
    """With launch_ahead=on a plan begins with a kernel in place of its first copy. stale: CUPTI has
    the kernels' names mixed up."""
    plain = traced(CudaEngine(cupti, plans="ours", scope="step", packed=True), n=4, window=window)

    def gated(records: list) -> list:
        for r in records:
            if r.kind == ActivityKind.MEMCPY and r.graph_node_id == FIRST_NODE:
                r.kind = int(ActivityKind.CONCURRENT_KERNEL)
                r.name = "half_rows" if stale else gate.KERNEL
                del r.bytes
            elif stale and getattr(r, "name", "") == "half_rows":
                r.name = gate.KERNEL
        return records

    cupti.spoil = gated
    prof = traced(CudaEngine(cupti, plans="ours", scope="step", packed=True), n=4, window=window)
    assert prof.complete and not prof.missing, prof.missing

    def about(spans: Any) -> list[tuple[Any, ...]]:
        keys = ("kernel", "bytes", "kind", "index", "part", "step")
        device = [s for s in spans if s.category == "device"]
        return sorted((s.name, s.lane, *(str(s.args.get(key)) for key in keys)) for s in device)

    assert about(prof.timeline.spans) == about(plain.timeline.spans)


@pytest.mark.parametrize("window", [(0, 1), (1, 2)])
def test_the_kernel_that_tells_of_the_end_is_no_command_s(cupti, window, monkeypatch):
    """With plan_end=word a plan ends with a kernel more: all others have their parts."""
    plain = traced(CudaEngine(cupti, plans="ours", scope="step", packed=True), n=4, window=window)
    capture = CuptiBackend.capture

    def ended(backend: Any, work: Any) -> Any:
        work.end = backend.gate_end(1 << 44, 1 << 45, work.stream, False)
        return capture(backend, work)

    monkeypatch.setattr(CuptiBackend, "capture", ended)
    engine = CudaEngine(cupti, plans="ours", scope="step", packed=True)
    prof = traced(engine, n=4, window=window)
    (graph,) = engine.backend.graphs
    assert graph.nodes[-1] == NO_PART and prof.complete and not prof.missing, prof.missing

    def about(spans: Any) -> list[tuple[Any, ...]]:
        keys = ("kernel", "bytes", "kind", "index", "part", "step")
        device = [s for s in spans if s.category == "device"]
        return sorted((s.name, s.lane, *(str(s.args.get(key)) for key in keys)) for s in device)

    assert about(prof.timeline.spans) == about(plain.timeline.spans)


def test_nodes_are_told_by_the_order_they_began_in_else_by_their_numbers(cupti):
    """Numbers of CUPTI's in no order do no harm, nor does a copy that begins late."""
    engine = CudaEngine(cupti, plans="ours", lead=2, scope="split")
    engine.step()
    for graph in engine.backend.graphs:
        graph.ids.reverse()
    assert traced(engine).complete
    rows = [
        Activity("kernel", name, start, start + 5, 7, 13, node=node)
        for name, start, node in (("a", 10, 3), ("b", 30, 1), ("c", 20, 2))
    ]
    a, b, c = (KernelName(name, False) for name in "abc")
    for wants in ((a, c, b), (b, c, a)):
        found, reason = parted(rows, [[want] for want in wants], [0, 1, 2])
        assert not reason
        assert [[r.name for r in found[i]] for i in range(3)] == [[w.function] for w in wants]
    found, reason = parted(rows, [[c], [b], [a]], [0, 1, 2])
    assert not found and reason == (
        "part 0: kernel a instead of c; by numbers of nodes, part 0: kernel b instead of c"
    )
    found, reason = parted(rows, [[a], [b], [c]], [0, 1])
    assert not found and reason == "3 records for 2 nodes"


def labels(engine: CudaEngine) -> list[tuple[str, str, str]]:
    """Of every kernel and copy of a plan, in the order of its parts: label, lane, part's op."""
    (plan,) = [c for c in engine.program.commands if isinstance(c, Replay)]
    return [
        (part.label, f"cuda stream {part.stream.id}", part.kind)
        for part in plan.parts
        for _ in range(5 if part.label in ("product", "q0") else 1)  # with cuBLAS's
        if isinstance(part, Copy | Launch)
    ]


@pytest.mark.parametrize("numbers", ["as captured", "of another order"])
@pytest.mark.parametrize("scope", ["split", "step"])
def test_parts_of_branches_are_told_apart_each_on_its_own_stream_s_lane(cupti, scope, numbers):
    """Kernels of branches begin side by side, some with the same name; CUPTI's streams are the
    graph's own. Numbers of nodes in another order than the capture's do no harm."""
    engine = CudaEngine(cupti, plans="ours", scope=scope, packed=True, branches=True)
    engine.step()
    (graph,) = engine.backend.graphs
    if numbers == "of another order":
        graph.ids.reverse()
    prof = traced(engine, n=4, window=(1, 2))
    assert prof.complete and not prof.missing, prof.missing
    device = [s for s in prof.timeline.spans if s.category == "device" and "part" in s.args]
    steps = {s.args["step"] for s in device}
    assert len(steps) == 2
    for step in steps:
        spans = [s for s in device if s.args["step"] == step]
        spans.sort(key=lambda s: (s.args["part"], s.start_ns))
        assert [(s.name, s.lane, s.args["kind"]) for s in spans] == labels(engine)
        k, v, q, joined = (
            [s for s in spans if s.name.startswith(name)] for name in ("k", "v", "q", "joined")
        )
        assert k[0].start_ns == v[0].start_ns < q[-1].start_ns  # side by side they are
        assert v[-1].end_ns <= joined[0].start_ns and k[-1].end_ns <= spans[-1].start_ns


def test_branches_issued_one_by_one_are_told_by_the_order_of_their_calls(cupti):
    engine = CudaEngine(cupti, plans="ours", packed=True, branches=True)
    prof = traced(engine, n=1, window=(0, 1))  # runs them to capture them
    assert prof.complete and not prof.missing, prof.missing
    spans = [s for s in prof.timeline.spans if s.category == "device" and "part" in s.args]
    assert {s.lane for s in spans if s.name.startswith("v")} == {"cuda stream 3"}


def test_a_record_that_begins_before_its_fork_is_no_branch_s():
    a, b, c = (KernelName(name, False, (i, 1, 1, 32, 1, 1)) for i, name in enumerate("abb", 1))
    starts = {"a": 10, "b": 5, "c": 20}
    rows = [Activity("kernel", n.function, starts[x], starts[x] + 5, 7, 13, node=i, dims=n.dims)
            for i, (x, n) in enumerate(zip("abc", (a, b, c), strict=True), 1)]  # fmt: skip
    wanted = [[a], [b], [c]]
    found, reason = parted(rows, wanted, [0, 1, 2], [(), (0,), (0,)])
    assert not found and reason.startswith("part 1: it began before part 0")
    found, reason = parted(rows, wanted, [0, 1, 2], [(), (), (0,)])
    assert not reason and [found[i] for i in range(3)] == [[row] for row in rows]


def test_products_in_a_row_are_told_by_the_nodes_of_each(cupti):
    rows = [Activity("kernel", "gemm", 10 * i, 10 * i + 5, 7, 13, node=i + 1) for i in range(5)]
    wanted: list[list[Any]] = [[None], [], [None], [None]]
    found, reason = parted(rows, wanted, [0, 0, 2, 3, 3])
    assert not reason and {i: len(r) for i, r in found.items()} == {0: 2, 2: 1, 3: 2}
    found, _ = parted([r._replace(node=0) for r in rows], wanted, None)
    assert {i: len(r) for i, r in found.items()} == {0: 1, 2: 1, 3: 3}, "one by one: nobody knows"


@pytest.mark.parametrize("nodes", [True, False])
def test_a_plan_with_a_lost_record_is_said_once(cupti, nodes):
    engine = CudaEngine(cupti, plans="ours" if nodes else "today")
    if nodes:
        engine.step()
    kinds = int(ActivityKind.CONCURRENT_KERNEL)
    cupti.spoil = lambda records: [
        r for r in records if not (r.kind == kinds and r.name == "add_bias")
    ]
    prof = traced(engine, n=1, window=(0, 1))
    assert not prof.complete
    assert "1 x plan not as recorded (first: step" in prof.missing
    assert ("6 nodes" if nodes else "instead of") in prof.missing, prof.missing
    assert "command not as recorded" not in prof.missing
    assert not [s for s in prof.timeline.spans if s.args.get("part") is not None]


# incomplete ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            spoiled.without_the_last_kernel,
            "command not as recorded (first: step 1, command 8, launch add",
        ),
        (spoiled.without_half, "command not as recorded"),
        (
            spoiled.without_a_part_of_a_product,
            "fewer kernels than launch calls (first: step 1, command 7",
        ),
        (spoiled.with_a_second_copy, "copy x: 2 records for 1"),
        (
            spoiled.with_another_name,
            "kernel memset_kernel (grid 99x297x1, block 32x1x1) instead of add (grid 4x297x1, ",
        ),
        (spoiled.with_fewer_bytes, "copy copy instead of 256"),
        (spoiled.with_a_zero_end, "1 x zero timestamp (first: step 1, command 7"),
        (spoiled.with_a_call_without_times, "1 x zero timestamp"),
        (spoiled.out_of_order, "1 x record out of order"),
        (
            spoiled.on_another_stream,
            "cuda stream 0 has CUPTI's (device, stream) [(0, 13), (0, 99)]",
        ),
        (spoiled.on_another_device, "has CUPTI's (device, stream) [(0, 13), (1, 13)]"),
        (spoiled.without_correlation, "kernel of no command (first: half_rows)"),
        (spoiled.with_work_of_somebody_else, "1 x kernel of no command (first: theirs)"),
        (spoiled.unreadable, "a buffer of records was lost"),
        (lambda records: [], "command not as recorded"),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_a_spoiled_window_says_what_is_missing(engine, cupti, spoil, said):
    cupti.spoil = spoil
    prof = traced(engine)
    assert prof.complete is False and said in prof.missing and "\n" not in prof.missing
    assert f"incomplete: {prof.missing}" in prof.note
    assert any(s.category == "step" for s in prof.timeline.spans)
    assert all(s.start_ns and s.end_ns >= s.start_ns for s in prof.timeline.spans)


def test_one_spoiled_window_of_several_makes_the_profile_incomplete(engine, cupti, monkeypatch):
    monkeypatch.setattr(collector, "WINDOW_STEPS", 1)
    flushed = []

    def second_only(records: list) -> list:
        flushed.append(1)
        return spoiled.without_half(records) if len(flushed) == 2 else records

    cupti.spoil = second_only
    prof = traced(engine, window=(0, 3))
    assert [w.complete for w in prof.windows] == [True, False, True] and prof.complete is False
    assert prof.missing == prof.windows[1].missing


def test_a_backend_that_does_not_say_its_kernels_leaves_the_window_incomplete(engine, monkeypatch):
    monkeypatch.setattr(engine.backend, "kernels_of", lambda node: None)
    prof = traced(engine)
    assert not prof.complete
    assert "the backend does not say which kernels a launch is made of (first: step" in prof.missing


def test_dropped_records_are_said(engine, cupti):
    cupti.dropped = 12
    prof = traced(engine)
    assert not prof.complete and "12 records dropped for want of buffers" in prof.missing


def test_a_flush_that_fails_is_said_and_lets_go(engine, cupti):
    def fail(records: list) -> list:
        raise AssertionError("never delivered")

    cupti.spoil = fail
    cupti.refuse["activity_flush_all"] = CuptiError(Result.ERROR_NOT_INITIALIZED)
    prof = traced(engine)
    assert not prof.complete and "at the end of a window" in prof.missing
    assert not cupti.enabled and not cupti.subscribers


def test_a_program_nobody_told_of_is_said(engine, monkeypatch):
    monkeypatch.setattr(collector.CuptiRecorder, "runs", lambda self, program, step: None)
    prof = traced(engine)
    assert prof.complete is False and "the program of step 1 is unknown" in prof.missing


def test_a_failing_body_keeps_its_trace_and_lets_go(engine, cupti):
    prepared = engine.prepared

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), profile(engine, nvtx=False) as prof:
        engine.step()
        prepared.head = (*prepared.head[:7], interrupted, *prepared.head[8:])
        engine.step()
    assert engine.recorder is None
    assert not cupti.enabled and not cupti.stack and not cupti.subscribers
    assert prof.complete is False and "step 1, command 7, launch mul_mat product" in prof.missing
    assert {s.args["step"] for s in prof.timeline.spans if s.category == "device"} == {0, 1}


def test_a_device_that_fails_at_the_end_of_a_window_is_said(engine, monkeypatch):
    def broken() -> None:
        raise DeviceError("the device fell off")

    with profile(engine, nvtx=False) as prof:
        engine.step()
        monkeypatch.setattr(engine.backend, "synchronize", broken)
        engine.step()
    assert prof.complete is False and "the device fell off" in prof.missing


def test_cupti_attaches_before_the_step_that_it_traces(engine, cupti, monkeypatch):
    """And when what was asked of the device before is over. CUPTI's first call to the driver takes
    milliseconds, which are no step's."""
    waited = []
    synchronize = engine.backend.synchronize

    def counted() -> None:
        waited.append(bool(cupti.enabled))
        synchronize()

    monkeypatch.setattr(engine.backend, "synchronize", counted)
    with profile(engine, nvtx=False):
        engine.step()
        assert waited == [False, False, True]


@pytest.mark.parametrize(("second", "as_one"), [(64, True), (32, False)])
def test_a_copy_through_the_host_s_memory_is_one_copy(tiny_model, second, as_one):
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
    assert bool(found.faults) != as_one
    times = [(s.start_ns, s.end_ns) for s in found.spans]
    assert times == ([(1000, 4000)] if as_one else [(1000, 3000), (2000, 4000)])


def test_an_engine_closed_in_the_body_keeps_its_trace(engine, monkeypatch):
    def synchronize(self) -> None:
        if self.backend is None:
            raise UsageError("the engine is closed")

    monkeypatch.setattr(CudaEngine, "synchronize", synchronize)
    with profile(engine, nvtx=False) as prof:
        engine.step()
        engine.backend = None
    assert prof.complete is False and "the engine is closed" in prof.missing
    assert any(s.category == "device" for s in prof.timeline.spans)


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
def test_what_refuses_at_the_start_is_answered_with_events(engine, cupti, function, error, said):
    cupti.refuse[function] = error
    prof = traced(engine, collector="cupti")
    assert prof.collector == "events" and prof.complete is None
    assert said in prof.fallback and prof.fallback in prof.note and "\n" not in prof.fallback
    assert prof.note.startswith("device spans from events (")
    assert any(s.category == "device" for s in prof.timeline.spans)
    assert not cupti.enabled and not cupti.subscribers


def test_without_the_package_events_answer(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupti", None)
    prof = traced(engine)
    assert prof.collector == "events" and "cupti-python cannot be imported" in prof.fallback


def test_bindings_of_another_version_are_refused_by_what_they_lack(engine, monkeypatch):
    monkeypatch.delattr(FakeCupti, "subscribe_v2")
    FakeCupti().install(monkeypatch)
    prof = traced(engine)
    assert prof.collector == "events" and "has no subscribe_v2" in prof.fallback


def test_a_profiler_that_attaches_before_the_window_leaves_it_to_events(engine, cupti):
    with profile(engine, window=(1, 1), nvtx=False) as prof:
        engine.step()
        cupti.refuse["subscribe_v2"] = CuptiError(39)
        engine.step()
    assert prof.collector == "events" and prof.complete is None and "attached" in prof.fallback
    assert {s.args["step"] for s in prof.timeline.spans if s.category == "device"} == {1}


def test_a_device_without_cuda_has_events(engine, cupti):
    engine.device = "embedded"
    assert traced(engine).fallback == ""
    assert "embedded device" in traced(engine, collector="cupti").fallback
    assert not cupti.most_enabled


def test_events_are_taken_where_asked_for(engine, cupti):
    prof = traced(engine, collector="events")
    assert prof.collector == "events" and not prof.fallback and not cupti.most_enabled


def test_a_collector_that_does_not_exist_is_refused(engine):
    with pytest.raises(UsageError, match="choose one of auto, events, cupti"):
        traced(engine, collector="nsys")


def test_the_real_bindings_have_what_is_asked_for():
    real = pytest.importorskip("cupti.cupti")
    assert [name for name in collector.NEEDED if not hasattr(real, name)] == []
    kinds = real.ActivityKind
    assert all(hasattr(kinds, name) for name in (*collector.KINDS, collector.EXTERNAL))
    records = [getattr(real, name) for name in dir(real) if name.startswith("ActivityKernel")]
    assert records and all(field in dir(of) for of in records for field in DIMS)
    assert {k.name: int(k) for k in ActivityKind} == {
        k.name: int(kinds[k.name]) for k in ActivityKind
    }
    assert all(int(real.Result[r.name]) == r for r in Result)
    assert real.cuptiError(39).status == 39
    if not _has_driver():  # with one: tests/gpu/test_cuda_cupti.py
        with pytest.raises(collector.Unavailable, match="driver"):
            collector.probe(real)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
