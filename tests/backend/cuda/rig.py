"""Work on a faked CUDA driver: launches, copies, records and waits, and what their plans queue."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.backend.cuda.fake_cuda import fake_backend
from tests.backend.cuda.fake_graphs import Call, FakeCaptures
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.backend.cuda.device.graphs import CudaGraph
from workbench.backend.issue.issued import Issued, Plannable, in_order
from workbench.graph.ir import F16, F32, Kind, Node, Tensor
from workbench.graph.ops import make

FAR = 1 << 40  # between tensors, beyond every shape
COMPUTE, COPIES, THIRD = 0, 1, 2


class Rig(NamedTuple):
    backend: CudaBackend
    api: FakeCaptures

    @classmethod
    def of(cls, monkeypatch: pytest.MonkeyPatch) -> Rig:
        backend, _ = fake_backend(monkeypatch)
        return cls(backend, backend._driver.api)

    def issued(self, work: Issued) -> list[Call]:
        """What `work` queues, without records and waits: those are edges of a graph."""
        self.api.log.clear()
        work.call()
        return [c for c in self.api.log if c.function not in ("cuEventRecord", "cuStreamWaitEvent")]

    def launched(self, graph: CudaGraph) -> list[Call]:
        self.api.log.clear()
        graph.launch()
        return list(self.api.log)

    def replays(self, graph: CudaGraph, work: Issued) -> bool:
        """Whether a launch queues what the parts of `work` do. A product is two nodes."""
        calls = self.launched(graph)
        twice = [c.function == "cublasGemmEx" and c == b for b, c in itertools.pairwise(calls)]
        found = [c for c, again in zip(calls, [False, *twice], strict=True) if not again]
        return found == self.issued(work)

    def nothing_left(self) -> bool:
        return not self.api.alive and not self.api.captures

    def launch(self, node: Node, first: int, stream: int = COMPUTE, early: bool = False) -> Issued:
        given: dict[Tensor, int] = {}
        at = lambda t: given.setdefault(t.storage, first + FAR * len(given))  # noqa: E731
        return self.backend.launch(node, at, first + (1 << 59), stream, early)

    def work_of(self, parts: Sequence[tuple[int, Issued]], stream: int = COMPUTE) -> Any:
        issued = [part for _, part in parts]
        return Plannable(
            in_order([part.call for part in issued]), ("replay",), parts=tuple(issued),
            backend=self.backend, stream=stream, streams=tuple(s for s, _ in parts),
        )  # fmt: skip

    def step(self, first: int = FAR, cols: int = 256, last: Issued | None = None) -> Any:
        """A copy on another stream, launches behind it, of one kernel and of several and early
        ones, and `last`, else a copy of results."""
        backend, event = self.backend, self.backend.event()
        last = last or backend.copy(7 * FAR, first, 64, COMPUTE, to_host=True)
        return self.work_of([
            (COPIES, backend.copy(first, 9 * FAR, 64, COPIES, to_host=False)),
            (COPIES, backend.record(event, COPIES)),
            (COMPUTE, self.launch(norm(cols), first)),
            (COMPUTE, backend.wait(event, COMPUTE)),
            (COMPUTE, self.launch(product(), first)),
            (COMPUTE, self.launch(norm(cols), first, early=True)),
            (COMPUTE, last),
        ])  # fmt: skip


KERNELS_AND_COPIES = [0, 2, 5, 6]  # parts of a step that are single nodes


def norm(cols: int = 256, rows: int = 2, eps: float = 1e-5) -> Node:
    return make("rms_norm", "n", Tensor("x", F32, (rows, cols)), eps=eps)


def product() -> Node:
    """A conversion and a product of cuBLAS."""
    w, x = Tensor("w", F16, (64, 256), Kind.WEIGHT), Tensor("x", F32, (40, 256))
    return make("mul_mat", "y", w, x)
