"""The CUDA driver as the cuda backend uses it: GPUs found, checked calls, memory, events.

Importing this module loads neither CuPy nor the driver; `Driver` and `libraries` do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from workbench.backend.issue.issued import Block, Issued
from workbench.common.errors import DeviceError
from workbench.common.extras import install
from workbench.common.sizes import round_up, size
from workbench.program.commands import Space

ALIGN = 256
OLDEST = (8, 0)  # compute capability
CAPTURES = threading.RLock()  # held during a capture: a wait for the whole device would end it
ELSE = "check nvidia-smi, or use --device embedded"
INSTALL = f"{install('gpu')}, or use --device embedded"


def libraries() -> tuple[Any, Any]:
    """cupy and cuda.bindings.driver. Raises DeviceError, naming the package that is missing."""
    package = "CuPy"
    try:
        import cupy

        package = "cuda-bindings"
        from cuda.bindings import driver
    except ImportError as error:
        reason = (str(error).strip().splitlines() or ["not installed"])[0]
        raise DeviceError(f"cuda needs {package} ({reason}); {INSTALL}") from None
    return cupy, driver


def device_properties(cupy: Any, index: int) -> dict[str, Any]:
    """CuPy's properties of GPU `index`. Raises DeviceError where there is no driver or no such GPU,
    or where the GPU is too old."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        if index >= count:
            raise DeviceError(f"GPU {index} does not exist, this machine has {count}; {ELSE}")
        properties = runtime.getDeviceProperties(index)
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"no usable NVIDIA GPU ({error}); {ELSE}") from None
    if (properties["major"], properties["minor"]) < OLDEST:
        raise DeviceError(
            f"{properties['name'].decode()} has compute capability {properties['major']}."
            f"{properties['minor']}, the kernels need {OLDEST[0]}.{OLDEST[1]}; "
            f"{ELSE}"
        )
    return properties


def describe(cupy: Any, properties: dict[str, Any]) -> str:
    version = cupy.cuda.runtime.driverGetVersion()
    return (
        f"{properties['name'].decode()} (sm_{properties['major']}{properties['minor']}, "
        f"{properties['multiProcessorCount']} SMs, {properties['totalGlobalMem'] / 2**30:.0f} GiB)"
        f", {_driver_version()}CUDA {version // 1000}.{version % 1000 // 10}"
    )


def _driver_version() -> str:
    """`driver 580.95, `; empty where NVML's Python package is not installed."""
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


class CudaMemory:
    """Memory of one space. `free` gives it back, or the end of this object does. The device is idle
    before that, because queued work may still use the memory.

    view: the ctypes array under all arrays of the memory, where the host sees the memory. The
        memory stays while one of these arrays is alive.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        array: np.ndarray | None,
        release: Callable,
        view: ctypes.Array | None = None,
    ):
        self.address = address
        self.nbytes = nbytes
        self.array = array
        self._view = view
        give_back = weakref.finalize(self if view is None else view, release, address)
        give_back.atexit = False  # the driver gives everything back then
        self._give_back = give_back if view is None else _nothing

    def free(self) -> None:
        self.array = self._view = None
        self._give_back()


class CudaEvent:
    """An event of a program (without timing) or of a mark (with timing)."""

    __slots__ = ("handle", "owner")

    def __init__(self, cupy: Any, api: Any, timing: bool = False):
        self.owner = cupy.cuda.Event(disable_timing=not timing)  # destroyed with this object
        self.handle = api.CUevent(self.owner.ptr)


class CallArguments(Block):
    """The addresses among the arguments of a driver call, as a Block. `args` holds each address in
    the form that the call takes: an int, or a handle made of an int. A caller that patches in
    another event keeps that event alive."""

    __slots__ = ("_args", "_numbers")

    def __init__(self, args: list[Any], numbers: tuple[int, ...]):
        self._args = args
        self._numbers = numbers
        self.pointers = tuple(range(len(numbers)))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, field: int) -> int:
        return int(self._args[self._numbers[field]])

    def __setitem__(self, field: int, value: int) -> None:
        number = self._numbers[field]
        self._args[number] = type(self._args[number])(value)


class Driver:
    """One GPU through CuPy (`cupy`) and the driver API of cuda-bindings (`api`). Every call is
    checked."""

    def __init__(self, index: int):
        self.cupy, self.api = libraries()
        self.properties = device_properties(self.cupy, index)
        self.description = describe(self.cupy, self.properties)
        self._device = self.cupy.cuda.Device(index)
        try:
            self.attach()
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"{self.description} cannot be used ({error})") from None
        self.call("cuInit", "opening the device", 0)
        self.context = self.call("cuCtxGetCurrent", "opening the device")

    def attach(self) -> None:
        """Makes this device the calling thread's current device."""
        self._device.use()

    def reach(self, peer: Driver) -> None:
        """Lets this device use the memory of `peer`, where the hardware can. Later calls of the
        process do nothing."""
        what = "access to another device"
        if not self.call("cuDeviceCanAccessPeer", what, self._device.id, peer._device.id):
            return
        self.attach()
        error = self.api.cuCtxEnablePeerAccess(peer.context, 0)[0]
        if error not in (0, self.api.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            raise self.failure(error, "cuCtxEnablePeerAccess", what)

    def call(self, function: str, what: str, *args: Any) -> Any:
        """Calls a function of the driver API and returns its result without the status. Raises
        DeviceError, naming `what`, if the call fails."""
        error, *values = getattr(self.api, function)(*args)
        if error:
            raise self.failure(error, function, what)
        return values[0] if values else None

    def failure(self, error: Any, function: str, what: str) -> DeviceError:
        _, text = self.api.cuGetErrorString(error)
        name = getattr(error, "name", str(error))
        return DeviceError(
            f"{function} failed at {what}: {name}, {(text or b'no description').decode()} "
            f"(on {self.description})"
        )

    def prepared(
        self,
        function: str,
        what: str,
        *args: Any,
        same: tuple[Hashable, ...] = (),
        pointers: tuple[int, ...] = (),
        keep: Any = None,
    ) -> Issued:
        """A command that makes one checked driver call.

        what: the command's name in messages.
        same: two commands with the same function and the same `same` do the same work.
        pointers: the numbers of the `args` that are addresses or handles of events, and may be
            patched.
        keep: an object whose handle is among `args`; it lives as long as the command.
        """
        call, failure, now = getattr(self.api, function), self.failure, list(args)

        def issue(_keep: Any = keep) -> None:
            error = call(*now)[0]
            if error:
                raise failure(error, function, what)

        return Issued(issue, (function, *same), CallArguments(now, pointers))

    def programmatic(self, x: int, y: int, threads: int, shared: int, stream: Any) -> Any:
        """A CUlaunchConfig for programmatic dependent launch on CUstream `stream`: grid (x, y),
        `threads` to a block, `shared` bytes of dynamic shared memory."""
        api = self.api
        attribute, value = api.CUlaunchAttribute(), api.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        kinds = api.CUlaunchAttributeID
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value = value
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = stream
        config.attrs = [attribute]
        config.numAttrs = 1
        return config

    def allocate(self, nbytes: int, space: Space) -> CudaMemory:
        """ALIGN-aligned memory, not zeroed. Raises DeviceError where there is not enough."""
        runtime = self.cupy.cuda.runtime
        need = max(round_up(nbytes, ALIGN), ALIGN)
        try:
            if space == Space.DEVICE:
                release = functools.partial(_free_device, self.cupy, self._device)
                return CudaMemory(runtime.malloc(need), nbytes, None, release)
            if space == Space.PINNED:
                address = runtime.hostAlloc(need, 0)
                release = functools.partial(_free_pinned, self.cupy, self._device)
                pinned = (ctypes.c_uint8 * nbytes).from_address(address)
                return CudaMemory(address, nbytes, np.ctypeslib.as_array(pinned), release, pinned)
            block = np.empty(need + ALIGN, np.uint8)
            start = -block.ctypes.data % ALIGN
            view = block[start : start + nbytes]
            return CudaMemory(block.ctypes.data + start, nbytes, view, _nothing)
        except (runtime.CUDARuntimeError, MemoryError) as error:
            raise DeviceError(
                f"cannot allocate {size(nbytes)} of {space} memory ({error}); use a "
                "smaller model or n_ctx"
            ) from None

    def event(self, timing: bool = False) -> CudaEvent:
        return CudaEvent(self.cupy, self.api, timing)


def _free_device(cupy: Any, device: Any, address: int) -> None:
    # A failed kernel may have destroyed the context, and the memory with it.
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError), device:
        cupy.cuda.runtime.free(address)


def _free_pinned(cupy: Any, device: Any, address: int) -> None:
    with CAPTURES, contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError), device:
        cupy.cuda.runtime.deviceSynchronize()  # a queued copy may still read it
        cupy.cuda.runtime.freeHost(address)


def _nothing(*_: int) -> None:
    """The release of host memory, which is freed with its array."""
