"""Plans of the cuda backend on a faked driver: what a capture asks for, what a failure leaves
behind, which nodes updates and twins set, and who gives a graph back."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.cuda.fake_graphs import Result
from tests.backend.cuda.rig import (
    COMPUTE,
    COPIES,
    FAR,
    KERNELS_AND_COPIES,
    THIRD,
    Rig,
    norm,
)
from tests.profiles import examples
from workbench.backend.base import NO_PART
from workbench.backend.cuda.device import driver
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.issue.bind import _where_it_lands
from workbench.backend.issue.issued import Issued, changed
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.common.errors import DeviceError

LAST = 6  # the part of a step that leaves results


@pytest.fixture
def rig(monkeypatch) -> Rig:
    return Rig.of(monkeypatch)


# capture ------------------------------------------------------------------------------------------


def test_a_replay_queues_what_the_parts_do(rig):
    """A kernel is a node of its part, a conversion and its product are three. A copy on another
    stream begins with the plan, and orders only what waits for it."""
    work = rig.step()
    graph = rig.backend.capture(work)
    assert {c.function for c in rig.api.log} == {"cublasGemmEx"}, "nothing runs"
    assert rig.replays(graph, work) and rig.replays(graph, work)
    assert graph.capture_ns > 0 and graph.instantiate_ns > 0
    assert graph.nodes == (0, 2, 4, 4, 4, 5, 6)
    copy, first, converts, *_ = graph.template.graph.nodes
    assert copy.behind == first.behind == () and set(converts.behind) == {copy, first}


def test_streams_that_nobody_waits_for_are_joined(rig):
    for stream in (COMPUTE, THIRD):
        parts = [(s, rig.launch(norm(), FAR, s)) for s in (COPIES, COMPUTE, COPIES, THIRD)]
        work = rig.work_of(parts, stream)
        graph = rig.backend.capture(work)
        assert graph.nodes == (0, 1, 2, 3)
        assert sorted(rig.launched(graph)) == sorted(rig.issued(work))
    assert not rig.api.captures


def test_a_product_has_run_before_its_first_capture(rig):
    """Into other memory; its own argument block is as before."""
    work = rig.step()
    before = work.addresses
    rig.backend.capture(work)
    (loaded,) = rig.api.log
    assert loaded.function == "cublasGemmEx" and work.addresses == before
    expected = next(c for c in rig.issued(work) if c.function == "cublasGemmEx")
    assert [a == b for a, b in zip(loaded.args, expected.args, strict=True)].count(False) == 1
    rig.api.log.clear()
    rig.backend.capture(rig.step(3 * FAR))
    assert not rig.api.log, "its shape is known"


def test_a_capture_keeps_the_collector_and_frees_away(rig):
    """To free pinned memory is to wait for the device, and that would end the capture."""
    done: list[Any] = []
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError, deviceSynchronize=lambda: done.append("wait"),
        freeHost=lambda address: done.append("free"),
    )  # fmt: skip
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    thread = threading.Thread(target=driver._free_pinned, args=(cupy, nullcontext(), 0))

    def meanwhile() -> None:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not done and not gc.isenabled()

    rig.backend.capture(rig.work_of([(COMPUTE, Issued(meanwhile, ("look",)))]))
    thread.join()
    assert done == ["wait", "free"] and gc.isenabled()


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_gate_and_an_end_are_nodes_of_the_plan(rig, programmatic):
    """The gate in place of the copy; the end behind the last command, and of none. An update and a
    twin keep both."""
    first = rig.backend.copy(FAR, 2 * FAR, 256, COMPUTE, to_host=False)
    work = rig.work_of([(COMPUTE, first), (COMPUTE, rig.launch(norm(), 3 * FAR))])
    assert rig.backend.capture(work).nodes == (0, 1)
    work.gate = rig.backend.gate_copy(*first.addresses, 256, 4096, 500, COMPUTE)
    assert list(work.gate.block) == [FAR, 2 * FAR, 256, 4096, 500]
    assert work.gate.addresses == first.addresses and work.recorded[0] is work.gate
    work.end = rig.backend.gate_end(5 * FAR, 6 * FAR, COMPUTE, programmatic)
    graph = rig.backend.capture(work)
    assert graph.nodes == (0, 1, NO_PART)
    first.block[0] = work.gate.block[0] = 8 * FAR
    twin = graph.twin(work, [0])
    assert twin is not None and graph.update(work, [0]) and graph.nodes_set == 1
    for made in (graph, twin):
        gate, _, end = rig.launched(made)
        assert gate.function == "cuLaunchKernel" and 8 * FAR in gate.args
        assert end.function == ("cuLaunchKernelEx" if programmatic else "cuLaunchKernel")
        assert {5 * FAR, 6 * FAR} <= set(end.args)
        made.destroy()


# failures -----------------------------------------------------------------------------------------


def fails() -> None:
    raise DeviceError("told to")


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("part", "told"), [
    (fails, "its command {} cannot be captured.*told to"), (interrupted, ""),
    ("wait of the host", "STREAM_CAPTURE_UNSUPPORTED"),
])  # fmt: skip
def test_a_failing_part_ends_the_capture_on_all_streams(rig, part, told):
    work = rig.step()
    call: Any = part if callable(part) else rig.backend.sync_stream(COPIES)
    for at in (1, 3, 7):
        parts = list(zip(work.streams, work.parts, strict=True))
        parts.insert(at, (COPIES, Issued(call, ("bad",))))
        kind = DeviceError if told else KeyboardInterrupt
        with pytest.raises(kind, match=told.format(at) or None) as error:
            rig.backend.capture(rig.work_of(parts))
        assert "\n" not in str(error.value) and rig.nothing_left() and gc.isenabled()
    assert rig.replays(rig.backend.capture(work), work)


@pytest.mark.parametrize(
    "function",
    ["cuStreamBeginCapture", "cuStreamGetCaptureInfo", "cuStreamEndCapture", "cuGraphInstantiate",
     "cuGraphUpload", "cuMemcpyHtoDAsync", "cuLaunchKernelEx"],
)  # fmt: skip
def test_what_the_driver_refuses_is_told(rig, function: str):
    work = rig.step()
    rig.api.refuse[function] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=f"{function}.*OUT_OF_MEMORY") as told:
        rig.backend.capture(work)
    assert "\n" not in str(told.value) and rig.nothing_left()
    rig.api.refuse.clear()
    assert rig.replays(rig.backend.capture(work), work)


# update -------------------------------------------------------------------------------------------


def test_only_nodes_of_changed_parts_are_set(rig):
    """The work itself is patched, as by reuse: an update reads its blocks."""
    copy = rig.backend.copy(FAR, 9 * FAR, 64, COMPUTE, to_host=False)
    norms = [(COMPUTE, rig.launch(norm(), FAR)) for _ in range(2)]
    work = rig.work_of([*norms, (COMPUTE, copy)])
    graph = rig.backend.capture(work)
    before = rig.launched(graph)
    for value in (5 * FAR, 6 * FAR):
        for part in (0, 2):
            block = work.parts[part].block
            block[block.pointers[0]] = value
        assert not rig.replays(graph, work)
        rig.api.calls.clear()
        assert graph.update(work, [0, 2])
        assert rig.api.calls == ["cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"]
        assert rig.replays(graph, work) and rig.launched(graph) != before
    assert (graph.nodes_set, graph.recaptured) == (2, 0)
    twin = graph.twin(work, [])
    assert twin is not None and rig.replays(twin, work), "it has what updates moved"


@pytest.mark.parametrize("how", ["a product, records and waits", "another kind of memory"])
def test_what_no_node_sets_is_captured_anew(rig, how):
    """And a twin of such parts is none."""
    graph, now = rig.backend.capture(rig.step()), rig.step(5 * FAR)
    parts = [1, 3, 4] if how.startswith("a product") else KERNELS_AND_COPIES
    if how.startswith("another"):
        rig.api.refuse["cuGraphExecMemcpyNodeSetParams"] = Result.CUDA_ERROR_INVALID_VALUE
    n = len(rig.api.alive)
    assert graph.twin(now, parts) is None and len(rig.api.alive) == n
    assert graph.update(now, parts) and rig.replays(graph, now)
    assert (graph.nodes_set, graph.recaptured) == (0, 1)
    rig.api.refuse.clear()  # its handles are still the first capture's
    assert graph.update(rig.step(7 * FAR), KERNELS_AND_COPIES)
    assert (graph.nodes_set, graph.recaptured) == (1, 1)


def test_other_work_of_one_topology_is_taken_over(rig):
    before, now = rig.step(), rig.step(cols=512)
    graph = rig.backend.capture(before)
    n = len(rig.api.alive)
    assert before.key != now.key and graph.update(now, None) and rig.replays(graph, now)
    assert len(rig.api.alive) == n, "the second capture is gone"
    # its nodes are no longer those of the graph that is kept: captured anew, though it could be set
    moved = rig.step(5 * FAR, cols=512)
    assert graph.update(moved, [0, 2]) and rig.replays(graph, moved)
    assert (graph.nodes_set, graph.recaptured) == (0, 2)
    assert graph.update(rig.step(), None) and graph.update(rig.step(5 * FAR), [0, 2])
    assert (graph.nodes_set, graph.recaptured) == (1, 3), "back at the first"
    first = rig.work_of([(COMPUTE, rig.launch(norm(), FAR))])
    aside = rig.work_of([(THIRD, rig.launch(norm(), 5 * FAR, THIRD))])
    elsewhere = rig.work_of([(COPIES, rig.launch(norm(), FAR, COPIES))], COPIES)
    graph = rig.backend.capture(first)
    assert graph.update(aside, None) and rig.replays(graph, aside)
    assert not graph.update(elsewhere, None) and not graph.update(elsewhere, [0])
    assert graph.twin(elsewhere, []) is None and rig.replays(graph, aside)


def test_another_topology_is_refused_without_a_change(rig):
    work = rig.step()
    graph = rig.backend.capture(work)
    more = rig.work_of([*zip(work.streams, work.parts, strict=True),
                        (COMPUTE, rig.launch(norm(), FAR))])  # fmt: skip
    assert not graph.update(more, None) and rig.replays(graph, work)
    assert graph.update(rig.step(5 * FAR), [0, 2]), "and it can be updated as ever"
    assert (graph.nodes_set, graph.recaptured) == (1, 0)


def test_a_node_of_another_kernel_is_never_set(rig):
    """Should the driver list nodes in another order: the graph is captured anew."""
    graph = rig.backend.capture(rig.step())
    nodes = graph.template.graph.nodes
    nodes[1], nodes[2] = nodes[2], nodes[1]
    assert graph.update(rig.step(5 * FAR), [2])
    assert (graph.nodes_set, graph.recaptured) == (0, 1)


def test_other_failures_are_raised_and_change_nothing(rig):
    work = rig.step()
    graph, n = rig.backend.capture(work), len(rig.api.alive)
    ways: list[tuple[str, Callable[..., Any], Any]] = [
        ("cuGraphExecUpdate", graph.update, None), ("cuStreamBeginCapture", graph.update, None),
        ("cuGraphExecKernelNodeSetParams", graph.update, [2]),
        ("cuGraphInstantiate", graph.twin, [2]), ("cuGraphUpload", graph.twin, [2]),
        ("cuGraphExecKernelNodeSetParams", graph.twin, [2]),
    ]  # fmt: skip
    for function, act, parts in ways:
        rig.api.refuse[function] = Result.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(DeviceError, match=f"{function} failed at plan of 7 commands") as told:
            act(rig.step(5 * FAR), parts)
        assert "\n" not in str(told.value) and len(rig.api.alive) == n
        rig.api.refuse.clear()
    assert graph.update(work, None) and rig.replays(graph, work)


# twins --------------------------------------------------------------------------------------------


def landed(rig: Rig, landing: Landing, direct: bool = False) -> Any:
    """A step whose results land: by a copy, or by a launch that writes there itself."""
    made = [
        rig.backend.launch(norm(), lambda t, b=block: 5 * FAR if t.name == "x" else b.address, 0,
                           COMPUTE) if direct else
        rig.backend.copy(block.address, 5 * FAR, 64, COMPUTE, to_host=True)
        for block in landing.blocks
    ]  # fmt: skip
    work = rig.step(last=_where_it_lands(landing, made))
    work.landings = (landing,)
    return work


def parameters(graph: CudaGraph) -> list[Any]:
    """What the captured graph's nodes have."""
    assert graph.template is not None
    return [node.call for node in graph.template.graph.nodes]


@settings(max_examples=examples(100))
@given(data=st.data())
def test_whatever_came_before_a_twin_is_a_capture_anew(data):
    """Patches, updates of single nodes and of everything, twins of twins, and ends in any order.
    The captured graph stays as it is, and goes with its last form."""
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig.of(patch)
        landing = Landing(rig.backend, 64)
        work = landed(rig, landing, data.draw(st.booleans()))
        has = {0: (rig.backend.capture(work), work.identity)}  # what each graph has recorded
        numbers = itertools.count(1)
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
                if twin is None:  # everything was updated
                    assert graph.recaptured
                else:
                    has[next(numbers)] = twin, work.identity
                    assert parameters(twin) == captured and twin.nodes == graph.nodes
            elif verb == "patch":
                part = work.parts[data.draw(st.sampled_from([0, 2, 5]))]
                part.block[part.block.pointers[0]] = FAR * data.draw(st.integers(1, 8))
            elif verb == "end" and len(has) > 1:
                graph.destroy()
                del has[key]
            elif verb in ("update", "all"):
                assert graph.update(work, moved if verb == "update" else None)
                has[key] = graph, work.identity
            for form, what in has.values():
                if what == work.identity:
                    assert rig.replays(form, work)
        for form, _ in data.draw(st.permutations(list(has.values()))):
            assert not rig.nothing_left()
            form.destroy()
        assert rig.nothing_left()


# the end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_template_goes_with_its_last_form(rig, order):
    landing = Landing(rig.backend, 64)
    work = landed(rig, landing)
    made: list[Any] = [rig.backend.capture(work)]
    for landing.now in (1, 2):
        made.append(made[-1].twin(work, [LAST]))
    assert len(rig.api.alive) == 4  # and the template
    for n, which in enumerate(order):
        if which == 1:
            made[which].destroy()
            made[which].destroy()
        made[which] = None  # goes at once: there is no cycle
        assert len(rig.api.alive) == (3 - n - 1) + (n < 2)
    assert rig.nothing_left() and not rig.backend._graphs


@pytest.mark.parametrize("by", ["destroy", "close"])
def test_a_destroyed_plan_is_refused(rig, monkeypatch, by):
    """A backend that closes gives its plans back before their kernels."""
    work, order = rig.step(), list[str]()
    for function in ("cuModuleUnload", "cuGraphExecDestroy", "cuGraphDestroy"):
        was = getattr(rig.api, function)
        monkeypatch.setattr(
            rig.api, function, lambda x, f=function, was=was: order.append(f) or was(x)
        )
    graph = rig.backend.capture(work)
    twin, launch = graph.twin(work, []), graph.launch
    rig.backend.close() if by == "close" else (graph.destroy(), twin.destroy())
    assert order[:3] == ["cuGraphExecDestroy", "cuGraphExecDestroy", "cuGraphDestroy"]
    assert ("cuModuleUnload" in order) == (by == "close") and rig.nothing_left()
    graph.destroy()
    for refused in (launch, graph.launch, graph.edges, lambda: graph.update(work, None),
                    lambda: twin.twin(work, [])):  # fmt: skip
        with pytest.raises(DeviceError, match="plan of 7 commands was destroyed"):
            refused()
    rig.backend.close()
