"""mul_mat: dst[t, r] = sum over columns of w[r, c] * x[t, c].

Quantised weights meet activations in 8 bits (Q8_ACT) as integer dot products. 16 rows are worked on
together, a row per lane: of 4 columns at a time, a vector of 64 weight bytes meets one word of 4
activation bytes, splatted. One block's integer sums become floats once and are added, scaled, by
one fma per 16 rows. Weights are unpacked once for up to `isa.tokens` tokens.

Stored quants are unsigned with an offset (q - 8 for Q4_0): the sums of activations that Q8_ACT
carries give the correction, from which the integer sum starts.

F32, F16 and BF16 weights meet float32 activations: 4 rows at a time, each with accumulators of its
own, summed across the vector at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.backend.cpu.interleave import FORMATS, GROUP, Format, pack_unit, row_addresses
from workbench.backend.cpu.isa import Isa, dot4, pair_sums
from workbench.backend.cpu.vector import Body, Emit, Value, Variable

CHUNK = 64  # tokens whose activations stay in the second cache level while all rows pass
TILE_COLS = 256  # columns packed at a time where weights lie as in the file
FLOAT_ROWS = 4
LINE = 64  # bytes asked for at a time
PREFETCH = 8192  # bytes ahead of use; the CPU does not foresee the order of K-quants by itself
ROW_PREFETCH = 2048  # the same along a row of floats


class Token(NamedTuple):
    """One row of Q8_ACT: addresses of its quants, scales and half-block sums."""

    quants: Value
    scales: Value
    sums: Value


Words = Callable[[int], Value]  # c -> columns 4c..4c+3 of 16 rows, as bytes x64


class Dot(NamedTuple):
    """What is needed to multiply one packed unit: `unit(dot, packed, sub, accumulators)`."""

    e: Emit
    isa: Isa
    tokens: list[Token]

    def sub_block(self, sub: Value, words: Words, offset: int) -> list[Value]:
        """Per token: the i32 x16 sums over 32 columns of (words - offset) * quants.

        words(c) gives columns 4c..4c+3 of 16 rows. sub: index of the block of 32.
        """
        e = self.e
        sums = [
            pair_sums(e, self.isa, self.sums(t, sub), -offset, -offset)
            if offset
            else e.const("i32", 0, GROUP)
            for t in self.tokens
        ]
        return self.add_products(sums, sub, words, range(8))

    def add_products(
        self, sums: list[Value], sub: Value, words: Words, columns: range
    ) -> list[Value]:
        """Add the products of the given words (4 columns each) to the sums of every token."""
        for c in columns:
            w = words(c)
            for i, t in enumerate(self.tokens):
                x = self.e.splat(self.e.load("i32", t.quants + sub * 32 + 4 * c), GROUP)
                sums[i] = dot4(self.e, self.isa, sums[i], w, x.bits("i8"))
        return sums

    def sums(self, t: Token, sub: Value) -> Value:
        """The sums of both halves of block `sub` as i16 pairs, the same in each of 16 lanes."""
        return self.e.splat(self.e.load("i32", t.sums + sub * 4), GROUP).bits("i16")

    def scale(self, t: Token, sub: Value) -> Value:
        return self.e.splat(self.e.load("f32", t.scales + sub * 4), GROUP)


Unit = Callable[[Dot, Value, Value, list[Variable]], None]


def _add_scaled(dot: Dot, sums: list[Value], scale: Value, sub: Value, acc: list[Variable]) -> None:
    for t, total, a in zip(dot.tokens, sums, acc, strict=True):
        a.set(dot.e.fma(total.to("f32"), scale * dot.scale(t, sub), a.get()))


def _half_scales(dot: Dot, packed: Value) -> Value:
    return dot.e.load("f16", packed, GROUP).to("f32")


def nibbles(word: Value, high: int) -> Value:
    """The low (0) or high (1) halves of the bytes of u32 words, as bytes."""
    return ((word >> 4 if high else word) & 0x0F0F0F0F).bits("u8")


def q8_0(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    def words(c: int) -> Value:
        if dot.isa.wide_bytes:
            return dot.e.load("u8", packed + (32 + 64 * c), 64) ^ 0x80
        return dot.e.load("i8", packed + (32 + 64 * c), 64)

    sums = dot.sub_block(sub, words, 128 if dot.isa.wide_bytes else 0)
    _add_scaled(dot, sums, _half_scales(dot, packed), sub, acc)


def _from_nibbles(dot: Dot, first: Value, decode: Callable[[Value], Value]) -> Words:
    """Columns 0..15 lie in the low halves of 4 words, columns 16..31 in the high ones."""
    raw = [dot.e.load("u32", first + 64 * c, GROUP) for c in range(4)]
    return lambda c: decode(nibbles(raw[c % 4], c // 4))


def q4_0(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    words = _from_nibbles(dot, packed + 32, lambda q: q)
    _add_scaled(dot, dot.sub_block(sub, words, 8), _half_scales(dot, packed), sub, acc)


def e8m0_half(e: Emit, exponent: Value) -> Value:
    """2^(exponent - 128) of u32 exponents 0..255, denormal where it must be."""
    normal = (exponent - 1) << 23
    small = e.like(exponent, 0x00200000) << exponent
    return e.select(exponent.compare("<", 2), small, normal).bits("f32")


def e2m1_unsigned(dot: Dot, code: Value) -> Value:
    """The doubled value of 4-bit floats, plus 12: u8 in 0..24."""
    e = dot.e
    if dot.isa.dot != "generic":
        table = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]
        name, n = ("512", 64) if dot.isa.dot == "vpdpbusd.512" else ("", 32)
        shuffle = "llvm.x86.avx512.pshuf.b.512" if name else "llvm.x86.avx2.pshuf.b"
        lut = e.const("u8", table * (n // 16), n)
        parts = [
            e.call(shuffle, "u8", n, lut, code.shuffle(range(i, i + n))) for i in range(0, 64, n)
        ]
        return parts[0] if len(parts) == 1 else parts[0].shuffle(range(64), parts[1])
    size = code & 7
    for limit, more in ((5, 1), (6, 1), (7, 3)):
        size = size + e.select((code & 7).compare(">=", limit), e.like(code, more), 0)
    return e.select(code.compare(">=", 8), 12 - size, size + 12)


def mxfp4(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    scale = e8m0_half(dot.e, dot.e.load("u8", packed, GROUP).to("u32"))
    words = _from_nibbles(dot, packed + 16, lambda code: e2m1_unsigned(dot, code))
    _add_scaled(dot, dot.sub_block(sub, words, 12), scale, sub, acc)


UNITS: dict[str, Unit] = {"Q8_0": q8_0, "Q4_0": q4_0, "MXFP4": mxfp4}


def token_blocks(
    e: Emit, start: Value, stop: Value, most: int, block: Callable[[list[Value]], None]
) -> None:
    """block(tokens) over tokens start..stop-1, where tokens are 1, 4 or `most` indices.

    A last block that is not full repeats its last token: same values to the same place.
    """
    whole = start + ((stop - start) // most) * most
    with e.loop(start, whole, most) as t:
        block([t + i for i in range(most)])
    rest = stop - whole
    with e.when(rest.compare("==", 1)):
        block([whole])
    with e.when(rest.compare(">", 1)), e.loop(whole, stop, 4) as t:
        block([e.min(t + i, stop - 1) for i in range(4)])


def quantised_body(dtype: str, layout: str, isa: Isa, unit: Unit) -> Body:
    """Kernel mul_mat for a quantised type; layout is file or rows16."""
    fmt = FORMATS[dtype]
    unit_bytes = fmt.block_bytes * GROUP

    def body(e: Emit, args: Value, lane: Value, n_lanes: Value) -> None:
        dst, w, x, n_rows, cols, n_tokens = e.arguments(args, "iiiiii")
        n_units = cols // fmt.cols
        row_bytes = n_units * fmt.block_bytes
        x_bytes = (cols + cols // 4 + 63) // 64 * 64  # DType.row_bytes of Q8_ACT
        tile = e.stack(TILE_COLS // fmt.cols * unit_bytes) if layout == "file" else None
        start, stop = e.share((n_rows + (GROUP - 1)) // GROUP, lane, n_lanes)

        def group_block(group: Value, indices: list[Value]) -> None:
            rows = [x + t * x_bytes for t in indices]
            tokens = [Token(r, r + cols, r + (cols + cols // 8)) for r in rows]
            dot = Dot(e, isa, tokens)
            acc = [e.var(e.const("f32", 0.0, GROUP)) for _ in indices]
            if tile is None:
                packed = w + group * row_bytes * GROUP
                with e.loop(0, n_units) as u:
                    at = packed + u * unit_bytes
                    for line in range(0, unit_bytes, LINE):
                        e.prefetch(at + (PREFETCH + line))
                    unit(dot, at, u * (fmt.cols // 32), acc)
            else:
                _from_file(dot, fmt, unit, tile, w, group, n_rows, n_units, acc)
            for t, a in zip(indices, acc, strict=True):
                _store_group(e, dst, t, group * GROUP, n_rows, a.get())

        with e.loop(0, n_tokens, CHUNK) as t0:
            t1 = e.min(t0 + CHUNK, n_tokens)
            with e.loop(start, stop) as group:
                token_blocks(e, t0, t1, isa.tokens, lambda indices: group_block(group, indices))

    return body


def _from_file(
    dot: Dot, fmt: Format, unit: Unit, tile: Value, w: Value, group: Value, n_rows: Value,
    n_units: Value, acc: list[Variable],
) -> None:  # fmt: skip
    """Pack a tile of 16 rows x TILE_COLS columns, multiply it, and so on along the rows."""
    e, n_tile, unit_bytes = dot.e, TILE_COLS // fmt.cols, fmt.block_bytes * GROUP
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
            unit(dot, tile + (u - first) * unit_bytes, u * (fmt.cols // 32), acc)


def _store_group(
    e: Emit, dst: Value, token: Value, row: Value, n_rows: Value, values: Value
) -> None:
    at = dst + (token * n_rows + row) * 4
    with e.when_else((row + GROUP).compare("<=", n_rows)) as (full, partial):
        with full:
            e.store(values, at)
        with partial:
            for i in range(GROUP - 1):
                with e.when((row + i).compare("<", n_rows)):
                    e.store(values.element(i), at + 4 * i)


def load_f16(e: Emit, at: Value, n: int) -> Value:
    return e.load("f16", at, n).to("f32")


def load_bf16(e: Emit, at: Value, n: int) -> Value:
    return (e.load("u16", at, n).to("u32") << 16).bits("f32")


def load_f32(e: Emit, at: Value, n: int) -> Value:
    return e.load("f32", at, n)


FLOAT_LOADS = {"F32": (4, load_f32), "F16": (2, load_f16), "BF16": (2, load_bf16)}


def float_body(dtype: str, isa: Isa) -> Body:
    """Kernel mul_mat for F32, F16 or BF16 weights; lanes share groups of FLOAT_ROWS rows."""
    size, load = FLOAT_LOADS[dtype]
    n = isa.float_lanes

    def body(e: Emit, args: Value, lane: Value, n_lanes: Value) -> None:
        dst, w, x, n_rows, cols, n_tokens = e.arguments(args, "iiiiii")
        start, stop = e.share((n_rows + (FLOAT_ROWS - 1)) // FLOAT_ROWS, lane, n_lanes)

        def group_block(group: Value, indices: list[Value]) -> None:
            rows = [e.min(group * FLOAT_ROWS + r, n_rows - 1) for r in range(FLOAT_ROWS)]
            ws = [w + r * cols * size for r in rows]
            xs = [x + t * cols * 4 for t in indices]
            total = [[e.var(e.const("f32", 0.0)) for _ in xs] for _ in ws]
            wide = [[e.var(e.const("f32", 0.0, n)) for _ in xs] for _ in ws]

            def step(c: Value, width: int) -> None:
                acc = wide if width > 1 else total
                columns = [load_f32(e, at + c * 4, width) for at in xs]
                for r, at in enumerate(ws):
                    if width > 1:
                        e.prefetch(at + c * size + ROW_PREFETCH)
                    weights = load(e, at + c * size, width)
                    for i, values in enumerate(columns):
                        acc[r][i].set(e.fma(weights, values, acc[r][i].get()))

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
