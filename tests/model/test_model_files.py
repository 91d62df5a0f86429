"""Others' model files: what changes their answer is heeded, or refused by name."""

from __future__ import annotations

import contextlib

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def logits(path, tokens=TOKENS, **fields) -> np.ndarray:
    with wb.Engine.load(path, device="embedded", n_ctx=256, threads=2, **fields) as engine:
        return engine.prefill(tokens, outputs="all").astype(np.float64)


# RoPE scaling -------------------------------------------------------------------------------------

SCALED = {
    "older key": {"rope.scale_linear": 4.0},
    "no type": {"rope.scaling.factor": 4.0},
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "both keys": {"rope.scaling.factor": 4.0, "rope.scale_linear": 9.0},
    "linear, older key": {"rope.scaling.type": "linear", "rope.scale_linear": 4.0},
}
UNSCALED = {
    "none": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    "none, older key": {"rope.scaling.type": "none", "rope.scale_linear": 4.0},
    "zero": {"rope.scaling.factor": 0.0},
    "zero before the older key": {"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0},
    "attention as it is": {"rope.scaling.attn_factor": 1.0},
}


@pytest.fixture(scope="module")
def plain(tiny_model):
    return logits(tiny_model("tiny-qwen2", "F32"))


@pytest.mark.parametrize("name", [*SCALED, *UNSCALED])
def test_rope_scaling_is_read_as_llama_cpp_reads_it(tiny_model, tmp_path, plain, name):
    source = tiny_model("tiny-qwen2", "F32")
    keys = {f"qwen2.{k}": v for k, v in (SCALED | UNSCALED)[name].items()}
    path = edited(source, tmp_path / "m.gguf", keys=keys)
    found = logits(path)
    assert reference.nmse(found, reference.forward(path, TOKENS)) < 1e-6
    assert (reference.nmse(found, plain) > 1e-3) == (name in SCALED)


REFUSED = {
    "negative": ({"rope.scaling.factor": -2.0}, "must be 0"),
    "nan": ({"rope.scale_linear": float("nan")}, "must be 0"),
    "attention factor": ({"rope.scaling.attn_factor": 1.2}, "attn_factor"),
    "yarn": ({"rope.scaling.type": "yarn"}, "yarn"),
    "embedding": ({"embedding_length": 128}, r"token_embd.weight has shape \[1024, 256\]"),
    "heads": ({"attention.head_count": 2}, r"blk.0.attn_q.weight has shape \[256, 256\]"),
    "heads of K": ({"attention.head_count_kv": 4}, r"blk.0.attn_k.weight has shape \[128, 256\]"),
    "values": ({"attention.value_length": 32}, "value_length differs from key_length"),
    "feed forward": ({"feed_forward_length": 256}, r"ffn_gate.weight has shape \[512, 256\]"),
    "rotations": ({"rope.dimension_count": 32}, r"rope_freqs.weight has shape \[32\]"),
    "layers": ({"block_count": 3}, "blk.2.attn_norm.weight is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_do_not_fit_the_tensors_are_refused(tiny_model, tmp_path, name):
    keys, said = REFUSED[name]
    source = tiny_model("tiny-llama", "F32")
    keys = {f"llama.{key}": value for key, value in keys.items()}
    with pytest.raises(ModelFileError, match=said) as caught:
        Model(edited(source, tmp_path / "m.gguf", keys=keys))
    assert "\n" not in str(caught.value)


# tensors that nothing reads -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "name", "n"),
    [
        ("llama", "blk.0.attn_sub_norm.weight", 256),
        ("llama", "blk.1.attn_q_norm.weight", 64),
        ("llama", "blk.2.attn_norm.weight", 256),
        ("qwen2", "rope_freqs.weight", 32),
        ("qwen2", "output.bias", 1024),
    ],
)
def test_a_tensor_that_nothing_reads_is_refused(tiny_model, tmp_path, architecture, name, n):
    source = tiny_model(f"tiny-{architecture}", "F32")
    extra = {name: (np.ones(n, np.float32), "F32")}
    with pytest.raises(ModelFileError, match=f"tensor {name} is not used by architecture") as said:
        Model(edited(source, tmp_path / "m.gguf", tensors=extra))
    assert "\n" not in str(said.value) and f"'{architecture}'" in str(said.value)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True))
def test_any_names_of_unused_tensors_make_one_line(tiny_model, tmp_path, names):
    source = tiny_model("tiny-llama", "Q4_0")
    names = [n for n in names if not n.startswith("blk.") and len(n.encode()) < 64]
    extra = {n: (np.zeros(4, np.float32), "F32") for n in names}
    path = edited(source, tmp_path / "m.gguf", tensors=extra)
    with pytest.raises(ModelFileError) if names else contextlib.nullcontext() as caught:
        Model(path).close()
    if caught is not None:
        assert str(caught.value).isprintable()
        assert (f"and {len(names) - 1} more" in str(caught.value)) == (len(names) > 1)


# what is not finite -------------------------------------------------------------------------------


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
        with np.errstate(all="ignore"):
            values = dequantize(
                file.data(tensor), file.tensors[tensor].dtype, file.tensors[tensor].shape
            )
        assert not np.isfinite(values).all()


def test_generation_ends_with_the_name_of_a_bad_weight(tiny_model, tmp_path):
    quant, tensor, at, value, where = WEIGHTS["F32"]
    source = tiny_model("tiny-llama", quant)
    huge = {"output_norm.weight": (np.full(256, 3e38, np.float32), "F32")}
    bad = spoiled(source, tmp_path / "m.gguf", tensor, at, value)
    for path, wanted in (
        (bad, f"{tensor} is not finite {where}"),
        (edited(source, tmp_path / "n.gguf", tensors=huge), "not finite, though every weight is"),
    ):  # fmt: skip
        with (
            wb.Engine.load(path, device="embedded", n_ctx=256, threads=2) as engine,
            pytest.raises(WorkbenchError, match="logits after token 7 are not finite") as caught,
        ):
            engine.generate(tokens=TOKENS, max_tokens=4)
        assert wanted in str(caught.value) and str(caught.value).isprintable()


def test_rows_that_are_large_are_not_bad():
    rows = np.zeros((4, 33), np.float32)
    assert first_bad_row(rows) is None and first_bad_row(rows[:0]) is None
    rows[2, 32] = -np.inf
    assert first_bad_row(rows) == 2
    assert is_finite(np.full(100, 3e38, np.float32))  # though their sum is not
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))


@pytest.mark.parametrize(("quant", "bound"), [("F32", 6e-7), ("Q8_0", 1e-3)])
def test_qwen2_is_that_of_float64(tiny_model, quant, bound):
    path = tiny_model("tiny-qwen2", quant)
    assert reference.nmse(logits(path), reference.forward(path, TOKENS)) < bound
