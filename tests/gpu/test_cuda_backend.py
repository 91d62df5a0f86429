"""The cuda backend on a real GPU: its clock, errors, loading, and CUDA graphs with their twins.
What every device keeps is in test_cuda_conformance.py."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from tests.contract.conformance.conformance_rig import Rig, numbers
from tests.gates import hold
from tests.gpu.harness import fetched
from tests.planes import repacked
from workbench.backend.cuda.device import weights as cuda_weights
from workbench.backend.cuda.device.backend import CudaBackend, open_backend, probe
from workbench.backend.cuda.device.weights import ENTRY_BYTES, N_ENTRIES, Uploader
from workbench.backend.issue.bind import plannable
from workbench.backend.issue.issued import Issued
from workbench.common.errors import DeviceError
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import F16, F32, WEIGHT_DTYPES, DType, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import COMPUTE_STREAM, COPY_STREAM, Space

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

N = 4096


def test_marks_are_on_the_hosts_clock_and_reused(backend: CudaBackend):
    backend.synchronize()
    before = time.perf_counter_ns()
    begin = backend.mark(COMPUTE_STREAM)
    with hold(backend, COMPUTE_STREAM):
        end = backend.mark(COMPUTE_STREAM)
        time.sleep(0.02)
        opened = time.perf_counter_ns()
    backend.synchronize()
    after = time.perf_counter_ns()
    start_ns, end_ns = backend.resolve(begin, end)
    slack = 200_000
    assert before - slack < start_ns < opened < end_ns + slack
    assert end_ns < after + slack and end_ns - start_ns > 19e6
    for _ in range(3):
        marks = [backend.mark(COMPUTE_STREAM) for _ in range(10)]
        backend.synchronize()
        times = [backend.resolve(a, b) for a, b in pairwise(marks)]
        assert all(start <= end for start, end in times) and times == sorted(times)
        marks.clear()
    assert backend._marks.n_made < 40


def test_errors_say_what_failed(backend: CudaBackend):
    host, device = (backend.allocate(N, space) for space in (Space.PINNED, Space.DEVICE))
    w, x = Tensor("w", F32, (8, 8), Kind.WEIGHT), Tensor("x", F32, (0, 8))
    bad = backend.copy(64, host.address, N, COPY_STREAM, to_host=False)
    for call, words in (
        (lambda: backend.sync_stream(9), "stream 9 does not exist"),
        (lambda: backend.allocate(1 << 50, Space.DEVICE), "cannot allocate"),
        (lambda: open_backend(device=99), "GPU 99 does not exist"),
        (lambda: open_backend(pageable="late"), "no option pageable"),
        (lambda: backend.load_weight(w, np.zeros(60, np.uint8)), "wants 256 bytes, not 60"),
        (bad, "cuMemcpyHtoDAsync failed at copy of 4096 bytes.*VALUE"),
    ):
        with pytest.raises(DeviceError, match=words):
            call()
        backend.finish_loading()
    # and the device still works, also on nothing
    backend.copy(device.address, host.address, N, COPY_STREAM, to_host=False)()
    backend.copy(device.address, host.address, 0, COPY_STREAM, to_host=False)()
    backend.launch(make("mul_mat", "y", w, x), lambda t: 0, 0, 0)()
    backend.synchronize()
    assert probe() == backend.description


def weight(dtype: DType, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    tensor = Tensor(f"{dtype.name} {rows}", dtype, (rows, cols), Kind.WEIGHT)
    rng = np.random.default_rng([rows, cols, dtype.block_bytes])
    return tensor, rng.integers(0, 256, tensor.nbytes, np.uint8)


def test_all_types_through_a_ring_that_is_used_again(backend: CudaBackend, monkeypatch):
    """Entries of 64 KiB, filled hundreds of times: an entry filled too early would show. One block
    and odd numbers of them, all in one loading; every byte must be in its plane."""
    monkeypatch.setattr(cuda_weights, "ENTRY_BYTES", 64 << 10)
    monkeypatch.setattr(cuda_weights, "N_ENTRIES", 3)
    shapes = (1, 256), (3, 768), (1, 1024), (700, 1024), (63, 1024), (257, 256), (1500, 1024)
    weights = [weight(dtype, *shape) for shape in shapes for dtype in WEIGHT_DTYPES]
    memory = [backend.load_weight(*w) for w in weights]
    backend.finish_loading()
    for (tensor, data), there in zip(weights, memory, strict=True):
        found = fetched(backend, there.address, there.nbytes)
        assert np.array_equal(found, repacked(data, tensor.dtype)), tensor
        there.free()


def free_bytes(backend: CudaBackend) -> int:
    backend.synchronize()
    error, free, _ = backend._driver.api.cuMemGetInfo()
    assert not error
    return int(free)


def test_loading_holds_its_buffers_and_gives_them_back(backend: CudaBackend):
    first = backend.load_weight(*weight(F16, 8, 64))  # makes the streams
    backend.finish_loading()
    first.free()
    before = free_bytes(backend)
    tensor, data = weight(F32, 1 << 14, 4096)
    memory = backend.load_weight(tensor, data)
    assert before - free_bytes(backend) <= tensor.nbytes + N_ENTRIES * ENTRY_BYTES + (4 << 20)
    backend.finish_loading()
    memory.free()
    assert before - free_bytes(backend) <= 4 << 20
    assert not any(t.name.startswith("loading") for t in threading.enumerate())


def test_interrupted_loading_gives_the_gpu_back(backend, tiny_model, monkeypatch):
    load, n_loads = Uploader.load, []

    def interrupted(self: Uploader, tensor: Tensor, data: np.ndarray):
        n_loads.append(tensor.name)
        if len(n_loads) == 9:
            raise KeyboardInterrupt
        return load(self, tensor, data)

    def answer() -> np.ndarray:
        path = tiny_model("tiny-llama", "Q4_0")
        with Engine.load(path, device="cuda", n_ctx=64, toggles=Toggles()) as engine:
            return engine.step([1, 2, 3]).copy()

    whole, before = answer(), free_bytes(backend)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Uploader, "load", interrupted)
        answer()
    assert before - free_bytes(backend) <= 4 << 20
    assert not any(t.name.startswith("loading") for t in threading.enumerate())
    assert np.array_equal(answer(), whole)


TAKEN, ROW = [4], [3, 4]  # parts of a work that another `taken`, or `row`, has changed


class Line:
    """host `given` -> a row; row b = that + 1; host `taken` = b. The first copy is on a stream of
    its own."""

    def __init__(self) -> None:
        self.rig = rig = Rig(open_backend)
        self.backend: Any = rig.backend
        self.rows = [rig.device() for _ in range(3)]
        self.given = [rig.host(10.0), rig.host(20.0)]
        self.taken = [rig.host(-1.0) for _ in range(3)]

    def work(self, given=0, taken=0, row=1, adds=1, extra=()) -> Any:
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
        issued: Any = [list(each) for each in zip(*parts, strict=True)]
        return plannable(self.backend, issued[0], COMPUTE_STREAM, issued[1])

    def take(self, number: int = 0) -> float:
        """What landed in host memory `number`, which is cleared."""
        self.rig.settle()
        (found,) = set(numbers(self.taken[number]).tolist())
        numbers(self.taken[number])[:] = -1.0
        return found


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.rig.close()


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

    sync = line.backend.sync_stream(COPY_STREAM)
    for bad, reason in ((sync, "cuStreamSynchronize failed"), (fails, "told to")):
        with pytest.raises(DeviceError, match=f"its command 5 cannot be captured.*{reason}"):
            line.backend.capture(line.work(extra=[Issued(bad, ("x",))]))
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
    own = Line()
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
