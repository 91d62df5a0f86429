"""Instructions that LLVM does not choose by itself: dot products of bytes, by the CPU's features.

A kernel is compiled for one `Isa`. The choice may be made at compile time, because numba's cache is
keyed by CPU name and features. All forms give the same integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from workbench.backend.cpu.kernels.vector import Emit, Value


class Tile(NamedTuple):
    """Groups of 16 rows, and tokens, whose sums one inner loop of a blocked product holds in
    registers."""

    groups: int
    tokens: int


class Isa(NamedTuple):
    """An instruction set.

    needs: CPU features, by LLVM's names.
    dot: how to multiply bytes.
    float_elements: float32 elements of one register.
    tokens: how many tokens of a small batch are multiplied together.
    tile, float_tile: tiles of blocked products of integers, and of floats.
    """

    name: str
    needs: tuple[str, ...]
    dot: str
    float_elements: int
    tokens: int
    tile: Tile
    float_tile: Tile

    @property
    def wide_bytes(self) -> bool:
        """Whether the unsigned operand of a dot product may use all 8 bits."""
        return self.dot.startswith("vpdpbusd")


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")
ISAS = {  # the best first
    isa.name: isa
    for isa in (
        Isa("avx512vnni", _AVX512, "vpdpbusd.512", 16, 8, Tile(4, 4), Tile(2, 8)),
        Isa("avxvnni", ("avx2", "fma", "avxvnni"), "vpdpbusd.256", 8, 4, Tile(1, 4), Tile(1, 4)),
        Isa("avx2", ("avx2", "fma"), "vpmaddubsw", 8, 4, Tile(1, 4), Tile(1, 4)),
        Isa("generic", (), "generic", 8, 4, Tile(1, 4), Tile(1, 4)),
    )
}


def available(features: Mapping[str, bool]) -> list[Isa]:
    """The instruction sets of a CPU with these features, the best first."""
    return [isa for isa in ISAS.values() if all(features.get(f, False) for f in isa.needs)]


def _vpdpbusd(e: Emit, acc: Value, w: Value, x: Value) -> Value:
    name = f"llvm.x86.avx512.vpdpbusd.{8 * w.n}"
    return e.call(name, "i32", acc.n, acc, w.bits("i32"), x.bits("i32"))


def _vpmaddubsw(e: Emit, acc: Value, w: Value, x: Value) -> Value:
    if w.kind == "i8":  # |w| * (x with the sign of w): the products must fit 16 bits in pairs
        x = e.call("llvm.x86.avx2.psign.b", "i8", 32, x, w)
        w = e.call("llvm.x86.avx2.psign.b", "i8", 32, w, w)
    pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", "i16", 16, w, x)
    return acc + e.call("llvm.x86.avx2.pmadd.wd", "i32", 8, pairs, e.const("i16", 1, 16))


def _generic(e: Emit, acc: Value, w: Value, x: Value) -> Value:
    products = w.to("i32") * x.to("i32")
    n = products.n
    even = products.shuffle(range(0, n, 2)) + products.shuffle(range(1, n, 2))
    return acc + even.shuffle(range(0, n // 2, 2)) + even.shuffle(range(1, n // 2, 2))


_DOT: dict[str, tuple[int, Callable[[Emit, Value, Value, Value], Value]]] = {
    "vpdpbusd.512": (64, _vpdpbusd),
    "vpdpbusd.256": (32, _vpdpbusd),
    "vpmaddubsw": (32, _vpmaddubsw),
    "generic": (64, _generic),
}


def dot4(e: Emit, isa: Isa, acc: Value, w: Value, x: Value) -> Value:
    """acc[i] + sum of w[4i..4i+3] * x[4i..4i+3].

    acc i32 x16; w u8 x64, or i8 x64 unless isa.wide_bytes; x i8 x64 in -127..127. Without
    wide_bytes an unsigned w is at most 127.
    """
    width, act = _DOT[isa.dot]
    if width == w.n:
        return act(e, acc, w, x)
    parts = [
        act(e, _part(acc, i, width // 4), _part(w, i, width), _part(x, i, width))
        for i in range(w.n // width)
    ]
    return parts[0].shuffle(range(acc.n), parts[1])


def _part(v: Value, i: int, width: int) -> Value:
    return v.shuffle(range(i * width, (i + 1) * width))


def pair_sums(e: Emit, isa: Isa, pairs: Value, low: int, high: int) -> Value:
    """low * p[2i] + high * p[2i+1] of i16 pairs, as i32 of half the width."""
    n = pairs.n
    factors = e.const("i16", [low, high] * (n // 2), n)
    if isa.dot == "vpdpbusd.512":
        return e.call("llvm.x86.avx512.pmaddw.d.512", "i32", n // 2, pairs, factors)
    if isa.dot != "generic":
        halves = [
            e.call("llvm.x86.avx2.pmadd.wd", "i32", 8, _part(pairs, i, 16), _part(factors, i, 16))
            for i in range(2)
        ]
        return halves[0].shuffle(range(16), halves[1])
    products = pairs.to("i32") * factors.to("i32")
    return products.shuffle(range(0, n, 2)) + products.shuffle(range(1, n, 2))
