"""Twins of CUDA graphs on a faked driver: other executable forms of one captured graph. Each is
what a capture anew would be. The captured graph stays as it is, and goes with its last form."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import examples
from tests.unit.fake_cuda import fake_backend
from tests.unit.fake_graphs import Result
from tests.unit.test_cuda_graphs import (
    COMPUTE,
    COPIES,
    FAR,
    Rig,
    distinct,
    launch,
    norm,
    product,
    step,
    work_of,
)
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.issue.bind import _where_it_lands
from workbench.backend.issue.issued import Issued, Plannable, changed
from workbench.backend.issue.landing import N_BLOCKS, Landing, landing_in
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make


@pytest.fixture
def rig(monkeypatch) -> Rig:
    backend, _ = fake_backend(monkeypatch)
    return Rig(backend, backend._driver.api)


def result(rig: Rig, landing: Landing, direct: bool) -> Issued:
    """What leaves results where they land: a copy, or a launch that writes there itself."""
    if not direct:
        return _where_it_lands(landing, [
            rig.backend.copy(block.address, 5 * FAR, 64, COMPUTE, to_host=True)
            for block in landing.blocks
        ])  # fmt: skip
    x = Tensor("x", F32, (1, 256))
    node = make("rms_norm", "n", x, eps=1e-5)
    return _where_it_lands(landing, [
        rig.backend.launch(
            node, lambda t, b=block: 5 * FAR if t is x else b.address, 0, COMPUTE
        )
        for block in landing.blocks
    ])  # fmt: skip


def landed(rig: Rig, landing: Landing, direct: bool = False, first: int = FAR) -> Plannable:
    """A plan's work with a product of cuBLAS, a copy aside and several kernels in one part."""
    event = rig.backend.event()
    parts = [
        (COMPUTE, rig.backend.copy(first, 9 * FAR, 64, COMPUTE, to_host=False)),
        (COPIES, rig.backend.copy(3 * FAR, 9 * FAR, 64, COPIES, to_host=False)),
        (COPIES, rig.backend.record(event, COPIES)),
        (COMPUTE, launch(rig, norm(), first)),
        (COMPUTE, rig.backend.wait(event, COMPUTE)),
        (COMPUTE, launch(rig, product(), first)),
        (COMPUTE, launch(rig, norm(), first, early=True)),
        (COMPUTE, result(rig, landing, direct)),
    ]
    work = work_of(rig.backend, parts)
    work.landings = (landing,)
    return work


def parameters(graph: CudaGraph) -> list[Any]:
    """What the captured graph's nodes have."""
    assert graph.template is not None
    return [node.call for node in graph.template.graph.nodes]


def forms(rig: Rig) -> int:
    """Graphs and executable forms that the driver has."""
    return len(rig.api.alive)


@pytest.mark.parametrize("direct", [False, True])
def test_a_twin_for_each_landing_is_a_capture_anew(rig, direct):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing, direct)
    graph, first = rig.backend.capture(work), work.identity
    captured, made = parameters(graph), {}
    for block in range(1, N_BLOCKS):
        with landing_in([landing], [block]):
            moved = changed(first, work.identity)
            assert moved == [len(work.parts) - 1]
            begun = list(rig.api.calls)
            twin = graph.twin(work, moved)
            assert twin is not None and twin.nodes == graph.nodes
            assert rig.api.calls[len(begun) :] == [
                "cuGraphInstantiate",
                "cuGraphExecKernelNodeSetParams" if direct else "cuGraphExecMemcpyNodeSetParams",
                "cuGraphUpload",
            ]
            fresh = rig.backend.capture(work)
            assert rig.launched(twin) == rig.launched(fresh)
            assert distinct(rig.launched(twin)) == rig.issued(work)
            assert twin.instantiate_ns > 0 == twin.capture_ns and twin.edges() == fresh.edges()
            made[block] = twin
    assert parameters(graph) == captured
    launches = [rig.launched(form) for form in (graph, *made.values())]
    assert all(a != b for a, b in itertools.combinations(launches, 2))
    assert distinct(launches[0]) == rig.issued(work)


@settings(max_examples=examples(100))
@given(data=st.data())
def test_whatever_came_before_a_twin_is_a_capture_anew(data):
    """Patches, updates of single nodes and of everything, twins of twins, and ends in any order."""
    with pytest.MonkeyPatch.context() as patch:
        backend, _ = fake_backend(patch)
        rig = Rig(backend, backend._driver.api)
        landing = Landing(backend, 64)
        work = landed(rig, landing, data.draw(st.booleans()))
        has = {0: (backend.capture(work), work.identity)}  # what each graph has recorded
        numbers, copies = itertools.count(1), [0, 1, len(work.parts) - 1]
        for _ in range(data.draw(st.integers(1, 10))):
            landing.now = data.draw(st.integers(0, N_BLOCKS - 1))
            verb = data.draw(st.sampled_from(["twin", "twin", "patch", "update", "all", "end"]))
            key = data.draw(st.sampled_from(sorted(has)))
            graph, recorded = has[key]
            moved = changed(recorded, work.identity)
            assert moved is not None
            if verb == "twin":
                captured = parameters(graph)
                twin = graph.twin(work, moved)
                if twin is None:  # a product has no node of its own, or everything was updated
                    assert graph.recaptured or set(moved) - {*copies, 3, 6}
                else:
                    has[next(numbers)] = twin, work.identity
                    assert parameters(twin) == captured
            elif verb == "patch":
                part = work.parts[data.draw(st.sampled_from([0, 3, 6]))]
                leaf = part.parts[0] if part.parts else part
                leaf.block[leaf.block.pointers[0]] = FAR * data.draw(st.integers(1, 8))
            elif verb == "end" and len(has) > 1:
                graph.destroy()
                del has[key]
            elif verb in ("update", "all"):
                assert graph.update(work, moved if verb == "update" else None)
                has[key] = graph, work.identity
            for form, what in has.values():
                if what == work.identity:
                    assert distinct(rig.launched(form)) == rig.issued(work)
        for form, _ in data.draw(st.permutations(list(has.values()))):
            assert not rig.nothing_left()
            form.destroy()
        assert rig.nothing_left()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_template_goes_with_its_last_form_in_any_order(rig, order):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing)
    made: list[Any] = [rig.backend.capture(work)]
    for block in (1, 2):
        landing.now = block
        made.append(made[-1].twin(work, [7]))
    assert forms(rig) == 4  # and the template
    for n, which in enumerate(order):
        if which == 1:
            made[which].destroy()
            made[which].destroy()
        made[which] = None  # goes at once: there is no cycle
        assert forms(rig) == (3 - n - 1) + (n < 2)
    assert rig.nothing_left() and not rig.backend._graphs


def test_a_closed_backend_has_given_back_every_twin(rig):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing)
    graph = rig.backend.capture(work)
    landing.now = 1
    twin = graph.twin(work, [7])
    assert twin is not None
    rig.backend.close()
    assert rig.nothing_left()
    for made in (graph, twin):
        made.destroy()
        for refused in (made.launch, made.edges, lambda made=made: made.twin(work, [7])):
            with pytest.raises(DeviceError, match="plan of 8 commands was destroyed"):
                refused()


def test_a_hundred_cycles_of_twins_leave_nothing(rig):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing)
    for i in range(100):
        landing.now = 0
        graph = rig.backend.capture(work)
        landing.now = 1 + i % 2
        twin = graph.twin(work, [7])
        assert twin is not None
        (graph if i % 3 else twin).destroy()
        if i % 5:
            (twin if i % 3 else graph).launch()
            (twin if i % 3 else graph).destroy()
    del graph, twin
    gc.collect()
    assert rig.nothing_left() and not rig.backend._graphs


@pytest.mark.parametrize(
    "function", ["cuGraphInstantiate", "cuGraphUpload", "cuGraphExecKernelNodeSetParams"]
)
def test_a_twin_that_the_driver_refuses_is_told_and_leaves_nothing(rig, function):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing, direct=True)
    graph = rig.backend.capture(work)
    before = rig.launched(graph)
    landing.now, n = 1, forms(rig)
    rig.api.refuse[function] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=f"{function} failed at plan of 8 commands") as told:
        graph.twin(work, [7])
    assert "\n" not in str(told.value) and forms(rig) == n
    rig.api.refuse.clear()
    assert rig.launched(graph) == before
    twin = graph.twin(work, [7])
    assert twin is not None and distinct(rig.launched(twin)) == rig.issued(work)


def test_memory_of_another_kind_has_no_twin(rig):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing)
    graph, n = rig.backend.capture(work), forms(rig)
    landing.now = 1
    rig.api.refuse["cuGraphExecMemcpyNodeSetParams"] = Result.CUDA_ERROR_INVALID_VALUE
    assert graph.twin(work, [7]) is None and forms(rig) == n


def test_parts_that_are_no_single_nodes_have_no_twin(rig):
    """Products of cuBLAS, and what orders streams."""
    before, now = step(rig), step(rig, 5 * FAR)
    graph, n = rig.backend.capture(before), forms(rig)
    for part in (4, 1, 3):
        assert graph.twin(now, [part]) is None
    assert graph.twin(work_of(rig.backend, [(COPIES, now.parts[0])], COPIES), []) is None
    assert forms(rig) == n


def test_an_updated_twin_and_its_template_keep_to_themselves(rig):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing)
    graph = rig.backend.capture(work)
    first = rig.launched(graph)
    landing.now = 1
    twin = graph.twin(work, [7])
    assert twin is not None
    other = landed(rig, landing, first=2 * FAR)
    moved = changed(work.identity, other.identity)
    assert moved and twin.update(other, moved) and twin.recaptured == 1
    assert distinct(rig.launched(twin)) == rig.issued(other)
    assert twin.twin(work, [7]) is None, "nobody knows what it would begin with"
    assert rig.launched(graph) == first
    graph.destroy()
    assert twin.update(work, moved) and distinct(rig.launched(twin)) == rig.issued(work)
