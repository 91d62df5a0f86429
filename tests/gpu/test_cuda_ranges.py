"""Every op on the cuda backend against its declaration (see tests/ranges.py)."""

from __future__ import annotations

import pytest

from tests import ranges
from tests.gpu.harness import Wanted, compile_side_by_side, kernels_of
from workbench.backend.cuda.device.backend import CudaBackend

pytestmark = pytest.mark.gpu

CASES = {n: (node, values) for n, node, values in (*ranges.cases(), *ranges.attention_cases())}
FUSED = {
    f"{n_tokens} {name}": (node, values)
    for n_tokens in (1, 3, 8, 9, 33)
    for name, node, values in ranges.fused_cases(n_tokens)
}


def kernels(sm: int) -> Wanted:
    return kernels_of((node for node, _ in (*CASES.values(), *FUSED.values())), sm)


@pytest.fixture(scope="module", autouse=True)
def compiled(backend: CudaBackend) -> None:
    compile_side_by_side(backend, kernels(backend._sm))


@pytest.mark.parametrize("name", CASES)
def test_declared_ranges_hold(backend: CudaBackend, name: str, monkeypatch):
    # a table on the GPU is in planes too, where its type has them
    monkeypatch.setattr(ranges, "backend_keeps", lambda node, tensor: True)
    ranges.check(backend, *CASES[name])


@pytest.mark.parametrize("name", FUSED)
def test_declared_ranges_of_fused_nodes_hold(backend: CudaBackend, name: str, monkeypatch):
    monkeypatch.setattr(ranges, "backend_keeps", lambda node, tensor: True)
    ranges.check(backend, *FUSED[name])
