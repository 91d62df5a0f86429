"""get_rows: rows of a weight table, dequantised to float32.

A unit of 16 rows is decoded as for a product, and one of its rows is kept. Arithmetic and bits are
the same as in ggml's reference dequantisation (`ggml-quants.c`; in NumPy, the `gguf` package).
"""

from __future__ import annotations

from workbench.backend.cpu.decode import CodeBlock, code_of, values
from workbench.backend.cpu.interleave import FORMATS, GROUP, pack_unit
from workbench.backend.cpu.isa import Isa
from workbench.backend.cpu.matvec import FLOAT_LOADS
from workbench.backend.cpu.vector import Body, Emit, Value


def get_rows_body(dtype: str, layout: str, isa: Isa) -> Body:
    """Kernel get_rows for tables of `dtype`. Parts are ranges of ids. An id outside the table
    gives a row of NaN."""

    def row_bytes(cols: Value) -> Value:
        if dtype in FLOAT_LOADS:
            return cols * FLOAT_LOADS[dtype][0]
        return cols // FORMATS[dtype].cols * FORMATS[dtype].block_bytes

    def float_row(e: Emit, dst: Value, table: Value, index: Value, cols: Value) -> None:
        size, load = FLOAT_LOADS[dtype]
        source = table + index * row_bytes(cols)

        def step(c: Value, n: int) -> None:
            e.store(load(e, source + c * size, n), dst + c * 4)

        e.flat_loops(e.const("i64", 0), cols, 16, step)

    def block_row(e: Emit, dst: Value, table: Value, index: Value, cols: Value) -> None:
        fmt, code = FORMATS[dtype], code_of(dtype, isa)
        packed = layout == "rows16"
        row = index % GROUP if packed else e.const("i64", 0)
        source = table + (index - row) * row_bytes(cols)
        unit = e.stack(fmt.block_bytes * GROUP)
        column = e.stack(4 * GROUP)  # of the 16 rows
        with e.loop(0, cols // fmt.cols) as b:
            if packed:
                unit = source + b * (fmt.block_bytes * GROUP)
            else:
                pack_unit(e, fmt, unit, [source] * GROUP, b * fmt.block_bytes)

            def take(block: CodeBlock, b=b) -> None:
                at = dst + (b * fmt.cols + block.sub * 32) * 4
                for c in range(8):
                    for i, value in enumerate(values(e, code, block, c)):
                        e.store(value, column)
                        e.store(e.load("f32", column + row * 4), at + 4 * (4 * c + i))

            code.unit(e, isa, unit, take)

    def body(e: Emit, args: Value, part: Value, n_parts: Value) -> None:
        dst, table, ids, n_ids, cols, table_rows = e.arguments(args, "iiiiii")
        copy_row = float_row if dtype in FLOAT_LOADS else block_row
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
