"""Logits that the last kernel writes into the host's memory: the same bits, and nobody's array is
written again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import workbench as wb
from workbench.program.check import hazards

KEPT = wb.Toggles(graph_reuse="set_rows", fuse="on", sync="packed_implicit", copy_stream="compute")
PLANS = [
    {},
    {"plans": "ours", "plan_scope": "step"},
    {"plans": "today"},
    {"plans": "pr", "plan_scope": "step"},
    {"graph_reuse": "rebuild", "plans": "ours"},
    {"defer_norm": "on"},
]


@pytest.fixture(scope="module")
def engine(tiny_model):
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=256, n_ubatch=16, toggles=KEPT
    ) as made:
        yield made


def logits(engine: wb.Engine, hold: bool) -> list[np.ndarray]:
    """Of a prompt with all rows, and of tokens behind it. hold: whether to keep their arrays."""
    rows = [engine.prefill(list(range(20)), outputs="all"), engine.step([1, 2, 3], outputs="all")]
    for token in range(25):
        row = engine.step([token])
        rows.append(row if hold else row.copy())
    return rows


@pytest.mark.parametrize("hold", [False, True], ids=["copied at once", "held"])
@pytest.mark.parametrize("others", PLANS, ids=str)
def test_the_bits_are_those_that_a_copy_brings(engine, others, hold):
    toggles = dataclasses.replace(KEPT, **others)
    with engine.variant(toggles) as copied:
        wanted = [row.copy() for row in logits(copied, False)]
    with engine.variant(dataclasses.replace(toggles, results="direct")) as direct:
        found = logits(direct, hold)
        copies = [c for c in direct.program().singly() if c.kind == "copy"]
        assert "result_output" not in [c.label for c in copies]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_array_outlives_its_engine(engine):
    with engine.variant(dataclasses.replace(KEPT, results="direct")) as direct:
        row = direct.step([1])
        kept = row.copy()
        direct.step([2])
    np.testing.assert_array_equal(row, kept)


@pytest.mark.parametrize("step_wait", ["every", "outputs"])
def test_nothing_races_that_does_not_with_copies(tiny_model, step_wait):
    toggles = dataclasses.replace(
        KEPT, results="direct", step_wait=step_wait, host_source="pinned_ring_2"
    )
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="null", n_ctx=256, n_ubatch=8, toggles=toggles
    ) as prover:
        assert hazards.check_cycle(prover.cycle(20, 3)).safe
