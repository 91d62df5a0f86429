"""The host backend: synchronous, on host memory, with weights in the file's memory map.

An engine meets it as llama.cpp's scheduler meets llama.cpp's CPU backend: there are no streams and
no events, and a launch is done when its call returns. The caller and helper threads share a large
kernel, as workers of one ring (`loops.py`). A small kernel runs inline.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from workbench.backend.cpu.device import base
from workbench.backend.cpu.device.loops import push, run_inline, run_worker
from workbench.backend.cpu.device.ring import (
    MemoryBlock,
    Ring,
    aligned_zeros,
    kernel_block,
    kernel_work,
)
from workbench.backend.issue.args import AddressOf, Args
from workbench.backend.issue.issued import Issued, Words, together
from workbench.common.errors import DeviceError
from workbench.graph.ir import Node, Tensor
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Space


class HostMemory:
    """A numpy array as Memory. `free` drops the reference; any other holder keeps the array."""

    def __init__(self, array: np.ndarray):
        self.array: np.ndarray | None = array
        self.address = int(array.ctypes.data)
        self.nbytes = array.nbytes

    def free(self) -> None:
        self.array = None


class HostBackend(base.CpuBackend):
    """See the module. Takes no launch after `close`. Raises DeviceError for an impossible number of
    threads.

    threads: workers, the calling thread among them (0: every core).
    """

    name = "host"
    capabilities = Capabilities(
        asynchronous_copies=False, events=False, one_order=True, capture=False, n_streams=0
    )

    def __init__(self, threads: int = 0):
        self.workers = base.n_workers(threads)
        self.description = f"host, {self.workers} threads, {base.cpu_name()}"
        self.waiting = "never: every call returns when its work is done"
        self._ring = Ring("the host backend", self.workers - 1)
        self._helpers = False
        self._end = weakref.finalize(self, self._ring.close)

    def allocate(self, nbytes: int, space: Space) -> HostMemory:
        """Zeroed, 64-byte aligned; every space is host memory here. Raises DeviceError."""
        return HostMemory(aligned_zeros(nbytes))

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> HostMemory:
        """Uses the file's bytes in place; they must outlive the backend."""
        return HostMemory(data)

    def launch_op(self, node: Node, address_of: AddressOf, scratch: int, stream: int) -> Issued:
        """Computes `node` to its end."""
        calls = base.bind(node, address_of, scratch, "file", self.workers)
        return together([self.run_kernel(*call) for call in calls])

    def run_kernel(
        self, function: int, parts: int, args: Args, pointers: tuple[int, ...] = ()
    ) -> Issued:
        """Runs the kernel at address `function`; the workers share it where parts > 1. pointers:
        which arguments are addresses."""
        block = kernel_block(function, parts, args, pointers)
        same = kernel_work(function, parts)
        if parts == 1:

            def inline(command: int = block.address, _block: MemoryBlock = block) -> None:
                run_inline(command)

            return Issued(inline, same, block)
        if not self._helpers:
            self._helpers = True
            self._ring.start()

        def shared(
            ring: Ring = self._ring, command: int = block.address, _block: MemoryBlock = block
        ) -> None:
            if push(ring.address, command):
                raise DeviceError("the host backend is closed; open a new one")
            run_worker(ring.address, ring.issued, ring.yield_ns)

        return Issued(shared, same, block)

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        args = [dst, src, nbytes]
        move = ctypes.memmove

        def copy() -> None:
            move(*args)

        return Issued(copy, ("copy",), Words(args, (0, 1)))

    def close(self) -> None:
        self._end()


open_backend = HostBackend
