"""Products of every type on the GPU against float64 and against their slow twin, at odd shapes.

Both get the same operands: weights as the file's blocks say, activations quantised beforehand where
the weights are. What is left of a distance is the kernel's own arithmetic:

* up to 8 tokens integers are exact and float32 sums of some thousand terms remain: 2e-6;
* beyond, tensor cores multiply halves. Rounding an operand to F16 changes it by 2.0e-4 (rms, of at
  most 2^-11); errors of different terms are independent, so that the result is off by as much. With
  weights in F16 only the activations are rounded. A quantised weight f q + m is rounded three
  times, as f, as m, and as a whole, where |f q| and |m| are up to twice the weight: 6e-4 in all. Of
  BF16 an operand has 3 bits less: 1.6e-3. Twice these is allowed. F32 stays F32; cuBLAS adds its
  terms in longer runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest

from tests.gpu.harness import POISON, Guarded, distance
from tests.gpu.simple import simple_product
from workbench.backend import cuda_gemm, kernels, nvrtc
from workbench.backend.cuda import CudaBackend
from workbench.backend.cuda_kernel import Kernel
from workbench.graph.ir import (
    DTYPES,
    F32,
    Q8_ACT,
    QUANTISED,
    WEIGHT_DTYPES,
    DType,
    Kind,
    Node,
    Tensor,
)
from workbench.graph.ops import make
from workbench.model.quants import (
    dequantize,
    quantize_activations,
    random_blocks,
    unpack_activations,
)

pytestmark = pytest.mark.gpu

FEW, EXACT = 8, 2e-6
TOLERANCE = {"F32": 5e-6, "F16": 4e-4, "BF16": 3.2e-3}  # beyond FEW tokens
QUANTISED_TOLERANCE = 1.2e-3
TYPES = [d.name for d in WEIGHT_DTYPES]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 100, 128, 130, 512)
ROWS = (1, 7, 33, 130, 1000)
# Columns by the block of a type: one block; odd numbers of them; more than a warp takes at a time.
# Of floats also what is no multiple of 8, which goes element by element.
COLS = {1: (1, 33, 264, 1000, 4103), 32: (32, 96, 1120, 4160), 256: (256, 768, 1280, 5888)}
LARGE = (3000, 8192)  # more than one slot of the uploader


class Operands(NamedTuple):
    """One weight with its values in float64, and 512 tokens of x likewise, as bytes and values."""

    weight: Tensor
    data: np.ndarray
    values: np.ndarray
    x: np.ndarray
    x_values: np.ndarray


@lru_cache(maxsize=24)  # those of one type
def operands(name: str, rows: int, cols: int) -> Operands:
    dtype = DTYPES[name]
    rng = np.random.default_rng(zlib.crc32(repr((name, rows, cols)).encode()))
    data = random_blocks(rng, dtype, rows, cols, cols**-0.5).reshape(-1)
    values = dequantize(data, dtype, (rows, cols)).astype(np.float64)
    x = rng.standard_normal((max(TOKENS), cols), dtype=np.float32)
    x_values = x.astype(np.float64)
    if dtype in QUANTISED:
        x = quantize_activations(x)
        quants, scales, _ = unpack_activations(x, cols)
        x_values = quants.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    return Operands(Tensor("w", dtype, (rows, cols), Kind.WEIGHT), data, values, x, x_values)


def shapes(dtype: DType, tokens: int) -> list[tuple[int, int]]:
    """Rows and columns for a number of tokens: every row count, and columns in turn, so that over
    all numbers of tokens each goes with each."""
    cols, turn = COLS[dtype.block], TOKENS.index(tokens)
    return [(rows, cols[(i + turn) % len(cols)]) for i, rows in enumerate(ROWS)]


def product(dtype: DType, rows: int, cols: int, tokens: int) -> Node:
    w = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    x = Tensor("x", Q8_ACT if dtype in QUANTISED else F32, (tokens, cols))
    return make("mul_mat", "y", w, x)


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    """Every variant these tests launch, compiled side by side."""
    nowhere = kernels.Place(lambda t: 0, 0, 0)
    wanted = {
        (work.file, work.defines)
        for dtype in WEIGHT_DTYPES
        for tokens in TOKENS
        for rows, cols in [*shapes(dtype, tokens), LARGE]
        for work in kernels.launches(product(dtype, rows, cols, tokens), nowhere)
        if isinstance(work, Kernel)
    }
    nvrtc.compile_many([*sorted(wanted), ("mul_mat", ()), ("repack", ())], backend._arch)


@pytest.fixture
def weights(backend: CudaBackend) -> Iterator[list]:
    held: list = []
    yield held
    for memory in held:
        memory.free()


def hopper_works(
    node: Node, at: Callable[[Tensor], int], scratch: int, counters: int
) -> list[Kernel]:
    """The product with builds for compute capability 9.0 alone."""
    w, x = node.inputs
    works = cuda_gemm.product(
        w.dtype.name, at(w), w.shape[0], 0, at(node.output), at(x), True, w.cols, x.shape[0],
        scratch, counters, hopper=True,
    )  # fmt: skip
    return [work for work in works if isinstance(work, Kernel)]


def compare(
    backend: CudaBackend,
    weights: list,
    name: str,
    rows: int,
    cols: int,
    tokens: int,
    hopper: bool = False,
):
    """Runs the product and its twin, twice each, outputs and scratch poisoned between guards; holds
    both to float64. The two runs must give the same bits, and x must stay as it is. hopper: with
    the builds for compute capability 9.0 alone."""
    given = operands(name, rows, cols)
    node = product(DTYPES[name], rows, cols, tokens)
    w, x = node.inputs
    memory = backend.load_weight(given.weight, given.data)
    weights.append(memory)
    x_bytes = np.ascontiguousarray(given.x[:tokens]).reshape(-1).view(np.uint8)
    held_x = Guarded(backend, x_bytes)
    held_y = Guarded(backend, np.full(node.output.nbytes, POISON, np.uint8))
    scratch = Guarded(backend, np.full(backend.scratch_bytes(node), POISON, np.uint8))
    places = {w: memory.address, x: held_x.address, node.output: held_y.address}
    twin = backend._prepare(
        simple_product(node, places.__getitem__), backend._stream(0), "slow twin"
    )
    expected = given.x_values[:tokens] @ given.values.T
    if hopper:
        works = hopper_works(node, places.__getitem__, scratch.address, backend._counters_of(0))
        calls = [backend._prepare(work, backend._stream(0), work.file) for work in works]

        def launch() -> None:
            for call in calls:
                call()
    else:
        launch = backend.launch(node, places.__getitem__, scratch.address, stream=0)
    limits = (EXACT if tokens <= FEW else TOLERANCE.get(name, QUANTISED_TOLERANCE), EXACT)
    for what, issue, most in zip(("product", "slow twin"), (launch, twin), limits, strict=True):
        results = []
        for _ in range(2):
            held_y.upload()
            scratch.upload()
            issue()
            results.append(held_y.download())
        assert np.array_equal(results[0], results[1]), f"two runs of the {what} differ"
        found = results[0].view(np.float32).reshape(tokens, rows)
        apart = distance(found, expected)
        assert apart < most, (what, name, rows, cols, tokens, apart)
    scratch.download()
    assert np.array_equal(held_x.download(), x_bytes), "x was overwritten"
    for guarded in (held_x, held_y, scratch):
        guarded.memory.free()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TYPES)
def test_products(backend: CudaBackend, weights: list, name: str, tokens: int):
    for rows, cols in shapes(DTYPES[name], tokens):
        compare(backend, weights, name, rows, cols, tokens)


@pytest.mark.parametrize("tokens", [2, 33])
@pytest.mark.parametrize("name", TYPES)
def test_large_products(backend: CudaBackend, weights: list, name: str, tokens: int):
    """In the shape of a feed-forward layer."""
    compare(backend, weights, name, *LARGE, tokens)


@pytest.mark.parametrize("tokens", [33, 64, 65, 100, 128])
@pytest.mark.parametrize("name", [d.name for d in QUANTISED])
def test_hopper_products(backend: CudaBackend, weights: list, name: str, tokens: int):
    """The larger builds: one turn of the ring of stages and several, blocks that add up and not."""
    if backend._arch != "sm_90":
        pytest.skip("builds for compute capability 9.0")
    cols = COLS[DTYPES[name].block]
    for rows, width in ((1, cols[0]), (130, cols[1]), (1000, cols[2]), (257, cols[3])):
        compare(backend, weights, name, rows, width, tokens, hopper=True)


def test_counters_are_zero_again(backend: CudaBackend, weights: list):
    """After every product that was combined by its last block."""
    for tokens in (1, 16, 64):
        compare(backend, weights, "Q4_K", 33, 5888, tokens)
    address = backend._counters_of(0)
    found = np.ones(backend._counters[0].nbytes, np.uint8)
    backend.copy(found.ctypes.data, address, found.nbytes, 0, to_host=True)()
    backend.sync_stream(0)()
    assert not found.any()


def test_shapes_pair_every_row_count_with_every_width():
    for dtype in WEIGHT_DTYPES:
        pairs = {pair for tokens in TOKENS for pair in shapes(dtype, tokens)}
        assert len(pairs) == len(ROWS) * len(COLS[dtype.block])
