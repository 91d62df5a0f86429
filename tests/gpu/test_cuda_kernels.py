"""Every CUDA kernel against a plain NumPy twin, with poisoned outputs and guarded memory."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests import attention, draws, reference
from tests.backend.cpu.test_cpu_kernels import TWINS, made
from tests.draws import Draw
from tests.gpu.harness import Guards, distance, generator, operands
from workbench.backend.cuda.device.replay import READ_WORDS
from workbench.backend.cuda.kernels.kernel import Kernel
from workbench.graph import ir
from workbench.graph.ir import F16, F32, I32, I64, Kind, Tensor
from workbench.graph.ops import make
from workbench.model.gguf.quants import quantize_activations
from workbench.model.sampler import Sampling

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-6  # float32 sums of some thousand terms, relative to the norm of the result


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("name", [d.name for d in ir.WEIGHT_DTYPES])
def test_get_rows(compute, name: str):
    rows, cols = 19, 768
    w, data, values = operands(name, rows, cols)[:3]
    ids = np.array([0, 18, 7, 7, 19, -1, 3], np.int32)  # two of them outside
    node = make("get_rows", "y", w, Tensor("ids", I32, ids.shape))
    found = compute(node, {w: data, node.inputs[1]: ids}).view(np.float32).reshape(-1, cols)
    expected = np.where(((ids >= 0) & (ids < rows))[:, None], values[ids % rows], 0.0)
    assert distance(found, expected) < 1e-7
    if ir.DTYPES[name].block < 256:  # one product of two floats, or none
        assert np.array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("first", [0, 4, 10, 13, -1, -6, 1 << 62, -(1 << 63)])
def test_stores_round_and_stay_inside(compute, first: int):
    """Rows by index, by a table's cell and by a view's: all alike, none outside 0..n_kv-1."""
    rng = generator("copies")
    cells, n_kv, cols, tokens = 20, 13, 300, 6
    before = rng.standard_normal((cells, cols)).astype(np.float16)
    x = normal(rng, tokens, cols) * 1000
    cache, rows = Tensor("cache", F16, before.shape, Kind.CACHE), Tensor("x", F32, x.shape)
    table = np.array([1, 2, 3, first, 5], np.int64)
    indices = np.array([min(first, 1 << 62) + token for token in range(tokens)], np.int64)
    t, i = (Tensor("i", I64, a.shape) for a in (table, indices))
    given = [
        (make("copy_by_table", "k", cache, rows, t, store=3, n_kv=n_kv), {t: table}),
        (make("set_rows", "k", cache, rows, i, n_kv=n_kv), {i: indices}),
    ]
    if 0 <= first <= n_kv - tokens:
        given.append((make("copy_to_view", "k", cache, rows, cell=first), {}))
    expected = before.copy()
    for token in range(tokens):
        if 0 <= first + token < n_kv:
            expected[first + token] = x[token].astype(np.float16)
    for node, more in given:
        found = compute(node, {cache: before, rows: x, **more})
        assert np.array_equal(found.view(np.float16).reshape(cells, cols), expected), node


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (1, 4096), (5, 5001), (70, 128), (2, 8192)])
@pytest.mark.parametrize("name", ["add", "add a row", "mul", "mul a row", "rms_norm", "swiglu"])
def test_it_is_its_twin(compute, name: str, shape: tuple[int, int]):
    """exp(-g) is off by 2^-22 |g|, which counts where g is below zero and silu next to nothing."""
    twin, rng = TWINS[name], generator(name, shape)
    given = [k * normal(rng, *s) for k, s in zip(twin.times, twin.shapes(shape), strict=False)]
    node, arrays = made(name.partition(" ")[0], *given, **twin.params)
    found = compute(node, arrays).view(np.float32).reshape(shape)
    wide = twin.of(*(x.astype(np.float64) for x in given))
    if not twin.rtol:
        assert np.array_equal(found, twin.of(*given))
    assert distance(found, wide) < TOLERANCE
    assert name != "swiglu" or np.allclose(found, wide, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (1, 4096), (4, 1120), (33, 14336)])
def test_quantize_is_bit_equal(compute, shape: tuple[int, int]):
    x = normal(generator(shape), *shape)
    x[0, :32] = 0
    x[-1, -32:] *= np.float32(1e-38)  # quants of a subnormal scale
    x[:, 5] = 127.0  # ties: scale 1 exactly
    x[:, 6:9] = [0.5, 1.5, -2.5]
    node = make("quantize", "q", Tensor("x", F32, shape))
    found = compute(node, {node.inputs[0]: x})
    assert np.array_equal(found.reshape(shape[0], -1), quantize_activations(x))


ROPE = {"theta_base": 500000.0, "freq_scale": 0.25}


def factors_for(rng: np.random.Generator, n_rot: int, there: bool) -> dict[Tensor, np.ndarray]:
    tensor = Tensor("f", F32, (n_rot // 2,), Kind.WEIGHT)
    return {tensor: rng.uniform(1, 32, n_rot // 2).astype(np.float32)} if there else {}


def rotated(x: np.ndarray, positions: np.ndarray, neox: bool, n_rot: int, factors: dict):
    pairs, more = "halves" if neox else "adjacent", next(iter(factors.values()), None)
    return reference.rotated(x, positions, pairs, n_rot, *ROPE.values(), more)


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 64), (6, 80, 32), (32, 128, 128), (5, 256, 256)])
def test_rope(compute, neox, with_factors, shape):
    heads, head_dim, n_rot = shape
    rng = generator(neox, with_factors, heads)
    positions = np.array([0, 1, 77, 8191, 131071], np.int32)
    x = normal(rng, len(positions), heads, head_dim)
    factors = factors_for(rng, n_rot, with_factors)
    tx, tp = Tensor("x", F32, x.shape), Tensor("p", I32, positions.shape)
    node = make("rope", "y", tx, tp, *factors, n_rot=n_rot, neox=neox, **ROPE)
    found = compute(node, {tx: x, tp: positions, **factors}).view(np.float32)
    assert distance(found, rotated(x, positions, neox, n_rot, factors)) < 3e-7


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "n_rot"), [(1, 64, 64), (6, 96, 34), (5, 256, 256)])
@pytest.mark.parametrize("dtype", ir.CACHE_DTYPES, ids=lambda d: d.name)
def test_rope_shift_of_every_type_of_cells(compute, dtype, neox, heads, head_dim, n_rot):
    """What a shift leaves is the turned values, stored anew; other blocks and cells keep theirs."""
    rng = generator("shift", dtype.name, neox, heads)
    cells, n = 7, 6
    deltas = np.array([0, 1, -1, 0, -8191, 131071], np.int32)
    moved = np.append(deltas != 0, [False] * (cells - n))
    data, numbers = attention.stored(normal(rng, cells, heads * head_dim), dtype)
    factors = factors_for(rng, n_rot, heads != 6)
    cache = Tensor("c", dtype, (cells, heads * head_dim), Kind.CACHE)
    td = Tensor("d", I32, deltas.shape)
    how = {"n_head_kv": heads, "n_rot": n_rot, "neox": neox, **ROPE}
    node = make("rope_shift", "k", cache, td, *factors, **how)
    found = compute(node, {cache: data, td: deltas, **factors}).view(np.uint8)
    before, after = (x.view(np.uint8).reshape(cells, heads, -1) for x in (data, found))
    assert np.array_equal(after[~moved], before[~moved])
    end = -(-n_rot // dtype.block) * dtype.block_bytes
    assert np.array_equal(after[..., end:], before[..., end:])

    k = numbers.reshape(cells, heads, head_dim)[moved]
    twin = rotated(k, deltas[deltas != 0], neox, n_rot, factors)
    if dtype == F32:
        assert np.allclose(after.view(np.float32)[moved], twin, rtol=0, atol=1e-6)
        return
    again, _ = attention.stored(twin.reshape(-1, heads * head_dim).astype(np.float32), dtype)
    assert np.mean(after[moved] == again.view(np.uint8).reshape(after[moved].shape)) > 0.99


TICKS_NS = 10_000  # the device's clock ticks coarsely
LEVELLED = draws.TEMPERATURES, [*draws.TOP_KS, 2100, 5000], draws.TOP_PS, draws.MIN_PS
NORMAL = [0.0, 0.3, 1.0, 4.0], [0, 1, 40, 1000, 5000], [0.05, 0.5, 0.95, 1.0], [0.0, 0.01, 0.3]


def drawn(guards: Guards, asked: list[Draw]) -> list[int]:
    """The tokens; how long each took differs from run to run, so they are not run twice."""
    node, arrays = draws.as_node(asked)
    at = {t: guards.put(a).address for t, a in arrays.items()}
    out = guards.room(node.output.nbytes)
    launch = guards.backend.launch(node, (at | {node.output: out.address}).__getitem__, 0, stream=0)
    begun = time.perf_counter_ns()
    launch()
    guards.backend.sync_stream(0)()
    elapsed = time.perf_counter_ns() - begun
    found = out.content().view(np.int32).reshape(node.output.shape)
    assert (found[:, 1] >= 0).all() and (found[:, 1] <= elapsed + TICKS_NS).all()
    return found[:, 0].tolist()


@pytest.mark.parametrize("n_vocab", [1, 5, 60, 1000, 1024, 8192, 32001, 128256])
@pytest.mark.parametrize("kind", [0.0, 0.1, 3.0, 40.0, *draws.LEVELS])
def test_draws_are_the_hosts(guards: Guards, n_vocab: int, kind: float | str) -> None:
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
    assert drawn(guards, asked) == [each.token for each in asked]


def test_rows_that_are_not_finite_draw_nothing(guards: Guards) -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[0, 7], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    found = drawn(guards, [Draw(row, Sampling(1.0), 0.5) for row in logits])
    assert found[:3] == [-1, -1, -1] and found[3] >= 0


def test_feed_and_keep(compute) -> None:
    ids, last = np.array([5, -1, -3, 7, -9], np.int32), np.array([11, 12, 13], np.int32)
    ti, tl = Tensor("i", I32, ids.shape), Tensor("l", I32, last.shape, Kind.CACHE)
    fed = compute(make("feed", "f", ti, tl), {ti: ids, tl: last}).view(np.int32)
    assert fed.tolist() == [5, 11, 13, 7, 0]
    new, rows = np.array([[1, 9], [2, 9], [3, 9]], np.int32), np.array([2, -1, 0], np.int32)
    tn, tr = Tensor("d", I32, new.shape), Tensor("r", I32, rows.shape)
    kept = compute(make("keep_tokens", "k", tl, tn, tr), {tl: last, tn: new, tr: rows})
    assert kept.view(np.int32).tolist() == [3, 12, 1]


@pytest.mark.parametrize("words", READ_WORDS)
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_every_word_is_read_once(guards: Guards, words: int, grid: int):
    """One word of many is 1: a thread adds up to 1 if and only if that word was read once."""
    n = 256 * words * 7 + 19
    device, sink = guards.room(16 * n), guards.room(4)
    args = [device.address, n, 1, sink.address]
    (read,) = guards.issues([Kernel("read", f"read_{words}", (grid, 1), 256, args, waits=True)])
    some = np.random.default_rng(0).integers(0, n, 20)
    for pick in [0, 255, 256, 256 * words, n - 20, n - 19, n - 1, *some, None]:
        values = np.zeros((n, 4), np.uint32)
        if pick is not None:
            values[pick, int(pick) % 4] = 1
        device.fill(values)
        sink.fill(np.zeros(4, np.uint8))
        read()
        assert sink.content().view(np.int32)[0] == (pick is not None), pick
