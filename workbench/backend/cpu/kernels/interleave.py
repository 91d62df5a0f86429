"""Quantised weights with 16 rows interleaved, so that a vector holds 16 rows of 4 columns.

A block of a file row is one small `head` (its scale) and words of 32 bits. Layout `rows16` puts the
blocks of 16 consecutive rows together: the 16 heads, then word 0 of the 16 rows, word 1, and so on.
Nothing is decoded, and only a group with fewer than 16 rows grows: it repeats the last row. A dot
product then needs no sum across a vector: element i of every accumulator belongs to row i.

In layout `file`, the product packs file blocks in the same order on the fly, a tile at a time. Both
layouts therefore give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from workbench.backend.cpu.kernels.vector import Body, Emit, Value

GROUP = 16  # rows interleaved


class Format(NamedTuple):
    """Offsets and sizes, in bytes, of head and words in one block of a file row."""

    cols: int
    block_bytes: int
    head_at: int
    head_kind: str | None
    words_at: int
    n_words: int

    @property
    def head_bytes(self) -> int:
        """Bytes of the 16 heads of a packed unit."""
        return self.block_bytes * GROUP - self.n_words * 4 * GROUP


FORMATS = {
    "Q8_0": Format(32, 34, 0, "u16", 2, 8),
    "Q4_0": Format(32, 18, 0, "u16", 2, 4),
    "MXFP4": Format(32, 17, 0, "u8", 1, 4),
    "Q4_K": Format(256, 144, 0, None, 0, 36),  # word 0: d and dmin; 1..3: scales and mins
    "Q5_K": Format(256, 176, 0, None, 0, 44),  # as Q4_K, then 8 words of fifth bits
    "Q6_K": Format(256, 210, 208, "u16", 0, 52),  # 32 words low, 16 high bits, 4 scales
}


def row_addresses(
    e: Emit, base: Value, first: Value, n_rows: Value, row_bytes: Value
) -> list[Value]:
    """Addresses of rows first..first+15; the last row stands in for rows past the end."""
    last = n_rows - 1
    return [base + e.min(first + r, last) * row_bytes for r in range(GROUP)]


def pack_unit(e: Emit, fmt: Format, dst: Value, rows: list[Value], offset: Value) -> None:
    """Packs the blocks at `offset` of 16 rows into one unit at `dst`."""
    if fmt.head_kind:
        size = fmt.head_bytes // GROUP
        for r, row in enumerate(rows):
            e.store(e.load(fmt.head_kind, row + offset + fmt.head_at), dst + r * size)
    for word in range(0, fmt.n_words, 4):
        fours = [e.load("u32", row + offset + (fmt.words_at + 4 * word), 4) for row in rows]
        for i, column in enumerate(_transpose(fours)):
            e.store(column, dst + (fmt.head_bytes + 64 * (word + i)))


def unpack_block(e: Emit, fmt: Format, packed: Value, row: Value, dst: Value) -> None:
    """Writes the file block of row `row` (0..15) of the packed unit at `packed` to `dst`."""
    if fmt.head_kind:
        size = fmt.head_bytes // GROUP
        e.store(e.load(fmt.head_kind, packed + row * size), dst + fmt.head_at)
    for word in range(fmt.n_words):
        value = e.load("u32", packed + row * 4 + (fmt.head_bytes + 64 * word))
        e.store(value, dst + (fmt.words_at + 4 * word))


def _transpose(fours: list[Value]) -> list[Value]:
    """Turns 16 rows of 4 words into 4 columns of 16 words."""
    pairs = [a.shuffle(range(8), b) for a, b in zip(fours[0::2], fours[1::2], strict=True)]
    quads = [a.shuffle(range(16), b) for a, b in zip(pairs[0::2], pairs[1::2], strict=True)]
    two_words = [[4 * r + w for w in half for r in range(8)] for half in ((0, 1), (2, 3))]
    upper, lower = ([quads[i].shuffle(order, quads[i + 1]) for order in two_words] for i in (0, 2))
    halves = ([*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)])
    return [upper[w // 2].shuffle(halves[w % 2], lower[w // 2]) for w in range(4)]


def repack_body(fmt: Format) -> Body:
    """Kernel: dst, src, n_rows, cols. Parts are groups of rows."""

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, src, n_rows, cols = e.arguments(args, "iiii")
        n_units = cols // fmt.cols
        row_bytes = n_units * fmt.block_bytes
        start, stop = e.share((n_rows + (GROUP - 1)) // GROUP, part, n_parts)
        with e.loop(start, stop) as group:
            rows = row_addresses(e, src, group * GROUP, n_rows, row_bytes)
            packed = dst + group * row_bytes * GROUP
            with e.loop(0, n_units) as unit:
                at = packed + unit * (fmt.block_bytes * GROUP)
                pack_unit(e, fmt, at, rows, unit * fmt.block_bytes)

    return body
