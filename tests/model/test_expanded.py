"""Models in types without kernels, expanded when they are loaded, against float64."""

from __future__ import annotations

import io
import json
import re

import gguf
import numpy as np
import pytest

import workbench as wb
from tests import reference
from tests.edited import edited, retyped
from tests.stored_blocks import TYPES
from workbench.cli import main
from workbench.common import progress
from workbench.model.gguf.inspect import summary

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
    check(retyped(small, tmp_path / "m.gguf", lambda name: next(kinds)))


def check(path) -> None:
    wanted = reference.forward(path, TOKENS)
    for expand, bound in BOUND.items():
        found = reference.nmse(logits(path, expand=expand), wanted)
        assert found < bound, (expand, found)
        assert (found > 1e-5) == (expand == "q8_0")


MIXED = {"attn_q": "Q2_K", "attn_v": "Q3_K", "ffn_down": "IQ4_XS", "token_embd": "Q5_0"}


def mixed(name: str) -> str | None:
    """Types as a file of many has them: some matrices stay what they are."""
    return MIXED.get(name.split(".")[-2])


@pytest.fixture(scope="module")
def file(tiny_model, tmp_path_factory):
    """A qwen3 of Q8_0 and four types without kernels; the head is the embedding."""
    folder = tmp_path_factory.mktemp("mixed")
    return retyped(tiny_model("tiny-qwen3", "Q8_0"), folder / "mixed.gguf", mixed)


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "host"},
        {"device": "embedded"},
        {"device": "embedded", "n_gpu_layers": 1},
        {"device": "embedded", "override_tensor": ("attn_q=host",)},
        {"device": "embedded", "n_devices": 2},
        {"device": "embedded", "toggles": wb.Toggles().switched("fuse", "on")},
    ],
    ids=str,
)
def test_wherever_weights_are(file, fields):
    """On the host, which looks up the embedding, on the device, and on both."""
    wanted = reference.forward(file, TOKENS)
    for expand in BOUND:
        assert reference.nmse(logits(file, expand=expand, **fields), wanted) < 1e-3


def test_one_line_says_what_is_expanded_and_its_memory(file, capsys, monkeypatch):
    found = summary(file)
    stored = sum(t.bytes for t in found.types if t.loaded_as != t.dtype)
    memory = sum(t.loaded_bytes for t in found.types if t.loaded_as != t.dtype)
    assert 2 * stored < memory
    logits(file)
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "expanding Q5_0 (1 tensor), Q2_K (2 tensors), Q3_K (2 tensors) and IQ4_XS (2 tensors) to "
        f"F16: {memory / 1e6:.2f} MB of memory, {stored / 1e3:.2f} kB in the file"
    ]
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    with progress.shown_on(io.StringIO()) as out:
        logits(file, expand="q8_0")
    assert "to Q8_0: " in capsys.readouterr().err
    shown = [line for line in out.getvalue().splitlines() if line.startswith("loading: ")]
    assert len(shown) >= 7
    assert re.fullmatch(r"loading: (\d+\.\d) of \1 MB", shown[-1])


def test_inspect_says_types_and_bytes_after_expansion(file, capsys):
    with wb.Engine.load(file, device="null") as engine:
        each, row = engine.model.weight_bytes_per_token, 2 * engine.model.n_embd
        assert each == summary(file).weight_bytes_per_token + row  # it is looked up, too
        assert {t.dtype.name for t in engine.model.weights} == {"F16", "Q8_0", "F32"}
    with wb.Engine.load(file, device="null", expand="q8_0") as engine:
        each = engine.model.weight_bytes_per_token - 256 // 32 * 34
        assert {t.dtype.name for t in engine.model.weights} == {"Q8_0", "F32"}
    capsys.readouterr()
    main(["model", "inspect", str(file), "--expand", "q8_0"])
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("IQ4_XS"))
    assert "expanded to Q8_0, " in line
    read, stored, cached = out.splitlines()[-3:]
    assert f"({each:,} bytes) after expansion" in read
    assert stored.startswith("as stored ") and cached.startswith("KV cache per token ")
    main(["model", "inspect", str(file), "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made["weight_bytes_per_token"] > made["stored_bytes_per_token"]
    assert {t["dtype"]: t["loaded_as"] for t in made["types"]} == {
        "Q5_0": "F16", "Q2_K": "F16", "Q3_K": "F16", "IQ4_XS": "F16", "Q8_0": "Q8_0", "F32": "F32",
    }  # fmt: skip
