"""Others' model files: what changes their answer is heeded, or refused by name."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope.scaling.factor", -2.0, "must be 0"),
        ("rope.scale_linear", float("nan"), "must be 0"),
        ("rope.scaling.factor", float("inf"), "must be 0"),
        ("rope.scaling.attn_factor", 1.2, "attn_factor"),
        ("rope.scaling.type", "yarn", "yarn"),
    ],
)
def test_rope_scaling_that_is_not_built_is_refused(tiny_model, tmp_path, key, value, said):
    path = edited(
        tiny_model("tiny-llama", "F32"), tmp_path / "m.gguf", keys={f"llama.{key}": value}
    )
    with pytest.raises(ModelFileError, match=said):
        Model(path)


# tensors that nothing reads -----------------------------------------------------------------------


def test_a_tensor_that_nothing_reads_is_refused_by_name(tiny_model, tmp_path):
    ones = np.ones(256, np.float32), "F32"
    heads = np.ones(64, np.float32), "F32"
    for architecture, name, values in (
        ("llama", "blk.0.attn_sub_norm.weight", ones),
        ("llama", "blk.1.attn_q_norm.weight", heads),
        ("llama", "rope_factors_long.weight", (heads[0][:32], "F32")),
        ("llama", "blk.2.attn_norm.weight", ones),
        ("qwen2", "blk.0.attn_k_norm.weight", heads),
        ("qwen2", "rope_freqs.weight", (heads[0][:32], "F32")),
        ("qwen2", "output.bias", (np.ones(1024, np.float32), "F32")),
        ("qwen3", "rope_freqs.weight", heads),
    ):
        source = tiny_model(f"tiny-{architecture}", "F32")
        path = edited(source, tmp_path / "m.gguf", tensors={name: values})
        with pytest.raises(ModelFileError) as caught:
            Model(path)
        said = str(caught.value)
        assert f"tensor {name} is not used by architecture '{architecture}'" in said
        assert "\n" not in said and "wrong" in said


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True))
def test_whatever_an_unused_tensor_is_called_the_refusal_is_one_line(tiny_model, tmp_path, names):
    source = tiny_model("tiny-llama", "Q4_0")
    known = {t.name for t in gguf.GGUFReader(source).tensors}
    names = [n for n in names if n not in known and len(n.encode()) < 64]
    if not names:
        return
    extra = {n: (np.zeros(4, np.float32), "F32") for n in names}
    with pytest.raises(ModelFileError) as caught:
        Model(edited(source, tmp_path / "m.gguf", tensors=extra))
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


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_a_weight_that_is_not_finite_ends_generation_with_its_name(tiny_model, tmp_path, name):
    quant, tensor, at, value, where = WEIGHTS[name]
    path = spoiled(tiny_model("tiny-llama", quant), tmp_path / "m.gguf", tensor, at, value)
    with (
        wb.Engine.load(path, device="embedded", n_ctx=256, threads=2) as engine,
        pytest.raises(ModelFileError) as caught,
    ):
        engine.generate(tokens=TOKENS, max_tokens=4)
    said = str(caught.value)
    assert f"logits behind token {len(TOKENS) - 1} are not finite" in said
    assert f"tensor {tensor} is not finite {where}" in said and said.isprintable()


def test_logits_that_overflow_though_weights_do_not(tiny_model, tmp_path):
    source = tiny_model("tiny-llama", "F32")
    huge = np.full(256, 3e38, np.float32), "F32"
    path = edited(source, tmp_path / "m.gguf", tensors={"output_norm.weight": huge})
    with (
        wb.Engine.load(path, device="embedded", n_ctx=256) as engine,
        pytest.raises(WorkbenchError, match="not finite, though every weight is"),
    ):
        engine.generate(tokens=TOKENS, max_tokens=4)


def test_the_first_bad_row_is_found_and_large_rows_are_not_bad():
    from workbench.engine.finite import first_bad_row, is_finite

    rows = np.zeros((4, 33), np.float32)
    assert first_bad_row(rows) is None and first_bad_row(rows[:0]) is None
    rows[2, 32] = -np.inf
    assert first_bad_row(rows) == 2
    assert is_finite(np.full(100, 3e38, np.float32))  # though their sum is not
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))


# qwen2 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quant", "bound"), [("F32", 6e-7), ("Q8_0", 1e-3)])
@pytest.mark.parametrize("fuse", ["off", "on"])
def test_qwen2(tiny_model, quant, bound, fuse):
    path = tiny_model("tiny-qwen2", quant)
    found = logits(path, toggles=wb.Toggles().switched("fuse", fuse))
    assert reference.nmse(found, reference.forward(path, TOKENS)) < bound
    biases = {n for n in Model(path).file.tensors if n.startswith("blk.0.") and "bias" in n}
    assert biases == {f"blk.0.attn_{x}.bias" for x in "qkv"}
