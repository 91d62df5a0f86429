"""The engine on the GPU: logits against the float64 reference, bit-equal under every toggle."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

import workbench as wb
from tests import reference
from tests.contract.test_contract_logits import (  # noqa: F401 - `engine` is a fixture
    ALL,
    N_LONG,
    N_TOKENS,
    check,
    engine,
    legal_toggles,
    one_by_one,
    tokens_for,
)
from tests.edited import retyped
from tests.stored_blocks import TYPES
from workbench.config import EXPAND, Toggles
from workbench.model.synth.shapes import QUANTS
from workbench.trace.profile import profile

pytestmark = pytest.mark.gpu

# What operands of tensor cores add: attention rounds queries and weights to halves, products of
# more than 8 tokens round activations to halves, or to bfloat16 (8 bits) with BF16 weights.
HALVES = dict.fromkeys(QUANTS, 2e-6) | {"BF16": 5e-5}


@pytest.mark.parametrize(("preset", "quant"), ALL)
def test_logits_are_the_reference_s(engine, tiny_model, preset, quant):  # noqa: F811
    """A prompt of 16 in one go, then token by token: both the reference's, and each other's."""
    tokens = tokens_for(preset, N_TOKENS)
    wanted = reference.forward(tiny_model(preset, quant), tokens)
    whole = engine(preset, quant, "cuda").prefill(tokens, outputs="all")
    single = one_by_one(engine(preset, quant, "cuda"), tokens)
    check(whole, wanted, quant, HALVES[quant])
    check(single, wanted, quant, HALVES[quant])


@pytest.mark.parametrize("expand", EXPAND)
def test_types_without_kernels_are_expanded(tiny_model, tmp_path, expand):
    """In every matrix another one, the tied embedding too, which host and device both have."""
    kinds = itertools.cycle(TYPES)
    path = retyped(tiny_model("tiny-qwen2", "F32"), tmp_path / "m.gguf", lambda name: next(kinds))
    tokens = tokens_for("tiny-qwen2", N_TOKENS)
    with wb.Engine.load(path, device="cuda", n_ctx=256, expand=expand) as expanded:
        rows = expanded.prefill(tokens, outputs="all")
    check(rows, reference.forward(path, tokens), "F16" if expand == "f16" else "Q8_0", 2e-6)


@pytest.mark.parametrize(
    ("preset", "quant"), [("tiny-llama", "F32"), ("tiny-llama", "Q4_0"), ("tiny-qwen3", "F16")]
)
def test_beyond_one_pad_of_the_cache(engine, tiny_model, preset, quant):  # noqa: F811
    tokens = tokens_for(preset, N_LONG)
    wanted = reference.forward(tiny_model(preset, quant), tokens)
    used = engine(preset, quant, "cuda")
    first = used.prefill(tokens[:250], outputs="all")
    rows = [first, one_by_one(used, tokens[250:262]), used.prefill(tokens[262:], outputs="all")]
    check(np.concatenate(rows), wanted, quant, HALVES[quant])


@pytest.mark.parametrize(("preset", "quant"), [("tiny-llama", "Q4_0"), ("tiny-qwen3", "Q8_0")])
def test_bit_equal_under_every_toggle(engine, preset, quant):  # noqa: F811
    tokens = tokens_for(preset, N_LONG)
    shared = engine(preset, quant, "cuda", n_ubatch=64)

    def run(toggles: Toggles) -> np.ndarray:
        with shared.variant(toggles) as variant:
            whole = variant.prefill(tokens[:64], outputs="all")
            last = variant.prefill(tokens[64:250])
            return np.concatenate([whole, last, one_by_one(variant, tokens[250:270])])

    wanted = run(Toggles())
    for toggles in legal_toggles():
        assert np.array_equal(run(toggles), wanted), toggles


@pytest.mark.alone
def test_the_device_s_spans_lie_inside_the_step(engine):  # noqa: F811
    """Launches run after they are issued and before the logits' wait is over; tracing changes
    nothing."""
    used = engine("tiny-llama", "Q8_0", "cuda")
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


def test_a_dropped_program_leaves_no_cycles(tiny_model):
    """As tests/cpu/test_garbage.py: launches bound for one token die with its program."""
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="cuda", n_ctx=64, toggles=wb.Toggles()
    ) as rebuilding:
        rebuilding.step([1])
        gc.collect()
        gc.disable()
        try:
            for token in range(5):
                rebuilding.step([token])
            assert gc.collect() < 20
        finally:
            gc.enable()


def test_logits_outlive_their_engine(tiny_model):
    """They lie where they landed, in pinned memory, for as long as somebody holds them."""
    tokens = tokens_for("tiny-llama", N_TOKENS)
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="cuda", n_ctx=64, toggles=wb.Toggles()
    ) as used:
        wanted = [used.step([t]).copy() for t in tokens]
        used.reset()
        kept = [used.step([t]) for t in tokens]
    del used
    gc.collect()
    assert all(np.array_equal(a, b) for a, b in zip(kept, wanted, strict=True))
