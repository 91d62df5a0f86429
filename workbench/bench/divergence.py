"""Rows of logits reduced: the NLL of a target, and how far one side's rows are from another's.

Logits arrive as float32 and are reduced in float64, a few rows at a time: 512 rows of a vocabulary
of 128,256 are 263 MB in float32, and several copies of twice that would not stay in any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.bench import answers
from workbench.config import ROUNDING

_CHUNK = 1 << 19  # logits reduced at once: 4 MB in float64


def score(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """NLL in nats of `targets` (n,) int, by `logits` (n, n_vocab) float32: float64 (n,).

    A row with a logit that is no finite number gives NaN.
    """
    return _in_chunks(_score, logits, targets)["nll"]


def compare_rows(
    logits: np.ndarray, reference: np.ndarray, targets: np.ndarray
) -> dict[str, np.ndarray]:
    """Both sides' rows, float32 (n, n_vocab), as the columns of `tokens.parquet` from nll on, each
    (n,), and `breaks_rule` int64 (n_chunks,): rows that break the rule of `answers.compare`.

    A row in which either side has a logit that is no finite number gives NaN, and breaks the rule.
    """
    return _in_chunks(_compare, logits, reference, targets)


def _in_chunks(reduce: Callable[..., dict[str, np.ndarray]], *rows: Any) -> dict[str, np.ndarray]:
    size = max(1, _CHUNK // rows[0].shape[1])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        parts = [reduce(*(r[i : i + size] for r in rows)) for i in range(0, len(rows[0]), size)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def _exponentials(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """exp(logits - max) in float64, its sum by row, and log sum exp(logits) by row."""
    e = logits.astype(np.float64)
    largest = e.max(axis=1)
    e -= largest[:, None]
    np.exp(e, out=e)
    total = e.sum(axis=1)
    return e, total, largest + np.log(total)


def _score(logits: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    *_, log_total = _exponentials(logits)
    nll = log_total - logits[np.arange(len(targets)), targets]
    return {"nll": np.where(np.isfinite(logits).all(axis=1), nll, np.nan)}


def _compare(a: np.ndarray, b: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """KL is sum p_b ((b - lse_b) - (a - lse_a)) = lse_a - lse_b - sum p_b (a - b)."""
    *_, lse_a = _exponentials(a)
    e_b, total_b, lse_b = _exponentials(b)
    wide = b.astype(np.float64)
    difference = a.astype(np.float64) - wide
    finite = np.isfinite(difference).all(axis=1)
    at = np.arange(len(targets)), targets
    kl = lse_a - lse_b - np.einsum("ij,ij->i", e_b, difference) / total_b
    columns = {
        "nll": lse_a - a[at],
        "nll_reference": lse_b - b[at],
        "kl": kl,
        "error": np.einsum("ij,ij->i", difference, difference),
        "power": np.einsum("ij,ij->i", wide, wide),
    }
    made = {key: np.where(finite, value, np.nan) for key, value in columns.items()}
    made["same_argmax"] = finite & (a.argmax(axis=1) == b.argmax(axis=1))
    made["breaks_rule"] = np.array([answers.compare(b, a, ROUNDING).n_differ])
    return made
