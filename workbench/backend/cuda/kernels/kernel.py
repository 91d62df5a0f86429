"""What the launch functions of the cuda backend are given, and what they return: kernels, and
products for cuBLAS.

Pure data. `op_table.py` says which of them compute a node; `backend.py` issues them.
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
    """Addresses for the kernels of a node: tensors, scratch, and counters (u32, all zero) that only
    kernels of the same stream use."""

    at: AddressOf
    scratch: int
    counters: int
    sm: int = CLUSTERS  # compute capability of the device, times ten

    def inside(self, node: Node) -> Operands:
        """For the parts of a fused node that run as launches of their own."""
        at, scratch = parts_addresses(node, self.at, self.scratch)
        return self._replace(at=at, scratch=scratch)

    def at_if(self, tensor: Tensor | None) -> int:
        """Address 0 where there is no tensor."""
        return 0 if tensor is None else self.at(tensor)


class Kernel(NamedTuple):
    """One kernel launch.

    file: name of a `kernels/*.cu` without its suffix; function: an `extern "C"` kernel in it;
    sources: the folder of the file, where it is not `kernels/`;
    grid: blocks (x, y); block: threads; args: every argument as an int of 8 bytes or a float.
    defines: macros (`"ROWS=2"`) that the file is compiled with for this kernel alone, when it is
    first prepared. shared: bytes of dynamic shared memory. waits: the kernel executes
    `griddepcontrol.wait` on every path before its first dependent read and before every write. Only
    then may it be launched programmatically.
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
    """One product for cuBLAS: dst (n_tokens, rows) F32 = x (n_tokens, cols) times w (rows, cols)
    transposed, w and x both of `dtype` (F16, BF16 or F32), summed in float32. dst_stride: elements
    from one token's results to the next. Addresses in bytes."""

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
    """The argument block of a kernel: the values, 8 bytes each, and behind them their addresses,
    which are what cuLaunchKernel calls kernelParams; and the address of these."""
    n = len(args)
    kind, layout = _argument_block(n)
    block = kind()
    address = ctypes.addressof(block)
    values = [a if isinstance(a, int) else _bits(a) for a in args]
    layout.pack_into(block, 0, *values, *range(address, address + 8 * n, 8))
    return block, address + 8 * n


@functools.cache
def _argument_block(n: int) -> tuple[Any, struct.Struct]:
    """Type and layout of a block of n arguments and their n addresses."""
    return ctypes.c_int64 * (2 * n), struct.Struct(f"<{2 * n}q")


def _bits(argument: float) -> int:
    """The 8 bytes a kernel reads for a real argument: a float32 in the low four."""
    return struct.unpack("<I", struct.pack("<f", argument))[0]


def blocks(n: int, size: int) -> int:
    """Blocks of `size` that cover n."""
    return -(-n // size)
