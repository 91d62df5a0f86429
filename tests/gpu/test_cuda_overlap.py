"""Overlap on the GPU, by what kernels note: branches of known length, whoever of a kernel returns
first, and real steps, which compute what they did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from tests.gpu.harness import one_by_one, tokens_for
from workbench.backend.clock.launch_notes import NOTE_BYTES, times_of
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import noting
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.backend.issue.bind import plannable
from workbench.benchmarks.times.overlap import RESOLVED_TICKS, in_flight, measure_overlap
from workbench.config import Toggles
from workbench.engine.look.kernel_spans import kernel_spans
from workbench.program.commands import Launch, Space, compute_stream
from workbench.trace.spans import now_ns

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SOURCES = Path(__file__).resolve().parent / "sources"
TIMES = 20
OFF_NS = 50_000  # more than the clocks are ever apart
FIRST, SECOND = compute_stream(0), compute_stream(1)
Launched = tuple[str, float, int]  # a kernel of spin.cu, its us, its stream
captured_or_not = pytest.mark.parametrize("captured", [False, True], ids=["eager", "in a graph"])


class Noted:
    """Launches that note, each in its own note."""

    def __init__(self, backend: CudaBackend, launched: Sequence[Launched], grid: int = 1):
        self.backend, n = backend, len(launched)
        self.there = backend.allocate(n * NOTE_BYTES, Space.DEVICE)
        self.here = backend.allocate(n * NOTE_BYTES, Space.PINNED)
        parts, streams = [], [stream for _, _, stream in launched]
        for i, (name, us, stream) in enumerate(launched):
            early = name == "spin_behind" and i > 0
            kernel = Kernel(
                "spin", name, (grid, 1), 128, [int(us * 1000)], waits=early, sources=SOURCES
            )
            (own,) = noting.noted([kernel], self.there.address + i * NOTE_BYTES)
            parts.append(backend._prepare(own, backend._stream(stream), name, early))
        self.work = plannable(backend, parts, FIRST, streams)

    def copied(self, to_host: bool) -> None:
        pair = self.here.address, self.there.address
        dst, src = pair if to_host else pair[::-1]
        self.backend.copy(dst, src, self.here.nbytes, FIRST, to_host)()
        self.backend.sync_stream(FIRST)()

    def ran(self, captured: bool = True) -> list[list[tuple[int, int]]]:
        """Begins and ends of TIMES runs, one after the other; a first one does not count."""
        backend, found = self.backend, []
        graph = backend.capture(self.work) if captured else None
        assert self.here.array is not None
        for _ in range(TIMES + 1):
            self.here.array[:] = 0xFF
            self.copied(to_host=False)
            (self.work.call if graph is None else graph.launch)()
            backend.synchronize()
            self.copied(to_host=True)
            found.append([(int(a), int(b)) for a, b in times_of(self.here.array)])
        if graph is not None:
            graph.destroy()
        self.there.free()
        return found[1:]


def lengths_us(runs: list[list[tuple[int, int]]]) -> list[float]:
    """Median of each launch."""
    return [median((run[i][1] - run[i][0]) / 1e3 for run in runs) for i in range(len(runs[0]))]


def overlap_of(runs: list[list[tuple[int, int]]]) -> float:
    return median(in_flight(run).overlap for run in runs)


# branches of known length -------------------------------------------------------------------------


@captured_or_not
def test_branches_of_10_us_and_of_2_us_are_told_apart(backend: CudaBackend, captured: bool):
    tick_ns = backend.clock().tick_ns
    launched = [("spin", 10.0, FIRST), ("spin", 2.0, SECOND)]
    runs = Noted(backend, launched).ran(captured)
    long, short = lengths_us(runs)
    slack = 1.0 + 2 * tick_ns / 1e3
    assert 10.0 - 2 * tick_ns / 1e3 <= long < 10.0 + slack
    assert 2.0 - 2 * tick_ns / 1e3 <= short < 2.0 + slack
    if RESOLVED_TICKS * tick_ns <= 2000:
        assert long > 3 * short
    assert overlap_of(runs) <= (2.0 + slack) / 10


def test_branches_of_a_graph_overlap_nearly_all_the_time(backend: CudaBackend):
    for us, least in ((100.0, 0.9), (10.0, 0.3), (2.0, 0.0)):
        found = overlap_of(Noted(backend, [("spin", us, FIRST), ("spin", us, SECOND)]).ran())
        assert least <= found <= 1, us


@captured_or_not
def test_launches_of_one_stream_overlap_by_exactly_nothing(backend: CudaBackend, captured: bool):
    runs = Noted(backend, [("spin", us, FIRST) for us in (5.0, 1.0, 0.0, 3.0)]).ran(captured)
    assert [in_flight(run).beside_ns for run in runs] == [0] * TIMES
    for run in runs:
        assert run == sorted(run), "each begins when the one in front has ended"


def test_a_dependent_launch_ends_behind_the_one_in_front(programmatic: CudaBackend):
    """It notes its begin while it waits, so the host leaves that out (`launch_notes.py`)."""
    launched = [("spin_behind", 20.0, FIRST), ("spin_behind", 5.0, FIRST)]
    runs = Noted(programmatic, launched).ran(False)
    least_ns = 5_000 - 2 * programmatic.clock().tick_ns
    assert all(second[1] - first[1] >= least_ns for first, second in runs)


@pytest.mark.parametrize(
    "name", ["spin_without_first_warp", "spin_in_last_lane", "spin_in_last_block"]
)
def test_an_end_is_the_last_thread_s_whoever_returns_first(backend: CudaBackend, name: str):
    grid = 600 if name == "spin_in_last_block" else 1
    (length,) = lengths_us(Noted(backend, [(name, 10.0, FIRST)], grid).ran())
    slack = 5.0 + 2 * backend.clock().tick_ns / 1e3
    assert 10.0 - 2 * backend.clock().tick_ns / 1e3 <= length < 10.0 + slack


@captured_or_not
def test_eight_streams_run_side_by_side(backend: CudaBackend, captured: bool):
    us, times = 2000.0, []
    for streams in ([compute_stream(k) for k in range(8)], [0] * 8):
        runs = Noted(backend, [("spin", us, stream) for stream in streams]).ran(captured)
        times.append(min(max(e for _, e in run) - min(b for b, _ in run) for run in runs) / 1e3)
    assert times[0] < 2 * us and times[1] > 8 * us * 0.95


# real steps ---------------------------------------------------------------------------------------

STEP = {
    "plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute",
    "results": "direct",
}  # fmt: skip
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "a plan of the step": STEP,
    "a plan of each split": {"plans": "ours", "plan_scope": "split"},
    "dependent launch in a plan": {"pdl": "on"} | STEP,
    "fused inside branches, in a plan": {"fuse": "on", "branch_fusion": "inside", "pdl": "on"}
    | STEP,
    "any, in a plan": {"streams": "8", "fork": "any"} | STEP,
    "stores by pointer, in a plan": {"graph_reuse": "patch_pointers"} | STEP,
}
MODELS = [("tiny-llama", "Q8_0"), ("tiny-qwen3", "Q4_K")]


@pytest.fixture(params=MODELS, ids="-".join)
def shared(request, engine) -> Any:
    return engine(*request.param)


def settings(way: str, streams: str) -> Toggles:
    return Toggles(**{"graph_reuse": "set_rows", "streams": streams} | WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_notes_computes_the_same_bits(shared, way):
    tokens = list(tokens_for("tiny-llama", 30))
    with shared.variant(settings(way, "3")) as used:
        wanted = [used.prefill(tokens[:20]).copy(), one_by_one(used, tokens[20:])]
        used.reset()
        around: list[tuple[int, int]] = []
        with kernel_spans(used) as found:
            noted = [used.prefill(tokens[:20]).copy()]
            for token in tokens[20:]:
                begin = now_ns()
                noted.append(used.step([token]).copy())
                around.append((begin, now_ns()))
        np.testing.assert_array_equal(np.concatenate(noted), np.concatenate(wanted))
        program = used.program(n_past=25)
    launches = [c for c in program.singly() if isinstance(c, Launch) and not c.by_host]
    assert len({s.name for s in found.steps[-1]}) >= len(launches) / 2
    steps = found.steps[-len(around) :]
    for spans, (called, returned) in zip(steps, around, strict=True):
        assert len(spans) >= len(launches)
        for span in spans:
            assert called - OFF_NS < span.start_ns <= span.end_ns < returned + OFF_NS


@pytest.mark.parametrize("way", ["no plans", "a plan of the step"])
def test_one_stream_overlaps_by_nothing_and_three_are_seen(shared, way):
    with shared.variant(settings(way, "1")) as used:
        found = measure_overlap(used, 8, collector=None)
    assert found.tokens["overlap"].tolist() == [0.0] * 8 and found.branches.empty
    assert found.tick_ns == shared.backend.clock().tick_ns > 0
    with shared.variant(settings(way, "3")) as used:
        found = measure_overlap(used, 8)
    assert (found.tokens["n_silent"] == 0).all()
    assert len(found.by_branch) == 3 * shared.model.n_layer and (found.by_branch["us"] > 0).all()
    short = found.by_branch["us"] * 1e3 < RESOLVED_TICKS * found.tick_ns
    assert (found.by_branch["resolved"] == ~short).all()
    assert found.traced is not None and found.traced.us > 0 and 0 <= found.traced.overlap <= 1
    assert found.plain_us > 0
