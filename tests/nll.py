"""The NLL of every token of a text, under every ordering that is safe. As llama-perplexity does it,
the first half of a window is context and returns no outputs, so that with `step_wait=outputs` its
ubatches are a train that the host does not wait for; the second half is scored."""

from __future__ import annotations

import numpy as np

import workbench as wb
from tests.orderings import every_ordering
from workbench.benchmarks.scores.divergence import score
from workbench.common.errors import UsageError

N_UBATCH, N_WINDOW = 8, 80
ORDERINGS = (188, 52)  # of every one: safe, racing
TEXT = np.random.default_rng(20463).integers(3, 1000, 2 * N_WINDOW + 1)


def nll(engine: wb.Engine) -> np.ndarray:
    """In nats, float64, of each token in the second half of two windows."""
    found = []
    for begin in (0, N_WINDOW):
        inputs = TEXT[begin : begin + N_WINDOW].tolist()
        half = N_WINDOW // 2
        engine.reset()
        engine.prefill(inputs[:half], outputs="none")
        rows = engine.prefill(inputs[half:], outputs="all")
        found.append(score(rows, TEXT[begin + half + 1 : begin + N_WINDOW + 1]))
    return np.concatenate(found)


def is_the_same_under_every_ordering(
    engine: wb.Engine, wanted: np.ndarray, share: int = 1
) -> tuple[int, int]:
    """How many orderings are safe (each gives `wanted` to the bit), and how many race.
    share: of the orderings each so-manieth is tried."""
    safe = racing = 0
    for toggles in [*every_ordering(graph_reuse="set_rows")][::share]:
        try:
            variant = engine.variant(toggles)
        except UsageError:
            racing += 1
            continue
        with variant:
            assert np.array_equal(nll(variant), wanted), toggles
        safe += 1
    return safe, racing
