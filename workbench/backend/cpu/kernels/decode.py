"""Decodes a packed unit for every product, one block of 32 columns after the other.

A unit (interleave.py) is 16 rows of one block of the file: 32 columns, or 256 of a K-quant.
`Code.unit` writes the code that decodes a unit, and calls `take` for each block of 32 columns. A
block is integer codes, still without their scales, and the factors that turn codes into values:

| form | value of code q at column c of a row | factors, an element per row |
|---|---|---|
| plain | factors[0] * (q - offset) | scale |
| least | factors[0] * q - factors[1] | scale, min |
| halves | factors[0] * (factors[1 + c // 16] * (q - offset)) | scale, two integer scales |

Codes are unsigned bytes with an offset (8 for Q4_0), because byte dot products want one operand
unsigned. Q8_ACT carries sums of activations, which give the correction. An instruction set whose
unsigned operand has 7 bits at most gets the codes of Q8_0 as signed bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.backend.cpu.isa import Isa
from workbench.backend.cpu.kernels.interleave import GROUP
from workbench.backend.cpu.kernels.vector import Emit, Value

Words = Callable[[int], Value]  # c -> codes of columns 4c..4c+3 of 16 rows, as bytes x64


class CodeBlock(NamedTuple):
    """32 columns of 16 rows; sub: index of the block within its unit."""

    sub: Value
    words: Words
    factors: tuple[Value, ...]


Take = Callable[[CodeBlock], None]
Unit = Callable[[Emit, Isa, Value, Take], None]  # emit, isa, address of the packed unit, take

FACTOR_KINDS = {"plain": ("f32",), "least": ("f32", "f32"), "halves": ("f32", "i32", "i32")}


class Code(NamedTuple):
    """How to decode the blocks of a type (see the module). kind: the codes' kind, u8 or i8."""

    unit: Unit
    form: str = "plain"
    offset: int = 0
    kind: str = "u8"

    @property
    def factor_kinds(self) -> tuple[str, ...]:
        return FACTOR_KINDS[self.form]

    @property
    def parts(self) -> tuple[range, ...]:
        """Groups of words; the products of a group are one integer sum, with one integer scale."""
        return (range(4), range(4, 8)) if self.form == "halves" else (range(8),)


def code_of(dtype: str, isa: Isa) -> Code:
    """The code of a quantised type in kernels for `isa`; KeyError for any other type."""
    code = CODES[dtype]
    if dtype == "Q8_0" and not isa.wide_bytes:
        return code._replace(offset=0, kind="i8")
    return code


def _half_scales(e: Emit, packed: Value) -> Value:
    return e.load("f16", packed, GROUP).to("f32")


def _nibbles(word: Value, high: int) -> Value:
    """The low (high=0) or high (high=1) four bits of each byte of u32 words, as bytes."""
    return ((word >> 4 if high else word) & 0x0F0F0F0F).bits("u8")


def _q8_0(e: Emit, isa: Isa, packed: Value, take: Take) -> None:
    def words(c: int) -> Value:
        if isa.wide_bytes:
            return e.load("u8", packed + (32 + 64 * c), 64) ^ 0x80
        return e.load("i8", packed + (32 + 64 * c), 64)

    take(CodeBlock(e.const("i64", 0), words, (_half_scales(e, packed),)))


def _from_nibbles(e: Emit, first: Value, decode: Callable[[Value], Value]) -> Words:
    """Words of a block with columns 0..15 in the low nibbles of 4 words and 16..31 in the high."""
    raw = [e.load("u32", first + 64 * c, GROUP) for c in range(4)]
    return lambda c: decode(_nibbles(raw[c % 4], c // 4))


def _q4_0(e: Emit, isa: Isa, packed: Value, take: Take) -> None:
    words = _from_nibbles(e, packed + 32, lambda q: q)
    take(CodeBlock(e.const("i64", 0), words, (_half_scales(e, packed),)))


def e8m0_half(e: Emit, exponent: Value) -> Value:
    """2^(exponent - 128) for u32 exponents 0..255; the two smallest are denormal."""
    normal = (exponent - 1) << 23
    small = e.like(exponent, 0x00200000) << exponent
    return e.select(exponent.compare("<", 2), small, normal).bits("f32")


def _e2m1_unsigned(e: Emit, isa: Isa, code: Value) -> Value:
    """The doubled value of 4-bit floats, plus 12: u8 in 0..24."""
    if isa.dot != "generic":
        table = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0]
        name, n = ("512", 64) if isa.dot == "vpdpbusd.512" else ("", 32)
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


def _mxfp4(e: Emit, isa: Isa, packed: Value, take: Take) -> None:
    scale = e8m0_half(e, e.load("u8", packed, GROUP).to("u32"))
    words = _from_nibbles(e, packed + 16, lambda code: _e2m1_unsigned(e, isa, code))
    take(CodeBlock(e.const("i64", 0), words, (scale,)))


def _word(e: Emit, words: Value, index: Value | int) -> Value:
    """Word `index` of the 16 blocks of a unit whose words begin at `words`."""
    return e.load("u32", words + index * 64, GROUP)


def _six_bit_scales(words: tuple[Value, Value, Value], j: int) -> tuple[Value, Value]:
    """Scale and min j (0..7) from the 12 bytes, as three u32 words, of Q4_K and Q5_K.

    Bytes 0..3 have scales 0..3 in their low six bits, and bytes 4..7 have mins 0..3. Scales and
    mins 4..7 take their upper two bits from the top of bytes 0..7. Their lower four bits are the
    nibbles of bytes 8..11.
    """
    low, mid, high = words
    at = 8 * (j % 4)
    if j < 4:
        return (low >> at) & 63, (mid >> at) & 63
    return (
        ((high >> at) & 15) | (((low >> (at + 6)) & 3) << 4),
        ((high >> (at + 4)) & 15) | (((mid >> (at + 6)) & 3) << 4),
    )


def _with_mins(e: Emit, packed: Value, take: Take, words_of: Callable[[Value, int], Words]) -> None:
    """words_of(pair, odd) gives the words of block 2 * pair + odd.

    All scales are decoded first, onto the stack. The blocks can then be a loop; unrolled code would
    take seconds to compile.
    """
    deltas = _word(e, packed, 0)
    d = deltas.to("u16").bits("f16").to("f32")
    dmin = (deltas >> 16).to("u16").bits("f16").to("f32")
    six = (_word(e, packed, 1), _word(e, packed, 2), _word(e, packed, 3))
    scales = e.stack(2 * 8 * 64)
    for j in range(8):
        scale, least = _six_bit_scales(six, j)
        e.store(d * scale.to("i32").to("f32"), scales + 128 * j)
        e.store(dmin * least.to("i32").to("f32"), scales + (128 * j + 64))
    with e.loop(0, e.const("i64", 4)) as pair:
        for odd in range(2):
            sub = pair * 2 + odd
            scale = e.load("f32", scales + sub * 128, GROUP)
            least = e.load("f32", scales + sub * 128 + 64, GROUP)
            take(CodeBlock(sub, words_of(pair, odd), (scale, least)))


def _q4_k(e: Emit, isa: Isa, packed: Value, take: Take) -> None:
    def words_of(pair: Value, odd: int) -> Words:
        return lambda c: _nibbles(_word(e, packed, pair * 8 + (4 + c)), odd)

    _with_mins(e, packed, take, words_of)


def _q5_k(e: Emit, isa: Isa, packed: Value, take: Take) -> None:
    """In a byte of fifth bits, bit j belongs to block j."""

    def words_of(pair: Value, odd: int) -> Words:
        by = (pair * 2 + odd).to("u32")

        def words(c: int) -> Value:
            fifth = ((_word(e, packed, 4 + c) >> by) << 4) & 0x10101010
            return _nibbles(_word(e, packed, pair * 8 + (12 + c)), odd) | fifth.bits("u8")

        return words

    _with_mins(e, packed, take, words_of)


def _shift(word: Value, by: int) -> Value:
    """word << by, or >> -by."""
    return word << by if by > 0 else word >> -by if by < 0 else word


def _signed_byte(word: Value, i: int) -> Value:
    """Byte i of i32 words, sign extended."""
    return (word << (24 - 8 * i)) >> 24


def _q6_k(e: Emit, isa: Isa, packed: Value, take: Take) -> None:
    """Each half of the super-block is four blocks of 32 columns. Their low bits are the low and the
    high nibbles of 16 words. Their high bits are four times two bits of 8 words."""
    d = _half_scales(e, packed)
    with e.loop(0, e.const("i64", 2)) as n:
        low_at = packed + 32 + n * (16 * 64)
        high_at = packed + (32 + 32 * 64) + n * (8 * 64)
        scales_at = packed + (32 + 48 * 64) + n * (2 * 64)
        for k in range(4):

            def words(c: int, k=k, low_at=low_at, high_at=high_at) -> Value:
                low = _nibbles(_word(e, low_at, 8 * (k % 2) + c), k // 2)
                high = _shift(_word(e, high_at, c), 4 - 2 * k) & 0x30303030
                return low | high.bits("u8")

            four = _word(e, scales_at, k // 2).bits("i32")
            scales = [_signed_byte(four, 2 * (k % 2) + half) for half in range(2)]
            take(CodeBlock(n * 4 + k, words, (d, *scales)))


CODES: dict[str, Code] = {
    "Q8_0": Code(_q8_0, offset=128),
    "Q4_0": Code(_q4_0, offset=8),
    "MXFP4": Code(_mxfp4, offset=12),
    "Q4_K": Code(_q4_k, "least"),
    "Q5_K": Code(_q5_k, "least"),
    "Q6_K": Code(_q6_k, "halves", offset=32),
}


def values(e: Emit, code: Code, block: CodeBlock, c: int) -> list[Value]:
    """Columns 4c..4c+3 of a block, f32 x16 each, rounded as in ggml's reference
    dequantisation (`ggml-quants.c`; in NumPy, the `gguf` package)."""
    words = block.words(c).bits("i32" if code.kind == "i8" else "u32")
    scale = block.factors[0]
    if code.form == "halves":
        scale = scale * block.factors[1 + c // 4].to("f32")
    found = []
    for i in range(4):
        if code.kind == "i8":
            number = (words << (24 - 8 * i)) >> 24
        else:
            number = ((words >> (8 * i)) & 255).to("i32") - code.offset
        value = number.to("f32") * scale
        found.append(value - block.factors[1] if code.form == "least" else value)
    return found
