"""Attention on the cuda backend, with tensor cores and without: against float64, against its slow
twin, and to the bit against reading all cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.attention import Case, attention_case, broadcast, causal, parted, skipping, windowed
from tests.gpu.debug_arena import Block
from tests.gpu.harness import Guards, Wanted, assert_counters_are_zero, distance, kernels_of
from tests.gpu.twins import attention as twin_launches
from workbench.backend.cuda.kernels import attention as ca
from workbench.backend.cuda.kernels.kernel import blocks
from workbench.config import KVParts
from workbench.engine.cache import extent as kv_extent
from workbench.graph import ops
from workbench.graph.ir import BF16, CACHE_DTYPES, F16, F32, Q8_0, Q8_ACT, Node, Tensor

pytestmark = pytest.mark.gpu
Shape = ca.AttentionShape

# ||found - wanted|| / ||wanted||. With tensor cores queries and weights are rounded to halves: at
# most 2^-11 of each. The errors of weights average out over the cells, and so do those of a query
# over the columns, unless one cell or one column is all there is: then a result is off by two
# roundings. Without, all is float32, and 2^x has a relative error of 2^-22; on a CPU, with its own
# 2^x, the same kernels have up to 6.5e-7 (tests/backend/cuda/test_attention_plain.py). The slow
# twin is float throughout, rescaled at every 32 cells.
HALVES, EXACT, TWIN = 2**-10, 4e-6, 5e-6
WAYS = ("in_loop", "tail", "classes")
PARTS = tuple(map(str, KVParts))
EIGHT = (1,) * 8
RAGGED = (1, 1, 67, 1, 9, 2, 130, 1)
# with tensor cores
HALVED = {
    "one token": Case((1,), 32, 8, 64, 1280),
    "one region": Case((1,), 32, 8, 128, 1280, regions=True, sinks=True),
    "a chunk": Case((70,), 8, 2, 64, 500, sinks=True),
    "forty": Case((1,) * 40, 16, 2, 128, 777, regions=True),
    "ragged": Case(RAGGED, 8, 2, 128, 1024, regions=True, sinks=True),
    "seventy": Case((1,) * 69 + (40,), 8, 1, 64, 300, regions=True),
    "wide": Case((1, 3, 20), 4, 2, 256, 512, regions=True),
    "odd": Case((1, 1, 11), 6, 3, 80, 333, regions=True),
    "heads of 96": Case((4,), 4, 2, 96, 290),
    "a long cache": Case((3,), 8, 2, 64, 9000),
    "a long prompt": Case((200,), 8, 2, 128, 5000, sinks=True),
}
PLAIN = {
    "one token, rows": (Case((1,), 32, 8, 64, 1280), "vec"),
    "one of a region, rows": (Case((1,), 16, 8, 128, 4096, True, True, Q8_0, Q8_0), "vec"),
    "forty of Q8_0": (Case((1,) * 40, 16, 2, 128, 777, regions=True, k_type=Q8_0), "auto"),
    "a chunk, rows": (Case((33,), 8, 2, 128, 300, v_type=F32), "vec"),
    "tiles of one token": (Case(EIGHT, 14, 2, 64, 600, regions=True), "tile"),
    "ragged of Q8_0": (Case(RAGGED, 8, 2, 128, 1024, True, True, Q8_0, Q8_0), "auto"),
    "ragged rows": (Case((2, 1, 5, 11), 12, 1, 80, 333, regions=True, k_type=F32), "vec"),
    "wide of two types": (Case((1, 3, 20), 4, 2, 256, 512, True, False, Q8_0, BF16), "auto"),
    "rows of 48": (Case((1, 4), 6, 2, 48, 290, regions=True, k_type=BF16, v_type=F32), "vec"),
}
CASES = {**{name: (case, "auto", HALVES) for name, case in HALVED.items()},
         **{name: (*pair, EXACT) for name, pair in PLAIN.items()}}  # fmt: skip
# every pair of types at heads of 64, and some at 128, where the code is the same but for its loops
TYPES = [
    *((64, k, v) for k, v in itertools.product(CACHE_DTYPES, repeat=2)),
    *((128, dtype, dtype) for dtype in CACHE_DTYPES), (128, Q8_0, BF16), (128, F16, Q8_0),
]  # fmt: skip
TYPED = {
    f"{dim} {k.name} {v.name} {kernel}": (Case((2, 12), 4, 2, dim, 300, True, True, k, v), kernel)
    for dim, k, v in TYPES
    for kernel in ("vec", "tile")
}


NOWHERE = ca.AttentionAt(*(0,) * 7)
HEAD_DIMS = (8, 32, 40, 48, 64, 80, 96, 128, 192, 256)
TOKENS = (1, 2, 8, 9, 17, 40)
LENGTHS = (1, 31, 256, 257, 300, 1024, 5000, 20000)
GROUPS = ((1, 1), (8, 8), (32, 8), (15, 5), (14, 2))
SIZES = [
    *(Shape(t, 4, 2, d, 96) for t in TOKENS for d in HEAD_DIMS),
    *(Shape(t, 8, 2, 64, n) for t in (1, 3, 12) for n in LENGTHS),
    *(Shape(t, *g, 128, 320) for t in (1, 4, 5, 6, 7, 33, 100) for g in GROUPS),
]
# Of every kind: short and long, clusters and several of them, few and many rows, odd head_dims.
SHAPES = [
    Shape(1, 32, 8, 128, 256), Shape(1, 32, 8, 128, 4096), Shape(1, 32, 8, 64, 4111),
    Shape(1, 8, 8, 64, 64), Shape(1, 14, 2, 64, 777), Shape(1, 32, 4, 128, 9000),
    Shape(2, 40, 40, 128, 300), Shape(3, 16, 2, 96, 2048), Shape(4, 32, 8, 128, 4096),
    Shape(5, 8, 1, 256, 600), Shape(7, 12, 4, 80, 1500), Shape(8, 32, 8, 128, 1024),
    Shape(8, 32, 8, 64, 4096), Shape(8, 6, 6, 32, 40), Shape(9, 32, 8, 64, 1024),
    Shape(40, 32, 8, 128, 320), *(Shape(150, 32, 8, d, 300) for d in (48, 64, 80, 96, 128, 256)),
]  # fmt: skip
GRIDS = [  # sets, warps, stages, kv_parts, cluster: also those that no rule picks here
    (1, 2, 2, 1, 1), (1, 4, 2, 5, 1), (1, 8, 1, 2, 2), (1, 4, 2, 12, 4), (1, 4, 2, 24, 8),
    (2, 4, 2, 1, 1), (2, 4, 2, 3, 1), (2, 4, 2, 8, 8), (4, 4, 2, 1, 1), (4, 4, 2, 8, 4),
    (4, 4, 2, 16, 8),
]  # fmt: skip
GRIDDED = [Shape(5, 12, 4, 128, 300), Shape(8, 14, 2, 40, 1111)]  # rows fill no set


def grid_of(shape: Shape, grid: tuple[int, ...] | None) -> ca.DecodeGrid | None:
    if grid is None:
        return None
    rows = shape.n_tokens * shape.n_head // shape.n_head_kv
    tuning = ca.AttentionTuning(*grid[:3], ca.CELLS)
    return ca.DecodeGrid(tuning, shape.n_head_kv * blocks(rows, 8 * grid[0]), *grid[3:])


BY_HAND = [*((s, None) for s in SHAPES), *itertools.product(GRIDDED, GRIDS)]


def holed(shape: Shape) -> tuple[Node, dict[Tensor, np.ndarray], np.ndarray]:
    """A causal mask with holes; the last of several tokens sees nothing."""
    case = Case((shape.n_tokens,), *shape[1:5])
    rng = np.random.default_rng(shape[:5])
    mask = causal(case, max(0, case.n_kv - 5 - case.n_tokens)) & (rng.random(case.n_kv) > 0.1)
    mask[:, 0] = True
    mask[1:][-1:] = False
    return attention_case(case, mask)


@pytest.mark.parametrize("tokens", sorted({size.n_tokens for size in SIZES}))
def test_heads_lengths_and_groups(compute, tokens: int):
    for size in SIZES:
        if size.n_tokens == tokens:
            node, arrays, wanted = holed(size)
            found = compute(node, arrays).view(np.float32).reshape(wanted.shape)
            assert distance(found, wanted) < HALVES, size
            assert tokens == 1 or not found[-1].any(), "a row that sees nothing"


@pytest.mark.parametrize(("shape", "grid"), BY_HAND, ids=str)
def test_its_slow_twin_and_every_way_to_share_cells(guards: Guards, shape: Shape, grid):
    """As floats, and (where it can be) quantised: then the very bytes of `quantize`. Whatever lies
    in the result and in scratch before: NaN, or huge finite floats."""
    _, arrays, wanted = holed(shape)
    inputs = [guards.put(a).address for a in arrays.values()]
    counters, scale = guards.backend._counters_of(0), float(np.float32(shape.head_dim**-0.5))
    forced, cols = grid_of(shape, grid), shape.n_head * shape.head_dim

    def at(dst: Block, scratch: Block) -> ca.AttentionAt:
        return ca.AttentionAt(dst.address, *inputs, scratch.address, counters)

    def found(quantised: bool, simple: bool = False) -> np.ndarray:
        dtype = Q8_ACT if quantised else F32
        dst = guards.room(shape.n_tokens * dtype.row_bytes(cols))
        if simple:
            scratch = guards.room(twin_launches.scratch_bytes(shape))
            works = twin_launches.launches(shape, at(dst, scratch), scale)
        else:
            scratch = guards.room(ca.scratch_bytes(shape, forced))
            works = ca.launches(shape, at(dst, scratch), scale, quantised, grid=forced)
        return guards.twice([dst], guards.issues(works), scratch, poisons=(0xFF, 0x7F))[0]

    raw, slow = found(False), found(False, simple=True).view(np.float32)
    floats = raw.view(np.float32)
    assert distance(slow, wanted) < TWIN
    assert max(distance(floats, wanted), distance(floats, slow)) < HALVES
    if ca.can_quantise(shape):
        assert np.array_equal(found(True), guards.quantised(raw, shape.n_tokens))
    assert_counters_are_zero(guards.backend)


def masks(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(case.tokens))
    tail = causal(case, case.n_kv // 3)
    made = {"tail": tail, "holes": tail.copy(), "any": rng.random(tail.shape) < 0.3}
    made["holes"][:, 64 : 64 * max(2, case.n_kv // 256)] = made["any"][-1] = False
    one = made["one"] = np.zeros_like(tail)
    one[np.arange(len(one)), rng.integers(0, case.n_kv, len(one))] = True
    made["window"] = windowed(case, case.n_kv // 2, 90)
    return made | {"broadcast": broadcast(case, rng)}


def kernels(sm: int) -> Wanted:
    """Of every case in every way, of every pair of types, and of launches by hand."""
    nodes = []
    for case, kernel, _ in CASES.values():
        node, arrays, _ = attention_case(case, causal(case, 10))
        for kv_parts in PARTS:
            here = parted(node, kv_parts, kernel)
            nodes += [here, *(skipping(here, arrays, way)[0] for way in WAYS)]
    for case, kernel in TYPED.values():
        nodes.append(parted(attention_case(case, causal(case, 200))[0], "off", kernel))
    made = {("elementwise", ())}
    for shape, grid in [*((s, None) for s in SIZES), *BY_HAND]:
        work = ca.launches(shape, NOWHERE, 1.0, False, grid=grid_of(shape, grid))[0]
        made.add((work.file, work.defines))
    return made | kernels_of(nodes, sm)


@pytest.mark.parametrize("kv_parts", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_twin_and_skipping_changes_no_bit(compute, name: str, kv_parts: str):
    """A token that sees nothing gives zeros, with sinks and without."""
    case, kernel, most = CASES[name]
    for kind, mask in masks(case).items():
        node, arrays, twin = attention_case(case, mask)
        node = parted(node, kv_parts, kernel)
        wanted = compute(node, arrays)
        found = wanted.view(np.float32).reshape(twin.shape)
        assert distance(found, twin) < most, kind
        assert most == HALVES or not found[~mask.any(axis=1)].any()
        for way in WAYS:
            assert np.array_equal(compute(*skipping(node, arrays, way)), wanted), (kind, way)


@pytest.mark.parametrize("name", TYPED)
def test_every_pair_of_types(compute, name: str):
    case, kernel = TYPED[name]
    for mask in masks(case).values():
        node, arrays, twin = attention_case(case, mask)
        found = compute(parted(node, "off", kernel), arrays)
        assert distance(found.view(np.float32), twin) < EXACT


@pytest.mark.parametrize("n_kv", [1, 7, 64, 255, 256, 1000, 4096, 5001])
def test_extents_and_classes_are_the_hosts(compute, n_kv: int):
    """Of rows that differ, and of broadcast masks: each of these rows for all tokens."""
    rng = np.random.default_rng(n_kv)
    seen = rng.random((9, n_kv)) < 0.01
    at = np.arange(n_kv)
    seen[:5] = [at < 0, at >= 0, at == n_kv - 1, at == 0, at < n_kv // 2]
    for each in (seen, *(np.broadcast_to(row, seen.shape) for row in seen[:6])):
        mask = np.where(each, 0, -np.inf).astype(np.float16)
        tensor = Tensor("m", F16, mask.shape)
        for op, dtype, twin in (
            ("kv_extents", np.int32, kv_extent.extents), ("kv_classes", np.uint8, kv_extent.classes)
        ):  # fmt: skip
            found = compute(ops.make(op, "found", tensor), {tensor: mask}).view(dtype)
            assert np.array_equal(found.reshape(twin(mask).shape), twin(mask)), op
