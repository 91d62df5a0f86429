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
* the float path (kernels/mul_mat_float.cu), the yardstick of the fast kernels, rounds nothing but
  its sums, whatever the number of tokens: 2e-6. Activations in F16 would show as 2e-4.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.harness import (
    MOST_TOKENS,
    Guards,
    Wanted,
    assert_counters_are_zero,
    distance,
    kernels_of,
    operands,
    product,
)
from tests.gpu.twins.product import simple_product
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.graph.ir import DTYPES, WEIGHT_DTYPES

pytestmark = pytest.mark.gpu

FEW, EXACT = 8, 2e-6
TOLERANCE = {"F32": 5e-6, "F16": 4e-4, "BF16": 3.2e-3}  # beyond FEW tokens
QUANTISED_TOLERANCE = 1.2e-3
TYPES = [d.name for d in WEIGHT_DTYPES]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 64, 100, 128, 130, 512, MOST_TOKENS)
FLOAT_TOKENS = (1, 2, 7, 8, 9, 17, 64, 130, 512)
ROWS = (1, 7, 33, 130, 1000)
# Columns by the block of a type: one block; odd numbers of them; more than a warp takes at a time.
# Of floats also what is no multiple of 8, which goes element by element.
COLS = {1: (1, 33, 264, 1000, 4103), 32: (32, 96, 1120, 4160), 256: (256, 768, 1280, 5888)}
LARGE = (3000, 8192)  # as a feed-forward layer; more than one entry of the uploader's ring


def shapes(name: str, tokens: int) -> list[tuple[int, int]]:
    """Rows and columns for a number of tokens: every row count, and other columns for each. Over
    all numbers of tokens each goes with each."""
    cols, shift = COLS[DTYPES[name].block], TOKENS.index(tokens)
    found = [(rows, cols[(i + shift) % len(cols)]) for i, rows in enumerate(ROWS)]
    return [*found, LARGE] if tokens in (2, 33) else found


def kernels(sm: int) -> Wanted:
    every = ((name, *shape, n) for name in TYPES for n in TOKENS for shape in shapes(name, n))
    return kernels_of((product(*given) for given in every), sm)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", TYPES)
def test_a_product_and_its_slow_twin(backend: CudaBackend, name: str, tokens: int):
    for rows, cols in shapes(name, tokens):
        given, node = operands(name, rows, cols), product(name, rows, cols, tokens)
        w, x = node.inputs
        expected = given.x_values[:tokens] @ given.values.T
        with Guards(backend) as guards:
            y, scratch = guards.room(node.output.nbytes), guards.room(backend.scratch_bytes(node))
            at = {w: guards.load(given.weight, given.data),
                  x: guards.put(given.x[:tokens]).address, node.output: y.address}  # fmt: skip
            launch = backend.launch(node, at.__getitem__, scratch.address, stream=0)
            twin = guards.issues([simple_product(node, at.__getitem__)])
            most = EXACT if tokens <= FEW else TOLERANCE.get(name, QUANTISED_TOLERANCE)
            for what, issues, limit in (("product", [launch], most), ("twin", twin, EXACT)):
                (found,) = guards.twice([y], issues, scratch)
                apart = distance(found.view(np.float32), expected)
                assert apart < limit, (what, rows, cols, apart)
    assert_counters_are_zero(backend)


@pytest.mark.parametrize("name", TYPES)
def test_the_float_path_rounds_only_its_sums(compute, name: str):
    """Also of outliers, as activations have them. Of tokens that are one activation and zeros, a
    product is one float32 multiplication, to the bit."""
    cols = COLS[DTYPES[name].block]
    for shift, tokens in enumerate(FLOAT_TOKENS):
        for i, rows in enumerate(ROWS):
            node = product(name, rows, cols[(i + shift) % len(cols)], tokens, rounded=False)
            w, x = node.inputs
            given = operands(name, rows, w.cols)
            some = given.floats[:tokens].copy()
            some[:, :: max(w.cols // 3, 1)] *= 50
            found = compute(node, {w: given.data, x: some}).view(np.float32)
            apart = distance(found, some.astype(np.float64) @ given.values.T)
            assert apart < EXACT, (rows, w.cols, tokens, apart)
    node, given = product(name, 33, 256, 256, rounded=False), operands(name, 33, 256)
    scale = given.floats[0]
    found = compute(node, dict(zip(node.inputs, (given.data, np.diag(scale)), strict=True)))
    wanted = given.values.T.astype(np.float32) * scale[:, None]
    assert np.array_equal(found.view(np.float32).reshape(256, 33), wanted)
