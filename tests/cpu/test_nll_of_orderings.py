"""Of a text of several ubatches every token is foreseen as well, to the bit, under every ordering
that is safe: what #20463 was found by (a perplexity of 2382 with two devices).

As llama-perplexity does it, the first half of a window is context and returns no outputs, so that
with `step_wait=outputs` its ubatches are a train that the host does not wait for; the second half
is scored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.orderings import PLACED, every_ordering
from workbench.bench.divergence import score
from workbench.errors import UsageError

N_UBATCH, N_WINDOW = 8, 80
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


@pytest.fixture(scope="module", params=PLACED)
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, n_ubatch=N_UBATCH,
        threads=2, **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


def test_every_token_has_the_same_nll_under_every_safe_ordering(engine):
    wanted = nll(engine)
    assert len(wanted) == N_WINDOW and np.isfinite(wanted).all()
    safe = racing = 0
    for toggles in every_ordering(graph_reuse="set_rows"):
        try:
            variant = engine.variant(toggles)
        except UsageError:
            racing += 1
            continue
        with variant:
            assert np.array_equal(nll(variant), wanted), toggles
        safe += 1
    assert (safe, racing) == (176, 32)
