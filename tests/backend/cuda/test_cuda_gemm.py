"""Products of several tokens without a GPU: builds fit devices and registers, k_parts fit tiles."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.profiles import tiers
from workbench.backend.cuda.kernels import nvrtc, tiling
from workbench.backend.cuda.kernels.gemm import X, glu, product, scratch_bytes
from workbench.backend.cuda.kernels.kernel import Gemm, Kernel, Work, blocks
from workbench.backend.cuda.kernels.matvec import Segment
from workbench.backend.cuda.kernels.tiling import (
    Build,
    Epilogue,
    build_for,
    shapes_for,
    tile_tokens,
)

TYPES = sorted(tiling.PLANES)
TOKENS = (9, 16, 17, 33, 64, 65, 100, 128)
WARPGROUP_TOKENS = (*TOKENS, 129, 512)  # cuBLAS takes the last two elsewhere
# rows of the weights of a launch, their columns
SIZES = (((1,), 256), ((33, 7, 65), 768), ((1024,), 4096), ((4096, 1024, 1024), 4096),
         ((4096,), 14336), ((14336, 14336), 4096), ((128256,), 4096))  # fmt: skip
GATED = (Epilogue.GLU, Epilogue.GLU_Q8)
BEGIN = 1 << 40  # of scratch
# the types that need most registers, one of 32 and one of 256 weights a block
HEAVY = ("Q8_0", "Q5_K")


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_builds_fit_the_device(dtype: str, hopper: bool):
    most = tiling.HOPPER_SHARED if hopper else tiling.MOST_SHARED
    for tokens in TOKENS:
        n = tile_tokens(tokens, hopper)
        assert n >= min(tokens, 64), "weights are read once, or twice beyond 64 tokens"
        for shape in shapes_for(dtype, tokens, hopper):
            assert shape.n == n and shape.shared_bytes(dtype) <= most
            assert 2 <= shape.stages < 8 and shape.wm % 4 == 0
            sums = shape.n * shape.rows * 4  # which lie where stages were
            results = shape.n * (shape.rows // 2 + 4) * 4  # behind them, to be quantised
            assert sums + results <= shape.shared_bytes(dtype) - 128
            assert shape.at_once(dtype) in tiling.CLUSTERS


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_block_has_a_stage(dtype: str, hopper: bool):
    for rows, cols in SIZES:
        for tokens in TOKENS:
            shape, k_parts, clustered = build_for(dtype, rows, cols, tokens, hopper=hopper)
            assert 1 <= k_parts <= min(tiling.MOST_K_PARTS, blocks(cols, shape.steps * 128))
            assert k_parts == 1 or shape.tiles(rows, tokens) <= tiling.MOST_COUNTERS
            assert k_parts > 1 or not clustered


def segments(*given: tuple[str, int]) -> list[Segment]:
    """Of types and rows; weights, biases and results at addresses that tell them apart."""
    return [
        Segment(dtype, 100 + i, rows, 200 + i, 300 + i) for i, (dtype, rows) in enumerate(given)
    ]


def x_of(tokens: int, cols: int = 4096, quantised: bool = True) -> X:
    return X(3, quantised, cols, tokens)


def kernels_of(works: list[Work]) -> list[Kernel]:
    assert not any(isinstance(work, Gemm) for work in works)
    return [work for work in works if isinstance(work, Kernel)]


@pytest.mark.parametrize("hopper", [False, True])
def test_what_lies_in_scratch_does_not_overlap(hopper: bool):
    for dtype in TYPES:
        for tokens in WARPGROUP_TOKENS if hopper else TOKENS:
            for rows, cols in SIZES:
                given, x = segments(*((dtype, n) for n in rows)), x_of(tokens, cols)
                launched = [(product(given, x, BEGIN, 5, hopper), Epilogue.PLAIN)]
                if len(rows) == 2:
                    gated = glu(given[0], given[1], x, True, BEGIN, 5, hopper)
                    launched.append((gated, Epilogue.GLU_Q8))
                for works, end in launched:
                    convert, tile = kernels_of(works)
                    at, partial = convert.args[0], tile.args[13]
                    assert isinstance(at, int) and isinstance(partial, int) and tile.args[12] == at
                    shape = build_for(dtype, rows, cols, tokens, end, hopper).shape
                    assert convert.grid[0] == blocks(tokens, shape.n) * shape.n
                    assert at + convert.grid[0] * blocks(cols, 512) * 1024 <= partial
                    last = BEGIN + scratch_bytes(dtype, rows, cols, tokens, end)
                    if "K_PARTS=1" not in tile.defines:
                        assert partial + tile.grid[0] * shape.n * shape.rows * 4 <= last


def test_weights_of_one_type_are_one_launch():
    """Whatever stands between them. The launch has the tiles and the addresses of each segment."""
    given = segments(("Q4_K", 4096), ("Q6_K", 1024), ("Q4_K", 1000))
    convert, first, second = kernels_of(product(given, x_of(16), BEGIN, 5))
    assert convert.function == "half_tiles_Q8"
    assert first.args[:12] == [300, 100, 200, 4096, 302, 102, 202, 1000, 0, 0, 0, 0]
    assert second.args[:12] == [301, 101, 201, 1024, *[0] * 8]
    for work, rows in ((first, [4096, 1000]), (second, [1024])):
        macros = dict(define.split("=") for define in work.defines)
        tiles = sum(blocks(n, 16 * int(macros["WM"])) for n in rows)
        assert work.grid == (tiles * int(macros["K_PARTS"]), 1) and macros["EPILOGUE"] == "0"


def spilled(arch: str, dtype: str, build: Build, end: Epilogue) -> str:
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
            *(f"-D{d}" for d in build.defines(dtype, end)),
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


@pytest.mark.parametrize("all_tokens", [[128], *tiers([64], [16, 32])], ids=str)
@pytest.mark.parametrize(
    "arch",
    ["sm_80", "sm_90a", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_90", "sm_100"))]
    + [pytest.param("sm_120", marks=pytest.mark.slow)],
)
def test_builds_spill_nothing(arch: str, all_tokens: list[int]):
    """sm_90: as another device would run it; products of warpgroups run side by side."""
    builds = dict.fromkeys(
        (arch, dtype, Build(shape, 2 + (shape.n > 32), shape.n > 32), end)
        for dtype in HEAVY
        for tokens in all_tokens
        for shape in shapes_for(dtype, tokens, arch == "sm_90a")
        for end in (Epilogue.PLAIN, Epilogue.GLU_Q8)
    )
    with ThreadPoolExecutor(2) as pool:
        for build, said in zip(builds, pool.map(lambda b: spilled(*b), builds), strict=True):
            assert not said, (build, said)
