"""CUPTI on a real GPU: windows of every mode are complete, and on the host's clock."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.gpu.harness import skip_where_refused
from tests.oracles.trace_pattern import trace_pattern
from workbench.config import CopyStream, SyncMode, Toggles
from workbench.program.commands import HOST, Command, Copy, Launch, Replay
from workbench.trace.profile import Profile, profile
from workbench.trace.spans import Span

pytest.importorskip("cupti.cupti")
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# the first two race, the last means nothing
IMPOSSIBLE = {("implicit", "own"), ("packed_implicit", "own"), ("event_guarded", "compute")}
SYNCS = [mode.value for mode in SyncMode if mode != SyncMode.AUTO]
EVERY = itertools.product(SYNCS, (CopyStream.OWN.value, CopyStream.COMPUTE.value))
MODES = [mode for mode in EVERY if mode not in IMPOSSIBLE]
MOST_CLOCK_ERROR_NS = 100_000


@pytest.fixture
def loaded(engine) -> wb.Engine:
    return engine("tiny-llama", "Q8_0")


def device_spans(prof: Profile) -> list[Span]:
    return [s for s in prof.timeline.spans if s.category == "device"]


def kernel_names(engine: wb.Engine, command: Command) -> list[str | None]:
    if not isinstance(command, Launch) or command.stream.backend == HOST:
        return []
    return [kernel.function for kernel in engine.backend.kernels_of(command.node)]


def traced(engine: wb.Engine, first: int, n: int) -> Profile:
    """A complete window of n tokens, where every kernel and copy has the name, the op and the
    kernel that its command, or its part of a plan, issues."""
    with profile(engine, window=(first, n), nvtx=False) as prof:
        for token in range(5, 5 + first + n):
            engine.step([token])
    assert prof.collector == "cupti" and prof.complete, prof.note
    commands = engine.program(n_past=engine.n_past).commands
    spans = device_spans(prof)
    for i, command in enumerate(commands):
        parts: Any = enumerate(command.parts) if isinstance(command, Replay) else [(None, command)]
        for number, part in parts:
            here = [s for s in spans if (s.args["index"], s.args.get("part")) == (i, number)]
            kind = part.kind, part.label or part.kind
            assert {(s.args["kind"], s.name) for s in here} <= {kind}
            if names := kernel_names(engine, part):
                assert [s.args["kernel"] for s in here] == names * n
                assert {s.args["op"] for s in here} == {part.node.op}
            else:
                moved = [part.src.nbytes] * n if isinstance(part, Copy) else []
                assert [s.args["bytes"] for s in here] == moved
    return prof


@pytest.mark.parametrize(("sync", "copy_stream"), MODES)
def test_a_window_has_the_programs_pattern(loaded, sync, copy_stream):
    toggles = Toggles(sync=sync, copy_stream=copy_stream, graph_reuse="set_rows")
    with loaded.variant(toggles) as engine:
        engine.prefill([1, 17, 300, 4])
        prof = traced(engine, 4, 8)
        assert trace_pattern(prof) == engine.program(n_past=engine.n_past).pattern()
    assert prof.slowdown is not None
    assert (prof.slowdown.n_traced, prof.slowdown.n_untraced) == (8, 4)
    slack = prof.windows[0].clock_error_ns
    assert 0 < slack < MOST_CLOCK_ERROR_NS
    steps = {s.args["step"]: s for s in prof.timeline.spans if s.category == "step"}
    for span in device_spans(prof):
        step = steps[span.args["step"]]
        assert step.start_ns - slack <= span.start_ns < span.end_ns <= step.end_ns + slack


SCOPES: list[dict[str, str]] = [
    {"plan_scope": "split"}, {"plan_scope": "step", "sync": "implicit"},
    {"plan_scope": "step", "sync": "event_guarded", "copy_stream": "own"},
    {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on"},
    {"plan_scope": "step", "sync": "packed_implicit", "launch_ahead": "on", "plan_end": "word"},
]  # fmt: skip


@pytest.mark.parametrize(("first", "more"), [(0, {}), (3, {"fuse": "on", "pdl": "on"})])
@pytest.mark.parametrize("scope", SCOPES, ids=["split", "step", "forked", "gated", "word"])
def test_what_runs_in_a_replay_has_its_part(loaded, scope, first, more):
    """The plan is captured in the window, or before CUPTI is there. With a gate, the kernel there
    is the copy of the inputs, and what tells of the end is nobody's; the plan that was launched
    ahead of the window is none of its."""
    skip_where_refused(more, loaded.backend)
    with loaded.variant(Toggles(graph_reuse="set_rows", plans="ours", **more, **scope)) as engine:
        prof = traced(engine, first, 6)
        commands = engine.program(n_past=engine.n_past).commands
    assert len([c for c in commands if isinstance(c, Replay)]) == 1
    copies = sum(isinstance(c, Copy) for c in commands)
    assert sum("part" not in s.args for s in device_spans(prof)) == 6 * copies


@pytest.mark.parametrize("plans", ["off", "ours"])
@pytest.mark.parametrize("quant", ["Q4_0", "F16", "Q8_0", "F32"])
def test_products_of_cublas_have_their_parts(tiny_model, quant, plans):
    """Prompts, captured in the window and replayed in it, while modules of other engines come and
    go: CUPTI may give a new kernel the name of an old one."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 300, 400)]
    path, toggles = tiny_model("tiny-llama", quant), Toggles(graph_reuse="set_rows", plans=plans)
    with wb.Engine.load(path, device="cuda", n_ctx=512, toggles=toggles) as engine:
        with profile(engine, nvtx=False) as prof:
            for _ in range(3):
                engine.reset()
                engine.prefill(tokens)
        assert prof.complete, prof.note
        commands = engine.program(400, n_past=0).commands
        plan = next((c for c in commands if isinstance(c, Replay)), None)
        issued = [(c, kernel_names(engine, c)) for c in (plan.parts if plan else commands)]
    assert (plan is not None) == (plans == "ours")
    number = "part" if plan else "index"
    steps = dict[int, list[tuple[int, str, str]]]()
    for s in device_spans(prof):
        if s.args["kind"] == "launch" and number in s.args:
            rows = steps.setdefault(s.args["step"], [])
            rows.append((s.args[number], s.name, s.args["kernel"]))
    first, *others = steps.values()
    assert len(first) > 20 and others == [first] * 2
    for i, (command, names) in enumerate(issued):
        here = [row for row in first if row[0] == i]
        wanted = [(i, command.label, name) for name in names]
        assert None in names or here == wanted, prof.note
