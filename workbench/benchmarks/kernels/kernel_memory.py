"""The memory of a measured kernel: copies of its weights, activations, results, scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.backend.base import Backend
from workbench.backend.issue.issued import Issued
from workbench.benchmarks.kernels.kernel_cases import KernelCase
from workbench.graph.ir import F32, Kind, Node, Tensor
from workbench.model.gguf import quants
from workbench.program.commands import COMPUTE_STREAM, Space

RANDOM_BYTES = 16 << 20  # larger weights repeat these bytes, since values do not matter


class Copies:
    """Copies of a case's weights in a backend's memory: at least two, and `nbytes` in all."""

    def __init__(self, backend: Backend, case: KernelCase, nbytes: int, seed: int):
        self.tensors = case.weights()
        self.addresses: list[dict[Tensor, int]] = []  # of each copy: the addresses of its weights
        self._memory: list[Any] = []
        rng = np.random.default_rng(seed)
        try:
            data = [_random_weight(rng, tensor) for tensor in self.tensors]
            for _ in range(max(2, math.ceil(nbytes / case.nbytes))):
                # each copy needs its own bytes: a host backend uses the array itself
                loaded = [
                    backend.load_weight(tensor, rows.copy())
                    for tensor, rows in zip(self.tensors, data, strict=True)
                ]
                self._memory += loaded
                found = (memory.address for memory in loaded)
                self.addresses.append(dict(zip(self.tensors, found, strict=True)))
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        for memory in self._memory:
            memory.free()
        self._memory.clear()
        self.addresses.clear()


def _random_weight(rng: np.random.Generator, tensor: Tensor) -> np.ndarray:
    """uint8 (rows, row_bytes): random rows that decode to finite numbers, repeated."""
    rows, row_bytes = tensor.rows, tensor.nbytes // tensor.rows
    n = min(rows, max(1, RANDOM_BYTES // row_bytes))
    block = quants.random_blocks(rng, tensor.dtype, n, tensor.cols, 1 / math.sqrt(tensor.cols))
    made = np.empty((rows, row_bytes), np.uint8)
    for first in range(0, rows, n):
        made[first : first + n] = block[: rows - first]
    return made


class Launches:
    """The nodes of a case with activations, results and scratch of their own."""

    def __init__(self, backend: Backend, nodes: Sequence[Node], weights: Copies, seed: int):
        self._backend, self._nodes, self._weights = backend, nodes, weights
        self._memory: list[Any] = []
        self._addresses: dict[Tensor, int] = {}
        try:
            (x,) = {t for node in nodes for t in node.inputs if t.kind == Kind.INPUT}
            self._addresses[x] = self._upload(x, seed)
            for tensor in {t.storage for node in nodes for t in node.outputs}:
                self._addresses[tensor] = self._allocate(tensor.nbytes).address
            need = max(backend.scratch_bytes(node) for node in nodes)
            self._scratch = self._allocate(need).address if need else 0
        except BaseException:
            self.free()
            raise

    def _allocate(self, nbytes: int, space: Space = Space.DEVICE) -> Any:
        self._memory.append(self._backend.allocate(nbytes, space))
        return self._memory[-1]

    def _upload(self, x: Tensor, seed: int) -> int:
        """Uploads activations of mean 0 and deviation 1, quantised where `x` is; returns their
        address."""
        rng, backend = np.random.default_rng(seed), self._backend
        values = rng.standard_normal(x.shape, np.float32)
        data = values if x.dtype == F32 else quants.quantize_activations(values)
        staging, there = self._allocate(x.nbytes, Space.PINNED), self._allocate(x.nbytes)
        staging.array[:] = data.reshape(-1).view(np.uint8)
        backend.copy(there.address, staging.address, x.nbytes, COMPUTE_STREAM, to_host=False)()
        backend.sync_stream(COMPUTE_STREAM)()
        return there.address

    def issues(self, programmatic: bool) -> list[Issued]:
        """Every node on every copy of the weights, copy after copy."""
        found = []
        for copy in self._weights.addresses:
            at = self._addresses | copy

            def address_of(tensor: Tensor, at: dict[Tensor, int] = at) -> int:
                return at[tensor.storage]

            found += [
                self._backend.launch(node, address_of, self._scratch, COMPUTE_STREAM, programmatic)
                for node in self._nodes
            ]
        return found

    def free(self) -> None:
        for memory in self._memory:
            memory.free()
        self._memory.clear()
