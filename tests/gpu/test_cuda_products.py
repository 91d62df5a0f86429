"""Products of every type on the GPU against float64 and against their slow twin, at odd shapes.

Both get the same operands: weights as the file's blocks say, activations quantised beforehand where
the weights are. What is left of a distance is the kernel's own arithmetic:

* up to 8 tokens integers are exact and float32 sums of some thousand terms remain: 2e-6;
* beyond, tensor cores multiply halves. Rounding an operand to F16 changes it by 2.0e-4 (rms, of at
  most 2^-11); errors of different terms are independent, so that the result is off by as much. With
  weights in F16 only the activations are rounded. A quantised weight f q + m is rounded three
  times, as f, as m, and as a whole, where |f q| and |m| are up to twice the weight: 6e-4 in all. Of
  BF16 an operand has 3 bits less: 1.6e-3. Twice these is allowed. F32 stays F32; cuBLAS adds its
  terms in longer runs. silu(gate) * up is off by what either of its factors is: twice as much.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest

from tests.gpu.harness import (
    POISON,
    Guarded,
    Wanted,
    compile_side_by_side,
    distance,
    kernels_of,
)
from tests.gpu.twins.product import simple_product
from tests.oracles.dequantize import dequantize
from workbench.backend.cuda.device.backend import CudaBackend
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
from workbench.model.gguf.quants import quantize_activations, random_blocks, unpack_activations

pytestmark = pytest.mark.gpu

FEW, EXACT = 8, 2e-6
TOLERANCE = {"F32": 5e-6, "F16": 4e-4, "BF16": 3.2e-3}  # beyond FEW tokens
QUANTISED_TOLERANCE = 1.2e-3
TYPES = [d.name for d in WEIGHT_DTYPES]
KINDS = [d.name for d in WEIGHT_DTYPES if d in QUANTISED]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 100, 128, 130, 512, 1030)
ROWS = (1, 7, 33, 130, 1000)
# Columns by the block of a type: one block; odd numbers of them; more than a warp takes at a time.
# Of floats also what is no multiple of 8, which goes element by element.
COLS = {1: (1, 33, 264, 1000, 4103), 32: (32, 96, 1120, 4160), 256: (256, 768, 1280, 5888)}
LARGE = (3000, 8192)  # as a feed-forward layer; more than one entry of the uploader's ring


class Operands(NamedTuple):
    """One weight with its values in float64, and as many tokens of x as any test wants likewise, as
    bytes and values."""

    weight: Tensor
    data: np.ndarray
    values: np.ndarray
    x: np.ndarray
    x_values: np.ndarray


@lru_cache(maxsize=32)  # of one type
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
    """Rows and columns for a number of tokens: every row count, and other columns for each. Over
    all numbers of tokens each goes with each."""
    cols, shift = COLS[dtype.block], TOKENS.index(tokens)
    found = [(rows, cols[(i + shift) % len(cols)]) for i, rows in enumerate(ROWS)]
    return [*found, LARGE] if tokens in (2, 33) else found


def product(dtype: DType, rows: int, cols: int, tokens: int) -> Node:
    w = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    x = Tensor("x", Q8_ACT if dtype in QUANTISED else F32, (tokens, cols))
    return make("mul_mat", "y", w, x)


def kernels(sm: int) -> Wanted:
    """Every variant these tests launch."""
    nodes = (
        product(dtype, rows, cols, tokens)
        for dtype in WEIGHT_DTYPES
        for tokens in TOKENS
        for rows, cols in shapes(dtype, tokens)
    )
    return kernels_of(nodes, sm)


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


def compare(
    backend: CudaBackend,
    weights: list,
    name: str,
    rows: int,
    cols: int,
    tokens: int,
):
    """Runs the product and its twin, twice each, outputs and scratch poisoned between guards; holds
    both to float64. The two runs must give the same bits, and x must stay as it is."""
    given = operands(name, rows, cols)
    node = product(DTYPES[name], rows, cols, tokens)
    w, x = node.inputs
    memory = backend.load_weight(given.weight, given.data)
    weights.append(memory)
    x_bytes = np.ascontiguousarray(given.x[:tokens]).reshape(-1).view(np.uint8)
    held_x = Guarded(backend, x_bytes)
    held_y = Guarded(backend, np.full(node.output.nbytes, POISON, np.uint8))
    scratch = Guarded(backend, np.full(backend.scratch_bytes(node), POISON, np.uint8))
    addresses = {w: memory.address, x: held_x.address, node.output: held_y.address}
    twin = backend._prepare(
        simple_product(node, addresses.__getitem__), backend._stream(0), "slow twin"
    )
    expected = given.x_values[:tokens] @ given.values.T
    launch = backend.launch(node, addresses.__getitem__, scratch.address, stream=0)
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
    assert_counters_are_zero(backend)  # after every product that was combined by its last block


def assert_counters_are_zero(backend: CudaBackend) -> None:
    address = backend._counters_of(0)
    found = np.ones(backend._counters[0].nbytes, np.uint8)
    backend.copy(found.ctypes.data, address, found.nbytes, 0, to_host=True)()
    backend.sync_stream(0)()
    assert not found.any()
