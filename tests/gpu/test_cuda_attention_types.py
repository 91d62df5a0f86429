"""Attention on the cuda backend without tensor cores, over K and V of every type of the cache:
against float64, and to the bit against reading all cells. And engines with such caches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests import reference
from tests.attention import Case, attention_case, causal, parted, skipping
from tests.contract.test_cache_types import PAIRS, TOLERANCE, answers, load
from tests.gpu.harness import Compute, compile_side_by_side, distance, kernels_of
from tests.gpu.test_cuda_attention_ways import masks
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.common.errors import DeviceError
from workbench.config import KVParts
from workbench.graph.ir import BF16, CACHE_DTYPES, F16, F32, Q8_0, DType, Node

pytestmark = pytest.mark.gpu

# ||found - wanted|| / ||wanted||. All is float32, and 2^x has a relative error of 2^-22. On a CPU,
# with its own 2^x, the same kernels have up to 6.5e-7 (tests/unit/test_attention_plain.py).
EXACT = 4e-6
WAYS = ("in_loop", "tail", "classes")
PARTS = tuple(map(str, KVParts))
EIGHT = (1,) * 8
CASES = {
    "one token": (Case((1,), 32, 8, 64, 1280), "vec"),
    "one of a region": (Case((1,), 16, 8, 128, 4096, True, True, Q8_0, Q8_0), "vec"),
    "eight": (Case(EIGHT, 32, 8, 64, 1280, regions=True, k_type=BF16, v_type=BF16), "auto"),
    "forty": (Case((1,) * 40, 16, 2, 128, 777, regions=True, k_type=Q8_0), "auto"),
    "a chunk": (Case((70,), 8, 2, 64, 500, sinks=True, k_type=Q8_0, v_type=Q8_0), "auto"),
    "a chunk of rows": (Case((33,), 8, 2, 128, 300, v_type=F32), "vec"),
    "tiles of one token": (Case(EIGHT, 14, 2, 64, 600, regions=True), "tile"),
    "ragged": (
        Case((1, 1, 67, 1, 9, 2, 130, 1), 8, 2, 128, 1024, True, True, Q8_0, Q8_0), "auto",
    ),
    "ragged tiles": (Case((1, 1, 67, 1, 9, 2), 8, 2, 96, 513, True, True, F32, BF16), "tile"),
    "ragged rows": (Case((2, 1, 5, 11), 12, 1, 80, 333, regions=True, k_type=F32), "vec"),
    "wide": (Case((1, 3, 20), 4, 2, 256, 512, regions=True, k_type=Q8_0, v_type=BF16), "auto"),
    "heads of 48": (Case((13,), 6, 6, 48, 290, v_type=BF16), "tile"),
    "rows of 48": (Case((1, 4), 6, 2, 48, 290, regions=True, k_type=BF16, v_type=F32), "vec"),
    "rows of 96": (Case((3, 1), 8, 2, 96, 400, True, True, Q8_0, Q8_0), "vec"),
    "tiles of 80": (Case((9, 20), 4, 1, 80, 333, regions=True, k_type=BF16), "tile"),
}  # fmt: skip
# every pair of types at heads of 64, and some at 128, where the code is the same but for its loops
TYPES = [
    *((64, k, v) for k, v in itertools.product(CACHE_DTYPES, repeat=2)),
    *((128, dtype, dtype) for dtype in CACHE_DTYPES), (128, Q8_0, BF16), (128, F16, Q8_0),
]  # fmt: skip
TYPED = [(*types, kernel) for types in TYPES for kernel in ("vec", "tile")]


def nodes() -> list[Node]:
    """Every case in every way, and every pair of types."""
    made = []
    for case, kernel in CASES.values():
        node, arrays, _ = attention_case(case, causal(case, 10))
        node = parted(node, "stream_k", kernel)
        made += [node, *(skipping(node, arrays, way)[0] for way in WAYS)]
    for dim, k, v, kernel in TYPED:
        case = Case((2, 12), 4, 2, dim, 300, True, True, k, v)
        made.append(parted(attention_case(case, causal(case, 200))[0], "off", kernel))
    return made


def kernels(sm: int) -> set:
    return kernels_of(nodes(), sm)


@pytest.fixture(scope="module", autouse=True)
def _compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.mark.parametrize("kv_parts", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_twin_and_skipping_changes_no_bit(compute: Compute, name: str, kv_parts: str):
    """A token that sees nothing gives zeros, with sinks and without."""
    case, kernel = CASES[name]
    for kind, mask in masks(case).items():
        node, arrays, twin = attention_case(case, mask)
        node = parted(node, kv_parts, kernel)
        wanted = compute(node, arrays)
        found = wanted.view(np.float32).reshape(twin.shape)
        assert distance(found, twin) < EXACT, kind
        assert not found[~mask.any(axis=1)].any()
        for way in WAYS:
            assert np.array_equal(compute(*skipping(node, arrays, way)), wanted), (kind, way)


@pytest.mark.parametrize(
    ("dim", "k", "v", "kernel"),
    TYPED,
    ids=[f"{dim} {k.name} {v.name} {kernel}" for dim, k, v, kernel in TYPED],
)
def test_every_pair_of_types(compute: Compute, dim: int, k: DType, v: DType, kernel: str):
    case = Case((2, 12), 4, 2, dim, 300, True, True, k, v)
    for mask in masks(case).values():
        node, arrays, twin = attention_case(case, mask)
        found = compute(parted(node, "off", kernel), arrays)
        assert distance(found.view(np.float32), twin) < EXACT


# engines -----------------------------------------------------------------------------------------

# NMSE that products of many tokens add, and rounding to halves by mma
PRODUCTS = 4e-6


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-qwen3", "F32")


@pytest.fixture(scope="module")
def halves(model) -> np.ndarray:
    with load(model) as engine:
        return answers(engine)


@pytest.mark.parametrize("cache", ["unified", "per_sequence"])
@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_engines_answer_as_with_halves(model, halves, k, v, cache):
    with load(model, k, v, "cuda", kv_cache=cache, graph_reuse="set_rows") as engine:
        found = answers(engine)
    assert reference.nmse(found, halves) <= TOLERANCE[k] + TOLERANCE[v] + PRODUCTS


@pytest.mark.parametrize("kv_parts", PARTS)
@pytest.mark.parametrize("kernel", ["vec", "tile", "mma"])
def test_every_kernel_answers_alike(backend: CudaBackend, model, halves, kernel, kv_parts):
    more = {"graph_reuse": "set_rows", "plans": "ours", "fuse": "on"}
    if backend.capabilities.programmatic:
        more["pdl"] = "on"
    for toggles in ({}, more):
        with load(model, device="cuda", attn_kernel=kernel, kv_parts=kv_parts, **toggles) as engine:
            found = answers(engine)
        assert reference.nmse(found, halves) <= PRODUCTS


def test_what_mma_cannot_read_is_refused_before_weights_are_read(model):
    with pytest.raises(DeviceError, match="attn_kernel=mma reads no cache of Q8_0; use attn_ker"):
        load(model, "q8_0", "f16", "cuda", attn_kernel="mma")
