"""The CUDA kernels without a GPU: they compile, and the launch table fits them."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest

from workbench.backend import cuda, kernels
from workbench.backend.args import pack
from workbench.errors import DeviceError
from workbench.graph.ir import (
    DTYPES,
    F16,
    F32,
    I32,
    I64,
    Q8_ACT,
    QUANTISED,
    WEIGHT_DTYPES,
    Kind,
    Tensor,
)
from workbench.graph.ops import OPS, make

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def nodes(tokens: int = 1, n_kv: int = 256):
    """One node of every op and weight type."""
    x, row = Tensor("x", F32, (tokens, 1280)), Tensor("b", F32, (1280,))
    yield make("rms_norm", "n", x, eps=1e-5)
    yield make("mul", "m", x, row)
    yield make("add", "a", x, x)
    yield make("swiglu", "s", x, x)
    yield make("quantize", "q", x)
    heads = Tensor("h", F32, (tokens, 10, 128))
    positions = Tensor("p", I32, (tokens,))
    rope = {"n_rot": 128, "neox": True, "theta_base": 1e4, "freq_scale": 1.0}
    yield make("rope", "r", heads, positions, **rope)
    cache = Tensor("k", F16, (n_kv, 1280), Kind.CACHE)
    yield make("set_rows", "k", cache, x, Tensor("i", I64, (tokens,)), n_kv=n_kv)
    mask = Tensor("mask", F16, (tokens, n_kv))
    yield make("attention", "o", heads, cache, cache, mask, n_kv=n_kv, n_head_kv=10, scale=0.1)
    for dtype in WEIGHT_DTYPES:
        w = Tensor("w", dtype, (19, 1280), Kind.WEIGHT)
        acts = Tensor("y", Q8_ACT if dtype in QUANTISED else F32, (tokens, 1280))
        yield make("get_rows", "e", w, Tensor("ids", I32, (tokens,)))
        yield make("mul_mat", "z", w, acts)


def planned(tokens: int, n_kv: int = 256) -> list[kernels.Kernel]:
    found = []
    for node in nodes(tokens, n_kv):
        found += kernels.launches(node, pack(node, lambda t: 4096, 8192))
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch: str):
    cubins = kernels.compile_all(arch)
    assert set(cubins) == {p.stem for p in kernels.source_files()}
    for tokens in (1, 3, 8, 9):
        for kernel in planned(tokens, n_kv=4096):
            name = b".text." + kernel.function.encode() + b"\0"
            assert name in cubins[kernel.file], f"{kernel.function} is not in {kernel.file}.cu"
    repack = kernels.repack("Q6_K", 0, 0, 0, 1, 1, 210)
    for name in (repack.function, "gate", "read_memory"):
        assert b".text." + name.encode() + b"\0" in cubins["device"]


def test_every_op_has_a_launch():
    assert {node.op for node in nodes()} == set(OPS)
    for tokens in (1, 2, 4, 8, 9, 17, 600):
        for kernel in planned(tokens):
            assert all(n > 0 for n in kernel.grid) and kernel.grid[1] < 1 << 16
            assert kernel.block % 32 == 0 and 0 < kernel.block <= 1024


def test_arguments_are_as_many_as_a_kernel_declares():
    text = {p.stem: p.read_text() for p in kernels.source_files()}
    for kernel in planned(1, n_kv=4096) + [kernels.repack("Q4_0", 0, 0, 0, 1, 1, 18)]:
        names = [kernel.function, *MACROS.get(re.sub("_[A-Z].*|_n.$", "", kernel.function), ())]
        lists = [
            m.group(1)
            for name in names
            for m in re.finditer(
                rf"\b{re.escape(name)}\s*\(([^()]*)\)\s*\\?\s*{{", text[kernel.file]
            )
        ]
        assert lists, f"no definition of {kernel.function} in {kernel.file}.cu"
        for declared in lists:
            assert declared.count(",") + 1 == len(kernel.args), kernel.function


# kernels that a macro defines: op -> the names as the macro writes them
MACROS = {
    "mul_mat": ("mul_mat_##TYPE##_n##N",),
    "get_rows": ("get_rows_##TYPE",),
    "mul": ("NAME",),
    "add": ("NAME",),
}


def test_constants_are_those_of_the_sources():
    text = {p.stem: p.read_text() for p in kernels.source_files()}
    warps = int(re.search(r"#define WARPS (\d+)", text["mul_mat"])[1])
    made = dict(re.findall(r"KIND\(TYPE, (\d+), (\w+),", text["mul_mat"]))
    for name, rows_8 in re.findall(r"^ALL\(\w+, (\w+), \d, (\d)\)", text["mul_mat"], re.M):
        found = {int(n): warps * int(rows.replace("ROWS_8", rows_8)) for n, rows in made.items()}
        k_type = DTYPES[name].block == 256
        assert found == (kernels.MUL_MAT_ROWS_K if k_type else kernels.MUL_MAT_ROWS)
    split = int(re.search(r"#define SPLIT_WARPS (\d+)", text["attention"])[1])
    assert 32 * split == kernels.SPLIT_THREADS
    assert int(re.search(r"#define HEADS (\d+)", text["rope"])[1]) == kernels.ROPE_HEADS
    tiles = re.findall(r"^TILE\((\d+), (\d+)\)", text["attention"], re.M)
    assert {32 * int(d): (f"attention_tile_d{d}", 4 * int(q)) for d, q in tiles} == kernels.TILES


def test_attention_splits_by_padded_length_alone():
    assert [kernels.n_shares(n) for n in (1, 256, 257, 512, 8192, 1 << 20)] == [1, 1, 2, 2, 32, 32]
    heads, mask = Tensor("q", F32, (3, 8, 64)), Tensor("m", F16, (3, 1024))
    cache = Tensor("k", F16, (1024, 512), Kind.CACHE)
    node = make("attention", "o", heads, cache, cache, mask, n_kv=1024, n_head_kv=8, scale=0.1)
    assert kernels.scratch_bytes(node) == 3 * 8 * 4 * (64 + 2) * 4
    split, combine = kernels.launches(node, pack(node, lambda t: 4096, 8192))
    assert split.grid == (24, 4) and combine.args == [4096, 8192, 4, 64]


@pytest.mark.parametrize("dtype", [d for d in WEIGHT_DTYPES if d.name in kernels.PLANES])
def test_planes_are_the_whole_block(dtype):
    fields = sorted(kernels.PLANES[dtype.name])
    ends = [at + n for at, n in fields]
    assert [at for at, _ in fields] == [0, *ends[:-1]] and ends[-1] == dtype.block_bytes
    plane = 0
    for _, size in kernels.PLANES[dtype.name]:
        assert plane * dtype.block_bytes % 2 == 0
        plane += size


def test_a_compile_error_is_one_line():
    with pytest.raises(DeviceError, match=r'x\.cu does not compile for sm_90: .*"y" is undefined'):
        kernels.compile_source("x.cu", b"__global__ void f() { int x = y; }", {}, "sm_90")


def test_cubins_are_kept_by_content(tmp_path: Path, monkeypatch):
    sources = tmp_path / "kernels"
    sources.mkdir()
    (sources / "common.cuh").write_text("#define VALUE 1\n")
    (sources / "tiny.cu").write_text(
        '#include "common.cuh"\n__global__ void k(int* p) {*p = VALUE;}'
    )
    monkeypatch.setattr(kernels, "source_dir", lambda: sources)
    kept = tmp_path / "kept"
    kept.mkdir()
    first = kernels.compile_all("sm_90", kept)
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr(kernels, "compile_source", lambda *a: pytest.fail("compiled again"))
    assert kernels.compile_all("sm_90", kept) == first
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "source_dir", lambda: sources)
    (sources / "common.cuh").write_text("#define VALUE 2\n")
    assert kernels.compile_all("sm_90", kept) != first
    for path in kept.iterdir():
        path.write_bytes(b"damaged")
    assert kernels.compile_all("sm_90", kept)["tiny"].startswith(b"\x7fELF")


def test_the_cache_needs_no_home(tmp_path: Path, monkeypatch):
    nowhere = tmp_path / "file"
    nowhere.write_text("")  # a home that is no folder: cannot be made into one
    monkeypatch.setattr(Path, "home", lambda: nowhere)
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(tmp_path))
    folder = kernels.cache_dir()
    assert folder.parent == tmp_path and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert kernels.cache_dir() == folder


@pytest.mark.parametrize(
    ("module", "package"), [("cupy", "CuPy"), ("cuda.bindings", "cuda-bindings")]
)
def test_a_missing_library_is_one_line(monkeypatch, module: str, package: str):
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, module, None)
    for act in (cuda.probe, cuda.open_backend):
        with pytest.raises(DeviceError) as caught:
            act()
        assert str(caught.value).startswith(f"cuda needs {package} (")
        assert "\n" not in str(caught.value)
