"""Branches on the GPU: streams side by side give the bits of one stream, in forked CUDA graphs, too
(#16991)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.contract.test_branches import FUSED, KEPT, SETTINGS, STEP, serial
from tests.contract.test_contract_logits import one_by_one, tokens_for
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued
from workbench.program.check.hazards import check_cycle
from workbench.program.commands import Space, compute_stream

pytestmark = pytest.mark.gpu

SPIN_US = 2000.0
MORE: dict[str, dict[str, str]] = {
    "dependent launch": {"streams": "3", "pdl": "on"},
    "dependent launch in a plan": {"streams": "3", "pdl": "on"} | STEP,
    "any, dependent launch in a plan": {"streams": "8", "fork": "any", "pdl": "on"} | STEP,
    "one plan, launched ahead, dependent launch": (
        SETTINGS["launched ahead"] | {"pdl": "on", "defer_norm": "on"}
    ),
}


@pytest.fixture(
    scope="module", params=[("tiny-llama", "Q8_0"), ("tiny-qwen3", "Q4_K")], ids="-".join
)
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    path = tiny_model(*request.param)
    with wb.Engine.load(path, device="cuda", n_ctx=512, toggles=wb.Toggles()) as made:
        yield made


def captured_of(used: wb.Engine) -> list[CudaGraph]:
    plans: Any = used.issuer.plans
    return [plan.captured for plan in plans if plan.captured is not None]


@pytest.mark.parametrize("fusion", [{}, FUSED], ids=["apart", "fused inside"])
@pytest.mark.parametrize("name", [*SETTINGS, *MORE])
def test_logits_are_those_of_one_stream_to_the_bit(engine, name, fusion):
    settings = (SETTINGS | MORE)[name] | fusion
    if "set_rows" not in (KEPT | settings)["graph_reuse"] and fusion:
        pytest.skip("copies as cache stores are not joined with RoPE")
    tokens = tokens_for("tiny-llama", 60)
    found = []
    for toggles in (serial(settings), settings):
        with engine.variant(wb.Toggles(**KEPT | toggles)) as one:
            rows = [one.prefill(tokens[:20], outputs="all"), one.step(tokens[20:24], "all")]
            found.append(np.concatenate([*rows, one_by_one(one, list(tokens[24:]))]))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("name", [*SETTINGS, *MORE])
def test_programs_with_branches_race_in_nothing(engine, name):
    with engine.variant(wb.Toggles(**KEPT | (SETTINGS | MORE)[name])) as one:
        assert check_cycle(one.cycle(9, 2), declared=engine.backend.begins_early).safe


def test_a_captured_step_has_the_edges_of_its_branches(engine):
    tokens, made = tokens_for("tiny-llama", 8), dict[str, tuple[int, int, int]]()
    for streams in ("1", "3"):
        toggles = wb.Toggles(**KEPT | STEP | {"streams": streams, "pdl": "on"})
        with engine.variant(toggles) as one:
            one_by_one(one, list(tokens))
            # a graph for each block that results land in, all alike
            (made[streams],) = {(len(g.nodes), *g.edges()) for g in captured_of(one)}
            n_layer = one.model.n_layer
    one, three = made["1"], made["3"]
    assert three[0] == one[0] and one[1] == one[0] - 1
    # Two branches more in each layer: an edge of each to the join. Behind the first layer each also
    # follows what its stream had there.
    assert three[1] == one[1] + 2 * n_layer + 2 * (n_layer - 1)
    assert 0 < three[2] < one[2]  # a launch behind a wait is not programmatic


# streams themselves ------------------------------------------------------------------------------


def spin(backend: CudaBackend, us: float, stream: int) -> Issued:
    """A kernel of one thread that takes its time."""
    flag = spin_flag(backend)
    kernel = Kernel("device", "gate", (1, 1), 1, [flag, int(us * 1000)])
    return backend._prepare(kernel, backend._stream(stream), "spin")


_FLAGS: dict[int, Any] = {}


def spin_flag(backend: CudaBackend) -> int:
    if id(backend) not in _FLAGS:
        _FLAGS[id(backend)] = backend.allocate(4, Space.PINNED)
    return int(_FLAGS[id(backend)].address)


def timed(backend: CudaBackend, call: Any) -> float:
    best = float("inf")
    for _ in range(5):
        backend.synchronize()
        begin = time.perf_counter()
        call()
        backend.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 1e6 * best


def forked(backend: CudaBackend, streams: Sequence[int]) -> Any:
    """A work of one spin on each stream: all behind the first stream's begin, joined at its end."""
    parts = [spin(backend, SPIN_US, stream) for stream in streams]
    return plannable(backend, parts, 0, list(streams))


@pytest.mark.alone  # processes beside it would have their slices of the GPU's time
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in a graph"])
def test_branches_run_side_by_side(backend: CudaBackend, captured: bool):
    streams = [compute_stream(k) for k in range(8)]
    work, alone = forked(backend, streams), forked(backend, [0] * 8)
    if captured:
        graphs = [backend.capture(one) for one in (work, alone)]
        calls = [graph.launch for graph in graphs]
    else:
        calls = [work, alone]
    side_by_side, serial_us = (timed(backend, call) for call in calls)
    assert serial_us > 8 * SPIN_US * 0.95
    assert side_by_side < 2 * SPIN_US
    if captured:
        assert [graph.edges()[0] for graph in graphs] == [0, 7]
        for graph in graphs:
            graph.destroy()


def test_forked_graphs_go_without_a_trace(backend: CudaBackend):
    work = forked(backend, [0, 2, 3, 4])
    backend.capture(work).destroy()
    free = backend._driver.cupy.cuda.runtime.memGetInfo()[0]
    for i in range(100):
        graph = backend.capture(forked(backend, [0, 2, 3, 4]) if i % 10 == 0 else work)
        if i % 25 == 0:
            graph.launch()
        graph.destroy()
    backend.synchronize()
    assert backend._driver.cupy.cuda.runtime.memGetInfo()[0] >= free - (64 << 20)
