"""A server's first steps on the GPU: the requests behind them compile nothing, capture little, and
get the tokens of an engine that took none."""

from __future__ import annotations

import pytest

from tests.engine.slots.test_slots_first_steps import SLOTS, load, served
from workbench.backend import compiled
from workbench.engine.slots.first_steps import first_steps
from workbench.engine.slots.slots import Slots

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quant", ["Q4_K", "F16"])
def test_what_requests_need_is_made_before_them(tiny_model, quant):
    with served(tiny_model("tiny-llama", quant), "cuda") as engine:
        slots = Slots(engine, SLOTS)
        first_steps(engine, SLOTS)
        assert engine.cache.n_used == 0 and slots.totals().n_steps == 0
        before, n_compiled = engine.counters, compiled.so_far().n
        made = load(slots, 32, 1)
        after = engine.counters
        assert compiled.so_far().n == n_compiled
        assert after["programs_built"] - before["programs_built"] < before["programs_built"] / 4
        assert after["plans_captured"] - before["plans_captured"] < before["plans_captured"] / 4
        with engine.variant(engine.toggles) as other:
            assert load(Slots(other, SLOTS), 32, 1) == made
