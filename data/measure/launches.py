"""What launches and plain reading cost, for data/results: DEVICE-launches.json.

An empty kernel with 2 blocks for each of 132 multiprocessors is timed in a stream and in a graph,
launched plainly and programmatically. For the weights of every product of an 8B model, the fastest
of several reading kernels is timed. It is the most that a plainly launched kernel can reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from data.measure.matrix import Row
from data.measure.session import Session, memory
from tests.gates import hold
from workbench.backend.base import Issue, open_backend
from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.benchmarks.kernels.kernel_cases import SHAPES, TYPES
from workbench.benchmarks.kernels.kernel_rigs import PDL, PLAIN, rotating_bytes
from workbench.benchmarks.runs import provenance
from workbench.program.commands import COMPUTE_STREAM, Space

EMPTY_BLOCKS, EMPTY_THREADS = 264, 256
IN_GRAPH, IN_STREAM = 200, 400  # launches; a stream holds no more than a thousand
TILES = "tiles"
READ_GRIDS = ("x8", "x16", TILES)  # blocks for each multiprocessor, or one for each tile
LEAST_READS = 20  # launches of one replay, at least


def launches(session: Session, _: None, rows: list[Row]) -> None:
    """Writes DEVICE-launches.json; on a GPU alone."""
    if session.device != "cuda":
        print("launches: a GPU alone can tell; left out", flush=True)
        return
    with closing[Any](open_backend("cuda")) as backend:
        early = (PLAIN, PDL) if backend.capabilities.programmatic else (PLAIN,)
        empty = {kind: _empty(backend, kind == PDL) for kind in early}
        every, sizes = range(2 if session.quick else 9), product_sizes()
        found: dict[str, Any] = {"device_description": backend.description}
        found |= {**session.rates(backend), "quick": session.quick}
        found |= {"blocks": EMPTY_BLOCKS, "threads": EMPTY_THREADS, "stream_us": {}, "graph_us": {}}
        for k, issue in empty.items():
            found["stream_us"][k] = spread(_queued_us(backend, issue) for _ in every)
        for k, issue in empty.items():
            found["graph_us"][k] = spread(_replayed_us(backend, issue, len(every)))
        found["reads"] = fastest_reads(
            backend, sizes[: 2 if session.quick else None], session.quick
        )
    session.write(rows[0], provenance.collect() | found)
    said = (f"{where} {found[f'{where}_us'][k]['median']:.2f} {k}"
            for where in ("stream", "graph") for k in early)  # fmt: skip
    print(f"launches: us: {', '.join(said)}", flush=True)


def _empty(backend: Any, programmatic: bool) -> Issue:
    kernel = Kernel("device", "nothing", (EMPTY_BLOCKS, 1), EMPTY_THREADS, [0], waits=True)
    stream = backend._stream(COMPUTE_STREAM)
    return backend._prepare(kernel, stream, "an empty kernel", programmatic)


def graph_us(backend: Any, kind: str) -> float:
    """The median us of an empty kernel in a graph. kind: PLAIN or PDL."""
    return float(np.median(_replayed_us(backend, _empty(backend, kind == PDL), 9)))


def _queued_us(backend: Any, issue: Issue) -> float:
    """us of a launch, the mean of IN_STREAM launches. The stream is held until all of them are
    queued, so the host delays none."""
    begin, end = (backend._driver.event(timing=True) for _ in range(2))
    with hold(backend, COMPUTE_STREAM):
        backend.record(begin, COMPUTE_STREAM)()
        for _ in range(IN_STREAM):
            issue()
        backend.record(end, COMPUTE_STREAM)()
    backend.synchronize()
    call = backend._driver.call
    return call("cuEventElapsedTime", "launches", begin.handle, end.handle) * 1e3 / IN_STREAM


def _replayed_us(backend: Any, issue: Issue, n: int) -> list[float]:
    from workbench.backend.cuda.device.replay import TimedReplay

    with TimedReplay(backend, [issue] * IN_GRAPH) as replay:
        return [us / IN_GRAPH for us in replay.time_us(n)]


def product_sizes() -> list[int]:
    """Bytes that the launches of `bench-kernels` read for an 8B model, of every type and shape."""
    found = set[int]()
    for shape in (shape for name, shape in SHAPES.items() if name.startswith("8b.")):
        for rows in shape.rows if shape.how == "product" else (sum(shape.rows),):
            found |= {rows * dtype.row_bytes(shape.cols) for dtype in TYPES}
    return sorted(found)


def reading(label: str, at: int, nbytes: int, sink: int, n_sm: int) -> Kernel:
    """The reading kernel that a label of `fastest_reads` names, on `nbytes` bytes at address `at`.
    sink: address of 4 bytes that it may write.
    n_sm: multiprocessors of the device.
    """
    from workbench.backend.cuda.device.replay import READ_THREADS, WORD_BYTES

    name, grid = label.split()
    words = nbytes // WORD_BYTES
    tiles = blocks(words, READ_THREADS * int(name.removeprefix("read_")))
    wanted = tiles if grid == TILES else int(grid.removeprefix("x")) * n_sm
    return Kernel("read", name, (min(wanted, tiles), 1), READ_THREADS, [at, words, -1, sink])


def fastest_reads(backend: Any, sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """For every size in bytes the quickest reading kernel and its us, launched plainly on memory
    that is never cached. A label names kernel and grid: `read_8 x16` has 16 blocks for each
    multiprocessor, `read_8 tiles` a block for each tile."""
    from workbench.backend.cuda.device.replay import READ_WORDS, TimedReplay, l2_bytes

    n_sm = backend._driver.properties["multiProcessorCount"]
    room = max(rotating_bytes(l2_bytes(backend), quick), *sizes)
    stream, found = backend._stream(COMPUTE_STREAM), []
    with memory(backend, (room, Space.DEVICE), (4, Space.DEVICE)) as (weights, sink):
        for nbytes in sizes:
            apart, every = blocks(nbytes, 256) * 256, list[dict[str, Any]]()
            starts = [weights.address + i * apart for i in range(max(weights.nbytes // apart, 1))]
            for words, grid in itertools.product(READ_WORDS, READ_GRIDS):
                label = f"read_{words} {grid}"
                kernels = [reading(label, at, nbytes, sink.address, n_sm) for at in starts]
                issues = [backend._prepare(kernel, stream, label) for kernel in kernels]
                chain = issues * max(blocks(LEAST_READS, len(issues)), 1)
                with TimedReplay(backend, chain) as replay:
                    us = spread(each / len(chain) for each in replay.time_us(2 if quick else 5))
                every.append({"bytes": nbytes, "kernel": label, "us": us})
            found.append(min(every, key=lambda one: one["us"]["median"]))
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least, most and number of some times."""
    of = np.array(list(values), float)
    found = {"median": np.median(of), "min": of.min(), "max": of.max()}
    return {name: round(float(us), 3) for name, us in found.items()} | {"n": len(of)}
