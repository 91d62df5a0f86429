"""What the CPU backends share: the cores of this machine, how a node becomes a command, and
`CpuBackend`, which builds fused nodes, scratch and compilation on that."""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workbench.backend.base import Backend
from workbench.backend.cpu.compile import host_isas
from workbench.backend.cpu.device.loops import MAX_PARTS
from workbench.backend.cpu.kernels import op_table
from workbench.backend.issue.args import AddressOf, Args, parts_addresses, parts_scratch_bytes
from workbench.backend.issue.issued import Address, Issued, pointers_of, together
from workbench.common.cores import usable_cores
from workbench.common.errors import DeviceError
from workbench.common.progress import Bar
from workbench.config import AttnKernel
from workbench.graph import ops
from workbench.graph.ir import Kind, Node, Tensor

MAX_WORKERS = 1024
# What one worker does in a microsecond, roughly: n_parts needs no better.
BYTES_PER_US, FLOPS_PER_US = 20_000, 100_000
PART_US = 8  # a shorter part costs more to hand over than it saves
PARTS_PER_WORKER = 4  # where the system puts a worker aside, the others take its parts


def n_workers(threads: int) -> int:
    """`threads`, or every core this process may use where it is 0."""
    if not 0 <= threads <= MAX_WORKERS:
        raise DeviceError(f"threads={threads}; choose 0 (every core) to {MAX_WORKERS}")
    return threads or usable_cores()


@cache
def cpu_name() -> str:
    """The processor's name and the instructions its kernels use: `AMD EPYC (avx512vnni)`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({host_isas()[0].name})"


def n_parts(node: Node, workers: int) -> int:
    """The number of row ranges that workers share a node by; 1 where sharing would not pay.

    The number depends on shapes alone, and changes no result: a row is computed alike in any part.
    """
    if workers == 1:
        return 1
    us = max(ops.touched_bytes(node) / BYTES_PER_US, ops.flops(node) / FLOPS_PER_US)
    return max(1, min(int(us / PART_US), PARTS_PER_WORKER * workers, MAX_PARTS))


class KernelCall(NamedTuple):
    """A call that runs a node: the address of a kernel, the number of its parts, its arguments, and
    which arguments are addresses."""

    function: int
    parts: int
    args: Args
    pointers: tuple[int, ...]


def bind(
    node: Node, address_of: AddressOf, scratch: int, layout: str, workers: int
) -> list[KernelCall]:
    """The kernels for `node`, whose weight lies in `layout`, one after the other."""
    args, pointers = op_table.arguments(node, address_of, scratch), _pointers(node)
    parts = n_parts(node, workers)
    return [
        KernelCall(op_table.kernel_address(kernel, layout), parts, args, pointers)
        for kernel in op_table.kernels_of(node)
    ]


_POINTERS: dict[tuple[str, object], tuple[int, ...]] = {}


def _pointers(node: Node) -> tuple[int, ...]:
    """Which arguments of the kernel for `node` are addresses. The answer is found once for an op
    and a number of inputs. (To ask each argument made preparing a rebuilt step a third slower.)"""
    which = node.op, node.params["more"] if "more" in node.params else len(node.inputs)
    found = _POINTERS.get(which)
    if found is None:
        args = op_table.arguments(node, lambda tensor: Address(1), Address(1))
        found = _POINTERS[which] = pointers_of(args)
    return found


class CpuBackend(Backend):
    """A backend that computes nodes on `workers` threads. A fused node runs part by part, because
    every CPU kernel computes one op."""

    def refuses(self, node: Node) -> str:
        if node.params.get("kernel") == AttnKernel.MMA:
            return (
                f"attn_kernel=mma wants the matrix units of a GPU; with device={self.name} use "
                "attn_kernel=auto, vec or tile"
            )
        return ""

    def scratch_bytes(self, node: Node) -> int:
        if node.parts:
            return parts_scratch_bytes(node, self.scratch_bytes)
        return op_table.scratch_bytes(node, n_parts(node, self.workers))

    def launch(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
    ) -> Issued:
        """Runs `node`; the parts of a fused node run one after the other. Tensors between parts lie
        in the node's scratch. `programmatic` means nothing here."""
        if not node.parts:
            return self.launch_op(node, address_of, scratch, stream)
        at, own = parts_addresses(node, address_of, scratch)
        return together([self.launch(part, at, own, stream) for part in node.parts])

    def copy_to_peer(self, peer: Any, dst: int, src: int, nbytes: int, stream: int) -> Issued:
        """Like a copy to the host, read when it runs: both memories belong to this process."""
        return self.copy(dst, src, nbytes, stream, to_host=True)

    def layout_of(self, weight: Tensor) -> str:
        """The layout of a weight in this backend's memory: the model file's."""
        return "file"

    def make_ready(self, nodes: Sequence[Node], left: Bar, noted: bool = False) -> None:
        """Compiles what many kernels the cache lacks in other processes, and then loads one after
        the other; none notes."""
        op_table.compile_many(one for node in nodes for one in self._kernels(node))
        for node in nodes:
            for variant, layout in self._kernels(node):
                op_table.kernel_address(variant, layout)
            left.update()

    def _kernels(self, node: Node) -> Iterator[tuple[tuple[str, ...], str]]:
        """The kernels of a node and of its parts."""
        for part in node.parts:
            yield from self._kernels(part)
        if not node.parts:
            first = node.inputs[0]
            layout = self.layout_of(first) if first.kind == Kind.WEIGHT else "file"
            yield from ((variant, layout) for variant in op_table.kernels_of(node))

    @abstractmethod
    def launch_op(self, node: Node, address_of: AddressOf, scratch: int, stream: int) -> Issued:
        """`launch` of a node of one op."""
