"""Steps and single nodes in memory of their own for each tensor (`tests/gpu/debug_arena.py`).

Run as they are they hold kernels to their red zones; `tests/gpu/sanitize.py` runs them, by the
names of their modes, under compute-sanitizer.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests import ranges
from tests.gpu.debug_arena import DebugSteps, Mode, exact_sizes, run_alone
from tests.gpu.harness import Wanted, compile_side_by_side, kernels_of
from tests.graphs import Decoder, values_for
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.config import Toggles
from workbench.graph import ops
from workbench.graph.fuse import FUSIONS, fuse
from workbench.graph.ir import (
    DTYPES,
    F16,
    F32,
    Q8_ACT,
    QUANTISED,
    WEIGHT_DTYPES,
    Kind,
    Node,
    Tensor,
)
from workbench.graph.ops import make

pytestmark = pytest.mark.gpu

MODELS = ("tiny-llama Q4_0", "tiny-llama-bias Q8_0", "tiny-qwen3 Q4_K", "tiny-qwen3 F16")
STEPS = {"few": (1, 5), "many": (9, 33), "most": (100,)}  # tokens of one step after another
FULL = ("tiny-llama Q4_0", "tiny-qwen3 Q4_K")  # with the tallest tiles, too: steps of `most`
STEP_CASES = {
    f"{mode}-{model.replace(' ', '-')}-{fused}-{steps}": (mode, *model.split(), fused, steps)
    for mode, model, fused, steps in itertools.product(Mode, MODELS, ("unfused", "fused"), STEPS)
    if steps != "most" or (model in FULL and fused == "fused")
}
FLOATS = [d.name for d in WEIGHT_DTYPES if d not in QUANTISED]
PRODUCT_KINDS = {"quantised": sorted(d.name for d in QUANTISED), "float": FLOATS}
PRODUCT_TOKENS = {"few": (1, 3), "many": (12,)}


def step_nodes() -> Iterator[Node]:
    """Those of the steps of `test_steps`."""
    for _, preset, quant, fused, steps in STEP_CASES.values():
        model, on = Decoder(preset, DTYPES[quant]), fused == "fused"
        for n in STEPS[steps]:
            graph = model.graph(n, n, 128, n_cells=128, deferred=on)
            yield from fuse(graph, FUSIONS if on else ()).nodes


def kernels(sm: int) -> Wanted:
    cases = itertools.chain(ranges.cases(), ranges.fused_cases(1))
    return kernels_of(itertools.chain(step_nodes(), (node for _, node, _ in cases)), sm)


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.fixture(autouse=True)
def sizes() -> Iterator[None]:
    with exact_sizes():
        yield


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


@pytest.mark.parametrize("case", STEP_CASES)
def test_steps(tiny_model, case: str):
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
        twin.close()


def alone(backend: CudaBackend, node: Node, values: dict[Tensor, np.ndarray], mode: Mode) -> None:
    """Runs `node` in `mode`; the result is finite and the same in guarded, poisoned memory."""
    found = run_alone(backend, node, values, mode)
    wanted = found if mode == Mode.GUARDED else run_alone(backend, node, values, Mode.GUARDED)
    for t, content in found.items():
        used = ranges.meaningful(t, node.op)
        assert np.array_equal(content[used], wanted[t][used]), f"{t!r} depends on where it lies"
        if t.dtype == F32 and not ops.OPS.get(node.op, ops.OPS["add"]).stores:
            assert np.isfinite(content.view(np.float32)).all(), t


@pytest.mark.parametrize("mode", Mode)
def test_every_op_alone(backend: CudaBackend, mode: Mode):
    for _, node, values in itertools.chain(ranges.cases(), ranges.fused_cases(1)):
        alone(backend, node, values, mode)


def product(name: str, rows: int, cols: int, tokens: int) -> Node:
    dtype = DTYPES[name]
    w = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    x = Tensor("x", Q8_ACT if dtype in QUANTISED else F32, (tokens, cols))
    return make("mul_mat", "y", w, x)


def products_alone(backend: CudaBackend, node: Node, mode: Mode) -> None:
    alone(backend, node, values_for(node, 1, generator(node.inputs)), mode)


@pytest.mark.parametrize("tokens", PRODUCT_TOKENS)
@pytest.mark.parametrize("kind", PRODUCT_KINDS)
@pytest.mark.parametrize("mode", Mode)
def test_products_alone(backend: CudaBackend, mode: Mode, kind: str, tokens: str):
    for name, n in itertools.product(PRODUCT_KINDS[kind], PRODUCT_TOKENS[tokens]):
        widths = {1: (7, 264), 32: (32, 288), 256: (256, 768)}[DTYPES[name].block]
        for rows, cols in itertools.product((1, 35), widths):
            products_alone(backend, product(name, rows, cols, n), mode)


SPLITS = {  # weight type, tokens
    "one token": ("Q4_0", 1), "two tokens": ("Q6_K", 2), "tile": ("Q4_K", 16),
    "tall tile": ("Q8_0", 64), "tallest tile": ("Q5_K", 100), "expanded": ("Q6_K", 1030),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize("mode", Mode)
def test_splits_alone(backend: CudaBackend, mode: Mode, case: str):
    """Few rows and many columns: warps share a row's columns, blocks share a tile's; or cuBLAS
    takes weights expanded in scratch."""
    name, tokens = SPLITS[case]
    products_alone(backend, product(name, 35, 5120, tokens), mode)


def attention(tokens: int, heads: int, heads_kv: int, head_dim: int, n_kv: int) -> Node:
    q = Tensor("q", F32, (tokens, heads, head_dim))
    k, v = (Tensor(name, F16, (n_kv, heads_kv * head_dim), Kind.CACHE) for name in "kv")
    mask = Tensor("mask", F16, (tokens, n_kv), Kind.INPUT)
    scale = head_dim**-0.5
    return make("attention", "o", q, k, v, mask, n_kv=n_kv, n_head_kv=heads_kv, scale=scale)


ATTENTION = {  # tokens, heads, heads_kv, head_dim, n_kv
    "one share": (1, 4, 2, 64, 31),
    "shares": (1, 8, 2, 64, 700),
    "shares of 8 tokens": (8, 4, 2, 128, 517),
    "wide heads": (2, 2, 1, 256, 300),
    "odd heads": (3, 3, 3, 40, 129),
    "12 tokens": (12, 4, 2, 64, 321),
    "prefill": (130, 32, 8, 64, 150),
    "prefill of wide heads": (130, 32, 8, 192, 70),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("mode", Mode)
def test_attention_alone(backend: CudaBackend, mode: Mode, case: str):
    node = attention(*ATTENTION[case])
    alone(backend, node, values_for(node, 1, generator(case)), mode)
