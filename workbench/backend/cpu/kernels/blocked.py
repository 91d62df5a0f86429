"""mul_mat of quantised weights by panels: a panel of weights is decoded once for CHUNK tokens.

    for each CHUNK of tokens
        for each panel of 16 * n_groups rows                      (parts are panels)
            sums[token, row] = 0
            for each TILE_COLS columns
                tile = the panel's columns, decoded
                for each `tile.tokens` tokens: sums += tile . activations

Tile, sums and the tile's activations stay in the first cache levels. In the inner loop, every
vector of weights meets several tokens, and every splatted activation several groups of rows.
Neither kind of load is the limit then.

Two kernels have this form. `blocked_body` multiplies codes by Q8_ACT, with the arithmetic of
matvec.py in the same order, hence with the same bits. `dequantised_body` is the float path: the
weights' float32 values, bit-equal to get_rows, times float32 activations. A chain of fma sums 256
columns, and one addition joins the sum to the columns before.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.backend.cpu.isa import Isa, Tile, dot4
from workbench.backend.cpu.kernels import matvec
from workbench.backend.cpu.kernels.decode import Code, CodeBlock, code_of, values
from workbench.backend.cpu.kernels.interleave import FORMATS, GROUP, pack_unit, row_addresses
from workbench.backend.cpu.kernels.vector import Body, Emit, Value
from workbench.common.sizes import round_up

VECTOR = 64  # bytes of 16 float32, or of 4 codes of 16 rows
SUBS = matvec.TILE_COLS // 32  # blocks of 32 columns of a tile

Store = Callable[[Emit, Value, CodeBlock], None]  # emit, address in the tile, block
# emit; addresses of the tile and of the activations; cols; first block of 32 columns of the tile;
# number of blocks; tokens; addresses of their sums
Multiply = Callable[[Emit, Value, Value, Value, Value, Value, list[Value], list[Value]], None]


def _body(
    dtype: str, layout: str, isa: Isa, tile: Tile, sub_bytes: int, store: Store,
    multiply: Multiply,
) -> Body:  # fmt: skip
    """The loops that both kernels share. sub_bytes: of one decoded block of 32 columns of a panel.
    multiply: adds the product of a tile."""
    fmt, code = FORMATS[dtype], code_of(dtype, isa)
    unit_bytes, unit_subs = fmt.block_bytes * GROUP, fmt.cols // 32

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, w, x, n_rows, cols, n_tokens = e.arguments(args, "iiiiii")
        n_units = cols // fmt.cols
        group_bytes = n_units * unit_bytes
        n_groups = (n_rows + (GROUP - 1)) // GROUP
        packed = e.stack(unit_bytes) if layout == "file" else None
        decoded = e.stack(SUBS * sub_bytes)
        sums = e.stack(round_up(matvec.CHUNK, tile.tokens) * tile.groups * VECTOR)
        start, stop = e.share((n_groups + (tile.groups - 1)) // tile.groups, part, n_parts)

        def decode(panel: Value, first: Value, last: Value) -> None:
            """Decodes units first..last-1 of the panel. In place of a group past the end, the last
            group is decoded again."""
            with e.loop(0, e.const("i64", tile.groups)) as g:
                group = e.min(panel * tile.groups + g, n_groups - 1)
                rows = row_addresses(e, w, group * GROUP, n_rows, n_units * fmt.block_bytes)
                with e.loop(first, last) as u:
                    if packed is None:
                        unit = w + group * group_bytes + u * unit_bytes
                    else:
                        unit = packed
                        pack_unit(e, fmt, packed, rows, u * fmt.block_bytes)
                    target = decoded + (u - first) * (unit_subs * sub_bytes) + g * VECTOR
                    code.unit(
                        e, isa, unit,
                        lambda b: store(e, target + b.sub * sub_bytes, b),
                    )  # fmt: skip

        def panel_chunk(panel: Value, t0: Value, t1: Value) -> None:
            with e.loop(0, (t1 - t0) * (tile.groups * VECTOR), VECTOR) as at:
                e.store(e.const("f32", 0.0, GROUP), sums + at)
            with e.loop(0, n_units, matvec.TILE_COLS // fmt.cols) as first:
                last = e.min(first + matvec.TILE_COLS // fmt.cols, n_units)
                decode(panel, first, last)
                with e.loop(t0, t1, tile.tokens) as t:
                    # in place of a token past the end, the last token again; its sum is not read
                    tokens = [e.min(t + i, t1 - 1) for i in range(tile.tokens)]
                    at = sums + (t - t0) * (tile.groups * VECTOR)
                    own_sums = [at + i * (tile.groups * VECTOR) for i in range(tile.tokens)]
                    n_subs = (last - first) * unit_subs
                    multiply(e, decoded, x, cols, first * unit_subs, n_subs, tokens, own_sums)
            with e.loop(t0, t1) as t, e.loop(0, e.const("i64", tile.groups)) as g:
                row = (panel * tile.groups + g) * GROUP
                with e.when(row.compare("<", n_rows)):
                    at = sums + (t - t0) * (tile.groups * VECTOR) + g * VECTOR
                    matvec.store_group(e, dst, t, row, n_rows, e.load("f32", at, GROUP))

        with e.loop(0, n_tokens, matvec.CHUNK) as t0:
            t1 = e.min(t0 + matvec.CHUNK, n_tokens)
            with e.loop(start, stop) as panel:
                panel_chunk(panel, t0, t1)

    return body


def blocked_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel mul_mat for a quantised type and many tokens; layout is file or rows16."""
    code, tile = code_of(dtype, isa), isa.tile
    n_factors, wide = len(code.factor_kinds), tile.groups * VECTOR
    sub_bytes = (8 + n_factors) * wide  # of every group: 8 words of codes, then the factors

    def store(e: Emit, target: Value, block: CodeBlock) -> None:
        for c in range(8):
            e.store(block.words(c), target + c * wide)
        for f, factor in enumerate(block.factors):
            e.store(factor, target + (8 + f) * wide)

    def multiply(
        e: Emit, decoded: Value, x: Value, cols: Value, first: Value, n_subs: Value,
        tokens: list[Value], sums: list[Value],
    ) -> None:  # fmt: skip
        rows = [matvec.token_row(x, t, cols, first) for t in tokens]
        with e.loop(0, n_subs) as s:
            _sub_product(e, isa, code, decoded + s * sub_bytes, rows, s, sums)

    return _body(dtype, layout, isa, tile, sub_bytes, store, multiply)


def _sub_product(
    e: Emit, isa: Isa, code: Code, at: Value, rows: list, sub: Value, sums_at: list[Value]
) -> None:
    """Adds the products of the decoded block of 32 columns at `at` to the sums at `sums_at`."""
    n_groups = isa.tile.groups
    wide = n_groups * VECTOR
    first = [matvec.starts(e, isa, code, row, sub) for row in rows]
    totals: list[list[list[Value]]] = [[[] for _ in range(n_groups)] for _ in rows]
    for part, words in enumerate(code.parts):
        acc = [[start[part]] * n_groups for start in first]
        for c in words:
            w = [e.load(code.kind, at + (c * wide + g * VECTOR), 64) for g in range(n_groups)]
            for t, row in enumerate(rows):
                q = matvec.columns(e, row, sub, c)
                acc[t] = [dot4(e, isa, a, w[g], q) for g, a in enumerate(acc[t])]
        for t, sums in enumerate(acc):
            for g, total in enumerate(sums):
                totals[t][g].append(total)
    xs = [matvec.scales(e, isa, code, row, sub) for row in rows]
    for g in range(n_groups):
        factors = [
            e.load(kind, at + ((8 + f) * wide + g * VECTOR), GROUP)
            for f, kind in enumerate(code.factor_kinds)
        ]
        for t, sum_at in enumerate(sums_at):
            before = e.load("f32", sum_at + g * VECTOR, GROUP)
            e.store(
                matvec.add_block(e, code, factors, totals[t][g], xs[t], before), sum_at + g * VECTOR
            )


def dequantised_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel mul_mat_float: a quantised weight by float32 activations; layout file or rows16."""
    code, tile = code_of(dtype, isa), isa.float_tile
    wide = tile.groups * VECTOR
    sub_bytes = 32 * wide  # of every group: 32 columns of float32

    def store(e: Emit, target: Value, block: CodeBlock) -> None:
        for c in range(8):
            for i, value in enumerate(values(e, code, block, c)):
                e.store(value, target + (4 * c + i) * wide)

    def multiply(
        e: Emit, decoded: Value, x: Value, cols: Value, first: Value, n_subs: Value,
        tokens: list[Value], sums_at: list[Value],
    ) -> None:  # fmt: skip
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
        for sum_at, sums in zip(sums_at, acc, strict=True):
            for g, a in enumerate(sums):
                before = e.load("f32", sum_at + g * VECTOR, GROUP)
                e.store(before + a.get(), sum_at + g * VECTOR)

    return _body(dtype, layout, isa, tile, sub_bytes, store, multiply)
