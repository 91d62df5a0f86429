"""CUDA graphs and their twins: changed addresses are set in their nodes, what cannot be captured is
told, and everything goes without a trace. What every device's plans do is in
test_cuda_conformance.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest

from tests.contract.conformance.conformance_rig import Rig, numbers
from tests.gates import hold
from tests.gpu.harness import free_bytes
from workbench.backend.cuda.device.backend import open_backend
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued, Plannable
from workbench.common.errors import DeviceError
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM

pytestmark = pytest.mark.gpu

TAKEN, ROW = [4], [3, 4]  # parts of a work that another `taken`, or `row`, has changed


class Line:
    """host `given` -> a row; row b = that + 1; host `taken` = b. The first copy is on a stream of
    its own."""

    def __init__(self, rig: Rig):
        self.rig = rig
        self.backend: Any = rig.backend
        self.rows = [rig.device() for _ in range(3)]
        self.given, self.taken = (
            [rig.host(value) for value in values] for values in ((10.0, 20.0), (-1.0,) * 3)
        )

    def work(
        self, given: int = 0, taken: int = 0, row: int = 1, adds: int = 1, extra: Sequence = ()
    ) -> Plannable:
        rig, event, b = self.rig, self.backend.event(), self.rows[row]
        parts = [
            (rig.up(self.rows[0], self.given[given], COPY_STREAM), COPY_STREAM),
            (self.backend.record(event, COPY_STREAM), COPY_STREAM),
            (self.backend.wait(event, COMPUTE_STREAM), COMPUTE_STREAM),
            (rig.launch(b, self.rows[0], COMPUTE_STREAM), COMPUTE_STREAM),
            *((rig.launch(b, b, COMPUTE_STREAM), COMPUTE_STREAM) for _ in range(adds - 1)),
            (rig.down(self.taken[taken], b, COMPUTE_STREAM), COMPUTE_STREAM),
            *((issued, COPY_STREAM) for issued in extra),
        ]
        issued, streams = zip(*parts, strict=True)
        return plannable(self.backend, list(issued), COMPUTE_STREAM, list(streams))

    def take(self, number: int = 0) -> float:
        """What landed in host memory `number`, which is cleared."""
        self.rig.settle()
        found = numbers(self.taken[number]).copy()
        numbers(self.taken[number])[:] = -1.0
        assert (found == found[0]).all()
        return float(found[0])


@pytest.fixture
def line() -> Iterator[Line]:
    rig = Rig(open_backend)
    yield Line(rig)
    rig.close()


def test_changed_addresses_are_set_in_their_nodes_alone(line):
    """Copies and kernels; queued launches run as they were; later updates of either kind hold."""
    before, now = line.work(), line.work(given=1, taken=1, row=2)
    graph = line.backend.capture(before)
    with hold(line.backend, COMPUTE_STREAM):
        graph.launch()
        assert graph.update(now, [0, *ROW])
    assert line.take() == 11.0, "what was queued"
    assert (graph.nodes_set, graph.recaptured) == (1, 0), "by nodes, not by another capture"
    graph.launch()
    assert line.take(1) == 21.0 and line.take() == -1.0
    assert graph.update(before, None) and graph.recaptured == 1
    graph.launch()
    assert line.take() == 11.0
    assert graph.update(now, [0, *ROW]) and (graph.nodes_set, graph.recaptured) == (2, 1)
    graph.launch()
    assert line.take(1) == 21.0


def test_what_cannot_be_captured_is_told_and_leaves_nothing(line):
    def fails() -> None:
        raise DeviceError("told to")

    sync = Issued(line.backend.sync_stream(COPY_STREAM), ("sync",))
    for bad, reason in ((sync, "cuStreamSynchronize failed"), (Issued(fails, ("x",)), "told to")):
        says = f"its command 5 cannot be captured.*{reason}"
        with pytest.raises(DeviceError, match=says):
            line.backend.capture(line.work(extra=[bad]))
        for call in (line.backend.capture(line.work()).launch, line.work().call):
            call()
            assert line.take() == 11.0


def test_twins_and_their_plan_are_destroyed_in_any_order(line):
    """While their launches are queued, which run. Twins are made while the device is held, as in a
    step, of a plan and of its twin."""
    works = [line.work(), line.work(taken=1, row=2), line.work(taken=2, row=2)]
    for order in permutations(range(3)):
        made = [line.backend.capture(works[0])]
        with hold(line.backend, COMPUTE_STREAM):
            for work, changed in zip(works[1:], (ROW, TAKEN), strict=True):
                made.append(made[-1].twin(work, changed))
                assert made[-1].nodes == made[0].nodes and made[-1].edges() == made[0].edges()
                assert made[-1].instantiate_ns > 0 == made[-1].capture_ns
            for graph in made:
                graph.launch()
            for which in order:
                made[which].destroy()
                with pytest.raises(DeviceError, match="was destroyed and cannot have a twin"):
                    made[which].twin(works[0], [])
        assert [line.take(taken) for taken in range(3)] == [11.0] * 3


@pytest.mark.parametrize("first", [0, 1, None])
def test_a_backend_is_closed_before_its_graphs_go(first):
    """A plan or its twin before, the rest after."""
    own = Line(Rig(open_backend))
    graph = own.backend.capture(own.work())
    made = [graph, graph.twin(own.work(taken=1), TAKEN)]
    for one in made:
        one.launch()
    if first is not None:
        made[first].destroy()
    own.rig.close()
    for one in made:
        one.destroy()
        with pytest.raises(DeviceError, match="destroyed"):
            one.launch()


@pytest.mark.alone
def test_hundred_graphs_and_twins_leak_nothing(line):
    first, second, longer = line.work(), line.work(taken=1, row=2), line.work(adds=2)

    def cycle(i: int) -> None:
        graph = line.backend.capture(first)
        assert graph.update(second, ROW) and graph.update(first, ROW)
        pair = [graph.twin(second, ROW), graph]
        for one in pair:
            one.launch()
        assert not graph.update(longer, None)
        pair.pop(i % 2).destroy()
        pair[0].launch()
        if i % 3:
            pair[0].destroy()

    def left(n: int) -> int:
        for i in range(n):
            cycle(i)
        line.backend.synchronize()
        gc.collect()
        return free_bytes(line.backend)

    before = left(20)
    assert left(100) >= before - (2 << 20)
    assert not [g for g in line.backend._graphs if g._executable is not None]
