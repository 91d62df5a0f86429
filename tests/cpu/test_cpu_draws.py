"""Tokens that the CPU's kernel draws are those that the host draws, bit by bit of an edge."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import draws
from tests.cpu.kernel_runs import run
from tests.draws import Draw
from tests.profiles import examples
from workbench.model.sampler import Sampling


def drawn_by_kernel(asked: list[Draw]) -> list[int]:
    node, arrays = draws.as_node(asked)
    return run(node, arrays).view(np.int32).reshape(-1, 2)[:, 0].tolist()


@settings(max_examples=examples(300))
@given(draws.several(st.integers(1, 60)))
def test_a_draw_is_the_hosts(asked):
    assert drawn_by_kernel(asked) == [each.token for each in asked]


def test_whole_vocabularies_are_drawn_alike():
    rng = np.random.default_rng(0)
    how = [Sampling(0.8, 40, 0.95), Sampling(1, 0, 1.0), Sampling(2, 0, 0.9, 0.01), Sampling(1, 3)]
    asked = [
        Draw(rng.normal(0, 3, 32001).astype(np.float32), s, float(np.float32(rng.random())))
        for s in how for _ in range(8)
    ]  # fmt: skip
    assert drawn_by_kernel(asked) == [each.token for each in asked]


def test_settings_are_rounded_once_so_ties_are_cut_alike():
    """Ten equal logits: the nearest float32 of 0.3 is above it, so a fourth is kept."""
    row, kept = np.zeros(10, np.float32), Sampling(1.0, 0, 0.3)
    asked = [Draw(row, kept, u) for u in np.linspace(0, 1, 33)]
    assert drawn_by_kernel(asked) == [each.token for each in asked]
    assert {each.token for each in asked} == {0, 1, 2, 3}
