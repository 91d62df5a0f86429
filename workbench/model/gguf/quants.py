"""What the bytes of a weight mean: block layouts, quantised activations, and random weights.

`BLOCKS` describes each quantised type's block as a packed NumPy structure, so that
`BLOCKS[Q4_K].fields["qs"]` is `(type, byte offset)`; layouts are ggml's (`ggml-common.h`).
Value i of a block:

| type | value | where quant i lies |
|---|---|---|
| Q8_0 | d * qs[i] | |
| Q4_0 | d * (q - 8) | low nibbles of qs: 0..15, high nibbles: 16..31 |
| MXFP4 | 2^(e - 128) * MXFP4_VALUES[q] | as Q4_0; MXFP4_VALUES are twice e2m1's |
| Q4_K | (d * sc[i/32]) * q - (dmin * m[i/32]) | 32 bytes of qs hold 64 values: low nibbles first |
| Q5_K | as Q4_K | as Q4_K; the fifth bit of value i is bit i/32 of qh[i % 32] |
| Q6_K | (d * scales[i/16]) * (q - 32) | two halves of 128 values, see below |

`sc` and `m` of Q4_K and Q5_K are eight 6-bit numbers each in 12 bytes. Bytes 0..3 hold sc 0..3 in
their low six bits, bytes 4..7 hold m 0..3. The top two bits of these bytes are the high bits of
sc 4..7 and m 4..7. Low and high nibbles of bytes 8..11 are the low four bits of sc 4..7 and of
m 4..7. Half h of a Q6_K block has 64 bytes of ql: values 0..63 in low nibbles, 64..127 in high
ones. It has 32 bytes of qh: bits 2k and 2k + 1 of byte j are the high bits of value 32k + j.
Products are float32, in the order the brackets give.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from workbench.common.errors import UsageError
from workbench.graph import ir

BLOCKS: dict[ir.DType, np.dtype] = {
    ir.Q8_0: np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    ir.Q4_0: np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    ir.MXFP4: np.dtype([("e", "u1"), ("qs", "u1", 16)]),
    ir.Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)]),
    ir.Q5_K: np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
    ),
    ir.Q6_K: np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
}
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)

_CHUNK = 4096  # blocks finished together: temporaries stay in the cache


def quantize_activations(x: np.ndarray) -> np.ndarray:
    """float32 (T, cols), finite, to Q8_ACT rows: uint8 (T, row_bytes), padding zero.

    Per block of 32, in float32: scale = max|x| / 127; quant = x / scale (a true division, not a
    product with 1/scale) rounded half to even; all quants 0 where scale is 0. Quants are clamped
    to +-127, which only changes a block whose scale is subnormal and so has lost digits.
    """
    n, cols = x.shape
    out = np.zeros((n, ir.Q8_ACT.row_bytes(cols)), np.uint8)
    blocks = x.astype(np.float32, copy=False).reshape(n, -1, 32)
    scale = np.abs(blocks).max(axis=2) / np.float32(127)
    ratio = blocks / np.where(scale == 0, np.float32(1), scale)[:, :, None]
    ratio[scale == 0] = 0
    quants = np.clip(np.rint(ratio), -127, 127).astype(np.int8).reshape(n, cols)
    packed = unpack_activations(out, cols)
    packed[0][:] = quants
    packed[1][:] = scale
    packed[2][:] = quants.reshape(n, -1, 16).sum(axis=2, dtype=np.int16)
    return out


def unpack_activations(rows: np.ndarray, cols: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of Q8_ACT rows, uint8 (T, row_bytes): quants, scales and sums.

    quants int8 (T, cols), scales float32 (T, cols/32), sums int16 (T, cols/16).
    """
    sums = cols + cols // 8  # where they begin: after a scale of 4 bytes for each 32 quants
    return (
        rows[:, :cols].view(np.int8),
        rows[:, cols:sums].view("<f4"),
        rows[:, sums : sums + cols // 8].view("<i2"),
    )


def random_blocks(
    rng: np.random.Generator, dtype: ir.DType, rows: int, cols: int, std: float
) -> np.ndarray:
    """Random weights of mean about 0 and standard deviation about `std`: uint8 (rows, row_bytes).

    F32, F16 and BF16 are normal (16-bit types by 65536 equally likely values). Quants of the other
    types are uniform random bits. A block's scale is one of 256 within 25 % of a middle (MXFP4: the
    two powers of two around it), drawn by random bits too. Q4_0 (its quants have mean -1/2) and
    Q8_0 have scales of both signs. Every block is one a quantiser could have written: finite, no
    -128 in Q8_0. rng must draw 64 bits at a time (`numpy.random.default_rng`, SFC64, Philox).
    Raises UsageError for a std whose scales a type cannot hold.
    """
    n_bytes = rows * dtype.row_bytes(cols)
    if dtype not in ir.WEIGHT_DTYPES or not 0 < std < math.inf:
        types = ", ".join(d.name for d in ir.WEIGHT_DTYPES)
        raise UsageError(f"random {dtype.name} of std {std}: want one of {types} and std > 0")
    if dtype == ir.F32:
        values = rng.standard_normal((rows, cols), np.float32)
        values *= np.float32(std)
        return values.view(np.uint8)
    raw = rng.bit_generator.random_raw(-(-n_bytes // 8)).view(np.uint8)[:n_bytes]
    if dtype in (ir.F16, ir.BF16):
        table, words = _normal_table(dtype, std), raw.view("<u2")
        for i in range(0, len(words), 1 << 16):
            words[i : i + (1 << 16)] = table[words[i : i + (1 << 16)]]
    else:
        _FINISH[dtype](raw.view(BLOCKS[dtype]), std)
    return raw.reshape(rows, -1)


@lru_cache(1)
def _normal_quantiles() -> np.ndarray:
    """65536 equally likely values of mean 0 and standard deviation 1, float64."""
    inverse = NormalDist().inv_cdf
    half = np.array([inverse((i + 0.5) / 65536) for i in range(32768)])
    values = np.concatenate([half, -half[::-1]])
    return values / values.std()


@lru_cache(8)
def _normal_table(dtype: ir.DType, std: float) -> np.ndarray:
    """The quantiles times std, as uint16 patterns of F16 or BF16."""
    values = (_normal_quantiles() * std).astype(np.float32)
    if dtype == ir.F16:
        return values.astype("<f2").view("<u2")
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")  # round half to even


def _scales(rms: float, signed: bool) -> np.ndarray:
    """256 float16 scales between 0.75 and 1.25 of a middle with that root mean square."""
    spread = np.linspace(0.75, 1.25, 256)
    if signed:
        spread[1::2] *= -1
    with np.errstate(over="ignore"):
        scales = (spread * (rms / math.sqrt(np.mean(spread**2)))).astype("<f2")
    if not (np.isfinite(scales).all() and np.abs(scales).min() > 1e-6):
        raise UsageError(f"block scales around {rms:.3g} do not fit float16; choose another std")
    return scales


def _draw(table: np.ndarray, field: np.ndarray) -> None:
    """Replaces the random bits in `field` by entries of table, which their low 8 bits choose."""
    for i in range(0, len(field), 1 << 16):
        part = field[i : i + (1 << 16)]
        part[:] = table[part.view(f"u{part.itemsize}") & 255]


def _finish_q8_0(b: np.ndarray, std: float) -> None:
    every = b.view(np.int8)  # d's random bits too, which is as well: contiguous is faster
    np.maximum(every, -127, out=every)
    _draw(_scales(std / _rms(np.maximum(np.arange(-128, 128), -127)), True), b["d"])


def _finish_q4_0(b: np.ndarray, std: float) -> None:
    _draw(_scales(std / _rms(np.arange(16) - 8), True), b["d"])


def _finish_mxfp4(b: np.ndarray, std: float) -> None:
    target = (std / _rms(MXFP4_VALUES)) ** 2  # mean square of 2^(e - 128)
    low = math.floor(math.log2(target) / 2)
    n_high = round(256 * (target / 4.0**low - 1) / 3)
    exponents = np.full(256, low + 128)
    exponents[:n_high] += 1
    if not 2 <= exponents.min() <= exponents.max() < 255:
        raise UsageError(f"MXFP4 scales around 2^{low} do not fit a byte; choose another std")
    _draw(exponents.astype(np.uint8), b["e"])


def _finish_k45(b: np.ndarray, std: float, levels: int) -> None:
    """Q4_K, Q5_K: sc and m drawn from 48..63, dmin = d * mean(q), so that means cancel."""
    b["scales"][:, :8] |= 0xF0
    q, s = np.arange(levels), np.arange(48.0, 64)
    mean_q, mean_s, square_s = q.mean(), s.mean(), np.mean(s**2)
    # E (sc q - mean_q m)^2 for independent sc, m and q, sc and m alike
    variance = square_s * np.mean(q**2) + mean_q**2 * (square_s - 2 * mean_s**2)
    d = _scales(std / math.sqrt(variance), False)
    b["dmin"] = b["d"]  # the same random bits, so the same entry
    _draw((d * np.float32(mean_q)).astype("<f2"), b["dmin"])
    _draw(d, b["d"])


def _finish_q6_k(b: np.ndarray, std: float) -> None:
    """Scales drawn from -128..-65 and 64..127: of both signs, since q has mean -1/2."""
    s = np.arange(256, dtype=np.uint8)
    table = np.where(s < 128, s & 63 | 64, s & 63 | 128).astype(np.uint8).view(np.int8)
    for i in range(0, len(b), _CHUNK):
        part = b["scales"][i : i + _CHUNK]
        part[:] = table[part.view(np.uint8)]
    unit = _rms(table) * _rms(np.arange(64) - 32)
    _draw(_scales(std / unit, False), b["d"])


_FINISH: dict[ir.DType, Callable[[np.ndarray, float], None]] = {
    ir.Q8_0: _finish_q8_0,
    ir.Q4_0: _finish_q4_0,
    ir.MXFP4: _finish_mxfp4,
    ir.Q4_K: lambda b, std: _finish_k45(b, std, 16),
    ir.Q5_K: lambda b, std: _finish_k45(b, std, 32),
    ir.Q6_K: _finish_q6_k,
}  # turns blocks of random bits into valid ones, in place


def _rms(values: np.ndarray) -> float:
    return math.sqrt(np.mean(np.asarray(values, np.float64) ** 2))
