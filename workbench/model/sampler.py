"""Logits -> token: greedy, or seeded temperature with top-k, top-p and min-p.

The samplers apply in the order of llama.cpp's chain, as far as they exist here:

    top_k     keeps the k largest logits
    top_p     of these, keeps the fewest whose probabilities reach p; 1 keeps all
    min_p     of these, keeps those with at least p times the largest probability; 0 keeps all
    temperature, and then a draw

Probabilities of top_p and min_p are those at temperature 1. The kept tokens are always the first of
one order: the larger logit first, of equal logits the lower id.

The host and devices draw by the same five float32 numbers (`Sampling.settings`), and add up the
same whole numbers (`draw_weights.py`). So equal logits give equal tokens, also on ties and at
edges.
"""

import math
from dataclasses import dataclass

import numpy as np

from workbench.common.errors import UsageError
from workbench.model.draw_weights import weights

NO_TOKEN = -1  # the result of a row with NaN, or with an infinite largest logit
MOST = float(np.finfo(np.float32).max)
STEEPEST = np.float32(1e30)  # 1 / temperature is at most this
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 keep all.

    Raises UsageError for values outside temperature >= 0 and finite in float32, top_k >= 0,
    0 < top_p <= 1, 0 <= min_p <= 1.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if self.temperature > MOST:
            raise UsageError(f"temperature={self.temperature} must be at most {MOST:.3g}")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k} must be 0 (keep all) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p={self.min_p} must be from 0 (keep all) to 1")

    def settings(self, uniform: float) -> np.ndarray:
        """The numbers that decide a draw, (5,) float32 (op `draw`): temperature, top_k, top_p, the
        logarithm of min_p, and the uniform number. Only here are they rounded."""
        rounded = np.array([self.temperature, self.top_k, self.top_p, self.min_p, uniform], "f4")
        rounded[3] = math.log(rounded[3]) if rounded[3] else -np.inf
        return rounded


def drawn(logits: np.ndarray, s: Sampling, uniform: float) -> int:
    """The token that a uniform number from 0 to 1 draws from logits, (n_vocab,) float32. NO_TOKEN
    where no token can be drawn. Ties go to the lowest id."""
    temperature, top_k, top_p, log_min_p, u = s.settings(uniform)
    best = logits.max()
    if not np.isfinite(best):  # of a row with NaN it is NaN
        return NO_TOKEN
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    if top_k:
        order = order[: int(top_k)]
    kept = logits[order]
    with np.errstate(over="ignore", divide="ignore"):  # infinite is right there
        below = kept - best
        n = len(kept)
        if top_p < 1:
            sums = np.cumsum(weights(below))
            n = _reached(sums, max(int(float(sums[-1]) * float(top_p)), 1))
        n = min(n, int(np.count_nonzero(kept >= best + log_min_p)))
        sums = np.cumsum(weights(below[:n] * min(np.float32(1) / temperature, STEEPEST)))
    wanted = min(int(float(sums[-1]) * float(u)) + 1, int(sums[-1]))
    return int(order[_reached(sums, wanted) - 1])


def _reached(sums: np.ndarray, target: int) -> int:
    """How many elements are needed for their sum to reach the target. The sum of all reaches it."""
    return int(np.searchsorted(sums, target)) + 1


class Sampler:
    """Draws tokens. Equal seeds and logits give equal tokens, on the host and on a device.

    A device that is given `settings()` draws the token that a call would draw.
    """

    def __init__(self, sampling: Sampling, seed: int):
        self.sampling = sampling
        self._rng = np.random.default_rng(seed)

    def uniform(self) -> float:
        """The uniform number of the next draw, a float32 below 1. A greedy draw needs none."""
        if self.sampling.temperature == 0:
            return 0.0
        return float(min(np.float32(self._rng.random()), BELOW_ONE))

    def __call__(self, logits: np.ndarray) -> int:
        """logits: (n_vocab,) float32."""
        return drawn(logits, self.sampling, self.uniform())

    def settings(self) -> np.ndarray:
        """`Sampling.settings` of the next draw."""
        return self.sampling.settings(self.uniform())
