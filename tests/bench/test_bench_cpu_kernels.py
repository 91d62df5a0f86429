"""How fast the CPU kernels read weights, beside how fast this machine reads memory at all.

`pytest tests/bench/test_bench_cpu_kernels.py --benchmark-enable --benchmark-json=F`: GB/s and
GMAC/s are in the `extra_info` of each result. Two threads; for decode the weights are cold: calls
rotate over more than 200 MB. Without `--benchmark-enable` each runs once, small.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.backend.cpu.kernel_runs import repack
from tests.bench.layouts import COLD_BYTES, N_THREADS, SHAPES, cold_copies, copies_of, product
from workbench.backend.cpu.compile import compile_kernel
from workbench.backend.cpu.kernels import op_table
from workbench.backend.cpu.kernels.vector import Emit, Value
from workbench.graph.ir import DTYPES, QUANTISED, WEIGHT_DTYPES
from workbench.model.gguf.quants import random_blocks

pytestmark = pytest.mark.long  # there is a kernel to compile for each type
WEIGHTS = [
    (d.name, layout)
    for d in WEIGHT_DTYPES
    for layout in (op_table.LAYOUTS if d in QUANTISED else ("file",))
]
NAMES = pytest.mark.parametrize("name", [d.name for d in WEIGHT_DTYPES])


def read_body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Kernel: sums (n_parts x 8 u64), source, bytes. Reads everything, four loads at a time."""
    sums, source, n_bytes = e.arguments(args, "iii")
    start, stop = e.share(n_bytes // 256, part, n_parts)
    found = [e.var(e.const("u64", 0, 8)) for _ in range(4)]
    with e.loop(start, stop) as i:
        for k, own in enumerate(found):
            own.set(own.get() + e.load("u64", source + i * 256 + 64 * k, 8))
    total = found[0].get() + found[1].get() + found[2].get() + found[3].get()
    e.store(total, sums + part * 64)


def measure(benchmark, kernel: Callable, blocks: list[np.ndarray], gigas: dict[str, float]) -> None:
    """Run `kernel` on all argument blocks, in order, on every thread; report giga-units per s."""
    addresses = [int(block.ctypes.data) for block in blocks]

    def part_work(part: int) -> None:
        for address in addresses:
            kernel(address, part, N_THREADS)

    with ThreadPoolExecutor(N_THREADS) as pool:
        benchmark(lambda: list(pool.map(part_work, range(N_THREADS))))
    if benchmark.enabled:
        for unit, amount in gigas.items():
            benchmark.extra_info[unit] = round(amount / benchmark.stats.stats.min, 2)


def test_read_bandwidth(benchmark) -> None:
    """The ceiling: a sum over cold memory."""
    source = np.ones(COLD_BYTES if benchmark.enabled else 1 << 16, np.uint8)
    sums = np.zeros((N_THREADS, 8), np.uint64)
    block = np.array([sums.ctypes.data, source.ctypes.data, source.nbytes], np.int64)
    kernel = compile_kernel("bench_read", read_body).ctypes
    benchmark.group = "read"
    measure(benchmark, kernel, [block], {"GB/s": source.nbytes / 1e9})
    assert sums.sum() == source.view(np.uint64).sum(dtype=np.uint64)


@pytest.mark.parametrize("rows,cols", SHAPES)
@pytest.mark.parametrize("name,layout", WEIGHTS)
def test_decode(benchmark, name, layout, rows, cols):
    """One token against cold weights."""
    if not benchmark.enabled:
        rows, cols = rows // 64, cols // 8
    mul_mat(benchmark, name, rows, cols, 1, cold=True, layout=layout)


@pytest.mark.parametrize("n_tokens", [2, 4, 8])
@NAMES
def test_batch(benchmark, name, n_tokens):
    """A few tokens against cold weights, in the layout the embedded device uses."""
    shape = SHAPES[0] if benchmark.enabled else (32, 256)
    mul_mat(benchmark, name, *shape, n_tokens, cold=True)


@pytest.mark.parametrize("n_tokens", [1, 2, 4, 8, 64, 512])
@NAMES
def test_prefill(benchmark, name, n_tokens):
    """Tokens against one matrix that caches keep, in the layout the embedded device uses."""
    shape = (2048, 2048) if benchmark.enabled else (32, 256)
    mul_mat(benchmark, name, *shape, n_tokens, cold=False)


@pytest.mark.parametrize("name", [d.name for d in WEIGHT_DTYPES if d in QUANTISED])
def test_repack(benchmark, name: str) -> None:
    """From file blocks to rows16, on one thread."""
    rows, cols = (16384, 2048) if benchmark.enabled else (32, 256)
    dtype = DTYPES[name]
    source = random_blocks(np.random.default_rng(0), dtype, rows, cols, 0.02)
    target = np.zeros(op_table.repacked_bytes(dtype, rows, cols, "rows16"), np.uint8)
    benchmark.group = "repack"
    benchmark(lambda: repack(target.ctypes.data, source.ctypes.data, dtype, rows, cols, "rows16"))
    if benchmark.enabled:
        benchmark.extra_info["GB/s"] = round(source.nbytes / 1e9 / benchmark.stats.stats.min, 2)
    assert target.any()


def mul_mat(benchmark, name, rows, cols, n_tokens, cold, layout=None) -> None:
    dtype = DTYPES[name]
    layout = layout or op_table.weight_layout(dtype)
    copies = cold_copies(dtype, rows, cols, layout) if cold and benchmark.enabled else 1
    weights = copies_of(dtype, layout, rows, cols, copies)
    work = product(dtype, layout, weights, rows, cols, n_tokens)
    benchmark.group = f"mul_mat, {n_tokens} tokens"
    macs = copies * rows * cols * n_tokens
    gigas = {"GB/s": weights.nbytes / 1e9, "GMAC/s": macs / 1e9}
    measure(benchmark, work.kernel, work.blocks, gigas)
    assert np.isfinite(work.y).all()
