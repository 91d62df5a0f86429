"""The types that K and V have in the cache: how kernels read and write them. Float weights are
read in the same way.

A row of the cache is a cell, (kv_heads * head_dim) elements of one type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workbench.backend.cpu.kernels.vector import Emit, Value
from workbench.graph.ir import CACHE_DTYPES, Q8_0, DType


class CellType(NamedTuple):
    """A type of cells.

    load: n float32 of a head's elements from number `at` on. The head begins at address `src`. Of
        a type with blocks, n is 16 or 1, and `at` a multiple of n.
    store: n float32 from one address to another. n is 16, 1, or a block.
    """

    dtype: DType
    load: Callable[[Emit, Value, Value, int], Value]
    store: Callable[[Emit, Value, Value, int], None]

    def nbytes(self, n: Value) -> Value:
        """Bytes of n elements, whole blocks."""
        return n // self.dtype.block * self.dtype.block_bytes

    def share(self, e: Emit, n: Value, part: Value, n_parts: Value) -> tuple[Value, Value]:
        """The elements start..stop-1 of n that part `part` has, whole blocks."""
        start, stop = e.share(n // self.dtype.block, part, n_parts)
        return start * self.dtype.block, stop * self.dtype.block

    def read(self, e: Emit, src: Value, dst: Value, n: Value) -> None:
        """The first n elements from address src on, as float32 to address dst."""

        def step(i: Value, width: int) -> None:
            e.store(self.load(e, src, i, width), dst + i * 4)

        e.flat_loops(e.const("i64", 0), n, 16, step)

    def write(self, e: Emit, x: Value, dst: Value, start: Value, stop: Value) -> None:
        """Stores the float32 x[start..stop-1] as elements start..stop-1 from address dst on. start
        and stop are multiples of the type's block."""

        def step(i: Value, n: int) -> None:
            self.store(e, x + i * 4, dst + self.nbytes(i), n)

        if self.dtype.block > 1:
            with e.loop(start, stop, self.dtype.block) as i:
                step(i, self.dtype.block)
        else:
            e.flat_loops(start, stop, 16, step)


def _f32(e: Emit, src: Value, at: Value, n: int) -> Value:
    return e.load("f32", src + at * 4, n)


def _f16(e: Emit, src: Value, at: Value, n: int) -> Value:
    return e.load("f16", src + at * 2, n).to("f32")


def _bf16(e: Emit, src: Value, at: Value, n: int) -> Value:
    return (e.load("u16", src + at * 2, n).to("u32") << 16).bits("f32")


def _q8_0(e: Emit, src: Value, at: Value, n: int) -> Value:
    block = src + at // Q8_0.block * Q8_0.block_bytes
    scale = e.load("f16", block).to("f32")
    return e.load("i8", block + 2 + at % Q8_0.block, n).to("f32") * e.splat(scale, n)


def _to_f32(e: Emit, x: Value, dst: Value, n: int) -> None:
    e.store(e.load("f32", x, n), dst)


def _to_f16(e: Emit, x: Value, dst: Value, n: int) -> None:
    e.store(e.load("f32", x, n).to("f16"), dst)


def _to_bf16(e: Emit, x: Value, dst: Value, n: int) -> None:
    bits = e.load("u32", x, n)
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    nan = (bits & 0x7FFFFFFF).compare(">", 0x7F800000)
    e.store(e.select(nan, (bits >> 16) | 0x40, rounded).to("u16"), dst)


def _to_q8_0(e: Emit, x: Value, dst: Value, n: int) -> None:
    values = e.load("f32", x, n)
    scale = e.reduce(e.abs(values), e.max) / 127.0
    inverse = e.select(scale.compare("==", 0.0), e.const("f32", 0.0), e.const("f32", 1.0) / scale)
    scaled = values * e.splat(inverse, n)
    away = e.select(scaled.compare("<", 0.0), e.const("f32", -0.5, n), 0.5)
    # a half is added, then truncated: ties go away from zero. The sum of 0.49999997 and a half
    # would round up to 1, so a value below a half stays as it is
    small = e.abs(scaled).compare("<", 0.5)
    quants = e.select(small, e.const("f32", 0.0, n), scaled + away).to("i32")
    e.store(scale.to("f16"), dst)
    e.store(quants.to("i8"), dst + 2)


CELL_TYPES = {
    d.name: CellType(d, load, store)
    for d, load, store in zip(
        CACHE_DTYPES,
        (_f16, _bf16, _f32, _q8_0),
        (_to_f16, _to_bf16, _to_f32, _to_q8_0),
        strict=True,
    )
}
