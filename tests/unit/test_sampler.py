"""Sampling: greedy, seeded, and what top-k and top-p keep."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.errors import UsageError
from workbench.model.sampler import Sampler, Sampling

LOGITS = np.array([0.0, 3.0, 2.0, -5.0, 2.9], np.float32)


def draws(sampling, seed=0, n=2000, logits=LOGITS):
    sampler = Sampler(sampling, seed)
    return [sampler(logits) for _ in range(n)]


def test_temperature_zero_is_greedy_and_ties_go_to_the_lowest():
    assert set(draws(Sampling(0.0), n=5)) == {1}
    assert Sampler(Sampling(0.0), 0)(np.zeros(4, np.float32)) == 0


def test_equal_seeds_give_equal_tokens():
    hot = Sampling(1.0, 0, 1.0)
    assert draws(hot, 7) == draws(hot, 7)
    assert draws(hot, 7) != draws(hot, 8)


def test_frequencies_are_the_softmax():
    got = np.bincount(draws(Sampling(1.0, 0, 1.0), n=20_000), minlength=5) / 20_000
    p = np.exp(LOGITS - LOGITS.max())
    assert np.abs(got - p / p.sum()).max() < 0.015


def test_top_k_keeps_the_k_largest():
    assert set(draws(Sampling(2.0, 2, 1.0))) == {1, 4}


def test_top_p_keeps_the_fewest_that_reach_p():
    p = np.exp(LOGITS - LOGITS.max())
    p = np.sort(p / p.sum())[::-1]
    assert set(draws(Sampling(1.0, 0, float(p[0] * 0.99)))) == {1}
    assert set(draws(Sampling(1.0, 0, float(p[0] * 1.01)))) == {1, 4}


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}]
)
def test_impossible_sampling_is_refused(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        Sampling(**fields)
