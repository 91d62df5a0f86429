"""exp, sine and cosine in vector code, from arithmetic that every CPU has."""

from __future__ import annotations

import math

from workbench.backend.cpu.kernels.vector import Emit, Value

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693145751953125  # 16 bits: k * _LN2_HIGH is exact
_LN2_LOW = math.log(2) - _LN2_HIGH


def _horner(e: Emit, x: Value, coefficients: list[float]) -> Value:
    """Polynomial in x, highest coefficient first."""
    total = e.like(x, coefficients[0])
    for c in coefficients[1:]:
        total = e.fma(total, x, e.like(x, c))
    return total


def exp(e: Emit, x: Value) -> Value:
    """e^x of float32, to about 1e-7 relative; 0 below -87.3, e^88 above 88. NaN stays
    NaN.

    x = k ln 2 + r with |r| <= ln(2)/2; e^r by its Taylor polynomial of degree 7; 2^k as bits.
    """
    inside = e.max(e.min(x, 88.0), -87.3)
    k = e.round_even(inside * _LOG2E)
    r = e.fma(k, -_LN2_LOW, e.fma(k, -_LN2_HIGH, inside))
    p = _horner(e, r, [1 / math.factorial(i) for i in range(7, -1, -1)])
    power = ((k.to("i32") + 127) << 23).bits("f32")
    value = e.select(x.compare("<", -87.3), e.like(x, 0.0), p * power)
    return e.select(x.compare("!=", x), x, value)


_PIO2_HIGH = float.fromhex("0x1.921fb54400000p+0")  # 33 bits: k * _PIO2_HIGH is exact
_PIO2_LOW = float.fromhex("0x1.0b4611a626331p-34")


def sine_cosine(e: Emit, x: Value) -> tuple[Value, Value]:
    """Sine and cosine of float64 x, |x| < 2^20, to about 1e-14.

    x = k pi/2 + r with |r| <= pi/4; sine and cosine of r are polynomials. The quadrant
    k mod 4 selects polynomial and sign.
    """
    k = e.round_even(x * (2 / math.pi))
    r = e.fma(k, -_PIO2_LOW, e.fma(k, -_PIO2_HIGH, x))
    r2 = r * r
    sine = r * _horner(e, r2, [(-1) ** i / math.factorial(2 * i + 1) for i in range(8, -1, -1)])
    cosine = _horner(e, r2, [(-1) ** i / math.factorial(2 * i) for i in range(8, -1, -1)])
    quadrant = k.to("i64")
    odd = (quadrant & 1).compare("!=", 0)
    a, b = e.select(odd, cosine, sine), e.select(odd, sine, cosine)
    a = e.select((quadrant & 2).compare("!=", 0), 0.0 - a, a)
    return a, e.select(((quadrant + 1) & 2).compare("!=", 0), 0.0 - b, b)
