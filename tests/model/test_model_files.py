"""Others' model files: what changes their answer is heeded, or refused by name."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

import workbench as wb
from tests import reference
from tests.edited import edited
from tests.oracles.dequantize import dequantize
from workbench.common.errors import ModelFileError, WorkbenchError
from workbench.engine.finite import first_bad_row, is_finite
from workbench.model.decoder import Model
from workbench.model.gguf.file import open_gguf
from workbench.model.gguf.finite import first_not_finite

TOKENS = [5, 300, 7, 41, 5, 900, 12, 77]


def logits(path) -> np.ndarray:
    with wb.Engine.load(path, device="embedded", n_ctx=256, threads=2) as engine:
        return engine.prefill(TOKENS, outputs="all").astype(np.float64)


# keys of RoPE, and whether they scale
SCALING = {
    "older key": ({"scale_linear": 4.0}, True),
    "no type": ({"scaling.factor": 4.0}, True),
    "linear": ({"scaling.type": "linear", "scaling.factor": 4.0}, True),
    "both keys": ({"scaling.factor": 4.0, "scale_linear": 9.0}, True),
    "linear, older key": ({"scaling.type": "linear", "scale_linear": 4.0}, True),
    "none": ({"scaling.type": "none", "scaling.factor": 4.0}, False),
    "none, older key": ({"scaling.type": "none", "scale_linear": 4.0}, False),
    "zero": ({"scaling.factor": 0.0}, False),
    "zero before the older key": ({"scaling.factor": 0.0, "scale_linear": 4.0}, False),
    "attention as it is": ({"scaling.attn_factor": 1.0}, False),
}


@pytest.mark.long
def test_rope_scaling_is_read_as_llama_cpp_reads_it(tiny_model, tmp_path):
    source = tiny_model("tiny-qwen2", "F32")
    plain = logits(source)
    assert reference.nmse(plain, reference.forward(source, TOKENS)) < 1e-6
    for name, (keys, scales) in SCALING.items():
        keys = {f"qwen2.rope.{k}": v for k, v in keys.items()}
        path = edited(source, tmp_path / "m.gguf", keys=keys)
        found = logits(path)
        assert reference.nmse(found, reference.forward(path, TOKENS)) < 1e-6, name
        assert (reference.nmse(found, plain) > 1e-3) == scales, name


F32S, NOT_USED = np.ones(1024, np.float32), "is not used by architecture"
# the architecture, its keys, tensors that are added, and what is said
REFUSED = [
    ("llama", {"rope.scaling.factor": -2.0}, {}, "must be 0"),
    ("llama", {"rope.scaling.attn_factor": 1.2}, {}, "attn_factor"),
    ("llama", {"embedding_length": 128}, {}, r"token_embd.weight has shape \[1024, 256\]"),
    ("llama", {"attention.head_count_kv": 4}, {}, r"blk.0.attn_k.weight has shape \[128, 256\]"),
    ("llama", {"attention.value_length": 32}, {}, "value_length differs from key_length"),
    ("llama", {"rope.dimension_count": 32}, {}, r"rope_freqs.weight has shape \[32\]"),
    ("llama", {"block_count": 3}, {}, "blk.2.attn_norm.weight is missing"),
    ("llama", {}, {"blk.0.attn_sub_norm.weight": 256}, f"attn_sub_norm.weight {NOT_USED} 'llama'"),
    ("llama", {}, {"blk.2.attn_norm.weight": 256}, f"blk.2.attn_norm.weight {NOT_USED} 'llama'"),
    ("qwen2", {}, {"rope_freqs.weight": 32}, f"tensor rope_freqs.weight {NOT_USED} 'qwen2'"),
    ("llama", {}, {"a\nb": 4, "\x00": 4, "é": 4}, "and 2 more"),
]  # fmt: skip


@pytest.mark.parametrize(("of", "keys", "more", "said"), REFUSED)
def test_what_does_not_fit_an_architecture_is_refused(tiny_model, tmp_path, of, keys, more, said):
    keys = {f"{of}.{key}": value for key, value in keys.items()}
    extra = {name: (F32S[:n], "F32") for name, n in more.items()}
    path = edited(tiny_model(f"tiny-{of}", "F32"), tmp_path / "m.gguf", keys=keys, tensors=extra)
    with pytest.raises(ModelFileError, match=said) as caught:
        Model(path)
    assert str(caught.value).isprintable()


def spoiled(source, out, name: str, at: int, value: bytes):
    """`source` with `value` written over byte `at` of tensor `name`."""
    (found,) = (t for t in gguf.GGUFReader(source).tensors if t.name == name)
    data = found.data.copy()
    data.reshape(-1).view(np.uint8)[at : at + len(value)] = np.frombuffer(value, np.uint8)
    return edited(source, out, tensors={name: (data, found.tensor_type.name)})


NAN32, NAN16 = np.float32("nan").tobytes(), np.float16("nan").tobytes()
INF16 = np.float16("-inf").tobytes()
ROW = 256  # columns of these matrices
WEIGHTS = {
    "F32": ("F32", "blk.1.attn_norm.weight", 4 * 17, NAN32, "at 17"),
    "F32 matrix": ("F32", "blk.1.ffn_up.weight", 4 * (3 * ROW + 5), NAN32, "in row 3, column 5"),
    "F16": ("F16", "blk.0.attn_v.weight", 2 * (2 * ROW + 1), INF16, "in row 2, column 1"),
    "BF16": ("BF16", "output.weight", 2 * (9 * ROW), b"\x80\x7f", "in row 9, column 0"),
    "Q8_0": ("Q8_0", "blk.0.attn_q.weight", 34 * (8 + 3), INF16, "in row 1, column 96"),
    "Q4_0": ("Q4_0", "blk.0.attn_q.weight", 18 * 9, NAN16, "in row 1, column 32"),
    "Q4_K": ("Q4_K", "blk.0.attn_q.weight", 144 * 6 + 2, NAN16, "in row 6, column 0"),
    "Q5_K": ("Q5_K", "blk.0.attn_q.weight", 176 * 6, NAN16, "in row 6, column 0"),
    "Q6_K": ("Q6_K", "blk.0.attn_q.weight", 210 * 7 + 208, INF16, "in row 7, column 0"),
    "MXFP4": ("MXFP4", "blk.0.ffn_up.weight", 17 * 10, b"\xff" + b"\x77" * 16,
              "in row 1, column 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_the_first_weight_that_is_not_finite_is_found(tiny_model, tmp_path, name):
    quant, tensor, at, value, where = WEIGHTS[name]
    source = tiny_model("tiny-llama", quant)
    with open_gguf(source) as file:
        assert first_not_finite(file) is None
    with open_gguf(spoiled(source, tmp_path / "m.gguf", tensor, at, value)) as file:
        assert first_not_finite(file) == f"tensor {tensor} is not finite {where}"
        info = file.tensors[tensor]
        with np.errstate(all="ignore"):
            values = dequantize(file.data(tensor), info.dtype, info.shape)
        assert not np.isfinite(values).all()


def test_generation_ends_with_the_name_of_a_bad_weight(tiny_model, tmp_path):
    quant, tensor, at, value, where = WEIGHTS["F32"]
    source = tiny_model("tiny-llama", quant)
    bad = spoiled(source, tmp_path / "m.gguf", tensor, at, value)
    huge = {"output_norm.weight": (np.full(256, 3e38, np.float32), "F32")}
    large = edited(source, tmp_path / "n.gguf", tensors=huge)
    named = f"{tensor} is not finite {where}"
    for path, wanted in ((bad, f"not finite.*{named}"), (large, "not finite, though every weight")):
        with (
            wb.Engine.load(path, device="embedded", n_ctx=256, threads=2) as engine,
            pytest.raises(WorkbenchError, match=f"logits after token 7 are {wanted}") as caught,
        ):
            engine.generate(tokens=TOKENS, max_tokens=4)
        assert str(caught.value).isprintable()


def test_rows_that_are_large_are_not_bad():
    rows = np.zeros((4, 33), np.float32)
    assert first_bad_row(rows) is None and first_bad_row(rows[:0]) is None
    rows[2, 32] = -np.inf
    assert first_bad_row(rows) == 2
    assert is_finite(np.full(100, 3e38, np.float32))  # though their sum is not
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))
