"""Divergence of logits: sums, against the formulae written out, and the bounds they are held to."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from workbench.backend.cuda.kernels import matvec
from workbench.benchmarks.kernels import bounds
from workbench.benchmarks.scores import divergence
from workbench.benchmarks.scores import perplexity as ppl
from workbench.graph.ir import WEIGHT_DTYPES


def logits(n: int, vocabulary: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((n, vocabulary))).astype(np.float32)


def log_softmax(row: np.ndarray) -> list[float]:
    values = [float(v) for v in row]
    total = math.log(math.fsum(math.exp(v) for v in values))
    return [v - total for v in values]


@pytest.mark.parametrize(("n", "vocabulary"), [(1, 2), (7, 33), (130, 9000)])
def test_nll_is_minus_log_softmax(n, vocabulary):
    """130 x 9000 is more than is reduced at once."""
    rows = logits(n, vocabulary)
    targets = np.random.default_rng(1).integers(0, vocabulary, n)
    found = divergence.score(rows, targets)
    some = range(0, n, max(1, n // 10))
    assert found.dtype == np.float64
    np.testing.assert_allclose(
        found[some], [-log_softmax(rows[i])[targets[i]] for i in some], rtol=1e-12
    )
    large = np.array([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4]], np.float32)
    nll = divergence.score(large, np.array([1, 2]))
    np.testing.assert_allclose(nll, [1 + math.log1p(math.exp(-1)), math.log(3)], rtol=1e-12)


@pytest.mark.parametrize("error", [0.0, 1e-3, 1.0])
def test_comparison_is_the_direct_formula(error):
    b, n = logits(9, 200), 9
    a = (b + error * logits(9, 200, 2)).astype(np.float32)
    targets = np.arange(n) * 5
    found = divergence.compare_rows(a, b, targets)
    for i in range(n):
        p, q = log_softmax(b[i]), log_softmax(a[i])
        kl = math.fsum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
        assert found["kl"][i] == pytest.approx(kl, abs=1e-13, rel=1e-9)
        assert found["nll"][i] == pytest.approx(-q[targets[i]], rel=1e-12)
        assert found["nll_reference"][i] == pytest.approx(-p[targets[i]], rel=1e-12)
        pairs = [(float(x), float(y)) for x, y in zip(a[i], b[i], strict=True)]
        assert found["error"][i] == pytest.approx(math.fsum((x - y) ** 2 for x, y in pairs))
        assert found["power"][i] == pytest.approx(math.fsum(y * y for _, y in pairs))
        assert found["same_argmax"][i] == (np.argmax(a[i]) == np.argmax(b[i]))
    assert (found["kl"] > 1e-15).all() if error else (np.abs(found["kl"]) < 1e-13).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_never_within_bounds(value, side):
    a, b = logits(3, 20), logits(3, 20)
    (a, b)[side][1, 4] = value
    columns = divergence.compare_rows(a, b, np.zeros(3, int))
    assert np.isnan(columns["kl"]).tolist() == [False, True, False]
    assert columns.pop("breaks_rule").sum() == 1
    found = ppl.Agreement.of_tokens(pd.DataFrame(columns), 1)
    assert "mean KL nan is above the bound for F32" in found.outside("F32", 512)
    assert np.isnan(divergence.score(a, np.zeros(3, int))[1]) == (side == 0)


def test_rows_that_break_the_rule_are_counted():
    b = np.zeros((3, 50), np.float32)
    b[:, 7] = 10  # clear
    a = b.copy()
    a[1, 8] = 11  # an error the rule sees, but for one logit it would be noise
    found = divergence.compare_rows(a, b, np.zeros(3, int))
    assert found["breaks_rule"].sum() == 1
    assert found["same_argmax"].tolist() == [True, False, True]


def test_the_estimate_of_a_perplexity():
    nll = np.array([1.0, 2.0, 4.0])
    found = ppl.Estimate.of_nll(nll)
    assert found.nll == pytest.approx(7 / 3) and found.perplexity == pytest.approx(math.exp(7 / 3))
    assert found.error == pytest.approx(np.std(nll, ddof=1) / math.sqrt(3))


def test_bounds_name_what_is_outside():
    """Up to FEW tokens no activation of a float weight is rounded; quantised ones always are."""
    within = ppl.Agreement(1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1.0, 0)
    for size, table in ((1, bounds.FEW_BOUNDS), (8, bounds.FEW_BOUNDS), (9, bounds.MANY_BOUNDS)):
        assert {d.name for d in WEIGHT_DTYPES} == set(table)
        for dtype, bound in table.items():
            assert within.outside(dtype, size) is None
            assert "mean KL" in within._replace(kl_mean=2 * bound.kl).outside(dtype, size)
            said = within._replace(nmse=2 * bound.nmse).outside(dtype, size)
            assert "NMSE" in said and f"({size} tokens at a time)" in said
    assert bounds.FEW == matvec.MOST_TOKENS == 8
    for dtype, many in bounds.MANY_BOUNDS.items():
        few = bounds.FEW_BOUNDS[dtype]
        assert few.kl <= many.kl and few.nmse <= many.nmse
        assert (few == many) == (dtype not in ("F16", "BF16"))
