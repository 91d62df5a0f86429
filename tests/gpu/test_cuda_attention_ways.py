"""Attention on the cuda backend in all its ways: cells of their own for each sequence, masked cells
left unread, parts of the cells, sinks, and K and V of every type of the cache; with tensor cores
and without: against float64, and to the bit against reading all cells. Engines with such caches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import workbench as wb
from tests import reference
from tests.attention import Case, attention_case, broadcast, causal, parted, skipping, windowed
from tests.gpu.harness import Compute, compile_side_by_side, distance, kernels_of
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.common.errors import DeviceError
from workbench.config import CACHE_TYPES, KVParts, Toggles
from workbench.engine.cache import extent as kv_extent
from workbench.graph import ops
from workbench.graph.ir import BF16, CACHE_DTYPES, F16, F32, Q8_0, DType, Node, Tensor

pytestmark = pytest.mark.gpu

# ||found - wanted|| / ||wanted||. With tensor cores as in test_cuda_attention.py. Without, all is
# float32, and 2^x has a relative error of 2^-22; on a CPU, with its own 2^x, the same kernels have
# up to 6.5e-7 (tests/backend/cuda/test_attention_plain.py).
HALVES, EXACT = 2**-10, 4e-6
WAYS = ("in_loop", "tail", "classes")
PARTS = tuple(map(str, KVParts))
EIGHT = (1,) * 8
RAGGED = (1, 1, 67, 1, 9, 2, 130, 1)
# with tensor cores
HALVED = {
    "one token": Case((1,), 32, 8, 64, 1280),
    "one region": Case((1,), 32, 8, 128, 1280, regions=True, sinks=True),
    "a chunk": Case((70,), 8, 2, 64, 500, sinks=True),
    "a chunk of a region": Case((70,), 8, 2, 64, 512, regions=True),
    "eight": Case(EIGHT, 32, 8, 64, 1280, regions=True),
    "forty": Case((1,) * 40, 16, 2, 128, 777, regions=True),
    "ragged, few": Case((2, 1, 5), 8, 2, 64, 768, regions=True),
    "ragged": Case(RAGGED, 8, 2, 128, 1024, regions=True, sinks=True),
    "seventy": Case((1,) * 69 + (40,), 8, 1, 64, 300, regions=True),
    "wide": Case((1, 3, 20), 4, 2, 256, 512, regions=True),
    "odd": Case((1, 1, 11), 6, 3, 80, 333, regions=True),
    "heads of 48": Case((1, 1), 4, 2, 48, 256, regions=True),
    "heads of 96": Case((4,), 4, 2, 96, 290),
    "a long cache": Case((3,), 8, 2, 64, 9000),
    "a long prompt": Case((200,), 8, 2, 128, 5000, sinks=True),
}
PLAIN = {
    "one token, rows": (Case((1,), 32, 8, 64, 1280), "vec"),
    "one of a region, rows": (Case((1,), 16, 8, 128, 4096, True, True, Q8_0, Q8_0), "vec"),
    "eight of BF16": (Case(EIGHT, 32, 8, 64, 1280, True, k_type=BF16, v_type=BF16), "auto"),
    "forty of Q8_0": (Case((1,) * 40, 16, 2, 128, 777, regions=True, k_type=Q8_0), "auto"),
    "a chunk of Q8_0": (Case((70,), 8, 2, 64, 500, False, True, Q8_0, Q8_0), "auto"),
    "a chunk, rows": (Case((33,), 8, 2, 128, 300, v_type=F32), "vec"),
    "tiles of one token": (Case(EIGHT, 14, 2, 64, 600, regions=True), "tile"),
    "ragged of Q8_0": (Case(RAGGED, 8, 2, 128, 1024, True, True, Q8_0, Q8_0), "auto"),
    "ragged tiles": (Case((1, 1, 67, 1, 9, 2), 8, 2, 96, 513, True, True, F32, BF16), "tile"),
    "ragged rows": (Case((2, 1, 5, 11), 12, 1, 80, 333, regions=True, k_type=F32), "vec"),
    "wide of two types": (Case((1, 3, 20), 4, 2, 256, 512, True, False, Q8_0, BF16), "auto"),
    "tiles of 48": (Case((13,), 6, 6, 48, 290, v_type=BF16), "tile"),
    "rows of 48": (Case((1, 4), 6, 2, 48, 290, regions=True, k_type=BF16, v_type=F32), "vec"),
    "rows of 96": (Case((3, 1), 8, 2, 96, 400, True, True, Q8_0, Q8_0), "vec"),
    "tiles of 80": (Case((9, 20), 4, 1, 80, 333, regions=True, k_type=BF16), "tile"),
}
CASES = {**{name: (case, "auto", HALVES) for name, case in HALVED.items()},
         **{name: (*pair, EXACT) for name, pair in PLAIN.items()}}  # fmt: skip
# every pair of types at heads of 64, and some at 128, where the code is the same but for its loops
TYPES = [
    *((64, k, v) for k, v in itertools.product(CACHE_DTYPES, repeat=2)),
    *((128, dtype, dtype) for dtype in CACHE_DTYPES), (128, Q8_0, BF16), (128, F16, Q8_0),
]  # fmt: skip
TYPED = [(*types, kernel) for types in TYPES for kernel in ("vec", "tile")]


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


def typed(dim: int, k: DType, v: DType) -> Case:
    return Case((2, 12), 4, 2, dim, 300, True, True, k, v)


def nodes() -> list[Node]:
    """Every case in every way, and every pair of types."""
    made = []
    for case, kernel, _ in CASES.values():
        node, arrays, _ = attention_case(case, causal(case, 10))
        for kv_parts in PARTS:
            here = parted(node, kv_parts, kernel)
            made += [here, *(skipping(here, arrays, way)[0] for way in WAYS)]
    for dim, k, v, kernel in TYPED:
        case = typed(dim, k, v)
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


@pytest.mark.parametrize(
    ("dim", "k", "v", "kernel"),
    TYPED,
    ids=[f"{dim} {k.name} {v.name} {kernel}" for dim, k, v, kernel in TYPED],
)
def test_every_pair_of_types(compute: Compute, dim: int, k: DType, v: DType, kernel: str):
    case = typed(dim, k, v)
    for mask in masks(case).values():
        node, arrays, twin = attention_case(case, mask)
        found = compute(parted(node, "off", kernel), arrays)
        assert distance(found.view(np.float32), twin) < EXACT


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


# engines -----------------------------------------------------------------------------------------

# NMSE of logits: what a cache of a type adds to one of halves, and what products of many tokens and
# rounding to halves by tensor cores add
TOLERANCE = {"f16": 0.0, "f32": 4e-7, "bf16": 2e-5, "q8_0": 2e-4}
PRODUCTS = 4e-6


def answers(path, device: str, k: str = "f16", v: str = "f16", **toggles: str) -> np.ndarray:
    """Logits behind a prompt, behind tokens one by one, of a copy, and behind a shift."""
    rng = np.random.default_rng(17)
    prompt, tokens = rng.integers(3, 900, 40).tolist(), rng.integers(3, 900, 6).tolist()
    with wb.Engine.load(
        path, device=device, n_ctx=192, n_ubatch=32, n_kv_pad=32, n_seqs=3, threads=2,
        toggles=Toggles(**toggles), cache_type_k=k, cache_type_v=v,
    ) as engine:  # fmt: skip
        engine.prefill(prompt, "none")
        rows = [engine.step([token]) for token in tokens]
        engine.cache.copy(0, 2)
        rows.append(engine.step(tokens, "all", 2))
        engine.cache.remove(2)
        engine.cache.remove(0, 3, 9)
        engine.cache.shift(0, -6, 9)
        rows.append(engine.step(tokens, "all"))
        return np.concatenate(rows)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("tiny-qwen3", "F32")


@pytest.fixture(scope="module")
def halves(model) -> np.ndarray:
    return answers(model, "embedded")


@pytest.mark.parametrize(("k", "v"), list(itertools.product(CACHE_TYPES, repeat=2)))
def test_engines_answer_as_with_halves(model, halves, k, v):
    most = TOLERANCE[k] + TOLERANCE[v] + PRODUCTS
    for cache in ("unified", "per_sequence"):
        found = answers(model, "cuda", k, v, kv_cache=cache, graph_reuse="set_rows")
        assert reference.nmse(found, halves) <= most, cache


@pytest.mark.parametrize("kv_parts", PARTS)
@pytest.mark.parametrize("kernel", ["vec", "tile", "mma"])
def test_every_kernel_answers_alike(backend: CudaBackend, model, halves, kernel, kv_parts):
    more = {"graph_reuse": "set_rows", "plans": "ours", "fuse": "on"}
    if backend.capabilities.programmatic:
        more["pdl"] = "on"
    for toggles in ({}, more):
        found = answers(model, "cuda", attn_kernel=kernel, kv_parts=kv_parts, **toggles)
        assert reference.nmse(found, halves) <= PRODUCTS


def test_what_mma_cannot_read_is_refused_at_once(model):
    with pytest.raises(DeviceError, match="attn_kernel=mma reads no cache of Q8_0; use attn_ker"):
        answers(model, "cuda", "q8_0", attn_kernel="mma")
