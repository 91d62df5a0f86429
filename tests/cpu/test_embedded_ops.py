"""Real kernels on the embedded device and the host backend: the same bits, however many workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.backend.cpu.device import embedded, host
from workbench.common.errors import DeviceError
from workbench.graph.ir import F16, F32, I32, Q8_0, Kind, Tensor
from workbench.graph.ops import make
from workbench.program.commands import Space

OPENERS: tuple[Any, Any] = (embedded.open_backend, host.open_backend)


def forward(backend, rng) -> bytes:
    """A chain that splits: rms_norm, quantize, mul_mat with a Q8_0 weight, attention over it."""
    tokens, cols, heads, n_kv = 5, 1024, 16, 256
    x = Tensor("x", F32, (tokens, cols), Kind.INPUT)
    w = Tensor("w", Q8_0, (cols, cols), Kind.WEIGHT)
    k, v = (Tensor(n, F16, (n_kv, cols // 4), Kind.CACHE) for n in "kv")
    mask = Tensor("mask", F16, (tokens, n_kv), Kind.INPUT)
    norm = make("rms_norm", "norm", x, eps=1e-5)
    quantised = make("quantize", "quantised", norm.output)
    product = make("mul_mat", "product", w, quantised.output)
    attention = make(
        "attention", "attention", product.output.view(tokens, heads, cols // heads), k, v, mask,
        n_kv=n_kv, n_head_kv=heads // 4, scale=0.125,
    )  # fmt: skip
    values = {
        x: rng.standard_normal(x.shape, np.float32),
        k: rng.standard_normal(k.shape, np.float32).astype(np.float16),
        v: rng.standard_normal(v.shape, np.float32).astype(np.float16),
        mask: np.zeros(mask.shape, np.float16),
    }
    blocks = np.zeros((cols * cols // 32, 34), np.uint8)
    blocks[:, :2] = np.full(len(blocks), 0.01, np.float16).view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32), np.uint8)
    memory = {w: backend.load_weight(w, blocks.reshape(-1))}
    for tensor, value in values.items():
        staging = backend.allocate(tensor.nbytes, Space.PINNED)
        memory[tensor] = backend.allocate(tensor.nbytes, Space.DEVICE)
        staging.array[:] = value.view(np.uint8).reshape(-1)
        backend.copy(memory[tensor].address, staging.address, tensor.nbytes, 0, to_host=False)()
    nodes = (norm, quantised, product, attention)
    for node in nodes:
        memory[node.output] = backend.allocate(node.output.nbytes, Space.DEVICE)
        scratch = backend.allocate(max(1, backend.scratch_bytes(node)), Space.DEVICE)
        backend.launch(node, lambda t: memory[t.storage].address, scratch.address, 0)()
    result = backend.allocate(attention.output.nbytes, Space.PINNED)
    last = memory[attention.output].address
    backend.copy(result.address, last, attention.output.nbytes, 0, to_host=True)()
    backend.synchronize()
    return result.array.tobytes()


def test_results_are_the_same_bits_for_any_number_of_workers():
    results = []
    for workers in (1, 2, 3):
        for open_one in OPENERS:
            backend = open_one(threads=workers)
            results.append(forward(backend, np.random.default_rng(0)))
            backend.close()
    assert np.isfinite(np.frombuffer(results[0], np.float32)).all()
    assert np.frombuffer(results[0], np.float32).any()
    assert all(r == results[0] for r in results)


def test_a_weight_of_the_wrong_size_is_refused():
    backend = embedded.open_backend(threads=2)
    with pytest.raises(DeviceError, match="wants"):
        backend.load_weight(Tensor("w", F32, (4, 4), Kind.WEIGHT), np.zeros(60, np.uint8))


def test_a_repacked_weight_can_be_gathered_from():
    """The device remembers the layout it chose: rows come out as the host backend reads them."""
    rng = np.random.default_rng(2)
    w, ids = Tensor("w", Q8_0, (64, 64), Kind.WEIGHT), Tensor("ids", I32, (3,), Kind.INPUT)
    node = make("get_rows", "rows", w, ids)
    blocks = rng.integers(0, 60, (128, 34), np.uint8)
    wanted = np.array([5, 63, 5], np.int32)
    results = []
    for open_one in OPENERS:
        backend = open_one(threads=2)
        memory = {w: backend.load_weight(w, blocks.reshape(-1))}
        for tensor in (ids, node.output):
            memory[tensor] = backend.allocate(tensor.nbytes, Space.PINNED)
        memory[ids].array.view(np.int32)[:] = wanted
        backend.launch(node, lambda t, m=memory: m[t.storage].address, 0, 0)()
        backend.synchronize()
        results.append(memory[node.output].array.copy())
        backend.close()
    np.testing.assert_array_equal(*results)
    assert results[0].any()
