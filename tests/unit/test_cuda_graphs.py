"""Plans of the cuda backend on a faked driver: what a capture asks for, in which order, what a
failure leaves behind, which nodes an update sets, and who gives a graph back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.unit.fake_cuda import fake_backend
from tests.unit.fake_graphs import Call, FakeCaptures, Result
from workbench.backend.cuda.device import driver
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graph_nodes import commands_of
from workbench.backend.cuda.device.graphs import CudaGraph, record
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.common.errors import DeviceError
from workbench.graph.ir import F16, F32, Kind, Node, Tensor
from workbench.graph.ops import make

FAR = 1 << 40
COMPUTE, COPIES, THIRD = 0, 1, 2


class Rig(NamedTuple):
    backend: CudaBackend
    api: FakeCaptures

    def issued(self, work: Issued) -> list[Call]:
        """What `work` queues, without records and waits: those are edges of a graph."""
        self.api.log.clear()
        work.call()
        return [c for c in self.api.log if c.function not in ("cuEventRecord", "cuStreamWaitEvent")]

    def launched(self, graph: CudaGraph) -> list[Call]:
        self.api.log.clear()
        graph.launch()
        return list(self.api.log)

    def nothing_left(self) -> bool:
        return not self.api.alive and not self.api._captures


@pytest.fixture
def rig(monkeypatch) -> Rig:
    backend, _ = fake_backend(monkeypatch)
    return Rig(backend, backend._driver.api)


def norm(cols: int = 256) -> Node:
    return make("rms_norm", "n", Tensor("x", F32, (2, cols)), eps=1e-5)


def product() -> Node:
    """A conversion and a product of cuBLAS."""
    w, x = Tensor("w", F16, (64, 256), Kind.WEIGHT), Tensor("x", F32, (40, 256))
    return make("mul_mat", "y", w, x)


def launch(rig: Rig, node: Node, first: int, stream: int = COMPUTE, early: bool = False) -> Issued:
    given: dict[Tensor, int] = {}
    at = lambda t: given.setdefault(t.storage, first + FAR * len(given))  # noqa: E731
    return rig.backend.launch(node, at, first + (1 << 59), stream, early)


def work_of(backend: CudaBackend, parts: Sequence[tuple[int, Issued]], stream: int = COMPUTE):
    issued = [part for _, part in parts]
    return Plannable(
        in_order([part.call for part in issued]), ("replay",), parts=tuple(issued),
        backend=backend, stream=stream, streams=tuple(s for s, _ in parts),
    )  # fmt: skip


def step(rig: Rig, first: int = FAR, more: bool = False, cols: int = 256) -> Plannable:
    """A copy on another stream, launches behind it, of one kernel and of several and early ones,
    and a copy of results."""
    backend, event = rig.backend, rig.backend.event()
    parts = [
        (COPIES, backend.copy(first, 9 * FAR, 64, COPIES, to_host=False)),
        (COPIES, backend.record(event, COPIES)),
        (COMPUTE, launch(rig, norm(cols), first)),
        (COMPUTE, backend.wait(event, COMPUTE)),
        (COMPUTE, launch(rig, product(), first)),
        (COMPUTE, launch(rig, norm(cols), first, early=True)),
        (COMPUTE, backend.copy(7 * FAR, first, 64, COMPUTE, to_host=True)),
    ]
    return work_of(backend, parts + [(COMPUTE, launch(rig, norm(cols), first))] * more)


def changed(before: Plannable, now: Plannable) -> list[int]:
    assert before.key == now.key
    pairs = enumerate(zip(before.parts, now.parts, strict=True))
    return [i for i, (a, b) in pairs if a.addresses != b.addresses]


def distinct(calls: Sequence[Call]) -> list[Call]:
    """Each product once: it is two nodes of a graph."""
    return [c for i, c in enumerate(calls) if c.function != "cublasGemmEx" or calls[i - 1] != c]


# capture ------------------------------------------------------------------------------------------


def test_a_replay_queues_what_the_parts_do(rig):
    work = step(rig)
    graph = rig.backend.capture(work)
    assert rig.api.log == [c for c in rig.api.log if c.function == "cublasGemmEx"], "nothing runs"
    expected = rig.issued(work)
    assert distinct(rig.launched(graph)) == expected == distinct(rig.launched(graph))
    assert graph.capture_ns > 0 and graph.instantiate_ns > 0


def test_each_node_knows_its_part(rig):
    """A kernel, two for a conversion and its product, which is two nodes of cuBLAS."""
    graph = rig.backend.capture(step(rig))
    names = [node.call.function for node in graph.template.graph.nodes]
    assert graph.nodes == (0, 2, 4, 4, 4, 5, 6)
    assert names[0] == "cuMemcpyHtoDAsync" and names[3:5] == ["cublasGemmEx"] * 2
    assert names[-1] == "cuMemcpyDtoHAsync"


def test_a_copy_on_another_stream_begins_with_the_plan_and_orders_only_what_waits(rig):
    graph = rig.backend.capture(step(rig))
    copy, first, converts, *_ = graph.template.graph.nodes
    assert copy.behind == first.behind == ()
    assert set(converts.behind) == {copy, first}


def test_streams_that_nobody_waits_for_are_joined_at_the_end(rig):
    backend = rig.backend
    for stream in (COMPUTE, THIRD):
        parts = [(s, launch(rig, norm(), FAR, s)) for s in (COPIES, COMPUTE, COPIES, THIRD)]
        work = work_of(backend, parts, stream)
        graph = backend.capture(work)
        assert graph.nodes == (0, 1, 2, 3)
        assert sorted(rig.launched(graph)) == sorted(rig.issued(work))
    assert not rig.api._captures


def test_a_plan_on_one_stream_asks_for_no_event(rig):
    parts = [(COMPUTE, launch(rig, norm(), FAR))]
    rig.backend._driver.event = None
    assert rig.backend.capture(work_of(rig.backend, parts)).nodes == (0,)


def test_programmatic_edges_are_counted(rig):
    parts = [(COMPUTE, launch(rig, norm(), FAR * i, early=i != 2)) for i in range(1, 5)]
    copy = rig.backend.copy(FAR, 9 * FAR, 64, COMPUTE, to_host=False)
    late = [(COMPUTE, copy), (COMPUTE, launch(rig, norm(), FAR, early=True))]
    graph = rig.backend.capture(work_of(rig.backend, parts + late))
    assert graph.edges() == (5, 2), "the first is behind nothing, the last behind a copy"
    assert rig.backend.capture(work_of(rig.backend, parts[:1])).edges() == (0, 0)


def test_the_collector_stays_away_from_a_capture_and_comes_back(rig):
    seen = []
    parts = [(COMPUTE, Issued(lambda: seen.append(gc.isenabled()), ("look",)))]
    rig.backend.capture(work_of(rig.backend, parts))
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        rig.backend.capture(work_of(rig.backend, parts))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pinned_memory_that_another_thread_frees_waits_for_the_capture(rig):
    """To free it is to wait for the device, and that would end the capture."""
    done: list[str] = []
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError, deviceSynchronize=lambda: done.append("wait"),
        freeHost=lambda address: done.append("free"),
    )  # fmt: skip
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    thread = threading.Thread(target=driver._free_pinned, args=(cupy, nullcontext(), 0))

    def meanwhile() -> None:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not done

    parts = [(COMPUTE, Issued(meanwhile, ("look",)))]
    rig.backend.capture(work_of(rig.backend, parts))
    thread.join()
    assert done == ["wait", "free"]


def test_a_product_of_cublas_has_run_before_its_first_capture(rig):
    """Into other memory; its own argument block is as before."""
    work = step(rig)
    before = work.addresses
    rig.api.log.clear()
    rig.backend.capture(work)
    (loaded,) = rig.api.log
    assert loaded.function == "cublasGemmEx" and work.addresses == before
    expected = next(c for c in rig.issued(work) if c.function == "cublasGemmEx")
    assert [a == b for a, b in zip(loaded.args, expected.args, strict=True)].count(False) == 1
    rig.api.log.clear()
    rig.backend.capture(step(rig, 3 * FAR))
    assert not rig.api.log, "its shape is known"


# failures -----------------------------------------------------------------------------------------


def fails() -> None:
    raise DeviceError("told to")


def syncs(rig: Rig) -> Callable[[], Any]:
    return rig.backend.sync_stream(COPIES)


@pytest.mark.parametrize("at", range(8))
def test_a_part_that_fails_is_named_and_ends_the_capture_on_every_stream(rig, at: int):
    work = step(rig)
    parts = list(zip(work.streams, work.parts, strict=True))
    parts.insert(at, (COPIES, Issued(fails, ("bad",))))
    with pytest.raises(DeviceError, match=f"its command {at} cannot be captured.*told to") as told:
        rig.backend.capture(work_of(rig.backend, parts))
    assert "\n" not in str(told.value) and rig.nothing_left()
    graph = rig.backend.capture(work)
    assert distinct(rig.launched(graph)) == rig.issued(work)


def test_a_wait_of_the_host_ends_the_capture(rig):
    for stream, wait in ((COPIES, syncs(rig)), (COMPUTE, lambda: None)):
        work = step(rig)
        parts = [*zip(work.streams, work.parts, strict=True), (stream, Issued(wait, ("sync",)))]
        if stream == COPIES:
            with pytest.raises(DeviceError, match="STREAM_CAPTURE_UNSUPPORTED"):
                rig.backend.capture(work_of(rig.backend, parts))
            assert rig.nothing_left()
        else:
            rig.backend.capture(work_of(rig.backend, parts)).destroy()
    assert rig.nothing_left()


def test_an_interrupt_leaves_the_capture_and_stays_an_interrupt(rig):
    def interrupted() -> None:
        raise KeyboardInterrupt

    parts = [(COPIES, launch(rig, norm(), FAR, COPIES)), (COMPUTE, Issued(interrupted, ("x",)))]
    with pytest.raises(KeyboardInterrupt):
        rig.backend.capture(work_of(rig.backend, parts))
    assert rig.nothing_left() and gc.isenabled()


@pytest.mark.parametrize(
    "function",
    ["cuStreamBeginCapture", "cuStreamGetCaptureInfo", "cuStreamEndCapture", "cuGraphInstantiate",
     "cuGraphUpload", "cuMemcpyHtoDAsync", "cuLaunchKernelEx"],
)  # fmt: skip
def test_what_the_driver_refuses_is_told_and_nothing_stays_behind(rig, function: str):
    work = step(rig)
    rig.api.refuse[function] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=rf"(?s)plan of 7 commands.*|{function} failed") as told:
        rig.backend.capture(work)
    assert function in str(told.value) and "OUT_OF_MEMORY" in str(told.value)
    assert "\n" not in str(told.value) and rig.nothing_left()
    rig.api.refuse.clear()
    graph = rig.backend.capture(work)
    assert distinct(rig.launched(graph)) == rig.issued(work)


def test_a_stream_that_is_captured_already_stays_in_its_capture(rig):
    driver, stream = rig.backend._driver, rig.backend._stream(COMPUTE)
    work = work_of(rig.backend, [(COMPUTE, launch(rig, norm(), FAR))])

    def captures_too() -> None:
        with pytest.raises(DeviceError, match="cuStreamBeginCapture failed at plan of 1 commands"):
            rig.backend.capture(work)
        work.call()

    graph = record(driver, "the outer one", stream, (), captures_too)
    assert len(graph.nodes) == 1


# update -------------------------------------------------------------------------------------------


def test_only_the_nodes_of_changed_parts_are_set(rig):
    backend = rig.backend
    first, second = FAR, 3 * FAR
    parts = [(COMPUTE, launch(rig, norm(), first)), (COMPUTE, launch(rig, norm(), first)),
             (COMPUTE, backend.copy(first, 9 * FAR, 64, COMPUTE, to_host=False))]  # fmt: skip
    before = work_of(backend, parts)
    moved = [(COMPUTE, launch(rig, norm(), second)), parts[1],
             (COMPUTE, backend.copy(second, 8 * FAR, 64, COMPUTE, to_host=False))]  # fmt: skip
    graph, now = backend.capture(before), work_of(backend, moved)
    rig.api.calls.clear()
    assert changed(before, now) == [0, 2]
    assert graph.update(now, [0, 2])
    assert rig.api.calls == ["cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"]
    assert rig.launched(graph) == rig.issued(now) != rig.issued(before)
    assert (graph.nodes_set, graph.recaptured) == (1, 0)


def test_a_patched_block_is_set_where_it_lies(rig):
    """The work itself is patched, as by reuse: an update reads its blocks."""
    work = work_of(rig.backend, [(COMPUTE, launch(rig, norm(), FAR))] * 2)
    graph = rig.backend.capture(work)
    before = rig.launched(graph)
    block = work.parts[0].block
    for value in (5 * FAR, 6 * FAR, 5 * FAR):
        block[block.pointers[0]] = value
        assert rig.launched(graph) != rig.issued(work)
        assert graph.update(work, [0, 1])
        assert rig.launched(graph) == rig.issued(work) != before
    assert (graph.nodes_set, graph.recaptured) == (3, 0)


@pytest.mark.parametrize("part", [4, 1, 3])
def test_products_records_and_waits_are_captured_anew(rig, part: int):
    before, now = step(rig), step(rig, 5 * FAR)
    graph = rig.backend.capture(before)
    assert graph.update(now, changed(before, now)), part
    assert (graph.nodes_set, graph.recaptured) == (0, 1)
    assert distinct(rig.launched(graph)) == rig.issued(now)
    # the same again, by single nodes: its handles are still the first capture's
    again = step(rig, 7 * FAR)
    kernels_and_copies = [0, 2, 5, 6]
    assert graph.update(again, kernels_and_copies)
    assert (graph.nodes_set, graph.recaptured) == (1, 1)
    launched, expected = distinct(rig.launched(graph)), rig.issued(again)
    products = [i for i, c in enumerate(expected) if c.function == "cublasGemmEx"]
    kept = {*products, 2}  # of part 4, which was not to change
    assert [a == b for i, (a, b) in enumerate(zip(launched, expected, strict=True))
            if i not in kept] == [True] * (len(expected) - len(kept))  # fmt: skip


def test_other_work_of_the_same_topology_is_taken_over(rig):
    before, now = step(rig), step(rig, cols=512)
    graph = rig.backend.capture(before)
    n = len(rig.api.alive)
    assert before.key != now.key and graph.update(now, None)
    assert distinct(rig.launched(graph)) == rig.issued(now)
    assert len(rig.api.alive) == n, "the second capture is gone"
    # its nodes are no longer those of the graph that is kept: captured anew, though it could be set
    moved = step(rig, 5 * FAR, cols=512)
    assert graph.update(moved, [0, 2])
    assert (graph.nodes_set, graph.recaptured) == (0, 2)
    assert distinct(rig.launched(graph)) == rig.issued(moved)
    assert graph.update(step(rig), None) and graph.update(step(rig, 5 * FAR), [0, 2])
    assert (graph.nodes_set, graph.recaptured) == (1, 3), "back at the first"


def test_another_topology_is_refused_and_nothing_has_changed(rig):
    before = step(rig)
    graph = rig.backend.capture(before)
    nodes = graph.nodes
    assert not graph.update(step(rig, more=True), None)
    assert graph.nodes == nodes and distinct(rig.launched(graph)) == rig.issued(before)
    assert graph.update(step(rig, 5 * FAR), [0, 2]), "and it can be updated as ever"
    assert (graph.nodes_set, graph.recaptured) == (1, 0)
    graph.destroy()
    assert rig.nothing_left()


def test_work_of_other_streams_is_taken_over_or_refused(rig):
    """The same topology on a stream that the first capture had none of; a plan on another."""
    first = work_of(rig.backend, [(COMPUTE, launch(rig, norm(), FAR))])
    graph = rig.backend.capture(first)
    aside = work_of(rig.backend, [(THIRD, launch(rig, norm(), 5 * FAR, THIRD))])
    assert graph.update(aside, None) and rig.launched(graph) == rig.issued(aside)
    elsewhere = work_of(rig.backend, [(COPIES, launch(rig, norm(), FAR, COPIES))], COPIES)
    assert not graph.update(elsewhere, None) and not graph.update(elsewhere, [0])
    assert rig.launched(graph) == rig.issued(aside)


def test_other_failures_of_an_update_are_raised(rig):
    graph = rig.backend.capture(step(rig))
    for function, given in (
        ("cuGraphExecUpdate", None), ("cuGraphExecKernelNodeSetParams", [2]),
        ("cuStreamBeginCapture", None),
    ):  # fmt: skip
        rig.api.refuse[function] = Result.CUDA_ERROR_INVALID_VALUE
        with pytest.raises(DeviceError, match=f"{function} failed at plan of 7 commands"):
            graph.update(step(rig, 5 * FAR), given)
        rig.api.refuse.clear()
    work = step(rig, 3 * FAR)
    assert graph.update(work, None) and distinct(rig.launched(graph)) == rig.issued(work)
    graph.destroy()
    assert rig.nothing_left()


def test_a_copy_that_cannot_be_set_is_captured_anew(rig):
    """The driver refuses memory of another kind at a single node."""
    graph, work = rig.backend.capture(step(rig)), step(rig, 5 * FAR)
    rig.api.refuse["cuGraphExecMemcpyNodeSetParams"] = Result.CUDA_ERROR_INVALID_VALUE
    assert graph.update(work, [0, 2, 5, 6])
    assert (graph.nodes_set, graph.recaptured) == (0, 1)
    assert distinct(rig.launched(graph)) == rig.issued(work)


def test_a_node_of_another_kernel_is_never_set(rig):
    """Should the driver list nodes in another order: the graph is captured anew."""
    before, now = step(rig), step(rig, 5 * FAR)
    graph = rig.backend.capture(before)
    graph.template.graph.nodes[1], graph.template.graph.nodes[2] = (
        graph.template.graph.nodes[2],
        graph.template.graph.nodes[1],
    )
    assert graph.update(now, [2])
    assert (graph.nodes_set, graph.recaptured) == (0, 1)


# the end ------------------------------------------------------------------------------------------


def test_a_destroyed_plan_is_refused_and_destroyed_once(rig):
    graph, other = rig.backend.capture(step(rig)), rig.backend.capture(step(rig))
    launch = graph.launch
    for _ in range(2):
        graph.destroy()
        for refused in (launch, graph.launch, graph.edges, lambda: graph.update(step(rig), None)):
            with pytest.raises(DeviceError, match="plan of 7 commands was destroyed"):
                refused()
    assert rig.api.calls.count("cuGraphExecDestroy") == 1
    assert len(rig.launched(other)) == 7
    other.destroy()
    assert rig.nothing_left()


def test_a_closed_backend_has_given_its_plans_back_before_their_kernels(rig, monkeypatch):
    graph = rig.backend.capture(step(rig))
    order: list[str] = []
    for function in ("cuModuleUnload", "cuGraphExecDestroy", "cuGraphDestroy"):
        was = getattr(rig.api, function)
        monkeypatch.setattr(
            rig.api, function, lambda x, f=function, was=was: (order.append(f), was(x))[1]
        )
    rig.backend.close()
    assert order[:2] == ["cuGraphExecDestroy", "cuGraphDestroy"] and "cuModuleUnload" in order
    assert rig.nothing_left()
    graph.destroy()
    rig.backend.close()
    with pytest.raises(DeviceError, match="destroyed"):
        graph.launch()


def test_a_plan_that_nobody_has_any_more_is_given_back(rig):
    graph = rig.backend.capture(step(rig))
    assert not rig.nothing_left()
    del graph
    gc.collect()
    assert rig.nothing_left()


def test_a_hundred_cycles_leave_nothing(rig):
    for i in range(100):
        graph = rig.backend.capture(step(rig, FAR * (i % 3 + 1)))
        graph.update(step(rig, FAR * 5), None if i % 2 else [0, 2])
        graph.launch()
        graph.destroy()
    del graph
    assert rig.nothing_left() and not rig.backend._graphs


def test_commands_of_a_work_are_its_single_calls(rig):
    work = step(rig)
    found = list(commands_of(work))
    assert len(found) == len(work.parts) + 1 and not any(c.parts for c in found)
