"""Random blocks, as a quantiser could have written them, of types that have no kernels here. A
block's scale is chosen for weights of about a given standard deviation and a mean near zero."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

# where a type's block has its scale, a float16; and its offset (minimum), if it has one, with what
# times the scale becomes the offset, so that the mean is about zero
LAYOUTS: dict[str, tuple[int, int, float]] = {
    "Q4_1": (0, 2, -7.5), "Q5_1": (0, 2, -15.5), "Q2_K": (80, 82, 1.5), "Q3_K": (108, -1, 0),
    "TQ1_0": (52, -1, 0), "TQ2_0": (64, -1, 0), **dict.fromkeys(
        ("Q5_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"),
        (0, -1, 0)),
}  # fmt: skip
TYPES = (*LAYOUTS, "IQ1_M", "NVFP4")


def stored_blocks(
    rng: np.random.Generator, kind: str, rows: int, cols: int, std: float
) -> np.ndarray:
    """Random blocks of type `kind` of TYPES, std about `std`: uint8 (rows, row_bytes)."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = rng.integers(0, 256, (rows * cols // block, block_bytes), np.uint8)
    if kind == "TQ2_0":  # of the four values of two bits a quantiser writes three
        both = raw & raw >> 1 & 0x55
        raw[:] &= ~(both << 1)
    scale = _SCALERS.get(kind, _scale)
    scale(raw, kind, np.ones(len(raw)))
    n = min(len(raw), 64)
    unit = gguf.quants.dequantize(raw[:n], Kind[kind])
    scale(raw, kind, std / unit.std() * rng.uniform(0.75, 1.25, len(raw)))
    return raw.reshape(rows, -1)


def _scale(raw: np.ndarray, kind: str, scales: np.ndarray) -> None:
    at, minimum, offset = LAYOUTS[kind]
    d = scales.astype("<f2")
    raw[:, at : at + 2] = d.view(np.uint8).reshape(-1, 2)
    if minimum >= 0:
        m = (d.astype(np.float32) * offset).astype("<f2")
        raw[:, minimum : minimum + 2] = m.view(np.uint8).reshape(-1, 2)


def _iq1_m(raw: np.ndarray, kind: str, scales: np.ndarray) -> None:
    """The scale's four nibbles are the top ones of the four uint16 at the end of a block."""
    bits = scales.astype("<f2").view("<u2")
    parts = np.ascontiguousarray(raw[:, 48:56]).view("<u2")
    for i in range(4):
        parts[:, i] = parts[:, i] & 0x0FFF | (bits >> 4 * i & 15) << 12
    raw[:, 48:56] = parts.view(np.uint8)


def _nvfp4(raw: np.ndarray, kind: str, scales: np.ndarray) -> None:
    """Four scales of 4 exponent and 3 fraction bits: powers of two here, the nearest below."""
    exponents = np.clip(np.floor(np.log2(scales)) + 8, 1, 14).astype(np.uint8)
    raw[:, :4] = exponents[:, None] << 3 | raw[:, :4] & 7


_SCALERS: dict[str, Callable[[np.ndarray, str, np.ndarray], None]] = {
    "IQ1_M": _iq1_m, "NVFP4": _nvfp4,
}  # fmt: skip
