"""Types without kernels: what they become when they are loaded, and what is refused."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests import reference
from tests.edited import edited, retyped
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
        assert (Kind(number).name, *gguf.GGML_QUANT_SIZES[Kind(number)]) == dtype
        assert [loaded_as(dtype, to) for to in EXPAND] == [F16, Q8_0]
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


def spoiled(value: float) -> tuple[np.ndarray, TensorInfo]:
    """A tensor that is decoded in two goes, with a scale in row 2080 that is `value`."""
    data = stored_blocks(np.random.default_rng(0), "Q4_1", 2100, 256, 0.03)
    data[2080, 20:22] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    return data.reshape(-1), info("Q4_1", 2100, 256)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 60000.0])
def test_what_a_type_cannot_hold_is_refused_by_position(value):
    data, of = spoiled(value)
    said = "is not finite in row 2080, column 32"
    if value == 60000.0:
        said = "has the value 9e\\+05 in row 2080, column.*which F16 cannot hold; use --expand q8_0"
    with pytest.raises(ModelFileError, match=rf"tensor a\.Q4_1 \(Q4_1\) {said}"):
        expanded(data, of, F16, 2)
    if value == 60000.0:
        values = gguf.quants.dequantize(data.reshape(2100, -1), Kind.Q4_1)
        kept = gguf.quants.dequantize(expanded(data, of, Q8_0).reshape(2100, -1), Kind.Q8_0)
        assert np.abs(kept - values).max() <= np.abs(values).max() / 127
    else:
        with pytest.raises(ModelFileError, match=said):
            expanded(data, of, Q8_0)


TOKENS = [5, 300, 7, 41, 5, 900, 12, 77]
# NMSE against float64 of the file's own values: three times what was measured. F16 keeps 11 bits of
# them; Q8_0 keeps 8, and its products round activations to 8 bits, too.
BOUND = {"f16": 1e-6, "q8_0": 2e-3}


def logits(path, **fields) -> np.ndarray:
    fields = {"device": "embedded", "n_ctx": 256, "threads": 2} | fields
    with wb.Engine.load(path, **fields) as engine:
        return engine.prefill(TOKENS, outputs="all").astype(np.float64)


@pytest.fixture(scope="module")
def small(tiny_model, tmp_path_factory):
    """A model of one layer and 128 tokens."""
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    source = tiny_model("tiny-llama", "F32")
    tensors = {t.name: t for t in gguf.GGUFReader(source).tensors}
    dropped = {n: None for n in tensors if n.startswith("blk.1.")}
    return edited(source, path, keys={"llama.block_count": 1}, tensors=dropped)


@pytest.mark.parametrize("first", range(0, len(TYPES), 9))
def test_types_against_float64(small, tmp_path, first):
    """Nine matrices, each of a type of its own, the embedding and the head among them."""
    kinds = iter([*TYPES[first:], *TYPES])
    path = retyped(small, tmp_path / "m.gguf", lambda name: next(kinds))
    wanted = reference.forward(path, TOKENS)
    for expand, bound in BOUND.items():
        found = reference.nmse(logits(path, expand=expand), wanted)
        assert found < bound and (found > 1e-5) == (expand == "q8_0"), (expand, found)


MIXED = {"attn_q": "Q2_K", "attn_v": "Q3_K", "ffn_down": "IQ4_XS", "token_embd": "Q5_0"}


@pytest.fixture(scope="module")
def file(tiny_model, tmp_path_factory):
    """A qwen3 of Q8_0 and four types without kernels, as a file of many has them; the head is the
    embedding."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return retyped(tiny_model("tiny-qwen3", "Q8_0"), path, lambda n: MIXED.get(n.split(".")[-2]))


FUSED = wb.Toggles().switched("fuse", "on")
PLACED = [("device", "host"), ("device", "embedded"), ("n_gpu_layers", 1), ("n_devices", 2),
          ("override_tensor", ("attn_q=host",)), ("toggles", FUSED)]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), PLACED)
def test_wherever_weights_are(file, field, value):
    """On the host, which looks up the embedding, on the device, and on both."""
    wanted = reference.forward(file, TOKENS)
    for expand in BOUND:
        assert reference.nmse(logits(file, **{field: value, "expand": expand}), wanted) < 1e-3


def test_inspect_says_types_and_bytes_after_expansion(file, call):
    for expand, types, row in (
        ("f16", {"F16", "Q8_0", "F32"}, 512),
        ("q8_0", {"Q8_0", "F32"}, 272),
    ):
        with wb.Engine.load(file, device="null", expand=expand) as engine:
            assert {t.dtype.name for t in engine.model.weights} == types
            each = engine.model.weight_bytes_per_token - row  # one of the embedding
        _, out, _ = call("model", "inspect", file, "--expand", expand)
        assert f"({each:,} bytes) after expansion" in out.splitlines()[-3]
        assert f"expanded to {expand.upper()}, " in out
    made = json.loads(call("model", "inspect", file, "--json")[1])
    assert made["weight_bytes_per_token"] > made["stored_bytes_per_token"]
    assert {t["dtype"]: t["loaded_as"] for t in made["types"]} == {
        **dict.fromkeys(MIXED.values(), "F16"), "Q8_0": "Q8_0", "F32": "F32",
    }  # fmt: skip
