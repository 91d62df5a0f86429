"""CUDA graphs and their twins: a launch computes what eager issue does, follows changed addresses,
and everything goes without a trace."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from tests.gates import hold
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.common.errors import DeviceError
from workbench.graph.ir import F32, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = pytest.mark.gpu

N = 1000


class Line:
    """host `given` -> device a, b = a + one, host `taken` = b. Copies ride the other stream."""

    def __init__(self, backend: CudaBackend):
        self.backend = backend
        self.device = [backend.allocate(4 * N, Space.DEVICE) for _ in range(4)]
        self.host = [backend.allocate(4 * N, Space.PINNED) for _ in range(4)]
        self.arrays = []
        for i, memory in enumerate(self.host):
            assert memory.array is not None
            self.arrays.append(memory.array.view(np.float32))
            self.arrays[i][:] = 10.0 * (i + 1)
        self.one = backend.allocate(4 * N, Space.PINNED)
        assert self.one.array is not None
        self.one.array.view(np.float32)[:] = 1.0
        backend.copy(self.device[3].address, self.one.address, 4 * N, 0, to_host=False)()
        backend.synchronize()

    def work(
        self,
        given: int = 0,
        taken: int = 2,
        adds: int = 1,
        extra: Sequence[Issued] = (),
        b: int = 1,
    ) -> Plannable:
        backend, event = self.backend, self.backend.event()
        x, y, one = (Tensor(name, F32, (1, N)) for name in ("x", "y", "one"))
        first, more = make("add", "y", x, one), make("add", "z", y, one)
        at = {x: self.device[0], one: self.device[3], first.output: self.device[b],
              y: self.device[b], more.output: self.device[b]}  # fmt: skip

        def launch(node: Any) -> Issued:
            return backend.launch(node, lambda t: at[t].address, 0, COMPUTE_STREAM)

        parts = [
            (COPY_STREAM, backend.copy(self.device[0].address, self.host[given].address, 4 * N,
                                       COPY_STREAM, to_host=False)),
            (COPY_STREAM, backend.record(event, COPY_STREAM)),
            (COMPUTE_STREAM, backend.wait(event, COMPUTE_STREAM)),
            (COMPUTE_STREAM, launch(first)),
            *((COMPUTE_STREAM, launch(more)) for _ in range(adds - 1)),
            (COMPUTE_STREAM, backend.copy(self.host[taken].address, self.device[b].address, 4 * N,
                                          COMPUTE_STREAM, to_host=True)),
            *((COPY_STREAM, issued) for issued in extra),
        ]  # fmt: skip
        issued = [part for _, part in parts]
        return Plannable(
            in_order([part.call for part in issued]), ("replay",), parts=tuple(issued),
            backend=backend, stream=COMPUTE_STREAM, streams=tuple(s for s, _ in parts),
        )  # fmt: skip

    def take(self, number: int = 2) -> float:
        """What landed in host memory `number`, which is cleared."""
        self.backend.synchronize()
        found = self.arrays[number].copy()
        self.arrays[number][:] = -1.0
        assert (found == found[0]).all()
        return float(found[0])


@pytest.fixture
def line(backend: CudaBackend) -> Iterator[Line]:
    made = Line(backend)
    yield made
    backend.synchronize()
    for memory in (*made.device, *made.host, made.one):
        memory.free()


def moved(before: Plannable, now: Plannable) -> list[int]:
    pairs = enumerate(zip(before.parts, now.parts, strict=True))
    return [i for i, (a, b) in pairs if a.addresses != b.addresses and a.block.pointers
            and a.same[0] not in ("cuEventRecord", "cuStreamWaitEvent")]  # fmt: skip


def test_changed_addresses_are_set_in_their_nodes_alone(backend, line):
    """Copies and kernels; queued launches run as they were; later updates of either kind hold."""
    before = line.work()
    graph = backend.capture(before)
    now = line.work(given=1, taken=3, b=2)
    assert len(moved(before, now)) == 3
    with hold(backend, COMPUTE_STREAM):
        graph.launch()
        assert graph.update(now, moved(before, now))
    assert line.take() == 11.0, "what was queued"
    assert (graph.nodes_set, graph.recaptured) == (1, 0), "by nodes, not by another capture"
    graph.launch()
    assert line.take(3) == 21.0 and line.take() == -1.0
    assert graph.update(before, None) and graph.recaptured == 1
    graph.launch()
    assert line.take() == 11.0
    line.arrays[1][:] = 40.0
    assert graph.update(now, moved(before, now)) and (graph.nodes_set, graph.recaptured) == (2, 1)
    graph.launch()
    assert line.take(3) == 41.0
    graph.destroy()


def test_another_topology_is_refused_and_launches_as_before(backend, line):
    graph = backend.capture(line.work())
    assert not graph.update(line.work(adds=3), None)
    graph.launch()
    assert line.take() == 11.0
    other = backend.capture(line.work(adds=3))
    other.launch()
    assert line.take() == 13.0
    assert other.update(line.work(given=1, adds=3), None)
    other.launch()
    assert line.take() == 23.0
    graph.destroy()
    other.destroy()


def test_what_cannot_be_captured_is_told_and_leaves_nothing(backend, line):
    sync = Issued(backend.sync_stream(COPY_STREAM), ("sync",))

    def fails() -> None:
        raise DeviceError("told to")

    for bad, reason in ((sync, "cuStreamSynchronize failed"), (Issued(fails, ("x",)), "told to")):
        with pytest.raises(
            DeviceError, match=f"its command 5 cannot be captured.*{reason}"
        ) as told:
            backend.capture(line.work(extra=[bad]))
        assert "\n" not in str(told.value)
        graph = backend.capture(line.work())
        graph.launch()
        assert line.take() == 11.0
        line.work().call()
        assert line.take() == 11.0
        graph.destroy()


def test_a_stream_that_ends_unjoined_is_joined(backend, line):
    """A copy on the other stream is the last part: what is behind the plan is behind it, too."""
    copy = backend.copy(
        line.host[3].address, line.device[0].address, 4 * N, COPY_STREAM, to_host=True
    )
    graph = backend.capture(line.work(extra=[copy]))
    line.arrays[3][:] = -1.0
    graph.launch()
    backend.sync_stream(COMPUTE_STREAM)()
    assert line.arrays[3][0] == 10.0
    graph.destroy()


def test_a_capture_while_other_work_runs(backend, line):
    """On the plan's own streams, too: it is queued work, not part of the capture."""
    with hold(backend, COMPUTE_STREAM), hold(backend, COPY_STREAM):
        line.work(taken=3).call()
        graph = backend.capture(line.work(adds=2))
        graph.launch()
    assert line.take() == 12.0 and line.take(3) == 11.0
    graph.destroy()


def test_a_twin_goes_to_its_own_addresses(backend, line):
    """A kernel and a copy have moved; the template stays. Twins are made while the device is held,
    as in a step."""
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


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_twins_and_their_plan_are_destroyed_in_any_order(backend, line, order):
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


def free_bytes(device: CudaBackend) -> int:
    error, free, _ = device._driver.api.cuMemGetInfo()
    assert not error
    return int(free)


@pytest.mark.alone
def test_hundred_graphs_and_twins_leak_nothing(backend, line):
    works = line.work(taken=2), line.work(taken=3, b=2)
    longer = line.work(adds=2)

    def cycle(i: int) -> None:
        graph = backend.capture(works[0])
        assert graph.update(works[1], moved(*works)) and graph.update(works[0], moved(*works))
        twin = graph.twin(works[1], moved(*works))
        assert twin is not None
        twin.launch()
        graph.launch()
        assert not graph.update(longer, None)
        (graph if i % 2 else twin).destroy()
        (twin if i % 2 else graph).launch()
        if i % 3:
            (twin if i % 2 else graph).destroy()

    for i in range(20):
        cycle(i)
    backend.synchronize()
    gc.collect()
    before = free_bytes(backend)
    for i in range(100):
        cycle(i)
    backend.synchronize()
    gc.collect()
    assert free_bytes(backend) >= before - (2 << 20)
    assert not [g for g in backend._graphs if g._executable is not None]
