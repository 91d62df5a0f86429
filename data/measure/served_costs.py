"""What a device can do at most in a step of several sequences, measured in the run's own process.

read_gbps      the fastest of several reading kernels (`session.rates`)
to_host_gbps   a copy of COPIED bytes from the device to page-locked memory, the fastest of some
launch_us      a launch of an empty kernel in a graph, as the run's toggles launch; 0 where a
               device has no graphs
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import workbench as wb
from data.measure.launches import graph_us
from workbench.bench.kernel_rigs import PDL, PLAIN, rig_of
from workbench.engine.batch import Batch, Work
from workbench.engine.watch import PLAIN as NOBODY
from workbench.engine.watch import Watch
from workbench.program.commands import COMPUTE_STREAM, Launch, Program, Space

COPIED, TIMES = 64 << 20, 9
GB = 1e9


def device_rates(engine: wb.Engine, quick: bool = False) -> dict[str, float]:
    """The figures of the docstring above, of an engine's device and toggles."""
    backend: Any = engine.backend
    found = {
        "read_gbps": max(rig_of(backend, quick).read_rates().values()),
        "to_host_gbps": to_host_gbps(backend, COPIED // 64 if quick else COPIED),
        "launch_us": 0.0,
    }
    if backend.name == "cuda":
        found["launch_us"] = graph_us(backend, PDL if engine.toggles.pdl == "on" else PLAIN)
    return found


def to_host_gbps(backend: Any, nbytes: int) -> float:
    """GB/s of the fastest of TIMES copies to page-locked memory, each to its end."""
    source, target = backend.allocate(nbytes, Space.DEVICE), backend.allocate(nbytes, Space.PINNED)
    try:
        copy = backend.copy(target.address, source.address, nbytes, COMPUTE_STREAM, True)
        took = []
        for _ in range(TIMES):
            backend.synchronize()
            begin = time.perf_counter_ns()
            copy()
            backend.synchronize()
            took.append(time.perf_counter_ns() - begin)
    finally:
        backend.synchronize()
        source.free()
        target.free()
    return nbytes / min(took)


class StepLaunches(Watch):
    """Counts the launches of the steps that it is told of."""

    looks_at_batches = True

    def __init__(self) -> None:
        self.n: list[int] = []

    def batch(self, batch: Batch, program: Program) -> None:
        self.n.append(len([c for c in program.singly() if isinstance(c, Launch)]))


def launches_of(engine: wb.Engine, works: Sequence[Work]) -> list[int]:
    """How many launches the engine issues for each of some steps, which it computes."""
    counting = StepLaunches()
    engine.look(None, counting)
    try:
        for work in works:
            engine.submit(work).wait()
    finally:
        engine.look(None, NOBODY)
    return counting.n
