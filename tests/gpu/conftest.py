"""What the GPU tests share: the backend, and a harness that runs one node with guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from workbench.backend.cuda import CudaBackend, open_backend
from workbench.graph.ir import Kind, Node, Tensor
from workbench.program.commands import Space

GUARD = 512  # bytes before and behind every tensor
GUARD_BYTE, POISON = 0xA5, 0xFF  # 0xFF in every byte: NaN as float and as half
Compute = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def backend() -> Iterator[CudaBackend]:
    made = open_backend()
    yield made
    made.close()


class Guarded:
    """Device memory for one tensor between two guards."""

    def __init__(self, backend: CudaBackend, content: np.ndarray):
        self.backend = backend
        self.nbytes = content.nbytes
        self.image = np.full(content.nbytes + 2 * GUARD, GUARD_BYTE, np.uint8)
        self.image[GUARD : GUARD + self.nbytes] = content
        self.memory = backend.allocate(self.image.nbytes, Space.DEVICE)
        self.upload()

    @property
    def address(self) -> int:
        return self.memory.address + GUARD

    def upload(self) -> None:
        self.backend.copy(
            self.memory.address, self.image.ctypes.data, self.image.nbytes, 0, to_host=False
        )()
        self.backend.sync_stream(0)()

    def download(self) -> np.ndarray:
        """The tensor's bytes; fails where a guard was touched."""
        found = np.zeros_like(self.image)
        self.backend.copy(found.ctypes.data, self.memory.address, found.nbytes, 0, to_host=True)()
        self.backend.sync_stream(0)()
        assert (found[:GUARD] == GUARD_BYTE).all(), "written before the tensor"
        assert (found[GUARD + self.nbytes :] == GUARD_BYTE).all(), "written behind the tensor"
        return found[GUARD : GUARD + self.nbytes]


@pytest.fixture
def compute(backend: CudaBackend) -> Iterator[Compute]:
    """`compute(node, {tensor: array}) -> bytes of the output`.

    Outputs and scratch start as NaN; inputs must come out as they went in, guards too; and a
    second run must give the same bits. A tensor the node stores into starts as its array says.
    """
    weights = []

    def run(node: Node, arrays: dict[Tensor, np.ndarray]) -> np.ndarray:
        out = node.output.storage
        content = {t.storage: a.reshape(-1).view(np.uint8) for t, a in arrays.items()}
        content.setdefault(out, np.full(out.nbytes, POISON, np.uint8))
        held: dict[Tensor, Guarded] = {}
        addresses: dict[Tensor, int] = {}
        for t, data in content.items():
            if t.kind == Kind.WEIGHT:
                weights.append(backend.load_weight(t, data))
                addresses[t] = weights[-1].address
            else:
                held[t] = Guarded(backend, data)
                addresses[t] = held[t].address
        need = backend.scratch_bytes(node)
        scratch = Guarded(backend, np.full(need, POISON, np.uint8))
        call = backend.launch(
            node, lambda t: addresses[t.storage], scratch.address if need else 0, stream=0
        )
        results = []
        for _ in range(2):
            held[out].upload()
            scratch.upload()
            call()
            backend.sync_stream(0)()
            results.append(held[out].download())
        assert np.array_equal(*results), "two runs differ"
        scratch.download()
        for t, guarded in held.items():
            found = guarded.download()
            assert t is out or np.array_equal(found, content[t]), f"input {t!r} was overwritten"
        return results[0]

    yield run
    for memory in weights:
        memory.free()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected|| in float64; inf where found holds a NaN."""
    found, expected = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return float("inf")
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (norm or 1.0)
