"""How far a fast path may stand from the float path, by weight type.

A table and its reasons, for whoever measures (`bench/perplexity.py`) and whoever reports.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """The most that a fast path may differ from the float path: mean KL in nats, NMSE of logits."""

    kl: float
    nmse: float


# By the type that holds most weights of a model. Where they come from:
#
# Quantised types. Activations are rounded to 8 bits in blocks of 32, in steps of max/127. For
# normally distributed activations the largest of 32 is about 2.1 sigma, so that one product has an
# NMSE of (2.1/127)^2 / 12 = 2.3e-5 (0.5 % rms), whatever the weights are; outliers make it some
# times larger. Both sides of the comparison have the same weights, so nothing else differs but the
# order of sums. In the residual stream errors and signal add up alike, and the head adds its own:
# the logits have some times one product's (NumPy in float64, two layers of random weights: 3.4e-4
# to 4.5e-4 for every type). KL is half the variance of the logits' difference under softmax, so
# about NMSE / 2 times the mean square of the logits (there 1.0, and KL 1.7e-4 to 2.4e-4).
#
# Float types. F32 differs by the order of float32 sums alone; F16 products may round activations to
# 11 bits (2^-22 / 12 relative, at most 4 times that), BF16 products to 8 bits (64 times as much).
# All pass through an F16 cache, which can turn a last bit of float32 into one of 11 bits.
_EIGHT_BITS = Bound(kl=2e-3, nmse=2e-3)
BOUNDS: dict[str, Bound] = {
    "F32": Bound(kl=1e-6, nmse=1e-6),
    "F16": Bound(kl=1e-5, nmse=1e-5),
    "BF16": Bound(kl=1e-4, nmse=1e-4),
    "Q8_0": _EIGHT_BITS,
    "Q4_0": _EIGHT_BITS,
    "MXFP4": _EIGHT_BITS,
    "Q4_K": _EIGHT_BITS,
    "Q5_K": _EIGHT_BITS,
    "Q6_K": _EIGHT_BITS,
}
