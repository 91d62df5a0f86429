"""The engine on the GPU: logits against the float64 reference, caches of every type, several
sequences, a server's first steps, other threads, and results that outlive it."""

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
from workbench.benchmarks.compare.answers import compare_logits
from workbench.benchmarks.workload import parse
from workbench.config import BEST, CACHE_TYPES, EXPAND, TogglePreset, Toggles
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
# NMSE between steps of other sizes, which take other kernels
ROUNDING = {"F32": 2e-6, "BF16": 2e-4, "Q8_0": 2e-3, "Q4_K": 2e-3}


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


# caches -------------------------------------------------------------------------------------------

# NMSE of logits: what a cache of a type adds to one of halves, and what products of many tokens and
# rounding to halves by tensor cores add
OF_CACHE, PRODUCTS = {"f16": 0.0, "f32": 4e-7, "bf16": 2e-5, "q8_0": 2e-4}, 4e-6
CACHES = [*((kind, kind) for kind in CACHE_TYPES), ("q8_0", "bf16"), ("f16", "q8_0")]


def answers(path, device: str, k: str = "f16", v: str = "f16", **toggles: str) -> np.ndarray:
    """Logits of tokens one by one after a prompt, of a copy, and after a shift."""
    rng = np.random.default_rng(17)
    prompt, tokens = rng.integers(3, 900, 40).tolist(), rng.integers(3, 900, 6).tolist()
    with wb.Engine.load(
        path, device=device, n_ctx=192, n_ubatch=32, n_kv_pad=32, n_seqs=3, threads=2,
        toggles=Toggles(**toggles), cache_type_k=k, cache_type_v=v,
    ) as engine:  # fmt: skip
        engine.prefill(prompt, "none")
        rows = [engine.step([token]) for token in tokens]
        engine.cache.copy(0, 2)
        rows.append(engine.step(tokens, "all", 2))
        engine.cache.remove(2)
        engine.cache.remove(0, 3, 9)
        engine.cache.shift(0, -6, 9)
        rows.append(engine.step(tokens, "all"))
        return np.concatenate(rows)


@pytest.fixture(scope="module")
def halves(tiny_model) -> np.ndarray:
    return answers(tiny_model("tiny-qwen3", "F32"), "embedded")


@pytest.mark.parametrize("cache", ["unified", "per_sequence"])
@pytest.mark.parametrize(("k", "v"), CACHES)
def test_caches_of_every_type_answer_alike(tiny_model, halves, k, v, cache):
    path, toggles = tiny_model("tiny-qwen3", "F32"), {"kv_cache": cache, "graph_reuse": "set_rows"}
    found = answers(path, "cuda", k, v, **toggles)
    assert reference.nmse(found, halves) <= OF_CACHE[k] + OF_CACHE[v] + PRODUCTS


# several sequences --------------------------------------------------------------------------------


@pytest.mark.parametrize("toggles", ["baseline", "best"])
@pytest.mark.parametrize(("preset", "quant"), [
    ("tiny-llama", "F32"), ("tiny-qwen3", "BF16"), ("tiny-llama-bias", "Q8_0"),
])  # fmt: skip
def test_each_sequence_is_answered_as_alone(tiny_model, preset, quant, toggles):
    """Ragged prompts in one step, then a token of each; and one that was moved in the cache."""
    tokens = tokens_for(preset, 100)
    prompts = tokens[:20], tokens[20:21], tokens[21:60], tokens[60:70]
    with wb.Engine.load(
        tiny_model(preset, quant), device="cuda", n_ctx=1024, n_seqs=8, n_ubatch=96, toggles=toggles
    ) as used:
        alone = []
        for prompt in prompts:
            used.reset()
            rows = [used.step(prompt, "all"), one_by_one(used, tokens[70:73])]
            alone.append(np.concatenate(rows))
        used.reset()
        found = [used.submit([(s, prompt, "all") for s, prompt in enumerate(prompts)]).each()]
        for i in range(3):
            order = np.roll(range(4), i).tolist()
            rows = used.submit([(s, [tokens[70 + i]], "last") for s in order]).each()
            found.append([rows[order.index(s)] for s in range(4)])
        for s, theirs in enumerate(alone):
            ours = np.concatenate([rows[s] for rows in found])
            answer = compare_logits(theirs, ours, "rounding", ROUNDING[quant])
            assert answer.holds, (s, str(answer))
        wanted = used.step([5], sequence=2).copy()
        used.cache.remove(2, used.cache.length(2) - 1)
        used.cache.shift(2, 40)
        assert compare_logits(wanted, used.step([5], sequence=2), "rounding").holds


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


# threads and ends ---------------------------------------------------------------------------------


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
