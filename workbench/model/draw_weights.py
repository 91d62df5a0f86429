"""The weight of a logit in a draw: exp(x), in whole numbers.

The host and every device must add up the same weights, or a draw near an edge could give another
token. The exponential of a library differs in its last bit from machine to machine, and a sum of
floats depends on its order. So this exponential is made of float32 products and sums, each rounded
by itself, in a fixed order, and of powers of two. The polynomial is Cephes' `expf`. A weight is the
exponential in units of 2^-40, rounded down. Whole numbers have the same sum in any order.

`kernels/sampling.cu` has the same steps with the same constants. The CPU's kernel compiles these.
"""

import numpy as np

ONE = 40  # the weight of x = 0 is 2^40
LEAST = np.float32(-29.0)  # exp(LEAST) is below half a unit, so all below have weight 0, too
LOG2E = np.float32(1.44269504088896341)
WHOLE = np.float32(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to a whole number
LN2_HIGH = np.float32(0.693359375)  # 9 bits: its products with whole numbers are exact
LN2_LOW = np.float32(-2.12194440e-4)
P0 = np.float32(1.9875691500e-4)
P1 = np.float32(1.3981999507e-3)
P2 = np.float32(8.3334519073e-3)
P3 = np.float32(4.1665795894e-2)
P4 = np.float32(1.6666665459e-1)
P5 = np.float32(5.0000001201e-1)
UNIT = np.float32(1.0)


def weights(x: np.ndarray) -> np.ndarray:
    """The weights of x, (n,) float32 at most 0, as (n,) int64 at most 2^40."""
    z = np.maximum(x, LEAST)
    n = (z * LOG2E + WHOLE) - WHOLE
    r = (z - n * LN2_HIGH) - n * LN2_LOW
    y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = (y * (r * r) + r) + UNIT
    return np.ldexp(y, n.astype(np.int32) + ONE).astype(np.int64)
