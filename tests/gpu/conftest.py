"""What the GPU tests share: the backend, engines, weights that are given back, and `compute`, which
runs one node in guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu.harness import POISON, Compute, Guarded
from workbench.backend.cuda.device.backend import CudaBackend, open_backend
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import Kind, Node, Tensor


@pytest.fixture(scope="session")
def backend() -> Iterator[CudaBackend]:
    made = open_backend()
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Callable[..., Engine]]:
    """`engine(preset, quant, **config)`: an empty engine, one each for the whole module."""
    engines: dict[Any, Engine] = {}

    def get(preset: str, quant: str, **config: Any) -> Engine:
        key = preset, quant, *config.items()
        if key not in engines:
            config = {"n_ctx": 512, "toggles": Toggles(graph_reuse="set_rows")} | config
            engines[key] = Engine.load(tiny_model(preset, quant), device="cuda", **config)
        engines[key].reset()
        return engines[key]

    yield get
    for made in engines.values():
        made.close()


@pytest.fixture
def programmatic(backend: CudaBackend) -> CudaBackend:
    """The backend, where a launch may begin before the one in front of it has ended."""
    if not backend.capabilities.programmatic:
        pytest.skip("no programmatic dependent launch below compute capability 9.0")
    return backend


@pytest.fixture
def weights(backend: CudaBackend) -> Iterator[list]:
    """Memory of weights that a test appends, given back at its end."""
    held: list = []
    yield held
    for memory in held:
        memory.free()


@pytest.fixture
def compute(backend: CudaBackend, weights: list) -> Compute:
    """`compute(node, {tensor: array}) -> bytes of the output`.

    Outputs and scratch start as NaN; inputs must come out as they went in, guards too; and a
    second run must give the same bits. A tensor the node stores into starts as its array says.
    """

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
        assert np.array_equal(results[0], results[1]), "two runs differ"
        scratch.download()
        for t, guarded in held.items():
            found = guarded.download()
            assert t is out or np.array_equal(found, content[t]), f"input {t!r} was overwritten"
        return results[0]

    return run
