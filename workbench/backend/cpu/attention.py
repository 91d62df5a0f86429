"""attention: softmax(scale * q.k + mask) v, with grouped heads, in one pass over the cache.

The cache is read in tiles of 16 cells. A tile of K and a tile of V are converted to float32 once,
in the part's own scratch. They serve up to TOKENS tokens and all query heads of the part that read
this kv head. Per (token, head) and tile, the 16 scores are one vector. The maximum so far, the
sums and the output are rescaled when the maximum grows (online softmax). Every part takes tiles in
the same order. The result of a (token, head) depends neither on n_parts nor on the other tokens.

Scores, weights and output are three loops over the pairs of (token, head), not one loop. The chain
of dependent operations in each loop is then short enough for the CPU to overlap several pairs.

Masked cells are read and computed like others; this op does not skip them. Their contents never
matter: masked scores are replaced by -inf, and values of weight 0 by 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from workbench.backend.cpu.mathfn import exp
from workbench.backend.cpu.vector import Emit, Value
from workbench.sizes import round_up

CELLS = 16
TOKENS = 8
_PAIR_STATE = 3 * CELLS  # float32 elements of a PairState beside q and output


class PairState(NamedTuple):
    """Addresses of one (token, head). q is scaled, and output is the output so far (dim float32
    each). Of a tile: 16 sums so far, and 16 scores, later weights. most: the maximum so far. The
    last is the factor that rescales earlier sums to a new maximum."""

    q: Value
    output: Value
    sums: Value
    scores: Value
    most: Value
    shrink: Value


def _pair_state(at: Value, dim: Value) -> PairState:
    after = at + dim * 8
    parts = (after, after + 64, after + 128, after + 132)
    return PairState(at, at + dim * 4, *parts)


def scratch_bytes(n_tokens: int, n_head: int, n_head_kv: int, head_dim: int, n_parts: int) -> int:
    """Bytes of scratch of one launch: per part two tiles, and a PairState per (token, head) of a
    block."""
    dim = round_up(head_dim, CELLS)
    pairs = min(n_tokens, TOKENS) * (n_head // n_head_kv)
    return n_parts * 4 * (2 * CELLS * dim + pairs * (2 * dim + _PAIR_STATE))


def attention(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Parts are pairs of (block of tokens, query head)."""
    (dst, q, k, v, mask, scratch, n_tokens, n_head, n_head_kv, head_dim, n_kv,
     scale64) = e.arguments(args, "iiiiiiiiiiif")  # fmt: skip
    scale = scale64.to("f32")
    group = n_head // n_head_kv
    dim = (head_dim + (CELLS - 1)) // CELLS * CELLS
    kv_cols = n_head_kv * head_dim
    state_bytes = (dim * 2 + _PAIR_STATE) * 4
    tile_bytes = dim * (4 * CELLS)
    most_pairs = e.min(n_tokens, TOKENS) * group
    k_tile = scratch + part * (tile_bytes * 2 + most_pairs * state_bytes)
    v_tile, states = k_tile + tile_bytes, k_tile + tile_bytes * 2
    zero = e.const("i64", 0)

    n_blocks = (n_tokens + (TOKENS - 1)) // TOKENS
    start, stop = e.share(n_blocks * n_head, part, n_parts)
    with e.loop(start // group, (stop + group - 1) // group) as item:
        # item: (block of tokens, kv head); the part may have only some of its query heads
        token0 = item // n_head_kv * TOKENS
        kv_head = item % n_head_kv
        n_block = e.min(n_tokens - token0, TOKENS)
        h0 = e.max(start - item * group, 0)
        h1 = e.min(stop - item * group, group)

        @contextmanager
        def pairs(
            n_block=n_block, h0=h0, h1=h1, token0=token0, kv_head=kv_head
        ) -> Iterator[tuple[Value, PairState, Value]]:
            """A loop over the pairs: the token, its state, and its byte offset in q and dst."""
            with e.loop(0, n_block) as t, e.loop(h0, h1) as h:
                token = token0 + t
                offset = (token * n_head + kv_head * group + h) * head_dim * 4
                yield token, _pair_state(states + (t * group + h) * state_bytes, dim), offset

        with pairs() as (_, state, offset):
            e.copy_floats(q + offset, state.q, 0, head_dim, scale)
            _zeros(e, state.q, head_dim, dim)
            _zeros(e, state.output, zero, dim + CELLS)  # and the sums behind it
            e.store(e.const("f32", float("-inf")), state.most)

        with e.loop(0, n_kv, CELLS) as cell0:
            with e.loop(0, e.const("i64", CELLS)) as c:
                # past n_kv, the last cell stands in, with mask -inf
                cell = e.min(cell0 + c, n_kv - 1)
                at = (cell * kv_cols + kv_head * head_dim) * 2
                _widen(e, k + at, k_tile, c, head_dim, dim)
                _widen(e, v + at, v_tile, c, head_dim, dim)
            n_cells = e.min(n_kv - cell0, CELLS)
            with pairs() as (token, state, _):
                row = _mask_row(e, mask + (token * n_kv + cell0) * 2, n_cells)
                _score(e, state, k_tile, dim, row.compare("==", 0.0))
            with pairs() as (_, state, _):
                _weigh(e, state)
            with pairs() as (_, state, _):
                _add_values(e, state, v_tile, dim)

        with pairs() as (_, state, offset):
            total = e.sum(e.load("f32", state.sums, CELLS))
            none = total.compare("==", 0.0)
            factor = e.select(none, e.const("f32", 0.0), e.const("f32", 1.0) / total)
            e.copy_floats(state.output, dst + offset, 0, head_dim, factor)


def _zeros(e: Emit, base: Value, start: Value, stop: Value) -> None:
    """Stores 0 in float32 elements start..stop-1."""
    e.flat_loops(start, stop, CELLS, lambda c, n: e.store(e.const("f32", 0.0, n), base + c * 4))


def _widen(e: Emit, src: Value, tile: Value, cell: Value, head_dim: Value, dim: Value) -> None:
    """Stores one cell's head_dim float16 in the tile as float32, then zeros up to dim.

    A tile is (dim/16, 16 cells, 16) float32: elements that are read together lie at fixed
    distances.
    """
    column = tile + cell * (4 * CELLS)

    def at(c: Value) -> Value:
        return column + (c // CELLS) * (4 * CELLS * CELLS) + (c % CELLS) * 4

    def step(c: Value, n: int) -> None:
        e.store(e.load("f16", src + c * 2, n).to("f32"), at(c))

    e.flat_loops(e.const("i64", 0), head_dim, CELLS, step)
    with e.loop(head_dim, dim) as c:
        e.store(e.const("f32", 0.0), at(c))


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


def _score(e: Emit, state: PairState, k_tile: Value, dim: Value, seen: Value) -> None:
    """Stores q.k of 16 cells, and -inf for a cell that is not seen."""
    products = [e.var(e.const("f32", 0.0, CELLS)) for _ in range(CELLS)]
    with e.loop(0, dim, CELLS) as d:
        q = e.load("f32", state.q + d * 4, CELLS)
        for c, product in enumerate(products):
            k = e.load("f32", k_tile + d * (4 * CELLS) + 4 * CELLS * c, CELLS)
            product.set(e.fma(q, k, product.get()))
    scores = e.sum_each([p.get() for p in products])
    e.store(e.select(seen, scores, float("-inf")), state.scores)


def _weigh(e: Emit, state: PairState) -> None:
    """Turns scores into weights e^(score - maximum), and updates maximum, factor and sums."""
    scores, before = e.load("f32", state.scores, CELLS), e.load("f32", state.most)
    most = e.max(before, e.reduce(scores, e.max))
    # no cell seen so far: any finite maximum gives weights of 0
    base = e.select(most.compare("==", float("-inf")), e.const("f32", 0.0), most)
    weights, shrink = exp(e, scores - base), exp(e, before - base)
    e.store(weights, state.scores)
    e.store(most, state.most)
    e.store(shrink, state.shrink)
    e.store(e.fma(e.load("f32", state.sums, CELLS), shrink, weights), state.sums)


def _add_values(e: Emit, state: PairState, v_tile: Value, dim: Value) -> None:
    """output = output * shrink + weights of 16 cells times their values.

    0 times an infinity would be NaN, so a value with weight 0 counts as 0.
    """
    weights, shrink = e.load("f32", state.scores, CELLS), e.load("f32", state.shrink)
    each = [e.splat(weights.element(c), CELLS) for c in range(CELLS)]

    def add(guard: bool) -> None:
        keep = [w.compare("!=", 0.0) if guard else None for w in each]
        with e.loop(0, dim, CELLS) as d:
            total = e.load("f32", state.output + d * 4, CELLS) * shrink
            for c, kept in enumerate(keep):
                v = e.load("f32", v_tile + d * (4 * CELLS) + 4 * CELLS * c, CELLS)
                total = e.fma(each[c], v if kept is None else e.select(kept, v, 0.0), total)
            e.store(total, state.output + d * 4)

    n_zero = e.sum(weights.compare("==", 0.0).to("u32"))
    with e.when_else(n_zero.compare("==", 0)) as (plain, guarded):
        with plain:
            add(guard=False)
        with guarded:
            add(guard=True)
