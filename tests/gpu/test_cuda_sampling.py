"""Tokens drawn by the cuda backend are those that the host draws, also at edges."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests import draws
from tests.draws import Draw
from tests.gpu.harness import Compute
from workbench.graph import ops
from workbench.graph.ir import I32, Kind, Tensor
from workbench.model.sampler import Sampling

pytestmark = pytest.mark.gpu

TICKS_NS = 10_000  # the device's clock ticks coarsely


def draw(compute: Compute, asked: list[Draw]) -> np.ndarray:
    return first(compute, *draws.as_node(asked))


def first(compute, node, arrays) -> np.ndarray:
    """The tokens; how long each took differs from run to run, so they are run by hand."""
    from tests.gpu import harness

    backend = compute.__closure__[0].cell_contents
    held = {t: harness.Guarded(backend, a.reshape(-1).view(np.uint8)) for t, a in arrays.items()}
    out = harness.Guarded(backend, np.full(node.output.nbytes, 0xFF, np.uint8))
    at = {**held, node.output: out}
    launch = backend.launch(node, lambda t: at[t].address, 0, stream=0)
    begun = time.perf_counter_ns()
    launch()
    backend.sync_stream(0)()
    elapsed = time.perf_counter_ns() - begun
    found = out.download().view(np.int32).reshape(node.output.shape)
    assert (found[:, 1] >= 0).all() and (found[:, 1] <= elapsed + TICKS_NS).all()
    return found[:, 0]


@pytest.mark.parametrize("n_vocab", [5, 1000, 1024, 32001, 128256])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 40.0, "ties", "two"])
def test_draws_are_the_hosts(compute: Compute, n_vocab: int, spread) -> None:
    rng = np.random.default_rng(n_vocab)
    n = 40
    logits = rng.standard_normal((n, n_vocab)).astype(np.float32)
    if spread == "ties":
        logits = np.round(logits * 2)
    elif spread == "two":
        logits = (logits > 0).astype(np.float32)
    else:
        logits *= spread
    how = [
        Sampling(t, k, p, m)
        for t, k, p, m in zip(
            rng.choice([0.0, 0.3, 1.0, 4.0], n), rng.choice([0, 1, 40, 1000, 5000], n).tolist(),
            rng.choice([0.05, 0.5, 0.95, 1.0], n), rng.choice([0.0, 0.0, 0.01, 0.3], n),
            strict=True,
        )
    ]  # fmt: skip
    u = rng.random(n).astype(np.float32)
    u[:2] = 0.0, 1.0
    asked = [Draw(row, s, float(x)) for row, s, x in zip(logits, how, u, strict=True)]
    assert draw(compute, asked).tolist() == [each.token for each in asked]


@pytest.mark.parametrize("n_vocab", [1, 60, 64, 8192, 128256])
@pytest.mark.parametrize("kind", draws.LEVELS)
def test_ties_gaps_and_ends_of_ranges_are_drawn_alike(compute: Compute, n_vocab: int, kind):
    """Also where more elements are alike than the sorted list has room for."""
    rng = np.random.default_rng(n_vocab)
    asked = [
        Draw(
            rng.choice(np.array(draws.LEVELS[kind], np.float32), n_vocab),
            Sampling(
                rng.choice(draws.TEMPERATURES), int(rng.choice([*draws.TOP_KS, 2100, 5000])),
                rng.choice(draws.TOP_PS), rng.choice(draws.MIN_PS),
            ),
            float(np.float32(rng.choice([*draws.UNIFORMS, rng.random()]))),
        )
        for _ in range(64)
    ]  # fmt: skip
    assert draw(compute, asked).tolist() == [each.token for each in asked]


def test_rows_that_are_not_finite_draw_nothing(compute: Compute) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[0, 7], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    found = draw(compute, [Draw(row, Sampling(1.0), 0.5) for row in logits])
    assert found[:3].tolist() == [-1, -1, -1] and found[3] >= 0


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
