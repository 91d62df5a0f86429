"""attention: softmax(scale * q.k + mask) v, with grouped heads, in one pass over the cache.

The cache is read in tiles of 16 cells. A tile of K and of V is turned to float32 once, in the lane's
scratch, and serves up to TOKENS tokens and all query heads of the lane that read this kv head. Per
(token, head): 16 scores as one vector; running maximum, running sums and output rescaled when the
maximum grows (online softmax). Tiles come in order whoever works on them, so the result of a
(token, head) depends neither on the lanes nor on the tokens beside it.

Masked cells are read and worked on like others: that they cost nothing is not this op's business.
What lies in them must not matter, though, so their scores and values are replaced.
"""

from __future__ import annotations

from workbench.backend.cpu.mathfn import exp
from workbench.backend.cpu.vector import Emit, Value

CELLS = 16
TOKENS = 8


def padded(head_dim: int) -> int:
    return -(-head_dim // CELLS) * CELLS


def scratch_bytes(n_tokens: int, n_head: int, n_head_kv: int, head_dim: int, n_lanes: int) -> int:
    """Scratch of one launch: per lane two tiles, and q, output, maximum and sums per (token, head)."""
    pairs = min(n_tokens, TOKENS) * (n_head // n_head_kv)
    lane = 4 * (2 * CELLS * padded(head_dim) + pairs * (2 * padded(head_dim) + CELLS + 16))
    return n_lanes * lane


def attention(e: Emit, args: Value, lane: Value, n_lanes: Value) -> None:
    (dst, q, k, v, mask, scratch, n_tokens, n_head, n_head_kv, head_dim, n_kv,
     scale64) = e.arguments(args, "iiiiiiiiiiif")  # fmt: skip
    scale = scale64.to("f32")
    group = n_head // n_head_kv
    dim = (head_dim + (CELLS - 1)) // CELLS * CELLS
    pairs = e.min(n_tokens, TOKENS) * group
    kv_cols = n_head_kv * head_dim

    k_tile = scratch + lane * (dim * (2 * CELLS) + pairs * (dim * 2 + (CELLS + 16))) * 4
    v_tile = k_tile + dim * (4 * CELLS)
    states = v_tile + dim * (4 * CELLS)  # per pair: q, output (dim each), 16 sums, maximum
    state_bytes = (dim * 2 + (CELLS + 16)) * 4
    zero = e.const("i64", 0)

    def state(t: Value, h: Value) -> Value:
        return states + (t * group + h) * state_bytes

    n_blocks = (n_tokens + (TOKENS - 1)) // TOKENS
    start, stop = e.share(n_blocks * n_head, lane, n_lanes)
    with e.loop(start // group, (stop + group - 1) // group) as item:
        # item: (block of tokens, kv head); the lane may have only some of its query heads
        token0 = item // n_head_kv * TOKENS
        kv_head = item % n_head_kv
        n_block = e.min(n_tokens - token0, TOKENS)
        h0 = e.max(start - item * group, 0)
        h1 = e.min(stop - item * group, group)

        def q_at(t: Value, h: Value, token0=token0, kv_head=kv_head) -> Value:
            return ((token0 + t) * n_head + kv_head * group + h) * head_dim * 4

        with e.loop(0, n_block) as t, e.loop(h0, h1) as h:
            at = state(t, h)

            def prepare(c: Value, n: int, at=at, t=t, h=h) -> None:
                e.store(e.load("f32", q + q_at(t, h) + c * 4, n) * scale, at + c * 4)

            e.flat_loops(zero, head_dim, CELLS, prepare)
            _fill(e, at, head_dim, dim)
            _fill(e, at + dim * 4, zero, dim + CELLS)
            e.store(e.const("f32", float("-inf")), at + dim * 8 + CELLS * 4)

        with e.loop(0, n_kv, CELLS) as cell0:
            n_cells = e.min(n_kv - cell0, CELLS)
            with e.loop(0, e.const("i64", CELLS)) as c:
                # past n_kv the last cell stands in; its mask is -inf
                cell = e.min(cell0 + c, n_kv - 1)
                at = (cell * kv_cols + kv_head * head_dim) * 2
                _widen(e, k + at, k_tile + c * dim * 4, head_dim, dim)
                _widen(e, v + at, v_tile + c * dim * 4, head_dim, dim)
            with e.loop(0, n_block) as t:
                row = _mask_row(e, mask + ((token0 + t) * n_kv + cell0) * 2, n_cells)
                seen = row.compare("==", 0.0)
                hidden = e.sum(row.compare("!=", 0.0).to("u32"))
                all_seen = hidden.compare("==", 0)
                with e.loop(h0, h1) as h:
                    _tile(e, state(t, h), k_tile, v_tile, dim, seen, all_seen)

        with e.loop(0, n_block) as t, e.loop(h0, h1) as h:
            at = state(t, h)
            total = e.sum(e.load("f32", at + dim * 8, CELLS))
            none = total.compare("==", 0.0)
            factor = e.select(none, e.const("f32", 0.0), e.const("f32", 1.0) / total)

            def finish(c: Value, n: int, at=at, t=t, h=h, factor=factor) -> None:
                e.store(e.load("f32", at + dim * 4 + c * 4, n) * factor, dst + q_at(t, h) + c * 4)

            e.flat_loops(zero, head_dim, CELLS, finish)


def _fill(e: Emit, base: Value, start: Value, stop: Value) -> None:
    """Zeros in float32 elements start..stop-1."""
    e.flat_loops(start, stop, CELLS, lambda c, n: e.store(e.const("f32", 0.0, n), base + c * 4))


def _widen(e: Emit, src: Value, dst: Value, head_dim: Value, dim: Value) -> None:
    """head_dim float16 to float32, then zeros up to dim."""
    e.flat_loops(
        e.const("i64", 0), head_dim, CELLS,
        lambda c, n: e.store(e.load("f16", src + c * 2, n).to("f32"), dst + c * 4),
    )  # fmt: skip
    _fill(e, dst, head_dim, dim)


def _mask_row(e: Emit, at: Value, n_cells: Value) -> Value:
    """16 mask values as float32, -inf past n_cells."""
    row = e.var(e.const("f32", float("-inf"), CELLS))
    with e.when_else(n_cells.compare("==", CELLS)) as (full, partial):
        with full:
            row.set(e.load("f16", at, CELLS).to("f32"))
        with partial:
            copy = e.stack(2 * CELLS)
            e.store(e.const("u16", 0xFC00, CELLS), copy)
            with e.loop(0, n_cells) as c:
                e.store(e.load("u16", at + c * 2), copy + c * 2)
            row.set(e.load("f16", copy, CELLS).to("f32"))
    return row.get()


def _tile(
    e: Emit, at: Value, k_tile: Value, v_tile: Value, dim: Value, seen: Value, all_seen: Value
) -> None:
    """Take 16 cells into one (token, head): its q, output, sums and maximum are at `at`.

    A hidden cell has weight 0, but 0 times an infinity would be NaN: where there are hidden cells,
    values of weight 0 are taken as 0.
    """
    products = [e.var(e.const("f32", 0.0, CELLS)) for _ in range(CELLS)]
    with e.loop(0, dim, CELLS) as d:
        q = e.load("f32", at + d * 4, CELLS)
        for c, product in enumerate(products):
            k = e.load("f32", k_tile + dim * (4 * c) + d * 4, CELLS)
            product.set(e.fma(q, k, product.get()))
    lowest = e.const("f32", float("-inf"), CELLS)
    scores = e.select(seen, e.sum_each([p.get() for p in products]), lowest)

    output, sums_at, most_at = at + dim * 4, at + dim * 8, at + dim * 8 + CELLS * 4
    before = e.load("f32", most_at)
    most = e.max(before, e.reduce(scores, e.max))
    with e.when(most.compare(">", float("-inf"))):
        weights = exp(e, scores - most)
        shrink = exp(e, before - most)  # 0 for the first cells seen: before is -inf
        e.store(most, most_at)
        sums = e.load("f32", sums_at, CELLS)
        e.store(e.fma(sums, shrink, weights), sums_at)
        each = [e.splat(weights.element(c), CELLS) for c in range(CELLS)]

        def add_values(guard: bool) -> None:
            keep = [w.compare("!=", 0.0) if guard else None for w in each]
            with e.loop(0, dim, CELLS) as d:
                total = e.load("f32", output + d * 4, CELLS) * shrink
                for c in range(CELLS):
                    v = e.load("f32", v_tile + dim * (4 * c) + d * 4, CELLS)
                    kept = keep[c]
                    total = e.fma(each[c], v if kept is None else e.select(kept, v, 0.0), total)
                e.store(total, output + d * 4)

        with e.when_else(all_seen) as (plain, guarded):
            with plain:
                add_values(guard=False)
            with guarded:
                add_values(guard=True)
