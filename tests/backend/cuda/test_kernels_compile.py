"""The CUDA kernels without a GPU: they compile, and the launch table fits them.

Builds are compiled in turn for the four architectures: of `one_of_each` a quarter, by `make
test-slow` all that the nodes of `launch_cases.chosen` need; by `make test-exhaustive` each for
each. Everything that needs no compiler is asked of all types.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from tests import profiles
from tests.backend.cuda import launch_cases, ptx
from tests.backend.cuda.launch_cases import TOKENS, chosen_works, one_of_each, some_works
from tests.gpu.twins import attention as simple
from tests.gpu.twins.product import FOLDER
from tests.graphs import Decoder, fused_nodes
from tests.profiles import tiers
from workbench.backend.cuda.device import backend as cuda
from workbench.backend.cuda.device import weights
from workbench.backend.cuda.kernels import attention, elementwise, matvec, noting, nvrtc, op_table
from workbench.backend.cuda.kernels.attention import AttentionAt, AttentionShape
from workbench.backend.cuda.kernels.kernel import CLUSTERS, Gemm, Kernel
from workbench.backend.issue.args import variant
from workbench.common.errors import DeviceError
from workbench.graph.attend import attend_by
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, Q4_K, Q6_K, Q8_0
from workbench.graph.shapes import SQUARES

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# of a block, by compute capability; 8.6 and 12.0 have the least
MOST_SHARED = {80: 99 << 10, 90: 227 << 10}
HELPERS = {"device": {"gate", "nothing"}, "gate": {"gate_copy", "gate_end"},
           "stamp": {"stamp", "answer"}}  # fmt: skip
REPACKS = [weights.repack(dtype, 0, 0, 0, 1, 1) for dtype in sorted(weights.REPACKED)]
BUILD = tuple[str, tuple[str, ...]]


def has(cubin: bytes, function: str) -> bool:
    return b".text." + function.encode() + b"\0" in cubin


SHARES = tiers((one_of_each, 4 * len(ARCHITECTURES)), (chosen_works, 1))


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("works", "share"), SHARES, ids=["a quarter in turn", "all"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile(arch: str, works: Callable[[int], Iterable[Kernel]], share: int):
    """Also those that note when they ran."""
    found: dict[BUILD, set[str]] = {}
    for work in (*works(int(arch.removeprefix("sm_"))), *REPACKS):
        found.setdefault((work.file, work.defines), set()).add(work.function)
        found.setdefault((work.file, (noting.NOTING,)), set())
    found |= {(file, ()): functions for file, functions in HELPERS.items()}
    made = dict(list(found.items())[ARCHITECTURES.index(arch) % share :: share])
    nvrtc.compile_many(made, arch)
    for (file, defines), functions in made.items():
        for name in functions:
            assert has(nvrtc.cubin(file, arch, defines), name), f"{name} is not in {file}.cu"


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "sm"), profiles.share(product(TOKENS, MOST_SHARED), every=5))
def test_every_launch_is_possible(tokens: int, sm: int):
    """Addresses in scratch that it is given lie inside what `scratch_bytes` declares. A node of few
    tokens is one launch, which begins early; only norms of heads take clusters."""
    begin, both = 1 << 40, Decoder("tiny-llama", Q8_0, {"attn_v": F16})
    more = fused_nodes(both.graph(tokens, tokens, deferred=True), FUSIONS)
    cases = [case.node for case in launch_cases.every(tokens)]
    for node in (*cases, *more):
        given = op_table.Operands(lambda t: 4096, begin, 16384, sm)
        launched = op_table.launches(node, given)
        assert launched, node
        for work in launched:
            numbers = work.args if isinstance(work, Kernel) else work[1:4]
            assert all(type(a) is float or a <= begin + op_table.scratch_bytes(node)
                       for a in numbers), (node, work)  # fmt: skip
            if isinstance(work, Gemm):
                assert work.dtype in ("F16", "BF16", "F32") and work.dst_stride >= work.rows
                continue
            x, y = work.grid
            assert 0 < x < 1 << 31 and 0 < y < 1 << 16, work
            assert x == tokens or node.op not in ("set_rows", "copy_to_view", "copy_by_table"), work
            assert work.block % 32 == 0 and 0 < work.block <= 1024, work
            assert 0 <= work.shared <= MOST_SHARED[sm], work
            assert all(type(a) in (int, float) for a in work.args), work
        early = all(isinstance(work, Kernel) and work.waits for work in launched)
        assert sm < CLUSTERS or op_table.begins_early(node) == early
        mixed = any(variant(p)[0] == "mul_mat_float" for p in node.parts)  # the float path
        if tokens <= matvec.MOST_TOKENS and not mixed and node in cases:
            heads = node.op == "qkv_rope_store" and "rms_norm" in {p.op for p in node.parts}
            assert early and len(launched) == 1 + (heads and sm < CLUSTERS), node


@pytest.mark.parametrize(("tokens", "mixed"), [(9, False), (128, False), (33, True)])
def test_a_layer_of_many_tokens(tokens: int, mixed: bool):
    """Products of one x and type share a launch, gate + up + swiglu are one; x is made tiles for
    each of them once, and nothing else is between."""
    model = Decoder("tiny-llama", Q4_K, {"attn_v": Q6_K} if mixed else {})
    graph = attend_by(model.graph(tokens, tokens), "auto", "parallel_blocks")
    layer = [n for n in fuse(graph, FUSIONS).nodes if n.layer == 0]
    launched = [w.function for n in layer for w in launch_cases.works(n) if isinstance(w, Kernel)]
    two = ["half_tiles_Q8", "tensor_product"]
    qkv = ["norm_row", *two, *two[1:] * mixed, "rope_store", "attention_decode"]
    assert launched == [*qkv, *two, "norm_row", *two, *two]
    assert all(op_table.begins_early(node) for node in layer)


@pytest.mark.parametrize("works", tiers(some_works, chosen_works))
def test_arguments_are_those_the_compiler_saw(works: Callable[[], Iterable[Kernel]]):
    """As many as declared, reals where reals are, 8 bytes everywhere else."""
    for kernel in (*works(), *REPACKS):
        declared = ptx.parameters(ptx.kernel_ptx(kernel.file, kernel.defines), kernel.function)
        assert declared == ["f32" if type(a) is float else "u64" for a in kernel.args], kernel


@pytest.mark.parametrize("shape", [
    AttentionShape(1, 32, 8, 64, 8192), AttentionShape(128, 32, 8, 64, 1280, 128),
    AttentionShape(50, 8, 8, 256, 777, 7, "tail"), AttentionShape(500, 32, 8, 128, 1024),
])  # fmt: skip
def test_stream_k_gives_every_tile_to_one_block(shape: AttentionShape):
    """Blocks have equal pieces of all tiles, no more blocks than run at once, and room for two
    parts each."""
    shape = shape._replace(kv_parts="stream_k")
    tuning = attention.prefill_tuning(shape.head_dim)
    for kernel in attention.launches(shape, AttentionAt(*range(10)), 1.0, False):
        n_groups, piece = kernel.args[-2:]
        cells = 16 if kernel.function.endswith("decode") else tuning.cells
        (blocks, y), tiles = kernel.grid, n_groups * -(-shape.n_kv // cells)
        assert y == 1 and blocks <= attention.BLOCKS
        assert (blocks - 1) * piece < tiles <= blocks * piece
        needed = blocks * 2 * 16 * tuning.warps * (shape.head_dim + 2) * 4
        assert attention.scratch_bytes(shape) >= needed


def test_what_does_not_compile_is_told_in_one_line():
    """Also a tuning that the source cannot be compiled for, by name."""
    with pytest.raises(DeviceError, match=r'x\.cu does not compile for sm_90: .*"y" is undefined'):
        nvrtc.compile_source("x.cu", b"__global__ void f() { int x = y; }", {}, "sm_90")
    bad = ("TYPE_0=Q4_0", "EPILOGUE=0", "N=8", "ROWS=8", "UNROLL=1", "WARPS=8", "ROW_WARPS=1")
    with pytest.raises(DeviceError, match=r"does not compile for sm_90.*no such tuning"):
        nvrtc.cubin("product", "sm_90", bad)


def test_cubins_are_kept_by_content(tmp_path: Path, monkeypatch):
    folder, kept = tmp_path / "kernels", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    header, source = folder / "common.cuh", folder / "tiny.cu"
    header.write_text("#define VALUE 1\n#ifndef N\n#define N 0\n#endif\n")
    source.write_text('#include "common.cuh"\n__global__ void k(int* p) {*p = VALUE + N;}')
    monkeypatch.setattr(nvrtc, "source_dir", lambda: folder)
    first = nvrtc.cubin("tiny", "sm_90", (), kept)
    assert nvrtc.cubin("tiny", "sm_90", ("N=4",), kept) != first
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_source", lambda *a: pytest.fail("compiled again"))
        assert nvrtc.cubin("tiny", "sm_90", (), kept) == first
    header.write_text("#define VALUE 2\n#define N 0\n")
    assert nvrtc.cubin("tiny", "sm_90", (), kept) != first
    for path in kept.iterdir():
        path.write_bytes(b"damaged")
    assert nvrtc.cubin("tiny", "sm_90", (), kept).startswith(b"\x7fELF")


def test_a_missing_library_is_one_line(monkeypatch):
    for module, package in (("cuda.bindings", "cuda-bindings"), ("cupy", "CuPy")):
        for act in (cuda.probe, cuda.open_backend):
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "cupy", ModuleType("cupy"))
                patch.setitem(sys.modules, module, None)
                with pytest.raises(DeviceError, match=rf"^cuda needs {package} \(.*\Z"):
                    act()


def test_constants_are_those_of_the_sources():
    folders = nvrtc.source_dir(), FOLDER
    sources = {p.name: p.read_text() for folder in folders for p in folder.glob("*.cu*")}
    for value, file, name in (
        (elementwise.ROPE_HEADS, "rope.cu", "HEADS"), (SQUARES, "rms.cuh", "SQUARES"),
        (elementwise.HEADS_PER_BLOCK, "rope_store.cu", "WARPS"),
        (attention.MAX_HEAD_DIM, "rope_store.cu", "MOST_DIM"),
        (simple.SPLIT_THREADS // 32, "attention_simple.cu", "SPLIT_WARPS"),
        (matvec.MOST_SCALED // SQUARES, "rms.cuh", "MOST_SQUARES"),
        (8, "mul_mat_float.cu", "WARPS"), (8, "mul_mat_float.cu", "TOKENS"),
    ):  # fmt: skip
        found = re.search(rf"(?:#define|constexpr int) {name}\b\s*=?\s*(\d+)", sources[file])
        assert found and int(found[1]) == value, (file, name)
    for file, kernel, number in matvec.EPILOGUES.values():
        text = sources[f"{file}.cu"]
        assert f"{kernel}(" in text and f"EPILOGUE == {number}" in text
