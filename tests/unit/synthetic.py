"""Machines whose truth is known: no arm is faster than another, whatever the noise says."""

from __future__ import annotations

import numpy as np

from workbench.benchmarks.compare.rounds import order_of

N_ARMS = 3  # baseline, toggled, A/A control: all the same


def _white(rng, n):
    return 0.02 * rng.standard_normal(n)


def _ar1(rng, n, rho, size):
    """Noise that lasts: each value keeps the share rho of the one before."""
    steps = rng.standard_normal(n) * size * np.sqrt(1 - rho**2)
    out = np.empty(n)
    last = size * rng.standard_normal()
    for i, step in enumerate(steps):
        last = rho * last + step
        out[i] = last
    return out


def _drift(rng, n):
    """A card that warms up: 30 % slower over the run, in a straight line or a wave."""
    t = np.linspace(0, 1, n)
    wave = 0.1 * np.sin(2 * np.pi * (3 * t + rng.random()))
    return _white(rng, n) - 0.3 * t * (rng.random() < 0.5) + wave * (rng.random() < 0.5)


def _lasting(rng, n):
    """Neighbours that come and go over some ten repetitions."""
    return 0.5 * _white(rng, n) + _ar1(rng, n, 0.9, 0.05)


def _rounds(rng, n):
    """Noise of whole rounds, which every arm of a round shares."""
    return 0.5 * _white(rng, n) + np.repeat(_ar1(rng, n // N_ARMS, 0.5, 0.1), N_ARMS)


def _outliers(rng, n):
    """One repetition in twelve takes up to three times as long."""
    slow = rng.random(n) < 1 / 12
    return 0.5 * _white(rng, n) - slow * np.log(1 + 2 * rng.random(n))


def _two_speeds(rng, n):
    """A clock that jumps between two frequencies, a quarter apart, and stays there for a while."""
    slow = np.cumsum(rng.random(n) < 0.08) % 2
    return 0.5 * _white(rng, n) - 0.25 * slow


NOISES = {
    "white": _white,
    "drift": _drift,
    "lasting": _lasting,
    "rounds": _rounds,
    "outliers": _outliers,
    "two speeds": _two_speeds,
}


def rates(kind: str, seed: int, n_rounds: int) -> np.ndarray:
    """t/s of arms that are the same, float (n_rounds, N_ARMS), taken in the order of `ab`."""
    rng = np.random.default_rng([list(NOISES).index(kind), seed])
    in_time = 100 * np.exp(NOISES[kind](rng, n_rounds * N_ARMS)).reshape(n_rounds, N_ARMS)
    out = np.empty_like(in_time)
    for round_ in range(n_rounds):
        out[round_, order_of(round_, N_ARMS)] = in_time[round_]
    return out
