"""What the embedded device costs: a push, a wait, an entry, a plan (`pytest --benchmark-enable`).

Every group runs with 1 and 2 workers. Kernels do nothing: only the device's own time is measured.
"""

from __future__ import annotations

import pytest
from numba import cfunc

from tests.gates import hold
from workbench.backend.cpu.device.embedded import open_backend
from workbench.backend.cpu.device.loops import KERNEL
from workbench.backend.issue.bind import plannable
from workbench.program.commands import Space

CHAIN = 1000


@cfunc(KERNEL, cache=True)
def nothing(args, part, n_parts):
    """No work at all."""


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n} workers")
def device(request):
    backend = open_backend(threads=request.param)
    yield backend
    backend.close()


def test_push(benchmark, device):
    """Host time of 1000 launches, device running beside it."""
    call = device.streams[0].prepare(nothing.address, 1, [0] * 8)

    def push() -> None:
        for _ in range(CHAIN):
            call()

    benchmark.group = f"push x {CHAIN}"
    benchmark.pedantic(push, setup=device.synchronize, rounds=200)
    assert device.streams[0].issued >= CHAIN


def test_launch_and_sync(benchmark, device):
    """One launch and the wait for it, while the workers are awake."""
    call, sync = device.streams[0].prepare(nothing.address, 1, [0] * 8), device.sync_stream(0)

    def step() -> None:
        call()
        sync()

    benchmark.group = "launch and sync"
    benchmark(step)
    assert device.streams[0].completed == device.streams[0].issued


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_chain(benchmark, device, parts):
    """1000 entries queued behind a gate, from opening it to the last one's end."""
    call = device.streams[0].prepare(nothing.address, parts, [0] * 8)

    def setup():
        gate = hold(device, 0)
        for _ in range(CHAIN):
            call()
        return (gate,), {}

    def run(gate) -> None:
        gate.open()
        device.synchronize()

    benchmark.group = f"chain x {CHAIN}"
    benchmark.pedantic(run, setup=setup, rounds=100)
    assert device.streams[0].completed == device.streams[0].issued


def chain_plan(device, streams: int):
    """The work of CHAIN kernels on one stream or two by turns, and a plan of it."""
    calls = [ring.prepare(nothing.address, 1, [0] * 8) for ring in device.streams[:streams]]
    on = [i % streams for i in range(CHAIN)]
    work = plannable(device, [calls[stream] for stream in on], 0, on)
    return work, device.capture(work)


@pytest.mark.parametrize("streams", [1, 2])
def test_plan_launch(benchmark, device, streams):
    """Host time of a launch of a plan of 1000 kernels."""
    _, plan = chain_plan(device, streams)
    benchmark.group = f"launch of a plan of {CHAIN}"
    benchmark.pedantic(plan.launch, setup=device.synchronize, rounds=200)
    assert plan.launches >= 1


@pytest.mark.parametrize("streams", [1, 2])
def test_plan_chain(benchmark, device, streams):
    """A plan of 1000 kernels, from its launch to the last one's end."""
    _, plan = chain_plan(device, streams)

    def replay() -> None:
        plan.launch()
        device.synchronize()

    benchmark.group = f"chain x {CHAIN}"
    benchmark.pedantic(replay, rounds=200)
    assert len(plan.spans()) == CHAIN


def test_plan_capture(benchmark, device):
    """Host time of the capture of 1000 kernels."""
    work, _ = chain_plan(device, 1)
    benchmark.group = f"capture x {CHAIN}"
    benchmark(device.capture, work)
    assert device.streams[0].issued == 0


def test_small_copy(benchmark, device):
    """An asynchronous copy of 4 KB to the device and the wait for it."""
    source, there = device.allocate(4096, Space.PINNED), device.allocate(4096, Space.DEVICE)
    copy = device.copy(there.address, source.address, 4096, 1, to_host=False)
    sync = device.sync_stream(1)

    def step() -> None:
        copy()
        sync()

    benchmark.group = "copy 4 KB and sync"
    benchmark(step)
    assert device.streams[1].completed == device.streams[1].issued
