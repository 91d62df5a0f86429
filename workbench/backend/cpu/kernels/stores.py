"""Stores of K and V into the cache: F32 rows become cells of the cache's type.

Rounding is to nearest, ties to even; blocks of Q8_0 are made as ggml makes them
(`quantize_row_q8_0_ref`): scale = max|x| / 127, quants rounded half away from zero.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.backend.cpu.kernels.cells import CELL_TYPES
from workbench.backend.cpu.kernels.vector import Body, Emit, Value


def set_rows(dtype: str) -> Body:
    """Parts are ranges of columns: of two tokens for one cell, the last wins."""
    types = CELL_TYPES[dtype]

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        cache, x, indices, n_tokens, cols, n_kv = e.arguments(args, "iiiiii")
        start, stop = types.share(e, cols, part, n_parts)
        row_bytes = types.nbytes(cols)
        with e.loop(0, n_tokens) as t:
            index = e.load("i64", indices + t * 8)
            with e.when(index.compare(">=", 0)), e.when(index.compare("<", n_kv)):
                types.write(e, x + t * cols * 4, cache + index * row_bytes, start, stop)

    return body


def copy_to_view(dtype: str) -> Body:
    """Stores rows that lie one after the other."""
    types = CELL_TYPES[dtype]

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, x, n_tokens, cols = e.arguments(args, "iiii")
        start, stop = types.share(e, n_tokens * cols, part, n_parts)
        types.write(e, x, dst, start, stop)

    return body


def copy_by_table(dtype: str) -> Body:
    """As copy_to_view, from the row of a cache whose number is an entry of a table. A first row
    below -n_tokens or above n_kv stores nothing, so no sum overflows."""
    types = CELL_TYPES[dtype]

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        cache, x, table, store, n_tokens, cols, n_kv = e.arguments(args, "iiiiiii")
        start, stop = types.share(e, n_tokens * cols, part, n_parts)
        row = e.load("i64", table + store * 8)
        with e.when((row + n_tokens).compare(">", 0)), e.when(row.compare("<", n_kv)):
            first = e.max(start, (0 - row) * cols)
            last = e.min(stop, (n_kv - row) * cols)
            with e.when(first.compare("<", last)):
                row_bytes = types.nbytes(cols)
                types.write(e, x, cache + row * row_bytes, first, last)

    return body


def copy_cells(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Parts are ranges of pairs. Rows are multiples of 2 bytes."""
    cache, pairs, n_pairs, row_bytes, n_cells = e.arguments(args, "iiiii")
    start, stop = e.share(n_pairs, part, n_parts)
    with e.loop(start, stop) as i:
        to, whence = (e.load("i64", pairs + i * 16 + 8 * side) for side in range(2))
        low, high = e.min(to, whence), e.max(to, whence)
        with e.when(low.compare(">=", 0)), e.when(high.compare("<", n_cells)):
            dst, src = cache + to * row_bytes, cache + whence * row_bytes

            def step(c: Value, n: int, dst=dst, src=src) -> None:
                e.store(e.load("u16", src + c * 2, n), dst + c * 2)

            e.flat_loops(e.const("i64", 0), row_bytes // 2, 16, step)


BODIES: dict[str, Callable[[str], Body]] = {
    "set_rows": set_rows, "copy_to_view": copy_to_view, "copy_by_table": copy_by_table,
}  # fmt: skip
