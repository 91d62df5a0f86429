"""How far a fast path may differ from the float path, by weight type and tokens computed at once.

The table and its reasons. Reports use it too.
"""

from typing import NamedTuple


class Bound(NamedTuple):
    """The largest allowed difference from the float path: mean KL in nats, NMSE of logits."""

    kl: float
    nmse: float


# The tables are by the type of most weights of a model. The float path decodes weights, rounds no
# activation and adds in float32. Both paths have the same weights. So only two things differ: the
# rounding of activations in a fast product, and the order of sums.
#
# Quantised types, any number of tokens. Activations are rounded to 8 bits in blocks of 32, in steps
# of max/127. For normally distributed activations the largest of 32 is about 2.1 sigma. So one
# product has an NMSE of (2.1/127)^2 / 12 = 2.3e-5 (0.5 % rms) for all weights. Outliers make the
# NMSE several times larger. In the residual stream errors and signal add up alike, and the head
# adds its own error. So the NMSE of the logits is several times one product's. Computed with NumPy
# in float64, for two layers of random weights: 3.4e-4 to 4.5e-4 for every type. Measured for
# sixteen layers: 5.4e-4 to 6.8e-4, which is 24 to 30 times one product's.
# KL is half the variance of the logits' difference under softmax. So KL is about NMSE / 2 times the
# mean square of the logits (which was 1.0 there, and KL half the NMSE). The bounds are three times
# the largest measured value; KL's bound is twice that, for models with larger logits. Beyond 8
# tokens quants times their scales become halves for tensor cores, an error of at most 2^-11. Its
# NMSE of 4e-8 is negligible.
#
# Float types, more than FEW tokens. Tensor cores multiply operands of the weights' type, so that
# activations are rounded to 11 significant bits (F16) or 8 (BF16). The NMSE of one product is
# 2^-20 / 12 / 2.2 = 3.6e-8 for F16 and 64 times as much, 2.3e-6, for BF16. (2.2 is the mean square
# of a significand between 1 and 2 with an evenly spread logarithm.) 30 times that is 1e-6 and 7e-5,
# and KL is half of it. The bounds are three times that for BF16. For F16 they are ten times that,
# because attention, on tensor cores for every type, rounds queries and softmax weights to halves as
# well. F32 is cuBLAS in float32.
#
# Float types, up to FEW tokens. Decode kernels multiply float32 activations and round nothing, so
# that the weights' type does not matter. The float path computes many tokens at a time, with
# attention on tensor cores; decode attends in float32. Two differences remain. Attention on tensor
# cores rounds queries and softmax weights (3.6e-8 each, of attention's share of the residual stream
# only). And the F16 cache can turn a last bit of float32 into a last bit of 11 bits.
FEW = 8  # up to so many tokens, kernels take float32 activations with float weights
_EIGHT_BITS = Bound(kl=2e-3, nmse=2e-3)
_NOT_ROUNDED = Bound(kl=1e-6, nmse=2e-6)
MANY_BOUNDS: dict[str, Bound] = {
    "F32": _NOT_ROUNDED,
    "F16": Bound(kl=5e-6, nmse=1e-5),
    "BF16": Bound(kl=1e-4, nmse=2e-4),
    "Q8_0": _EIGHT_BITS,
    "Q4_0": _EIGHT_BITS,
    "MXFP4": _EIGHT_BITS,
    "Q4_K": _EIGHT_BITS,
    "Q5_K": _EIGHT_BITS,
    "Q6_K": _EIGHT_BITS,
}
FEW_BOUNDS: dict[str, Bound] = MANY_BOUNDS | dict.fromkeys(("F32", "F16", "BF16"), _NOT_ROUNDED)


def bound_of(dtype: str, n_ubatch: int) -> Bound:
    """The bound for a model with mostly `dtype` weights that computes n_ubatch tokens at once."""
    return (FEW_BOUNDS if n_ubatch <= FEW else MANY_BOUNDS)[dtype]
