"""What a weight is in the memory of a GPU, in NumPy: the layout at the head of
`kernels/weights.cuh`, made from the codes of the weights in their order, field by field."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.graph.ir import MXFP4, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, Q8_ACT, DType
from workbench.model.gguf.quants import BLOCKS


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


def planes(data: np.ndarray, dtype: DType) -> list[np.ndarray]:
    """The planes of the blocks in `data` (uint8, file order), uint8 (n_blocks, bytes of a block's
    share) each; the planes of a whole weight lie one behind the other."""
    blocks = np.ascontiguousarray(data).reshape(-1).view(BLOCKS[dtype])
    made = {Q8_0: _q8_0, Q4_0: _q4_0, MXFP4: _mxfp4, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k}
    return [_bytes(plane, len(blocks)) for plane in made[dtype](blocks)]


def repacked(data: np.ndarray, dtype: DType) -> np.ndarray:
    """A whole weight: uint8, as many bytes as `data`; types without planes as in the file."""
    if dtype not in BLOCKS:
        return data.reshape(-1)
    return np.concatenate([plane.ravel() for plane in planes(data, dtype)])


def _bytes(plane: np.ndarray, n: int) -> np.ndarray:
    return np.ascontiguousarray(plane).reshape(n, -1).view(np.uint8).reshape(n, -1)


def _codes(qs: np.ndarray, run: int) -> np.ndarray:
    """(n, b) bytes to (n, 2b) codes in weight order: of every `run` bytes the low halves, then the
    high ones."""
    runs = qs.reshape(len(qs), -1, run)
    return np.stack([runs & 15, runs >> 4], axis=2).reshape(len(qs), -1)


def _units(codes: np.ndarray) -> np.ndarray:
    """(n, block) codes to 16 bytes for each 32 weights: weight j low, weight j + 16 high."""
    units = codes.reshape(len(codes), -1, 2, 16) & 15
    return units[:, :, 0] | units[:, :, 1] << 4


def _q8_0(b: np.ndarray) -> list[np.ndarray]:
    return [b["qs"], b["d"]]


def _q4_0(b: np.ndarray) -> list[np.ndarray]:
    return [_units(_codes(b["qs"], 16)), b["d"]]


def _mxfp4(b: np.ndarray) -> list[np.ndarray]:
    codes = _codes(b["qs"], 16)
    return [codes[:, 0::2] | codes[:, 1::2] << 4, b["e"]]


def _head(b: np.ndarray) -> np.ndarray:
    """d and dmin, then three words: low 4 bits of the scales, of the minima, the bits above."""
    scales, minima = (v.astype(np.uint32) for v in unpack_scales(b["scales"]))
    at = np.arange(8, dtype=np.uint32)
    above = (scales >> 4) << 2 * at | (minima >> 4) << (16 + 2 * at)
    low = [((v & 15) << 4 * at).sum(1, dtype=np.uint32) for v in (scales, minima)]
    words = np.stack([*low, above.sum(1, dtype=np.uint32)], axis=1)
    halves = [_bytes(b[name], len(b)) for name in ("d", "dmin")]
    return np.concatenate([*halves, _bytes(words, len(b))], axis=1)


def _q4_k(b: np.ndarray) -> list[np.ndarray]:
    return [_units(_codes(b["qs"], 32)), _head(b)]


def _q5_k(b: np.ndarray) -> list[np.ndarray]:
    u, w = np.arange(8, dtype=np.uint32)[:, None], np.arange(32, dtype=np.uint32)
    fifth = b["qh"].astype(np.uint32)[:, None, :] >> u & 1  # (n, unit, weight)
    words = (fifth << (8 * (w % 4) + w // 4)).sum(2, dtype=np.uint32)
    return [_units(_codes(b["qs"], 32)), words, _head(b)]


def _q6_k(b: np.ndarray) -> list[np.ndarray]:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (b["qh"].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(len(b), 8, 2, 16)
    w = np.arange(16, dtype=np.uint32)
    words = (high.astype(np.uint32) << (8 * (w % 4) + 2 * (w // 4))).sum(3, dtype=np.uint32)
    return [_units(_codes(b["ql"], 64)), words, b["scales"], b["d"]]


class ActivationPlanes(NamedTuple):
    """Byte offsets of the planes in a row of Q8_ACT, and its size (a multiple of 64): int8 (cols,);
    float32 (cols/32,); int16 (cols/16,), of the quants of each half block."""

    quants: int
    scales: int
    sums: int
    row_bytes: int


def activation_planes(cols: int) -> ActivationPlanes:
    return ActivationPlanes(0, cols, cols + cols // 8, Q8_ACT.row_bytes(cols))
