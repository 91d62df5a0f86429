"""Attention of cuda without tensor cores: its launches, and what its kernels compute, run on this
machine's CPU (`on_host.py`). There the kernel that draws tokens draws as the host does."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import draws
from tests.attention import Case, attention_case, causal, parted, skipping
from tests.backend.cuda import on_host, ptx
from tests.draws import Draw
from tests.gpu.test_cuda_attention_ways import masks
from tests.profiles import examples, exhaustive, long, rest
from workbench.backend.cuda.device import weights
from workbench.backend.cuda.kernels import attention, attention_plain, nvrtc, op_table
from workbench.backend.cuda.kernels.attention import AttentionAt, AttentionShape
from workbench.backend.cuda.kernels.attention_plain import TokenCounts, tile_grid, vec_grid
from workbench.backend.cuda.kernels.kernel import Kernel, Operands, blocks
from workbench.config import KVParts, SkipMaskedKV
from workbench.graph.ir import BF16, CACHE_DTYPES, F16, F32, Q8_0, Node, Tensor
from workbench.model.sampler import Sampling

WAYS, PARTS = tuple(map(str, SkipMaskedKV)), tuple(map(str, KVParts))
HEADS = (48, 64, 80, 96, 128, 256)
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
NOWHERE = Operands(lambda tensor: 4096, 8192, 0)

CASES = {
    "one token": Case((1,), 8, 2, 64, 200),
    "a chunk": Case((9,), 6, 2, 48, 150, sinks=True, k_type=BF16, v_type=F32),
    "several": Case((1,) * 3, 8, 2, 64, 200, regions=True, sinks=True, k_type=Q8_0, v_type=Q8_0),
    "ragged": Case((1, 1, 11, 2), 4, 2, 96, 150, True, True, k_type=F32, v_type=Q8_0),
    "wide": Case((1, 3), 4, 2, 256, 96, regions=True, k_type=Q8_0, v_type=BF16),
    "a large group": Case((2,), 10, 1, 80, 130, k_type=BF16),
    "two chunks": Case((2, 9), 2, 2, 128, 100, regions=True, v_type=BF16),
}
QUICK = [("a chunk", "tile")]
REST = [pair for pair in itertools.product(CASES, ("vec", "tile")) if pair not in QUICK]
PAIRS = [*(long(*pair) for pair in QUICK), *rest(REST, slow=7)]
needs_compiler = pytest.mark.skipif(on_host.COMPILER is None, reason="no g++")


def works(node: Node) -> list[Kernel]:
    """Its launches, at addresses that are nobody's."""
    return [w for w in op_table.launches(node, NOWHERE) if isinstance(w, Kernel)]


def compute(node: Node, arrays: dict[Tensor, np.ndarray], *given) -> np.ndarray:
    found = on_host.compute(node, arrays, *given)
    return found.view(np.float32).reshape(node.output.shape[0], -1).copy()


@needs_compiler
@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_it_is_its_twin_and_skipping_changes_no_bit(name: str, kernel: str):
    """Whatever order threads and blocks have. A token that sees nothing gives zeros."""
    case = CASES[name]
    node, arrays, _ = attention_case(case, causal(case, 10))
    wanted = {
        (w.file, w.defines)
        for way in WAYS for w in works(skipping(parted(node, "stream_k", kernel), arrays, way)[0])
    }  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: on_host.library(*w), sorted(wanted)))
    for n, (kind, mask) in enumerate(masks(case).items()):
        kv_parts = PARTS[n % 3]
        node, arrays, twin = attention_case(case, mask)
        node = parted(node, kv_parts, kernel)
        found = compute(node, arrays)
        np.testing.assert_allclose(found, twin, rtol=0, atol=4e-6, err_msg=f"{kind} {kv_parts}")
        assert not found[~mask.any(axis=1)].any()
        for seed, way in enumerate(WAYS):
            again = compute(*skipping(node, arrays, way), seed)
            assert np.array_equal(again.view(np.uint32), found.view(np.uint32)), (kind, way)


BARRIERS = {
    "vec": "__syncwarp();  // the weights of all lanes are there",
    "tile": "__syncthreads();  // the scores are there; none reads K any more",
}


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("kernel", BARRIERS)
def test_a_barrier_that_is_missing_shows(kernel: str):
    case, edits = Case((3,), 4, 2, 64, 130), ((BARRIERS[kernel], ""),)
    node, arrays, twin = attention_case(case, causal(case, 120))
    node = parted(node, "off", kernel)
    with np.errstate(invalid="ignore"):
        wrong = [np.abs(compute(node, arrays, seed, edits) - twin).max() for seed in range(3)]
    assert not all(w < 1e-3 for w in wrong)


@pytest.mark.parametrize(
    ("k", "v", "said"), [(Q8_0, F16, "Q8_0"), (F16, F32, "F32"), (Q8_0, BF16, "Q8_0 and BF16")]
)
def test_what_mma_cannot_read_is_refused_in_one_line(k, v, said):
    case = Case((1,), 4, 2, 64, 64, k_type=k, v_type=v)
    node = parted(attention_case(case, np.ones((1, 64), bool))[0], "off", "mma")
    what = f"attn_kernel=mma reads no cache of {said}; use attn_kernel=auto, vec or tile, or a"
    assert weights.refuses(node, lambda n: op_table.launches(n, NOWHERE)) == f"{what} cache of f16"


SHAPES = st.builds(
    AttentionShape, st.integers(1, 600), st.just(8), st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 128, 256]), st.integers(1, 9000), st.just(0),
    kv_parts=st.sampled_from(PARTS),
)  # fmt: skip


@given(SHAPES, st.sampled_from([vec_grid, tile_grid]))
@settings(max_examples=examples(100))
def test_every_tile_is_one_block_s_and_has_an_entry(shape: AttentionShape, grid_of):
    """As `each_segment` of attention_plain.cuh deals them out."""
    grid = grid_of(shape, TokenCounts())
    tiles, (x, y) = blocks(shape.n_kv, grid.cells), grid.grid
    assert 0 < x < 1 << 31 and 0 < y < 1 << 16
    if shape.kv_parts == KVParts.OFF:
        assert grid.entries == 1 and grid.piece == 0
    if not grid.piece:
        assert (x, y) == (grid.groups, grid.entries)
        return
    entries: dict[int, list[int]] = {}
    n_tiles = Counter[int]()
    for block in range(x):
        at, high = block * grid.piece, min((block + 1) * grid.piece, grid.groups * tiles)
        assert at < high  # none has nothing to do
        while at < high:
            group, begin = divmod(at, tiles)
            end = min(tiles, begin + high - at)
            entries.setdefault(group, []).append(block - group * tiles // grid.piece)
            n_tiles[group] += end - begin
            at += end - begin
    assert n_tiles == dict.fromkeys(range(grid.groups), tiles)
    for group, own in entries.items():
        n = ((group + 1) * tiles - 1) // grid.piece - group * tiles // grid.piece + 1
        assert own == list(range(n)) and n <= grid.entries


def one(dim: int, k: str, v: str, kernel: str, way: str, regions: int, sinks: bool) -> list[Kernel]:
    shape = AttentionShape(12, 8, 2, dim, 512, regions, way, "stream_k", sinks, kernel, k, v)
    assert not attention.is_mma(shape)
    return attention_plain.launches(shape, AttentionAt(*range(0, 160, 16)), 1.0)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", [48, exhaustive(1)], ids=["few", "all"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_for_every_type_and_head(arch: str, share: int):
    """Each with another way, with regions or without, with sinks or without."""
    names, made = [t.name for t in CACHE_DTYPES], set()
    every = itertools.product(HEADS, names, names, ("vec", "tile"))
    for n, (dim, k, v, kernel) in enumerate(every):
        if dim % 32 == 0 or "Q8_0" not in (k, v):
            launched = one(dim, k, v, kernel, WAYS[n // 2 % 4], 3 * (n % 3 == 0), n % 5 < 2)
            made |= {(w.file, w.defines) for w in launched}
    of_arch = sorted(made)[ARCHITECTURES.index(arch) % share :: share]
    nvrtc.compile_many(of_arch, arch)
    for file, defines in of_arch:
        assert nvrtc.cubin(file, arch, defines).startswith(b"\x7fELF")


@pytest.mark.long
def test_nothing_comes_before_the_wait_in_what_is_compiled():
    for kernel in ("vec", "tile"):
        launched = one(64, "Q8_0", "F16", kernel, "classes", 3, True)
        assert [w.function for w in launched] == [f"attention_{kernel}", "attention_combine"]
        for work in launched:
            text = ptx.kernel_ptx(work.file, work.defines)
            given_ = ["f32" if type(a) is float else "u64" for a in work.args]
            assert ptx.parameters(text, work.function) == given_
            verdict = ptx.check(text, work.function)
            assert work.waits and verdict.violations == () and verdict.triggers


def drawn_by_kernel(asked: list[Draw], seed: int = 0) -> list[int]:
    return on_host.compute(*draws.as_node(asked), seed).view(np.int32)[::2].tolist()


@pytest.mark.slow  # a block of 1,024 threads takes half a second
@needs_compiler
@settings(max_examples=examples(20))
@given(draws.several(st.sampled_from([1, 2, 5, 60, 64]), 2), st.integers(0, 3))
def test_a_draw_is_the_hosts(asked, seed):
    assert drawn_by_kernel(asked, seed) == [each.token for each in asked]


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("s", [Sampling(0.8, 40, 0.95, 0.05), Sampling(100.0, 0, 1.0)], ids=str)
def test_a_draw_at_an_edge_is_the_hosts(s):
    row = np.array([0.0, -37.0, -1.0, 0.0, -2.9, -3.0], np.float32)
    asked = [Draw(row, s, 0.999)]
    assert drawn_by_kernel(asked) == [each.token for each in asked]


HOW = [
    Sampling(1.0, 0, 1.0), Sampling(0.7, 5000, 0.999), Sampling(3.0, 0, 0.9, 0.02),
    Sampling(1e-30, 4000, 1.0), Sampling(100.0, 3, 1.0), Sampling(1.0, 2100, 0.5, 1e-12),
]  # fmt: skip


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", [*draws.LEVELS, "normal"])
def test_many_survivors_are_drawn_as_the_host_does(kind):
    """More than fit the sorted list, so the kernel looks for places in the whole row."""
    rng, n, asked = np.random.default_rng(7), 8192, []
    for s in HOW:
        row = rng.normal(0, 3, n) if kind == "normal" else rng.choice(draws.LEVELS[kind], n)
        asked.append(Draw(row.astype(np.float32), s, float(np.float32(rng.random()))))
    assert drawn_by_kernel(asked) == [each.token for each in asked]
