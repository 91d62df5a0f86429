"""Ordering through global memory, by repetition: a thousand times the same launches in changing
order and company, each time among poison, and each time the first bytes again.

Racecheck sees shared memory alone: not whether a last block reads the partial sums that others
wrote, nor whether a programmatic launch reads what the one before has not written yet, or writes
what that still reads. So launches follow each other with nothing between that would order them, on
two streams at once. On one every tensor has memory of its own, where a read too early finds poison.
On the other, tensors share an arena, where a write too early destroys what is still read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest

from tests.gpu.debug_arena import as_bytes
from tests.gpu.harness import Wanted, assert_counters_are_zero, attention, kernels_of, product
from tests.graphs import Decoder, values_for
from tests.ranges import meaningful
from workbench.backend.base import Issue, Memory
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.issue.issued import in_order
from workbench.common.sizes import round_up
from workbench.graph import arena
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import ALIGN, DTYPES, Graph, Kind, Node, StepShape, Tensor
from workbench.program.commands import Space

pytestmark = pytest.mark.gpu

REPETITIONS, BATCH = 1000, 20
POISONS = (0xFF, 0x7F)  # a NaN as float and as half
STREAMS = (0, 2)
N_KV = 256

# preset, weight type, type of V, tokens, fused
DECODERS = (
    ("tiny-llama", "Q4_0", "Q4_0", 1, True), ("tiny-llama", "Q4_0", "Q4_0", 1, False),
    ("tiny-qwen3", "Q4_K", "Q6_K", 3, True), ("tiny-llama-bias", "Q8_0", "Q8_0", 8, True),
    ("tiny-llama", "F16", "BF16", 1, True), ("tiny-qwen3", "MXFP4", "MXFP4", 12, True),
    ("tiny-llama", "Q5_K", "Q6_K", 33, True), ("tiny-llama", "Q4_0", "Q4_0", 100, True),
)  # fmt: skip
# weight type, rows, columns, tokens: warps, or blocks, share the columns
PRODUCTS = (
    ("Q4_0", 64, 8192, 1), ("F16", 7, 8200, 1), ("Q6_K", 33, 5120, 2), ("BF16", 130, 4100, 5),
    ("Q4_K", 35, 5120, 16), ("Q8_0", 130, 4096, 40), ("Q5_K", 33, 4096, 100),
)  # fmt: skip
# tokens, heads, heads of K and V, head_dim, cells: cells are shared by blocks
ATTENTION = ((1, 8, 2, 64, 2048), (8, 4, 2, 128, 1030), (2, 2, 1, 256, 700), (1, 32, 8, 128, 1500))


def graphs() -> Iterator[Graph]:
    for preset, name, v_name, tokens, fused in DECODERS:
        model = Decoder(preset, DTYPES[name], {"attn_v": DTYPES[v_name]})
        graph = model.graph(tokens, tokens, N_KV, n_cells=N_KV, deferred=fused)
        yield fuse(graph, FUSIONS if fused else ())
    for node in (*(product(*given) for given in PRODUCTS), *(attention(*of) for of in ATTENTION)):
        yield Graph([node], [], [node.output], StepShape(1, 1, N_KV))


def given(graph: Graph, rng: np.random.Generator) -> dict[Tensor, np.ndarray]:
    """Values of all that `graph` reads and does not make. Rows of the caches that it stores hold
    NaN: one that is read before it is stored shows."""
    made = {t.storage for node in graph.nodes for t in node.outputs if t.kind != Kind.CACHE}
    made |= {part.output.storage for node in graph.nodes for part in node.parts}
    values: dict[Tensor, np.ndarray] = {}
    for node in graph.nodes:
        for t, array in values_for(node, N_KV, rng).items():
            if t.kind == Kind.CACHE or t not in made:
                values.setdefault(t, array)
    by_name = {t.name: array for t, array in values.items() if t.kind == Kind.INPUT}
    for t, array in values.items():
        if t.name == "inp_out_ids":
            values[t] = np.arange(len(array), dtype=np.int32)
        if t.name.startswith("cache_"):
            array[by_name[f"attn_inp_{t.name[len('cache_')]}_idxs"]] = np.nan
    return values


class Rig(AbstractContextManager["Rig"]):
    """Every graph in place on one stream. In `work`: what graphs make, then their caches, as
    `before` has them at the start of each repetition. cases: launches, plain and programmatic."""

    def __init__(self, backend: CudaBackend, stream: int, apart: bool):
        self.backend, self.stream, self.apart = backend, stream, apart
        self._memory: list[Memory] = []
        rng = np.random.default_rng(stream)
        made = [(graph, given(graph, rng)) for graph in graphs()]
        layouts = [arena.layout(g.nodes, (), self._kept(g), backend.scratch_bytes) for g, _ in made]
        caches = [t for _, values in made for t in values if t.kind == Kind.CACHE]
        self.poisoned = sum(layout.nbytes for layout in layouts)
        self.nbytes = self.poisoned + sum(round_up(t.nbytes, ALIGN) for t in caches)
        self.used = np.zeros(self.nbytes, bool)  # bytes that are compared
        self.used[self.poisoned :] = True
        self.work, before = (self._allocate(self.nbytes).address for _ in range(2))
        self.before = before + self.poisoned
        log = self._allocate(self.nbytes * BATCH, Space.PINNED)
        assert log.array is not None
        self.log, self.logged = log.address, log.array.reshape(BATCH, self.nbytes)
        at, cache_at = 0, self.poisoned
        self.cases: list[tuple[Issue, ...]] = []
        for (graph, values), layout in zip(made, layouts, strict=True):
            addresses = {t: self.work + at + offset for t, offset in layout.offsets.items()}
            scratch = {n: self.work + at + offset for n, (offset, _) in layout.scratch.items()}
            for t in self._kept(graph):
                if t in layout.offsets:
                    first = at + layout.offsets[t]
                    self.used[first : first + t.nbytes] = meaningful(t)
            for t, array in values.items():
                if t.kind == Kind.WEIGHT:
                    self._memory.append(backend.load_weight(t, as_bytes(array)))
                    addresses[t] = self._memory[-1].address
                elif t.kind == Kind.CACHE:
                    addresses[t] = self.work + cache_at
                    self._upload(before + cache_at, array)
                    cache_at += round_up(t.nbytes, ALIGN)
                else:
                    addresses[t] = self._allocate(t.nbytes).address
                    self._upload(addresses[t], array)
            self.cases.append(self._case(graph.nodes, addresses, scratch))
            at += layout.nbytes
        backend.synchronize()

    def _kept(self, graph: Graph) -> list[Tensor]:
        outputs = [t for node in graph.nodes for t in node.outputs] if self.apart else graph.outputs
        return [t.storage for t in outputs]

    def _case(self, nodes: list[Node], addresses: dict, scratch: dict) -> tuple[Issue, ...]:
        backend, early = self.backend, self.backend.capabilities.programmatic
        assert not early or all(backend.begins_early(node) for node in nodes)

        def issue(node: Node, way: bool) -> Issue:
            need = scratch.get(node, 0)
            return backend.launch(node, lambda t: addresses[t.storage], need, self.stream, way)

        return tuple(in_order([issue(node, way) for node in nodes]) for way in (False, early))

    def _allocate(self, nbytes: int, space: Space = Space.DEVICE) -> Memory:
        self._memory.append(self.backend.allocate(nbytes, space))
        return self._memory[-1]

    def _upload(self, address: int, array: np.ndarray) -> None:
        raw = as_bytes(array)
        self.backend.copy(address, raw.ctypes.data, raw.nbytes, self.stream, to_host=False)()
        self.sync()

    def sync(self) -> None:
        self.backend.sync_stream(self.stream)()

    def run(self, byte: int, issues: Iterable[Issue], entry: int = 0) -> None:
        """Queues poison over everything the graphs make, and the caches as they were; launches; and
        a copy of all the results to entry `entry` of the log."""
        call, there = self.backend._driver.call, self.backend._stream(self.stream)
        call("cuMemsetD8Async", "poison", self.work, byte, self.poisoned, there)
        nbytes, caches = self.nbytes - self.poisoned, self.work + self.poisoned
        call("cuMemcpyDtoDAsync", "caches", caches, self.before, nbytes, there)
        for issue in issues:
            issue()
        log = self.log + entry * self.nbytes
        self.backend.copy(log, self.work, self.nbytes, self.stream, to_host=True)()

    def alone(self, byte: int) -> np.ndarray:
        """The results of every graph launched plainly among poison, waited for one by one."""
        self.run(byte, [issue for plain, _ in self.cases for issue in (plain, self.sync)])
        self.sync()
        return self.logged[0].copy()

    def __exit__(self, *error: object) -> None:
        self.backend.synchronize()
        for memory in self._memory:
            memory.free()


def kernels(sm: int) -> Wanted:
    return kernels_of((node for graph in graphs() for node in graph.nodes), sm)


def test_a_thousand_repetitions_give_the_first_bytes(backend: CudaBackend):
    rng = np.random.default_rng(1)
    with Rig(backend, STREAMS[0], apart=True) as one, Rig(backend, STREAMS[1], apart=False) as two:
        wanted = {rig: rig.alone(POISONS[0]) for rig in (one, two)}
        for rig, first in wanted.items():
            other = rig.alone(POISONS[1])
            assert np.array_equal(other[rig.used], first[rig.used]), "depends on the poison"
        for start in range(0, REPETITIONS, BATCH):
            for entry, rig in itertools.product(range(BATCH), wanted):
                order = rng.permutation(len(rig.cases))
                rig.run(POISONS[entry % 2], (rig.cases[i][1] for i in order), entry)
            for rig, first in wanted.items():
                rig.sync()
                bad = [i for i in range(BATCH) if ((rig.logged[i] != first) & rig.used).any()]
                assert not bad, f"repetitions {start} + {bad} on stream {rig.stream} differ"
    for stream in STREAMS:
        assert_counters_are_zero(backend, stream)
