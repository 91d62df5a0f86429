"""A CUDA driver and a cuBLAS without a GPU: they log each call with the arguments they would read.

In a capture a call is a node of a graph, and the launch of that graph's executable form logs the
calls of all nodes. Rules are the driver's: what a capture does not bear ends it, and its streams
leave it where it began. Handles and launch configurations are those of cuda-bindings.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from workbench.backend.cuda.device import backend as cuda
from workbench.backend.cuda.device.driver import ALIGN, Driver
from workbench.backend.cuda.kernels import cublas, nvrtc
from workbench.common.progress import HIDDEN, Bar
from workbench.program.commands import Space

bindings: Any = pytest.importorskip("cuda.bindings.driver")
Result = bindings.CUresult
HOST, DEVICE = bindings.CUmemorytype.CU_MEMORYTYPE_HOST, bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
COPIES = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync")
FINE = ("cuMemsetD8Async", "cuModuleUnload", "cuFuncLoad", "cuFuncSetAttribute")
ANSWERS = dict.fromkeys(FINE, (0,)) | {"cuGetErrorString": (0, b"told to")}
ANSWERS |= {"cuDeviceCanAccessPeer": (0, 0), "cuEventElapsedTime": (0, 0.25)}
SPARE = 1 << 31  # memory that CuPy gives


class Call(NamedTuple):
    """A call of the driver or of cuBLAS. args: as they were read when it was made."""

    function: str
    args: tuple[Any, ...]

    @property
    def kind(self) -> str:
        return "kernel" if self.function.startswith("cuLaunch") else self.function


class Node:
    """A node: its call, and the nodes that it begins after; early: begins before their end."""

    def __init__(self, call: Call, after: Sequence[Node], early: bool):
        self.call, self.after = call, tuple(after)
        self.early = early and all(n.call.kind == "kernel" for n in after)


class Graph:
    """A captured graph, or an executable form `of` one, which has calls of its own."""

    def __init__(self, of: Graph | None = None) -> None:
        self.nodes: list[Node] = [] if of is None else of.nodes
        self.calls = [node.call for node in self.nodes]
        self.shape = [] if of is None else of.topology()

    def __int__(self) -> int:
        return id(self)

    def topology(self) -> list[Any]:
        """What an update cannot change."""
        number = {node: i for i, node in enumerate(self.nodes)}
        return [(n.call.kind, [number[b] for b in n.after]) for n in self.nodes]

    def set(self, node: Node, where: slice, args: Sequence[Any]) -> None:
        """Other arguments of a node's call."""
        number = self.nodes.index(node)
        changed = [*self.calls[number].args]
        changed[where] = args
        self.calls[number] = self.calls[number]._replace(args=tuple(changed))


class Capture:
    """One capture: the streams in it, each with the nodes that its next one begins after."""

    def __init__(self, origin: int):
        self.origin, self.graph, self.valid = origin, Graph(), True
        self.ends: dict[int, tuple[Node, ...]] = {origin: ()}


class Function(str):
    """A CUfunction: its name, and a handle."""

    __slots__ = ()
    __int__ = str.__hash__


def kernel_params(address: int) -> list[int]:
    """The arguments that kernelParams at `address` point to. The values lie before them."""
    at = lambda where: ctypes.c_int64.from_address(where).value  # noqa: E731
    return [at(at(address + 8 * i)) for i in range((address - at(address)) // 8)]


class FakeApi:
    """What the backend uses of cuda.bindings.driver."""

    def __init__(self) -> None:
        self.log: list[Call] = []
        self.calls: list[str] = []  # of those functions that `refuse` is asked for, in order
        self.alive: set[Any] = set()  # graphs and their executable forms
        self.refuse: dict[str, int] = {}  # function -> with what it fails
        self.captures: list[Capture] = []
        self._events: dict[int, tuple[Capture, tuple[Node, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(bindings, name)
        if name in COPIES:
            return lambda *args: self._queue(args[-1], name, *map(int, args))
        if name in ANSWERS:
            return lambda *args: ANSWERS[name]
        raise AttributeError(name)

    def _asked(self, function: str) -> Any:
        self.calls.append(function)
        return self.refuse.get(function, 0)

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, str]:
        return 0, cubin.decode()

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, Function]:
        return 0, Function(f"{name.decode()} of {module}")

    def capture_of(self, stream: Any) -> Capture | None:
        return next((c for c in self.captures if int(stream) in c.ends), None)

    def _queue(self, stream: Any, function: str, *args: Any, early=False, nodes=1) -> tuple[int]:
        """early: it may begin before what is ahead has ended. nodes: that it is in a graph."""
        if error := self.refuse.get(function, 0):
            return (error,)
        call, capture = Call(function, args), self.capture_of(stream)
        if capture is None:
            self.log.append(call)
            return (0,)
        for _ in range(nodes):
            node = Node(call, capture.ends[int(stream)], early)
            capture.graph.nodes.append(node)
            capture.ends[int(stream)] = (node,)
        return (0,)

    def cuLaunchKernel(self, function: str, *given: Any) -> tuple[int]:
        *sizes, shared, stream, params, _ = given
        where = tuple(sizes[:3]), tuple(sizes[3:]), shared, int(stream)
        return self._queue(stream, "cuLaunchKernel", function, *where, *kernel_params(params))

    def cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> tuple[int]:
        c = config
        assert c.numAttrs == 1 and c.attrs[0].value.programmaticStreamSerializationAllowed
        grid, block = (c.gridDimX, c.gridDimY, c.gridDimZ), (c.blockDimX, c.blockDimY, c.blockDimZ)
        read = (function, grid, block, c.sharedMemBytes, int(c.hStream), *kernel_params(params))
        return self._queue(c.hStream, "cuLaunchKernelEx", *read, early=True)

    def cuEventRecord(self, event: Any, stream: Any) -> tuple[int]:
        capture = self.capture_of(stream)
        if capture is None:
            self._events.pop(int(event), None)
            self.log.append(Call("cuEventRecord", (int(event), int(stream))))
        else:
            self._events[int(event)] = capture, capture.ends[int(stream)]
        return (0,)

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[int]:
        capture, (of, nodes) = self.capture_of(stream), self._events.get(int(event), (None, ()))
        if of is None and capture is None:
            self.log.append(Call("cuStreamWaitEvent", (int(stream), int(event), flags)))
        elif of is None or of not in self.captures or capture not in (None, of):
            for ended in filter(None, (of, capture)):
                ended.valid = False
            return (Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,)
        else:
            before = of.ends.get(int(stream), ())
            of.ends[int(stream)] = (*before, *(n for n in nodes if n not in before))
        return (0,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[int]:
        if (capture := self.capture_of(stream)) is None:
            return (0,)
        capture.valid = False
        return (Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)

    def cuEventSynchronize(self, event: Any) -> tuple[int]:
        ended = int(event) in self._events  # last recorded in a capture
        return (Result.CUDA_ERROR_CAPTURED_EVENT if ended else 0,)

    def cuStreamIsCapturing(self, stream: Any) -> tuple[int, Any]:
        return 0, self.CUstreamCaptureStatus(int(self.capture_of(stream) is not None))

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[int]:
        assert mode == self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        if error := self._asked("cuStreamBeginCapture"):
            return (error,)
        if self.capture_of(stream) is not None:
            return (Result.CUDA_ERROR_ILLEGAL_STATE,)
        self.captures.append(Capture(int(stream)))
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: Any) -> tuple[Any, ...]:
        capture, error = self.capture_of(stream), self._asked("cuStreamGetCaptureInfo")
        if error or capture is None:
            return error, 0, 0, None, [], [], 0
        return 0, 1, 7, capture.graph, [], [], 0

    def cuStreamEndCapture(self, stream: Any) -> tuple[int, Any]:
        capture, error = self.capture_of(stream), self._asked("cuStreamEndCapture")
        assert capture is not None and capture.origin == int(stream), "no capture begins here"
        self.captures.remove(capture)
        reached, todo = set[Node](), [*capture.ends[capture.origin]]
        while todo:
            node = todo.pop()
            reached.add(node)
            todo += node.after
        if not capture.valid:
            error = Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        elif not reached.issuperset(capture.graph.nodes):
            error = Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        if error:
            return error, None
        self.alive.add(capture.graph)
        return 0, capture.graph

    def cuGraphGetNodes(self, graph: Graph, n: int = 0) -> tuple[int, Any, int]:
        return 0, graph.nodes[:n], n or len(graph.nodes)

    def cuGraphGetEdges(self, graph: Graph, n: int = 0) -> tuple[Any, ...]:
        early = int(self.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        found = [(b, node) for node in graph.nodes for b in node.after]
        data = [SimpleNamespace(type=early * node.early) for _, node in found]
        return 0, [b for b, _ in found[:n]], [x for _, x in found[:n]], data[:n], n or len(found)

    def cuGraphInstantiate(self, graph: Graph, flags: int) -> tuple[int, Any]:
        assert graph in self.alive
        if error := self._asked("cuGraphInstantiate"):
            return error, None
        self.alive.add(executable := Graph(graph))
        return 0, executable

    def cuGraphUpload(self, executable: Any, stream: Any) -> tuple[int]:
        assert executable in self.alive
        return (self._asked("cuGraphUpload"),)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[int]:
        assert executable in self.alive
        self.log += executable.calls
        return (0,)

    def cuGraphExecUpdate(self, executable: Any, graph: Graph) -> tuple[int, Any]:
        assert executable in self.alive and graph in self.alive
        error = self._asked("cuGraphExecUpdate")
        if not error and executable.shape != graph.topology():
            error = Result.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        if not error:
            executable.calls = [node.call for node in graph.nodes]
        return error, None

    def cuGraphDestroy(self, graph: Any) -> tuple[int]:
        self.alive.remove(graph)
        return (0,)

    cuGraphExecDestroy = cuGraphDestroy

    def cuGraphKernelNodeGetParams(self, node: Node) -> tuple[int, Any]:
        if node.call.kind != "kernel":
            return Result.CUDA_ERROR_INVALID_VALUE, None
        function, (x, y, z), *_ = node.call.args
        return 0, SimpleNamespace(func=function, gridDimX=x, gridDimY=y, gridDimZ=z, kernelParams=0)

    def cuGraphExecKernelNodeSetParams(self, executable: Any, node: Node, params: Any) -> tuple:
        if error := self._asked("cuGraphExecKernelNodeSetParams"):
            return (error,)
        executable.set(node, slice(5, None), kernel_params(params.kernelParams))
        return (0,)

    def cuGraphMemcpyNodeGetParams(self, node: Node) -> tuple[int, Any]:
        if node.call.kind not in COPIES:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        dst, src = (HOST if x in node.call.kind else DEVICE for x in ("DtoH", "HtoD"))
        return 0, SimpleNamespace(dstMemoryType=dst, srcMemoryType=src)

    def cuGraphExecMemcpyNodeSetParams(self, executable, node, params, context) -> tuple[int]:
        if error := self._asked("cuGraphExecMemcpyNodeSetParams"):
            return (error,)
        dst = params.dstHost if params.dstMemoryType == HOST else params.dstDevice
        src = params.srcHost if params.srcMemoryType == HOST else params.srcDevice
        executable.set(node, slice(2), (int(dst), int(src)))
        return (0,)


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
        self.description, self.context = "no device", 1000 + index
        self._device: Any = SimpleNamespace(id=index, use=lambda: None)
        self._addresses = itertools.count(1 << 50, 1 << 40)

    def allocate(self, nbytes: int, space: Space) -> Any:
        memory: Any = type("Memory", (), {"free": lambda memory: None})()
        memory.nbytes, memory.address, memory.array = nbytes, next(self._addresses), None
        if space != Space.DEVICE:  # the host computes there
            block = np.zeros(nbytes + ALIGN, np.uint8)
            memory.array = block[-block.ctypes.data % ALIGN :][:nbytes]
            memory.address = memory.array.ctypes.data
        return memory

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


def compile_many(
    wanted: Iterable[tuple[str, tuple[str, ...]]], arch: str, left: Bar = HIDDEN
) -> None:
    """As `nvrtc.compile_many`: one after the other, by whatever `nvrtc.cubin` now is."""
    for file, defines in dict.fromkeys(wanted):
        nvrtc.cubin(file, arch, defines)
        left.update()


def fake_backend(monkeypatch: pytest.MonkeyPatch) -> tuple[cuda.CudaBackend, list[Call]]:
    """A CudaBackend on such a driver, and the log of both libraries. Other backends are made on
    drivers of their own; cuBLAS is the newest one's when it is first used."""
    cupy: Any = ModuleType("cupy")
    runtime: Any = SimpleNamespace(CUDARuntimeError=RuntimeError, free=lambda there: None)
    runtime.malloc = lambda nbytes: SPARE
    cupy.cuda = SimpleNamespace(Memory=lambda nbytes: SimpleNamespace(ptr=1 << 30), runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda, "Driver", FakeDriver)
    no_cubin = lambda file, arch, defines=(), sources=None: repr((file, defines)).encode()  # noqa: E731
    monkeypatch.setattr(nvrtc, "cubin", no_cubin)
    monkeypatch.setattr(nvrtc, "compile_many", compile_many)
    made = cuda.CudaBackend()
    monkeypatch.setattr(cublas, "_load", lambda: (FakeCublas(FakeDriver.newest.api), "no library"))
    return made, made._driver.api.log
