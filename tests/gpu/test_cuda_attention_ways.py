"""Attention on the cuda backend with cells of their own for each sequence, masked cells left
unread, parts of the cells, and sinks: against float64, and to the bit against reading them all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.attention import Case, attention_case, broadcast, causal, parted, skipping, windowed
from tests.gpu.harness import Compute, compile_side_by_side, distance, kernels_of
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.engine.cache import extent as kv_extent
from workbench.graph import ops
from workbench.graph.ir import F16, Node, Tensor

pytestmark = pytest.mark.gpu

TOLERANCE = 2**-10  # as in test_cuda_attention.py
WAYS = ("in_loop", "tail", "classes")
PARTS = ("off", "parallel_blocks", "stream_k")
EIGHT = (1,) * 8
CASES = {
    "one token": Case((1,), 32, 8, 64, 1280),
    "one region": Case((1,), 32, 8, 128, 1280, regions=True, sinks=True),
    "a chunk": Case((70,), 8, 2, 64, 500, sinks=True),
    "a chunk of a region": Case((70,), 8, 2, 64, 512, regions=True),
    "eight": Case(EIGHT, 32, 8, 64, 1280, regions=True),
    "forty": Case((1,) * 40, 16, 2, 128, 777, regions=True),
    "ragged, few": Case((2, 1, 5), 8, 2, 64, 768, regions=True),
    "ragged": Case((1, 1, 67, 1, 9, 2, 130, 1), 8, 2, 128, 1024, regions=True, sinks=True),
    "seventy": Case((1,) * 69 + (40,), 8, 1, 64, 300, regions=True),
    "wide": Case((1, 3, 20), 4, 2, 256, 512, regions=True),
    "odd": Case((1, 1, 11), 6, 3, 80, 333, regions=True),
    "heads of 48": Case((1, 1), 4, 2, 48, 256, regions=True),
    "heads of 96": Case((4,), 4, 2, 96, 290),
    "a long cache": Case((3,), 8, 2, 64, 9000),
    "a long prompt": Case((200,), 8, 2, 128, 5000, sinks=True),
}


def masks(case: Case) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(case.tokens))
    tail = causal(case, case.n_kv // 3)
    holes = tail.copy()
    holes[:, 64 : 64 * max(2, case.n_kv // 256)] = False
    any_ = rng.random(tail.shape) < 0.3
    any_[-1] = False
    one = np.zeros_like(tail)
    one[np.arange(len(one)), rng.integers(0, case.n_kv, len(one))] = True
    window = windowed(case, case.n_kv // 2, 90)
    return {
        "tail": tail, "holes": holes, "any": any_, "one": one, "window": window,
        "broadcast": broadcast(case, rng),
    }  # fmt: skip


def nodes(name: str) -> list[Node]:
    """The case in every way."""
    case = CASES[name]
    node, arrays, _ = attention_case(case, causal(case, 10))
    made = [parted(node, kv_parts) for kv_parts in PARTS]
    return made + [skipping(n, arrays, way)[0] for n in made for way in WAYS]


def kernels(sm: int) -> set:
    return kernels_of([node for name in CASES for node in nodes(name)], sm)


@pytest.fixture(scope="module", autouse=True)
def _compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.mark.parametrize("kv_parts", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_twin_and_skipping_changes_no_bit(compute: Compute, name: str, kv_parts: str):
    case = CASES[name]
    for kind, mask in masks(case).items():
        node, arrays, twin = attention_case(case, mask)
        node = parted(node, kv_parts)
        wanted = compute(node, arrays)
        assert distance(wanted.view(np.float32), twin) < TOLERANCE, kind
        for way in WAYS:
            assert np.array_equal(compute(*skipping(node, arrays, way)), wanted), (kind, way)


@pytest.mark.parametrize("n_kv", [1, 7, 64, 255, 256, 1000, 4096, 5001])
def test_extents_and_classes_are_the_hosts(compute: Compute, n_kv: int):
    """Of rows that differ, and of broadcast masks: each of these rows for all tokens."""
    rng = np.random.default_rng(n_kv)
    seen = rng.random((9, n_kv)) < 0.01
    seen[0], seen[1], seen[2] = False, True, np.arange(n_kv) == n_kv - 1
    seen[3] = np.arange(n_kv) == 0
    seen[4] = np.arange(n_kv) < n_kv // 2
    for each in (seen, *(np.broadcast_to(row, seen.shape) for row in seen[:6])):
        mask = np.where(each, 0, -np.inf).astype(np.float16)
        tensor = Tensor("m", F16, mask.shape)
        for op, dtype, twin in (
            ("kv_extents", np.int32, kv_extent.extents), ("kv_classes", np.uint8, kv_extent.classes)
        ):  # fmt: skip
            found = compute(ops.make(op, "found", tensor), {tensor: mask}).view(dtype)
            assert np.array_equal(found.reshape(twin(mask).shape), twin(mask)), op
