"""Products of more than 8 tokens on the cuda backend: the launches of kernels and of cuBLAS.

Pure. There are two ways. Both use tensor cores and sum in float32:

* `tile`: kernels/tensor_product.cu decodes quantised weights in registers, and so reads them once.
  One launch has up to three weights of one x and one type, or gate and up with their swiglu.
* `cublas`: F16, BF16 and F32 weights are multiplied by cuBLAS as they are. Quantised weights are
  first expanded to F16 in scratch, some rows at a time.

Expanding writes and reads 2 bytes a weight; a Q4_0 file has 0.56. So `cublas` is faster only once
the tensor cores, not the memory, take most of the time. WARPGROUP_TILES_UP_TO and TILES_UP_TO hold
these limits. They come from this table: us of the products of a layer of an 8B model, `tile` then
`cublas`, random weights, one H100 80GB HBM3 (data/results/tuning/tensor_product-5.json). The times
of `tile` include the swiglu, those of `cublas` do not:

    tokens        128       256       512       640       768      1024      1536
    Q4_0     134  390  219  446  401  549  549  627  637  681  776  814 1172 1124
    Q8_0     157  432  256  487  471  596  633  668  734  721  881  852 1327 1168
    MXFP4    151  387  252  442  470  546  611  615  715  666  860  787 1284 1063
    Q4_K     155  391  265  447  468  546  653  628  767  683  935  814 1403 1112
    Q5_K     175  402  300  458  547  563  712  639  841  693 1023  826 1550 1127
    Q6_K     174  413  294  468  556  572  724  648  852  705 1042  832 1567 1136

Without warpgroups a step of 128 tokens takes 1.8 times as long with tiles (7.01 ms, not 3.87). That
is more than half of the time of cuBLAS, so 256 tokens would be slower than cuBLAS. Float weights
have no tiles: with cuBLAS they reach 79 to 83 % of the memory's limit at 16 to 128 tokens.

x is converted first, to the start of scratch:

    weights              x
    quantised, `tile`    F16 in the tiles of kernels/tensor_product.cu
    quantised, `cublas`  F16 in the column order of kernels/halves.cuh
    F16                  F16 rows
    BF16                 BF16 rows, in a second area of scratch
    F32                  as it is

A conversion of the same x to the same place is not repeated.
"""

import functools
from collections.abc import Sequence

from workbench.backend.cuda.kernels.kernel import Gemm, Kernel, Work, blocks
from workbench.backend.cuda.kernels.matvec import Segment, X, segment_args
from workbench.backend.cuda.kernels.tiling import Build, Epilogue, build_for, tile_tokens
from workbench.backend.issue.args import Args
from workbench.graph.ir import QUANTISED

# The most tokens for which quantised weights use `tile`: with warpgroups (compute capability 9.0),
# and without them.
WARPGROUP_TILES_UP_TO = {
    "Q8_0": 640, "Q4_0": 1024, "MXFP4": 640, "Q4_K": 512, "Q5_K": 512, "Q6_K": 512,
}  # fmt: skip
TILES_UP_TO = 128
MOST_TILED = max(WARPGROUP_TILES_UP_TO.values())

EXPANDED_BYTES = 64 << 20  # F16 weights that are expanded at a time
UNITS_IN_FLIGHT = 2  # units of a thread of `dequantise`: IN_FLIGHT of kernels/dequantise.cu
_QUANTISED = frozenset(t.name for t in QUANTISED)


def padded(dtype: str, cols: int) -> int:
    """Halves of a row of converted activations, and of expanded weights."""
    return blocks(cols, 128) * 128 if dtype in _QUANTISED else cols


def by_tile(dtype: str, n_tokens: int, hopper: bool) -> bool:
    """Whether a product uses `tile`. hopper: whether the compute capability is 9.0."""
    if dtype not in _QUANTISED:
        return False
    return n_tokens <= (WARPGROUP_TILES_UP_TO[dtype] if hopper else TILES_UP_TO)


@functools.cache
def _x_bytes(cols: int, n_tokens: int, hopper: bool) -> int:
    """Bytes of each of the two areas for converted activations: enough for weights of any type."""
    n = tile_tokens(n_tokens, hopper) if n_tokens <= MOST_TILED else 1
    tokens = blocks(n_tokens, n) * n
    return blocks(tokens * blocks(cols, 512) * 512 * 2, 256) * 256


def _rows_at_once(cols: int) -> int:
    """Rows of weights that are expanded together."""
    return max(EXPANDED_BYTES // (padded("Q8_0", cols) * 2) // 256 * 256, 256)


def can_glu(dtype: str, rows: int, n_tokens: int, quantised: bool, hopper: bool) -> bool:
    """Whether `glu` takes gate and up of `rows` rows each. A quantised result needs whole blocks of
    32 rows."""
    return by_tile(dtype, n_tokens, hopper) and not (quantised and rows % 32)


@functools.cache
def scratch_bytes(
    dtype: str, rows: tuple[int, ...], cols: int, n_tokens: int, end: Epilogue = Epilogue.PLAIN
) -> int:
    """Bytes of scratch that `product` or `glu` needs on any device: two areas for activations, then
    expanded weights or sums.

    rows: of each weight; all weights have type `dtype`.
    """
    return max(_scratch_bytes(dtype, rows, cols, n_tokens, end, hopper) for hopper in (False, True))


def _scratch_bytes(
    dtype: str, rows: tuple[int, ...], cols: int, n_tokens: int, end: Epilogue, hopper: bool
) -> int:
    if by_tile(dtype, n_tokens, hopper):
        shape, k_parts, _ = build_for(dtype, rows, cols, n_tokens, end, hopper)
        tiles = shape.tiles(rows, n_tokens, end)
        rest = tiles * k_parts * shape.n * shape.rows * 4 if k_parts > 1 else 0
    elif dtype in _QUANTISED:
        rest = min(max(rows), _rows_at_once(cols)) * padded(dtype, cols) * 2
    else:
        rest = 0
    return 2 * _x_bytes(cols, n_tokens, hopper) + rest


def by_type(segments: Sequence[Segment]) -> list[list[Segment]]:
    """The segments of each weight type, in the order in which the types first occur."""
    found: dict[str, list[Segment]] = {}
    for segment in segments:
        found.setdefault(segment.dtype, []).append(segment)
    return list(found.values())


def product(
    segments: Sequence[Segment], x: X, scratch: int, counters: int, hopper: bool = False
) -> list[Work]:
    """The products of one x with up to three weights, plus biases. x is converted once for all
    weights that need the same conversion.

    scratch: the largest `scratch_bytes` of the types.
    counters: MOST_COUNTERS u32, zero before and after.
    hopper: whether the device has compute capability 9.0.
    """
    made: list[Work] = []
    for same in by_type(segments):
        if by_tile(same[0].dtype, x.n_tokens, hopper):
            made += _tiled(same, x, scratch, counters, hopper, Epilogue.PLAIN)
        else:
            made += [work for s in same for work in _by_blas(s, x, scratch, hopper)]
    return [work for i, work in enumerate(made) if work not in made[:i]]


def glu(
    gate: Segment, up: Segment, x: X, quantised: bool, scratch: int, counters: int,
    hopper: bool = False,
) -> list[Work]:  # fmt: skip
    """silu(gate) * up, stored at gate's dst: F32 (n_tokens, rows), or with `quantised` Q8_ACT rows.
    Only where `can_glu`. The other arguments are as for `product`."""
    end = Epilogue.GLU_Q8 if quantised else Epilogue.GLU
    return _tiled([gate, up], x, scratch, counters, hopper, end)


def _tiled(
    segments: Sequence[Segment], x: X, scratch: int, counters: int, hopper: bool, end: Epilogue
) -> list[Work]:
    rows = tuple([segment.rows for segment in segments])
    build = build_for(segments[0].dtype, rows, x.cols, x.n_tokens, end, hopper)
    partial = scratch + 2 * _x_bytes(x.cols, x.n_tokens, hopper)
    return [
        tiles(build.shape.n, scratch, x),
        tile(build, segments, x._replace(at=scratch), partial, counters, end),
    ]


def _by_blas(segment: Segment, x: X, scratch: int, hopper: bool) -> list[Work]:
    """A product by cuBLAS. Before it, x is converted and weights are expanded where necessary."""
    dtype, _, rows, bias, dst = segment
    x_bytes = _x_bytes(x.cols, x.n_tokens, hopper)
    converted = scratch + (x_bytes if dtype == "BF16" else 0)
    works: list[Work] = []
    if dtype == "F32":
        converted = x.at
    else:
        works.append(_conversion(dtype, converted, x))
    works += _blas(segment, converted, x.cols, x.n_tokens, scratch + 2 * x_bytes)
    if bias:
        grid = (x.n_tokens, blocks(rows, 256))
        works.append(
            Kernel("dequantise", "add_bias", grid, 256, [dst, bias, rows, rows], waits=True)
        )
    return works


def _conversion(dtype: str, dst: int, x: X) -> Kernel:
    if dtype not in _QUANTISED:
        n = x.n_tokens * x.cols
        name = "half_rows" if dtype == "F16" else "bfloat_rows"
        return Kernel("dequantise", name, (blocks(n, 1024), 1), 256, [dst, x.at, n], waits=True)
    name = "half_rows_Q8" if x.quantised else "half_rows_F32"
    grid = (x.n_tokens, blocks(padded(dtype, x.cols), 2048))
    return Kernel("dequantise", name, grid, 256, [dst, x.at, x.cols], waits=True)


def tiles(n: int, dst: int, x: X) -> Kernel:
    """The conversion of x to tiles of n tokens. Weights of every type, in every build of that n,
    read the same tiles."""
    name = "half_tiles_Q8" if x.quantised else "half_tiles_F32"
    grid = (blocks(x.n_tokens, n) * n, blocks(blocks(x.cols, 512) * 32, 256))
    args: Args = [dst, x.at, x.cols, x.n_tokens, n]
    return Kernel("dequantise", name, grid, 256, args, waits=True)


def tile(
    build: Build, segments: Sequence[Segment], x: X, partial: int, counters: int,
    end: Epilogue = Epilogue.PLAIN,
) -> Kernel:  # fmt: skip
    """The launch of kernels/tensor_product.cu for weights of one type.

    x: activations in tiles.
    partial: F32, a tile of results for each block, where several blocks share a tile.
    """
    args: Args = [*segment_args(segments), x.at, partial, counters, x.cols, x.n_tokens]
    rows = tuple([segment.rows for segment in segments])
    grid, threads, macros, shared = _cut(build, segments[0].dtype, rows, x.n_tokens, end)
    return Kernel(
        "tensor_product", "tensor_product", grid, threads, args, macros, shared, waits=True
    )


@functools.cache
def _cut(
    build: Build, dtype: str, rows: tuple[int, ...], n_tokens: int, end: Epilogue
) -> tuple[tuple[int, int], int, tuple[str, ...], int]:
    """Grid, threads, macros and shared memory of `tile`. rows: of each weight."""
    shape = build.shape
    n, threads = shape.tiles(rows, n_tokens, end) * build.k_parts, 32 * (shape.wm + shape.loading)
    return (n, 1), threads, build.defines(dtype, end), shape.shared_bytes(dtype)


def _blas(segment: Segment, x: int, cols: int, n_tokens: int, expanded: int) -> list[Work]:
    """The products by cuBLAS: of float weights in one call, of quantised weights in a call for each
    `_rows_at_once` rows, which are expanded before it."""
    dtype, w, rows, _, dst = segment
    if dtype not in _QUANTISED:
        return [Gemm(dtype, dst, w, x, rows, cols, n_tokens, rows)]
    works: list[Work] = []
    columns = padded(dtype, cols)
    step = _rows_at_once(cols)
    for first in range(0, rows, step):
        n = min(step, rows - first)
        works.append(dequantise(dtype, expanded, w, first, n, rows, cols))
        works.append(Gemm("F16", dst + 4 * first, expanded, x, n, columns, n_tokens, rows))
    return works


def dequantise(dtype: str, dst: int, w: int, first: int, n: int, rows: int, cols: int) -> Kernel:
    """The launch that expands rows first .. first + n - 1 of a weight of `rows` rows to F16
    (n, padded cols)."""
    grid = (blocks(n * padded(dtype, cols) // 32, 256 * UNITS_IN_FLIGHT), 1)
    args: Args = [dst, w, first, n, rows, cols]
    return Kernel("dequantise", f"dequantise_{dtype}", grid, 256, args, waits=True)
