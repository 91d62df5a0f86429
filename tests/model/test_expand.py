"""Types without kernels: what they become when they are loaded, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stored_blocks import TYPES, Kind, stored_blocks
from workbench.common.errors import ModelFileError
from workbench.config import EXPAND
from workbench.graph.ir import F16, Q4_0, Q8_0, WEIGHT_DTYPES
from workbench.model.gguf.expand import expanded, loaded_as, loaded_bytes
from workbench.model.gguf.walk import EXPANDED_TYPES, TENSOR_TYPES, TensorInfo

STORED = {dtype.name: dtype for dtype in EXPANDED_TYPES.values()}


def info(kind: str, *shape: int) -> TensorInfo:
    dtype = STORED[kind]
    n = int(np.prod(shape)) // dtype.block * dtype.block_bytes
    return TensorInfo(f"a.{kind}", dtype, shape, 0, n)


def test_every_type_that_the_package_decodes_is_read():
    """By kernels or expanded; numbers and blocks are ggml's."""
    decoded = {t.name for t in gguf.quants._type_traits} | {"F32", "F16"}
    assert {d.name for d in (*TENSOR_TYPES.values(), *EXPANDED_TYPES.values())} == decoded
    assert set(TYPES) == set(STORED) and not set(STORED) & {d.name for d in WEIGHT_DTYPES}
    for number, dtype in EXPANDED_TYPES.items():
        kind = Kind(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == dtype
        assert dtype.block % Q8_0.block == 0
        assert [loaded_as(dtype, to).name for to in EXPAND] == ["F16", "Q8_0"]
    assert loaded_as(Q4_0, "q8_0") == Q4_0


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(TYPES),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    to=st.sampled_from([F16, Q8_0]),
    n_workers=st.integers(1, 3),
    log_std=st.integers(-5, 1),
)
def test_values_are_the_packages_own(kind, rows, blocks, to, n_workers, log_std):
    cols = blocks * STORED[kind].block
    rng = np.random.default_rng(rows * 1000 + cols)
    data = stored_blocks(rng, kind, rows, cols, 10.0**log_std)
    done: list[int] = []
    found = expanded(data.reshape(-1), info(kind, rows, cols), to, n_workers, done.append)
    values = gguf.quants.dequantize(data, Kind[kind])
    assert found.dtype == np.uint8 and found.nbytes == loaded_bytes(info(kind, rows, cols), to.name.lower())  # noqa: E501 # fmt: skip
    assert found.ctypes.data % 64 == 0 and sum(done) == data.nbytes
    if to == F16:
        assert (found.view(np.float16).reshape(rows, cols) == values.astype(np.float16)).all()
    else:
        assert (found.reshape(rows, -1) == gguf.quants.quantize(values, Kind.Q8_0)).all()


def spoiled(kind: str, at: int, value: float, rows=40, cols=256) -> tuple[np.ndarray, TensorInfo]:
    data = stored_blocks(np.random.default_rng(0), kind, rows, cols, 0.03)
    data.reshape(-1)[at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return data.reshape(-1), info(kind, rows, cols)


def test_what_is_not_finite_is_refused_by_position():
    row = STORED["Q4_1"].row_bytes(256)
    for value in (np.nan, np.inf, -np.inf):
        for to in (F16, Q8_0):
            data, of = spoiled("Q4_1", 33 * row + 20, value)
            with pytest.raises(ModelFileError) as caught:
                expanded(data, of, to, 2)
            said = str(caught.value)
            assert "tensor a.Q4_1 (Q4_1) is not finite in row 33, column 32" in said


def test_what_a_type_cannot_hold_is_refused():
    row = STORED["Q4_1"].row_bytes(256)
    data, of = spoiled("Q4_1", 33 * row + 20, 60000.0)
    with pytest.raises(ModelFileError) as caught:
        expanded(data, of, F16)
    said = str(caught.value)
    assert "has the value 9e+05 in row 33, column" in said
    assert "which F16 cannot hold; use --expand q8_0" in said
    values = gguf.quants.dequantize(data.reshape(40, -1), Kind.Q4_1)
    kept = gguf.quants.dequantize(expanded(data, of, Q8_0).reshape(40, -1), Kind.Q8_0)
    assert np.abs(kept - values).max() <= np.abs(values).max() / 127
