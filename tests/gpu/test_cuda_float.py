"""The float path on the GPU: products that round nothing, of every type, against float64.

kernels/mul_mat_float.cu is the yardstick that the fast kernels are held to, so it is held itself to
NumPy, at odd shapes and any number of tokens. Weights are exact in float32 and so are activations;
float32 sums of some thousand terms remain: 2e-6. Rounding the activations of one product to F16
would show as 2e-4, to BF16 as 1.6e-3, to 8 bits as 5e-3.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
import pytest

from tests.gpu.harness import Compute, distance
from tests.oracles.dequantize import dequantize
from workbench.graph.ir import DTYPES, F32, WEIGHT_DTYPES, Kind, Node, Tensor
from workbench.graph.ops import make
from workbench.model.gguf.quants import random_blocks

pytestmark = pytest.mark.gpu

EXACT = 2e-6
TYPES = [d.name for d in WEIGHT_DTYPES]
TOKENS = (1, 2, 7, 8, 9, 17, 64, 130, 512)
ROWS = (1, 7, 8, 33, 1000)
# Columns by the block of a type; float types have columns that are no multiple, too.
COLS = {1: (1, 33, 1000, 4103), 32: (32, 96, 1120, 4160), 256: (256, 768, 1280, 5888)}


def product(name: str, rows: int, cols: int, tokens: int) -> Node:
    """As the decoder makes it for activations=float."""
    w = Tensor("w", DTYPES[name], (rows, cols), Kind.WEIGHT)
    return make("mul_mat", "y", w, Tensor("x", F32, (tokens, cols)), activations="float")


@lru_cache(maxsize=8)
def operands(name: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight's bytes and values, and 512 tokens of x with outliers, as activations have them."""
    rng = np.random.default_rng(zlib.crc32(repr((name, rows, cols)).encode()))
    data = random_blocks(rng, DTYPES[name], rows, cols, cols**-0.5).reshape(-1)
    x = rng.standard_normal((max(TOKENS), cols), dtype=np.float32)
    x[:, :: max(cols // 3, 1)] *= 50
    return data, dequantize(data, DTYPES[name], (rows, cols)).astype(np.float64), x


@pytest.mark.parametrize("name", TYPES)
def test_nothing_is_rounded_but_the_sums(compute: Compute, name: str):
    cols = COLS[DTYPES[name].block]
    for shift, tokens in enumerate(TOKENS):
        for i, rows in enumerate(ROWS):
            node = product(name, rows, cols[(i + shift) % len(cols)], tokens)
            w, x = node.inputs
            data, values, every = operands(name, rows, w.cols)
            out = compute(node, {w: data, x: every[:tokens]})
            found = out.view(np.float32).reshape(tokens, rows)
            apart = distance(found, every[:tokens].astype(np.float64) @ values.T)
            assert apart < EXACT, (name, rows, w.cols, tokens, apart)


@pytest.mark.parametrize("name", TYPES)
def test_activations_come_through_to_the_last_bit(compute: Compute, name: str):
    """Of tokens that are one activation and zeros, a product is one float32 multiplication."""
    node = product(name, 33, 256, 256)
    w, x = node.inputs
    data, values, _ = operands(name, 33, 256)
    scale = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    out = compute(node, {w: data, x: np.diag(scale)})
    found = out.view(np.float32).reshape(256, 33)
    assert np.array_equal(found, values.T.astype(np.float32) * scale[:, None])


# NMSE that is left of a whole model's logits: of its F16 cache (tests/contract), and of
# attention on tensor cores, which rounds queries and softmax weights to halves. Activations rounded
# to BF16 would show as some 1e-5, to 8 bits as 3e-4.
