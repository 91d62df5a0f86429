"""Operands of products, memory between guards, how far what was found is from what was expected,
and tokens that engines are fed with."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.gpu.debug_arena import POISON, Block, Mode, as_bytes
from tests.oracles.dequantize import dequantize
from workbench.backend.base import Issue, Memory
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import op_table
from workbench.backend.cuda.kernels.kernel import Kernel, Work
from workbench.engine.engine import Engine
from workbench.graph.ir import DTYPES, F16, F32, Q8_ACT, QUANTISED, Kind, Node, Tensor
from workbench.graph.ops import make
from workbench.model.gguf.quants import quantize_activations, random_blocks, unpack_activations

MOST_TOKENS = 1030  # of any product here
# Files of kernels/, each with its macros. What a module's `kernels(sm)` names is compiled side by
# side before its tests (`conftest.py`), and before a record (`record.py`).
Wanted = set[tuple[str, tuple[str, ...]]]


def generator(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected|| in float64; inf where found holds a NaN."""
    found, expected = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - expected) / (np.linalg.norm(expected) or 1.0))


def floats_of(raw: np.ndarray, cols: int) -> np.ndarray:
    """The values of rows of Q8_ACT, float64."""
    quants, scales, _ = unpack_activations(raw, cols)
    return quants.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, axis=1)


class Operands(NamedTuple):
    """One weight with its values in float64, and as many tokens of x as any test wants likewise, as
    floats, as the kernels get them, and as the values that these are."""

    weight: Tensor
    data: np.ndarray
    values: np.ndarray
    floats: np.ndarray
    x: np.ndarray
    x_values: np.ndarray


@lru_cache(maxsize=32)  # of one type
def operands(name: str, rows: int, cols: int) -> Operands:
    dtype, rng = DTYPES[name], generator(name, rows, cols)
    data = random_blocks(rng, dtype, rows, cols, cols**-0.5).reshape(-1)
    values = dequantize(data, dtype, (rows, cols)).astype(np.float64)
    floats = x = rng.standard_normal((MOST_TOKENS, cols), dtype=np.float32)
    if dtype in QUANTISED:
        x = quantize_activations(floats)
    x_values = floats_of(x, cols) if dtype in QUANTISED else x.astype(np.float64)
    weight = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    return Operands(weight, data, values, floats, x, x_values)


def product(name: str, rows: int, cols: int, tokens: int, rounded: bool = True) -> Node:
    """As the decoder makes it; rounded: activations of quantised weights are quantised, too."""
    w = Tensor("w", DTYPES[name], (rows, cols), Kind.WEIGHT)
    x = Tensor("x", Q8_ACT if rounded and w.dtype in QUANTISED else F32, (tokens, cols))
    return make("mul_mat", "y", w, x, **({} if rounded else {"activations": "float"}))


def attention(tokens: int, heads: int, heads_kv: int, head_dim: int, n_kv: int) -> Node:
    q = Tensor("q", F32, (tokens, heads, head_dim))
    k, v = (Tensor(name, F16, (n_kv, heads_kv * head_dim)) for name in "kv")
    mask = Tensor("mask", F16, (tokens, n_kv), Kind.INPUT)
    scale = head_dim**-0.5
    return make("attention", "o", q, k, v, mask, n_kv=n_kv, n_head_kv=heads_kv, scale=scale)


def kernels_of(nodes: Iterable[Node], sm: int) -> Wanted:
    """What launches of `nodes` and of their parts need."""
    operands = op_table.Operands(lambda tensor: 0, 0, 0, sm)
    every = (each for node in nodes for each in (node, *node.parts))
    works = (work for each in every for work in op_table.launches(each, operands))
    return {(work.file, work.defines) for work in works if isinstance(work, Kernel)}


def fetched(backend: CudaBackend, address: int, nbytes: int, stream: int = 0) -> np.ndarray:
    found = np.ones(nbytes, np.uint8)
    backend.copy(found.ctypes.data, address, nbytes, stream, to_host=True)()
    backend.sync_stream(stream)()
    return found


def assert_counters_are_zero(backend: CudaBackend, stream: int = 0) -> None:
    """After a product or attention that its last block combined."""
    address = backend._counters_of(stream)
    assert not fetched(backend, address, backend._counters[stream].nbytes, stream).any()


class Guards(AbstractContextManager["Guards"]):
    """Device memory between guards, given back together by the end of a `with`, where no guard may
    have been touched and inputs must be as they were; and weights."""

    def __init__(self, backend: CudaBackend):
        self.backend = backend
        self._blocks: list[tuple[Block, np.ndarray | None]] = []  # with the content of an input
        self._weights: list[Memory] = []

    def room(self, nbytes: int, given: np.ndarray | None = None) -> Block:
        """All of it NaN."""
        self._blocks.append((Block(self.backend, nbytes, Mode.GUARDED, "a block"), given))
        return self._blocks[-1][0]

    def put(self, content: np.ndarray) -> Block:
        raw = as_bytes(content)
        made = self.room(raw.nbytes, raw)
        made.fill(raw)
        return made

    def load(self, weight: Tensor, data: np.ndarray) -> int:
        self._weights.append(self.backend.load_weight(weight, data))
        return self._weights[-1].address

    def issues(self, works: Iterable[Work]) -> list[Issue]:
        stream = self.backend._stream(0)
        return [self.backend._prepare(work, stream, "a test") for work in works]

    def twice(
        self, into: Sequence[Block], issues: list[Issue], *scratch: Block, poisons=(POISON, POISON)
    ) -> list[np.ndarray]:
        """What launches leave in `into`, each as bytes; it and scratch are poisoned first. The same
        each time."""
        results: list[list[np.ndarray]] = []
        for poison in poisons:
            for block in (*into, *scratch):
                block.poison(poison)
            for issue in issues:
                issue()
            results.append([block.content() for block in into])
        assert all(map(np.array_equal, results[0], results[-1])), "two runs differ"
        return results[0]

    def quantised(self, floats: np.ndarray, tokens: int) -> np.ndarray:
        """The very bytes that the kernel `quantize` makes of float32 rows."""
        x = Tensor("x", F32, (tokens, floats.nbytes // 4 // tokens))
        node, there = make("quantize", "q", x), self.put(floats)
        dst = self.room(node.output.nbytes)
        at = {x: there.address, node.output: dst.address}
        self.backend.launch(node, at.__getitem__, 0, stream=0)()
        return dst.content()

    def __exit__(self, kind: object, *_: object) -> None:
        self.backend.synchronize()
        for block, given in self._blocks:
            if kind is None:
                found = block.content("a kernel")
                assert given is None or np.array_equal(found, given), "an input was overwritten"
            block.free()
        for memory in self._weights:
            memory.free()


def skip_where_refused(values: Mapping[str, str], backend: Any) -> None:
    if "pdl" in values and not backend.capabilities.programmatic:
        pytest.skip("has no programmatic dependent launch")


def tokens_for(preset: str, n: int) -> list[int]:
    n_vocab = 640 if preset == "tiny-llama-spm" else 1024
    return np.random.default_rng(5).integers(0, n_vocab, n).tolist()


def one_by_one(engine: Engine, tokens: Sequence[int]) -> np.ndarray:
    """Logits of single tokens, by a caller who keeps the last: blocks of results take turns."""
    rows, last = [], None
    for token in tokens:
        last = engine.step([token])
        rows.append(last.copy())
    assert last is not None
    return np.concatenate(rows)
