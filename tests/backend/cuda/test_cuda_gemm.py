"""Products of several tokens without a GPU: builds fit devices and registers, k_parts fit tiles."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from tests.backend.cuda import ptx
from tests.profiles import rest, tiers
from workbench.backend.cuda.kernels import nvrtc, tiling
from workbench.backend.cuda.kernels.gemm import X, glu, product, scratch_bytes
from workbench.backend.cuda.kernels.kernel import Kernel, blocks
from workbench.backend.cuda.kernels.matvec import Segment
from workbench.backend.cuda.kernels.tiling import Build, Epilogue, build_for, shapes_for
from workbench.graph.ir import DTYPES

TYPES = sorted(tiling.PLANES)
TOKENS = (9, 16, 17, 33, 64, 65, 100, 128)
WARPGROUP_TOKENS = (*TOKENS, 129, 512)  # cuBLAS takes the last two elsewhere
# rows of the weights of a launch, their columns
SIZES = (((1,), 256), ((33, 7, 65), 768), ((1024,), 4096), ((4096, 1024, 1024), 4096),
         ((4096,), 14336), ((14336, 14336), 4096), ((128256,), 4096))  # fmt: skip
BEGIN = 1 << 40  # of scratch
# the types that need most registers, one of 32 and one of 256 weights a block
HEAVY = ("Q8_0", "Q5_K")


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_builds_fit_the_device(dtype: str, hopper: bool):
    """And every block has a stage."""
    most = tiling.HOPPER_SHARED if hopper else tiling.MOST_SHARED
    for tokens in TOKENS:
        n = tiling.tile_tokens(tokens, hopper)
        assert n >= min(tokens, 64), "weights are read once, or twice beyond 64 tokens"
        for shape in shapes_for(dtype, tokens, hopper):
            assert shape.n == n and shape.shared_bytes(dtype) <= most
            assert 2 <= shape.stages < 8 and shape.wm % 4 == 0
            weights = shape.rows * DTYPES[dtype].row_bytes(256 * shape.steps) // 2
            stages = shape.stages * (shape.n * shape.steps * 256 + weights)
            assert stages + 128 <= shape.shared_bytes(dtype), "no room for barriers"
            sums = shape.n * shape.rows * 4  # which lie where stages were
            results = shape.n * (shape.rows // 2 + 4) * 4  # after them, to be quantised
            assert sums + results <= shape.shared_bytes(dtype) - 128
            assert shape.at_once(dtype) in tiling.CLUSTERS
        for rows, cols in SIZES:
            shape, k_parts, clustered = build_for(dtype, rows, cols, tokens, hopper=hopper)
            assert 1 <= k_parts <= min(tiling.MOST_K_PARTS, blocks(cols, shape.steps * 128))
            assert k_parts == 1 or shape.tiles(rows, tokens) <= tiling.MOST_COUNTERS
            assert k_parts > 1 or not clustered


def segments(*given: tuple[str, int]) -> list[Segment]:
    """Of types and rows; weights, biases and results at addresses that tell them apart."""
    return [Segment(name, 100 + i, rows, 200 + i, 300 + i) for i, (name, rows) in enumerate(given)]


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_lies_in_scratch_does_not_overlap(dtype: str, hopper: bool):
    for tokens, (rows, cols) in itertools.product(WARPGROUP_TOKENS if hopper else TOKENS, SIZES):
        given, x = segments(*((dtype, n) for n in rows)), X(3, True, cols, tokens)
        launched = [(product(given, x, BEGIN, 5, hopper), Epilogue.PLAIN)]
        if len(rows) == 2:
            gated = glu(given[0], given[1], x, True, BEGIN, 5, hopper)
            launched.append((gated, Epilogue.GLU_Q8))
        for works, end in launched:
            convert, tile = cast(list[Kernel], works)
            at, partial = int(convert.args[0]), int(tile.args[13])
            shape = build_for(dtype, rows, cols, tokens, end, hopper).shape
            assert tile.args[12] == at and convert.grid[0] == blocks(tokens, shape.n) * shape.n
            assert at + convert.grid[0] * blocks(cols, 512) * 1024 <= partial
            last = BEGIN + scratch_bytes(dtype, rows, cols, tokens, end)
            whole = "K_PARTS=1" in tile.defines
            assert whole or partial + tile.grid[0] * shape.n * shape.rows * 4 <= last


def test_weights_of_one_type_are_one_launch():
    """Whatever stands between them. The launch has the tiles and the addresses of each segment."""
    given = segments(("Q4_K", 4096), ("Q6_K", 1024), ("Q4_K", 1000))
    convert, first, second = cast(list[Kernel], product(given, X(3, True, 4096, 16), BEGIN, 5))
    assert convert.function == "half_tiles_Q8"
    assert first.args[:12] == [300, 100, 200, 4096, 302, 102, 202, 1000, 0, 0, 0, 0]
    assert second.args[:12] == [301, 101, 201, 1024, *[0] * 8]
    for work, rows in ((first, [4096, 1000]), (second, [1024])):
        macros = dict(define.split("=") for define in work.defines)
        tiles = sum(blocks(n, 16 * int(macros["WM"])) for n in rows)
        assert work.grid == (tiles * int(macros["K_PARTS"]), 1) and macros["EPILOGUE"] == "0"


def spilled(arch: str, dtype: str, build: Build, end: Epilogue) -> str:
    """What the compiler says of a build's local memory, `` where it uses none."""
    source = (nvrtc.source_dir() / "tensor_product.cu").read_bytes()
    defines = tuple(build.defines(dtype, end))
    given = "tensor_product", source, nvrtc._headers(), defines
    text = ptx.compiled(*given, f"-arch={arch}", "--ptxas-options=-v")[1]
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", text)
    assert found, f"nothing about spills in: {text}"
    serial = re.findall(r".*wgmma.* serialized.*", text)
    return " ".join(serial) if found == [("0", "0")] else f"{found} {serial}"


@pytest.mark.long
@pytest.mark.parametrize("all_tokens", [[128], *tiers([64], [16, 32])], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", *rest(["sm_90", "sm_100", "sm_120"], slow=1)])
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
