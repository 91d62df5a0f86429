"""Products of packed Q4_K, Q5_K and Q6_K units: 16 rows x 256 columns (see repack.py, matvec.py).

A super-block has scales of its own for every 32 (Q6_K: 16) columns. Activations have theirs for
every 32, so integer sums end there and are added up as float32.
"""

from __future__ import annotations

from workbench.backend.cpu.isa import pair_sums
from workbench.backend.cpu.matvec import Dot, Unit, nibbles
from workbench.backend.cpu.repack import GROUP
from workbench.backend.cpu.vector import Value, Variable


def _word(dot: Dot, packed: Value, index: int) -> Value:
    """Word `index` of the 16 blocks of a unit that has its words first."""
    return dot.e.load("u32", packed + 64 * index, GROUP)


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


def _with_mins(dot: Dot, packed: Value, sub: Value, acc: list[Variable], words_of) -> None:
    """acc += x_scale * (d * scale * sum(q * x) - dmin * min * sum(x)), per block of 32 columns.

    words_of(j) gives the words of sub-block j of 256 columns.
    """
    e = dot.e
    deltas = _word(dot, packed, 0)
    d = deltas.to("u16").bits("f16").to("f32")
    dmin = (deltas >> 16).to("u16").bits("f16").to("f32")
    six = (_word(dot, packed, 1), _word(dot, packed, 2), _word(dot, packed, 3))
    for j in range(8):
        scale, least = six_bit_scales(six, j)
        scale, least = d * scale.to("i32").to("f32"), dmin * least.to("i32").to("f32")
        totals = dot.sub_block(sub + j, words_of(j), 0)
        for t, total, a in zip(dot.tokens, totals, acc, strict=True):
            sums = pair_sums(e, dot.isa, dot.sums(t, sub + j), -1, -1).to("f32")
            value = e.fma(total.to("f32"), scale, least * sums)
            a.set(e.fma(value, dot.scale(t, sub + j), a.get()))


def q4_k(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    def words_of(j: int):
        return lambda c: nibbles(_word(dot, packed, 4 + 8 * (j // 2) + c), j % 2)

    _with_mins(dot, packed, sub, acc, words_of)


def q5_k(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    def words_of(j: int):
        def words(c: int) -> Value:
            fifth = shift(_word(dot, packed, 4 + c), 4 - j) & 0x10101010
            return nibbles(_word(dot, packed, 12 + 8 * (j // 2) + c), j % 2) | fifth.bits("u8")

        return words

    _with_mins(dot, packed, sub, acc, words_of)


def shift(word: Value, by: int) -> Value:
    """word << by, or >> -by."""
    return word << by if by > 0 else word >> -by if by < 0 else word


def q6_k(dot: Dot, packed: Value, sub: Value, acc: list[Variable]) -> None:
    """Scales are signed bytes, one for 16 columns; quants are six bits, less 32."""
    e = dot.e
    d = e.load("f16", packed, GROUP).to("f32")
    words_at = packed + 32
    for j in range(8):  # blocks of 32 columns: half n of the super-block, part k of the half
        n, k = j // 4, j % 4

        def words(c: int, n=n, k=k) -> Value:
            low = nibbles(_word(dot, words_at, 16 * n + 8 * (k % 2) + c), k // 2)
            high = shift(_word(dot, words_at, 32 + 8 * n + c), 4 - 2 * k) & 0x30303030
            return low | high.bits("u8")

        four = _word(dot, words_at, 48 + 2 * n + k // 2).bits("i32")
        scales = [signed_byte(four, 2 * (k % 2) + half) for half in range(2)]
        halves = []
        for half in range(2):
            offsets = (-32, 0) if half == 0 else (0, -32)
            start = [pair_sums(e, dot.isa, dot.sums(t, sub + j), *offsets) for t in dot.tokens]
            columns = range(4 * half, 4 * half + 4)
            halves.append(dot.add_products(start, sub + j, words, columns))
        for t, a, first, second in zip(dot.tokens, acc, *halves, strict=True):
            total = (first * scales[0] + second * scales[1]).to("f32")
            a.set(e.fma(total, d * dot.scale(t, sub + j), a.get()))


def signed_byte(word: Value, i: int) -> Value:
    """Byte i of i32 words, sign extended."""
    return (word << (24 - 8 * i)) >> 24


UNITS: dict[str, Unit] = {"Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
