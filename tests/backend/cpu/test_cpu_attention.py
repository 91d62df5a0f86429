"""Attention of a CPU in all its ways: regions, skipping, parts of the cells, sinks, cache types."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.attention import Case, attention_case, broadcast, causal, parted, skipping, windowed
from tests.backend.cpu.kernel_runs import run, run_parts
from tests.profiles import examples
from workbench.engine.cache import extent as kv_extent
from workbench.graph import ops
from workbench.graph.ir import CACHE_DTYPES, F16, Q8_0, Tensor

WAYS = ("off", "in_loop", "tail", "classes")
PARTS = ("off", "parallel_blocks", "stream_k")
CASES = {
    "one token": Case((1,), 8, 2, 64, 256),
    "many": Case((19,), 4, 2, 32, 300, sinks=True),
    "of several": Case((1, 1, 1, 1, 1, 1, 1, 1, 1, 1), 8, 2, 48, 272, regions=True),
    "ragged": Case((3, 1, 12, 1), 6, 3, 80, 513, regions=True),
    "sinks": Case((1, 2), 4, 1, 96, 200, regions=True, sinks=True),
    "Q8_0": Case((2, 3), 4, 2, 64, 256, regions=True, k_type=Q8_0, v_type=Q8_0),
}


def floats(found: np.ndarray, shape) -> np.ndarray:
    return found.view(np.float32).reshape(shape)


@pytest.mark.parametrize("kv_parts", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_twin_and_skipping_changes_no_bit(name, kv_parts):
    """Nor does how many tokens a tile serves: but with stream_k pieces follow from a tile's rows,
    so that is rounding."""
    case = CASES[name]
    shared = broadcast(case, np.random.default_rng(case.n_kv))
    for mask in (causal(case, case.n_kv // 3), windowed(case, case.n_kv // 2, 40), shared):
        node, arrays, twin = attention_case(case, mask)
        wanted = run_parts(parted(node, kv_parts), arrays)
        tile, vec = (run(parted(node, kv_parts, kernel), arrays, 3) for kernel in ("tile", "vec"))
        for found in (wanted, vec):
            np.testing.assert_allclose(floats(found, twin.shape), twin, rtol=0, atol=4e-6)
        assert np.array_equal(tile, vec) or kv_parts == "stream_k"
        for way in WAYS[1:]:
            found = run(*skipping(parted(node, kv_parts), arrays, way), 3)
            assert np.array_equal(found, wanted), way


TYPED = [
    (dim, k, v) for dim in (48, 64, 80, 96, 128, 256)
    for k, v in itertools.product(CACHE_DTYPES, repeat=2)
    if dim % 32 == 0 or Q8_0 not in (k, v)
]  # fmt: skip


@pytest.mark.parametrize("n", range(len(TYPED)))
def test_every_head_size_and_pair_of_types(n: int):
    """Each with another way, parts and kernel; one token in three sees nothing."""
    dim, k, v = TYPED[n]
    case = Case((1, 4, 1), 4, 2, dim, 290, n % 2 == 0, n % 3 == 0, k, v)
    mask = causal(case, 170)
    mask[1::3] = False
    node, arrays, twin = attention_case(case, mask, seed=n)
    node = parted(node, PARTS[n % 3], ("auto", "vec", "tile")[n // 3 % 3])
    found = run(*skipping(node, arrays, WAYS[n % 4]), 2)
    np.testing.assert_allclose(floats(found, twin.shape), twin, rtol=0, atol=4e-6)
    assert not floats(found, twin.shape)[1::3].any()
    assert np.array_equal(run(node, arrays), found)


@given(st.data())
@settings(max_examples=examples(60))
def test_any_mask(data: st.DataObject) -> None:
    """Whole rows hidden, interior holes, one visible cell, n_kv that is no multiple of anything."""
    tokens = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    regions = data.draw(st.booleans())
    n_kv = data.draw(st.integers(1, 600))
    case = Case(tokens, 4, 2, 16, n_kv, regions, data.draw(st.booleans()))
    mask = drawn_mask(data, case.n_tokens, n_kv)
    node, arrays, twin = attention_case(case, mask, seed=n_kv)
    node = parted(node, data.draw(st.sampled_from(PARTS)))
    wanted = run(node, arrays, 2)
    np.testing.assert_allclose(floats(wanted, twin.shape), twin, rtol=0, atol=4e-6)
    assert not floats(wanted, twin.shape)[~mask.any(axis=1)].any()
    for way in WAYS[1:]:
        assert np.array_equal(run(*skipping(node, arrays, way)), wanted), way


def drawn_mask(data: st.DataObject, n_tokens: int, n_kv: int) -> np.ndarray:
    """(n_tokens, n_kv) bool, true where a cell is seen. broadcast: one row for all tokens."""
    kind = data.draw(st.sampled_from(["any", "tail", "holes", "none", "one", "broadcast"]))
    mask = np.zeros((n_tokens, n_kv), bool)
    if kind == "any":
        return data.draw(hnp.arrays(bool, (n_tokens, n_kv)))
    if kind == "broadcast":
        mask[:] = data.draw(hnp.arrays(bool, n_kv))
    for row in mask:
        at = data.draw(st.integers(0, n_kv - 1))
        if kind == "tail":
            row[: at + 1] = True
        elif kind == "holes":
            row[at:] = True
            row[at + data.draw(st.integers(0, 300)) :][:130] = False
        elif kind == "one":
            row[at] = True
    return mask


@given(st.data())
@settings(max_examples=examples(60))
def test_extents_and_classes_are_what_can_be_said_of_cells(data: st.DataObject) -> None:
    """The kernel's are the host's, and the host's what a look at each cell says."""
    n_tokens, n_kv = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 900))
    seen = drawn_mask(data, n_tokens, n_kv)
    mask = np.where(seen, 0, -np.inf).astype(np.float16)
    tensor = Tensor("m", F16, mask.shape)
    extents, classes = kv_extent.extents(mask), kv_extent.classes(mask)
    for op, wanted in (("kv_extents", extents), ("kv_classes", classes)):
        found = run_parts(ops.make(op, "found", tensor), {tensor: mask})
        assert np.array_equal(found.view(wanted.dtype).reshape(wanted.shape), wanted)
    for row, end, each in zip(seen, extents, classes, strict=True):
        last = max((c for c in range(n_kv) if row[c]), default=-1)
        assert end == (0 if last < 0 else min((last // 256 + 1) * 256, n_kv))
        for block, found in enumerate(each):
            own = row[64 * block : 64 * block + 64]
            assert found == (2 if own.all() else 1 if own.any() else 0)
