"""kv_extents and kv_classes: what each token sees of the cache (`engine/cache/extent.py`). Parts
are ranges of tokens."""

from __future__ import annotations

from workbench.backend.cpu.kernels.vector import Emit, Value
from workbench.graph.shapes import CLASS_CELLS, EXTENT_CELLS


def kv_extents(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Goes through the mask of a token from its end, and stops at the first cell that is seen."""
    dst, mask, n_tokens, n_kv = e.arguments(args, "iiii")
    start, stop = e.share(n_tokens, part, n_parts)
    steps = (n_kv + (EXTENT_CELLS - 1)) // EXTENT_CELLS
    with e.loop(start, stop) as token:
        found = e.var(e.const("i64", 0))
        row = mask + token * n_kv * 2
        with e.loop(e.const("i64", 0), steps) as i, e.when(found.get().compare("==", 0)):
            step = steps - 1 - i
            end = e.min((step + 1) * EXTENT_CELLS, n_kv)
            with e.when(_n_seen(e, row, step * EXTENT_CELLS, end).compare("!=", 0)):
                found.set(end)
        e.store(found.get().to("i32"), dst + token * 4)


def kv_classes(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Counts the cells of each class that are seen."""
    dst, mask, n_tokens, n_kv = e.arguments(args, "iiii")
    n = (n_kv + (CLASS_CELLS - 1)) // CLASS_CELLS
    start, stop = e.share(n_tokens * n, part, n_parts)
    with e.loop(start, stop) as item:
        row, first = mask + item // n * n_kv * 2, item % n * CLASS_CELLS
        end = e.min(first + CLASS_CELLS, n_kv)
        seen = _n_seen(e, row, first, end)
        one, two = e.const("i64", 1), e.const("i64", 2)
        some = e.select(seen.compare("==", 0), e.const("i64", 0), one)
        e.store(e.select(seen.compare("==", end - first), two, some).to("u8"), dst + item)


def _n_seen(e: Emit, row: Value, first: Value, end: Value) -> Value:
    """How many of a token's cells first..end-1 are not masked."""
    seen = e.var(e.const("i64", 0))

    def step(c: Value, n: int) -> None:
        is_seen = e.load("u16", row + c * 2, n).compare("!=", 0xFC00)
        seen.set(seen.get() + e.sum(is_seen.to("u32")).to("i64"))

    e.flat_loops(first, end, 16, step)
    return seen.get()
