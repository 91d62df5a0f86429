"""Programs die by reference count: rebuilding one per token must not feed the cycle collector."""

from __future__ import annotations

import gc

import pytest

from workbench.config import Toggles
from workbench.engine.engine import Engine


@pytest.mark.parametrize("device", ["embedded", "host", "null"])
def test_a_dropped_program_leaves_no_cycles(tiny_model, device):
    with Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device=device, n_ctx=64, toggles=Toggles()
    ) as engine:
        engine.step([1])
        gc.collect()
        gc.disable()
        try:
            for token in range(5):
                engine.step([token])  # `rebuild`: five programs made and dropped
            assert gc.collect() < 20  # hundreds of nodes and commands each, had they cycles
        finally:
            gc.enable()
