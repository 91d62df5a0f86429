"""What the GPU tests share: the backend, engines, kernels compiled beforehand, and `compute`, which
runs one node in guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu.debug_arena import Mode, run_alone
from tests.gpu.harness import Guards
from workbench.backend.cuda.device.backend import CudaBackend, open_backend
from workbench.backend.cuda.kernels import nvrtc
from workbench.config import Toggles
from workbench.engine.engine import Engine
from workbench.graph.ir import Node, Tensor


@pytest.fixture(scope="session")
def backend() -> Iterator[CudaBackend]:
    made = open_backend()
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def compiled(request) -> None:
    """What the module's tests launch, several at a time: a quarter of a second each, at its first
    launch, would be most of what tests of many small nodes take."""
    if wanted := getattr(request.module, "kernels", None):
        backend = request.getfixturevalue("backend")
        nvrtc.compile_many(sorted({("repack", ()), *wanted(backend._sm)}), backend._arch)


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
def guards(backend: CudaBackend) -> Iterator[Guards]:
    with Guards(backend) as made:
        yield made


@pytest.fixture
def compute(backend: CudaBackend) -> Callable[..., np.ndarray]:
    """`compute(node, {tensor: array}) -> bytes of the output`: in guarded memory, and a second run
    must give the same bits. A tensor the node stores into starts as its array says."""

    def run(node: Node, arrays: dict[Tensor, np.ndarray]) -> np.ndarray:
        values = {t.storage: a for t, a in arrays.items()}
        return run_alone(backend, node, values, Mode.GUARDED, times=2)[node.output.storage]

    return run
