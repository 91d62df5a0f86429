"""The engine on the GPU: logits against the float64 reference, several sequences, a server's first
steps, other threads, and results that outlive it."""

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
from workbench.benchmarks.workload import draw_tokens, parse, take_sample
from workbench.common.errors import UsageError
from workbench.config import BEST, EXPAND, TogglePreset, Toggles
from workbench.engine.exclusive import measuring
from workbench.engine.slots.asks import Ask
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.slots import Slots
from workbench.jupyter import pair
from workbench.model.sampler import Sampling
from workbench.server.serving import serving
from workbench.trace.profile import profile

pytestmark = pytest.mark.gpu

# NMSE against float64: three times what a CPU has (K and V in halves, activations of 8 bits), and
# what operands of tensor cores add: attention rounds queries and weights to halves, products of
# more than 8 tokens round activations to halves, or to bfloat16 (8 bits) with BF16 weights.
FLOATS = {"F32": 6e-7 + 2e-6, "F16": 6e-7 + 2e-6, "BF16": 6e-7 + 5e-5}
QUANTS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
TOLERANCE = FLOATS | dict.fromkeys(QUANTS, 1e-3 + 2e-6)
ALL = [
    *itertools.product(("tiny-llama", "tiny-qwen3"), TOLERANCE), ("tiny-llama-bias", "F32"),
    ("tiny-llama-bias", "Q8_0"), ("tiny-qwen2", "Q8_0"), ("tiny-llama-spm", "F16"),
]  # fmt: skip
# NMSE between steps of other sizes, which take other kernels
ROUNDING = {"F32": 2e-6, "BF16": 2e-4, "Q8_0": 2e-3, "Q4_K": 2e-3}


def check(logits: np.ndarray, wanted: np.ndarray, most: float) -> None:
    assert logits.dtype == np.float32 and logits.shape == wanted.shape
    assert reference.nmse(logits, wanted) <= most
    assert len(reference.decided_argmax_mismatches(logits, wanted)) <= len(wanted) // 100


@pytest.mark.parametrize(("preset", "quant"), ALL)
def test_logits_are_the_reference_s(engine, tiny_model, preset, quant):
    """A prompt of 16 in one go, then token by token: both the reference's, and each other's."""
    tokens = tokens_for(preset, 16)
    wanted = reference.forward(tiny_model(preset, quant), tokens)
    check(engine(preset, quant).prefill(tokens, outputs="all"), wanted, TOLERANCE[quant])
    check(one_by_one(engine(preset, quant), tokens), wanted, TOLERANCE[quant])


@pytest.mark.parametrize("expand", EXPAND)
def test_types_without_kernels_are_expanded(tiny_model, tmp_path, expand):
    """In every matrix another one, the tied embedding too, which host and device both have."""
    kinds = itertools.cycle(TYPES)
    path = retyped(tiny_model("tiny-qwen2", "F32"), tmp_path / "m.gguf", lambda name: next(kinds))
    tokens = tokens_for("tiny-qwen2", 16)
    with wb.Engine.load(path, device="cuda", n_ctx=256, expand=expand) as expanded:
        rows = expanded.prefill(tokens, outputs="all")
    check(rows, reference.forward(path, tokens), TOLERANCE["F16" if expand == "f16" else "Q8_0"])


@pytest.mark.parametrize(
    ("preset", "quant"), [("tiny-llama", "F32"), ("tiny-llama", "Q4_0"), ("tiny-qwen3", "F16")]
)
def test_beyond_one_pad_of_the_cache(engine, tiny_model, preset, quant):
    tokens = tokens_for(preset, 300)
    wanted = reference.forward(tiny_model(preset, quant), tokens)
    used = engine(preset, quant)
    first = used.prefill(tokens[:250], outputs="all")
    rows = [first, one_by_one(used, tokens[250:262]), used.prefill(tokens[262:], outputs="all")]
    check(np.concatenate(rows), wanted, TOLERANCE[quant])


# NMSE that is left of a whole model's logits on the float path: of its F16 cache, and of attention
# on tensor cores. Activations rounded to BF16 would show as some 1e-5, to 8 bits as 3e-4.
@pytest.mark.parametrize("fuse", ["off", "on"])
@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K"])
def test_the_float_path_of_a_model_is_the_reference_s(engine, tiny_model, quant, fuse):
    """40 tokens at once and one by one, also with fused nodes, whose products are then apart."""
    tokens = tokens_for("tiny-llama", 40)
    wanted = reference.forward(tiny_model("tiny-llama", quant), tokens)
    toggles = Toggles(activations="float", graph_reuse="set_rows").switched("fuse", fuse)
    with engine("tiny-llama", quant).variant(toggles) as used:
        whole = used.prefill(tokens, outputs="all")
        used.reset()
        for found in (whole, one_by_one(used, tokens)):
            assert reference.nmse(found, wanted) < 3e-6


# several sequences -------------------------------------------------------------------------------


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
            alone.append(
                np.concatenate([used.step(prompt, "all"), one_by_one(used, tokens[70:73])])
            )
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


def test_many_sequences_are_what_one_is(tiny_model):
    """The last of 128 sequences, with cells behind all others'."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q4_K"), device="cuda", n_ctx=4096, n_seqs=128, toggles="best"
    ) as used:
        test = parse("pp24+tg3@b128")
        tokens = draw_tokens(test, used.model.n_vocab, 0)
        found = take_sample(used, test, tokens).last_logits
        used.reset()
        wanted = used.prefill(tokens.prompt[-24:] + tokens.gen[127::128])
        answer = compare_logits(wanted, found[None], "rounding", ROUNDING["Q4_K"])
        assert answer.holds, str(answer)


# a server ----------------------------------------------------------------------------------------

SLOTS = 4


def asks(n: int) -> Iterator[Ask]:
    rng = np.random.default_rng(1)
    for number in range(n):
        tokens = rng.integers(3, 900, int(rng.integers(1, 60))).astype(np.int32)
        how = Sampling(0.8) if number % 2 else Sampling()
        most = int(rng.integers(1, 30))
        yield Ask(number, tokens, most, how, number, frozenset(), None, None)


def answered(slots: Slots, n: int) -> dict[int, list[int]]:
    """Serves n requests, SLOTS at a time; their tokens."""
    left, made, n_open = [*asks(n)][::-1], dict[int, list[int]](), 0
    while left or n_open:
        while left and n_open < SLOTS:
            slots.ask(left.pop())
            n_open += 1
        found = slots.step()
        n_open -= len(found.ended)
        for token in found.tokens:
            made.setdefault(token.number, []).append(token.token)
    return made


@pytest.mark.parametrize("quant", ["Q4_K", "F32"])
def test_what_requests_need_is_made_before_them(tiny_model, quant):
    """The requests behind a server's first steps compile nothing and capture little. They get the
    tokens of an engine that took none, and greedy ones those of each alone, but for rounding."""
    with wb.Engine.load(
        tiny_model("tiny-llama", quant), device="cuda", n_ctx=SLOTS * 96, n_seqs=SLOTS, n_ubatch=16,
        n_kv_pad=32, toggles=serving("cuda", TogglePreset(BEST, {})),
    ) as used:  # fmt: skip
        slots = Slots(used, SLOTS)
        first_steps(used, SLOTS)
        assert used.cache.n_used == 0 and slots.totals().n_steps == 0
        before, n_compiled = used.counters, compiled.so_far().n
        made = answered(slots, 32)
        after = used.counters
        assert compiled.so_far().n == n_compiled
        for name in ("programs_built", "plans_captured"):
            assert after[name] - before[name] < before[name] / 4, name
        with used.variant(used.toggles) as other:
            assert answered(Slots(other, SLOTS), 32) == made
        n_best = n = 0
        for ask in [*asks(32)][::2]:
            used.reset()
            given = ask.tokens.tolist()
            for token in made[ask.number]:
                row = used.prefill(given)[-1].astype(np.float64)
                off = 8 * np.sqrt(ROUNDING[quant] * np.mean(row**2))
                assert row[token] >= row.max() - off, (ask, token)
                n_best, n, given = n_best + (int(row.argmax()) == token), n + 1, [token]
        assert n_best >= 0.9 * n


# threads, traces and ends ------------------------------------------------------------------------


def test_a_comparison_in_another_thread_is_right(engine):
    """As a panel's run; a GPU belongs to whichever thread uses it, and the first goes on behind."""
    used = engine("tiny-llama", "Q8_0")
    before = used.step([1]).copy()
    found, main, go = [], threading.Event(), threading.Event()

    def run() -> None:
        with measuring("the panel", used):
            main.set()
            assert go.wait(60)
            other = Toggles(sync="copy_boundary")
            found.append(pair.compare(used, Toggles(), other, parse("tg8"), rounds=5))

    thread = threading.Thread(target=run)
    thread.start()
    assert main.wait(60)
    with pytest.raises(UsageError, match="the panel is measuring on this engine"):
        used.step([2])
    go.set()
    thread.join()
    assert found and found[0].answer.holds and found[0].traces is not None
    used.reset()
    assert np.array_equal(used.step([1]), before)


@pytest.mark.alone
def test_the_device_s_spans_lie_inside_the_step(engine):
    """Launches run after they are issued and before the logits' wait is over; tracing changes
    nothing."""
    used = engine("tiny-llama", "Q8_0")
    plain = used.prefill([1, 2, 3])
    used.reset()
    used.prefill([1, 2, 3])  # warm: events made
    used.reset()
    with profile(used) as trace:
        traced = used.prefill([1, 2, 3])
    assert np.array_equal(traced, plain)
    frame = trace.to_frame()
    device = frame[frame["category"] == "device"]
    (step,) = frame[frame["category"] == "step"].itertuples()
    slack_us = 200  # the two clocks are aligned to about that
    assert device["start_us"].min() > step.start_us - slack_us
    assert (device["start_us"] + device["dur_us"]).max() < step.start_us + step.dur_us + slack_us
    assert len(device) == sum(used.program(3).counts()[k] for k in ("launches", "copies")) - 1


def test_a_dropped_program_leaves_no_cycles_and_logits_stay(tiny_model):
    """Launches bound for one token die with its program. Logits lie where they landed, in pinned
    memory, for as long as somebody holds them, also behind their engine's end."""
    tokens = tokens_for("tiny-llama", 16)
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="cuda", n_ctx=64, toggles=Toggles()
    ) as used:
        wanted = [used.step([t]).copy() for t in tokens]
        gc.collect()
        gc.disable()
        try:
            for token in range(5):
                used.step([token])
            assert gc.collect() < 20
        finally:
            gc.enable()
        used.reset()
        kept = [used.step([t]) for t in tokens]
    del used
    gc.collect()
    assert all(np.array_equal(a, b) for a, b in zip(kept, wanted, strict=True))
