"""What a model file is called, and how many bytes of it a token reads."""

from __future__ import annotations

import json
import os

from tests.model.gguf_files import build, tensor, write
from workbench.graph.ir import F32, Q4_0, Q6_K
from workbench.model.gguf.file import model_hash
from workbench.model.gguf.inspect import summary


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
    tied = summary(write(tmp_path / "tied.gguf", TINY, _llama))  # it reads the whole embedding
    assert tied.tied_output and tied.weight_bytes_per_token == 100 * 144 + 2 * matrix + 3 * 1024
    printed = "\n".join(s.lines())
    for part in ("tiny (llama)", s.hash, "blk.*.attn_q.weight", "256 x 256", "Q6_K", "read per"):
        assert part in printed
