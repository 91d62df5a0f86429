"""The weights in a file's blocks as numbers: the reference that kernels are tested by.

`workbench/model/gguf/quants.py` has the layouts. `dequantize` is bit-equal to
`gguf.quants.dequantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from workbench.common.errors import UsageError
from workbench.graph import ir
from workbench.model.gguf.quants import BLOCKS, MXFP4_VALUES, e8m0_half

_CHUNK = 4096  # blocks dequantised together: temporaries stay in the cache


def unpack_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sc and m, uint8 (n, 8) each, of Q4_K or Q5_K `scales`, uint8 (n, 12).

    Bytes 0..3 hold sc 0..3 in their low six bits, bytes 4..7 hold m 0..3. The top two bits of these
    bytes are the high bits of sc 4..7 and m 4..7. Low and high nibbles of bytes 8..11 are the low
    four bits of sc 4..7 and of m 4..7.
    """
    a, b, c = scales[:, 0:4], scales[:, 4:8], scales[:, 8:12]
    sc = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=1)
    m = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=1)
    return sc, m


def _f32(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float32)


def _nibbles(qs: np.ndarray, group: int) -> np.ndarray:
    """Nibbles of uint8 (n, b), (n, 2b): of every `group` bytes the low ones, then the high ones."""
    groups = qs.reshape(len(qs), -1, 1, group)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(len(qs), -1)


def _q8_0(b: np.ndarray) -> np.ndarray:
    return _f32(b["d"])[:, None] * b["qs"]


def _q4_0(b: np.ndarray) -> np.ndarray:
    return _f32(b["d"])[:, None] * (_nibbles(b["qs"], 16).astype(np.int8) - np.int8(8))


def _mxfp4(b: np.ndarray) -> np.ndarray:
    return e8m0_half(b["e"])[:, None] * MXFP4_VALUES[_nibbles(b["qs"], 16)]


def _scale_min(b: np.ndarray, q: np.ndarray) -> np.ndarray:
    sc, m = unpack_scales(b["scales"])
    d = _f32(b["d"])[:, None] * sc
    dm = _f32(b["dmin"])[:, None] * m
    return (d[:, :, None] * _f32(q.reshape(-1, 8, 32)) - dm[:, :, None]).reshape(-1, 256)


def _q4_k(b: np.ndarray) -> np.ndarray:
    return _scale_min(b, _nibbles(b["qs"], 32))


def _q5_k(b: np.ndarray) -> np.ndarray:
    high = b["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (n, 8, 32)
    return _scale_min(b, _nibbles(b["qs"], 32) | high.reshape(-1, 256) << 4)


def _q6_k(b: np.ndarray) -> np.ndarray:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = b["qh"].reshape(-1, 2, 1, 32) >> shifts & 3  # (n, 2, 4, 32)
    q = (_nibbles(b["ql"], 64) | high.reshape(-1, 256) << 4).astype(np.int8) - np.int8(32)
    d = _f32(b["d"])[:, None] * b["scales"]
    return (d[:, :, None] * _f32(q.reshape(-1, 16, 16))).reshape(-1, 256)


_DEQUANTIZE: dict[ir.DType, Callable[[np.ndarray], np.ndarray]] = {
    ir.Q8_0: _q8_0,
    ir.Q4_0: _q4_0,
    ir.MXFP4: _mxfp4,
    ir.Q4_K: _q4_k,
    ir.Q5_K: _q5_k,
    ir.Q6_K: _q6_k,
}  # blocks (n,) of BLOCKS[dtype] -> float32 (n, dtype.block)


def dequantize(data: np.ndarray, dtype: ir.DType, shape: tuple[int, ...]) -> np.ndarray:
    """The weights in `data`, uint8 of any shape in file order, as a new float32 array of `shape`.

    Raises UsageError where data, type and shape do not fit one another.
    """
    if dtype not in ir.WEIGHT_DTYPES:
        types = ", ".join(d.name for d in ir.WEIGHT_DTYPES)
        raise UsageError(f"{dtype.name} is no weight type; types are {types}")
    rows = math.prod(shape[:-1])
    if data.dtype != np.uint8 or data.size != rows * dtype.row_bytes(shape[-1]):
        raise UsageError(
            f"{data.size} items of {data.dtype} are not {dtype.name} {list(shape)}: want "
            f"{rows * dtype.row_bytes(shape[-1])} bytes as uint8"
        )
    data = np.ascontiguousarray(data).reshape(-1)
    if dtype == ir.F32:
        return data.view("<f4").astype(np.float32).reshape(shape)
    if dtype == ir.F16:
        return data.view("<f2").astype(np.float32).reshape(shape)
    if dtype == ir.BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    blocks = data.view(BLOCKS[dtype])
    out = np.empty((len(blocks), dtype.block), np.float32)
    for i in range(0, len(blocks), _CHUNK):
        out[i : i + _CHUNK] = _DEQUANTIZE[dtype](blocks[i : i + _CHUNK])
    return out.reshape(shape)
