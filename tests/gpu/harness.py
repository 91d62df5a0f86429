"""Guarded device memory, kernels compiled side by side, how far what was found is from what was
expected, and tokens that engines are fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.kernels import nvrtc, op_table
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.engine.engine import Engine
from workbench.graph.ir import Node
from workbench.program.commands import Space

GUARD = 512  # bytes before and behind every tensor
GUARD_BYTE, POISON = 0xA5, 0xFF  # 0xFF in every byte: NaN as float and as half
Compute = Callable[..., np.ndarray]
Wanted = set[tuple[str, tuple[str, ...]]]  # files of kernels/, each with its macros


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


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """||found - expected|| / ||expected|| in float64; inf where found holds a NaN."""
    found, expected = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    assert found.shape == expected.shape
    if not np.isfinite(found).all():
        return float("inf")
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (norm or 1.0)


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


def kernels_of(nodes: Iterable[Node], sm: int) -> Wanted:
    """What launches of `nodes` and of their parts need."""
    operands = op_table.Operands(lambda tensor: 0, 0, 0, sm)
    return {
        (work.file, work.defines)
        for node in nodes
        for each in (node, *node.parts)
        for work in op_table.launches(each, operands)
        if isinstance(work, Kernel)
    }


def compile_side_by_side(backend: CudaBackend, wanted: Wanted) -> None:
    """Compiles several variants at a time. Left to the first launch of each they are compiled one
    after another, a quarter of a second each, which is most of what tests of many small nodes take.

    A module whose fixture calls this has `kernels(sm)`, and a record compiles these of all modules
    at once (`tests/gpu/compile_kernels.py`)."""
    nvrtc.compile_many(sorted({("repack", ()), *wanted}), backend._arch)
