"""What opening, hashing and filling a model file cost."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.oracles.dequantize import dequantize
from workbench.graph.ir import Q4_0, Q4_K, Q6_K, Q8_0
from workbench.model.gguf.file import model_hash, open_gguf
from workbench.model.gguf.quants import random_blocks

N_TOKENS, N_MERGES = 128_256, 280_147  # llama 3's


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "vocabulary.gguf"
    rng = np.random.default_rng(0)
    pieces = ["".join(chr(c) for c in rng.integers(97, 123, n)) for n in rng.integers(1, 12, 4096)]
    writer = gguf.GGUFWriter(path, "llama")
    tokens = [f"Ġ{pieces[i % 4096]}{i}" for i in range(N_TOKENS)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * N_TOKENS)
    writer.add_token_merges(
        [f"Ġ{pieces[i % 4096]} {pieces[i * 7 % 4096]}" for i in range(N_MERGES)]
    )
    writer.add_tensor("w", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_open(benchmark, large_vocabulary):
    """To be under 0.5 s: 408 thousand strings found and checked."""
    file = benchmark(open_gguf, large_vocabulary)
    assert len(file.metadata["tokenizer.ggml.merges"]) == N_MERGES


def test_decode_all_strings(benchmark, large_vocabulary):
    with open_gguf(large_vocabulary) as file:
        merges = benchmark(file.get, "tokenizer.ggml.merges", list)
    assert len(merges) == N_MERGES


def test_hash(benchmark, large_vocabulary):
    with open_gguf(large_vocabulary) as file:
        assert len(benchmark(model_hash, file)) == 64


@pytest.mark.parametrize("dtype", [Q4_0, Q8_0, Q4_K, Q6_K], ids=lambda d: d.name)
def test_random_blocks(benchmark, dtype):
    rng = np.random.default_rng(0)
    data = benchmark(random_blocks, rng, dtype, 1024, 4096, 1 / 64)
    assert data.shape == (1024, dtype.row_bytes(4096))


@pytest.mark.parametrize("dtype", [Q4_0, Q8_0, Q4_K, Q6_K], ids=lambda d: d.name)
def test_dequantize(benchmark, dtype):
    data = random_blocks(np.random.default_rng(0), dtype, 256, 4096, 1 / 64)
    assert benchmark(dequantize, data, dtype, (256, 4096)).shape == (256, 4096)
