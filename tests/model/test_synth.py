"""The synthetic models: shapes, types, statistics, vocabularies, what is left over, random blocks;
and packed activations."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest

from tests.oracles.dequantize import dequantize
from tests.planes import activation_planes
from tests.profiles import rest
from workbench.common.errors import UsageError, WorkbenchError
from workbench.graph.ir import DTYPES, Q8_ACT, WEIGHT_DTYPES
from workbench.model.gguf.file import open_gguf
from workbench.model.gguf.quants import quantize_activations, random_blocks, unpack_activations
from workbench.model.synth.models import write_model
from workbench.model.synth.shapes import (
    PRESETS,
    QUANTS,
    find_preset,
    quant_name,
    rope_factors,
    tensor_type,
    tensors,
)
from workbench.model.synth.vocab import build_vocab


@pytest.mark.parametrize(
    ("preset", "quant", "gb"),
    [("llama-3-8b", "Q4_0", 4.36), ("llama-3.2-1b", "BF16", 2.47), ("qwen3-8b", "BF16", 15.14)],
)
def test_weights_read_per_token_are_the_known_sizes(preset, quant, gb):
    """Everything but the rows of an untied embedding."""
    shape = find_preset(preset)
    read = [spec for spec in tensors(shape) if spec.kind != "embed" or shape.tied]
    rows = [(math.prod(s.shape[:-1]), tensor_type(s, shape, quant), s.shape[-1]) for s in read]
    assert round(sum(n * dtype.row_bytes(cols) for n, dtype, cols in rows) / 1e9, 2) == gb


# What llama-quantize wrote for the F16 file of the same preset (Q4_K is its Q4_K_M, and so on).
CHOSEN = [
    ("tiny-llama", "F16", {"token_embd": "F16", "output": "F16", "blk.0.ffn_down": "F16"}),
    ("tiny-llama", "Q8_0", {"token_embd": "Q8_0", "output": "Q8_0", "blk.0.attn_v": "Q8_0"}),
    ("tiny-llama", "Q4_0", {"token_embd": "Q4_0", "output": "Q6_K", "blk.0.attn_v": "Q4_0"}),
    ("tiny-llama", "Q4_K", {"token_embd": "Q4_K", "output": "Q6_K", "blk.0.attn_v": "Q4_K",
                            "blk.0.ffn_down": "Q4_K", "blk.1.attn_v": "Q6_K",
                            "blk.1.ffn_down": "Q6_K", "blk.1.attn_k": "Q4_K"}),
    ("tiny-llama", "MXFP4", {"token_embd": "Q8_0", "output": "Q8_0", "blk.0.ffn_up": "MXFP4"}),
    ("tiny-qwen3", "Q5_K", {"token_embd": "Q6_K", "blk.0.attn_v": "Q5_K"}),
    ("stories-15m", "Q6_K", {"token_embd": "Q8_0", "blk.0.attn_q": "Q8_0"}),
    ("stories-15m", "Q4_K", {"blk.0.ffn_down": "Q4_K", "blk.5.ffn_down": "Q6_K"}),
    ("qwen3-0.6b", "Q4_K", {f"blk.{i}.attn_v": "Q6_K" if i in (
        0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27) else "Q4_K" for i in range(28)}),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "quant", "expected"), CHOSEN)
def test_types_are_those_of_llama_quantize(preset, quant, expected):
    shape = find_preset(preset)
    types = {s.name: tensor_type(s, shape, quant).name for s in tensors(shape)}
    assert {name: types[f"{name}.weight"] for name in expected} == expected


VOCABULARIES = {(p.vocab, p.n_vocab): name for name, p in PRESETS.items()}
LARGE = [name for (_, n), name in VOCABULARIES.items() if n > 2000]
SMALL = [name for (_, n), name in VOCABULARIES.items() if n <= 2000]


@pytest.mark.parametrize("preset", [*SMALL, *rest(LARGE, slow=1)])
def test_vocabularies_fill_and_merge_only_tokens(preset):
    vocab = build_vocab(PRESETS[preset])
    known = set(vocab.tokens)
    assert len(vocab.tokens) == len(known) == len(vocab.types) == PRESETS[preset].n_vocab
    pairs = [tuple(merge.split(" ")) for merge in vocab.merges]
    assert all({left, right, left + right} <= known for left, right in pairs)
    assert len(set(pairs)) == len(pairs)
    assert (len(vocab.scores) or len(vocab.tokens)) == len(vocab.tokens)
    assert bool(vocab.merges) != bool(vocab.scores)
    if PRESETS[preset].n_vocab < 2000:
        assert build_vocab(PRESETS[preset]) == vocab


@pytest.mark.parametrize("quant", list(QUANTS))
def test_weights_have_the_stated_statistics(tiny_model, quant):
    shape = PRESETS["tiny-llama"]
    with open_gguf(tiny_model("tiny-llama", quant)) as file:
        for spec in tensors(shape):
            info = file.tensors[spec.name]
            w = dequantize(file.data(spec.name), DTYPES[info.dtype.name], spec.shape)
            assert info.shape == spec.shape and np.isfinite(w).all()
            if spec.kind == "norm":
                assert 0.05 < np.abs(w - 1).mean() < 0.15
            elif spec.kind == "rope":
                assert np.array_equal(w, rope_factors(shape))
            else:
                std = 1 / math.sqrt(spec.shape[1])
                assert abs(w.std() / std - 1) < 0.1 and abs(w.mean()) < 0.05 * std
                assert len(np.unique(w[:64], axis=0)) == len(w[:64])  # no row twice


def test_a_disk_too_small_is_named_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(WorkbenchError, match=r"needs 4\.65 GB and its disk has 1\.00 GB free"):
        write_model("llama-3-8b", "Q4_0", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_kept_and_another_not_overwritten(tmp_path):
    path = tmp_path / "new" / "m.gguf"
    a = write_model("tiny-llama-spm", "Q4_0", path).read_bytes()
    os.utime(path, ns=(1, 1))
    assert write_model("tiny-llama-spm", "q4_0", path) == path
    assert path.stat().st_mtime_ns == 1
    for other in ({"seed": 1}, {"head": "F16"}):
        with pytest.raises(UsageError, match=r"is not this model.*--force"):
            write_model("tiny-llama-spm", "Q4_0", path, **other)
    b = write_model("tiny-llama-spm", "Q4_0", path, seed=1, force=True).read_bytes()
    assert a != b and len(a) == len(b)
    assert a == write_model("tiny-llama-spm", "Q4_0", tmp_path / "a.gguf").read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]
    for preset, quant, head in (
        ("llama-9", "Q4_0", None), ("tiny-llama", "Q3_K", None), ("tiny-llama", "Q4_0", "Q9"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="does not exist"):
            write_model(preset, quant, tmp_path / "bad.gguf", head=head)
    assert quant_name("q4_k_m") == "Q4_K"


@pytest.mark.parametrize("cols", [32, 64, 96, 2048])
def test_activations_round_trip(cols):
    x = np.random.default_rng(cols).standard_normal((5, cols), np.float32)
    x *= np.float32(10) ** np.arange(-30, 20, 10)[:, None]  # one magnitude a row
    rows = quantize_activations(x)
    assert rows.shape == (5, Q8_ACT.row_bytes(cols)) and rows.dtype == np.uint8
    assert rows.shape[1] % 64 == 0
    quants, scales, sums = unpack_activations(rows, cols)
    for t in range(5):  # the definition, one block at a time
        for b in range(cols // 32):
            block = x[t, 32 * b : 32 * b + 32]
            scale = np.abs(block).max() / np.float32(127)
            want = np.array([round(float(v / scale)) for v in block])  # half to even
            assert scales[t, b] == scale
            np.testing.assert_array_equal(quants[t, 32 * b : 32 * b + 32], want)
            halves = want.reshape(2, 16).sum(axis=1)
            np.testing.assert_array_equal(sums[t, 2 * b : 2 * b + 2], halves)
    back = quants.reshape(5, -1, 32) * scales[:, :, None]
    assert (np.abs(back.reshape(x.shape) - x) <= 0.501 * scales.repeat(32, axis=1)).all()
    assert not rows[:, activation_planes(cols).sums + cols // 8 :].any()  # padding


def test_activations_at_the_edges():
    x = np.zeros((4, 32), np.float32)
    x[1] = 1e-45  # scale rounds to 0
    x[2] = 2e-43  # scale is subnormal: x / scale rounds to 143
    x[3, :3] = 127, 2.5, -0.5  # scale 1: ties go to even
    quants, scales, sums = unpack_activations(quantize_activations(x), 32)
    assert not quants[:2].any() and not scales[:2].any()
    assert (quants[2] == 127).all() and sums[2].tolist() == [2032, 2032]
    assert quants[3, :3].tolist() == [127, 2, 0]


@pytest.mark.parametrize("std", [1 / 8, 1 / 128])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: d.name)
def test_random_blocks_have_mean_and_std(dtype, std):
    rows, cols = 512, 2048
    data = random_blocks(np.random.default_rng(3), dtype, rows, cols, std)
    assert data.shape == (rows, dtype.row_bytes(cols)) and data.dtype == np.uint8
    x = dequantize(data, dtype, (rows, cols)) / np.float32(std)
    assert np.isfinite(x).all()
    assert abs(x.std() - 1) < 0.01 and abs(x.mean()) < 0.01
    # A row's mean is the mean of 2048 draws, not much wider: blocks do not share an offset.
    assert x.mean(axis=1).std() * np.sqrt(cols) < 1.8
    assert len(np.unique(data, axis=0)) == rows
