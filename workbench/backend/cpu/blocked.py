"""mul_mat of quantised weights by panels: a panel of weights is decoded once for CHUNK tokens.

    for each CHUNK of tokens
        for each panel of 16 * n_groups rows                      (lanes share the panels)
            sums[token, row] = 0
            for each TILE_COLS columns
                tile = the panel's columns, decoded
                for each `tile.tokens` tokens: sums += tile . activations

Tile, sums and the activations beside the tile stay in the first cache levels. In the inner loop
every vector of weights meets several tokens and every splatted activation several groups of rows,
so that neither kind of load is the limit.

Two kernels are made this way. `blocked_body` multiplies codes by Q8_ACT, with the arithmetic of
matvec.py in its order, so with its bits. `dequantised_body` is the float path: the weights'
float32 values, those of get_rows to the bit, by float32 activations; 256 columns are summed by a
chain of fma, and added to what the columns before gave.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.backend.cpu.decode import Block, Code, code_of
from workbench.backend.cpu.interleave import FORMATS, GROUP, pack_unit, row_addresses
from workbench.backend.cpu.isa import Isa, Tile, dot4
from workbench.backend.cpu.matvec import (
    CHUNK,
    TILE_COLS,
    add_block,
    columns,
    scales,
    starts,
    store_group,
    token_row,
)
from workbench.backend.cpu.vector import Body, Emit, Value

VECTOR = 64  # bytes of 16 float32, or of 4 codes of 16 rows
SUBS = TILE_COLS // 32  # blocks of 32 columns of a tile

Store = Callable[[Emit, Value, Block], None]  # emit, where the block's group goes, block
# emit, first block of 32 of the tile, how many, tokens, and where their sums lie
Multiply = Callable[[Emit, Value, Value, list[Value], list[Value]], None]


def _body(
    dtype: str, layout: str, isa: Isa, tile: Tile, sub_bytes: int, store: Store,
    multiply: Callable[[Value, Value, Value], Multiply],
) -> Body:  # fmt: skip
    """What both kernels share. sub_bytes: of one decoded block of 32 columns of a panel.

    multiply(address of the tile, of the activations, cols) gives the product of a tile.
    """
    fmt, code = FORMATS[dtype], code_of(dtype, isa)
    unit_bytes, unit_subs = fmt.block_bytes * GROUP, fmt.cols // 32

    def body(e: Emit, args: Value, lane: Value, n_lanes: Value) -> None:
        dst, w, x, n_rows, cols, n_tokens = e.arguments(args, "iiiiii")
        n_units = cols // fmt.cols
        group_bytes = n_units * unit_bytes
        n_groups = (n_rows + (GROUP - 1)) // GROUP
        packed = e.stack(unit_bytes) if layout == "file" else None
        decoded = e.stack(SUBS * sub_bytes)
        sums = e.stack(-(-CHUNK // tile.tokens) * tile.tokens * tile.groups * VECTOR)
        product = multiply(decoded, x, cols)
        start, stop = e.share((n_groups + (tile.groups - 1)) // tile.groups, lane, n_lanes)

        def decode(panel: Value, first: Value, last: Value) -> None:
            """Units first..last-1 of the panel; the last group stands in for those past it."""
            with e.loop(0, e.const("i64", tile.groups)) as g:
                group = e.min(panel * tile.groups + g, n_groups - 1)
                rows = row_addresses(e, w, group * GROUP, n_rows, n_units * fmt.block_bytes)
                with e.loop(first, last) as u:
                    if packed is None:
                        unit = w + group * group_bytes + u * unit_bytes
                    else:
                        unit = packed
                        pack_unit(e, fmt, packed, rows, u * fmt.block_bytes)
                    place = decoded + (u - first) * (unit_subs * sub_bytes) + g * VECTOR
                    code.unit(
                        e, isa, unit,
                        lambda b: store(e, place + b.sub * sub_bytes, b),
                    )  # fmt: skip

        def panel_chunk(panel: Value, t0: Value, t1: Value) -> None:
            with e.loop(0, (t1 - t0) * (tile.groups * VECTOR), VECTOR) as at:
                e.store(e.const("f32", 0.0, GROUP), sums + at)
            with e.loop(0, n_units, TILE_COLS // fmt.cols) as first:
                last = e.min(first + TILE_COLS // fmt.cols, n_units)
                decode(panel, first, last)
                with e.loop(t0, t1, tile.tokens) as t:
                    # a token past the last is the last again, with a sum nobody looks at
                    tokens = [e.min(t + i, t1 - 1) for i in range(tile.tokens)]
                    at = sums + (t - t0) * (tile.groups * VECTOR)
                    places = [at + i * (tile.groups * VECTOR) for i in range(tile.tokens)]
                    product(e, first * unit_subs, (last - first) * unit_subs, tokens, places)
            with e.loop(t0, t1) as t, e.loop(0, e.const("i64", tile.groups)) as g:
                row = (panel * tile.groups + g) * GROUP
                with e.when(row.compare("<", n_rows)):
                    at = sums + (t - t0) * (tile.groups * VECTOR) + g * VECTOR
                    store_group(e, dst, t, row, n_rows, e.load("f32", at, GROUP))

        with e.loop(0, n_tokens, CHUNK) as t0:
            t1 = e.min(t0 + CHUNK, n_tokens)
            with e.loop(start, stop) as panel:
                panel_chunk(panel, t0, t1)

    return body


def blocked_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel mul_mat for a quantised type and many tokens; layout is file or rows16."""
    code, tile = code_of(dtype, isa), isa.tile
    n_factors, wide = len(code.factor_kinds), tile.groups * VECTOR
    sub_bytes = (8 + n_factors) * wide  # 8 words of codes, then the factors, of every group

    def store(e: Emit, place: Value, block: Block) -> None:
        for c in range(8):
            e.store(block.words(c), place + c * wide)
        for f, factor in enumerate(block.factors):
            e.store(factor, place + (8 + f) * wide)

    def multiply(decoded: Value, x: Value, cols: Value) -> Multiply:
        def of_tile(
            e: Emit, first: Value, n_subs: Value, tokens: list[Value], places: list[Value]
        ) -> None:
            rows = [token_row(x, t, cols, first) for t in tokens]
            with e.loop(0, n_subs) as s:
                at = decoded + s * sub_bytes
                _sub_product(e, isa, code, at, rows, s, places)

        return of_tile

    return _body(dtype, layout, isa, tile, sub_bytes, store, multiply)


def _sub_product(
    e: Emit, isa: Isa, code: Code, at: Value, rows: list, sub: Value, places: list[Value]
) -> None:
    """Add the products of the decoded block of 32 columns at `at` to the sums at `places`."""
    n_groups = isa.tile.groups
    wide = n_groups * VECTOR
    first = [starts(e, isa, code, row, sub) for row in rows]
    totals: list[list[list[Value]]] = [[[] for _ in range(n_groups)] for _ in rows]
    for part, words in enumerate(code.parts):
        acc = [[start[part]] * n_groups for start in first]
        for c in words:
            w = [e.load(code.kind, at + (c * wide + g * VECTOR), 64) for g in range(n_groups)]
            for t, row in enumerate(rows):
                q = columns(e, row, sub, c)
                acc[t] = [dot4(e, isa, a, w[g], q) for g, a in enumerate(acc[t])]
        for t, sums in enumerate(acc):
            for g, total in enumerate(sums):
                totals[t][g].append(total)
    xs = [scales(e, isa, code, row, sub) for row in rows]
    for g in range(n_groups):
        factors = [
            e.load(kind, at + ((8 + f) * wide + g * VECTOR), GROUP)
            for f, kind in enumerate(code.factor_kinds)
        ]
        for t, place in enumerate(places):
            before = e.load("f32", place + g * VECTOR, GROUP)
            e.store(add_block(e, code, factors, totals[t][g], xs[t], before), place + g * VECTOR)


def dequantised_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel mul_mat_float: a quantised weight by float32 activations; layout file or rows16."""
    code, tile = code_of(dtype, isa), isa.float_tile
    wide = tile.groups * VECTOR
    sub_bytes = 32 * wide  # 32 columns of float32, of every group

    def store(e: Emit, place: Value, block: Block) -> None:
        for c in range(8):
            for i, value in enumerate(_values(e, code, block, c)):
                e.store(value, place + (4 * c + i) * wide)

    def multiply(decoded: Value, x: Value, cols: Value) -> Multiply:
        def of_tile(
            e: Emit, first: Value, n_subs: Value, tokens: list[Value], places: list[Value]
        ) -> None:
            rows = [x + (t * cols + first * 32) * 4 for t in tokens]
            acc = [[e.var(e.const("f32", 0.0, GROUP)) for _ in range(tile.groups)] for _ in rows]
            with e.loop(0, n_subs * 32, 4) as c:
                tile_at = decoded + c * wide
                for i in range(4):
                    at = tile_at + i * wide
                    w = [e.load("f32", at + g * VECTOR, GROUP) for g in range(tile.groups)]
                    for row, sums in zip(rows, acc, strict=True):
                        value = e.splat(e.load("f32", row + (c + i) * 4), GROUP)
                        for a, weights in zip(sums, w, strict=True):
                            a.set(e.fma(weights, value, a.get()))
            added = [
                [e.load("f32", p + g * VECTOR, GROUP) + a.get() for g, a in enumerate(sums)]
                for p, sums in zip(places, acc, strict=True)
            ]
            for place, values in zip(places, added, strict=True):
                for g, value in enumerate(values):
                    e.store(value, place + g * VECTOR)

        return of_tile

    return _body(dtype, layout, isa, tile, sub_bytes, store, multiply)


def _values(e: Emit, code: Code, block: Block, c: int) -> list[Value]:
    """Columns 4c..4c+3 of a block, f32 x16 each, with get_rows' roundings."""
    words = block.words(c).bits("i32" if code.kind == "i8" else "u32")
    scale = block.factors[0]
    if code.form == "halves":
        scale = scale * block.factors[1 + c // 4].to("f32")
    values = []
    for i in range(4):
        if code.kind == "i8":
            number = (words << (24 - 8 * i)) >> 24
        else:
            number = ((words >> (8 * i)) & 255).to("i32") - code.offset
        value = number.to("f32") * scale
        values.append(value - block.factors[1] if code.form == "least" else value)
    return values
