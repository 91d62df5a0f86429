"""Attention on the cuda backend against float64, against its slow twin, and against itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tests.gpu.harness import Compute, Wanted, compile_side_by_side, distance
from tests.gpu.twins import attention as twin
from tests.planes import activation_planes
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import attention as ca
from workbench.backend.cuda.kernels.attention import AttentionAt
from workbench.backend.cuda.kernels.attention import AttentionShape as Shape
from workbench.backend.cuda.kernels.kernel import Kernel, Work, blocks
from workbench.graph.ir import F16, F32, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import Space

pytestmark = pytest.mark.gpu

# Queries and weights are rounded to halves: at most 2^-11 of each. The errors of weights average
# out over the cells, and so do those of a query over the columns, unless one cell or one column is
# all there is: then a result is off by two roundings, 2^-10.
TOLERANCE = 2**-10
SIMPLE_TOLERANCE = 5e-6  # float throughout, rescaled at every 32 cells
NOWHERE = AttentionAt(*(0,) * 7)
POISONS = (0xFF, 0x7F)  # NaN as float; a float that is finite and huge


class Case:
    """Inputs: a causal mask with holes; the last of several tokens sees nothing, and cells that
    nobody sees hold NaN. k and v have 3 cells more than n_kv, NaN too."""

    def __init__(self, shape: Shape):
        self.shape = shape
        tokens, heads, heads_kv, head_dim, n_kv = shape[:5]
        rng = np.random.default_rng(zlib.crc32(repr(tuple(shape)).encode()))
        self.scale = float(np.float32(head_dim**-0.5))
        self.q = rng.standard_normal((tokens, heads, head_dim), np.float32)
        size = n_kv + 3, heads_kv * head_dim
        self.k, self.v = (rng.standard_normal(size, np.float32).astype(np.float16) for _ in "kv")
        self.mask = np.full((tokens, n_kv), -np.inf, np.float16)
        live = max(1, n_kv - 5)
        for t in range(tokens):
            self.mask[t, : max(1, live - tokens + t + 1)] = 0
        self.mask[:, rng.random(n_kv) < 0.1] = -np.inf
        self.mask[:, 0] = 0
        if tokens > 1:
            self.mask[-1] = -np.inf
        unseen = np.append(np.isinf(self.mask).all(axis=0), [True] * 3)
        self.k[unseen] = self.v[unseen] = np.nan

    def expected(self) -> np.ndarray:
        """The op table's attention in float64, (tokens, heads, head_dim); a row of -inf: zeros."""
        _, heads, heads_kv, head_dim, n_kv = self.shape[:5]
        group = heads // heads_kv
        k, v = (
            np.nan_to_num(a[:n_kv].astype(np.float64)).reshape(n_kv, heads_kv, head_dim)
            for a in (self.k, self.v)
        )
        out = np.zeros(self.q.shape)
        for h in range(heads):
            scores = self.q[:, h].astype(np.float64) @ k[:, h // group].T * self.scale + self.mask
            most = scores.max(axis=1, keepdims=True)
            p = np.exp(scores - np.where(np.isfinite(most), most, 0))
            total = p.sum(axis=1, keepdims=True)
            p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
            out[:, h] = p @ v[:, h // group]
        return out


# as the engine launches it ------------------------------------------------------------------------


def node_distance(compute: Compute, shape: Shape) -> float:
    """Of the node's result from float64; every guard of `compute` holds."""
    case = Case(shape)
    cache = [Tensor(n, F16, a.shape, Kind.CACHE) for n, a in (("k", case.k), ("v", case.v))]
    node = make(
        "attention", "y", Tensor("q", F32, case.q.shape), *cache,
        Tensor("m", F16, case.mask.shape),
        n_kv=case.shape.n_kv, n_head_kv=case.shape.n_head_kv, scale=case.scale,
    )  # fmt: skip
    arrays = (case.q, case.k, case.v, case.mask)
    found = compute(node, dict(zip(node.inputs, arrays, strict=True))).view(np.float32)
    if case.shape.n_tokens > 1:
        assert not found.reshape(case.shape.n_tokens, -1)[-1].any(), "a row that sees nothing"
    return distance(found, case.expected())


HEAD_DIMS = (8, 32, 40, 48, 64, 80, 96, 128, 192, 256)
TOKENS = (1, 2, 8, 9, 17, 40)
LENGTHS = (1, 31, 256, 257, 300, 1024, 5000, 20000)
GROUPS = ((1, 1), (8, 8), (32, 8), (15, 5), (14, 2))


SIZES = [
    *(Shape(t, 4, 2, d, 96) for t in TOKENS for d in HEAD_DIMS),
    *(Shape(t, 8, 2, 64, n) for t in (1, 3, 12) for n in LENGTHS),
    *(Shape(t, *g, 128, 320) for t in (1, 4, 5, 6, 7, 33, 100) for g in GROUPS),
]


@pytest.mark.parametrize("tokens", sorted({size.n_tokens for size in SIZES}))
def test_heads_lengths_and_groups(compute: Compute, tokens: int):
    for size in SIZES:
        if size.n_tokens == tokens:
            assert node_distance(compute, size) < TOLERANCE, size


# launched by hand ---------------------------------------------------------------------------------


class Device:
    """Arrays on the device, given back together, and kernels on stream 0."""

    def __init__(self, backend: CudaBackend):
        self.backend = backend
        self.held: list = []
        self.counters = self.put(np.zeros(ca.BLOCKS, np.uint32))

    def room(self, nbytes: int) -> int:
        self.held.append(self.backend.allocate(max(nbytes, 16), Space.DEVICE))
        return self.held[-1].address

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.room(array.nbytes)
        self.backend.copy(address, array.ctypes.data, array.nbytes, 0, to_host=False)()
        self.backend.sync_stream(0)()
        return address

    def get(self, address: int, nbytes: int) -> np.ndarray:
        found = np.empty(nbytes, np.uint8)
        self.backend.copy(found.ctypes.data, address, nbytes, 0, to_host=True)()
        self.backend.sync_stream(0)()
        return found

    def issues(self, works: Sequence[Work], early: bool = False) -> list[Callable[[], None]]:
        stream = self.backend._stream(0)
        return [self.backend._prepare(work, stream, "attention", early) for work in works]

    def run(self, works: Sequence[Work]) -> None:
        for issue in self.issues(works):
            issue()
        self.backend.sync_stream(0)()
        assert not self.get(self.counters, 4 * ca.BLOCKS).any(), "counters are not at zero again"


@pytest.fixture
def device(backend: CudaBackend) -> Iterator[Device]:
    made = Device(backend)
    yield made
    for memory in made.held:
        memory.free()


def row_bytes(shape: Shape, quantised: bool) -> int:
    cols = shape.n_head * shape.head_dim
    return activation_planes(cols).row_bytes if quantised else 4 * cols


class OnDevice:
    """A case on the device, with a result and scratch that begin as poison."""

    def __init__(self, device: Device, case: Case, grid: ca.DecodeGrid | None = None):
        self.device, self.case, self.grid = device, case, grid
        self.q, self.k, self.v = device.put(case.q), device.put(case.k), device.put(case.v)
        self.mask = device.put(case.mask)

    def at(self, dst: int, scratch: int) -> AttentionAt:
        inputs = self.q, self.k, self.v, self.mask
        return AttentionAt(dst, *inputs, scratch, self.device.counters)

    def works(self, dst: int, scratch: int, quantised: bool) -> list[Kernel]:
        at, case = self.at(dst, scratch), self.case
        return ca.launches(case.shape, at, case.scale, quantised, grid=self.grid)

    def simple(self, dst: int, scratch: int) -> list[Kernel]:
        return twin.launches(self.case.shape, self.at(dst, scratch), self.case.scale)

    def result(self, quantised: bool = False, poison: int = POISONS[0]) -> np.ndarray:
        shape = self.case.shape
        nbytes = shape.n_tokens * row_bytes(shape, quantised)
        dst = self.device.put(np.full(nbytes, poison, np.uint8))
        need = ca.scratch_bytes(shape, self.grid)
        scratch = self.device.put(np.full(need, poison, np.uint8))
        self.device.run(self.works(dst, scratch, quantised))
        return self.device.get(dst, nbytes)


def quantised_twin(device: Device, values: np.ndarray, shape: Shape) -> np.ndarray:
    """`values` (float32 bytes) through the kernel `quantize`."""
    cols, nbytes = shape.n_head * shape.head_dim, shape.n_tokens * row_bytes(shape, True)
    dst = device.put(np.full(nbytes, POISONS[1], np.uint8))
    args: list[int | float] = [dst, device.put(values), shape.n_tokens, cols]
    grid = (shape.n_tokens, blocks(cols, 1024))
    device.run([Kernel("elementwise", "quantize", grid, 256, args, waits=True)])
    return device.get(dst, nbytes)


# Of every kind: short and long, clusters and several of them, few and many rows, odd head_dims.
SHAPES = [
    Shape(1, 32, 8, 128, 256), Shape(1, 32, 8, 128, 1000), Shape(1, 32, 8, 128, 4096),
    Shape(1, 32, 8, 64, 512), Shape(1, 32, 8, 64, 4111), Shape(1, 8, 8, 64, 64),
    Shape(1, 14, 2, 64, 777), Shape(1, 32, 4, 128, 9000), Shape(2, 40, 40, 128, 300),
    Shape(3, 16, 2, 96, 2048), Shape(4, 32, 8, 128, 4096), Shape(4, 32, 8, 64, 300),
    Shape(5, 8, 1, 256, 600), Shape(7, 12, 4, 80, 1500), Shape(8, 32, 8, 128, 256),
    Shape(8, 32, 8, 128, 1024), Shape(8, 32, 8, 64, 4096), Shape(8, 6, 6, 32, 40),
    Shape(9, 32, 8, 64, 1024), Shape(40, 32, 8, 128, 320), Shape(150, 32, 8, 64, 333),
    Shape(150, 32, 8, 128, 256), *(Shape(150, 32, 8, d, 300) for d in (48, 80, 96, 256)),
]  # fmt: skip


def forced(
    sets: int, warps: int, stages: int, kv_parts: int, cluster: int, shape: Shape
) -> ca.DecodeGrid:
    rows = shape.n_tokens * shape.n_head // shape.n_head_kv
    tuning = ca.AttentionTuning(sets, warps, stages, ca.CELLS)
    return ca.DecodeGrid(tuning, shape.n_head_kv * blocks(rows, 8 * sets), kv_parts, cluster)


GRIDS = [  # sets, warps, stages, kv_parts, cluster
    (1, 2, 2, 1, 1), (1, 4, 2, 5, 1), (1, 8, 1, 2, 2), (1, 4, 2, 12, 4), (1, 4, 2, 24, 8),
    (2, 4, 2, 1, 1), (2, 4, 2, 3, 1), (2, 4, 2, 8, 8), (4, 4, 2, 1, 1), (4, 4, 2, 8, 4),
    (4, 4, 2, 16, 8),
]  # fmt: skip
GRIDDED = [Shape(5, 12, 4, 128, 300), Shape(8, 14, 2, 40, 1111)]  # rows fill no set


def kernels(sm: int) -> Wanted:
    """Every variant the tests use."""
    found = [ca.launches(s, NOWHERE, 1.0, False)[0] for s in SIZES + SHAPES]
    found += [
        ca.launches(s, NOWHERE, 1.0, False, grid=forced(*g, s))[0] for s in GRIDDED for g in GRIDS
    ]
    return {("elementwise", ()), *((k.file, k.defines) for k in found)}


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slow_twin(device: Device, shape: Shape):
    there = OnDevice(device, Case(shape))
    expected, found = there.case.expected(), there.result()
    dst = device.put(np.full(found.nbytes, POISONS[0], np.uint8))
    scratch = device.room(twin.scratch_bytes(shape))
    device.run(there.simple(dst, scratch))
    slow = device.get(dst, found.nbytes).view(np.float32)
    assert distance(slow, expected) < SIMPLE_TOLERANCE
    assert distance(found.view(np.float32), expected) < TOLERANCE
    assert distance(found.view(np.float32), slow) < TOLERANCE
    if ca.can_quantise(shape):  # then the very bytes of `quantize` of the result
        quantised = quantised_twin(device, found, shape)
        for poison in POISONS:
            assert np.array_equal(there.result(quantised=True, poison=poison), quantised)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("shape", GRIDDED, ids=str)
def test_every_way_to_share_the_cells(device: Device, shape: Shape, grid: tuple[int, ...]):
    """Sets, clusters, several of them, shares without a tile: also those no rule picks here."""
    sets, warps, stages, kv_parts, cluster = grid
    case = Case(shape)
    there = OnDevice(device, case, forced(sets, warps, stages, kv_parts, cluster, shape))
    found = there.result()
    assert distance(found.view(np.float32), case.expected()) < TOLERANCE
    assert np.array_equal(found, there.result(poison=POISONS[1]))
    if ca.can_quantise(shape):
        quantised = there.result(quantised=True)
        assert np.array_equal(quantised, quantised_twin(device, found, shape))
