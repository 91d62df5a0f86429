"""The cuda backend: NVIDIA GPUs of compute capability 8.0 and later.

CuPy gives memory, streams and events. Kernels come from `kernels/*.cu` through NVRTC
(`cuda/kernels/op_table.py`). Commands are issued through cuda-bindings, with every argument
converted once. A launch is one call with a ready argument block. It takes 4 us of host time on the
host of an H100; a CuPy kernel call took 5.7 us. Copies, records and waits are prepared in the same
way.

Importing this module loads neither CuPy nor the driver; `open_backend` and `probe` do.

Streams never synchronise with the legacy default stream. A backend belongs to the thread that
opened it; another thread calls `attach()` once before it issues anything.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.backend.base import Backend, DeviceClock, Issue, KernelName, nothing
from workbench.backend.cuda.device import graphs, timer, weights
from workbench.backend.cuda.device.driver import (
    CudaEvent,
    CudaMemory,
    Driver,
    describe,
    device_properties,
    libraries,
)
from workbench.backend.cuda.device.graph_nodes import GraphArguments, commands_of
from workbench.backend.cuda.device.marks import Mark, Marks
from workbench.backend.cuda.device.weights import Uploader
from workbench.backend.cuda.kernels import noting, nvrtc, op_table
from workbench.backend.cuda.kernels.cublas import PRODUCT, Blas
from workbench.backend.cuda.kernels.kernel import Gemm, Kernel, Work, packed
from workbench.backend.issue.args import AddressOf
from workbench.backend.issue.issued import Address, Issued, Plannable, pointers_of, together
from workbench.backend.plan import gate
from workbench.common.errors import DeviceError
from workbench.common.progress import Bar
from workbench.graph.ir import Node, Tensor
from workbench.program.capabilities import Capabilities
from workbench.program.commands import Space

N_STREAMS = 9  # 8 compute, 1 copies
SERVICE = -1  # the stream for loading, zeroing and the clock; no program uses it
REPACK = -2  # the stream that repacks weights while the next weights are uploaded
GATE_THREADS = 1024  # of kernels/gate.cu
N_COUNTERS = 4096  # u32 counters of each stream


def probe() -> str:
    """One line that names the GPU and its driver. Raises DeviceError, with one line that names what
    is missing."""
    cupy, _ = libraries()
    return describe(cupy, device_properties(cupy, 0))


def open_backend(threads: int = 0, device: int = 0, **options: Any) -> CudaBackend:
    """The backend of GPU number `device`. `threads` has no meaning here.

    Raises DeviceError where CuPy, cuda-bindings, NVRTC, a driver or the GPU is missing.
    """
    if options:
        raise DeviceError(f"the cuda device has no option {', '.join(options)}")
    return CudaBackend(device)


class CudaBackend(Backend):
    """See the module and `backend/base.py`."""

    name = "cuda"
    note_bytes = noting.NOTE_BYTES

    def __init__(self, device: int = 0):
        self._driver = Driver(device)
        major, minor = (self._driver.properties[k] for k in ("major", "minor"))
        self._sm = 10 * major + minor
        self._arch = f"sm_{self._sm}"
        self.capabilities = Capabilities(
            asynchronous_copies=True, events=True, one_order=True, capture=True,
            n_streams=N_STREAMS, programmatic=major >= 9,
        )  # fmt: skip
        self.description = self._driver.description
        self.waiting = "the driver's choice of spinning or yielding (no device flags set)"
        self._streams: dict[int, tuple[Any, Any]] = {}  # id -> CuPy's stream, CUstream
        self._memory: weakref.WeakSet[CudaMemory] = weakref.WeakSet()
        self._modules: dict[tuple[str, tuple[str, ...], Path | None], Any] = {}
        self._functions: dict[tuple, Any] = {}
        self._configs: dict[tuple[int, ...], Any] = {}  # of launches that begin early
        self._counters: dict[int, CudaMemory] = {}
        self._blas: Blas | None = None
        self._uploader: Uploader | None = None
        self._marks = Marks(self._driver)
        self._graphs: weakref.WeakSet[graphs.CudaGraph] = weakref.WeakSet()
        self._closed = False

    def attach(self) -> None:
        """Makes this device the calling thread's current device, so that the thread may issue."""
        self._driver.attach()

    # memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, space: Space) -> CudaMemory:
        self.attach()
        memory = self._allocate(nbytes, space)
        if memory.array is not None:
            memory.array[:] = 0
        elif nbytes:
            call, stream = self._driver.call, self._stream(SERVICE)
            what = f"zeroing {nbytes} bytes"
            call("cuMemsetD8Async", what, memory.address, 0, nbytes, stream)
            call("cuStreamSynchronize", what, stream)
        return memory

    def _allocate(self, nbytes: int, space: Space) -> CudaMemory:
        """As `allocate`, but the memory is not zeroed."""
        memory = self._driver.allocate(nbytes, space)
        self._memory.add(memory)
        return memory

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> CudaMemory:
        """Begins to load a weight (`backend/cuda/device/weights.py`); see `finish_loading`."""
        self.attach()
        if self._uploader is None:
            streams = self._stream(SERVICE), self._stream(REPACK)
            self._uploader = Uploader(self._driver, self._allocate, self._prepare, *streams)
        return self._uploader.load(tensor, data)

    def finish_loading(self) -> None:
        """Waits until every weight lies in its memory. Later work may use them."""
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            self.attach()
            uploader.finish()

    def refuses(self, node: Node) -> str:
        """Why no kernel computes `node`; empty where a kernel does."""
        nowhere = op_table.Operands(lambda tensor: 0, 0, 0)
        return weights.refuses(node, lambda n: op_table.launches(n, nowhere))

    def scratch_bytes(self, node: Node) -> int:
        return op_table.scratch_bytes(node)

    # commands --------------------------------------------------------------------------------

    def _stream(self, number: int) -> Any:
        """The CUstream of stream `number`, made at its first use."""
        if number not in self._streams:
            if number >= N_STREAMS:
                raise DeviceError(f"stream {number} does not exist: cuda has {N_STREAMS}")
            made = self._driver.cupy.cuda.Stream(non_blocking=True)
            self._streams[number] = made, self._driver.api.CUstream(made.ptr)
        return self._streams[number][1]

    def _function(self, kernel: Kernel) -> Any:
        """The kernel's CUfunction; compiles and loads its file the first time."""
        file, defines, sources = module = kernel.file, kernel.defines, kernel.sources
        key = *module, kernel.function, kernel.shared
        if key not in self._functions:
            call = self._driver.call
            if module not in self._modules:
                cubin = nvrtc.cubin(file, self._arch, defines, sources=sources)
                self._modules[module] = call("cuModuleLoadData", f"{file}.cu", cubin)
            name = kernel.function
            function = call("cuModuleGetFunction", name, self._modules[module], name.encode())
            if kernel.shared:
                most = self._driver.api.CUfunction_attribute
                attribute = most.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call("cuFuncSetAttribute", name, function, attribute, kernel.shared)
            # Otherwise the first launch would load the code, and that may be in a capture.
            call("cuFuncLoad", name, function)
            self._functions[key] = function
        return self._functions[key]

    def _prepare(self, work: Work, stream: Any, what: str, programmatic: bool = False) -> Issued:
        """The command that issues `work`. The argument block of a kernel holds the values, 8 bytes
        each, followed by their addresses: the kernelParams of cuLaunchKernel."""
        if isinstance(work, Gemm):
            if self._blas is None:
                self._blas = Blas()
            return self._blas.prepare(work, int(stream))
        kernel = work
        block, params = packed(kernel.args)
        same = (kernel.file, kernel.function, kernel.defines, kernel.sources, kernel.grid,
                kernel.block, kernel.shared, programmatic)  # fmt: skip
        function, launch = self._function(kernel), self._driver.api.cuLaunchKernel
        failure = self._driver.failure
        (x, y), threads, shared = kernel.grid, kernel.block, kernel.shared
        pointers, n = pointers_of(kernel.args), len(kernel.args)
        words = GraphArguments(block, n, pointers, function, kernel.grid)
        if programmatic:
            if not kernel.waits:
                raise DeviceError(
                    f"{what}: kernel {kernel.function} declares no wait for the launch before "
                    "it and cannot be launched programmatically; use pdl=off"
                )
            shape = x, y, threads, shared, int(stream)
            config = self._configs.get(shape)
            if config is None:  # making one takes longer than all else here
                config = self._driver.programmatic(x, y, threads, shared, stream)
                self._configs[shape] = config
            launch_ex = self._driver.api.cuLaunchKernelEx

            def issue_early(_block: Any = block) -> None:
                error = launch_ex(config, function, params, 0)[0]
                if error:
                    raise failure(error, "cuLaunchKernelEx", what)

            return Issued(issue_early, same, words)

        def issue(_block: Any = block) -> None:
            error = launch(function, x, y, 1, threads, 1, 1, shared, stream, params, 0)[0]
            if error:
                raise failure(error, "cuLaunchKernel", what)

        return Issued(issue, same, words)

    def begins_early(self, node: Node) -> bool:
        return op_table.begins_early(node)

    def launch(
        self,
        node: Node,
        address_of: AddressOf,
        scratch: int,
        stream: int,
        programmatic: bool = False,
        notes: int = 0,
    ) -> Issued:
        self.finish_loading()
        there, what = self._stream(stream), f"launch {node.op} {node.name}"

        def at(tensor: Tensor) -> Address:
            return Address(address_of(tensor))

        operands = op_table.Operands(at, Address(scratch), self._counters_of(stream), self._sm)
        works = noting.noted(op_table.launches(node, operands), notes)
        return together([self._prepare(work, there, what, programmatic) for work in works])

    launch_noted = launch

    def kernels_of(self, node: Node) -> list[KernelName]:
        """See `backend/base.py`. The kernels of a product by cuBLAS have no name here: cuBLAS
        chooses them."""
        return [
            KernelName(work.function, work.waits, (*work.grid, 1, work.block, 1, 1))
            if isinstance(work, Kernel)
            else KernelName(None, False)
            for work in self._works(node)
        ]  # fmt: skip

    def make_ready(self, nodes: Sequence[Node], left: Bar, noted: bool = False) -> None:
        """Compiles several kernels at a time. `launch` loads them."""
        works = [work for node in nodes for work in self._works(node)]
        if noted:
            works = noting.noted(works, 1 << 37)
        wanted = dict.fromkeys((w.file, w.defines) for w in works if isinstance(w, Kernel))
        left.total = (left.total or 0) + len(wanted) - len(nodes)  # one report a build
        nvrtc.compile_many(wanted, self._arch, left)

    def _works(self, node: Node) -> list[Work]:
        """The work that `launch` issues for `node`, in order, at made-up addresses. Each tensor has
        another address, because x at one address is converted only once."""
        fresh = functools.partial(next, itertools.count(1 << 40, 1 << 40))
        addresses: defaultdict[Tensor, int] = defaultdict(fresh)
        operands = op_table.Operands(lambda t: addresses[t.storage], 1 << 39, 1 << 38, self._sm)
        return op_table.launches(node, operands)

    def _counters_of(self, stream: int) -> int:
        """The address of the counters of a stream, which find the last block of a combine. They are
        zero before and after every kernel. Kernels side by side must not share counters, so each
        stream has its own."""
        if stream not in self._counters:
            self._counters[stream] = self.allocate(4 * N_COUNTERS, Space.DEVICE)
        return Address(self._counters[stream].address)

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issued:
        self.finish_loading()
        there, api, prepared = self._stream(stream), self._driver.api, self._driver.prepared
        if not nbytes:
            return Issued(nothing, ("copy of nothing",))
        if to_host:
            args = int(dst), api.CUdeviceptr(src), nbytes, there
            what = f"copy of {nbytes} bytes to the host"
            return prepared("cuMemcpyDtoHAsync", what, *args, same=(nbytes,), pointers=(0, 1))
        args = api.CUdeviceptr(dst), int(src), nbytes, there
        what = f"copy of {nbytes} bytes to the device"
        return prepared("cuMemcpyHtoDAsync", what, *args, same=(nbytes,), pointers=(0, 1))

    def gate_copy(
        self, dst: int, src: int, nbytes: int, control: int, limit_ns: int, stream: int
    ) -> Issued:
        args: list[int | float] = [Address(dst), Address(src), nbytes, control, limit_ns]
        kernel = Kernel("gate", gate.KERNEL, (1, 1), GATE_THREADS, args)
        return self._prepare(kernel, self._stream(stream), f"gated copy of {nbytes} bytes")

    def gate_end(self, counter: int, word: int, stream: int, programmatic: bool) -> Issued:
        kernel = Kernel("gate", gate.END_KERNEL, (1, 1), 1, [counter, word], waits=True)
        return self._prepare(kernel, self._stream(stream), "the end of a plan", programmatic)

    def copy_to_peer(
        self, peer: CudaBackend, dst: int, src: int, nbytes: int, stream: int
    ) -> Issued:
        """Copies straight into the peer's memory where the devices can reach each other. Otherwise
        the driver copies through host memory. Unified addresses name the devices, because a capture
        refuses cuMemcpyPeerAsync (driver 580, two H100s)."""
        if not nbytes:
            return Issued(nothing, ("copy of nothing",))
        api, driver = self._driver.api, self._driver
        driver.reach(peer._driver)
        what = f"copy of {nbytes} bytes to {peer.name}"
        args = api.CUdeviceptr(dst), api.CUdeviceptr(src), nbytes, self._stream(stream)
        same = nbytes, peer.name
        return driver.prepared("cuMemcpyDtoDAsync", what, *args, same=same, pointers=(0, 1))

    def event(self) -> CudaEvent:
        return self._driver.event()

    def record(self, event: CudaEvent, stream: int) -> Issued:
        what, args = f"record on stream {stream}", (event.handle, self._stream(stream))
        prepared = self._driver.prepared
        return prepared("cuEventRecord", what, *args, same=(stream,), pointers=(0,), keep=event)

    def wait(self, event: CudaEvent, stream: int) -> Issued:
        what, args = f"wait of stream {stream}", (self._stream(stream), event.handle, 0)
        prepared = self._driver.prepared
        return prepared("cuStreamWaitEvent", what, *args, same=(stream,), pointers=(1,), keep=event)

    def sync_stream(self, stream: int) -> Issue:
        what, there = f"sync of stream {stream}", self._stream(stream)
        return self._driver.prepared("cuStreamSynchronize", what, there)

    def sync_event(self, event: CudaEvent) -> Issue:
        prepared, what = self._driver.prepared, "sync of an event"
        return prepared("cuEventSynchronize", what, event.handle, keep=event)

    def synchronize(self) -> None:
        for number, (_, stream) in list(self._streams.items()):
            self._driver.call("cuStreamSynchronize", f"stream {number}", stream)

    def capture(self, work: Plannable) -> graphs.CudaGraph:
        """Records the parts of `work` without running them."""
        self.attach()
        self.finish_loading()
        if self._blas is not None:
            for issued in commands_of(work):
                if issued.same[:1] == (PRODUCT,):
                    self._blas.load(issued)
        owner = graphs.Owner(self._driver, self._stream, self._graphs)
        return graphs.capture(owner, work)

    # time ------------------------------------------------------------------------------------

    def mark(self, stream: int) -> Mark:
        """Records a timing event for `resolve`."""
        return self._marks.make(self._stream(stream), self._stream(SERVICE))

    def resolve(self, begin: Mark, end: Mark) -> tuple[int, int]:
        """When the device passed two marks, in ns of the host's clock (`marks.py`)."""
        return self._marks.resolve(begin, end)

    def stamp(self, counter: int, ring: int, n_pairs: int, is_end: bool, stream: int) -> Issued:
        kernel = timer.stamp(Address(counter), Address(ring), n_pairs, is_end)
        return self._prepare(kernel, self._stream(stream), "a stamp")

    def clock(self) -> DeviceClock:
        """Compares `%globaltimer` with the host's clock (`timer.py`)."""
        memory, there = self.allocate(timer.NBYTES, Space.PINNED), self._stream(SERVICE)
        try:
            self._prepare(timer.answer(memory.address), there, "reading the clock")()
            return timer.read(memory)
        finally:
            self._driver.call("cuStreamSynchronize", "reading the clock", there)
            memory.free()

    def close(self) -> None:
        """Waits, then gives memory and kernels back. Raises a failure of queued work at the end."""
        if self._closed:
            return
        self._closed = True
        self.attach()
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close()
        try:
            self.synchronize()
        finally:
            self._marks.clear()
            for graph in list(self._graphs):
                graph.destroy()
            for memory in list(self._memory):
                memory.free()
            for module in self._modules.values():
                self._driver.api.cuModuleUnload(module)
            self._modules.clear()
            self._functions.clear()
            self._counters.clear()
            if self._blas is not None:
                self._blas.close()
                self._blas = None
            self._streams.clear()
