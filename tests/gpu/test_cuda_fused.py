"""Fused nodes on the cuda backend against their parts, launched one by one; chains that begin
early; and engines with everything on against engines with everything off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.gpu.harness import Wanted, compile_side_by_side, kernels_of
from tests.graphs import Decoder, fused_nodes, values_for, wiring
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import op_table
from workbench.benchmarks.compare import answers
from workbench.benchmarks.workload import Tokens
from workbench.config import ROUNDING, Toggles
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, Q8_ACT, Kind, Node, Tensor
from workbench.model.gguf.quants import unpack_activations
from workbench.program.commands import Launch, Space

pytestmark = pytest.mark.gpu

ALL = frozenset(FUSIONS)
TOKENS = (1, 3, 8, 9, 33, 100)
N_KV, CELLS = 64, 96  # twice for more tokens than that
POISONS = (0xFF, 0x7F)  # NaN as float and as half; the largest half and float are finite
REPETITIONS = 100
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

    def launch(self, node: Node, programmatic: bool = False):
        early = programmatic and self.backend.begins_early(node)
        return self.backend.launch(node, self.at, self.memory.address + self.scratch, 0, early)

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


# programmatic launches ---------------------------------------------------------------------------


@pytest.fixture
def early(backend: CudaBackend) -> CudaBackend:
    if not backend.capabilities.programmatic:
        pytest.skip("no programmatic dependent launch below compute capability 9.0")
    return backend


@pytest.mark.parametrize("fusions", [frozenset(), ALL], ids=["unfused", "fused"])
@pytest.mark.parametrize("tokens", [1, 3, 9, 33])
@pytest.mark.parametrize("model", ["llama", "llama odd bias", "llama odd F16", "qwen3"])
def test_a_chain_that_begins_early_gives_the_same_bytes(early, model, tokens, fusions):
    """All of a step, each launch begun before the one in front of it has ended. A read too early
    finds poison, a write too early is overwritten."""
    graph = MODELS[model]().graph(tokens, tokens, N_KV, n_cells=CELLS, deferred=fusions == ALL)
    nodes = fuse(graph, fusions).nodes
    rng = np.random.default_rng(1)
    values: dict[Tensor, np.ndarray] = {}
    for node in nodes:
        given = {
            t: v
            for t, v in values_for(node, N_KV, rng).items()
            if t.kind in (Kind.WEIGHT, Kind.INPUT) and t not in values
        }
        values |= given
    house = House(early, nodes, values)
    outputs = list({t.storage: None for node in nodes for t in node.outputs})
    try:
        wanted = house.run([house.launch(node) for node in nodes], POISONS[0], outputs)
        chain = [house.launch(node, programmatic=True) for node in nodes]
        assert sum(early.begins_early(node) for node in nodes) > len(nodes) // 3
        for i in range(REPETITIONS):
            found = house.run(chain, POISONS[i % 2], outputs)
            for t, a, b in zip(outputs, found, wanted, strict=True):
                assert a == b, f"repetition {i}: {t!r} differs"
    finally:
        house.close()


# engines -----------------------------------------------------------------------------------------


ENGINES = [("tiny-llama", "Q4_0"), ("tiny-llama", "Q4_K"), ("tiny-llama-bias", "Q8_0"),
           ("tiny-qwen3", "Q8_0"), ("tiny-qwen3", "BF16")]  # fmt: skip


@pytest.mark.parametrize(("preset", "quant"), ENGINES)
def test_everything_on_gives_the_answers_of_everything_off(early, tiny_model, preset, quant):
    """By the rule of A/B measurements; and by itself pdl changes no bit, fused or not."""
    drawn = np.random.default_rng(4).integers(0, 1024, 300).tolist()
    tokens = Tokens([], drawn[:290], drawn[290:])
    off = Toggles(graph_reuse="set_rows")
    on = off.switched("fuse", "on").switched("defer_norm", "on")
    with wb.Engine.load(
        tiny_model(preset, quant), device="cuda", n_ctx=512, n_ubatch=64, toggles=off
    ) as base:
        rows = {}
        for name, toggles in {
            "off": off, "pdl": off.switched("pdl", "on"),
            "fused": on, "both": on.switched("pdl", "on"),
        }.items():  # fmt: skip
            with base.variant(toggles) as engine:
                rows[name] = answers.force(engine, tokens)
    assert np.array_equal(rows["pdl"], rows["off"])
    assert np.array_equal(rows["both"], rows["fused"])
    answer = answers.compare_logits(rows["off"], rows["both"], ROUNDING)
    assert answer.holds, answer


# kernels of a layer for one token, with all patterns
PER_LAYER = {"tiny-llama": 5, "tiny-llama-bias": 5, "tiny-qwen3": 5}


@pytest.mark.parametrize(("preset", "quant"), ENGINES)
def test_kernels_of_a_layer(early, tiny_model, preset, quant):
    """A node of one token is one kernel; the program launches every one of them early."""
    toggles = Toggles(graph_reuse="set_rows", pdl="on", defer_norm="on").switched("fuse", "on")
    with wb.Engine.load(
        tiny_model(preset, quant), device="cuda", n_ctx=512, toggles=toggles
    ) as engine:
        layers = engine.model.n_layer
        commands = [c for c in engine.program(1).commands if isinstance(c, Launch)]
    device = [c for c in commands if c.stream.backend == 1]
    operands = op_table.Operands(lambda t: 4096, 8192, 16384)
    works = [work for c in device for work in op_table.launches(c.node, operands)]
    # besides: the first norm, the two gathers and the norm between the last output and its product,
    # and the head
    assert len(works) == PER_LAYER[preset] * layers + 5 == len(device)
    assert all(c.programmatic for c in device)
