"""Tensor types without kernels of their own, expanded when a model is loaded.

Their blocks are decoded by the gguf package, some rows at a time, and kept as F16 or as Q8_0. F16
keeps the values to 11 bits. Q8_0 takes half the memory, and rounds to 8 bits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from workbench.common.errors import DeviceError, ModelFileError
from workbench.common.sizes import size
from workbench.config import EXPAND
from workbench.graph.ir import F16, Q8_0, DType
from workbench.model.gguf.finite import where
from workbench.model.gguf.walk import EXPANDED_TYPES, TensorInfo, shown

_NUMBERS = {dtype: number for number, dtype in EXPANDED_TYPES.items()}
_TO = dict(zip(EXPAND, (F16, Q8_0), strict=True))
_LARGEST = {F16: 65504.0, Q8_0: 65504.0 * 127}  # in absolute value; Q8_0 has a scale in F16
_CHUNK = 1 << 19  # values that a worker decodes at once
_ALIGN = 64


def loaded_as(dtype: DType, expand: str) -> DType:
    """The type that tensors of type `dtype` have in memory; expand: one of config.EXPAND."""
    return _TO[expand] if dtype in _NUMBERS else dtype


def expanded(
    data: np.ndarray,
    info: TensorInfo,
    to: DType,
    n_workers: int = 1,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """The tensor's bytes as type `to` (F16 or Q8_0): new memory, uint8 (nbytes,), 64-byte aligned.

    data: its bytes in the file, uint8 (info.nbytes,). n_workers: threads that decode. progress is
    told how many bytes of the file were done. Besides the result each worker needs some MB.
    Raises ModelFileError for values that are not finite, or larger than `to` can hold, DeviceError
    where there is no memory.
    """
    import gguf

    cols = info.shape[-1]
    rows = data.reshape(-1, info.dtype.row_bytes(cols))
    kind = gguf.GGMLQuantizationType(_NUMBERS[info.dtype])
    target = gguf.GGMLQuantizationType[to.name]
    out = _memory(info, to, len(rows) * to.row_bytes(cols)).reshape(len(rows), -1)
    step = max(1, _CHUNK // cols)

    def decode(first: int) -> int:
        part = rows[first : first + step]
        with np.errstate(all="ignore"):  # what is not finite is found below
            values = gguf.quants.dequantize(part, kind).astype(np.float32, copy=False)
            _refuse(values, info, to, first)
            out[first : first + step] = gguf.quants.quantize(values, target).view(np.uint8)
        return part.nbytes

    workers = ThreadPoolExecutor(max(1, n_workers), thread_name_prefix="expanding")
    try:
        for nbytes in workers.map(decode, range(0, len(rows), step)):
            if progress is not None:
                progress(nbytes)
    finally:
        workers.shutdown(cancel_futures=True)
    return out.reshape(-1)


def described(infos: Iterable[TensorInfo], expand: str) -> str:
    """The expanded tensors in words, with their memory. infos: the tensors, at least one.

    `Q2_K (12 tensors) and Q3_K (3 tensors) to F16: 2.10 GB of memory, 351.20 MB in the file`
    """
    tensors, to = list(infos), _TO[expand]
    counts: dict[str, int] = {}
    for info in tensors:
        counts[info.dtype.name] = counts.get(info.dtype.name, 0) + 1
    types = [f"{name} ({n} tensor{'s' * (n > 1)})" for name, n in counts.items()]
    types = [*types[:-2], " and ".join(types[-2:])]
    memory = sum(loaded_bytes(info, expand) for info in tensors)
    stored = sum(info.nbytes for info in tensors)
    return f"{', '.join(types)} to {to.name}: {size(memory)} of memory, {size(stored)} in the file"


def loaded_bytes(info: TensorInfo, expand: str) -> int:
    """Bytes that a tensor has in memory."""
    dtype = loaded_as(info.dtype, expand)
    return info.n_elements // dtype.block * dtype.block_bytes


def _refuse(values: np.ndarray, info: TensorInfo, to: DType, first: int) -> None:
    largest = float(np.abs(values).max())
    if largest <= _LARGEST[to]:
        return
    bad = int(np.argmax(~(np.abs(values) <= _LARGEST[to]).reshape(-1)))
    at = where(info, first * info.shape[-1] + bad)
    if not np.isfinite(largest):
        raise ModelFileError(
            f"tensor {shown(info.name)} ({info.dtype.name}) is not finite{at}; the file is "
            "damaged or was converted wrongly: download or write it again"
        )
    do = "use --expand q8_0" if to == F16 else "use another model"
    raise ModelFileError(
        f"tensor {shown(info.name)} ({info.dtype.name}) has the value {largest:.3g}{at}, which "
        f"{to.name} cannot hold; {do}"
    )


def _memory(info: TensorInfo, to: DType, nbytes: int) -> np.ndarray:
    try:
        raw = np.empty(nbytes + _ALIGN, np.uint8)
    except MemoryError:
        do = "use --expand q8_0, or a smaller model" if to == F16 else "use a smaller model"
        raise DeviceError(
            f"no memory for tensor {shown(info.name)} as {to.name} ({size(nbytes)}); {do}"
        ) from None
    start = -raw.ctypes.data % _ALIGN
    return raw[start : start + nbytes]
