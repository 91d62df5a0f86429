"""Fused nodes on the cuda backend against their parts, launched one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.gpu.harness import Wanted, compile_side_by_side, kernels_of
from tests.graphs import Decoder, fused_nodes, values_for, wiring
from workbench.backend.base import Issue
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.graph.fuse import FUSIONS
from workbench.graph.ir import F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, Q8_ACT, Kind, Node, Tensor
from workbench.model.gguf.quants import unpack_activations
from workbench.program.commands import Space

pytestmark = pytest.mark.gpu

ALL = frozenset(FUSIONS)
TOKENS = (1, 3, 8, 9, 33, 100)
N_KV, CELLS = 64, 96  # twice for more tokens than that
POISONS = (0xFF, 0x7F)  # NaN as float and as half; the largest half and float are finite
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


class House:
    """Every tensor of some nodes in one block of device memory, with poison around it."""

    def __init__(self, backend: CudaBackend, nodes: Sequence[Node], values: dict):
        self.backend, self.values = backend, values
        parts = [part for node in nodes for part in (node, *node.parts)]
        tensors = {t.storage: None for n in parts for t in (*n.inputs, *n.outputs)}
        self.weights = {
            t: backend.load_weight(t, values[t].reshape(-1).view(np.uint8))
            for t in tensors
            if t.kind == Kind.WEIGHT
        }
        self.offsets: dict[Tensor, int] = {}
        end = 512
        for t in tensors:
            if t not in self.weights:
                self.offsets[t] = end
                end += -(-(t.nbytes + 256) // 256) * 256
        self.scratch = end
        self.nbytes = end + max(backend.scratch_bytes(n) for n in parts) + 512
        self.memory = backend.allocate(self.nbytes, Space.DEVICE)
        self.staging = backend.allocate(self.nbytes, Space.PINNED)
        self.upload = backend.copy(self.memory.address, self.staging.address, self.nbytes, 0, False)
        self.fetch = backend.copy(self.staging.address, self.memory.address, self.nbytes, 0, True)

    def at(self, tensor: Tensor) -> int:
        s = tensor.storage
        held = self.weights.get(s)
        return held.address if held else self.memory.address + self.offsets[s]

    def launch(self, node: Node) -> Issue:
        return self.backend.launch(node, self.at, self.memory.address + self.scratch, 0)

    def run(self, issues: Iterable, poison: int, wanted: Iterable[Tensor]) -> list[bytes]:
        """The bytes of `wanted` after `issues`, everything that has no value poisoned before."""
        block = self.staging.array
        assert block is not None
        block[:] = poison
        for t, offset in self.offsets.items():
            if t in self.values:
                raw = self.values[t].reshape(-1).view(np.uint8)
                block[offset : offset + t.nbytes] = raw
            elif t.kind == Kind.CACHE:
                block[offset : offset + t.nbytes] = 0
        self.upload()
        for issue in issues:
            issue()
        self.fetch()
        self.backend.sync_stream(0)()
        return [bytes(block[self.offsets[t] :][: t.nbytes]) for t in wanted]

    def close(self) -> None:
        for memory in (self.memory, self.staging, *self.weights.values()):
            memory.free()


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


def compare(backend: CudaBackend, node: Node, tokens: int, values: dict) -> None:
    for t in node.outputs:
        if t.kind == Kind.CACHE:
            values.pop(t.storage, None)
    house = House(backend, [node], values)
    outputs = [t.storage for t in node.outputs]
    try:
        one = house.launch(node)
        found = [house.run([one], poison, outputs) for poison in POISONS]
        assert found[0] == found[1], f"{node} depends on what memory held"
        parts = [house.launch(part) for part in node.parts]
        wanted = house.run(parts, POISONS[0], outputs)
    finally:
        house.close()
    exact = node.op in EXACT or (tokens <= FEW and node.op in EXACT_FOR_FEW)
    if any(part.op == "rms_norm" for part in node.parts[1:]):
        exact = False  # heads normed in the launch of their products: squares in another order
    for t, a, b in zip(outputs, found[0], wanted, strict=True):
        x, y = numbers(a, t), numbers(b, t)
        assert np.isfinite(x).all() and x.any(), (node, t)
        if exact:
            assert a == b, f"{node}: {t!r} differs, nmse {nmse(x, y):.1e}"
        else:
            limit = NMSE_QUANTISED if t.dtype == Q8_ACT else NMSE
            assert nmse(x, y) < limit, f"{node}: {t!r}, nmse {nmse(x, y):.1e}"
