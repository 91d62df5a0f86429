"""The mask of a prompt: rows of one line, and the matrix of comparisons that it stands for."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.engine.cache.masks import HIDDEN, fill


def by_comparing(out: np.ndarray, seen: np.ndarray, own: np.ndarray) -> None:
    """What `fill` does, by a comparison of all tokens with all."""
    out[:] = seen
    out[:, own[0] : own[-1] + 1] = np.multiply((own > own[:, None]).view(np.uint8), HIDDEN)


@pytest.mark.parametrize("way", [fill, by_comparing])
@pytest.mark.parametrize("n_tokens", [512, 8192])
def test_prompt(benchmark, n_tokens, way):
    """The last n_tokens of 8192 cells, as a prompt's last step has them."""
    own = np.arange(8192 - n_tokens, 8192)
    seen = np.where(np.arange(8192) < own[0], np.uint16(0), HIDDEN)
    out, expected = np.empty((2, n_tokens, 8192), np.uint16)
    benchmark(way, out, seen, own)
    by_comparing(expected, seen, own)
    assert np.array_equal(out, expected)
