"""Attention of many sequences with deep caches, alone: one command, for one GPU.

    python -m data.measure.attention [--widths 32] [--depth 8192] [--rounds N]

A repetition is the attention of a whole step: one token of each sequence, in every layer, each
sequence with cells of its own; and before it the launches that find masked cells for
`skip_masked_kv`. Launches are captured and replayed. The caches of LAYERS layers take turns;
together they are larger than the last cache of the device. The run folder is
`data/results/attention/cuda/`.

    full    every sequence sees all its cells: nothing can be skipped
    half    each sequence sees a random number of its cells; half of them in the mean

An arm has a value of `kv_parts` and a value of `skip_masked_kv`; the last arm is the first once
more. `result` has `read_gbps`, and by test the `bytes` that an attention launch must read and the
attention launches of a replay (`per_replay`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App

from data.measure.command import USUAL, Call, Options, Recording, numbers, start
from data.measure.recorded import Arms
from data.measure.tables import Folder, Line, Part
from workbench.backend.base import Backend, Issue, open_backend
from workbench.benchmarks.kernels.kernel_rigs import PDL, Repeats, rig_of
from workbench.benchmarks.runs import provenance
from workbench.benchmarks.times.gaps import CONTROL
from workbench.common.errors import UsageError
from workbench.common.progress import bar
from workbench.engine.cache.extent import WAYS, skip_masked
from workbench.graph import ops
from workbench.graph.attend import attend_by
from workbench.graph.ir import F16, F32, I32, Graph, Input, Kind, Node, StepShape, Tensor
from workbench.graph.ops import REGIONS
from workbench.model.synth.shapes import PRESETS
from workbench.program.commands import COMPUTE_STREAM, Space

MODELS = ("llama-3.2-1b", "llama-3-8b")
LAYERS, REPLAYS, RANDOM_BYTES = 4, 3, 16 << 20
MASKS, KINDS = ("full", "half"), ("parallel_blocks", "off", "stream_k")

app = App(help=__doc__, result_action="return_none")


class Shape(NamedTuple):
    """Attention of a model's layer: a token of each of `width` sequences over `depth` cells."""

    model: str
    width: int
    depth: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_layer: int

    def test(self, mask: str) -> str:
        return f"{self.model} b{self.width}@d{self.depth} {mask}"

    @property
    def cell_bytes(self) -> int:
        """K and V of a cell."""
        return 2 * 2 * self.n_head_kv * self.head_dim

    def lengths(self, mask: str, seed: int) -> np.ndarray:
        """How many cells each sequence sees, (width,) int64."""
        if mask == "full":
            return np.full(self.width, self.depth)
        return np.random.default_rng(seed).integers(1, self.depth + 1, self.width)


def step(shape: Shape, kv_parts: str, way: str) -> list[Node]:
    """The nodes of attention in LAYERS layers, after the nodes that find masked cells."""
    rows, cols = shape.width * shape.depth, shape.n_head_kv * shape.head_dim
    q = Input("q", F32, (shape.width, shape.n_head, shape.head_dim))
    mask = Input("mask", F16, (shape.width, shape.depth))
    regions = Input(REGIONS, I32, (shape.width, 2))
    nodes = [
        ops.make(
            "attention", f"attended-{i}", q,
            *(Tensor(f"{name}-{i}", F16, (rows, cols), Kind.CACHE) for name in "kv"),
            mask, regions, more=(REGIONS,), n_kv=shape.depth, n_head_kv=shape.n_head_kv,
            scale=shape.head_dim**-0.5, layer=i,
        )
        for i in range(LAYERS)
    ]  # fmt: skip
    sizes = StepShape(shape.width, shape.width, shape.depth, shape.width)
    graph = Graph(nodes, [q, mask, regions], [node.output for node in nodes], sizes)
    return skip_masked(attend_by(graph, "auto", kv_parts), way, "always").nodes


class Bench:
    """The memory of one shape, where sequences see as many cells as `mask` says, and launches."""

    def __init__(self, backend: Backend, shape: Shape, mask: str, seed: int):
        self._backend, self._shape = backend, shape
        self._memory: list[Any] = []
        self._at: dict[str, int] = {}  # by name: the ways to skip share caches and inputs
        rng, (width, depth) = np.random.default_rng(seed), (shape.width, shape.depth)
        self._fill("q", rng.standard_normal((width, shape.n_head, shape.head_dim), np.float32))
        table = np.stack([np.arange(width), np.arange(width) * depth], axis=1).astype(np.int32)
        self._fill(REGIONS, table)
        piece = rng.standard_normal(RANDOM_BYTES // 2, np.float32).astype(np.float16)
        for i, name in itertools.product(range(LAYERS), "kv"):
            self._fill(f"{name}-{i}", piece, width * depth * shape.cell_bytes // 2)
        seen = np.arange(depth) < shape.lengths(mask, seed)[:, None]
        self._fill("mask", np.where(seen, 0, -np.inf).astype(np.float16))

    def _allocate(self, nbytes: int) -> int:
        self._memory.append(self._backend.allocate(nbytes, Space.DEVICE))
        return self._memory[-1].address

    def _fill(self, name: str, values: np.ndarray, nbytes: int = 0) -> None:
        """Memory with these values, repeated up to nbytes."""
        whole = nbytes or values.nbytes
        self._at[name] = there = self._allocate(whole)
        staging = self._backend.allocate(min(values.nbytes, whole), Space.PINNED)
        assert staging.array is not None
        staging.array[:] = values.reshape(-1).view(np.uint8)[: staging.nbytes]
        for begin in range(0, whole, staging.nbytes):
            n = min(staging.nbytes, whole - begin)
            self._backend.copy(there + begin, staging.address, n, COMPUTE_STREAM, False)()
        self._backend.sync_stream(COMPUTE_STREAM)()
        staging.free()

    def issues(self, kv_parts: str, way: str, n_layers: int, programmatic: bool) -> list[Issue]:
        """The launches of a step of n_layers layers."""
        nodes, at = step(self._shape, kv_parts, way), dict[Tensor, int]()
        need = max(self._backend.scratch_bytes(node) for node in nodes)
        scratch = self._allocate(need) if need else 0
        for t in (t for node in nodes for t in (*node.inputs, *node.outputs)):
            if t not in at:
                at[t] = self._at[t.name] if t.name in self._at else self._allocate(t.nbytes)
        finding = [node for node in nodes if node.op != "attention"]
        attending = itertools.cycle([node for node in nodes if node.op == "attention"])
        return [
            self._backend.launch(node, at.__getitem__, scratch, COMPUTE_STREAM, programmatic)
            for node in (*finding, *itertools.islice(attending, n_layers))
        ]

    def free(self) -> None:
        self._backend.synchronize()
        for memory in self._memory:
            memory.free()


def measured(
    backend: Backend, recording: Recording, arms: dict[str, tuple[str, str]],
    shapes: Sequence[Shape], quick: bool,
) -> None:  # fmt: skip
    """Measures every test and arm of the recording's run."""
    rig, result, seed = rig_of(backend, quick), recording.result, recording.run["seed"]
    read_gbps = max(rig.read_rates().values())
    result |= {"read_gbps": read_gbps, "bytes": {}, "per_replay": {}, "void": rig.void(read_gbps)}
    for shape, mask in itertools.product(shapes, MASKS):
        test, n_layers = shape.test(mask), LAYERS if quick else shape.n_layer
        with bar("compiling kernels", len(arms), "arms") as left:
            backend.make_ready([n for arm in arms.values() for n in step(shape, *arm)], left)
        result["bytes"][test] = int(shape.lengths(mask, seed).sum()) * shape.cell_bytes
        result["per_replay"][test] = n_layers
        with ExitStack() as stack:
            bench, repeats = Bench(backend, shape, mask, seed), dict[str, Repeats]()
            stack.callback(bench.free)
            for name, (kind, way) in arms.items():
                issues = bench.issues(kind, way, n_layers, PDL in rig.kinds)
                repeats[name] = rig.repeats(issues)
                stack.callback(repeats[name].close)

            def one(
                round_: int, name: str, test: str = test, all_: dict[str, Repeats] = repeats
            ) -> None:
                us = all_[name].time_us(1 if quick else REPLAYS)
                recording.add(name, test, round_, np.array(us) * 1e3, np.ones(len(us)))

            recording.take(one)


@app.default
def main(
    *models: str,
    widths: str = "32",
    depth: int = 8192,
    rounds: int = 7,
    quick: bool = False,
    options: Options = USUAL,
) -> None:
    """Measures every shape, and prints the table.

    Parameters
    ----------
    models: presets; their heads and layers are taken.
    widths: numbers of sequences.
    depth: cells of each.
    rounds: how often each arm has its turn.
    quick: few launches and little memory; no figures.
    """
    sizes, names = numbers("--widths", widths), models or MODELS
    unknown = [name for name in names if name not in PRESETS]
    if unknown or min(*sizes, depth, rounds) < 1:
        raise UsageError(f"models are {', '.join(PRESETS)}; widths, depth and rounds 1 or more")
    shapes = [
        Shape(name, n, depth, p.n_head, p.n_head_kv, p.head_dim, p.n_layer)
        for name, n in itertools.product(names, sizes)
        for p in [PRESETS[name]]
    ]
    # the first of KINDS with each way, and the other kinds with the first way
    (first, *others), ways = KINDS, [str(way) for way in WAYS]
    pairs = [(first, way) for way in ways] + [(kind, ways[0]) for kind in others]
    arms = {f"{kind} {way}": (kind, way) for kind, way in pairs}
    arms |= {f"{first} {ways[0]}{CONTROL}": (first, ways[0])}
    call = Call(RUNS.name, options)
    folder = options.out or call.out / options.device

    def measure() -> None:
        with closing(open_backend(options.device)) as backend:
            about: dict[str, Any] = {"widths": sizes, "depth": depth}
            found = provenance.collect() | {
                "model": {"name": " ".join(names), "quant": "F16"},
                "engine": provenance.device(about, backend.name, "as asked", backend),
            }
            toggles = {
                name: {"kv_parts": kind, "skip_masked_kv": way}
                for name, (kind, way) in arms.items()
            }
            tests = [shape.test(mask) for shape in shapes for mask in MASKS]
            recording = Recording(RUNS.name, folder, found, toggles, tests, rounds)
            with recording.kept():
                measured(backend, recording, arms, shapes, quick)

    call.make(options.device, folder, measure, RUNS.shown)


class AttentionRun(Arms):
    """A run of kind `attention`, as read."""

    def about(self) -> str:
        return (
            f"read bandwidth {self.run['result']['read_gbps']:.0f} GB/s, "
            f"{self.run['repetitions']} rounds; *GB/s* counts K and V of the cells that are seen"
        )

    def lines(self) -> Iterator[Line]:
        """A line for each test and arm: us of a launch (the median of a round's replays), its share
        of the bandwidth, and its time over the first arm's."""
        result = self.run["result"]
        for test in self.run["tests"]:
            rows = self.samples[self.samples["test"] == test]
            table = rows.groupby(["repetition", "arm"])["ns"].median().unstack().dropna()
            us = (table / 1e3 / result["per_replay"][test]).median()
            shape, _, mask = test.rpartition(" ")
            for arm in (one["name"] for one in self.run["arms"]):
                took = float(us[arm])
                kv_parts, way, *control = arm.split(" ", 2)
                gbps = result["bytes"][test] / took / 1e3
                values: dict[str, Any] = {
                    "shape": shape, "mask": mask, "kv_parts": kv_parts,
                    "way": " ".join([way, *control]), "us": took, "gbps": gbps,
                    "share": 100 * gbps / result["read_gbps"], "times": took / us[self.names[0]],
                }  # fmt: skip
                yield Line(values, [self])


RUNS = Folder("attention", "Attention of many sequences", AttentionRun, {
    "shape": "{shape}", "mask": "{mask}", "kv_parts": "{kv_parts}", "skip_masked_kv": "{way}",
    "us a layer": "{us:.1f}", "GB/s": "{gbps:.0f}", "% of read": "{share:.0f}",
    "times the first": "{times:.3f}",
})  # fmt: skip
BLOCKS: dict[str, list[Part]] = {RUNS.name: [RUNS.table]}

if __name__ == "__main__":
    start(app)
