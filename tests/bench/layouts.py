"""Which layout of weights is faster on this CPU, by type, shape and batch.

`python -m tests.bench.layouts FILE.json [ISA ...]` times `mul_mat` of few tokens with the weights
as in the file and as rows16, on N_THREADS threads, from cold memory. ISA names instruction sets of
`cpu/isa.py`; without, the best that this CPU has.

The two layouts take turns, each first as often as second, so that what else the machine does falls
on both. Of each pair the ratio rows16 / file is kept: below 1, rows16 is faster. New memory is
taken for every trial, for where pages lie is part of the spread. The file has, of all pairs of all
trials, the median of the ratio and its quartiles, the median of each trial, and of each layout
the least and the median time in us of one product.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tests.backend.cpu.kernel_runs import repack
from workbench.backend.cpu.compile import host_isas
from workbench.backend.cpu.kernels import op_table
from workbench.benchmarks.runs import provenance
from workbench.common.output import write_text
from workbench.graph.ir import DTYPES, F32, Q8_ACT, QUANTISED, WEIGHT_DTYPES, DType, Kind, Tensor
from workbench.graph.ops import make
from workbench.model.gguf.quants import quantize_activations, random_blocks

N_THREADS = 2
COLD_BYTES = 256 << 20  # of one layout's copies of a weight: more than caches keep
SHAPES = ((8192, 2048), (2048, 8192))
BATCHES = (1, 2, 4, 8)
TRIALS = 3
PAIRS = 40  # of a trial


class Product(NamedTuple):
    """A kernel, its argument blocks (one per copy of the weight), what they point to, and y."""

    kernel: Callable[[int, int, int], None]
    blocks: list[np.ndarray]
    weights: np.ndarray
    x: np.ndarray
    y: np.ndarray

    def compute(self, part: int) -> None:
        """Part `part` of the product with every copy, in order."""
        for block in self.blocks:
            self.kernel(int(block.ctypes.data), part, N_THREADS)


def cold_copies(dtype: DType, rows: int, cols: int, layout: str) -> int:
    """How many copies of a weight take COLD_BYTES."""
    return -(-COLD_BYTES // op_table.repacked_bytes(dtype, rows, cols, layout))


def copies_of(dtype: DType, layout: str, rows: int, cols: int, copies: int) -> np.ndarray:
    """(copies, bytes) u8: the same random weight in a layout, every copy in its own memory."""
    blocks = random_blocks(np.random.default_rng(0), dtype, rows, cols, 0.02)
    weights = np.empty((copies, op_table.repacked_bytes(dtype, rows, cols, layout)), np.uint8)
    repack(weights.ctypes.data, blocks.ctypes.data, dtype, rows, cols, layout)
    weights[1:] = weights[0]
    return weights


def product(
    dtype: DType, layout: str, weights: np.ndarray, rows: int, cols: int, n_tokens: int,
    isa: str | None = None,
) -> Product:  # fmt: skip
    """What the embedded device launches for n_tokens, for each of the copies."""
    x = np.random.default_rng(1).standard_normal((n_tokens, cols)).astype(np.float32)
    given = quantize_activations(x) if dtype in QUANTISED else x
    y = np.full((n_tokens, rows), np.nan, np.float32)
    at = [[y.ctypes.data, w.ctypes.data, given.ctypes.data] for w in weights]
    blocks = [np.array([*each, rows, cols, n_tokens], np.int64) for each in at]
    w = Tensor("w", dtype, (rows, cols), Kind.WEIGHT)
    node = make("mul_mat", "y", w, Tensor("x", Q8_ACT if dtype in QUANTISED else F32, x.shape))
    kernel = op_table.kernel(op_table.kernel_of(node), layout, isa).ctypes
    return Product(kernel, blocks, weights, given, y)


def pairs(products: list[Product], pool: ThreadPoolExecutor, n: int) -> np.ndarray:
    """(n, 2) seconds of one run of each of two products, taking turns."""
    seconds = np.empty((n, 2))
    for i in range(-1, n):  # round -1 warms up
        for which in (0, 1) if i % 2 else (1, 0):
            begin = time.perf_counter()
            list(pool.map(products[which].compute, range(N_THREADS)))
            seconds[i, which] = time.perf_counter() - begin
    return seconds


def measure(dtype: DType, rows: int, cols: int, isa: str, pool: ThreadPoolExecutor) -> list[dict]:
    """One row per batch: see the module."""
    copies = cold_copies(dtype, rows, cols, "file")
    trials: dict[int, list[np.ndarray]] = {n: [] for n in BATCHES}
    for _ in range(TRIALS):
        both = [copies_of(dtype, layout, rows, cols, copies) for layout in op_table.LAYOUTS]
        for n_tokens in BATCHES:
            two = [
                product(dtype, layout, weights, rows, cols, n_tokens, isa)
                for layout, weights in zip(op_table.LAYOUTS, both, strict=True)
            ]
            trials[n_tokens].append(pairs(two, pool, PAIRS))
            if not np.array_equal(two[0].y, two[1].y):
                raise RuntimeError(f"{dtype.name}: the layouts differ in their results")
    found = []
    for n_tokens, parts in trials.items():
        seconds = np.concatenate(parts)
        ratio, us = seconds[:, 1] / seconds[:, 0], seconds * 1e6 / copies
        least, median = us.min(0).round(1).tolist(), np.median(us, 0).round(1).tolist()
        found.append({
            "isa": isa, "type": dtype.name, "rows": rows, "cols": cols, "batch": n_tokens,
            "ratio": round(float(np.median(ratio)), 3),
            "quartiles": [round(float(q), 3) for q in np.quantile(ratio, (0.25, 0.75))],
            "trials": [round(float(np.median(p[:, 1] / p[:, 0])), 3) for p in parts],
            "least_us": dict(zip(op_table.LAYOUTS, least, strict=True)),
            "median_us": dict(zip(op_table.LAYOUTS, median, strict=True)),
        })  # fmt: skip
        print(*found[-1].values(), flush=True)
    return found


def main(path: str, isas: list[str]) -> None:
    record = {
        "date": provenance.utc_now(), "commit": provenance.commit(),
        "machine": provenance.machine(), "threads": N_THREADS, "cold_bytes": COLD_BYTES,
        "pairs": TRIALS * PAIRS,
    }  # fmt: skip
    with ThreadPoolExecutor(N_THREADS) as pool:
        rows = [
            json.dumps(row)
            for isa in isas or [host_isas()[0].name]
            for dtype in (DTYPES[d.name] for d in WEIGHT_DTYPES if d in QUANTISED)
            for shape in SHAPES
            for row in measure(dtype, *shape, isa, pool)
        ]
    every = ",\n".join(rows)
    write_text(path, f'{json.dumps(record)[:-1]}, "products": [\n{every}\n]}}\n')


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
