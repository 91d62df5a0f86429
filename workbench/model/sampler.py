"""Logits -> token: greedy, or seeded temperature with top-k and top-p."""

from dataclasses import dataclass

import numpy as np

from workbench.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 keeps all; top_p 1 keeps all.

    The order is llama.cpp's: top-k, then top-p, then temperature. Raises UsageError for values
    outside temperature >= 0, top_k >= 0, 0 < top_p <= 1.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k} must be 0 (keep all) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1")


def drawn(logits: np.ndarray, s: Sampling, uniform: float) -> int:
    """The token that a uniform number from 0 to 1 draws. logits: (n_vocab,) float32. Ties go to the
    lowest id."""
    if s.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    if s.top_k:
        order = order[: s.top_k]
    kept = logits[order].astype(np.float64)
    p = np.exp(kept - kept[0])
    p /= p.sum()
    n = int(np.searchsorted(np.cumsum(p), s.top_p)) + 1  # the first that reaches top_p stays
    q = np.exp((kept[:n] - kept[0]) / s.temperature)
    below = np.cumsum(q)
    at = int(np.searchsorted(below / below[-1], uniform, side="right"))
    return int(order[min(at, len(below) - 1)])


class Sampler:
    """Draws tokens; equal seeds and logits give equal tokens, on the host and on a device.

    A device is given what `settings` returns, and gives the token that a call would.
    """

    def __init__(self, sampling: Sampling, seed: int):
        self.sampling = sampling
        self._rng = np.random.default_rng(seed)

    def uniform(self) -> float:
        """The uniform number of the next draw; greedy ones need none."""
        return 0.0 if self.sampling.temperature == 0 else float(self._rng.random())

    def __call__(self, logits: np.ndarray) -> int:
        """logits: (n_vocab,) float32."""
        return drawn(logits, self.sampling, self.uniform())

    def settings(self) -> tuple[float, float, float, float]:
        """Temperature, top_k, top_p and the uniform number of the next draw (op `draw`)."""
        s = self.sampling
        return s.temperature, s.top_k, s.top_p, self.uniform()
