"""Metadata keys and whole models: what has no effect has none, and the commands say the rest."""

from __future__ import annotations

import numpy as np
import pytest

import workbench as wb
from tests.edited import edited
from tests.model.test_metadata import SAMPLES
from workbench.model.architectures import ARCHITECTURES
from workbench.model.gguf.file import open_gguf
from workbench.model.gguf.metadata import KEYS, Use

TOKENS = [5, 300, 7, 41, 5, 900, 12, 77]


def logits(path) -> np.ndarray:
    with wb.Engine.load(path, device="embedded", n_ctx=64, threads=2) as engine:
        return engine.prefill(TOKENS, outputs="all")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_without_effect_leave_every_bit(tiny_model, tmp_path, architecture):
    source = tiny_model(f"tiny-{architecture}", "Q8_0")
    plain, keys = logits(source), {}
    for key in KEYS:
        if key.use == Use.WITHOUT_EFFECT:
            keys[key.name_in(architecture)] = SAMPLES[key.name].after[key.name]
        elif key.neutral:
            keys[key.name_in(architecture)] = key.neutral[0]
    assert len(keys) > 30
    path = edited(source, tmp_path / "m.gguf", keys=keys)
    with open_gguf(path) as file:
        assert keys.keys() <= file.metadata.keys()
    assert np.array_equal(logits(path), plain)


REFUSED = {
    "not causal": (
        {"qwen3.attention.causal": False}, "qwen3.attention.causal = False is not supported: "
        "attention to later tokens is not built; use another model",
    ),
    "further tokens": (
        {"qwen3.nextn_predict_layers": 1}, "qwen3.nextn_predict_layers = 1 is not supported: "
        "layers that predict further tokens are not built; use another model",
    ),
    "fewer tokens": (
        {"tokenizer.ggml.tokens": [f"t{i}" for i in range(900)]},
        "tensor token_embd.weight has 1024 rows for 900 tokens in tokenizer.ggml.tokens; "
        "write the file again with a current converter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_every_command_refuses_by_one_line(tiny_model, tmp_path, call, name):
    keys, why = REFUSED[name]
    path = edited(tiny_model("tiny-qwen3", "Q8_0"), tmp_path / "m.gguf", keys=keys)
    for command in (
        ("run", "--tokens", "1,2,3", "-n", 2, "--device", "embedded"),
        ("bench", "-p", 8, "-n", 0, "--device", "embedded"),
        ("serve", "--port", 0, "--device", "embedded"),
    ):
        status, out, err = call(*command, "-m", path)
        assert (status, out) == (1, "") and err == f"error: {path}: {why}\n"


def test_a_window_only_we_read_is_said_once(tiny_model, tmp_path, call):
    key = "qwen3.attention.sliding_window"
    path = edited(tiny_model("tiny-qwen3", "Q8_0"), tmp_path / "m.gguf", keys={key: 4})
    flags = ("--tokens", "1,2,3,4,5,6", "-n", 2, "--device", "embedded", "--n-ctx", 64)
    status, _, err = call("run", "-m", path, *flags)
    note = (
        f"{key} = 4 is honoured here; llama.cpp does not read it for architecture qwen3, so its "
        "answers differ\n"
    )
    assert status == 0 and err.count(note) == 1 and err.count(key) == 1
