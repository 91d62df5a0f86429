"""Scores of logits: the NLL of targets, and the differences between two engines' rows. `Estimate`
and `Agreement` are their means over all rows.

Logits arrive as float32 and are reduced in float64, a few rows at a time. 512 rows of a vocabulary
of 128,256 are 263 MB in float32; several float64 copies of them would not fit in any cache. Threads
share the pieces (NumPy releases the GIL). The sums of a piece are the same in every thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from workbench.benchmarks.compare import answers
from workbench.benchmarks.scores.bounds import bound_of
from workbench.common.cores import usable_cores
from workbench.config import ROUNDING

_MOST_THREADS = 16
_CHUNK = 1 << 19  # logits reduced at once: 4 MB in float64


def score(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """NLL in nats of `targets` (n,) int, by `logits` (n, n_vocab) float32: float64 (n,).

    A row with a NaN or an infinity gives NaN.
    """
    return _in_chunks(_score, logits, targets)["nll"]


def compare_rows(
    logits: np.ndarray, reference: np.ndarray, targets: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns of `tokens.parquet` from nll on, each (n,), and `breaks_rule` int64 (n_chunks,):
    how many rows of each chunk break the rule of `answers.compare_logits`.

    logits, reference: float32 (n, n_vocab). targets: int (n,). A row with a NaN or an infinity on
    either side gives NaN, and breaks the rule.
    """
    return _in_chunks(_compare, logits, reference, targets)


def _in_chunks(reduce: Callable[..., dict[str, np.ndarray]], *rows: Any) -> dict[str, np.ndarray]:
    size = max(1, _CHUNK // rows[0].shape[1])

    def piece(i: int) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # per thread
            return reduce(*(r[i : i + size] for r in rows))

    starts = range(0, len(rows[0]), size)
    if len(starts) == 1:
        parts = [piece(0)]
    else:
        with ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as threads:
            parts = list(threads.map(piece, starts))
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
    made["breaks_rule"] = np.array([answers.compare_logits(b, a, ROUNDING).n_differ])
    return made


# all rows together --------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Mean NLL in nats over n tokens, its standard error (NaN for one token), and perplexity."""

    n: int
    nll: float
    error: float

    @classmethod
    def of_nll(cls, nll: np.ndarray) -> Estimate:
        spread = float(np.std(nll, ddof=1)) if len(nll) > 1 else math.nan
        return cls(len(nll), float(np.mean(nll)), spread / math.sqrt(len(nll)))

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))

    def __str__(self) -> str:
        low = self.perplexity * self.error  # d exp(x) = exp(x) dx
        return f"mean NLL {self.nll:.5f} +- {self.error:.5f} nats, " + (
            f"perplexity {self.perplexity:.4f} +- {low:.4f}"
        )


class Agreement(NamedTuple):
    """How far an engine is from its reference.

    kl_mean, kl_p99, kl_max: nats a token.
    nmse, nmse_worst: of all rows together, and of the worst row.
    same_argmax: the share of rows with the same argmax.
    n_broken: how many rows break the rule of `answers.compare_logits`.
    """

    kl_mean: float
    kl_p99: float
    kl_max: float
    nmse: float
    nmse_worst: float
    same_argmax: float
    n_broken: int

    @classmethod
    def of_tokens(cls, tokens: pd.DataFrame, n_broken: int) -> Agreement:
        kl, error, power = (tokens[key].to_numpy() for key in ("kl", "error", "power"))
        with np.errstate(divide="ignore", invalid="ignore"):
            worst, whole = np.max(error / power), np.sum(error) / np.sum(power)
        return cls(
            kl_mean=float(np.mean(kl)),
            kl_p99=float(np.percentile(kl, 99)),
            kl_max=float(np.max(kl)),
            nmse=float(whole),
            nmse_worst=float(worst),
            same_argmax=float(tokens["same_argmax"].mean()),
            n_broken=n_broken,
        )

    def lines(self) -> list[str]:
        if self.nmse_worst == 0:
            return ["agreement   every logit is equal"]
        return [
            f"KL          mean {self.kl_mean:.3e}, 99 % below {self.kl_p99:.3e}, "
            f"most {self.kl_max:.3e} nats a token",
            f"NMSE        {self.nmse:.3e}, worst row {self.nmse_worst:.3e}",
            f"argmax      the same in {self.same_argmax:.2%} of rows; "
            f"{self.n_broken} rows differ where the reference was clear",
        ]

    def outside(self, dtype: str, n_ubatch: int) -> str | None:
        """One line with the first bound of `bound_of` that does not hold; None where both hold.

        n_ubatch: tokens that the engine computed at once.
        """
        bound = bound_of(dtype, n_ubatch)
        for what, value, most in (
            ("mean KL", self.kl_mean, bound.kl),
            ("NMSE", self.nmse, bound.nmse),
        ):
            if not value <= most:  # NaN is outside, too
                return (
                    f"{what} {value:.3e} is above the bound for {dtype} weights, {most:.0e} "
                    f"({n_ubatch} tokens at a time)"
                )
        return None
