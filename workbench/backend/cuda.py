"""The cuda backend: NVIDIA GPUs of compute capability 8.0 and later.

CuPy gives memory, streams and events; kernels come from `kernels/*.cu` through NVRTC
(`backend/kernels.py`); what is issued again and again goes through cuda-bindings with everything
converted once: a launch is one call with a ready argument block (4 us of host time on an H100's
host, where a CuPy kernel call took 5.7), a copy, record or wait likewise.

Importing this module loads neither CuPy nor the driver; `open_backend` and `probe` do.

Streams never synchronise with the legacy default stream. A backend belongs to the thread that
opened it; another thread calls `attach()` once before it issues anything.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
import weakref
from types import TracebackType
from typing import Any

import numpy as np

from workbench.backend import kernels
from workbench.backend.args import AddressOf, pack
from workbench.backend.base import Issue
from workbench.backend.cuda_driver import (
    CudaEvent,
    CudaMemory,
    Driver,
    Mark,
    describe,
    device_properties,
    libraries,
)
from workbench.errors import DeviceError
from workbench.graph.ir import Node, Tensor
from workbench.program.commands import COMPUTE_STREAM, Capabilities, Space

N_STREAMS = 8
SERVICE = -1  # the stream of loading, zeroing and the clock; no program uses it
BOUNCE_BYTES = 8 << 20  # one of the two pinned buffers that weights go through
GATE_SECONDS, N_GATES = 5.0, 256
CLOCK_TRIES, CLOCK_MAX_AGE_NS = 5, 2_000_000_000


def probe() -> str:
    """One line naming the GPU and its driver; DeviceError with one line saying what is missing."""
    cupy, _ = libraries()
    return describe(cupy, device_properties(cupy, 0))


def open_backend(threads: int = 0, device: int = 0, **options: Any) -> CudaBackend:
    """The backend of GPU number `device`. `threads` means nothing here.

    Raises DeviceError where CuPy, cuda-bindings, NVRTC, a driver or the GPU is missing.
    """
    if options:
        raise DeviceError(f"the cuda device has no option {', '.join(options)}")
    return CudaBackend(device)


class Gate:
    """Holds a stream: what is queued behind it starts when it is opened, or by itself after
    GATE_SECONDS, so that a forgotten one cannot hang the device. Opens at the end of a `with`."""

    def __init__(self, flags: CudaMemory, number: int):
        assert flags.array is not None
        self._memory = flags  # pinned; the kernel watches int32 number `number` of it
        self._flag = flags.array.view(np.int32)[number : number + 1]
        self._flag[0] = 0

    @property
    def opened(self) -> bool:
        return bool(self._flag[0])

    def open(self) -> None:
        self._flag[0] = 1

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.open()


class CudaBackend:
    """See the module and `backend/base.py`."""

    name = "cuda"
    capabilities = Capabilities(
        asynchronous_copies=True, events=True, one_order=True, capture=False, n_streams=N_STREAMS
    )

    def __init__(self, device: int = 0):
        self._driver = Driver(device)
        self.description = self._driver.description
        self.waiting = "the driver's choice of spinning or yielding (no device flags set)"
        self._streams: dict[int, tuple[Any, Any]] = {}  # id -> CuPy's stream, CUstream
        self._memory: weakref.WeakSet[CudaMemory] = weakref.WeakSet()
        self._gates: list[Gate] = []
        self._flags: CudaMemory | None = None  # of the gates, in turn
        self._n_gates = 0
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._bounce: list[tuple[CudaMemory, CudaMemory, CudaEvent]] = []
        self._marks: list[CudaEvent] = []
        self._n_marks = 0
        self._clock: tuple[CudaEvent, int] | None = None
        self._closed = False
        major, minor = (self._driver.properties[k] for k in ("major", "minor"))
        for file, cubin in kernels.compile_all(f"sm_{major}{minor}").items():
            self._modules[file] = self._driver.call("cuModuleLoadData", f"{file}.cu", cubin)

    def attach(self) -> None:
        """Makes the calling thread one that may issue on this device."""
        self._driver.attach()

    # memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, space: Space) -> CudaMemory:
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
        """As `allocate`, whatever the memory holds."""
        memory = self._driver.allocate(nbytes, space)
        self._memory.add(memory)
        return memory

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> CudaMemory:
        """Uploads a weight through two pinned buffers in turn; types named in `kernels.PLANES` are
        split into planes on the way, the same bytes in another order."""
        flat = data.reshape(-1).view(np.uint8)
        if flat.nbytes != tensor.nbytes:
            raise DeviceError(f"{tensor!r} wants {tensor.nbytes} bytes, not {flat.nbytes}")
        dtype, call, stream = tensor.dtype, self._driver.call, self._stream(SERVICE)
        memory, what = self._allocate(tensor.nbytes, Space.DEVICE), f"loading {tensor.name}"
        size, split = dtype.block_bytes, dtype.name in kernels.PLANES
        step = BOUNCE_BYTES // size * size
        for i, begin in enumerate(range(0, flat.nbytes, step)):
            pinned, staging, free = self._bounce_buffer(i % 2)
            call("cuEventSynchronize", what, free.handle)
            part = flat[begin : begin + step]
            assert pinned.array is not None
            pinned.array[: part.nbytes] = part
            there = staging.address if split else memory.address + begin
            call("cuMemcpyHtoDAsync", what, there, pinned.address, part.nbytes, stream)
            if split:
                kernel = kernels.repack(
                    dtype.name, memory.address, there, begin // size, part.nbytes // size,
                    flat.nbytes // size, size,
                )  # fmt: skip
                self._prepare(kernel, stream, what)()
            call("cuEventRecord", what, free.handle, stream)
        call("cuStreamSynchronize", what, stream)
        return memory

    def _bounce_buffer(self, i: int) -> tuple[CudaMemory, CudaMemory, CudaEvent]:
        while len(self._bounce) <= i:
            pinned = self._allocate(BOUNCE_BYTES, Space.PINNED)
            self._bounce.append((pinned, self._allocate(BOUNCE_BYTES, Space.DEVICE), self.event()))
        return self._bounce[i]

    def scratch_bytes(self, node: Node) -> int:
        return kernels.scratch_bytes(node)

    # commands --------------------------------------------------------------------------------

    def _stream(self, number: int) -> Any:
        """CUstream of stream `number`, made at its first use."""
        if number not in self._streams:
            if number >= N_STREAMS:
                raise DeviceError(f"stream {number} does not exist: cuda has {N_STREAMS}")
            made = self._driver.cupy.cuda.Stream(non_blocking=True)
            self._streams[number] = made, self._driver.api.CUstream(made.ptr)
        return self._streams[number][1]

    def _function(self, kernel: kernels.Kernel) -> Any:
        key = kernel.file, kernel.function
        if key not in self._functions:
            self._functions[key] = self._driver.call(
                "cuModuleGetFunction",
                kernel.function,
                self._modules[kernel.file],
                kernel.function.encode(),
            )
        return self._functions[key]

    def _prepare(self, kernel: kernels.Kernel, stream: Any, what: str) -> Issue:
        """A callable that launches `kernel`. The argument block is the values, 8 bytes each, then
        their addresses: what cuLaunchKernel calls kernelParams."""
        n = len(kernel.args)
        kind, layout = _argument_block(n)
        block = kind()
        address = ctypes.addressof(block)
        values = [a if type(a) is int else _bits(a) for a in kernel.args]
        layout.pack_into(block, 0, *values, *range(address, address + 8 * n, 8))
        function, launch = self._function(kernel), self._driver.api.cuLaunchKernel
        failure = self._driver.failure
        (x, y), threads, params = kernel.grid, kernel.block, address + 8 * n

        def issue(_block: Any = block) -> None:
            error = launch(function, x, y, 1, threads, 1, 1, 0, stream, params, 0)[0]
            if error:
                raise failure(error, "cuLaunchKernel", what)

        return issue

    def launch(self, node: Node, address_of: AddressOf, scratch: int, stream: int) -> Issue:
        args = pack(node, address_of, scratch)
        there, what = self._stream(stream), f"launch {node.op} {node.name}"
        issues = [self._prepare(k, there, what) for k in kernels.launches(node, args)]
        return issues[0] if len(issues) == 1 else _in_order(issues)

    def copy(self, dst: int, src: int, nbytes: int, stream: int, to_host: bool) -> Issue:
        there, api, prepared = self._stream(stream), self._driver.api, self._driver.prepared
        if not nbytes:
            return _in_order([])
        if to_host:
            what, device = f"copy of {nbytes} bytes to the host", api.CUdeviceptr(src)
            return prepared("cuMemcpyDtoHAsync", what, dst, device, nbytes, there)
        what, device = f"copy of {nbytes} bytes to the device", api.CUdeviceptr(dst)
        return prepared("cuMemcpyHtoDAsync", what, device, src, nbytes, there)

    def event(self) -> CudaEvent:
        return self._driver.event()

    def record(self, event: CudaEvent, stream: int) -> Issue:
        what, there = f"record on stream {stream}", self._stream(stream)
        return self._driver.prepared("cuEventRecord", what, event.handle, there, keep=event)

    def wait(self, event: CudaEvent, stream: int) -> Issue:
        what, there = f"wait of stream {stream}", self._stream(stream)
        prepared = self._driver.prepared
        return prepared("cuStreamWaitEvent", what, there, event.handle, 0, keep=event)

    def sync_stream(self, stream: int) -> Issue:
        what, there = f"sync of stream {stream}", self._stream(stream)
        return self._driver.prepared("cuStreamSynchronize", what, there)

    def sync_event(self, event: CudaEvent) -> Issue:
        prepared, what = self._driver.prepared, "sync of an event"
        return prepared("cuEventSynchronize", what, event.handle, keep=event)

    def synchronize(self) -> None:
        for number, (_, stream) in list(self._streams.items()):
            self._driver.call("cuStreamSynchronize", f"stream {number}", stream)

    def gate(self, stream: int = COMPUTE_STREAM) -> Gate:
        """Holds `stream` from here on until the gate is opened, the backend closed, or
        GATE_SECONDS have passed. For tests of what happens in between."""
        if self._flags is None:
            self._flags = self._driver.allocate(4 * N_GATES, Space.PINNED)  # gates keep it alive
        number, self._n_gates = self._n_gates % N_GATES, self._n_gates + 1
        gate = Gate(self._flags, number)
        args: list[int | float] = [self._flags.address + 4 * number, int(GATE_SECONDS * 1e9)]
        kernel = kernels.Kernel("device", "gate", (1, 1), 1, args)
        self._prepare(kernel, self._stream(stream), "gate")()
        self._gates = [g for g in self._gates if not g.opened] + [gate]
        return gate

    # time ------------------------------------------------------------------------------------

    def mark(self, stream: int) -> Mark:
        """Records a timing event from a pool. While no mark is held, the clock is set afresh."""
        if self._n_marks == len(self._marks):
            self._set_clock()
        if not self._marks:
            self._marks.append(self._driver.event(timing=True))
            self._n_marks += 1
        mark = Mark(self._marks.pop(), self._marks)
        there = self._stream(stream)
        self._driver.call("cuEventRecord", f"mark on stream {stream}", mark.event.handle, there)
        return mark

    def resolve(self, begin: Mark, end: Mark) -> tuple[int, int]:
        """Times between marks are the device's (resolution 0.5 us). Their place on the host's clock
        comes from one event recorded and waited for on an idle stream when the trace began (the
        quickest of five tries): off by half that round trip, some 5 us, and by the drift of the
        two clocks since, about 1 us a second."""
        assert self._clock is not None, "a mark is made before it is resolved"
        base, base_ns = self._clock
        start = base_ns + round(self._elapsed_ms(base, begin.event) * 1e6)
        return start, start + round(self._elapsed_ms(begin.event, end.event) * 1e6)

    def _elapsed_ms(self, begin: CudaEvent, end: CudaEvent) -> float:
        return self._driver.call("cuEventElapsedTime", "reading marks", begin.handle, end.handle)

    def _set_clock(self) -> None:
        if self._clock and time.perf_counter_ns() - self._clock[1] < CLOCK_MAX_AGE_NS:
            return
        call, stream = self._driver.call, self._stream(SERVICE)
        best = None
        for _ in range(CLOCK_TRIES):
            event = self._driver.event(timing=True)
            before = time.perf_counter_ns()
            call("cuEventRecord", "setting the clock", event.handle, stream)
            call("cuEventSynchronize", "setting the clock", event.handle)
            after = time.perf_counter_ns()
            if best is None or after - before < best[0]:
                best = after - before, event, (before + after) // 2
        assert best is not None
        self._clock = best[1], best[2]

    def close(self) -> None:
        """Opens every gate, waits, and gives memory and kernels back. A failure of queued work is
        raised once everything that can be given back has been."""
        if self._closed:
            return
        self._closed = True
        for gate in self._gates:
            gate.open()
        try:
            self.synchronize()
        finally:
            self._gates.clear()
            self._bounce.clear()
            self._marks.clear()
            self._flags = self._clock = None
            for memory in list(self._memory):
                memory.free()
            for module in self._modules.values():
                self._driver.api.cuModuleUnload(module)
            self._modules.clear()
            self._functions.clear()
            self._streams.clear()


@functools.cache
def _argument_block(n: int) -> tuple[Any, struct.Struct]:
    """Type and layout of a block of n arguments and their n addresses."""
    return ctypes.c_int64 * (2 * n), struct.Struct(f"<{2 * n}q")


def _bits(argument: float) -> int:
    """The 8 bytes a kernel reads for a real argument: a float32 in the low four."""
    return struct.unpack("<I", struct.pack("<f", argument))[0]


def _in_order(issues: list[Issue]) -> Issue:
    def issue() -> None:
        for call in issues:
            call()

    return issue
