"""Looks for weights that are not finite, which cause infinity or NaN in logits.

For most quantised types only the scales must be read: a block is finite where its scales are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from workbench.graph.ir import BF16, F16, F32, MXFP4, DType
from workbench.model.gguf.quants import BLOCKS

if TYPE_CHECKING:
    from workbench.model.gguf.file import GGUFFile, TensorInfo

_FLOATS = {F32: ("<u4", 0x7F800000), F16: ("<u2", 0x7C00), BF16: ("<u2", 0x7F80)}
_CHUNK_BYTES = 16 << 20
_MXFP4_LARGE = 250  # a block with a smaller exponent stays far inside float32


def first_not_finite(file: GGUFFile) -> str | None:
    """The place of the first weight of `file` that is not finite, for a message; None if all are
    finite."""
    for info in file.tensors.values():
        if info.dtype not in _FLOATS and info.dtype not in BLOCKS:
            continue  # expanded when it was loaded, and looked at then
        block = _first_block(file.data(info.name), info.dtype)
        if block is not None:
            return f"tensor {info.name} is not finite{where(info, block * info.dtype.block)}"
    return None


def where(info: TensorInfo, element: int) -> str:
    """` from row R, column C on`: element `element` of a tensor, in file order."""
    row, column = divmod(element, info.shape[-1])
    return f" in row {row}, column {column}" if math.prod(info.shape[:-1]) > 1 else f" at {column}"


def _first_block(data: np.ndarray, dtype: DType) -> int | None:
    """The first block (of a float type: element) in `data`, uint8, that is not finite."""
    n_bytes = max(1, _CHUNK_BYTES // dtype.block_bytes) * dtype.block_bytes
    for start in range(0, len(data), n_bytes):
        bad = _not_finite(data[start : start + n_bytes], dtype)
        if bad.any():
            return start // dtype.block_bytes + int(np.argmax(bad))
    return None


def _not_finite(data: np.ndarray, dtype: DType) -> np.ndarray:
    """bool (n,): which of the n blocks (elements of a float type) in `data` are not finite."""
    if dtype in _FLOATS:
        kind, exponent = _FLOATS[dtype]
        return data.view(kind) & exponent == exponent
    blocks = data.view(BLOCKS[dtype])
    if dtype == MXFP4:
        large = np.flatnonzero(blocks["e"] >= _MXFP4_LARGE)
        bad = np.zeros(len(blocks), bool)
        if len(large):
            import gguf

            with np.errstate(over="ignore"):
                rows = blocks[large].view(np.uint8).reshape(len(large), -1)
                values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.MXFP4)
            bad[large] = ~np.isfinite(values).all(axis=1)
        return bad
    scales = [name for name in ("d", "dmin") if name in (blocks.dtype.names or ())]
    return ~np.logical_and.reduce([np.isfinite(blocks[name]) for name in scales])
