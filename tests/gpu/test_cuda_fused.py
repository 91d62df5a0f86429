"""Fused nodes on the cuda backend against their parts, launched one by one."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.gpu.debug_arena import Mode, run_alone
from tests.gpu.harness import Wanted, compile_side_by_side, kernels_of
from tests.graphs import Decoder, fused_nodes, values_for, wiring
from workbench.backend.base import Backend
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, Q8_ACT, Kind, Node, Tensor
from workbench.model.gguf.quants import unpack_activations

pytestmark = pytest.mark.gpu

ALL = frozenset(FUSIONS)
TOKENS = (1, 3, 8, 9, 33, 100)
N_KV, CELLS = 64, 96  # twice for more tokens than that
FEW = 8  # tokens up to which a product fused with what follows has the arithmetic of the parts
EXACT = (
    "norm",
    "swiglu_quantize",
    "rope_store",
    "rope_set_rows",
    "norm_rope",
)  # for any number of tokens
EXACT_FOR_FEW = ("product", "qkv", "qkv_rope_store", "glu")
NMSE, NMSE_QUANTISED = 1e-6, 1e-5  # one quant tipped over its edge in a row of 256 is 2e-6
ODD: Any = {"n_embd": 288, "n_ff": 544, "n_head": 6, "n_head_kv": 2, "head_dim": 48, "n_vocab": 131}
MODELS = {
    "llama": lambda: Decoder("tiny-llama", Q8_0),
    "llama odd": lambda: Decoder("tiny-llama", Q4_0, **ODD),
    "llama odd bias": lambda: Decoder("tiny-llama-bias", Q8_0, biases=("ffn_gate",), **ODD),
    "llama odd F16": lambda: Decoder("tiny-llama-bias", F16, biases=("ffn_up",), **ODD),
    "llama mixed": lambda: Decoder("tiny-llama-bias", Q4_K, {"attn_v": Q6_K}),
    "qwen3": lambda: Decoder("tiny-qwen3", Q4_K, {"attn_v": Q6_K}),
    "qwen3 odd": lambda: Decoder("tiny-qwen3", Q8_0, {"attn_k": F16}, **ODD),
    "qwen3 odd F32": lambda: Decoder("tiny-qwen3", F32, **ODD),
}


def numbers(raw: bytes, tensor: Tensor) -> np.ndarray:
    """The values of a tensor's bytes, float64."""
    if tensor.dtype == Q8_ACT:
        rows = np.frombuffer(raw, np.uint8).reshape(tensor.rows, -1)
        quants, scales, _ = unpack_activations(rows, tensor.cols)
        return quants.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)
    kind = np.float16 if tensor.dtype == F16 else np.float32
    return np.frombuffer(raw, kind).astype(np.float64)


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    if not (np.isfinite(found).all() and np.isfinite(wanted).all()):
        return math.inf
    return float(np.sum((found - wanted) ** 2) / (np.sum(wanted**2) or 1.0))


SETS = (ALL, ALL - {"fuse_bias"}, ALL - {"fuse_norm_mul"}, ALL - {"fuse_epilogue_quantize"},
        ALL - {"fuse_rope_store"}, ALL - {"fuse_glu"}, ALL - {"fuse_product_norm"})  # fmt: skip


def cells(tokens: int) -> tuple[int, int]:
    """Cells that are attended to and cells there are, so many that each token stores its own."""
    twice = 1 + (tokens > N_KV)
    return twice * N_KV, twice * CELLS


@cache
def distinct(model: str, tokens: int) -> list[Node]:
    """Every fused node that any of SETS makes of a step of `model`, one of each wiring."""
    found: dict[tuple, Node] = {}
    n_kv, n_cells = cells(tokens)
    for activations, deferred in itertools.product(("q8", "float"), (False, True)):
        graph = MODELS[model]().graph(tokens, tokens, n_kv, activations, n_cells, deferred)
        for fusions, inside in itertools.product(SETS, (False, True)):
            for node in fused_nodes(graph, fusions, inside):
                found.setdefault(wiring(node), node)
    return list(found.values())


def kernels(sm: int) -> Wanted:
    return kernels_of((n for m in MODELS for tokens in TOKENS for n in distinct(m, tokens)), sm)


@pytest.fixture(scope="module")
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("model", MODELS)
def test_a_fused_node_is_its_parts(compiled, backend: CudaBackend, model: str, tokens: int):
    """Each of SETS, with either kind of activations, norms whole and halved, makes nodes of the
    same step, and most are the same: of some 9,000 a sixth are distinct. Those are run once each,
    so that nothing is left out: every fused op with and without bias and norms of the heads, plain
    and halved; every model, which is every class of weight types (one quantised, several, halves,
    floats) in even and odd shapes; and every class of tokens: one, up to 8 in a launch of its own
    kind, and the tiles of 16, 64 and 128."""
    rng = np.random.default_rng(tokens)
    for node in distinct(model, tokens):
        compare(backend, node, tokens, values_for(node, cells(tokens)[0], rng))


def compare(backend: Backend, node: Node, tokens: int, values: dict) -> None:
    for t in node.outputs:
        if t.kind == Kind.CACHE:
            values[t.storage] = np.zeros(t.storage.nbytes, np.uint8)
    found, wanted = (run_alone(backend, node, values, Mode.GUARDED, way) for way in (False, True))
    exact = node.op in EXACT or (tokens <= FEW and node.op in EXACT_FOR_FEW)
    if any(part.op == "rms_norm" for part in node.parts[1:]):
        exact = False  # heads normed in the launch of their products: squares in another order
    for t in found:
        a, b = found[t].tobytes(), wanted[t].tobytes()
        x, y = numbers(a, t), numbers(b, t)
        assert np.isfinite(x).all() and x.any(), (node, t)
        if exact:
            assert a == b, f"{node}: {t!r} differs, nmse {nmse(x, y):.1e}"
        else:
            limit = NMSE_QUANTISED if t.dtype == Q8_ACT else NMSE
            assert nmse(x, y) < limit, f"{node}: {t!r}, nmse {nmse(x, y):.1e}"
