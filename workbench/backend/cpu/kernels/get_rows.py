"""get_rows: rows of a weight table, dequantised to float32.

From a table in layout rows16, each block is reassembled first. Arithmetic and bits are the same as
in ggml's reference dequantisation (`ggml-quants.c`; in NumPy, the `gguf` package).
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.backend.cpu.kernels.cells import CELL_TYPES
from workbench.backend.cpu.kernels.decode import e8m0_half
from workbench.backend.cpu.kernels.interleave import FORMATS, GROUP, unpack_block
from workbench.backend.cpu.kernels.vector import Body, Emit, Value
from workbench.graph.ir import DTYPES, QUANTISED

_E2M1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def _half(e: Emit, at: Value) -> Value:
    return e.load("f16", at).to("f32")


def _store(e: Emit, quants: Value, scale: Value, dst: Value, less: Value | None = None) -> None:
    """quants (integers, any width) * scale - less, as float32."""
    kind = "i32" if quants.kind[0] == "i" else "u32"
    values = quants.to(kind).to("i32").to("f32") * scale
    e.store(values if less is None else values - less, dst)


def _q8_0(e: Emit, at: Value, dst: Value) -> None:
    _store(e, e.load("i8", at + 2, 32), _half(e, at), dst)


def _q4_0(e: Emit, at: Value, dst: Value) -> None:
    raw, d = e.load("u8", at + 2, 16), _half(e, at)
    for half, q in enumerate((raw & 15, raw >> 4)):
        _store(e, q.to("i8") - 8, d, dst + 64 * half)


def _mxfp4(e: Emit, at: Value, dst: Value) -> None:
    scale = e8m0_half(e, e.load("u8", at).to("u32"))
    raw = e.load("u8", at + 1, 16)
    for half, code in enumerate((raw & 15, raw >> 4)):
        value = e.const("i8", 0, 16)
        for c, v in enumerate(_E2M1):
            value = e.select(code.compare("==", c), e.const("i8", v, 16), value)
        _store(e, value, scale, dst + 64 * half)


def _q45_k(e: Emit, at: Value, dst: Value, fifth: bool) -> None:
    d, dmin = _half(e, at), _half(e, at + 2)
    quants = at + (48 if fifth else 16)

    def byte(i: int) -> Value:
        return e.load("u8", at + 4 + i)

    for j in range(8):
        if j < 4:
            scale, least = byte(j) & 63, byte(j + 4) & 63
        else:
            scale = (byte(j + 4) & 15) | ((byte(j - 4) >> 6) << 4)
            least = (byte(j + 4) >> 4) | ((byte(j) >> 6) << 4)
        raw = e.load("u8", quants + 32 * (j // 2), 32)
        q = raw >> 4 if j % 2 else raw & 15
        if fifth:
            q = q | (((e.load("u8", at + 16, 32) >> j) & 1) << 4)
        less = dmin * least.to("u32").to("f32")
        _store(e, q, d * scale.to("u32").to("f32"), dst + 128 * j, less)


def _q6_k(e: Emit, at: Value, dst: Value) -> None:
    d = _half(e, at + 208)
    for j in range(16):  # 16 columns: half n of the block, quarter k, half h of the quarter
        n, k, h = j // 8, j // 2 % 4, j % 2
        low = e.load("u8", at + 64 * n + 32 * (k % 2) + 16 * h, 16)
        high = e.load("u8", at + 128 + 32 * n + 16 * h, 16)
        q = (low >> 4 if k // 2 else low & 15) | (((high >> (2 * k)) & 3) << 4)
        scale = d * e.load("i8", at + 192 + j).to("i32").to("f32")
        _store(e, q.to("i8") - 32, scale, dst + 64 * j)


DEQUANTISE: dict[str, Callable[[Emit, Value, Value], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
    "Q4_K": lambda e, at, dst: _q45_k(e, at, dst, fifth=False),
    "Q5_K": lambda e, at, dst: _q45_k(e, at, dst, fifth=True),
    "Q6_K": _q6_k,
}


def get_rows_body(dtype: str, layout: str) -> Body:
    """Kernel get_rows for tables of `dtype`. Parts are ranges of ids. An id outside the table
    gives a row of NaN."""

    def float_row(e: Emit, dst: Value, table: Value, index: Value, cols: Value) -> None:
        types = CELL_TYPES[dtype]
        types.read(e, table + index * types.nbytes(cols), dst, cols)

    def block_row(e: Emit, dst: Value, table: Value, index: Value, cols: Value) -> None:
        fmt = FORMATS[dtype]
        packed = layout == "rows16"
        row_bytes = cols // fmt.cols * fmt.block_bytes
        source = table + (index // GROUP * GROUP if packed else index) * row_bytes
        block = e.stack(fmt.block_bytes)
        with e.loop(0, cols // fmt.cols) as b:
            if packed:
                unit = source + b * (fmt.block_bytes * GROUP)
                unpack_block(e, fmt, unit, index % GROUP, block)
            at = block if packed else source + b * fmt.block_bytes
            DEQUANTISE[dtype](e, at, dst + b * (fmt.cols * 4))

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, table, ids, n_ids, cols, table_rows = e.arguments(args, "iiiiii")
        copy_row = block_row if DTYPES[dtype] in QUANTISED else float_row
        start, stop = e.share(n_ids, part, n_parts)
        with e.loop(start, stop) as i:
            index = e.load("i32", ids + i * 4).to("i64")
            target = dst + i * cols * 4
            # as an unsigned number, a negative id is past the end too
            with e.when_else(index.to("u64").compare("<", table_rows)) as (inside, outside):
                with inside:
                    copy_row(e, target, table, index, cols)
                with outside, e.loop(0, cols) as c:
                    e.store(e.const("f32", float("nan")), target + c * 4)

    return body
