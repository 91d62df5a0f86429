"""CUDA graphs and their twins: changed addresses are set in their nodes, what cannot be captured is
told, and everything goes without a trace. What every device's plans do is in
test_cuda_conformance.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from tests.gates import hold
from tests.gpu.harness import free_bytes
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
        self.host = [backend.allocate(4 * N, Space.PINNED) for _ in range(5)]
        self.arrays = [memory.array.view(np.float32) for memory in self.host]  # type: ignore[union-attr]
        for array, value in zip(self.arrays, (10.0, 20.0, 30.0, 40.0, 1.0), strict=True):
            array[:] = value
        self.up(3, 4, 0).call()
        backend.synchronize()

    def up(self, device: int, host: int, stream: int) -> Issued:
        ends = self.device[device].address, self.host[host].address
        return self.backend.copy(*ends, 4 * N, stream, to_host=False)

    def down(self, host: int, device: int, stream: int) -> Issued:
        ends = self.host[host].address, self.device[device].address
        return self.backend.copy(*ends, 4 * N, stream, to_host=True)

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
            (COPY_STREAM, self.up(0, given, COPY_STREAM)),
            (COPY_STREAM, backend.record(event, COPY_STREAM)),
            (COMPUTE_STREAM, backend.wait(event, COMPUTE_STREAM)),
            (COMPUTE_STREAM, launch(first)),
            *((COMPUTE_STREAM, launch(more)) for _ in range(adds - 1)),
            (COMPUTE_STREAM, self.down(taken, b, COMPUTE_STREAM)),
            *((COPY_STREAM, issued) for issued in extra),
        ]
        streams, issued = zip(*parts, strict=True)
        calls = in_order([part.call for part in issued])
        return Plannable(
            calls, ("replay",), parts=issued, backend=backend, stream=COMPUTE_STREAM,
            streams=streams,
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
    for memory in (*made.device, *made.host):
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


def test_what_cannot_be_captured_is_told_and_leaves_nothing(backend, line):
    def fails() -> None:
        raise DeviceError("told to")

    sync = Issued(backend.sync_stream(COPY_STREAM), ("sync",))
    for bad, reason in ((sync, "cuStreamSynchronize failed"), (Issued(fails, ("x",)), "told to")):
        says = f"its command 5 cannot be captured.*{reason}"
        with pytest.raises(DeviceError, match=says):
            backend.capture(line.work(extra=[bad]))
        graph = backend.capture(line.work())
        for call in (graph.launch, line.work().call):
            call()
            assert line.take() == 11.0
        graph.destroy()


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
        made = [graph, graph.twin(works[1], moved(*works))]
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
def test_hundred_graphs_and_twins_leak_nothing(backend, line):
    works, longer = (line.work(taken=2), line.work(taken=3, b=2)), line.work(adds=2)

    def cycle(i: int) -> None:
        graph = backend.capture(works[0])
        assert graph.update(works[1], moved(*works)) and graph.update(works[0], moved(*works))
        pair = [graph.twin(works[1], moved(*works)), graph]
        for one in pair:
            one.launch()
        assert not graph.update(longer, None)
        pair.pop(i % 2).destroy()
        pair[0].launch()
        if i % 3:
            pair[0].destroy()

    def left(first: int, last: int) -> int:
        for i in range(first, last):
            cycle(i)
        backend.synchronize()
        gc.collect()
        return free_bytes(backend)

    before = left(0, 20)
    assert left(20, 120) >= before - (2 << 20)
    assert not [g for g in backend._graphs if g._executable is not None]
