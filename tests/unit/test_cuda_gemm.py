"""Products of several tokens without a GPU: builds fit devices and registers, splits fit tiles."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from workbench.backend import cuda_gemm, nvrtc
from workbench.backend.cuda_gemm import Shape, product, scratch_bytes, shape_for, split_for
from workbench.backend.cuda_kernel import Kernel, blocks

TYPES = sorted(cuda_gemm.PLANES)
TOKENS = (9, 16, 17, 33, 64, 65, 100, 128)
SIZES = ((1, 256), (33, 768), (1024, 4096), (6144, 4096), (4096, 14336), (128256, 4096))
# the types that need most registers, one of 32 and one of 256 weights a block
HEAVY = ("Q8_0", "Q5_K")


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_builds_fit_the_device(dtype: str, hopper: bool):
    most = cuda_gemm.HOPPER_SHARED if hopper else cuda_gemm.MOST_SHARED
    for tokens in TOKENS:
        shape = shape_for(dtype, tokens, hopper)
        assert shape.shared_bytes(dtype) <= most
        assert shape.n >= min(tokens, 64), "weights are read once, or twice beyond 64 tokens"
        assert 2 <= shape.stages < 8 and shape.wm % 4 == 0
        sums = shape.n * shape.rows * 4  # which take the place of stages
        assert sums <= shape.shared_bytes(dtype) - 128
        assert shape.at_once(dtype) in cuda_gemm.CLUSTERS


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_block_has_a_stage(dtype: str, hopper: bool):
    for rows, cols in SIZES:
        for tokens in TOKENS:
            shape = shape_for(dtype, tokens, hopper)
            split = split_for(dtype, shape, rows, cols, tokens)
            tiles = blocks(rows, shape.rows) * blocks(tokens, shape.n)
            assert 1 <= split <= min(cuda_gemm.MOST_SPLIT, blocks(cols, shape.steps * 128))
            assert split == 1 or tiles <= cuda_gemm.MOST_COUNTERS


def test_a_tile_is_shared_where_tiles_are_few():
    """Not by default: with a tile for every block a device has at once, sharing only costs."""
    shape = shape_for("Q4_0", 16)
    few, many = (split_for("Q4_0", shape, rows, 4096, 16) for rows in (1024, 264 * shape.rows))
    assert few > 1 and many == 1


@pytest.mark.parametrize("hopper", [False, True])
def test_what_lies_in_scratch_does_not_overlap(hopper: bool):
    for dtype in TYPES:
        for tokens in TOKENS:
            rows, cols = 4096, 4096
            convert, tile = product(
                dtype, 1, rows, 0, 2, 3, True, cols, tokens, 1 << 40, 5, hopper=hopper
            )
            assert isinstance(convert, Kernel) and isinstance(tile, Kernel)
            x, partial = convert.args[0], tile.args[4]
            assert isinstance(x, int) and isinstance(partial, int) and tile.args[2] == x
            n = shape_for(dtype, tokens, hopper).n
            assert convert.grid[0] == blocks(tokens, n) * n
            assert x + convert.grid[0] * blocks(cols, 512) * 1024 <= partial
            end = (1 << 40) + scratch_bytes(dtype, rows, cols, tokens)
            shape, split = shape_for(dtype, tokens, hopper), tile.defines[-2]
            if split != "SPLIT=1":
                assert partial + tile.grid[0] * shape.n * shape.rows * 4 <= end


def test_types_share_a_conversion():
    """Products of one x by weights of several quantised types convert it once."""
    for tokens in TOKENS:
        made = {
            repr(product(dtype, 1, 4096, 0, 2, 3, True, 4096, tokens, 1 << 40, 5)[0])
            for dtype in TYPES
        }
        assert len(made) == 1


def spilled(arch: str, dtype: str, shape: Shape, split: int) -> str:
    """What the compiler says of a build's local memory, `` where it uses none."""
    api = nvrtc._nvrtc()
    source = (nvrtc.source_dir() / "tensor_product.cu").read_bytes()
    headers = nvrtc._headers()
    program = nvrtc._call(
        api, "nvrtcCreateProgram", source, b"tensor_product.cu", len(headers),
        list(headers.values()), [name.encode() for name in headers],
    )  # fmt: skip
    try:
        wanted = (
            f"-arch={arch}", "--ptxas-options=-v", *nvrtc.OPTIONS,
            *(f"-D{d}" for d in shape.defines(dtype, split)),
        )  # fmt: skip
        (error,) = api.nvrtcCompileProgram(program, len(wanted), [o.encode() for o in wanted])
        log = bytes(nvrtc._call(api, "nvrtcGetProgramLogSize", program))
        nvrtc._call(api, "nvrtcGetProgramLog", program, log)
    finally:
        api.nvrtcDestroyProgram(program)
    text = log.rstrip(b"\0").decode()
    assert not error, text
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", text)
    assert found, f"nothing about spills in: {text}"
    serial = re.findall(r".*wgmma.* serialized.*", text)
    return " ".join(serial) if found == [("0", "0")] else f"{found} {serial}"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_builds_spill_nothing(arch: str):
    """sm_90: as another device would run it; products of warpgroups run side by side."""
    builds: dict[tuple[str, str, Shape, int], None] = {}
    for dtype in HEAVY:
        for tokens in (16, 32, 64, 128):
            shape = shape_for(dtype, tokens, arch == "sm_90a")
            builds[arch, dtype, shape, 3 if shape.clustered else 2] = None
    with ThreadPoolExecutor(2) as pool:
        for build, said in zip(builds, pool.map(lambda b: spilled(*b), builds), strict=True):
            assert not said, (build, said)


def test_one_architecture_has_its_own_instructions():
    """sm_90 means sm_90a for this file: nothing else runs there that is compiled for sm_90."""
    shape = shape_for("Q4_0", 16)
    defines = shape.defines("Q4_0", 2)
    assert nvrtc.cubin("tensor_product", "sm_90", defines) == nvrtc.cubin(
        "tensor_product", "sm_90a", defines
    )
    assert b"tensor_product" in nvrtc.cubin("tensor_product", "sm_100", defines)
