"""When kernels of a step ran, and how much of it was side by side, on the embedded device: by its
marks, untraced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba import cfunc

import workbench as wb
from workbench.backend.cpu.device import signals
from workbench.backend.cpu.device.atomics import call_kernel, sched_yield
from workbench.backend.cpu.device.loops import KERNEL
from workbench.backend.cpu.kernels import op_table
from workbench.benchmarks.times.overlap import WARM_UP, in_flight, measure_overlap
from workbench.common.errors import UsageError
from workbench.engine.look.kernel_spans import kernel_spans, number_of
from workbench.program.commands import Launch, Program
from workbench.program.side_by_side import regions
from workbench.trace.spans import now_ns

KEPT = {"graph_reuse": "set_rows"}
STEP = {
    "plans": "ours", "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute",
    "results": "direct",
}  # fmt: skip
WAYS: dict[str, dict[str, str]] = {
    "no plans": {},
    "a plan of the step": STEP,
    "a plan of each split": {"plans": "ours", "plan_scope": "split"},
}
TOKENS = [5, 900, 17, 403, 77]
PRODUCT_NS = 10_000_000


@pytest.fixture(scope="module")
def loaded(tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, threads=2,
        toggles=wb.Toggles(),
    ) as made:  # fmt: skip
        yield made


def settings(way: str, streams: str) -> wb.Toggles:
    return wb.Toggles(**KEPT | WAYS[way] | {"streams": streams})


def launched(program: Program) -> list[Launch]:
    return [c for c in program.singly() if isinstance(c, Launch) and not c.by_host]


def decoded(used: wb.Engine) -> np.ndarray:
    used.reset()
    return np.concatenate([used.step([token]) for token in TOKENS])


@pytest.mark.parametrize("streams", ["1", "3"])
@pytest.mark.parametrize("way", WAYS)
def test_every_launch_of_a_step_has_its_span_in_it(loaded, way, streams):
    with loaded.variant(settings(way, streams)) as used:
        wanted, around, rows = decoded(used), [], []
        used.reset()
        with kernel_spans(used) as found:
            for token in TOKENS:
                begin = now_ns()
                rows.append(used.step([token]).copy())
                around.append((begin, now_ns()))
        np.testing.assert_array_equal(np.concatenate(rows), wanted)
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
    with loaded.variant(settings(way, "3")) as used:
        found = measure_overlap(used, 4)
        own, launches = regions(used.program(n_past=WARM_UP)), launched(used.program(n_past=3))
    tokens = found.tokens
    assert found.tick_ns == loaded.backend.clock().tick_ns >= 1
    assert len(tokens) == 4 and (tokens["n_kernels"] == len(launches)).all()
    assert (tokens["total_us"] <= tokens["us"] + 1e-6).all()
    assert (tokens["beside_us"] <= tokens["total_us"]).all()
    assert [len(branches) for branches in own] == [3, 3], "Q, K and V in each of two layers"
    wanted = [
        (region, b.stream.id, b.launches[0].node.name, len(b.launches))
        for region, branches in enumerate(own)
        for b in branches
    ]
    rows = found.by_branch
    shown = rows[["region", "stream", "first", "n"]].itertuples(index=False)
    assert [tuple(row) for row in shown] == wanted
    assert (rows["us"] > 0).all() and rows["resolved"].all()
    assert found.traced is not None and found.traced.collector == "events"
    assert found.traced.us > 0 and found.traced.slowdown > 0 and 0 <= found.traced.overlap <= 1
    with loaded.variant(settings(way, "1")) as used:
        alone = measure_overlap(used, 3, collector=None)
    assert alone.tokens["overlap"].tolist() == [0.0] * 3 and alone.branches.empty
    record = json.loads(json.dumps(found.record()))
    assert len(record["overlaps"]) == record["n_tokens"] == 4


@pytest.fixture
def slow_products(monkeypatch) -> Iterator[None]:
    """Every part of a product leaves its core to others for PRODUCT_NS before it computes."""
    plain, slow = op_table.kernel_address, {}

    def slowed(kernel: int) -> Any:
        @cfunc(KERNEL)
        def later(args, part, n_parts):
            end = signals.now_ns() + PRODUCT_NS
            while signals.now_ns() < end:
                sched_yield()
            call_kernel(kernel, args, part, n_parts)

        return later

    def address(variant: tuple[str, ...], layout: str = "file") -> int:
        found = plain(variant, layout)
        if variant[0] != "mul_mat":
            return found
        if found not in slow:
            slow[found] = slowed(found)
        return slow[found].address

    monkeypatch.setattr(op_table, "kernel_address", address)
    yield
    assert slow, "no product was made slow"


@pytest.mark.parametrize("way", WAYS)
def test_branches_that_take_their_time_are_seen_side_by_side(loaded, slow_products, way):
    """Q, K and V take so long that other work of this machine cannot keep them apart."""
    with loaded.variant(settings(way, "3")) as used, kernel_spans(used) as found:
        for token in TOKENS:
            used.step([token])
    every = [in_flight((s.start_ns, s.end_ns) for s in spans) for spans in found.steps]
    assert min(one.overlap for one in every) > 0.05
    assert all(0 <= one.beside_ns <= one.total_ns for one in every)


def test_an_error_in_the_body_ends_the_looking(loaded):
    with pytest.raises(RuntimeError, match="of the caller"), kernel_spans(loaded):
        loaded.step([1])
        raise RuntimeError("of the caller")
    assert loaded.recorder is None
    loaded.reset()


def test_what_cannot_be_measured_is_refused_in_a_line(loaded, tiny_model):
    ahead: Any = KEPT | STEP | {"launch_ahead": "on"}
    refusal = pytest.raises(UsageError, match="launch_ahead=on queues the next")
    with loaded.variant(wb.Toggles(**ahead)) as used, refusal as refused:
        measure_overlap(used, 2)
    assert "\n" not in str(refused.value)
    with (
        wb.Engine.load(
            tiny_model("tiny-llama", "Q8_0"), device="host", n_ctx=64, toggles=wb.Toggles()
        ) as host,
        pytest.raises(UsageError, match="the host device has no kernels of its own"),
    ):
        measure_overlap(host, 2)
