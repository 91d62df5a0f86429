"""Runtime as a quadratic of length: what attention adds as prompts grow.

Products cost as much for each token, attention as much as there are tokens before it. So runtime is
a + b x + c x^2 in the mean length x, and the ratio of two c is what one of two engines gains in the
limit of long prompts (llama.cpp #14924 judges the skipping of masked cache by it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workbench.common.errors import UsageError


class Quadratic(NamedTuple):
    """a + b x + c x^2. errors: standard errors of a, b, c; NaN where three points fix all three."""

    a: float
    b: float
    c: float
    errors: tuple[float, float, float]

    def __call__(self, x: float) -> float:
        return self.a + self.b * x + self.c * x * x


def quadratic(
    lengths: Sequence[float] | np.ndarray, seconds: Sequence[float] | np.ndarray
) -> Quadratic:
    """The least-squares fit of runtimes to mean lengths. Raises UsageError for fewer than three
    different lengths, and for runtimes that are no numbers."""
    x, y = np.asarray(lengths, float), np.asarray(seconds, float)
    if x.shape != y.shape or len(set(x.tolist())) < 3:
        raise UsageError(f"{len(set(x.tolist()))} lengths fix no quadratic; measure three or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise UsageError("a quadratic is fitted to finite numbers; leave the other points out")
    scale = np.abs(x).max()  # so that the three columns are of one size
    matrix = np.vander(x / scale, 3, increasing=True)
    found = np.linalg.lstsq(matrix, y, rcond=None)[0]
    errors = np.full(3, math.nan)
    if len(x) > 3:
        residual = y - matrix @ found
        variance = residual @ residual / (len(x) - 3)
        errors = np.sqrt(variance * np.diag(np.linalg.inv(matrix.T @ matrix)))
    by = scale ** -np.arange(3.0)
    a, b, c = (found * by).tolist()
    return Quadratic(a, b, c, tuple((errors * by).tolist()))


def asymptotic_ratio(slower: Quadratic, faster: Quadratic) -> tuple[float, float]:
    """How many times faster the second is for prompts without end, and its standard error.

    NaN, twice, where a fit has no growing quadratic part: then the points do not show a limit.
    """
    if slower.c <= 0 or faster.c <= 0:
        return math.nan, math.nan
    ratio = slower.c / faster.c
    parts = [fit.errors[2] / fit.c for fit in (slower, faster)]
    return ratio, ratio * math.hypot(*parts)
