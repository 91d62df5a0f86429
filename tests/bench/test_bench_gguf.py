"""What opening and hashing a model file cost. Requirement: to open one with the 408
thousand strings of llama 3, all found and checked, in under 0.5 s."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from workbench.model.gguf.file import model_hash, open_gguf

N_TOKENS, N_MERGES = 128_256, 280_147  # llama 3's


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("bench") / "vocabulary.gguf", np.random.default_rng(0)
    pieces = ["".join(chr(c) for c in rng.integers(97, 123, n)) for n in rng.integers(1, 12, 4096)]
    first, second = ([pieces[i * k % 4096] for i in range(N_MERGES)] for k in (1, 7))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"Ġ{first[i]}{i}" for i in range(N_TOKENS)])
    writer.add_token_types([1] * N_TOKENS)
    writer.add_token_merges([f"Ġ{a} {b}" for a, b in zip(first, second, strict=True)])
    writer.add_tensor("w", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_open(benchmark, large_vocabulary):
    file = benchmark(open_gguf, large_vocabulary)
    assert len(file.metadata["tokenizer.ggml.merges"]) == N_MERGES


def test_decode_all_strings(benchmark, large_vocabulary):
    with open_gguf(large_vocabulary) as file:
        assert len(benchmark(file.get, "tokenizer.ggml.merges", list)) == N_MERGES


def test_hash(benchmark, large_vocabulary):
    with open_gguf(large_vocabulary) as file:
        assert len(benchmark(model_hash, file)) == 64
