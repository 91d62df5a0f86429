"""attention: softmax(scale * q.k + mask) v, with grouped heads, in one pass over the cache.

The cache is read in tiles of 16 cells. A tile of K and a tile of V are converted to float32 once,
in the part's own scratch. They serve up to TOKENS tokens of one sequence (one with
attn_kernel=vec) and all query heads of the part that read this kv head. Per (token, head) and tile,
the 16 scores are one vector. The maximum so far, the sums and the output are rescaled when the
maximum grows (online softmax). Every part takes tiles in the same order. So the result of a (token,
head) does not depend on n_parts. Nor does it depend on the other tokens, except with stream_k.

Scores, weights and output are three loops over the pairs of (token, head), not one loop. The chain
of dependent operations in each loop is then short enough for the CPU to overlap several pairs.

Masked cells: their contents never matter, for masked scores are replaced by -inf, and values of
weight 0 by 0. A tile that is masked for all tokens may be passed over (`skip`): it would change
nothing but the sign of a zero, which `_finish` takes away.

Several shares (`kv_parts`) have a part of the tiles each. The results of a share lie in scratch:
maximum, sum of weights, and sums of values. A second kernel, `attention_combine`, merges them in
the order of their shares.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

from workbench.backend.cpu.kernels.cells import CELL_TYPES, CellType
from workbench.backend.cpu.kernels.kv_shares import CELLS, SKIPS, TOKENS, found_bytes
from workbench.backend.cpu.kernels.mathfn import exp
from workbench.backend.cpu.kernels.vector import Body, Emit, Value
from workbench.common.sizes import round_up
from workbench.config import SkipMaskedKV
from workbench.graph.shapes import CLASS_CELLS

_PAIR_STATE = 3 * CELLS  # float32 elements of a PairState beside q and output


class PairState(NamedTuple):
    """Addresses that belong to one (token, head).

    q: the scaled query, dim float32.
    output: the output so far, dim float32.
    sums: 16 sums of weights so far, an element for each cell of a tile.
    scores: 16 scores of a tile, later its weights.
    most: the maximum so far.
    shrink: the factor that rescales earlier sums to a new maximum.
    """

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


def scratch_bytes(
    n_tokens: int, n_head: int, n_head_kv: int, head_dim: int, n_parts: int, n_shares: int
) -> int:
    """Bytes of scratch of one launch: the results of all shares; for each part two tiles, and a
    PairState for each (token, head) of a block."""
    dim = round_up(head_dim, CELLS)
    pairs = min(n_tokens, TOKENS) * (n_head // n_head_kv)
    own = n_parts * 4 * (2 * CELLS * dim + pairs * (2 * dim + _PAIR_STATE))
    return own + found_bytes(n_tokens, n_head, head_dim, n_shares)


# names and kinds of the arguments, for both kernels (`backend/issue/args.py`)
_ARGUMENTS = "i" * 20 + "f"


class _Args:
    """The arguments of both kernels, and sizes that follow from them."""

    def __init__(self, e: Emit, args: Value):
        (self.dst, self.q, self.k, self.v, self.mask, self.scratch, self.regions, self.extents,
         self.classes, self.sinks, self.n_tokens, self.n_head, self.n_head_kv, self.head_dim,
         self.n_kv, self.n_regions, self.skip, self.n_shares, self.piece, self.tokens,
         scale) = e.arguments(args, _ARGUMENTS)  # fmt: skip
        self.scale = scale.to("f32")
        self.group = self.n_head // self.n_head_kv
        self.dim = (self.head_dim + (CELLS - 1)) // CELLS * CELLS
        self.tiles = (self.n_kv + (CELLS - 1)) // CELLS

    def found(self, token: Value, head: Value, share: Value) -> Value:
        """Where a share leaves its results for a (token, head)."""
        each = (self.head_dim + 2) * 4
        return self.scratch + ((token * self.n_head + head) * self.n_shares + share) * each

    def after_found(self, e: Emit) -> Value:
        """Where the parts' own scratch begins."""
        nbytes = self.n_tokens * self.n_head * self.n_shares * (self.head_dim + 2) * 4
        one = self.n_shares.compare("==", 1)
        return self.scratch + e.select(one, e.const("i64", 0), nbytes)


def attention_body(
    k_type: str, v_type: str, on_tile: Callable[[Emit], None] = lambda e: None
) -> Body:
    """The kernel for a cache of these types. Parts are (block of tokens, share, query head).

    on_tile: emits code that runs at each visited tile, once for each kv head (tests).
    """

    def attention(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        types = CELL_TYPES[k_type], CELL_TYPES[v_type]
        _attention(e, _Args(e, args), part, n_parts, *types, on_tile)

    return attention


def _attention(
    e: Emit, a: _Args, part: Value, n_parts: Value, k_cells: CellType, v_cells: CellType,
    on_tile: Callable[[Emit], None],
) -> None:  # fmt: skip
    dim, group, head_dim = a.dim, a.group, a.head_dim
    kv_cols = a.n_head_kv * head_dim
    state_bytes = (dim * 2 + _PAIR_STATE) * 4
    tile_bytes = dim * (4 * CELLS)
    most_pairs = e.min(a.n_tokens, TOKENS) * group
    k_tile = a.after_found(e) + part * (tile_bytes * 2 + most_pairs * state_bytes)
    v_tile, states = k_tile + tile_bytes, k_tile + tile_bytes * 2
    zero, one = e.const("i64", 0), e.const("i64", 1)

    n_blocks = (a.n_tokens + (a.tokens - 1)) // a.tokens
    start, stop = e.share(n_blocks * a.n_shares * a.n_head, part, n_parts)
    rows = e.select(a.regions.compare("==", 0), one, a.n_regions)
    with (
        e.loop(start // group, (stop + group - 1) // group) as item,
        e.loop(zero, rows) as row,
    ):
        # item: (block of tokens, share, kv head); the part may have only some of its query heads.
        # row: of the regions, a sequence whose tokens may be in the block
        kv_head = item % a.n_head_kv
        share = item // a.n_head_kv % a.n_shares
        first = item // a.n_head_kv // a.n_shares * a.tokens
        first, past, base = _tokens_of(e, a, row, rows, first)
        h0 = e.max(start - item * group, 0)
        h1 = e.min(stop - item * group, group)

        @contextmanager
        def pairs(first=first, past=past, h0=h0, h1=h1, kv_head=kv_head):
            """A loop over the pairs: the token, its head, and its state."""
            with e.loop(first, past) as token, e.loop(h0, h1) as h:
                state = _pair_state(states + ((token - first) * group + h) * state_bytes, dim)
                yield token, kv_head * group + h, state

        with e.when(first.compare("<", past)):
            with pairs() as (token, head, state):
                at = a.q + (token * a.n_head + head) * head_dim * 4
                e.copy_floats(at, state.q, 0, head_dim, a.scale)
                _zeros(e, state.q, head_dim, dim)
                _zeros(e, state.output, zero, dim + CELLS)  # and the sums, which follow the output
                e.store(e.const("f32", float("-inf")), state.most)

            begin, n_own, stride = _tiles_of(e, a, share, first, kv_head)
            end = _last_cell(e, a, first, past)
            with e.loop(zero, n_own) as number:
                cell0 = (begin + number * stride) * CELLS
                with e.when(_is_seen(e, a, cell0, end, first, past)):
                    on_tile(e)
                    with e.loop(zero, e.const("i64", CELLS)) as c:
                        # past n_kv, the last cell stands in, with mask -inf
                        cell = base + e.min(cell0 + c, a.n_kv - 1)
                        for types, cells, tile in ((k_cells, a.k, k_tile), (v_cells, a.v, v_tile)):
                            at = cells + types.nbytes(cell * kv_cols + kv_head * head_dim)
                            _widen(e, types, at, tile, c, head_dim, dim)
                    n_cells = e.min(a.n_kv - cell0, CELLS)
                    with pairs() as (token, _, state):
                        at = a.mask + (token * a.n_kv + cell0) * 2
                        seen = _mask_row(e, at, n_cells)
                        _score(e, state, k_tile, dim, seen.compare("==", 0.0))
                    with pairs() as (_, _, state):
                        _weigh(e, state)
                    with pairs() as (_, _, state):
                        _add_values(e, state, v_tile, dim)

            with pairs() as (token, head, state):
                total = e.sum(e.load("f32", state.sums, CELLS))
                most = e.load("f32", state.most)
                with e.when_else(a.n_shares.compare("==", 1)) as (whole, partial):
                    with whole:
                        at = a.dst + (token * a.n_head + head) * head_dim * 4
                        _finish(e, a, head, state.output, at, most, total)
                    with partial:
                        found = a.found(token, head, share)
                        e.store(most, found)
                        e.store(total, found + 4)
                        e.copy_floats(state.output, found + 8, 0, head_dim)


def _tokens_of(
    e: Emit, a: _Args, row: Value, rows: Value, first: Value
) -> tuple[Value, Value, Value]:
    """The tokens of a region in the block that begins with token `first`: the first token, the
    first token past them, and the region's first cell."""
    past = e.min(first + a.tokens, a.n_tokens)
    begin, end, base = e.var(first), e.var(past), e.var(e.const("i64", 0))
    with e.when(a.regions.compare("!=", 0)):
        at = a.regions + row * 8
        begin.set(e.max(first, e.load("i32", at).to("i64")))
        base.set(e.load("i32", at + 4).to("i64"))
        with e.when((row + 1).compare("<", rows)):
            end.set(e.min(past, e.load("i32", at + 8).to("i64")))
    return begin.get(), end.get(), base.get()


def _tiles_of(
    e: Emit, a: _Args, share: Value, token: Value, kv_head: Value
) -> tuple[Value, Value, Value]:
    """The tiles of a share: the first tile, how many there are, and the distance to the next. Where
    tiles are cut into pieces, row i begins at tile i times the number of tiles of a row."""
    zero = e.const("i64", 0)
    begin, n_own, stride = e.var(share), e.var(zero), e.var(a.n_shares)
    with e.when_else(a.piece.compare("==", 0)) as (dealt, cut):
        with dealt:
            n_own.set(e.max(a.tiles - share + a.n_shares - 1, 0) // a.n_shares)
        with cut:
            low = (token * a.n_head_kv + kv_head) * a.tiles
            edge = (low // a.piece + share) * a.piece
            here = e.max(edge - low, 0)
            begin.set(here)
            n_own.set(e.max(e.min(edge + a.piece - low, a.tiles) - here, 0))
            stride.set(e.const("i64", 1))
    return begin.get(), n_own.get(), stride.get()


def _last_cell(e: Emit, a: _Args, first: Value, past: Value) -> Value:
    """The end of the cells that some token sees: n_kv, or the greatest extent of the tokens."""
    end = e.var(a.n_kv)
    with e.when(a.skip.compare("==", SKIPS[SkipMaskedKV.TAIL])):
        end.set(e.const("i64", 0))
        with e.loop(first, past) as token:
            end.set(e.max(end.get(), e.load("i32", a.extents + token * 4).to("i64")))
    return end.get()


def _is_seen(e: Emit, a: _Args, cell0: Value, end: Value, first: Value, past: Value) -> Value:
    """Whether a tile has to be visited: it begins before `end`, and some token sees a cell of it. A
    kernel that skips by extents alone looks at `end` only."""
    n_seen = e.var(e.select(cell0.compare("<", end), e.const("i64", 1), 0))
    with e.when(a.skip.compare("==", SKIPS[SkipMaskedKV.IN_LOOP])):
        n_seen.set(e.const("i64", 0))
        n_cells = e.min(a.n_kv - cell0, CELLS)
        with e.loop(first, past) as token:
            row = _mask_row(e, a.mask + (token * a.n_kv + cell0) * 2, n_cells)
            n_seen.set(n_seen.get() + e.sum(row.compare("==", 0.0).to("u32")).to("i64"))
    with e.when(a.skip.compare("==", SKIPS[SkipMaskedKV.CLASSES])):
        n_seen.set(e.const("i64", 0))
        each = (a.n_kv + (CLASS_CELLS - 1)) // CLASS_CELLS
        with e.loop(first, past) as token:
            at = a.classes + token * each + cell0 // CLASS_CELLS
            n_seen.set(n_seen.get() + e.load("u8", at).to("i64"))
    return n_seen.get().compare("!=", 0)


def _finish(
    e: Emit, a: _Args, head: Value, sums: Value, dst: Value, most: Value, total: Value
) -> None:
    """Stores sums / total, after a head's sink has added to the total. A (token, head) that sees no
    cell gets zeros."""
    all_of, shrink = e.var(total), e.var(e.const("f32", 1.0))
    with e.when(a.sinks.compare("!=", 0)):
        sink = e.load("f32", a.sinks + head * 4)
        top = e.max(most, sink)
        shrink.set(exp(e, most - top))
        all_of.set(e.fma(total, shrink.get(), exp(e, sink - top)))
    none = total.compare("==", 0.0)
    factor = e.select(none, e.const("f32", 0.0), shrink.get() / all_of.get())

    def step(i: Value, n: int) -> None:
        value = e.load("f32", sums + i * 4, n) * e.splat(factor, n)
        e.store(
            value + e.const("f32", 0.0, n), dst + i * 4
        )  # -0 + 0 is 0: the sign of a zero says nothing

    e.flat_loops(e.const("i64", 0), a.head_dim, CELLS, step)


def attention_combine(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
    """Merges the results of all shares. Parts are ranges of (token, head)."""
    a = _Args(e, args)
    start, stop = e.share(a.n_tokens * a.n_head, part, n_parts)
    each = (a.head_dim + 2) * 4
    zero = e.const("i64", 0)
    with e.loop(start, stop) as pair:
        found = a.scratch + pair * a.n_shares * each
        most = e.var(e.const("f32", float("-inf")))
        with e.loop(zero, a.n_shares) as share:
            most.set(e.max(most.get(), e.load("f32", found + share * each)))
        top = e.select(most.get().compare("==", float("-inf")), e.const("f32", 0.0), most.get())
        total = e.var(e.const("f32", 0.0))
        with e.loop(zero, a.n_shares) as share:  # the first one has the sums
            at = found + share * each
            weight = exp(e, e.load("f32", at) - top)
            total.set(e.fma(e.load("f32", at + 4), weight, total.get()))

            def step(i: Value, n: int, at=at, share=share, weight=weight) -> None:
                own = e.load("f32", at + 8 + i * 4, n) * e.splat(weight, n)
                so_far = e.load("f32", found + 8 + i * 4, n)
                is_first = e.splat(share.compare("==", 0), n)
                e.store(e.select(is_first, own, so_far + own), found + 8 + i * 4)

            e.flat_loops(zero, a.head_dim, CELLS, step)
        _finish(e, a, pair % a.n_head, found + 8, a.dst + pair * a.head_dim * 4, most.get(),
                total.get())  # fmt: skip


def _zeros(e: Emit, base: Value, start: Value, stop: Value) -> None:
    """Stores 0 in float32 elements start..stop-1."""
    e.flat_loops(start, stop, CELLS, lambda c, n: e.store(e.const("f32", 0.0, n), base + c * 4))


def _widen(
    e: Emit, types: CellType, src: Value, tile: Value, cell: Value, head_dim: Value, dim: Value
) -> None:
    """Stores one cell's head_dim values in the tile as float32, then zeros up to dim.

    A tile is (dim/16, 16 cells, 16) float32: elements that are read together lie at fixed
    distances.
    """
    column = tile + cell * (4 * CELLS)

    def at(c: Value) -> Value:
        return column + (c // CELLS) * (4 * CELLS * CELLS) + (c % CELLS) * 4

    def step(c: Value, n: int) -> None:
        e.store(types.load(e, src, c, n), at(c))

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
    """Stores the scores q.k of 16 cells; -inf for a cell that the token does not see."""
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
