"""The engine on the GPU: logits against the float64 reference, and who may use it when."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests import reference
from tests.edited import retyped
from tests.gpu.harness import one_by_one, tokens_for
from tests.stored_blocks import TYPES
from workbench.backend import compiled
from workbench.benchmarks.workload import parse
from workbench.config import BEST, EXPAND, TogglePreset, Toggles
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.slots import Slots
from workbench.jupyter import pair
from workbench.model.sampler import Sampling
from workbench.server.serving import serving

pytestmark = pytest.mark.gpu

# NMSE against float64: three times what a CPU has (K and V in halves, activations of 8 bits), and
# what operands of tensor cores add: attention rounds queries and weights to halves, products of
# more than 8 tokens round activations to halves, or to bfloat16 (8 bits) with BF16 weights.
FLOATS = {"F32": 6e-7 + 2e-6, "F16": 6e-7 + 2e-6, "BF16": 6e-7 + 5e-5}
QUANTS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
TOLERANCE = FLOATS | dict.fromkeys(QUANTS, 1e-3 + 2e-6)
# On the float path it is what the F16 cache and attention on tensor cores leave. Activations
# rounded to BF16 would show as some 1e-5, to 8 bits as 3e-4.
FLOAT_PATH = 3e-6
# preset, type, and tokens: of one pad of the cache, or beyond
ALL = [
    *itertools.product(("tiny-llama", "tiny-qwen3"), TOLERANCE, (16,)),
    ("tiny-llama-bias", "F32", 16), ("tiny-llama-bias", "Q8_0", 16), ("tiny-qwen2", "Q8_0", 16),
    ("tiny-llama-spm", "F16", 16), ("tiny-llama", "F32", 300), ("tiny-llama", "Q4_0", 300),
    ("tiny-qwen3", "F16", 300),
]  # fmt: skip


def check(logits: np.ndarray, wanted: np.ndarray, most: float) -> None:
    assert logits.dtype == np.float32 and logits.shape == wanted.shape
    assert reference.nmse(logits, wanted) <= most
    assert len(reference.decided_argmax_mismatches(logits, wanted)) <= len(wanted) // 100


def both_ways(used: wb.Engine, tokens: list[int]) -> Iterator[np.ndarray]:
    """All at once, and a prompt with single tokens after it, and a prompt after them."""
    used.reset()
    yield used.prefill(tokens, outputs="all").copy()
    used.reset()
    n = max(0, len(tokens) - 50)
    rows = [used.prefill(tokens[:n], outputs="all")] if n else []
    rows.append(one_by_one(used, tokens[n : n + 16]))
    rest = tokens[n + 16 :]
    yield np.concatenate([*rows, *([used.prefill(rest, outputs="all")] if rest else [])])


@pytest.mark.parametrize(("preset", "quant", "n"), ALL)
def test_logits_are_the_reference_s(engine, tiny_model, preset, quant, n):
    tokens = tokens_for(preset, n)
    wanted = reference.forward(tiny_model(preset, quant), tokens)
    for found in both_ways(engine(preset, quant), tokens):
        check(found, wanted, TOLERANCE[quant])


@pytest.mark.parametrize("fuse", ["off", "on"])
@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K"])
def test_the_float_path_is_the_reference_s(engine, tiny_model, quant, fuse):
    """Also with fused nodes, whose products are then apart."""
    tokens = tokens_for("tiny-llama", 40)
    wanted = reference.forward(tiny_model("tiny-llama", quant), tokens)
    toggles = Toggles(activations="float", graph_reuse="set_rows").switched("fuse", fuse)
    with engine("tiny-llama", quant).variant(toggles) as used:
        for found in both_ways(used, tokens):
            assert reference.nmse(found, wanted) < FLOAT_PATH


@pytest.mark.parametrize("expand", EXPAND)
def test_types_without_kernels_are_expanded(tiny_model, tmp_path, expand):
    """In every matrix another one, the tied embedding too, which host and device both have."""
    kinds = itertools.cycle(TYPES)
    path = retyped(tiny_model("tiny-qwen2", "F32"), tmp_path / "m.gguf", lambda name: next(kinds))
    tokens = tokens_for("tiny-qwen2", 16)
    with wb.Engine.load(path, device="cuda", n_ctx=256, expand=expand) as expanded:
        rows = expanded.prefill(tokens, outputs="all")
    check(rows, reference.forward(path, tokens), TOLERANCE["F16" if expand == "f16" else "Q8_0"])


def test_what_requests_need_is_made_before_them(tiny_model):
    """The requests after a server's first steps compile nothing and capture little."""
    path, rng, n = tiny_model("tiny-llama", "Q4_K"), np.random.default_rng(1), 4
    with wb.Engine.load(
        path, device="cuda", n_ctx=n * 96, n_seqs=n, n_ubatch=16, n_kv_pad=32,
        toggles=serving("cuda", TogglePreset(BEST, {})),
    ) as used:  # fmt: skip
        slots = Slots(used, n)
        first_steps(used, n)
        before, n_compiled = used.counters, compiled.so_far().n
        for number in range(24):
            tokens = rng.integers(3, 900, int(rng.integers(1, 60))).astype(np.int32)
            how, most = Sampling(0.8 * (number % 2)), int(rng.integers(1, 30))
            slots.ask(Ask(number, tokens, most, how, number, frozenset(), None, None))
            left = n if number % n == n - 1 else 0
            while left:
                left -= len(slots.step().ended)
        assert compiled.so_far().n == n_compiled
        for name in ("programs_built", "plans_captured"):
            assert used.counters[name] - before[name] < before[name] / 4, name


def test_a_comparison_in_another_thread_is_right(engine):
    """As a panel's run; a GPU belongs to whichever thread uses it, and the first goes on after."""
    used = engine("tiny-llama", "Q8_0")
    before = used.step([1]).copy()
    found = []

    def run() -> None:
        other = Toggles(sync="copy_boundary")
        found.append(pair.compare(used, Toggles(), other, parse("tg8"), rounds=5))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found and found[0].answer.holds and found[0].traces is not None
    used.reset()
    assert np.array_equal(used.step([1]), before)


def test_logits_stay_after_their_engines_end(tiny_model):
    """They lie where they landed, in pinned memory, for as long as somebody holds them."""
    tokens, path = tokens_for("tiny-llama", 16), tiny_model("tiny-llama", "Q8_0")
    with wb.Engine.load(path, device="cuda", n_ctx=64, toggles=Toggles()) as used:
        wanted = one_by_one(used, tokens)
        used.reset()
        kept = [used.step([t]) for t in tokens]
    del used
    gc.collect()
    assert np.array_equal(np.concatenate(kept), wanted)
