"""Tokens drawn by the cuda backend are those that the host draws, also at edges."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests import draws
from tests.draws import Draw
from tests.gpu.harness import Compute, Guarded
from workbench.backend.cuda.device.backend import CudaBackend
from workbench.graph import ops
from workbench.graph.ir import I32, Kind, Tensor
from workbench.model.sampler import Sampling

pytestmark = pytest.mark.gpu

TICKS_NS = 10_000  # the device's clock ticks coarsely


def draw(backend: CudaBackend, asked: list[Draw]) -> list[int]:
    """The tokens; how long each took differs from run to run, so they are not run twice."""
    node, arrays = draws.as_node(asked)
    held = {t: Guarded(backend, a.reshape(-1).view(np.uint8)) for t, a in arrays.items()}
    out = Guarded(backend, np.full(node.output.nbytes, 0xFF, np.uint8))
    at = {**held, node.output: out}
    launch = backend.launch(node, lambda t: at[t].address, 0, stream=0)
    begun = time.perf_counter_ns()
    launch()
    backend.sync_stream(0)()
    elapsed = time.perf_counter_ns() - begun
    found = out.download().view(np.int32).reshape(node.output.shape)
    assert (found[:, 1] >= 0).all() and (found[:, 1] <= elapsed + TICKS_NS).all()
    return found[:, 0].tolist()


LEVELLED = draws.TEMPERATURES, [*draws.TOP_KS, 2100, 5000], draws.TOP_PS, draws.MIN_PS
NORMAL = [0.0, 0.3, 1.0, 4.0], [0, 1, 40, 1000, 5000], [0.05, 0.5, 0.95, 1.0], [0.0, 0.01, 0.3]


@pytest.mark.parametrize("n_vocab", [1, 5, 60, 1000, 1024, 8192, 32001, 128256])
@pytest.mark.parametrize("kind", [0.0, 0.1, 3.0, 40.0, *draws.LEVELS])
def test_draws_are_the_hosts(backend: CudaBackend, n_vocab: int, kind: float | str) -> None:
    """Of normal logits, as far apart as that, and of few levels: ties, gaps and ends of ranges.
    Also where more elements are alike than the sorted list has room for."""
    rng, n = np.random.default_rng(n_vocab), 40
    if isinstance(kind, str):
        rows = rng.choice(np.array(draws.LEVELS[kind], np.float32), (n, n_vocab))
    else:
        rows = kind * rng.standard_normal((n, n_vocab)).astype(np.float32)
    u = [*draws.UNIFORMS, *rng.random(n)][:n]
    asked = []
    for row, x in zip(rows, u, strict=True):
        t, k, p, m = map(rng.choice, LEVELLED if isinstance(kind, str) else NORMAL)
        how = Sampling(float(t), int(k), float(p), float(m))
        asked.append(Draw(row.astype(np.float32), how, float(np.float32(x))))
    assert draw(backend, asked) == [each.token for each in asked]


def test_rows_that_are_not_finite_draw_nothing(backend: CudaBackend) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[0, 7], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    found = draw(backend, [Draw(row, Sampling(1.0), 0.5) for row in logits])
    assert found[:3] == [-1, -1, -1] and found[3] >= 0


def test_feed_and_keep(compute: Compute) -> None:
    ids, last = np.array([5, -1, -3, 7, -9], np.int32), np.array([11, 12, 13], np.int32)
    ti, tl = Tensor("i", I32, ids.shape), Tensor("l", I32, last.shape, Kind.CACHE)
    fed = compute(ops.make("feed", "f", ti, tl), {ti: ids, tl: last}).view(np.int32)
    assert fed.tolist() == [5, 11, 13, 7, 0]
    drawn_ = np.array([[1, 9], [2, 9], [3, 9]], np.int32)
    td, tr = Tensor("d", I32, drawn_.shape), Tensor("r", I32, (3,))
    rows = np.array([2, -1, 0], np.int32)
    kept = compute(ops.make("keep_tokens", "k", tl, td, tr), {tl: last, td: drawn_, tr: rows})
    assert kept.view(np.int32).tolist() == [3, 12, 1]
