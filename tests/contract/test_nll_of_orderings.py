"""Of a text of several ubatches every token is foreseen as well, to the bit, under every ordering
that is safe: what #20463 was found by (a perplexity of 2382 with two devices)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import workbench as wb
from tests.nll import N_UBATCH, N_WINDOW, ORDERINGS, is_the_same_under_every_ordering, nll
from tests.orderings import PLACED
from tests.profiles import tiers


@pytest.fixture(scope="module", params=PLACED)
def engine(request, tiny_model) -> Iterator[wb.Engine]:
    with wb.Engine.load(
        tiny_model("tiny-llama", "Q8_0"), device="embedded", n_ctx=128, n_ubatch=N_UBATCH,
        threads=2, toggles=wb.Toggles(), **PLACED[request.param],
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("share", [7, *tiers(3, 1)], ids=["some", "more", "all"])
def test_every_token_has_the_same_nll_under_every_safe_ordering(engine, share):
    wanted = nll(engine)
    assert len(wanted) == N_WINDOW and np.isfinite(wanted).all()
    safe, racing = is_the_same_under_every_ordering(engine, wanted, share)
    assert (safe, racing) == ORDERINGS if share == 1 else min(safe, racing) > 2
