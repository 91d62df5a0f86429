"""CUPTI on a real GPU: windows of every mode are complete, and on the host's clock."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from tests.oracles.trace_pattern import trace_pattern
from workbench.config import CopyStream, SyncMode, Toggles
from workbench.program.commands import HOST, Copy, Launch, Replay
from workbench.trace.cupti import collector
from workbench.trace.cupti.activity import KERNEL
from workbench.trace.profile import Profile, profile

bindings = pytest.importorskip("cupti.cupti")
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# the first two race, the last means nothing
IMPOSSIBLE = {("implicit", "own"), ("packed_implicit", "own"), ("event_guarded", "compute")}
MODES = [
    (m.value, c.value)
    for m in SyncMode
    for c in (CopyStream.OWN, CopyStream.COMPUTE)
    if m != SyncMode.AUTO and (m.value, c.value) not in IMPOSSIBLE
]
MOST_CLOCK_ERROR_NS = 100_000


@pytest.fixture
def loaded(engine) -> wb.Engine:
    return engine("tiny-llama", "Q8_0")


@pytest.mark.parametrize(("sync", "copy_stream"), MODES)
def test_a_window_is_complete_and_has_the_program_s_pattern(loaded, sync, copy_stream):
    toggles = Toggles(sync=sync, copy_stream=copy_stream, graph_reuse="set_rows")
    with loaded.variant(toggles) as engine:
        engine.prefill([1, 17, 300, 4])
        program = engine.program(n_past=engine.n_past)
        with profile(engine, window=(4, 8), nvtx=False) as prof:
            for token in range(5, 17):
                engine.step([token])
        assert prof.collector == "cupti" and prof.complete, prof.note
        assert trace_pattern(prof) == program.pattern()
        assert 0 < prof.windows[0].clock_error_ns < MOST_CLOCK_ERROR_NS
        assert prof.slowdown is not None
        assert (prof.slowdown.n_traced, prof.slowdown.n_untraced) == (8, 4)
        device = [s for s in prof.timeline.spans if s.category == "device"]
        for i, command in enumerate(program.commands):
            here = [s for s in device if s.args["index"] == i]
            if isinstance(command, Launch) and command.stream.backend != HOST:
                names = [kernel.function for kernel in engine.backend.kernels_of(command.node)]
                assert [s.args["kernel"] for s in here] == names * 8
            else:
                assert len(here) == (8 if isinstance(command, Copy) else 0)
        slack = prof.windows[0].clock_error_ns
        steps = {s.args["step"]: s for s in prof.timeline.spans if s.category == "step"}
        for span in device:
            step = steps[span.args["step"]]
            assert step.start_ns - slack <= span.start_ns < span.end_ns <= step.end_ns + slack


SCOPES: list[dict[str, str]] = [
    {"plan_scope": "split"}, {"plan_scope": "step", "sync": "implicit"},
    {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
    {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on"},
    {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on", "plan_end": "word"},
]  # fmt: skip


@pytest.mark.parametrize(("first", "fuse"), [(0, "off"), (3, "on")])
@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked", "gated", "word"])
def test_what_runs_in_a_replay_has_its_part(loaded, scope, first, fuse):
    """Every kernel and copy of a window has the name, the op and the kernel that its part issues.
    The plan is captured in the window, or before CUPTI is there. With a gate, the kernel there is
    the copy of the inputs, and what tells of the end is nobody's; the plan that was launched ahead
    of the window is none of its."""
    pdl = "on" if fuse == "on" and loaded.backend.capabilities.programmatic else "off"
    toggles = Toggles(graph_reuse="set_rows", fuse=fuse, pdl=pdl, plans="ours", **scope)
    with loaded.variant(toggles) as engine:
        with profile(engine, window=(first, 6), nvtx=False) as prof:
            for token in range(5, 14):
                engine.step([token])
        assert prof.collector == "cupti" and prof.complete, prof.note
        program = engine.program(n_past=engine.n_past)
        device = [s for s in prof.timeline.spans if s.category == "device"]
        (at,) = [i for i, c in enumerate(program.commands) if isinstance(c, Replay)]
        plan = program.commands[at]
        assert isinstance(plan, Replay)
        for number, part in enumerate(plan.parts):
            here = [s for s in device if s.args["index"] == at and s.args["part"] == number]
            assert {s.args["kind"] for s in here} <= {part.kind} and {s.name for s in here} <= {
                part.label
            }
            if isinstance(part, Launch):
                names = [kernel.function for kernel in engine.backend.kernels_of(part.node)]
                assert [s.args["kernel"] for s in here] == names * 6
                assert {s.args["op"] for s in here} == {part.node.op}
            else:
                assert [s.args["bytes"] for s in here] == (
                    [part.src.nbytes] * 6 if isinstance(part, Copy) else []
                )
        copies = sum(isinstance(c, Copy) for c in program.commands)
        assert sum("part" not in s.args for s in device) == 6 * copies


def prompts(path, plans: str) -> tuple[Profile, list[tuple[str, int, list[str | None]]], int]:
    """Three prompts of 400 tokens in a window, the plan's capture among them; of each launch label,
    number and names of its kernels; and the number of the plan's command, -1 without one."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 300, 400)]
    toggles = Toggles(graph_reuse="set_rows", plans=plans)
    with wb.Engine.load(path, device="cuda", n_ctx=512, toggles=toggles) as engine:
        with profile(engine, nvtx=False) as prof:
            for _ in range(3):
                engine.reset()
                engine.prefill(tokens)
        commands = engine.program(400, n_past=0).commands
        at = next((i for i, c in enumerate(commands) if isinstance(c, Replay)), -1)
        plan = commands[at]
        launched = [
            (c.label, i, [kernel.function for kernel in engine.backend.kernels_of(c.node)])
            for i, c in enumerate(plan.parts if isinstance(plan, Replay) else commands)
            if isinstance(c, Launch) and c.stream.backend != HOST
        ]
    return prof, launched, at


def kernels_of_steps(prof: Profile, at: int) -> list[list[tuple[str, int, str]]]:
    """Of each step its kernels: label and number of the launch, and name."""
    number = "part" if at >= 0 else "index"
    launches = [
        s for s in prof.timeline.spans
        if s.category == "device" and s.args["kind"] == "launch" and number in s.args
    ]  # fmt: skip
    return [
        [(s.name, s.args[number], s.args["kernel"]) for s in launches if s.args["step"] == step]
        for step in sorted({s.args["step"] for s in prof.timeline.spans if "step" in s.args})
    ]


@pytest.mark.parametrize("plans", ["off", "ours"])
@pytest.mark.parametrize("quant", ["Q4_0", "F16", "Q8_0", "F32"])
def test_products_of_cublas_have_their_parts(tiny_model, quant, plans):
    """A prompt, captured in the window and replayed in it, while modules of other engines come and
    go: CUPTI may give a new kernel the name of an old one."""
    prof, launched, at = prompts(tiny_model("tiny-llama", quant), plans)
    assert (at >= 0) == (plans == "ours") and prof.complete, prof.note
    kernels = kernels_of_steps(prof, at)
    assert len(kernels[0]) > 20 and kernels[0] == kernels[1] == kernels[2]
    for label, number, names in launched:
        here = [(name, kernel) for name, part, kernel in kernels[0] if part == number]
        assert None in names or here == [(label, name) for name in names], prof.note


@pytest.mark.parametrize("plans", ["off", "ours"])
def test_a_name_of_another_kernel_is_not_believed(tiny_model, monkeypatch, plans):
    """Grid and block in CUPTI's records are those of the launches: they tell what a kernel is."""
    row_of = collector._row

    def stale(kind, activity):
        row = row_of(kind, activity)
        return row._replace(name="attention_decode") if row.kind == KERNEL else row

    monkeypatch.setattr(collector, "_row", stale)
    prof, launched, at = prompts(tiny_model("tiny-llama", "Q4_0"), plans)
    assert (at >= 0) == (plans == "ours") and prof.complete, prof.note
    assert "kernels named by their launches" in prof.note
    expected = [(label, i, name) for label, i, names in launched for name in names]
    assert kernels_of_steps(prof, at) == [expected] * 3


def test_with_another_subscriber_events_answer(loaded):
    params = bindings.SubscriberParams()
    params.struct_size = bindings.SUBSCRIBER_PARAMS_SIZE
    params.subscriber_name = "somebody else"
    other = bindings.subscribe_v2(lambda *_: None, None, params.ptr)
    try:
        with loaded.variant(Toggles()) as engine, profile(engine, nvtx=False) as prof:
            engine.step([1])
    finally:
        bindings.unsubscribe(other)
    if prof.collector == "cupti":
        pytest.skip("this driver has room for several subscribers")
    assert "attached" in prof.fallback
    assert any(s.category == "device" for s in prof.timeline.spans)
