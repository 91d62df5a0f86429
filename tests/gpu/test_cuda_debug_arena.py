"""Steps and single nodes in memory of their own for each tensor (`tests/gpu/debug_arena.py`), also
under compute-sanitizer (`sanitize.py`); fused nodes against their parts, and every op against its
declaration (`tests/ranges.py`)."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests import ranges
from tests.gpu.debug_arena import DebugSteps, Mode, run_alone
from tests.gpu.harness import Wanted, attention, floats_of, generator, kernels_of, product
from tests.graphs import Decoder, fused_nodes, values_for, wiring
from workbench.backend.cuda.device import driver
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.config import Toggles
from workbench.graph import ir, ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, Q8_ACT, Kind, Node, Tensor

pytestmark = pytest.mark.gpu

MODELS = ("tiny-llama Q4_0", "tiny-llama-bias Q8_0", "tiny-qwen3 Q4_K", "tiny-qwen3 F16")
STEPS = {"few": (1, 5), "many": (9, 33), "most": (100,)}  # tokens of one step after another
FULL = ("tiny-llama Q4_0", "tiny-qwen3 Q4_K")  # with the tallest tiles, too: steps of `most`
STEP_CASES = {
    f"{mode}-{model.replace(' ', '-')}-{fused}-{steps}": (mode, *model.split(), fused, steps)
    for mode, model, fused, steps in itertools.product(Mode, MODELS, ("unfused", "fused"), STEPS)
    if steps != "most" or (model in FULL and fused == "fused")
}
RANGES = {n: (node, values) for n, node, values in (*ranges.cases(), *ranges.attention_cases())}
RANGES |= {
    f"{n_tokens} {name}": (node, values)
    for n_tokens in (1, 3, 8, 9, 33)
    for name, node, values in ranges.fused_cases(n_tokens)
}
PRODUCTS = {  # rows and columns are no multiples of a tile
    f"{kind} {size}": [
        product(name, rows, cols, n)
        for name, n, rows in itertools.product(types, tokens, (1, 35))
        for cols in {1: (7, 264), 32: (32, 288), 256: (256, 768)}[ir.DTYPES[name].block]
    ]
    for kind, types in (
        ("quantised", sorted(d.name for d in ir.QUANTISED)),
        ("float", [d.name for d in ir.WEIGHT_DTYPES if d not in ir.QUANTISED]),
    )
    for size, tokens in (("few", (1, 3)), ("many", (12,)))
}
# Few rows and many columns: warps share a row's columns, blocks share a tile's; or cuBLAS takes
# weights expanded in scratch.
SPLITS = {
    f"split {name} {tokens}": [product(name, 35, 5120, tokens)]
    for name, tokens in (("Q4_0", 1), ("Q6_K", 2), ("Q4_K", 16), ("Q8_0", 64), ("Q5_K", 100),
                         ("Q6_K", 1030))
}  # fmt: skip
ATTENTION = {  # tokens, heads, heads_kv, head_dim, n_kv: one share of the cells and several
    f"attention {of}": [attention(*of)]
    for of in ((1, 4, 2, 64, 31), (1, 8, 2, 64, 700), (8, 4, 2, 128, 517), (2, 2, 1, 256, 300),
               (3, 3, 3, 40, 129), (12, 4, 2, 64, 321), (130, 32, 8, 64, 150),
               (130, 32, 8, 192, 70))
}  # fmt: skip
NODES: dict[str, list[Node]] = {**PRODUCTS, **SPLITS, **ATTENTION}


@cache
def every_op() -> list[tuple[Node, dict[Tensor, np.ndarray]]]:
    return [given[1:] for given in (*ranges.cases(), *ranges.fused_cases(1))]


def kernels(sm: int) -> Wanted:
    nodes = [node for node, _ in (*every_op(), *RANGES.values())]
    nodes += [n for m in DECODERS for tokens in TOKENS for n in distinct(m, tokens)]
    for _, preset, quant, fused, steps in STEP_CASES.values():
        model, on = Decoder(preset, ir.DTYPES[quant]), fused == "fused"
        for n in STEPS[steps]:
            graph = model.graph(n, n, 128, n_cells=128, deferred=on)
            nodes += fuse(graph, FUSIONS if on else ()).nodes
    return kernels_of(nodes, sm)


@pytest.fixture
def exact(monkeypatch) -> None:
    """The backend asks for as many bytes as it was asked for, not for multiples of 256: memcheck
    then knows where each ends. Multiples of 16 may be read (kernels/common.cuh)."""
    monkeypatch.setattr(driver, "ALIGN", 16)


@pytest.mark.parametrize("case", STEP_CASES)
def test_steps(exact, tiny_model, case: str):
    """Logits are the engine's, bit by bit: same kernels, other memory."""
    mode, preset, quant, fused, steps = STEP_CASES[case]
    switch = "on" if fused == "fused" else "off"
    toggles = Toggles(defer_norm=switch).switched("fuse", switch)
    tokens = generator(preset).integers(0, 640, 100).tolist()
    with (
        wb.Engine.load(tiny_model(preset, quant), device="cuda", n_ctx=128, n_kv_pad=32,
                       n_ubatch=100, threads=1, toggles=toggles) as engine,
        DebugSteps(engine, Mode(mode)) as twin,
    ):  # fmt: skip
        at = 0
        for n in STEPS[steps]:
            wanted = engine.step(tokens[at : at + n], outputs="all")
            assert np.isfinite(wanted).all()
            assert np.array_equal(twin.step(tokens[at : at + n]), wanted)
            at += n


@pytest.mark.parametrize("case", ["every op", *NODES])
@pytest.mark.parametrize("mode", Mode)
def test_alone(exact, backend: CudaBackend, mode: Mode, case: str):
    """Results are finite and the same in guarded, poisoned memory."""
    nodes = NODES.get(case, [])
    given = [(node, values_for(node, 1, generator(node.inputs))) for node in nodes]
    for node, values in given or every_op():
        found = run_alone(backend, node, values, mode)
        wanted = found if mode == Mode.GUARDED else run_alone(backend, node, values, Mode.GUARDED)
        for t, content in found.items():
            used = ranges.meaningful(t, node.op)
            assert np.array_equal(content[used], wanted[t][used]), f"{t!r} depends on its place"
            if t.dtype == F32 and not ops.OPS.get(node.op, ops.OPS["add"]).stores:
                assert np.isfinite(content.view(np.float32)).all(), t


@pytest.mark.parametrize("name", RANGES)
def test_declared_ranges_hold(backend: CudaBackend, name: str, monkeypatch):
    # a table on the GPU is in planes too, where its type has them
    monkeypatch.setattr(ranges, "backend_keeps", lambda node, tensor: True)
    ranges.check(backend, *RANGES[name])


TOKENS = (1, 3, 8, 9, 33, 100)
N_KV, CELLS = 64, 96  # twice for more tokens than that
FEW = 8  # tokens up to which a product fused with what follows has the arithmetic of the parts
EXACT = ("norm", "swiglu_quantize", "rope_store", "rope_set_rows", "norm_rope")  # of any number
EXACT_FOR_FEW = ("product", "qkv", "qkv_rope_store", "glu")
NMSE, NMSES = 1e-6, {Q8_ACT: 1e-5}  # one quant tipped over its edge in a row of 256 is 2e-6
ODD: Any = {"n_embd": 288, "n_ff": 544, "n_head": 6, "n_head_kv": 2, "head_dim": 48, "n_vocab": 131}
DECODERS = {
    "llama": lambda: Decoder("tiny-llama", Q8_0),
    "llama odd": lambda: Decoder("tiny-llama", Q4_0, **ODD),
    "llama odd bias": lambda: Decoder("tiny-llama-bias", Q8_0, biases=("ffn_gate",), **ODD),
    "llama odd F16": lambda: Decoder("tiny-llama-bias", F16, biases=("ffn_up",), **ODD),
    "llama mixed": lambda: Decoder("tiny-llama-bias", Q4_K, {"attn_v": Q6_K}),
    "qwen3": lambda: Decoder("tiny-qwen3", Q4_K, {"attn_v": Q6_K}),
    "qwen3 odd": lambda: Decoder("tiny-qwen3", Q8_0, {"attn_k": F16}, **ODD),
    "qwen3 odd F32": lambda: Decoder("tiny-qwen3", F32, **ODD),
}
OUT = ("bias", "norm_mul", "epilogue_quantize", "rope_store", "glu", "product_norm")
SETS = [frozenset(FUSIONS), *(frozenset(FUSIONS) - {f"fuse_{name}"} for name in OUT)]


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
        graph = DECODERS[model]().graph(tokens, tokens, n_kv, activations, n_cells, deferred)
        for fusions, inside in itertools.product(SETS, (False, True)):
            for node in fused_nodes(graph, fusions, inside):
                found.setdefault(wiring(node), node)
    return list(found.values())


def numbers(raw: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The values of a tensor's bytes, float64."""
    if tensor.dtype == Q8_ACT:
        return floats_of(raw.reshape(tensor.rows, -1), tensor.cols)
    return raw.view(np.float16 if tensor.dtype == F16 else np.float32).astype(np.float64)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("model", DECODERS)
def test_a_fused_node_is_its_parts(backend: CudaBackend, model: str, tokens: int):
    """Of the nodes that SETS make of a step, some 9,000, a sixth are distinct, and run once each:
    every fused op with and without bias and norms of the heads, plain and halved; every class of
    weight types (one quantised, several, halves, floats) in even and odd shapes; and every class of
    tokens: one, up to 8 in a launch of its own kind, and the tiles of 16, 64 and 128."""
    rng = np.random.default_rng(tokens)
    for node in distinct(model, tokens):
        values = values_for(node, cells(tokens)[0], rng)
        for t in node.outputs:
            if t.kind == Kind.CACHE:
                values[t.storage] = np.zeros(t.storage.nbytes, np.uint8)
        found, wanted = (
            run_alone(backend, node, values, Mode.GUARDED, way) for way in (False, True)
        )
        exact = node.op in EXACT or (tokens <= FEW and node.op in EXACT_FOR_FEW)
        if any(part.op == "rms_norm" for part in node.parts[1:]):
            exact = False  # heads normed in the launch of their products: squares in another order
        for t in found:
            x, y = numbers(found[t], t), numbers(wanted[t], t)
            assert np.isfinite(x).all() and x.any(), (node, t)
            off, limit = np.sum((x - y) ** 2) / (np.sum(y**2) or 1.0), NMSES.get(t.dtype, NMSE)
            assert off < limit, f"{node}: {t!r}, nmse {off:.1e}"
            assert not exact or np.array_equal(found[t], wanted[t]), f"{node}: {t!r} differs"
