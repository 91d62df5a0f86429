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

import importlib
import struct
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from workbench.backend import kernels
from workbench.backend.args import AddressOf, pack
from workbench.backend.base import Issue
from workbench.errors import DeviceError
from workbench.graph.ir import Node, Tensor
from workbench.program.commands import COMPUTE_STREAM, Capabilities, Space

N_STREAMS = 8
ALIGN = 256
BOUNCE_BYTES = 8 << 20  # one of the two pinned buffers that weights go through
GATE_SECONDS = 5.0
CLOCK_TRIES, CLOCK_MAX_AGE_NS = 5, 2_000_000_000
INSTALL = "pip install 'workbench[gpu]'"


def _libraries() -> tuple[Any, Any]:
    """cupy and cuda.bindings.driver, or DeviceError with what is not installed."""
    found = []
    for module, package in (("cupy", "CuPy"), ("cuda.bindings.driver", "cuda-bindings")):
        try:
            found.append(importlib.import_module(module))
        except ImportError as error:
            reason = (str(error).strip().splitlines() or ["not installed"])[0]
            raise DeviceError(f"cuda needs {package} ({reason}); {INSTALL}") from None
    return found[0], found[1]


def _device_properties(cupy: Any, index: int) -> dict[str, Any]:
    """Of GPU `index`; DeviceError where there is no driver, no such GPU, or too old a one."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        if index >= count:
            raise DeviceError(f"GPU {index} does not exist: this machine has {count}")
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"no usable NVIDIA GPU ({error})") from None
    if (properties["major"], properties["minor"]) < kernels.OLDEST:
        raise DeviceError(
            f"{properties['name'].decode()} has compute capability {properties['major']}."
            f"{properties['minor']}; the kernels need {kernels.OLDEST[0]}.{kernels.OLDEST[1]}"
        )
    return properties


def _describe(cupy: Any, properties: dict[str, Any]) -> str:
    version = cupy.cuda.runtime.driverGetVersion()
    return (
        f"{properties['name'].decode()} (sm_{properties['major']}{properties['minor']}, "
        f"{properties['multiProcessorCount']} SMs, {properties['totalGlobalMem'] / 2**30:.0f} GiB)"
        f", {_driver_version()}CUDA {version // 1000}.{version % 1000 // 10}"
    )


def _driver_version() -> str:
    """`driver 580.95, `, or nothing where NVML's Python package is not installed."""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    return f"driver {version}, "


def probe() -> str:
    """One line naming the GPU and its driver; DeviceError with one line saying what is missing."""
    cupy, _ = _libraries()
    return _describe(cupy, _device_properties(cupy, 0))


def open_backend(threads: int = 0, device: int = 0, **options: Any) -> CudaBackend:
    """The backend of GPU number `device`. `threads` means nothing here.

    Raises DeviceError where CuPy, cuda-bindings, NVRTC, a driver or the GPU is missing.
    """
    if options:
        raise DeviceError(f"the cuda device has no option {', '.join(options)}")
    return CudaBackend(device)


class CudaMemory:
    """Memory of one space. Given back by `free`, at the latest when the object goes; pinned memory
    only once the device is idle, for a copy may still be reading it."""

    def __init__(self, address: int, nbytes: int, array: np.ndarray | None, release: Callable):
        self.address = address
        self.nbytes = nbytes
        self.array = array
        self._release = weakref.finalize(self, release, address)
        self._release.atexit = False  # the driver gives everything back then

    def free(self) -> None:
        self.array = None
        self._release()


class CudaEvent:
    """An event of the program (no timing), or of a mark (timing)."""

    __slots__ = ("handle", "owner")

    def __init__(self, cupy: Any, driver: Any, timing: bool = False):
        self.owner = cupy.cuda.Event(disable_timing=not timing)
        self.handle = driver.CUevent(self.owner.ptr)


class Mark:
    """A recorded timing event; goes back to the pool when nobody holds the mark any more."""

    __slots__ = ("event", "pool")

    def __init__(self, event: CudaEvent, pool: list[CudaEvent]):
        self.event = event
        self.pool = pool

    def __del__(self) -> None:
        self.pool.append(self.event)


class Gate:
    """Holds a stream: what is queued behind it starts when it is opened, or by itself after
    GATE_SECONDS, so that a forgotten one cannot hang the device. Opens at the end of a `with`."""

    def __init__(self, flag: CudaMemory):
        self._flag = flag

    def open(self) -> None:
        if self._flag.array is not None:
            self._flag.array.view(np.int32)[0] = 1

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
        self._cupy, self._driver = _libraries()
        properties = _device_properties(self._cupy, device)
        self.description = _describe(self._cupy, properties)
        self._device = self._cupy.cuda.Device(device)
        self.attach()
        self._check(self._driver.cuInit(0), "cuInit", "opening the device")
        self._streams: dict[int, tuple[Any, Any]] = {}  # id -> CuPy's stream, CUstream
        self._memory: weakref.WeakSet[CudaMemory] = weakref.WeakSet()
        self._gates: list[Gate] = []
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._bounce: list[tuple[CudaMemory, CudaMemory, CudaEvent]] = []
        self._marks: list[CudaEvent] = []
        self._n_marks = 0
        self._clock: tuple[CudaEvent, int] | None = None
        self._closed = False
        arch = f"sm_{properties['major']}{properties['minor']}"
        for file, cubin in kernels.compile_all(arch).items():
            self._modules[file] = self._check(
                self._driver.cuModuleLoadData(cubin), "cuModuleLoadData", f"{file}.cu"
            )

    def attach(self) -> None:
        """Makes the calling thread one that may issue on this device."""
        self._device.use()

    # errors ----------------------------------------------------------------------------------

    def _check(self, result: tuple, call: str, what: str) -> Any:
        """The values of a driver call's result; raises DeviceError if it reports an error."""
        if result[0]:
            raise self._failure(result[0], call, what)
        return result[1] if len(result) == 2 else None

    def _failure(self, error: Any, call: str, what: str) -> DeviceError:
        _, text = self._driver.cuGetErrorString(error)
        name = getattr(error, "name", str(error))
        return DeviceError(
            f"{call} failed at {what}: {name}, {(text or b'no description').decode()} "
            f"(on {self.description})"
        )

    def _prepared(self, call: str, what: str, *args: Any) -> Issue:
        """A callable that makes one driver call with converted arguments and checks it."""
        function, failure = getattr(self._driver, call), self._failure

        def issue() -> None:
            error = function(*args)[0]
            if error:
                raise failure(error, call, what)

        return issue

    # memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, space: Space) -> CudaMemory:
        memory = self._allocate(nbytes, space)
        if memory.array is not None:
            memory.array[:] = 0
        elif nbytes:
            stream = self._stream(SERVICE)
            self._check(
                self._driver.cuMemsetD8Async(memory.address, 0, nbytes, stream),
                "cuMemsetD8Async",
                f"zeroing {nbytes} bytes",
            )
            self._check(self._driver.cuStreamSynchronize(stream), "cuStreamSynchronize", "zeroing")
        return memory

    def _allocate(self, nbytes: int, space: Space) -> CudaMemory:
        """As `allocate`, whatever the memory holds."""
        runtime = self._cupy.cuda.runtime
        need = max(-(-nbytes // ALIGN) * ALIGN, ALIGN)
        try:
            if space == Space.DEVICE:
                memory = CudaMemory(runtime.malloc(need), nbytes, None, runtime.free)
            elif space == Space.PINNED:
                address = runtime.hostAlloc(need, 0)
                memory = CudaMemory(address, nbytes, _host_view(address, nbytes), self._free_pinned)
            else:
                block = np.empty(need + ALIGN, np.uint8)
                start = -block.ctypes.data % ALIGN
                view = block[start : start + nbytes]
                memory = CudaMemory(block.ctypes.data + start, nbytes, view, _nothing)
        except (runtime.CUDARuntimeError, MemoryError) as error:
            raise DeviceError(
                f"cannot allocate {nbytes / 2**20:.1f} MiB of {space} memory ({error}); use a "
                "smaller model or n_ctx"
            ) from None
        self._memory.add(memory)
        return memory

    @property
    def _free_pinned(self) -> Callable[[int], None]:
        runtime = self._cupy.cuda.runtime

        def release(address: int) -> None:
            runtime.deviceSynchronize()
            runtime.freeHost(address)

        return release

    def load_weight(self, tensor: Tensor, data: np.ndarray) -> CudaMemory:
        """Uploads a weight through two pinned buffers in turn; types named in `kernels.PLANES` are
        split into planes on the way, the same bytes in another order."""
        flat = data.reshape(-1).view(np.uint8)
        if flat.nbytes != tensor.nbytes:
            raise DeviceError(f"{tensor!r} wants {tensor.nbytes} bytes, not {flat.nbytes}")
        dtype, driver = tensor.dtype, self._driver
        memory = self._allocate(tensor.nbytes, Space.DEVICE)
        stream, what = self._stream(SERVICE), f"loading {tensor.name}"
        step = BOUNCE_BYTES // dtype.block_bytes * dtype.block_bytes
        for i, begin in enumerate(range(0, flat.nbytes, step)):
            pinned, staging, free = self._bounce_buffer(i % 2)
            self._check(driver.cuEventSynchronize(free.handle), "cuEventSynchronize", what)
            part = flat[begin : begin + step]
            assert pinned.array is not None
            pinned.array[: part.nbytes] = part
            split = dtype.name in kernels.PLANES
            there = staging.address if split else memory.address + begin
            self._check(
                driver.cuMemcpyHtoDAsync(there, pinned.address, part.nbytes, stream),
                "cuMemcpyHtoDAsync",
                what,
            )
            if split:
                size = dtype.block_bytes
                kernel = kernels.repack(
                    dtype.name, memory.address, there, begin // size, part.nbytes // size,
                    flat.nbytes // size, size,
                )  # fmt: skip
                self._prepare(kernel, stream, what)()
            self._check(driver.cuEventRecord(free.handle, stream), "cuEventRecord", what)
        self._check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize", what)
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
            made = self._cupy.cuda.Stream(non_blocking=True)
            self._streams[number] = made, self._driver.CUstream(made.ptr)
        return self._streams[number][1]

    def _function(self, kernel: kernels.Kernel) -> Any:
        key = kernel.file, kernel.function
        if key not in self._functions:
            self._functions[key] = self._check(
                self._driver.cuModuleGetFunction(
                    self._modules[kernel.file], kernel.function.encode()
                ),
                "cuModuleGetFunction",
                kernel.function,
            )
        return self._functions[key]

    def _prepare(self, kernel: kernels.Kernel, stream: Any, what: str) -> Issue:
        """A callable that launches `kernel`. The argument block is the values, 8 bytes each, then
        their addresses: what cuLaunchKernel calls kernelParams."""
        n = len(kernel.args)
        block = np.empty(2 * n, np.uint64)
        block[:n] = [_bits(a) for a in kernel.args]
        address = block.__array_interface__["data"][0]
        block[n:] = range(address, address + 8 * n, 8)
        function, launch, failure = (
            self._function(kernel), self._driver.cuLaunchKernel, self._failure,
        )  # fmt: skip
        (x, y), threads, params = kernel.grid, kernel.block, address + 8 * n

        def issue(_block: np.ndarray = block) -> None:
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
        there, driver = self._stream(stream), self._driver
        if not nbytes:
            return _in_order([])
        if to_host:
            what = f"copy of {nbytes} bytes to the host"
            device = driver.CUdeviceptr(src)
            return self._prepared("cuMemcpyDtoHAsync", what, dst, device, nbytes, there)
        what, device = f"copy of {nbytes} bytes to the device", driver.CUdeviceptr(dst)
        return self._prepared("cuMemcpyHtoDAsync", what, device, src, nbytes, there)

    def event(self) -> CudaEvent:
        return CudaEvent(self._cupy, self._driver)

    def record(self, event: CudaEvent, stream: int) -> Issue:
        what = f"record on stream {stream}"
        return _holding(
            event, self._prepared("cuEventRecord", what, event.handle, self._stream(stream))
        )

    def wait(self, event: CudaEvent, stream: int) -> Issue:
        what, there = f"wait of stream {stream}", self._stream(stream)
        return _holding(event, self._prepared("cuStreamWaitEvent", what, there, event.handle, 0))

    def sync_stream(self, stream: int) -> Issue:
        what = f"sync of stream {stream}"
        return self._prepared("cuStreamSynchronize", what, self._stream(stream))

    def sync_event(self, event: CudaEvent) -> Issue:
        return _holding(event, self._prepared("cuEventSynchronize", "sync", event.handle))

    def synchronize(self) -> None:
        for number, (_, stream) in list(self._streams.items()):
            self._check(
                self._driver.cuStreamSynchronize(stream),
                "cuStreamSynchronize",
                f"stream {number}",
            )

    def gate(self, stream: int = COMPUTE_STREAM) -> Gate:
        """Holds `stream` from here on until the gate is opened, the backend closed, or
        GATE_SECONDS have passed. For tests of what happens in between."""
        flag = self.allocate(4, Space.PINNED)
        args: list[int | float] = [flag.address, int(GATE_SECONDS * 1e9)]
        self._prepare(
            kernels.Kernel("device", "gate", (1, 1), 1, args), self._stream(stream), "gate"
        )()
        gate = Gate(flag)
        self._gates.append(gate)
        return gate

    # time ------------------------------------------------------------------------------------

    def mark(self, stream: int) -> Mark:
        """Records a timing event from a pool. While no mark is held, the clock is set afresh."""
        if self._n_marks == len(self._marks):
            self._set_clock()
        if not self._marks:
            self._marks.append(CudaEvent(self._cupy, self._driver, timing=True))
            self._n_marks += 1
        mark = Mark(self._marks.pop(), self._marks)
        self._check(
            self._driver.cuEventRecord(mark.event.handle, self._stream(stream)),
            "cuEventRecord",
            f"mark on stream {stream}",
        )
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
        return self._check(
            self._driver.cuEventElapsedTime(begin.handle, end.handle),
            "cuEventElapsedTime",
            "reading marks",
        )

    def _set_clock(self) -> None:
        if self._clock and time.perf_counter_ns() - self._clock[1] < CLOCK_MAX_AGE_NS:
            return
        stream, driver = self._stream(SERVICE), self._driver
        best = None
        for _ in range(CLOCK_TRIES):
            event = CudaEvent(self._cupy, driver, timing=True)
            before = time.perf_counter_ns()
            self._check(driver.cuEventRecord(event.handle, stream), "cuEventRecord", "the clock")
            self._check(
                driver.cuEventSynchronize(event.handle), "cuEventSynchronize", "the clock"
            )
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
            self._bounce.clear()
            self._marks.clear()
            self._clock = None
            for memory in list(self._memory):
                memory.free()
            for module in self._modules.values():
                self._driver.cuModuleUnload(module)
            self._modules.clear()
            self._functions.clear()
            self._streams.clear()


SERVICE = -1  # the stream of loading, zeroing and the clock; no program uses it


def _bits(argument: int | float) -> int:
    """An argument as the 8 bytes a kernel reads: a float as float32 in the low four."""
    if isinstance(argument, float):
        return struct.unpack("<I", struct.pack("<f", argument))[0]
    return argument & 0xFFFFFFFFFFFFFFFF


def _host_view(address: int, nbytes: int) -> np.ndarray:
    """uint8 (nbytes,) at a host address, which the caller keeps alive."""
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _in_order(issues: list[Issue]) -> Issue:
    def issue() -> None:
        for call in issues:
            call()

    return issue


def _holding(owner: Any, call: Issue) -> Issue:
    """`call`, keeping `owner`'s handle alive as long as it."""

    def issue(_owner: Any = owner) -> None:
        call()

    return issue


def _nothing(address: int) -> None:
    """Host memory goes with its array."""
