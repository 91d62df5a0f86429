"""What a model file is called, and how many bytes of it a token reads."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from tests.unit.gguf_files import GOOD, build, pair, tensor, text, write
from workbench.common.errors import ModelFileError
from workbench.graph.ir import F32, Q4_0, Q6_K, Q8_0
from workbench.model.gguf.file import model_hash, open_gguf
from workbench.model.gguf.inspect import summary


def test_hash_tells_files_apart(tmp_path):
    path, other = tmp_path / "m.gguf", tmp_path / "elsewhere.gguf"
    path.write_bytes(GOOD)
    first = model_hash(path)
    assert len(first) == 64 and first == model_hash(str(path))
    with open_gguf(path) as file:
        assert model_hash(file) == first
    other.write_bytes(GOOD)
    assert model_hash(other) == first  # the bytes alone
    seen = {first}
    for at in range(GOOD.index(b"s\x08"), len(GOOD), 7):  # any byte that still gives a model
        changed = bytearray(GOOD)
        changed[at] ^= 1
        other.write_bytes(changed)
        try:
            seen.add(model_hash(other))
        except ModelFileError:
            continue
    assert len(seen) > 10
    other.write_bytes(GOOD + b"\0")
    assert model_hash(other) not in seen


def test_hash_of_a_large_file_reads_samples(tmp_path):
    """A sparse file of 1 GiB: blocks from its first byte to its last, and every tensor's start."""
    n = 1 << 28
    path = tmp_path / "m.gguf"
    path.write_bytes(build((), [tensor("v", (n - 64,)), tensor("w", (64,), offset=4 * (n - 64))]))
    start = path.stat().st_size
    os.truncate(path, start + 4 * n)
    first = model_hash(path)
    seen = {first}
    for at in (start, start + 4 * n - 1, start + 4 * n - 256):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"\1")
        seen.add(model_hash(path))
    assert len(seen) == 4


TINY = [
    ("token_embd.weight", Q4_0, (100, 256)),
    ("blk.0.attn_q.weight", Q4_0, (256, 256)),
    ("blk.1.attn_q.weight", Q4_0, (256, 256)),
    ("blk.0.attn_norm.weight", F32, (256,)),
    ("blk.1.attn_norm.weight", F32, (256,)),
    ("output_norm.weight", F32, (256,)),
]


def _llama(writer):
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_array("llama.attention.head_count_kv", [2, 4])
    writer.add_token_list([str(i) for i in range(100)])


def test_summary_of_an_untied_model(tmp_path):
    path = write(tmp_path / "m.gguf", [*TINY, ("output.weight", Q6_K, (100, 256))], _llama)
    s = summary(path)
    row, matrix = 256 // 32 * 18, 256 * 256 // 32 * 18
    assert s.weight_bytes_per_token == row + 2 * matrix + 3 * 1024 + 100 * 210
    assert not s.tied_output
    assert (s.architecture, s.name, s.version) == ("llama", "tiny", 3)
    assert s.parameters == 2 * 100 * 256 + 2 * 256 * 256 + 3 * 256
    assert s.hash == model_hash(path) and s.file_bytes == path.stat().st_size
    assert s.hyperparameters == {"layers": 2, "kv_heads": "2..4", "vocabulary": 100}
    assert [(t.dtype, t.n_tensors) for t in s.types] == [("Q4_0", 3), ("Q6_K", 1), ("F32", 3)]
    assert [(t.name, t.n_tensors, t.bytes) for t in s.tensors][1:3] == [
        ("blk.*.attn_q.weight", 2, 2 * matrix), ("blk.*.attn_norm.weight", 2, 2048),
    ]  # fmt: skip
    assert json.loads(json.dumps(s.to_dict()))["tensors"][0]["shape"] == [100, 256]
    printed = "\n".join(s.lines())
    for part in ("tiny (llama)", s.hash, "blk.*.attn_q.weight", "256 x 256", "Q6_K", "read per"):
        assert part in printed


def test_summary_of_a_tied_model_reads_the_whole_embedding(tmp_path):
    s = summary(write(tmp_path / "m.gguf", TINY, _llama))
    matrix = 256 * 256 // 32 * 18
    assert s.tied_output
    assert s.weight_bytes_per_token == 100 * 144 + 2 * matrix + 3 * 1024


def test_summary_counts_the_experts_used(tmp_path):
    def keys(writer):
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)

    s = summary(write(tmp_path / "m.gguf", [("blk.0.ffn_up_exps.weight", Q8_0, (8, 4, 32))], keys))
    assert s.weight_bytes_per_token == 2 * 4 * 34
    assert s.tensors[0].bytes == 8 * 4 * 34


def test_summary_wants_an_architecture(tmp_path):
    (tmp_path / "m.gguf").write_bytes(GOOD)
    with pytest.raises(ModelFileError, match=r"'general\.architecture' is missing"):
        summary(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("preset", "expected"), [("llama-3-8b Q4_0", 4.36e9), ("llama-3.2-1b BF16", 2.47e9)]
)
def test_weight_bytes_of_real_shapes(preset, expected, tmp_path):
    """Files of the real shapes, sparse: only header and tensor list are written."""
    big = preset.startswith("llama-3-8b")
    n_layer, d, ff, kv = (32, 4096, 14336, 1024) if big else (16, 2048, 8192, 512)
    kind = 2 if big else 30  # Q4_0, BF16
    layer = {"attn_q": (d, d), "attn_k": (d, kv), "attn_v": (d, kv), "attn_output": (d, d),
             "ffn_gate": (d, ff), "ffn_up": (d, ff), "ffn_down": (ff, d)}  # fmt: skip
    shapes = {"token_embd": ((d, 128256), kind), "output_norm": ((d,), 0), "rope_freqs": ((64,), 0)}
    if big:
        shapes["output"] = ((d, 128256), 14)  # Q6_K
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}": (dims, kind) for name, dims in layer.items()}
        shapes |= {f"blk.{i}.{name}": ((d,), 0) for name in ("attn_norm", "ffn_norm")}
    infos, offset = [], 0
    for name, (dims, of) in shapes.items():
        infos.append(tensor(f"{name}.weight", dims, of, offset))
        block, block_bytes = {0: (1, 4), 2: (32, 18), 14: (256, 210), 30: (1, 2)}[of]
        offset += -(-int(np.prod(dims)) // block * block_bytes // 32) * 32
    path = tmp_path / "m.gguf"
    path.write_bytes(build([pair("general.architecture", 8, text("llama"))], infos))
    os.truncate(path, path.stat().st_size + offset)
    s = summary(path)
    assert abs(s.weight_bytes_per_token - expected) < 0.005e9
    assert f"{expected / 1e9:.2f} GB" in s.lines()[-1]
