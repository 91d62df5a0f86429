"""How the CPU kernel tests run a kernel: by its node, between guards, in one part or several."""

from __future__ import annotations

import ctypes
import struct

import numpy as np

from workbench.backend.cpu.kernels import op_table
from workbench.backend.issue import args
from workbench.graph.ir import DType, Node, Tensor

GUARD = 256  # bytes before and after every output
PARTS = (1, 2, 3, 5)
Arrays = dict[Tensor, np.ndarray]


def words(values: args.Args) -> np.ndarray:
    """An argument block: int64, real parameters as the bits of a float64."""
    bits = [
        struct.unpack("<q", struct.pack("<d", v))[0] if isinstance(v, float) else v for v in values
    ]
    return np.array(bits, np.int64)


def repack(dst: int, src: int, dtype: DType, rows: int, cols: int, layout: str) -> None:
    """Copies a weight in the file's layout at src to dst, in `layout`; dst has `repacked_bytes`."""
    if layout == "file":
        ctypes.memmove(dst, src, rows * dtype.row_bytes(cols))
        return
    args = (ctypes.c_int64 * 4)(dst, src, rows, cols)
    op_table.kernel(("repack", dtype.name)).ctypes(ctypes.addressof(args), 0, 1)


def _call(node: Node, given: Arrays, out: int, scratch: int, parts, n_parts, layout, isa=None):
    """Runs some parts of a node's kernels, its output at address `out`."""
    arrays = {t: np.ascontiguousarray(a) for t, a in given.items()}

    def address_of(tensor: Tensor) -> int:
        return out if tensor is node.output else int(arrays[tensor].ctypes.data)

    block = words(op_table.arguments(node, address_of, scratch))
    for kernel in op_table.kernels_of(node):
        for part in parts:
            op_table.kernel(kernel, layout, isa).ctypes(int(block.ctypes.data), part, n_parts)


def run(
    node: Node,
    arrays: Arrays,
    n_parts: int = 1,
    layout: str = "file",
    isa: str | None = None,
    start: np.ndarray | int = 0xFF,
) -> np.ndarray:
    """The node's output as uint8 bytes, computed by n_parts one after the other.

    `start`: what the output holds before; 0xFF in every byte is a NaN in every float type.
    Asserts that the bytes around output and scratch stay as they were.
    """
    n_out, n_scratch = node.output.nbytes, op_table.scratch_bytes(node, n_parts)
    padded = np.full(n_out + 2 * GUARD, 0xA5, np.uint8)
    scratch = np.full(n_scratch + 2 * GUARD, 0xA5, np.uint8)
    body = padded[GUARD : GUARD + n_out]
    body[:] = start if isinstance(start, int) else start.view(np.uint8).reshape(-1)
    scratch[GUARD : GUARD + n_scratch] = 0xFF
    at = [int(memory.ctypes.data) + GUARD for memory in (padded, scratch)]
    _call(node, arrays, *at, range(n_parts), n_parts, layout, isa)
    for memory, n in ((padded, n_out), (scratch, n_scratch)):
        outside = np.delete(memory, slice(GUARD, GUARD + n))
        assert (outside == 0xA5).all(), "bytes beside the output or the scratch were written"
    return body.copy()


def run_parts(node: Node, arrays: Arrays, layout: str = "file") -> np.ndarray:
    """As `run`, and asserts that any number of parts gives these bytes, whatever was there."""
    first = run(node, arrays, 1, layout)
    for n_parts in PARTS[1:]:
        assert np.array_equal(run(node, arrays, n_parts, layout, start=0x5A), first), n_parts
    return first


def check_shares(node: Node, arrays: Arrays, n_parts: int, layout: str) -> None:
    """Each byte of the output is written by one part, and each part writes some."""
    scratch = np.zeros(max(1, op_table.scratch_bytes(node, n_parts)), np.uint8)
    written = np.zeros((n_parts, node.output.nbytes), bool)
    for part in range(n_parts):
        for fill in (0x00, 0xFF):  # a byte that happens to equal one of them differs from the other
            body = np.full(node.output.nbytes, fill, np.uint8)
            at = int(body.ctypes.data), int(scratch.ctypes.data)
            _call(node, arrays, *at, [part], n_parts, layout)
            written[part] |= body != fill
    assert (written.sum(axis=0) == 1).all() and written.any(axis=1).all()
