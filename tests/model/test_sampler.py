"""Sampling: greedy, seeded, and what top-k, top-p and min-p keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import draws as cases
from tests.profiles import examples
from workbench.common.errors import UsageError
from workbench.model.draw_weights import weights
from workbench.model.sampler import NO_TOKEN, Sampler, Sampling, drawn

LOGITS = np.array([0.0, 3.0, 2.0, -5.0, 2.9], np.float32)


def kept(sampling, logits=LOGITS):
    """The tokens that a sampling can draw at a temperature at which all are alike."""
    hot = Sampling(1e30, sampling.top_k, sampling.top_p, sampling.min_p)
    return {drawn(logits, hot, u) for u in np.linspace(0, 1, 101)}


def test_min_p_keeps_a_share_of_the_largest_probability():
    """llama.cpp's definition: p >= min_p * largest, at temperature 1."""
    row = np.log(np.array([0.1, 0.4, 0.2, 0.05, 0.25], np.float32))
    assert kept(Sampling(1, 0, 1.0, 0.0), row) == {0, 1, 2, 3, 4}
    for at_least, wanted in ((0.12, {0, 1, 2, 3, 4}), (0.13, {0, 1, 2, 4}), (0.26, {1, 2, 4}),
                             (0.6, {1, 4}), (0.7, {1}), (1.0, {1})):  # fmt: skip
        assert kept(Sampling(1, 0, 1.0, at_least), row) == wanted
        assert kept(Sampling(1, 2, 1.0, at_least), row) == wanted & {1, 4}
    assert kept(Sampling(1, 0, 0.5, 0.26), row) == {1, 4}  # top-p comes before
    ties = np.array([2, 1, 2, 0], np.float32)
    assert kept(Sampling(1, 0, 1.0, 1.0), ties) == {0, 2}


def test_weights_are_the_exponential_in_whole_numbers():
    x = -np.linspace(0, 40, 100_001).astype(np.float32)
    exact, found = np.exp(x.astype(np.float64)) * 2**40, weights(x)
    assert (np.abs(found - exact) <= exact * 1e-7 + 1).all() and found[0] == 2**40
    assert weights(np.array([-np.inf, -3e38, -0.0], np.float32)).tolist() == [0, 0, 2**40]


def oracle(row: np.ndarray, s: Sampling, u: float, off: float) -> int:
    """A draw in Python's floats, all thresholds of probabilities off by so much."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[: s.top_k or None]
    most = float(row[order[0]])
    p = [math.exp(float(row[i]) - most) for i in order]
    total, n, reached = math.fsum(p), len(p), 0.0
    if np.float32(s.top_p) < 1:
        for n in range(1, len(p) + 1):
            reached += p[n - 1]
            if reached / total >= s.top_p + off:
                break
    q = [
        math.exp((float(row[i]) - most) / float(np.float32(s.temperature)))
        for i, own in zip(order[:n], p, strict=False) if own >= s.min_p * (1 + off)
    ]  # fmt: skip
    target, below = (u + off) * math.fsum(q), 0.0
    for at, each in enumerate(q):
        below += each
        if below > target:
            return order[at]
    return order[len(q) - 1]


@settings(max_examples=examples(500))
@given(st.integers(0, 2**32), cases.samplings, st.floats(0, 1, width=32))
def test_a_draw_is_that_of_an_oracle(seed, sampling, uniform):
    """But for what falls within a rounding of an edge."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0, rng.choice([0.1, 1, 5]), rng.integers(1, 80)).astype(np.float32)
    found = drawn(row, sampling, uniform)
    if np.float32(sampling.temperature) < 1e-3:
        assert found == int(np.argmax(row))
        return
    near = [oracle(row, sampling, uniform, off) for off in (-3e-6, -1e-6, 0, 1e-6, 3e-6)]
    places = {t: i for i, t in enumerate(np.argsort(-row, kind="stable").tolist())}
    assert min(map(places.get, near)) <= places[found] <= max(map(places.get, near))


def test_logits_that_are_not_finite_draw_nothing():
    for bad in ([0, np.nan], [np.inf, 0], [-np.inf, -np.inf]):
        for temperature in (0.0, 1.0):
            assert drawn(np.array(bad, np.float32), Sampling(temperature), 0.5) == NO_TOKEN
    assert drawn(np.array([-np.inf, 0], np.float32), Sampling(1.0, 0, 1.0), 0.0) == 1


def test_impossible_sampling_is_refused():
    nan, inf = float("nan"), float("inf")
    for field, values in {
        "temperature": (-1, nan, inf, 1e39), "top_k": (-1,), "top_p": (0, 1.1),
        "min_p": (-0.1, 1.1, nan),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(UsageError, match=field):
                Sampling(**{field: value})


def test_equal_seeds_give_equal_tokens_with_the_softmax():
    hot = Sampling(1.0, 0, 1.0)
    first, again, other = (
        [one(LOGITS) for _ in range(2000)]
        for one in (Sampler(hot, 7), Sampler(hot, 7), Sampler(hot, 8))
    )
    assert first == again != other
    p = np.exp(LOGITS - LOGITS.max())
    got = np.bincount(first, minlength=5) / 2000
    assert np.abs(got - p / p.sum()).max() < 0.05
