"""What opening, hashing and filling a model file cost. Requirement: to open one with the 408
thousand strings of llama 3, all found and checked, in under 0.25 s."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.oracles.dequantize import dequantize
from workbench.graph.ir import Q4_0, Q4_K, Q6_K, Q8_0
from workbench.model.gguf.file import model_hash, open_gguf
from workbench.model.gguf.quants import random_blocks

pytestmark = pytest.mark.long  # the vocabulary is large
N_TOKENS, N_MERGES = 128_256, 280_147  # llama 3's
TYPES = pytest.mark.parametrize("dtype", [Q4_0, Q8_0, Q4_K, Q6_K], ids=lambda d: d.name)


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


@TYPES
def test_random_blocks(benchmark, dtype):
    data = benchmark(random_blocks, np.random.default_rng(0), dtype, 1024, 4096, 1 / 64)
    assert data.shape == (1024, dtype.row_bytes(4096))


@TYPES
def test_dequantize(benchmark, dtype):
    data = random_blocks(np.random.default_rng(0), dtype, 256, 4096, 1 / 64)
    assert benchmark(dequantize, data, dtype, (256, 4096)).shape == (256, 4096)
