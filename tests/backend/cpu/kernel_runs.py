"""How the CPU kernel tests run a kernel: by its node, between guards, in one part or several."""

from __future__ import annotations

import struct

import numpy as np

from workbench.backend.cpu.kernels import op_table
from workbench.backend.issue import args
from workbench.graph.ir import Node, Tensor

GUARD = 256  # bytes before and after every output
PARTS = (1, 2, 3, 5)


class Arena:
    """Which array holds which tensor; an output gets memory of its own between guards."""

    def __init__(self, arrays: dict[Tensor, np.ndarray]):
        self.arrays = {t: np.ascontiguousarray(a) for t, a in arrays.items()}

    def address(self, tensor: Tensor) -> int:
        return int(self.arrays[tensor].ctypes.data)


def words(values: args.Args) -> np.ndarray:
    """An argument block: int64, real parameters as the bits of a float64."""
    bits = [
        struct.unpack("<q", struct.pack("<d", v))[0] if isinstance(v, float) else v for v in values
    ]
    return np.array(bits, np.int64)


def run(
    node: Node,
    arrays: dict[Tensor, np.ndarray],
    n_parts: int = 1,
    layout: str = "file",
    isa: str | None = None,
    start: np.ndarray | int = 0xFF,
) -> np.ndarray:
    """The node's output as uint8 bytes, computed by n_parts one after the other.

    `start`: what the output holds before; 0xFF in every byte is a NaN in every float type.
    Asserts that the bytes around output and scratch stay as they were.
    """
    out, arena = node.output, Arena(arrays)
    padded = np.full(out.nbytes + 2 * GUARD, 0xA5, np.uint8)
    body = padded[GUARD : GUARD + out.nbytes]
    body[:] = start if isinstance(start, int) else start.view(np.uint8).reshape(-1)
    n_scratch = op_table.scratch_bytes(node, n_parts)
    scratch = np.full(n_scratch + 2 * GUARD, 0xFF, np.uint8)

    def address_of(tensor: Tensor) -> int:
        return int(body.ctypes.data) if tensor is out else arena.address(tensor)

    block = words(op_table.arguments(node, address_of, int(scratch.ctypes.data) + GUARD))
    for kernel in op_table.kernels_of(node):
        call = op_table.kernel(kernel, layout, isa).ctypes
        for part in range(n_parts):
            call(int(block.ctypes.data), part, n_parts)
    for outside in (padded[:GUARD], padded[GUARD + out.nbytes :]):
        assert (outside == 0xA5).all(), "bytes beside the output were written"
    for outside in (scratch[:GUARD], scratch[GUARD + n_scratch :]):
        assert (outside == 0xFF).all(), "bytes beside the scratch were written"
    return body.copy()


def run_parts(node: Node, arrays: dict[Tensor, np.ndarray], layout: str = "file") -> np.ndarray:
    """As `run`, and asserts that any number of parts gives these bytes, whatever was there."""
    first = run(node, arrays, 1, layout)
    for n_parts in PARTS[1:]:
        assert np.array_equal(run(node, arrays, n_parts, layout, start=0x5A), first), n_parts
    return first


def written_by(node: Node, arrays: dict[Tensor, np.ndarray], n_parts: int, layout: str):
    """Per part, which bytes of the output it wrote: bool (n_parts, nbytes)."""
    call = op_table.kernel(op_table.kernel_of(node), layout).ctypes
    arena, out = Arena(arrays), node.output
    scratch = np.zeros(max(1, op_table.scratch_bytes(node, n_parts)), np.uint8)
    written = np.zeros((n_parts, out.nbytes), bool)
    for part in range(n_parts):
        for fill in (0x00, 0xFF):  # a byte that happens to equal one of them differs from the other
            body = np.full(out.nbytes, fill, np.uint8)
            own = {out: body}
            block = words(
                op_table.arguments(
                    node,
                    lambda t, own=own: int(own.get(t, arena.arrays.get(t)).ctypes.data),
                    int(scratch.ctypes.data),
                )
            )
            call(int(block.ctypes.data), part, n_parts)
            written[part] |= body != fill
    return written
