"""Overlap on the GPU, by what kernels note, in branches of known length and real steps; stamps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from tests.gpu.harness import skip_where_refused, tokens_for
from tests.late_host import LATE, never_passed  # noqa: F401 - of every test
from workbench.backend.clock.launch_notes import NOTE_BYTES, times_of
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import noting
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.backend.issue.bind import plannable
from workbench.benchmarks.times.overlap import in_flight
from workbench.config import Toggles
from workbench.engine.look.kernel_spans import kernel_spans
from workbench.program.commands import Launch, Space, compute_stream
from workbench.trace.spans import now_ns

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SOURCES = Path(__file__).resolve().parent / "sources"
TIMES = 20
OFF_NS = 50_000  # more than the clocks are ever apart: a step takes longer
FIRST, SECOND = compute_stream(0), compute_stream(1)
Launched = tuple[str, float, int]  # a kernel of spin.cu, its us, its stream
Runs = list[list[tuple[int, int]]]  # of each the begins and ends of launches


def noted(
    backend: CudaBackend, launched: Sequence[Launched], captured: bool = True, grid: int = 1
) -> Runs:
    """Launches that note, each in its own note: TIMES runs, one after the other; a first one does
    not count."""
    nbytes, streams = len(launched) * NOTE_BYTES, [stream for _, _, stream in launched]
    there, here = backend.allocate(nbytes, Space.DEVICE), backend.allocate(nbytes, Space.PINNED)
    parts, found = [], []
    for i, (name, us, stream) in enumerate(launched):
        early = name == "spin_behind" and i > 0
        args: list[int | float] = [int(us * 1000)]
        kernel = Kernel("spin", name, (grid, 1), 128, args, waits=early, sources=SOURCES)
        (own,) = noting.noted([kernel], there.address + i * NOTE_BYTES)
        parts.append(backend._prepare(own, backend._stream(stream), name, early))
    work = plannable(backend, parts, FIRST, streams)
    graph = backend.capture(work) if captured else None
    assert here.array is not None
    for _ in range(TIMES + 1):
        here.array[:] = 0xFF
        backend.copy(there.address, here.address, nbytes, FIRST, to_host=False)()
        backend.synchronize()
        (graph.launch if graph else work.call)()
        backend.synchronize()
        backend.copy(here.address, there.address, nbytes, FIRST, to_host=True)()
        backend.synchronize()
        found.append([(int(a), int(b)) for a, b in times_of(here.array)])
    if graph:
        graph.destroy()
    there.free()
    return found[1:]


BRANCHES: dict[str, tuple[list[Launched], float, float, float]] = {
    # launches, us that each may take longer, least and most of the time that they overlap
    "of 10 us and of 2 us": ([("spin", 10.0, FIRST), ("spin", 2.0, SECOND)], 1.0, 0.0, 0.3),
    "of 100 us": ([("spin", 100.0, FIRST), ("spin", 100.0, SECOND)], 5.0, 0.9, 1.0),
    "of 10 us": ([("spin", 10.0, FIRST), ("spin", 10.0, SECOND)], 1.0, 0.3, 1.0),
    "one after another": ([("spin", us, FIRST) for us in (5.0, 1.0, 0.0, 3.0)], 1.0, 0.0, 0.0),
    # the last thread's end counts, whoever returns first
    **{name: ([(name, 10.0, FIRST)], 5.0, 0.0, 0.0) for name in
       ("spin_without_first_warp", "spin_in_last_lane", "spin_in_last_block")},
}  # fmt: skip


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in a graph"])
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_of_known_length(backend: CudaBackend, name: str, captured: bool):
    launched, slack, least, most = BRANCHES[name]
    ticks_us = 2 * backend.clock().tick_ns / 1e3
    runs = noted(backend, launched, captured, 600 if name == "spin_in_last_block" else 1)
    for i, (_, us, _) in enumerate(launched):
        length = median((run[i][1] - run[i][0]) / 1e3 for run in runs)
        assert us - ticks_us <= length < us + slack + ticks_us
    overlap = median(in_flight(run).overlap for run in runs)
    assert (least if captured else 0) <= overlap <= (most + ticks_us / 10 if most else 0)
    # each begins when the one before has ended
    assert most or all(run == sorted(run) for run in runs)


def test_a_dependent_launch_ends_after_the_one_before(backend: CudaBackend):
    """It notes its begin while it waits, so the host leaves that out (`launch_notes.py`)."""
    skip_where_refused({"pdl": "on"}, backend)
    launched = [("spin_behind", 20.0, FIRST), ("spin_behind", 5.0, FIRST)]
    least_ns = 5_000 - 2 * backend.clock().tick_ns
    runs = noted(backend, launched, captured=False)
    assert all(second[1] - first[1] >= least_ns for first, second in runs)


def test_the_clock_goes_on_in_steps_and_is_the_hosts(backend: CudaBackend):
    first = backend.clock()
    time.sleep(0.01)
    clock = backend.clock()
    assert 0 < clock.tick_ns <= 2_000_000 and clock.tick_ns <= clock.error_ns < OFF_NS
    apart = abs(first.ahead_ns - clock.ahead_ns)
    assert apart <= first.error_ns + clock.error_ns + 10_000  # of drift


STEP = {
    "plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute",
    "results": "direct",
}  # fmt: skip
AHEAD = STEP | {"launch_ahead": "on", "results": "copy"}
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "a plan of the step": STEP,
    "a plan of each split": {"plans": "ours", "plan_scope": "split"},
    "today's plans": STEP | {"plans": "today"},
    "dependent launch in a plan": {"pdl": "on"} | STEP,
    "fused inside branches, in a plan": {"fuse": "on", "branch_fusion": "inside", "pdl": "on"}
    | STEP,
    "any, in a plan": {"streams": "8", "fork": "any"} | STEP,
    "stores by pointer, in a plan": {"graph_reuse": "patch_pointers"} | STEP,
    "ahead": AHEAD,
    "ahead, to a word": AHEAD | {"results": "direct", "pdl": "on", "plan_end": "word"},
}
MODELS = [("tiny-llama", "Q8_0"), ("tiny-qwen3", "Q4_K")]
of_models = pytest.mark.parametrize("model", MODELS, ids="-".join)


def settings(way: str, streams: str) -> Toggles:
    return Toggles(**{"graph_reuse": "set_rows", "streams": streams} | WAYS[way])


def fed(used: Any, tokens: list[int], n: int = 0, late: Sequence[int] = ()) -> tuple[Any, list]:
    """A prompt of n tokens and single ones: logits, and when each of these was asked for and
    answered."""
    used.reset()
    rows, around = [used.prefill(tokens[:n]).copy()] if n else [], []
    for i, token in enumerate(tokens[n:]):
        if i in late:
            time.sleep(LATE)
        called = now_ns()
        rows.append(used.step([token]).copy())
        around.append((called, now_ns()))
    return np.concatenate(rows), around


@of_models
@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("ahead")])
def test_a_step_that_notes_computes_the_same_bits(engine, model, way):
    shared, tokens = engine(*model), tokens_for("tiny-llama", 30)
    skip_where_refused(WAYS[way], shared.backend)
    with shared.variant(settings(way, "3")) as used:
        wanted, _ = fed(used, tokens, 20)
        with kernel_spans(used) as found:
            rows, around = fed(used, tokens, 20)
        assert np.array_equal(rows, wanted)
        program = used.program(n_past=25)
    launches = [c for c in program.singly() if isinstance(c, Launch) and not c.by_host]
    assert len({s.name for s in found.steps[-1]}) >= len(launches) / 2
    for spans, (called, returned) in zip(found.steps[-len(around) :], around, strict=True):
        assert len(spans) >= len(launches)
        for span in spans:
            assert called - OFF_NS < span.start_ns <= span.end_ns < returned + OFF_NS


@pytest.mark.parametrize("way", WAYS)
def test_stamps_lie_in_their_step_and_change_nothing(engine, backend, way):
    skip_where_refused(WAYS[way], backend)
    tokens, values = tokens_for("tiny-llama", 30), WAYS[way]
    late = [7, 15, 16, 22] if "launch_ahead" in values else []
    captured = "plans_captured" if "plans" in values else "programs_built"
    with engine("tiny-llama", "Q4_0").variant(settings(way, "1")) as used:
        if "plans" in values:
            used.issuer.rings.n_pairs = 8  # so that they go round
        wanted, _ = fed(used, tokens)
        for _ in range(2):
            before = used.counters
            with used.stamped() as stamps:
                rows, around = fed(used, tokens, late=late)
            assert np.array_equal(rows, wanted)
            for (begin, end), (called, returned) in zip(stamps, around, strict=True):
                assert called - OFF_NS < begin < end < returned + OFF_NS
            assert (np.diff(np.array(stamps).ravel()) > 0).all()
        if late:
            n, missed = (used.counters[name] - before[name]
                         for name in ("plans_ahead", "plans_ahead_missed"))  # fmt: skip
            assert n > 15 and missed >= len(late) - 1
        assert np.array_equal(fed(used, tokens)[0], wanted)
        assert used.counters[captured] == before[captured], "plain and stamped are kept"
