"""A CUDA driver and a cuBLAS without a GPU: they log each call with the arguments they would read.

Handles and launch configurations come from cuda-bindings, which needs no driver for them.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.backend.cuda.fake_graphs import Call, FakeCaptures, kernel_params
from workbench.backend.cuda.device import backend as cuda
from workbench.backend.cuda.device.driver import ALIGN, Driver
from workbench.backend.cuda.kernels import cublas, nvrtc
from workbench.program.commands import Space

bindings: Any = pytest.importorskip("cuda.bindings.driver")


SPARE = 1 << 31  # memory that CuPy gives


class Function(str):
    """A CUfunction: its name, and a handle."""

    __slots__ = ()

    def __int__(self) -> int:
        return hash(self)


class FakeApi(FakeCaptures):
    """What the backend uses of cuda.bindings.driver."""

    CUstream, CUevent = bindings.CUstream, bindings.CUevent
    CUlaunchConfig, CUlaunchAttribute = bindings.CUlaunchConfig, bindings.CUlaunchAttribute
    CUlaunchAttributeValue = bindings.CUlaunchAttributeValue
    CUlaunchAttributeID = bindings.CUlaunchAttributeID
    CUfunction_attribute = bindings.CUfunction_attribute

    def cuMemcpyHtoDAsync(self, *args: Any) -> tuple[int]:
        return self._queue(args[-1], "cuMemcpyHtoDAsync", *map(int, args))

    def cuMemcpyDtoHAsync(self, *args: Any) -> tuple[int]:
        return self._queue(args[-1], "cuMemcpyDtoHAsync", *map(int, args))

    def cuMemcpyDtoDAsync(self, *args: Any) -> tuple[int]:
        return self._queue(args[-1], "cuMemcpyDtoDAsync", *map(int, args))

    def cuMemsetD8Async(self, *args: Any) -> tuple[int]:
        return (0,)

    def cuDeviceCanAccessPeer(self, *args: Any) -> tuple[int, int]:
        return 0, 0

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, str]:
        return 0, cubin.decode()

    def cuModuleUnload(self, module: str) -> tuple[int]:
        return (0,)

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, Function]:
        return 0, Function(f"{name.decode()} of {module}")

    def cuFuncLoad(self, function: Function) -> tuple[int]:
        return (0,)

    def cuFuncSetAttribute(self, *args: Any) -> tuple[int]:
        return (0,)

    def cuLaunchKernel(
        self, function: str, x: int, y: int, z: int, bx: int, by: int, bz: int, shared: int,
        stream: Any, params: int, extra: int,
    ) -> tuple[int]:  # fmt: skip
        grid = (x, y, z), (bx, by, bz), shared, int(stream)
        return self._queue(stream, "cuLaunchKernel", function, *grid, *kernel_params(params))

    def cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> tuple[int]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        assert config.numAttrs == 1 and config.attrs[0].value.programmaticStreamSerializationAllowed
        where = grid, block, config.sharedMemBytes, int(config.hStream)
        read = (function, *where, *kernel_params(params))
        return self._queue(config.hStream, "cuLaunchKernelEx", *read, early=True)


class FakeMemory:
    def __init__(self, address: int, nbytes: int, array: np.ndarray | None):
        self.address, self.nbytes, self.array = address, nbytes, array

    def free(self) -> None:
        self.array = None


class FakeDriver(Driver):
    """Device number `index` of a machine without any."""

    newest: ClassVar[FakeDriver]
    _events: ClassVar[itertools.count] = itertools.count(5000)  # no two devices have the same

    def __init__(self, index: int = 0):
        FakeDriver.newest = self
        numbers = itertools.count(1)
        fresh = lambda **_: SimpleNamespace(ptr=next(numbers))  # noqa: E731
        self.cupy: Any = SimpleNamespace(cuda=SimpleNamespace(Stream=fresh))
        self.api: Any = FakeApi()
        self.properties = {"major": 9, "minor": 0}
        self.description = "no device"
        self.context = 1000 + index
        self._device: Any = SimpleNamespace(id=index, use=lambda: None)
        self._addresses = itertools.count(1 << 50, 1 << 40)

    def allocate(self, nbytes: int, space: Space) -> Any:
        if space == Space.DEVICE:
            return FakeMemory(next(self._addresses), nbytes, None)
        block = np.zeros(nbytes + ALIGN, np.uint8)  # the host computes there
        array = block[-block.ctypes.data % ALIGN :][:nbytes]
        return FakeMemory(array.ctypes.data, nbytes, array)

    def event(self, timing: bool = False) -> Any:
        return SimpleNamespace(handle=self.api.CUevent(next(self._events)))


class FakeCublas:
    """What the backend uses of cuBLAS; products are queued on the driver's streams. In a graph a
    product is two nodes."""

    def __init__(self, api: FakeApi):
        self._api = api
        self._streams: list[int] = []  # of each handle; handles are numbers from 1

    def cublasCreate_v2(self, handle: Any) -> int:
        self._streams.append(0)
        handle._obj.value = len(self._streams)
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        self._streams[handle.value - 1] = stream.value
        return 0

    def cublasSetWorkspace_v2(self, *args: Any) -> int:
        return 0

    cublasSetMathMode = cublasDestroy_v2 = cublasSetWorkspace_v2

    def cublasGemmEx(self, handle: Any, *args: Any) -> int:
        """The two factors, given by reference, are left out; they never differ."""
        read = [a.value for a in (handle, *args) if isinstance(a, ctypes._SimpleCData)]
        there = self._streams[handle.value - 1]
        return self._api._queue(there, "cublasGemmEx", *read, nodes=2)[0]


def _no_cubin(file: str, arch: str, defines: Any = (), sources: Any = None) -> bytes:
    return repr((file, defines)).encode()


def fake_backend(monkeypatch: pytest.MonkeyPatch) -> tuple[cuda.CudaBackend, list[Call]]:
    """A CudaBackend on such a driver, and the log of both libraries. Other backends are made on
    drivers of their own; cuBLAS is the newest one's when it is first used."""
    cupy: Any = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        Memory=lambda nbytes: SimpleNamespace(ptr=1 << 30),
        runtime=SimpleNamespace(
            CUDARuntimeError=RuntimeError, malloc=lambda nbytes: SPARE, free=lambda there: None
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "Driver", FakeDriver)
    monkeypatch.setattr(nvrtc, "cubin", _no_cubin)
    made = cuda.CudaBackend()
    log = made._driver.api.log
    monkeypatch.setattr(cublas, "_load", lambda: (FakeCublas(FakeDriver.newest.api), "no library"))
    return made, log
