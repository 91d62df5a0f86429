"""What the CPU backends share: which cores there are, how a node becomes an entry of a ring, and
what follows from it for every node (`CpuBackend`)."""

from __future__ import annotations

import os
import platform
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from workbench.backend.args import AddressOf, Args, pack, parts_places, parts_scratch_bytes
from workbench.backend.base import Backend
from workbench.backend.cpu import op_table as cpu
from workbench.backend.cpu.compile import host_isas
from workbench.backend.cpu.loops import MAX_PARTS
from workbench.backend.issued import Issued, together
from workbench.errors import DeviceError
from workbench.graph import ops
from workbench.graph.ir import Kind, Node, Tensor
from workbench.progress import Bar

MAX_LANES = 1024
# What one lane does in a microsecond, roughly: the grain below needs no better.
BYTES_PER_US, FLOPS_PER_US = 20_000, 100_000
PART_US = 8  # a part shorter than this costs more to hand over than it saves
PARTS_PER_LANE = 4  # so that a lane the system put aside leaves its share to the others


def n_lanes(threads: int) -> int:
    """`threads`, or every core this process may use where it is 0."""
    if not 0 <= threads <= MAX_LANES:
        raise DeviceError(f"threads={threads}; choose 0 (every core) to {MAX_LANES}")
    if threads:
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def cpu_name() -> str:
    """The processor's name and the instructions its kernels use: `AMD EPYC (avx512vnni)`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({host_isas()[0].name})"


def n_parts(node: Node, lanes: int) -> int:
    """Into how many row ranges a node is split; 1 where sharing it would not pay.

    From shapes alone. Kernels compute rows alike whoever computes them, so it changes no result.
    """
    if lanes == 1:
        return 1
    us = max(ops.touched_bytes(node) / BYTES_PER_US, ops.flops(node) / FLOPS_PER_US)
    return max(1, min(int(us / PART_US), PARTS_PER_LANE * lanes, MAX_PARTS))


def bind(
    node: Node, address_of: AddressOf, scratch: int, layout: str, lanes: int
) -> tuple[int, int, Args]:
    """Kernel address, parts and arguments of `node`; `layout` is that of its weight."""
    function = cpu.kernel_address(cpu.kernel_of(node), layout)
    return function, n_parts(node, lanes), pack(node, address_of, scratch)


class CpuBackend(Backend):
    """A backend that computes nodes on `lanes` threads; a fused node part by part, for no kernel
    here is of several ops."""

    lanes: int

    def scratch_bytes(self, node: Node) -> int:
        if node.parts:
            return parts_scratch_bytes(node, self.scratch_bytes)
        return cpu.scratch_bytes(node, n_parts(node, self.lanes))

    def launch(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
    ) -> Issued:
        """Runs `node`, of a fused node every part one after the other; what parts hand to each
        other lies in the node's scratch. `programmatic` means nothing here."""
        if not node.parts:
            return self.launch_op(node, address_of, scratch, stream)
        at, own = parts_places(node, address_of, scratch)
        return together([self.launch(part, at, own, stream) for part in node.parts])

    def layout_of(self, weight: Tensor) -> str:
        """The layout that a weight has here: as in the file."""
        return "file"

    def make_ready(self, nodes: Sequence[Node], left: Bar) -> None:
        """Kernels of the CPU are compiled one after the other."""
        for node in nodes:
            self._compile(node)
            left.update()

    def _compile(self, node: Node) -> None:
        for part in node.parts:
            self._compile(part)
        if not node.parts:
            first = node.inputs[0]
            layout = self.layout_of(first) if first.kind == Kind.WEIGHT else "file"
            cpu.kernel_address(cpu.kernel_of(node), layout)

    @abstractmethod
    def launch_op(self, node: Node, address_of: AddressOf, scratch: int, stream: int) -> Issued:
        """`launch` of a node of one op."""
