"""Twins of CUDA graphs: other executable forms of one captured graph give the bits that eager issue
gives, the captured graph stays as it was, and everything goes without a trace."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.contract.test_contract_logits import engine, tokens_for  # noqa: F401 - a fixture
from tests.gates import hold
from tests.gpu.test_cuda_plans import FUSED, SCOPES, Line, _free, captured_of, line, moved  # noqa: F401
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.program.commands import COMPUTE_STREAM

pytestmark = pytest.mark.gpu


# graphs -------------------------------------------------------------------------------------------


def test_a_twin_goes_to_its_own_addresses_and_the_template_stays(backend, line):  # noqa: F811
    """A kernel and a copy have moved. Twins are made while the device is held, as in a step."""
    here, there = line.work(taken=2), line.work(taken=3, b=2)
    graph = backend.capture(here)
    assert len(moved(here, there)) == 2
    with hold(backend, COMPUTE_STREAM):
        graph.launch()
        twin = graph.twin(there, moved(here, there))
        assert twin is not None and twin.nodes == graph.nodes and twin.edges() == graph.edges()
        twin.launch()
    assert line.take(2) == line.take(3) == 11.0
    for value in (20.0, 30.0):
        line.arrays[0][:] = value
        graph.launch()
        assert line.take(2) == value + 1 and line.take(3) == -1.0
        twin.launch()
        assert line.take(3) == value + 1 and line.take(2) == -1.0
    assert twin.instantiate_ns > 0 == twin.capture_ns
    as_captured = graph.twin(here, [])
    back = twin.twin(here, moved(here, there))
    assert as_captured is not None and back is not None
    for made in (as_captured, back):
        made.launch()
        assert line.take(2) == 31.0 and line.take(3) == -1.0
        made.destroy()
    graph.destroy()
    twin.destroy()


def test_an_update_of_a_twin_is_its_own(backend, line):  # noqa: F811
    here, there, other = line.work(taken=2), line.work(taken=3), line.work(given=1, taken=3)
    graph = backend.capture(here)
    twin = graph.twin(there, moved(here, there))
    assert twin is not None
    assert twin.update(other, moved(there, other)) and (twin.nodes_set, twin.recaptured) == (1, 0)
    twin.launch()
    assert line.take(3) == 21.0
    graph.launch()
    assert line.take(2) == 11.0
    of_it = twin.twin(there, moved(there, other))  # begins with what was captured
    assert of_it is not None
    of_it.launch()
    assert line.take(3) == 11.0
    assert twin.update(there, None) and twin.recaptured == 1
    assert twin.twin(there, []) is None, "nobody knows what it would begin with"
    twin.launch()
    assert line.take(3) == 11.0
    for made in (graph, twin, of_it):
        made.destroy()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_twins_and_their_plan_are_destroyed_in_any_order(backend, line, order):  # noqa: F811
    """While their launches are queued, which run."""
    works = [line.work(taken=taken) for taken in (2, 3, 1)]
    made: list[CudaGraph] = [backend.capture(works[0])]
    for before, work in pairwise(works):
        twin = made[-1].twin(work, moved(before, work))
        assert twin is not None
        made.append(twin)
    with hold(backend, COMPUTE_STREAM):
        for graph in made:
            graph.launch()
        for which in order:
            made[which].destroy()
            with pytest.raises(DeviceError, match="was destroyed and cannot have a twin"):
                made[which].twin(works[0], [])
    assert [line.take(taken) for taken in (2, 3, 1)] == [11.0] * 3


def test_teardown_of_twins_in_any_order():
    """Backends of their own: a plan or its twin before, the rest after or never."""
    for first in (0, 1, None):
        own = CudaBackend()
        rig = Line(own)
        works = rig.work(taken=2), rig.work(taken=3)
        graph = own.capture(works[0])
        twin = graph.twin(works[1], moved(*works))
        assert twin is not None
        made = [graph, twin]
        for one in made:
            one.launch()
        if first is not None:
            made[first].destroy()
        own.close()
        for one in made:
            one.destroy()
            with pytest.raises(DeviceError, match="destroyed"):
                one.launch()


@pytest.mark.alone
def test_a_hundred_twins_leak_nothing(backend, line):  # noqa: F811
    works = line.work(taken=2), line.work(taken=3, b=2)

    def cycle(i: int) -> None:
        graph = backend.capture(works[0])
        twin = graph.twin(works[1], moved(*works))
        assert twin is not None
        twin.launch()
        graph.launch()
        (graph if i % 2 else twin).destroy()
        (twin if i % 2 else graph).launch()
        if i % 3:
            (twin if i % 2 else graph).destroy()

    for i in range(20):
        cycle(i)
    backend.synchronize()
    gc.collect()
    before = _free(backend)
    for i in range(100):
        cycle(i)
    backend.synchronize()
    gc.collect()
    assert _free(backend) >= before - (2 << 20)
    assert not [g for g in backend._graphs if g._executable is not None]


# engines ------------------------------------------------------------------------------------------


def decoded(used: wb.Engine, tokens: Sequence[int]) -> np.ndarray:
    """Logits of single tokens, by a caller who keeps the last: three blocks take turns."""
    rows, last = [], None
    for token in tokens:
        last = used.step([token])
        rows.append(last.copy())
    assert last is not None
    return np.concatenate(rows)


def captures_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin: every block where results land is captured."""
    monkeypatch.setattr(CudaGraph, "twin", lambda self, work, changed: None)


AHEAD: dict[str, str] = {
    "plan_scope": "step", "sync": "packed_implicit", "copy_stream": "compute", "launch_ahead": "on",
}  # fmt: skip


@pytest.mark.parametrize("results", ["copy", "direct"])
@pytest.mark.parametrize(
    "scope", [*SCOPES[1:], AHEAD, AHEAD | {"plan_end": "word"}],
    ids=["step", "forked", "ahead", "word"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("preset", "quant", "more"),
    [
        ("tiny-llama", "Q4_0", {}), ("tiny-qwen3", "F16", {}),
        ("tiny-qwen3", "Q4_K", {**FUSED, "pdl": "on"}),
    ],
)  # fmt: skip
def test_twins_give_the_eager_bits_and_those_of_captures(
    engine, backend, monkeypatch, preset, quant, more, scope, results,  # noqa: F811
):  # fmt: skip
    if "pdl" in more and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")
    tokens = tokens_for(preset, 40)
    shared = engine(preset, quant, "cuda")
    base = Toggles(graph_reuse="set_rows", results=results, **more)
    with shared.variant(base) as eager:
        wanted = decoded(eager, tokens)
    planned = replace(base, plans="ours", **scope)
    with shared.variant(planned) as used:
        assert np.array_equal(decoded(used, tokens), wanted)
        counters = used.counters
        assert (counters["plans_captured"], counters["plans_twinned"]) == (1, 2), counters
        assert counters["plans_replayed"] == len(tokens) and not counters["plans_updated"]
        graphs = captured_of(used)
        assert len({id(g.template) for g in graphs}) == 1 and len(graphs) == 3
        assert len({g.edges() for g in graphs}) == 1
    captures_anew(monkeypatch)
    with shared.variant(planned) as slow:
        assert np.array_equal(decoded(slow, tokens), wanted)
        counters = slow.counters
        assert (counters["plans_captured"], counters["plans_twinned"]) == (3, 0), counters


@pytest.mark.parametrize("results", ["copy", "direct"])
def test_twins_of_work_whose_stores_move_are_updated(engine, results):  # noqa: F811
    tokens = tokens_for("tiny-llama", 40)
    shared = engine("tiny-llama", "Q4_0", "cuda")
    with shared.variant(Toggles(graph_reuse="set_rows", results=results)) as eager:
        wanted = decoded(eager, tokens)
    for scope in SCOPES[1:]:
        toggles = Toggles(graph_reuse="patch_pointers", plans="ours", results=results, **scope)
        with shared.variant(toggles) as used:
            assert np.array_equal(decoded(used, tokens), wanted), scope
            counters, graphs = used.counters, captured_of(used)
        assert (counters["plans_captured"], counters["plans_twinned"]) == (1, 2), counters
        assert counters["plans_updated"] == len(tokens) - 1 == sum(g.nodes_set for g in graphs)
        assert not sum(g.recaptured for g in graphs)


@pytest.mark.alone
def test_fresh_engines_with_twins_give_everything_back(engine):  # noqa: F811
    shared = engine("tiny-llama", "Q4_0", "cuda")
    toggles = Toggles(graph_reuse="set_rows", plans="ours", **SCOPES[1])
    device: Any = shared._loaded.backends[1]  # type: ignore[union-attr]
    free: list[int] = []
    for i in range(100):
        with shared.variant(toggles) as used:
            decoded(used, [1, 2, 3, 4])
            assert used.counters["plans_twinned"] == 2
            if i % 2:
                used.issuer.plans.clear()
                used.step([5])
        if i % 10 == 9:
            gc.collect()
            free.append(_free(device))
            assert not [g for g in device._graphs if g._executable is not None]
    assert free[-1] >= free[0] - (4 << 20), free
