"""mul_mat for few tokens: dst[t, r] = sum over columns of w[r, c] * x[t, c].

Quantised weights times 8-bit activations (Q8_ACT) are integer dot products. A vector holds 16 rows,
one row per element. For 4 columns at a time, 64 weight bytes meet one word of 4 activation bytes,
splatted. A block's integer sums become floats once; one fma per 16 rows scales and adds them.
Weights are read and unpacked once for up to `isa.tokens` tokens. For more tokens than
`op_table.BATCH`, blocked.py multiplies, with the same bits.

F32, F16 and BF16 weights meet float32 activations: 4 rows at a time, each with its own
accumulators, summed across the vector at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.backend.cpu.isa import Isa, dot4, pair_sums
from workbench.backend.cpu.kernels.cells import CELL_TYPES
from workbench.backend.cpu.kernels.decode import Code, CodeBlock, code_of
from workbench.backend.cpu.kernels.interleave import (
    FORMATS,
    GROUP,
    Format,
    pack_unit,
    row_addresses,
)
from workbench.backend.cpu.kernels.vector import Body, Emit, Value, Variable
from workbench.graph.ir import DTYPES, QUANTISED

CHUNK = 64  # tokens whose activations stay in the second cache level while all rows pass
TILE_COLS = 256  # columns packed at a time in layout `file`
FLOAT_ROWS = 4
LINE = 64  # bytes of one prefetch
PREFETCH = 8192  # bytes ahead of use; the CPU does not foresee the order of K-quants by itself
ROW_PREFETCH = 2048  # bytes ahead of use along a row of floats


class TokenRow(NamedTuple):
    """One row of Q8_ACT: addresses of its quants, scales and half-block sums."""

    quants: Value
    scales: Value
    sums: Value


def token_row(x: Value, t: Value, cols: Value, sub: Value) -> TokenRow:
    """Row t of the activations at x, from block `sub` of 32 columns on."""
    row = x + t * ((cols + cols // 4 + 63) // 64 * 64)  # DType.row_bytes of Q8_ACT
    planes = (row + sub * 32, row + cols + sub * 4, row + (cols + cols // 8) + sub * 4)
    return TokenRow(*planes)


class Scales(NamedTuple):
    """The factors of integer sums over 32 columns of a token, the same in each of 16 elements.

    scale: f32.
    minus_sum: f32, minus the sum of the quants; None where the form does not use the sum.
    """

    scale: Value
    minus_sum: Value | None


def _half_sums(e: Emit, t: TokenRow, sub: Value) -> Value:
    """The sums of both halves of block `sub` as i16 pairs, the same in each of 16 elements."""
    return e.splat(e.load("i32", t.sums + sub * 4), GROUP).bits("i16")


def starts(e: Emit, isa: Isa, code: Code, t: TokenRow, sub: Value) -> list[Value]:
    """i32 x16 for each integer sum of block `sub`: the correction for the offset of the codes."""
    if not code.offset:
        return [e.const("i32", 0, GROUP) for _ in code.parts]
    sums, less = _half_sums(e, t, sub), -code.offset
    if code.form == "halves":
        return [pair_sums(e, isa, sums, less, 0), pair_sums(e, isa, sums, 0, less)]
    return [pair_sums(e, isa, sums, less, less)]


def scales(e: Emit, isa: Isa, code: Code, t: TokenRow, sub: Value) -> Scales:
    """The factors of block `sub`. Load them after the products: registers are few before."""
    minus_sum = None
    if code.form == "least":
        minus_sum = pair_sums(e, isa, _half_sums(e, t, sub), -1, -1).to("f32")
    return Scales(e.splat(e.load("f32", t.scales + sub * 4), GROUP), minus_sum)


def columns(e: Emit, t: TokenRow, sub: Value, c: int) -> Value:
    """Quants 4c..4c+3 of block `sub`, the same in each of 16 elements, as i8 x64."""
    return e.splat(e.load("i32", t.quants + sub * 32 + 4 * c), GROUP).bits("i8")


def add_block(
    e: Emit, code: Code, factors: Sequence[Value], totals: list[Value], x: Scales, acc: Value
) -> Value:
    """acc plus the product of 32 columns with integer sums `totals`; the last step is one fma."""
    if code.form == "least":
        assert x.minus_sum is not None
        value = e.fma(totals[0].to("f32"), factors[0], factors[1] * x.minus_sum)
        return e.fma(value, x.scale, acc)
    total = totals[0]
    if code.form == "halves":
        total = totals[0] * factors[1] + totals[1] * factors[2]
    return e.fma(total.to("f32"), factors[0] * x.scale, acc)


def multiply(
    e: Emit, isa: Isa, code: Code, tokens: list[TokenRow], sub: Value, block: CodeBlock,
    acc: list[Variable],
) -> None:  # fmt: skip
    """Adds the products of a decoded block and block `sub` of every token."""
    first = [starts(e, isa, code, t, sub) for t in tokens]
    totals: list[list[Value]] = [[] for _ in tokens]
    for part, words in enumerate(code.parts):
        sums = [start[part] for start in first]
        for c in words:
            w = block.words(c)
            sums = [
                dot4(e, isa, s, w, columns(e, t, sub, c)) for s, t in zip(sums, tokens, strict=True)
            ]
        for total, s in zip(totals, sums, strict=True):
            total.append(s)
    for a, total, t in zip(acc, totals, tokens, strict=True):
        x = scales(e, isa, code, t, sub)
        a.set(add_block(e, code, block.factors, total, x, a.get()))


def token_blocks(
    e: Emit, start: Value, stop: Value, most: int, block: Callable[[list[Value]], None]
) -> None:
    """Calls block(tokens) over tokens start..stop-1, with 1, 4 or `most` indices.

    The tokens after the last whole block form one block of the smallest size that holds them. A
    block that is not full repeats the last token, and stores its values twice.
    """
    whole = start + ((stop - start) // most) * most
    with e.loop(start, whole, most) as t:
        block([t + i for i in range(most)])
    rest = stop - whole
    fewer = 0
    for size in sorted({1, 4, most}):
        fits = rest.compare(">", fewer) & rest.compare("<=", size)
        with e.when(fits):
            block([e.min(whole + i, stop - 1) for i in range(size)])
        fewer = size


def product_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel mul_mat for any weight type; float types have layout file only."""
    if DTYPES[dtype] in QUANTISED:
        return quantised_body(dtype, layout, isa)
    return float_body(dtype, isa)


def quantised_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel mul_mat for a quantised type; layout is file or rows16. Parts are groups of rows.

    In layout rows16, each block of 32 columns prefetches a little. Prefetching a whole unit of a
    K-quant takes up to 2.8 times as long with 2 to 8 tokens (Q6_K with one token: up to 8 % less).
    In layout file, prefetching a whole tile is better for all types but Q8_0
    (data/results/tuning/cpu-prefetch-1.txt).
    """
    fmt, code = FORMATS[dtype], code_of(dtype, isa)
    unit_bytes = fmt.block_bytes * GROUP
    lines = -(-unit_bytes // LINE // (fmt.cols // 32))  # a block of 32 columns prefetches

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, w, x, n_rows, cols, n_tokens = e.arguments(args, "iiiiii")
        n_units = cols // fmt.cols
        row_bytes = n_units * fmt.block_bytes
        tile = e.stack(TILE_COLS // fmt.cols * unit_bytes) if layout == "file" else None
        start, stop = e.share((n_rows + (GROUP - 1)) // GROUP, part, n_parts)

        def group_block(group: Value, indices: list[Value]) -> None:
            tokens = [token_row(x, t, cols, e.const("i64", 0)) for t in indices]
            acc = [e.var(e.const("f32", 0.0, GROUP)) for _ in indices]

            def unit(packed: Value, u: Value) -> None:
                first = u * (fmt.cols // 32)

                def take(block: CodeBlock) -> None:
                    if layout == "rows16":
                        at = packed + block.sub * (lines * LINE) + PREFETCH
                        for i in range(lines):
                            e.prefetch(at + i * LINE)
                    multiply(e, isa, code, tokens, first + block.sub, block, acc)

                code.unit(e, isa, packed, take)

            if tile is None:
                packed = w + group * row_bytes * GROUP
                with e.loop(0, n_units) as u:
                    unit(packed + u * unit_bytes, u)
            else:
                _from_file(e, fmt, unit, tile, w, group, n_rows, n_units)
            for t, a in zip(indices, acc, strict=True):
                store_group(e, dst, t, group * GROUP, n_rows, a.get())

        with e.loop(0, n_tokens, CHUNK) as t0:
            t1 = e.min(t0 + CHUNK, n_tokens)
            with e.loop(start, stop) as group:
                token_blocks(e, t0, t1, isa.tokens, lambda indices: group_block(group, indices))

    return body


def _from_file(
    e: Emit, fmt: Format, unit: Callable[[Value, Value], None], tile: Value, w: Value,
    group: Value, n_rows: Value, n_units: Value,
) -> None:  # fmt: skip
    """Packs and multiplies tiles of 16 rows x TILE_COLS columns, one after another."""
    n_tile, unit_bytes = TILE_COLS // fmt.cols, fmt.block_bytes * GROUP
    rows = row_addresses(e, w, group * GROUP, n_rows, n_units * fmt.block_bytes)
    next_group = n_units * (fmt.block_bytes * GROUP)
    with e.loop(0, n_units, n_tile) as first:
        last = e.min(first + n_tile, n_units)
        ahead = e.select(last.compare("<", n_units), last * fmt.block_bytes, next_group)
        for row in rows:
            for line in range(0, n_tile * fmt.block_bytes, LINE):
                e.prefetch(row + ahead + line)
        with e.loop(first, last) as u:
            pack_unit(e, fmt, tile + (u - first) * unit_bytes, rows, u * fmt.block_bytes)
        with e.loop(first, last) as u:
            unit(tile + (u - first) * unit_bytes, u)


def store_group(
    e: Emit, dst: Value, token: Value, row: Value, n_rows: Value, values: Value
) -> None:
    """Stores one result per row, for rows row..row+15 below n_rows."""
    at = dst + (token * n_rows + row) * 4
    with e.when_else((row + GROUP).compare("<=", n_rows)) as (full, partial):
        with full:
            e.store(values, at)
        with partial:
            for i in range(GROUP - 1):
                with e.when((row + i).compare("<", n_rows)):
                    e.store(values.element(i), at + 4 * i)


def float_body(dtype: str, isa: Isa) -> Body:
    """Kernel mul_mat for F32, F16 or BF16 weights. Parts are groups of FLOAT_ROWS rows."""
    types = CELL_TYPES[dtype]
    size = types.dtype.block_bytes
    n = isa.float_elements

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, w, x, n_rows, cols, n_tokens = e.arguments(args, "iiiiii")
        start, stop = e.share((n_rows + (FLOAT_ROWS - 1)) // FLOAT_ROWS, part, n_parts)

        def group_block(group: Value, indices: list[Value]) -> None:
            rows = [e.min(group * FLOAT_ROWS + r, n_rows - 1) for r in range(FLOAT_ROWS)]
            ws = [w + r * cols * size for r in rows]
            xs = [x + t * cols * 4 for t in indices]
            total = [[e.var(e.const("f32", 0.0)) for _ in xs] for _ in ws]
            wide = [[e.var(e.const("f32", 0.0, n)) for _ in xs] for _ in ws]

            def step(c: Value, width: int) -> None:
                acc = wide if width > 1 else total
                values = [e.load("f32", at + c * 4, width) for at in xs]
                for r, at in enumerate(ws):
                    if width > 1:
                        e.prefetch(at + c * size + ROW_PREFETCH)
                    weights = types.load(e, at, c, width)
                    for i, value in enumerate(values):
                        acc[r][i].set(e.fma(weights, value, acc[r][i].get()))

            e.flat_loops(e.const("i64", 0), cols, n, step)
            for r, row in enumerate(rows):
                for i, t in enumerate(indices):
                    value = e.sum(wide[r][i].get()) + total[r][i].get()
                    e.store(value, dst + (t * n_rows + row) * 4)

        with e.loop(0, n_tokens, CHUNK) as t0:
            t1 = e.min(t0 + CHUNK, n_tokens)
            with e.loop(start, stop) as group:
                token_blocks(e, t0, t1, 4, lambda indices: group_block(group, indices))

    return body
