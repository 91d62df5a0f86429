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


@pytest.fixture
def timed(benchmark, device):
    """Times what is given, in a row, and tells whether the device has done all that was issued."""

    def run(group: str, *calls, setup=None, rounds: int = 200) -> bool:
        def work(*given) -> None:
            for call in calls:
                call(*given)

        benchmark.group = group
        benchmark.pedantic(work, setup=setup, rounds=rounds)
        device.synchronize()
        return all(stream.completed == stream.issued for stream in device.streams)

    return run


def launch(device, parts: int = 1):
    return device.streams[0].prepare(nothing.address, parts, [0] * 8)


def test_push(timed, device):
    """Host time of 1000 launches, device running beside it."""
    assert timed(f"push x {CHAIN}", *[launch(device)] * CHAIN, setup=device.synchronize)
    assert device.streams[0].issued >= CHAIN


def test_launch_and_sync(timed, device):
    assert timed("launch and sync", launch(device), device.sync_stream(0), rounds=2000)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_chain(timed, device, parts):
    """1000 entries queued at a gate, from opening it to the last one's end."""
    call = launch(device, parts)

    def setup():
        gate = hold(device, 0)
        for _ in range(CHAIN):
            call()
        return (gate,), {}

    def opened(gate) -> None:
        gate.open()
        device.synchronize()

    assert timed(f"chain x {CHAIN}", opened, setup=setup, rounds=100)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("what", ["capture", "launch", "chain"])
def test_plan(timed, device, what, streams):
    """A plan of CHAIN kernels on one stream or two by turns: its capture, its launch, and the time
    from there to the last one's end."""
    calls = [ring.prepare(nothing.address, 1, [0] * 8) for ring in device.streams[:streams]]
    on = [i % streams for i in range(CHAIN)]
    work = plannable(device, [calls[stream] for stream in on], 0, on)
    plan = device.capture(work)
    if what == "capture":
        assert timed(f"capture x {CHAIN}", lambda: device.capture(work), rounds=50)
        assert device.streams[0].issued == 0
    elif what == "launch":
        assert timed(f"launch of a plan of {CHAIN}", plan.launch, setup=device.synchronize)
    else:
        assert timed(f"chain x {CHAIN}", plan.launch, device.synchronize)
        assert len(plan.spans()) == CHAIN


def test_small_copy(timed, device):
    """An asynchronous copy of 4 KB to the device and the wait for it."""
    source, there = device.allocate(4096, Space.PINNED), device.allocate(4096, Space.DEVICE)
    copy = device.copy(there.address, source.address, 4096, 1, to_host=False)
    assert timed("copy 4 KB and sync", copy, device.sync_stream(1), rounds=2000)
