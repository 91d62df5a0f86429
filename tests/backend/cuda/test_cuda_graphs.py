"""Plans and timed replays of the cuda backend on a faked driver."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.cuda.fake_cuda import Call, FakeApi, Result, fake_backend
from tests.profiles import examples
from workbench.backend.base import NO_PART
from workbench.backend.cuda.device import driver
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.cuda.device.replay import READ_GRIDS, READ_WORDS, TimedReplay, read_rates
from workbench.backend.issue.bind import LandingBlock, plannable
from workbench.backend.issue.issued import Issued, changed
from workbench.backend.issue.landing import N_BLOCKS, Landing
from workbench.common.errors import DeviceError, UsageError
from workbench.graph.ir import F16, F32, Kind, Node, Tensor
from workbench.graph.ops import make

FAR = 1 << 40  # between tensors, beyond every shape
COMPUTE, COPIES, THIRD = 0, 1, 2


def norm(cols: int = 256) -> Node:
    return make("rms_norm", "n", Tensor("x", F32, (2, cols)), eps=1e-5)


def product() -> Node:
    """A conversion and a product of cuBLAS."""
    w, x = Tensor("w", F16, (64, 256), Kind.WEIGHT), Tensor("x", F32, (40, 256))
    return make("mul_mat", "y", w, x)


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.backend, self.log = fake_backend(monkeypatch)
        self.api: FakeApi = self.backend._driver.api

    def launched(self, call: Any) -> list[Call]:
        self.log.clear()
        call()
        return list(self.log)

    def replays(self, graph: CudaGraph, work: Issued) -> bool:
        """Whether a launch queues what the parts of `work` do. A product is two nodes; records and
        waits are edges."""
        calls = self.launched(graph.launch)
        twice = [c.function == "cublasGemmEx" and c == b for b, c in itertools.pairwise(calls)]
        found = [c for c, again in zip(calls, [False, *twice], strict=True) if not again]
        return found == [c for c in self.launched(work.call) if "Event" not in c.function]

    def nothing_left(self) -> bool:
        return not self.api.alive and not self.api.captures

    def launch(self, node: Node, first: int, stream: int = COMPUTE, early: bool = False) -> Issued:
        given: dict[Tensor, int] = {}
        at = lambda t: given.setdefault(t.storage, first + FAR * len(given))  # noqa: E731
        return self.backend.launch(node, at, first + (1 << 59), stream, early)

    def work_of(self, parts: Sequence[tuple[int, Issued]], stream=COMPUTE, landings=()) -> Any:
        streams, issued = zip(*parts, strict=True)
        return plannable(self.backend, issued, stream, streams, landings=landings)

    def step(self, first: int = FAR, cols: int = 256, landing: Landing | None = None) -> Any:
        """A copy on another stream, launches after it, of one kernel and of several and early
        ones, and a copy of results, which may land."""
        backend, event = self.backend, self.backend.event()
        copy = lambda dst: backend.copy(dst, first, 64, COMPUTE, to_host=True)  # noqa: E731
        last = copy(7 * FAR)
        if landing is not None:
            each = [copy(block.address) for block in landing.blocks]
            last = Issued(lambda: each[landing.now](), each[0].same, LandingBlock(landing, each))
        return self.work_of([
            (COPIES, backend.copy(first, 9 * FAR, 64, COPIES, to_host=False)),
            (COPIES, backend.record(event, COPIES)),
            (COMPUTE, self.launch(norm(cols), first)),
            (COMPUTE, backend.wait(event, COMPUTE)),
            (COMPUTE, self.launch(product(), first)),
            (COMPUTE, self.launch(norm(cols), first, early=True)),
            (COMPUTE, last),
        ], landings=[] if landing is None else [landing])  # fmt: skip


SINGLE = [0, 2, 5, 6]  # parts of a step that are single nodes


@pytest.fixture
def rig(monkeypatch) -> Rig:
    return Rig(monkeypatch)


def test_a_replay_queues_what_the_parts_do(rig):
    """A kernel is a node of its part, a conversion and its product are three. A copy on another
    stream begins with the plan, and orders only what waits for it. Before the first capture a
    product runs, into other memory; its own argument block is as before."""
    work = rig.step()
    before = work.addresses
    graph = rig.backend.capture(work)
    assert [c.function for c in rig.log] == ["cublasGemmEx"] and work.addresses == before
    loaded = rig.log[0].args
    assert rig.replays(graph, work) and rig.replays(graph, work)
    (own,) = [c.args for c in rig.log if c.function == "cublasGemmEx"]
    assert [a == b for a, b in zip(loaded, own, strict=True)].count(False) == 1
    assert graph.capture_ns > 0 and graph.instantiate_ns > 0
    assert graph.nodes == (0, 2, 4, 4, 4, 5, 6)
    copy, first, converts, *_ = graph.template.graph.nodes
    assert copy.after == first.after == () and set(converts.after) == {copy, first}
    assert not rig.launched(lambda: rig.backend.capture(rig.step(3 * FAR))), "its shape is known"


@pytest.mark.parametrize("stream", [COMPUTE, THIRD])
def test_streams_that_nobody_waits_for_are_joined(rig, stream):
    parts = [(s, rig.launch(norm(), FAR, s)) for s in (COPIES, COMPUTE, COPIES, THIRD)]
    work = rig.work_of(parts, stream)
    graph = rig.backend.capture(work)
    assert graph.nodes == (0, 1, 2, 3) and rig.replays(graph, work) and not rig.api.captures


def test_a_capture_keeps_the_collector_and_frees_away(rig):
    """To free pinned memory is to wait for the device, and that would end the capture."""
    cupy = Mock()
    cupy.cuda.runtime.CUDARuntimeError = RuntimeError
    thread = threading.Thread(target=driver._free_pinned, args=(cupy, nullcontext(), 0))

    def meanwhile() -> None:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not cupy.mock_calls and not gc.isenabled()

    rig.backend.capture(rig.work_of([(COMPUTE, Issued(meanwhile, ("look",)))]))
    thread.join()
    freed = [call.cuda.runtime.deviceSynchronize(), call.cuda.runtime.freeHost(0)]
    assert cupy.mock_calls == freed and gc.isenabled()


@pytest.mark.parametrize("programmatic", [False, True])
def test_a_gate_and_an_end_are_nodes_of_the_plan(rig, programmatic):
    """The gate in place of the copy; the end after the last command, and of none. An update and a
    twin keep both."""
    first = rig.backend.copy(FAR, 2 * FAR, 256, COMPUTE, to_host=False)
    work = rig.work_of([(COMPUTE, first), (COMPUTE, rig.launch(norm(), 3 * FAR))])
    work.gate = rig.backend.gate_copy(*first.addresses, 256, 4096, 500, COMPUTE)
    assert list(work.gate.block) == [FAR, 2 * FAR, 256, 4096, 500]
    work.end = rig.backend.gate_end(5 * FAR, 6 * FAR, COMPUTE, programmatic)
    graph = rig.backend.capture(work)
    assert graph.nodes == (0, 1, NO_PART)
    first.block[0] = work.gate.block[0] = 8 * FAR
    twin = graph.twin(work, [0])
    assert twin is not None and graph.update(work, [0]) and graph.nodes_set == 1
    for made in (graph, twin):
        gate, _, end = rig.launched(made.launch)
        assert gate.function == "cuLaunchKernel" and 8 * FAR in gate.args
        assert end.function == ("cuLaunchKernelEx" if programmatic else "cuLaunchKernel")
        assert {5 * FAR, 6 * FAR} <= set(end.args)


def raised(error: BaseException) -> None:
    raise error


FAILING = [
    (partial(raised, DeviceError("told to")), "its command {} cannot be captured.*told to"),
    (partial(raised, KeyboardInterrupt()), ""), (None, "STREAM_CAPTURE_UNSUPPORTED"),
]  # fmt: skip


@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.parametrize(("part", "told"), FAILING, ids=["fails", "interrupted", "host's wait"])
def test_a_failing_part_ends_the_capture_on_all_streams(rig, part, told, at):
    work = rig.step()
    parts = list(zip(work.streams, work.parts, strict=True))
    parts.insert(at, (COPIES, Issued(part or rig.backend.sync_stream(COPIES), ("bad",))))
    kind = DeviceError if told else KeyboardInterrupt
    with pytest.raises(kind, match=told.format(at) or None) as error:
        rig.backend.capture(rig.work_of(parts))
    assert "\n" not in str(error.value) and rig.nothing_left() and gc.isenabled()
    assert rig.replays(rig.backend.capture(work), work)


SET = "cuGraphExecKernelNodeSetParams"
REFUSED = {
    "capture": ("cuStreamBeginCapture", "cuStreamGetCaptureInfo", "cuStreamEndCapture",
                "cuGraphInstantiate", "cuGraphUpload", "cuMemcpyHtoDAsync", "cuLaunchKernelEx"),
    "update": ("cuGraphExecUpdate", "cuStreamBeginCapture", SET),
    "twin": ("cuGraphInstantiate", "cuGraphUpload", SET),
}  # fmt: skip


@pytest.mark.parametrize(("act", "function"), [(act, f) for act in REFUSED for f in REFUSED[act]])
def test_what_the_driver_refuses_is_told_and_changes_nothing(rig, act, function):
    work = rig.step()
    graph = None if act == "capture" else rig.backend.capture(work)
    n = len(rig.api.alive)
    rig.api.refuse[function] = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match=f"{function}.*OUT_OF_MEMORY") as told:
        if graph is None:
            rig.backend.capture(work)
        else:
            parts = [2] if act == "twin" or function == SET else None
            getattr(graph, act)(rig.step(5 * FAR), parts)
    assert "\n" not in str(told.value) and len(rig.api.alive) == n and not rig.api.captures
    rig.api.refuse.clear()
    graph = graph or rig.backend.capture(work)
    assert graph.update(work, None) and rig.replays(graph, work)


def test_what_no_node_sets_is_captured_anew(rig):
    """A product, records and waits; another kind of memory; nodes that the driver lists in another
    order. A twin of such parts is none."""
    graph = rig.backend.capture(rig.step())
    n = len(rig.api.alive)
    assert graph.update(rig.step(3 * FAR), SINGLE) and graph.nodes_set == 1
    for moved, how in ((4 * FAR, [1, 3, 4]), (5 * FAR, SINGLE)):
        rig.api.refuse["cuGraphExecMemcpyNodeSetParams"] = Result.CUDA_ERROR_INVALID_VALUE
        now = rig.step(moved)
        assert graph.twin(now, how) is None and len(rig.api.alive) == n
        assert graph.update(now, how) and rig.replays(graph, now)
    assert (graph.nodes_set, graph.recaptured) == (1, 2)
    rig.api.refuse.clear()  # its handles are still the first capture's
    assert graph.update(rig.step(7 * FAR), SINGLE) and graph.nodes_set == 2
    graph = rig.backend.capture(rig.step())
    nodes = graph.template.graph.nodes
    nodes[1], nodes[2] = nodes[2], nodes[1]
    assert graph.update(rig.step(5 * FAR), [2])
    assert (graph.nodes_set, graph.recaptured) == (0, 1)


def test_other_work_of_one_topology_is_taken_over(rig):
    before, now = rig.step(), rig.step(cols=512)
    graph = rig.backend.capture(before)
    n = len(rig.api.alive)
    assert graph.update(now, None) and rig.replays(graph, now)
    # its nodes are no longer those of the graph that is kept: captured anew, though it could be set
    moved = rig.step(5 * FAR, cols=512)
    assert graph.update(moved, [0, 2]) and rig.replays(graph, moved)
    assert (graph.nodes_set, graph.recaptured) == (0, 2)
    assert graph.update(rig.step(), None) and graph.update(rig.step(5 * FAR), [0, 2])
    assert (graph.nodes_set, graph.recaptured) == (1, 3), "back at the first"
    last = COMPUTE, rig.launch(norm(), FAR)
    more = rig.work_of([*zip(before.streams, before.parts, strict=True), last])
    elsewhere = rig.work_of([(COPIES, rig.launch(norm(), FAR, COPIES))], COPIES)
    for other in (more, elsewhere):
        assert not graph.update(other, None)
    assert not graph.update(elsewhere, [0]) and graph.twin(elsewhere, []) is None
    assert len(rig.api.alive) == n, "other captures are gone"


def test_only_nodes_of_changed_parts_are_set(rig):
    """The work itself is patched, as by reuse: an update reads its blocks."""
    work = rig.work_of([(COMPUTE, rig.launch(norm(), FAR)) for _ in range(2)])
    graph = rig.backend.capture(work)
    work.parts[1].block[work.parts[1].block.pointers[0]] = 5 * FAR
    assert not rig.replays(graph, work)
    rig.api.calls.clear()
    assert graph.update(work, [1]) and rig.replays(graph, work)
    assert rig.api.calls == ["cuGraphExecKernelNodeSetParams"] and graph.nodes_set == 1
    twin = graph.twin(work, [])
    assert twin is not None and rig.replays(twin, work), "it has what updates moved"


VERBS = st.sampled_from(["twin", "twin", "patch", "update", "all", "end", "drop"])


@settings(max_examples=examples(100))
@given(data=st.data())
def test_whatever_came_before_a_twin_is_a_capture_anew(data):
    """Patches, updates of single nodes and of everything, twins of twins, and ends in any order.
    The captured graph stays as it is, and goes with its last form."""
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        landing = Landing(rig.backend, 64)
        work = rig.step(landing=landing)
        has = {0: (rig.backend.capture(work), work.identity)}  # what each graph has recorded
        numbers = itertools.count(1)
        for verb in data.draw(st.lists(VERBS, min_size=1, max_size=10)):
            landing.now = data.draw(st.integers(0, N_BLOCKS - 1))
            key = data.draw(st.sampled_from(sorted(has)))
            graph, recorded = has[key]
            moved = changed(recorded, work.identity)
            assert moved is not None
            if verb == "twin":
                captured = [node.call for node in graph.template.graph.nodes]
                twin = graph.twin(work, moved)
                if twin is None:  # everything was updated
                    assert graph.recaptured
                else:
                    has[next(numbers)] = twin, work.identity
                    assert [node.call for node in twin.template.graph.nodes] == captured
            elif verb == "patch":
                part = work.parts[data.draw(st.sampled_from([0, 2, 5]))]
                part.block[part.block.pointers[0]] = FAR * data.draw(st.integers(1, 8))
            elif verb in ("end", "drop") and len(has) > 1:
                if verb == "end":
                    graph.destroy()
                del has[key], graph  # goes at once: there is no cycle
            elif verb in ("update", "all"):
                assert graph.update(work, moved if verb == "update" else None)
                has[key] = graph, work.identity
            for form, what in has.values():
                if what == work.identity:
                    assert rig.replays(form, work)
        twin = form = graph = None
        assert len(rig.api.alive) == len(has) + 1  # and the template
        for form, _ in data.draw(st.permutations(list(has.values()))):
            assert not rig.nothing_left()
            form.destroy()
        assert rig.nothing_left()


@pytest.mark.parametrize("by", ["destroy", "close"])
def test_a_destroyed_plan_is_refused(rig, monkeypatch, by):
    """A backend that closes gives its plans back before their kernels."""
    work, seen = rig.step(), Mock()
    for function in ("cuModuleUnload", "cuGraphExecDestroy", "cuGraphDestroy"):
        getattr(seen, function).side_effect = getattr(rig.api, function)
        monkeypatch.setattr(rig.api, function, getattr(seen, function))
    graph = rig.backend.capture(work)
    twin, launch = graph.twin(work, []), graph.launch
    rig.backend.close() if by == "close" else (graph.destroy(), twin.destroy())
    order = [call[0] for call in seen.mock_calls]
    assert order[:3] == ["cuGraphExecDestroy", "cuGraphExecDestroy", "cuGraphDestroy"]
    assert ("cuModuleUnload" in order) == (by == "close") and rig.nothing_left()
    graph.destroy()
    for refused in (launch, graph.edges, partial(graph.update, work, None),
                    partial(twin.twin, work, [])):  # fmt: skip
        with pytest.raises(DeviceError, match="plan of 7 commands was destroyed"):
            refused()


def test_times_lie_between_events_after_a_replay(rig):
    """Every kernel has run once before it is captured."""
    a, b = (rig.launch(norm(cols), FAR).call for cols in (256, 512))
    with TimedReplay(rig.backend, [a, b, a, b]) as replay:
        ran = list(rig.log)
        assert len(ran) == 2 and ran[0] != ran[1]
        rig.log.clear()
        assert replay.time_us(2) == [250.0, 250.0]
        kinds = [*[call.function for call in ran] * 2, "cuEventRecord"]
        assert [c.function for c in rig.log] == kinds * 3
    assert rig.nothing_left()
    with pytest.raises(UsageError, match="replay of 4 launches is closed; capture again"):
        replay.run()
    with pytest.raises(UsageError, match="no launches"):
        TimedReplay(rig.backend, [])


@pytest.mark.parametrize(("room", "mib"), [(1 << 10, 64), (20, 16), (7, 0)])
def test_reading_is_tried_with_every_kernel_and_grid(rig, monkeypatch, room, mib):
    """On a small device a small buffer is read often. room: of the device, in MiB."""
    backend, allocate, full = rig.backend, rig.backend.allocate, DeviceError("told to")
    monkeypatch.setattr(
        backend, "allocate", lambda n, of: raised(full) if n > room << 20 else allocate(n, of)
    )
    prepare = Mock(side_effect=backend._prepare)
    monkeypatch.setattr(backend, "_prepare", prepare)
    backend._driver.properties |= {"l2CacheSize": 1 << 20, "multiProcessorCount": 10}
    with pytest.raises(DeviceError, match="told to") if not mib else nullcontext():
        found, words = read_rates(backend, 64 << 20, 1), (mib << 20) // 16
        assert len(found) == len(READ_WORDS) * len(READ_GRIDS)
        assert all(rate == pytest.approx((64 << 20) / 250 / 1e3) for rate in found.values())
        kernels = [call.args[0] for call in prepare.mock_calls]
        grids = {k.grid[0] for k in kernels if k.function == "read_8"}
        assert kernels[0].args[1] == words and grids == {40, 80, 160, 320, words // (256 * 8)}
        assert rig.nothing_left()
