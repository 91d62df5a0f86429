"""The data of a launch on CUDA: operands go into the launch functions; kernels, and products for
cuBLAS, come out.

Pure data. `op_table.py` chooses the launches of a node; `cuda/device/backend.py` issues them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import Any, NamedTuple

from workbench.backend.issue.args import AddressOf, Args, parts_addresses
from workbench.graph.ir import Node, Tensor

CLUSTERS = 90  # compute capability, times ten, from which blocks can form clusters
HOPPER = 90  # compute capability of the devices with wgmma


class Operands(NamedTuple):
    """Addresses for the kernels of a node.

    at: of each tensor.
    scratch: memory for the node's intermediate results.
    counters: u32, all zero, which only kernels of the same stream use.
    sm: compute capability of the device, times ten.
    """

    at: AddressOf
    scratch: int
    counters: int
    sm: int = CLUSTERS

    def inside(self, node: Node) -> Operands:
        """The operands of the parts of a fused node, where parts are separate launches."""
        at, scratch = parts_addresses(node, self.at, self.scratch)
        return self._replace(at=at, scratch=scratch)

    def at_if(self, tensor: Tensor | None) -> int:
        """The address of `tensor`; 0 for None."""
        return 0 if tensor is None else self.at(tensor)


class Kernel(NamedTuple):
    """One kernel launch.

    file: name of a `kernels/*.cu` without its suffix.
    function: an `extern "C"` kernel in the file.
    grid: blocks (x, y).
    block: threads.
    args: every argument, as an int of 8 bytes or a float.
    defines: macros (`"ROWS=2"`) of a compilation of the file for this kernel alone. It happens when
        the launch is first prepared.
    shared: bytes of dynamic shared memory.
    waits: the kernel executes `griddepcontrol.wait` on every path before its first dependent read
        and before every write. Only such a kernel may be launched programmatically.
    sources: the folder of the file; None for `kernels/`.
    """

    file: str
    function: str
    grid: tuple[int, int]
    block: int
    args: Args
    defines: tuple[str, ...] = ()
    shared: int = 0
    waits: bool = False
    sources: Path | None = None


class Gemm(NamedTuple):
    """One product for cuBLAS: dst = x times w transposed, summed in float32. Addresses in bytes.

    dtype: type of w and x: F16, BF16 or F32.
    dst: F32 (n_tokens, rows).
    w: (rows, cols).
    x: (n_tokens, cols).
    dst_stride: elements from a token's results to the next token's.
    """

    dtype: str
    dst: int
    w: int
    x: int
    rows: int
    cols: int
    n_tokens: int
    dst_stride: int


Work = Kernel | Gemm


def packed(args: Args) -> tuple[Any, int]:
    """The argument block of a kernel, and the address of its second half.

    The first half holds the values, 8 bytes each. The second half holds their addresses, which
    cuLaunchKernel calls kernelParams.
    """
    n = len(args)
    kind, layout = _argument_block(n)
    block = kind()
    address = ctypes.addressof(block)
    values = [a if isinstance(a, int) else _bits(a) for a in args]
    layout.pack_into(block, 0, *values, *range(address, address + 8 * n, 8))
    return block, address + 8 * n


@functools.cache
def _argument_block(n: int) -> tuple[Any, struct.Struct]:
    """The type and the layout of a block of n arguments and their n addresses."""
    return ctypes.c_int64 * (2 * n), struct.Struct(f"<{2 * n}q")


def _bits(argument: float) -> int:
    """The 8 bytes of a real argument: a float32 in the low four."""
    return struct.unpack("<I", struct.pack("<f", argument))[0]


def blocks(n: int, size: int) -> int:
    """How many blocks of `size` cover n."""
    return -(-n // size)
