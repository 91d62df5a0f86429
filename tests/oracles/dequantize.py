"""The weights in a file's blocks as numbers, by the gguf package: what kernels are tested by."""

from __future__ import annotations

import gguf
import numpy as np

from workbench.graph.ir import DType


def dequantize(data: np.ndarray, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """The weights in `data`, uint8 of any shape in file order, as a float32 array of `shape`."""
    rows = np.ascontiguousarray(data).reshape(-1, dtype.row_bytes(shape[-1]))
    kind = gguf.GGMLQuantizationType[dtype.name]
    return gguf.quants.dequantize(rows, kind).reshape(shape)
