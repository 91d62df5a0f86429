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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from workbench.backend.cuda.kernels import gemm
from workbench.backend.cuda.kernels.kernel import Kernel, Work
from workbench.backend.cuda.kernels.matvec import Segment
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
LARGE = (3000, 8192)  # more than one entry of the ring of the uploader
# Several weights of one launch: rows of Q, K and V, rows of gate and of up, columns of all.
SEGMENTS, GATED, WIDTH = (130, 7, 193), (33, 96, 544), 1280
MANY = (9, 16, 33, 64, 100, 128, 300)


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
    return [(rows, cols[(i + shift) % len(cols)]) for i, rows in enumerate(ROWS)]


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
        for rows, cols in [*shapes(dtype, tokens), LARGE]
    )
    wanted = kernels_of(nodes, sm)
    for dtype in QUANTISED:
        for tokens in MANY:
            for hopper in tiled(sm, dtype.name, tokens):
                wanted |= {(w.file, w.defines) for w in several_works(dtype.name, tokens, hopper)}
    return wanted


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


def several_works(name: str, tokens: int, hopper: bool) -> list[Kernel]:
    """The launches of the tests of several weights, at no addresses."""
    x = gemm.X(0, True, WIDTH, tokens)
    works: list[Work] = []
    for rows in ((130,), (7,), (193,), SEGMENTS[:2], SEGMENTS, (130, 193)):
        segments = [Segment(name, i, n, 0, i) for i, n in enumerate(rows)]
        works += gemm.product(segments, x, 0, 0, hopper)
    for n in GATED:
        pair = Segment(name, 0, n, 0, 0), Segment(name, 1, n, 0, 0)
        works += gemm.glu(*pair, x, False, 0, 0, hopper)
        works += gemm.glu(*pair, x, True, 0, 0, hopper)
    return [work for work in works if isinstance(work, Kernel)]


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


@pytest.mark.parametrize("tokens", [2, 33])
@pytest.mark.parametrize("name", TYPES)
def test_large_products(backend: CudaBackend, weights: list, name: str, tokens: int):
    """In the shape of a feed-forward layer."""
    compare(backend, weights, name, *LARGE, tokens)


# several weights of one launch -------------------------------------------------------------------


class Several:
    """Weights of some types and rows with biases, x of the first and room for results, all of it
    between guards; `hopper` chooses the builds."""

    def __init__(self, backend: CudaBackend, held: list, types: list[str], rows: tuple[int, ...],
                 tokens: int, hopper: bool, cols: int = WIDTH):  # fmt: skip
        self.backend, self.tokens, self.rows, self.hopper = backend, tokens, rows, hopper
        given = [operands(name, n, cols) for name, n in zip(types, rows, strict=True)]
        biases = [np.linspace(-1, 1, n, dtype=np.float32) if i != 1 else None
                  for i, n in enumerate(rows)]  # fmt: skip
        self.expected = [
            given[0].x_values[:tokens] @ g.values.T + (0 if bias is None else bias)
            for g, bias in zip(given, biases, strict=True)
        ]
        loaded = [backend.load_weight(g.weight, g.data) for g in given]
        held += loaded
        self.x = self.guarded(given[0].x[:tokens])
        self.dst = [self.guarded(np.full((tokens, n), np.nan, np.float32)) for n in rows]
        kept = [None if bias is None else self.guarded(bias) for bias in biases]
        self.segments = [
            Segment(name, memory.address, n, bias.address if bias else 0, dst.address)
            for name, memory, n, bias, dst in zip(types, loaded, rows, kept, self.dst, strict=True)
        ]
        self.all = [self.x, *self.dst, *(bias for bias in kept if bias)]
        self.given = gemm.X(self.x.address, True, cols, tokens)
        self.counters = backend._counters_of(0)

    def guarded(self, content: np.ndarray) -> Guarded:
        bytes_of = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        return Guarded(self.backend, bytes_of)

    def product(self) -> list[np.ndarray]:
        rows: dict[str, list[int]] = {}
        for s in self.segments:
            rows.setdefault(s.dtype, []).append(s.rows)
        need = max(gemm.scratch_bytes(t, n, WIDTH, self.tokens) for t, n in rows.items())
        found = self.run(need, self.dst, lambda scratch: gemm.product(
            self.segments, self.given, scratch, self.counters, self.hopper
        ))  # fmt: skip
        return [raw.view(np.float32).reshape(self.tokens, -1) for raw in found]

    def glu(self, quantised: bool, dst: Guarded) -> np.ndarray:
        gate, up = (s._replace(dst=dst.address) for s in self.segments)
        end = gemm.Epilogue.GLU_Q8 if quantised else gemm.Epilogue.GLU
        need = gemm.scratch_bytes(gate.dtype, self.rows, WIDTH, self.tokens, end)
        (found,) = self.run(need, [dst], lambda scratch: gemm.glu(
            gate, up, self.given, quantised, scratch, self.counters, self.hopper
        ))  # fmt: skip
        return found

    def run(
        self, need: int, into: list[Guarded], works: Callable[[int], list[Work]]
    ) -> list[np.ndarray]:
        """What lies in `into` after the works, which are told where scratch is: twice the same."""
        scratch = Guarded(self.backend, np.full(need, POISON, np.uint8))
        calls = prepared(self.backend, works(scratch.address))
        results = []
        for _ in range(2):
            for guarded in (*into, scratch):
                guarded.upload()
            for call in calls:
                call()
            results.append([guarded.download() for guarded in into])
        for first, second in zip(*results, strict=True):
            assert np.array_equal(first, second), "two runs differ"
        scratch.download()
        scratch.memory.free()
        return results[0]

    def close(self) -> None:
        for guarded in self.all:
            guarded.download()
            guarded.memory.free()


def prepared(backend: CudaBackend, works: list[Work]) -> list[Callable[[], None]]:
    kernels_alone = [work for work in works if isinstance(work, Kernel)]
    assert len(kernels_alone) == len(works)
    return [backend._prepare(work, backend._stream(0), work.file) for work in kernels_alone]


def builds(sm: int) -> list[bool]:
    """Those of any device, and those for compute capability 9.0 alone where this is one."""
    return [False, True] if sm == 90 else [False]


def tiled(sm: int, name: str, tokens: int) -> list[bool]:
    """Those of `builds` that decode weights of this type in the tile."""
    return [hopper for hopper in builds(sm) if gemm.by_tile(name, tokens, hopper)]


@pytest.mark.parametrize("tokens", MANY)
@pytest.mark.parametrize("name", KINDS)
def test_several_weights_of_one_x(backend: CudaBackend, weights: list, name: str, tokens: int):
    """Of one type in one launch, and the last of another type in a launch behind it."""
    other = "Q6_K" if name != "Q6_K" else "Q4_0"
    for types in ([name] * 2, [name] * 3, [name, name, other], [name, other, name]):
        for hopper in tiled(backend._sm, name, tokens):
            several = Several(backend, weights, types, SEGMENTS[: len(types)], tokens, hopper)
            for i, found in enumerate(several.product()):
                apart = distance(found, several.expected[i])
                assert apart < QUANTISED_TOLERANCE, (types, i, hopper, apart)
            several.close()
    assert_counters_are_zero(backend)


@contextmanager
def quantised(
    backend: CudaBackend, floats: np.ndarray, tokens: int
) -> Iterator[tuple[Guarded, np.ndarray]]:
    """Room for the Q8_ACT rows of `floats`, poisoned, and what `quantize` makes of them."""
    rows = floats.nbytes // 4 // tokens
    node = make("quantize", "q", Tensor("y", F32, (tokens, rows)))
    dst = Guarded(backend, np.full(node.output.nbytes, POISON, np.uint8))
    x = Guarded(backend, floats)
    at = {node.inputs[0]: x.address, node.output: dst.address}
    backend.launch(node, at.__getitem__, 0, stream=0)()
    yield dst, dst.download()
    x.memory.free()
    dst.memory.free()


@pytest.mark.parametrize("tokens", MANY)
@pytest.mark.parametrize("name", KINDS)
def test_gate_and_up(backend: CudaBackend, weights: list, name: str, tokens: int):
    """As floats within tolerance; quantised, the very bytes of `quantize` of the floats."""
    for rows in GATED:
        for hopper in tiled(backend._sm, name, tokens):
            several = Several(backend, weights, [name, name], (rows, rows), tokens, hopper)
            floats = several.glu(False, several.dst[0])
            gate, up = several.expected
            apart = distance(floats.view(np.float32), gate / (1 + np.exp(-gate)) * up)
            assert apart < 2 * QUANTISED_TOLERANCE, (rows, hopper, apart)
            if rows % 32 == 0:
                with quantised(backend, floats, tokens) as (dst, expected):
                    assert np.array_equal(several.glu(True, dst), expected), (rows, hopper)
            several.close()
    assert_counters_are_zero(backend)


def test_counters_are_zero_again(backend: CudaBackend, weights: list):
    """After every product that was combined by its last block."""
    for tokens in (1, 16, 64):
        compare(backend, weights, "Q4_K", 33, 5888, tokens)
    assert_counters_are_zero(backend)


def assert_counters_are_zero(backend: CudaBackend) -> None:
    address = backend._counters_of(0)
    found = np.ones(backend._counters[0].nbytes, np.uint8)
    backend.copy(found.ctypes.data, address, found.nbytes, 0, to_host=True)()
    backend.sync_stream(0)()
    assert not found.any()


def test_shapes_pair_every_row_count_with_every_width():
    for dtype in WEIGHT_DTYPES:
        pairs = {pair for tokens in TOKENS for pair in shapes(dtype, tokens)}
        assert len(pairs) == len(ROWS) * len(COLS[dtype.block])
