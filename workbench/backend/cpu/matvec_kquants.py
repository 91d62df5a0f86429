"""Products of packed Q4_K, Q5_K and Q6_K units of 16 rows x 256 columns: see matvec.py.

A super-block has scales of its own for every 32 (Q6_K: 16) columns. Activations have theirs for
every 32, so integer sums end there and are added up as float32.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.backend.cpu.interleave import GROUP
from workbench.backend.cpu.isa import pair_sums
from workbench.backend.cpu.matvec import Dot, Unit, Words, nibbles
from workbench.backend.cpu.vector import Value, Variable


def _word(dot: Dot, words: Value, index: Value | int) -> Value:
    """Word `index` of the 16 blocks of a unit whose words begin at `words`."""
    return dot.e.load("u32", words + index * 64, GROUP)


def six_bit_scales(words: tuple[Value, Value, Value], j: int) -> tuple[Value, Value]:
    """Scale and min j (0..7) out of the 12 bytes, as three u32 words, of Q4_K and Q5_K.

    Bytes 0..3 and 4..7 hold six bits of scales and mins 0..3; their upper two bits belong to
    scales and mins 4..7, whose lower four are the nibbles of bytes 8..11.
    """
    low, mid, high = words
    at = 8 * (j % 4)
    if j < 4:
        return (low >> at) & 63, (mid >> at) & 63
    return (
        ((high >> at) & 15) | (((low >> (at + 6)) & 3) << 4),
        ((high >> (at + 4)) & 15) | (((mid >> (at + 6)) & 3) << 4),
    )


def _with_mins(
    dot: Dot,
    packed: Value,
    sub: Value,
    acc: list[Variable],
    words_of: Callable[[Value, int], Words],
) -> None:
    """acc += x_scale * (d * scale * sum(q * x) - dmin * min * sum(x)), per block of 32 columns.

    words_of(pair, odd) gives the words of sub-block 2 * pair + odd of 256 columns. All scales are
    decoded first, into the stack, so that the products can be a loop: unrolled, they would take
    seconds to compile.
    """
    e = dot.e
    deltas = _word(dot, packed, 0)
    d = deltas.to("u16").bits("f16").to("f32")
    dmin = (deltas >> 16).to("u16").bits("f16").to("f32")
    six = (_word(dot, packed, 1), _word(dot, packed, 2), _word(dot, packed, 3))
    scales = e.stack(2 * 8 * 64)
    for j in range(8):
        scale, least = six_bit_scales(six, j)
        e.store(d * scale.to("i32").to("f32"), scales + 128 * j)
        e.store(dmin * least.to("i32").to("f32"), scales + (128 * j + 64))
    with e.loop(0, e.const("i64", 4)) as pair:
        for odd in range(2):
            block = pair * 2 + odd
            scale = e.load("f32", scales + block * 128, GROUP)
            least = e.load("f32", scales + block * 128 + 64, GROUP)
            totals = dot.sub_block(sub + block, words_of(pair, odd), 0)
            for t, total, a in zip(dot.tokens, totals, acc, strict=True):
                sums = pair_sums(e, dot.isa, dot.sums(t, sub + block), -1, -1).to("f32")
                value = e.fma(total.to("f32"), scale, least * sums)
                a.set(e.fma(value, dot.scale(t, sub + block), a.get()))


def q4_k(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    def words_of(pair: Value, odd: int) -> Words:
        return lambda c: nibbles(_word(dot, packed, pair * 8 + (4 + c)), odd)

    _with_mins(dot, packed, sub, acc, words_of)


def q5_k(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    """Bit j of a byte of the fifth bits belongs to sub-block j."""

    def words_of(pair: Value, odd: int) -> Words:
        by = (pair * 2 + odd).to("u32")

        def words(c: int) -> Value:
            fifth = ((_word(dot, packed, 4 + c) >> by) << 4) & 0x10101010
            return nibbles(_word(dot, packed, pair * 8 + (12 + c)), odd) | fifth.bits("u8")

        return words

    _with_mins(dot, packed, sub, acc, words_of)


def _shift(word: Value, by: int) -> Value:
    """word << by, or >> -by."""
    return word << by if by > 0 else word >> -by if by < 0 else word


def _signed_byte(word: Value, i: int) -> Value:
    """Byte i of i32 words, sign extended."""
    return (word << (24 - 8 * i)) >> 24


def q6_k(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    """Scales are signed bytes, one for 16 columns; quants are six bits, less 32.

    Of each half of the super-block, four blocks of 32 columns: their low bits are the low and the
    high nibbles of two runs of 8 words, their high bits four times two bits of one run.
    """
    e = dot.e
    d = e.load("f16", packed, GROUP).to("f32")
    with e.loop(0, e.const("i64", 2)) as n:
        low_at = packed + 32 + n * (16 * 64)
        high_at = packed + (32 + 32 * 64) + n * (8 * 64)
        scales_at = packed + (32 + 48 * 64) + n * (2 * 64)
        for k in range(4):

            def words(c: int, k=k, low_at=low_at, high_at=high_at) -> Value:
                low = nibbles(_word(dot, low_at, 8 * (k % 2) + c), k // 2)
                high = _shift(_word(dot, high_at, c), 4 - 2 * k) & 0x30303030
                return low | high.bits("u8")

            _q6_k_block(dot, d, _word(dot, scales_at, k // 2), k % 2, sub + n * 4 + k, words, acc)


def _q6_k_block(
    dot: Dot, d: Value, four_scales: Value, odd: int, sub: Value, words: Words, acc: list[Variable]
) -> None:
    """32 columns: two halves of 16, each with its own integer scale, then one float product."""
    halves = []
    for half, offsets in enumerate(((-32, 0), (0, -32))):
        start = [pair_sums(dot.e, dot.isa, dot.sums(t, sub), *offsets) for t in dot.tokens]
        halves.append(dot.add_products(start, sub, words, range(4 * half, 4 * half + 4)))
    scales = [_signed_byte(four_scales.bits("i32"), 2 * odd + half) for half in range(2)]
    for t, a, first, second in zip(dot.tokens, acc, *halves, strict=True):
        total = (first * scales[0] + second * scales[1]).to("f32")
        a.set(dot.e.fma(total, d * dot.scale(t, sub), a.get()))


UNITS: dict[str, Unit] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
