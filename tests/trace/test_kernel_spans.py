"""When kernels of a step ran, and how much of it was side by side, on the embedded device: by its
marks, untraced."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from workbench.benchmarks.times.overlap import WARM_UP, measure_overlap
from workbench.common.errors import UsageError
from workbench.engine.look.kernel_spans import kernel_spans, number_of
from workbench.program.commands import Launch, Program
from workbench.program.side_by_side import regions
from workbench.trace.spans import now_ns

STEP = {"plans": "ours", "plan_scope": "step", "sync": "packed_implicit",
        "copy_stream": "compute", "results": "direct"}  # fmt: skip
WAYS: dict[str, dict[str, str]] = {
    "no plans": {}, "a plan of the step": STEP, "plans of splits": {"plans": "ours"}
}  # fmt: skip
TOKENS = [5, 900, 17]


def toggles(way: dict[str, str], streams: str) -> wb.Toggles:
    return wb.Toggles(**{"graph_reuse": "set_rows", "streams": streams} | way)


def launched(program: Program) -> list[Launch]:
    return [c for c in program.singly() if isinstance(c, Launch) and not c.by_host]


@pytest.mark.parametrize("streams", ["1", "3"])
@pytest.mark.parametrize("way", WAYS)
def test_every_launch_of_a_step_has_its_span_in_it(loaded, way, streams):
    with loaded.variant(toggles(WAYS[way], streams)) as used:
        wanted, around, rows = [used.step([token]).copy() for token in TOKENS], [], []
        used.reset()
        with kernel_spans(used) as found:
            for token in TOKENS:
                begin = now_ns()
                rows.append(used.step([token]).copy())
                around.append((begin, now_ns()))
        np.testing.assert_array_equal(rows, wanted)
        assert used.recorder is None and found.n_silent == [0] * len(TOKENS)
        for number, (spans, (called, returned)) in enumerate(zip(found.steps, around, strict=True)):
            assert {s.args["step"] for s in spans} == {spans[0].args["step"]}
            assert [number_of(s) for s in spans] == sorted(number_of(s) for s in spans)
            assert all(called <= s.start_ns <= s.end_ns <= returned for s in spans)
            launches = launched(used.program(n_past=number))
            assert [s.name for s in spans] == [c.node.name for c in launches]
            assert [s.args["stream"] for s in spans] == [c.stream.id for c in launches]


@pytest.mark.parametrize("way", WAYS)
def test_an_overlap_is_told_with_its_branches_and_tick(loaded, way):
    with loaded.variant(toggles(WAYS[way], "3")) as used:
        found, own = measure_overlap(used, 4), regions(used.program(n_past=WARM_UP))
        launches = launched(used.program(n_past=3))
    assert found.tick_ns == loaded.backend.clock().tick_ns >= 1
    assert len(found.tokens) == 4 and (found.tokens["n_kernels"] == len(launches)).all()
    assert (found.tokens["beside_us"] <= found.tokens["total_us"]).all()
    assert [len(branches) for branches in own] == [3, 3], "Q, K and V in each of two layers"
    shown = found.by_branch[["region", "stream", "first", "n"]].itertuples(index=False)
    assert [tuple(row) for row in shown] == [
        (region, b.stream.id, b.launches[0].node.name, len(b.launches))
        for region, branches in enumerate(own)
        for b in branches
    ]
    assert found.by_branch["resolved"].all() and found.traced.collector == "events"
    assert found.traced.slowdown > 0 and 0 <= found.traced.overlap <= 1
    with loaded.variant(toggles(WAYS[way], "1")) as used:
        alone = measure_overlap(used, 3, collector=None)
    assert alone.tokens["overlap"].tolist() == [0.0] * 3 and alone.branches.empty


def test_what_cannot_be_measured_is_refused(engine, tiny_model):
    """And an error in the body ends the looking, which the fixture asserts."""
    with pytest.raises(OSError), kernel_spans(engine):
        raise OSError
    with (
        engine.variant(toggles(STEP | {"launch_ahead": "on"}, "1")) as used,
        pytest.raises(UsageError, match="launch_ahead=on queues the next"),
    ):
        measure_overlap(used, 2)
    with (
        wb.Engine.load(tiny_model("tiny-llama", "Q8_0"), device="host", n_ctx=64) as host,
        pytest.raises(UsageError, match="the host device has no kernels of its own"),
    ):
        measure_overlap(host, 2)
