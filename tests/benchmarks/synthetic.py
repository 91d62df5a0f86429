"""Machines whose truth is known: no arm is faster than another, whatever the noise says."""

from __future__ import annotations

import numpy as np

from workbench.benchmarks.compare.rounds import order_of

N_ARMS = 3  # baseline, toggled, A/A control: all the same


def _white(rng, n):
    return 0.02 * rng.standard_normal(n)


def _ar1(rng, n, rho, size):
    """Noise that lasts: each value keeps the share rho of the one before."""
    out, last = np.empty(n), size * rng.standard_normal()
    for i, step in enumerate(rng.standard_normal(n) * size * np.sqrt(1 - rho**2)):
        out[i] = last = rho * last + step
    return out


def _drift(rng, n):
    """A card that warms up: 30 % slower over the run, in a straight line or a wave."""
    t = np.linspace(0, 1, n)
    wave = 0.1 * np.sin(2 * np.pi * (3 * t + rng.random()))
    return _white(rng, n) - 0.3 * t * (rng.random() < 0.5) + wave * (rng.random() < 0.5)


NOISES = {
    "white": _white,
    "drift": _drift,
    # neighbours that come and go over some ten repetitions
    "lasting": lambda rng, n: 0.5 * _white(rng, n) + _ar1(rng, n, 0.9, 0.05),
    # noise of whole rounds, which every arm of a round shares
    "rounds": lambda rng, n: (
        0.5 * _white(rng, n) + np.repeat(_ar1(rng, n // N_ARMS, 0.5, 0.1), N_ARMS)
    ),
    # one repetition in twelve takes up to three times as long
    "outliers": lambda rng, n: (
        0.5 * _white(rng, n) - (rng.random(n) < 1 / 12) * np.log(1 + 2 * rng.random(n))
    ),
    # a clock that jumps between two frequencies, a quarter apart, and stays there for a while
    "two speeds": lambda rng, n: (
        0.5 * _white(rng, n) - 0.25 * (np.cumsum(rng.random(n) < 0.08) % 2)
    ),
}


def rates(kind: str, seed: int, n_rounds: int) -> np.ndarray:
    """t/s of arms that are the same, float (n_rounds, N_ARMS), taken in the order of `ab`."""
    rng = np.random.default_rng([list(NOISES).index(kind), seed])
    in_time = 100 * np.exp(NOISES[kind](rng, n_rounds * N_ARMS)).reshape(n_rounds, N_ARMS)
    out = np.empty_like(in_time)
    for round_ in range(n_rounds):
        out[round_, order_of(round_, N_ARMS)] = in_time[round_]
    return out
