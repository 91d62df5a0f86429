"""Streams, captures and graphs of a CUDA driver without a GPU.

What is queued on a stream is a call in `log`. In a capture it is a node of a graph, and the launch
of that graph's executable form puts the calls of all nodes into the log. Rules are the driver's:
what a capture does not bear ends it, and its streams leave it where it began.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

bindings: Any = pytest.importorskip("cuda.bindings.driver")
Result = bindings.CUresult
HOST, DEVICE = bindings.CUmemorytype.CU_MEMORYTYPE_HOST, bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
COPIES = {"cuMemcpyHtoDAsync": (0, 1), "cuMemcpyDtoHAsync": (0, 1), "cuMemcpyDtoDAsync": (0, 1)}
_handles = itertools.count(1 << 32)


class Call(NamedTuple):
    """A call of the driver or of cuBLAS. args: as they were read when it was made."""

    function: str
    args: tuple[Any, ...]


class FakeNode:
    """A node: its call, and the nodes that it begins behind; early: begins before their end."""

    def __init__(self, call: Call, behind: Sequence[FakeNode], early: bool):
        self.call, self.behind = call, tuple(behind)
        self.early = early and all(n.call.function.startswith("cuLaunch") for n in behind)


class FakeGraph:
    def __init__(self) -> None:
        self.nodes: list[FakeNode] = []
        self.handle = next(_handles)

    def __int__(self) -> int:
        return self.handle

    def shape(self) -> list[Any]:
        """What an update cannot change."""
        number = {node: i for i, node in enumerate(self.nodes)}
        return [(_kind(n.call), [number[b] for b in n.behind]) for n in self.nodes]


def _kind(call: Call) -> str:
    return "kernel" if call.function.startswith("cuLaunch") else call.function


class FakeExecutable:
    def __init__(self, graph: FakeGraph):
        self.graph, self.shape = graph, graph.shape()
        self.calls = [node.call for node in graph.nodes]


class Capture:
    """One capture: the streams in it, each with the nodes that its next one begins behind."""

    def __init__(self, origin: int):
        self.origin, self.graph, self.valid = origin, FakeGraph(), True
        self.ends: dict[int, tuple[FakeNode, ...]] = {origin: ()}


def kernel_params(address: int) -> list[int]:
    """The arguments that kernelParams at `address` point to. The values lie in front of them."""
    first = ctypes.c_int64.from_address(address).value
    n = (address - first) // 8
    return [
        ctypes.c_int64.from_address(ctypes.c_int64.from_address(address + 8 * i).value).value
        for i in range(n)
    ]


class FakeCaptures:
    """Of cuda.bindings.driver, what has to do with streams, events and graphs."""

    CUresult, CUmemorytype, CUdeviceptr = Result, bindings.CUmemorytype, bindings.CUdeviceptr
    CUstreamCaptureMode = bindings.CUstreamCaptureMode
    CUstreamCaptureStatus = bindings.CUstreamCaptureStatus
    CUgraphDependencyType = bindings.CUgraphDependencyType

    def __init__(self) -> None:
        self.log: list[Call] = []
        self.calls: list[str] = []  # of the functions here, in order
        self.alive: set[Any] = set()  # graphs and their executable forms
        self.refuse: dict[str, int] = {}  # function -> with what it fails
        self.captures: list[Capture] = []
        self._events: dict[int, tuple[Capture, tuple[FakeNode, ...]]] = {}

    def _asked(self, function: str) -> int:
        self.calls.append(function)
        return self.refuse.get(function, 0)

    def cuGetErrorString(self, error: Any) -> tuple[int, bytes]:
        return 0, b"told to"

    # streams ----------------------------------------------------------------------------------

    def capture_of(self, stream: Any) -> Capture | None:
        return next((c for c in self.captures if int(stream) in c.ends), None)

    def _queue(
        self, stream: Any, function: str, *args: Any, early: bool = False, nodes: int = 1
    ) -> tuple[int]:
        """Queues a call on a stream. early: it may begin before what is in front. nodes: that it
        is in a graph."""
        if error := self.refuse.get(function, 0):
            return (error,)
        call, capture = Call(function, args), self.capture_of(stream)
        if capture is None:
            self.log.append(call)
            return (0,)
        for _ in range(nodes):
            node = FakeNode(call, capture.ends[int(stream)], early)
            capture.graph.nodes.append(node)
            capture.ends[int(stream)] = (node,)
        return (0,)

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
        capture = self.capture_of(stream)
        if capture is not None:
            capture.valid = False
            return (Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        return (0,)

    def cuEventSynchronize(self, event: Any) -> tuple[int]:
        ended = int(event) in self._events  # last recorded in a capture
        return (Result.CUDA_ERROR_CAPTURED_EVENT if ended else 0,)

    def cuEventElapsedTime(self, begin: Any, end: Any) -> tuple[int, float]:
        return 0, 0.25

    # captures ---------------------------------------------------------------------------------

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
        capture = self.capture_of(stream)
        error = self._asked("cuStreamGetCaptureInfo")
        if error or capture is None:
            return error, 0, 0, None, [], [], 0
        return 0, 1, 7, capture.graph, [], [], 0

    def cuStreamEndCapture(self, stream: Any) -> tuple[int, Any]:
        error = self._asked("cuStreamEndCapture")
        capture = self.capture_of(stream)
        assert capture is not None and capture.origin == int(stream), "no capture begins here"
        self.captures.remove(capture)
        reached: set[FakeNode] = set()
        todo = list(capture.ends[capture.origin])
        while todo:
            node = todo.pop()
            reached.add(node)
            todo += node.behind
        if not capture.valid:
            return Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
        if any(node not in reached for node in capture.graph.nodes):
            return Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, None
        if error:
            return error, None
        self.alive.add(capture.graph)
        return 0, capture.graph

    # graphs -----------------------------------------------------------------------------------

    def cuGraphGetNodes(self, graph: FakeGraph, n: int = 0) -> tuple[int, Any, int]:
        return 0, graph.nodes[:n], n or len(graph.nodes)

    def cuGraphGetEdges(self, graph: FakeGraph, n: int = 0) -> tuple[Any, ...]:
        kinds = bindings.CUgraphDependencyType
        early = int(kinds.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        found = [
            (b, node, SimpleNamespace(type=early * node.early))
            for node in graph.nodes
            for b in node.behind
        ]
        first, then, data = ([edge[i] for edge in found[:n]] for i in range(3))
        return 0, first, then, data, n or len(found)

    def cuGraphInstantiate(self, graph: FakeGraph, flags: int) -> tuple[int, Any]:
        if error := self._asked("cuGraphInstantiate"):
            return error, None
        assert graph in self.alive
        executable = FakeExecutable(graph)
        self.alive.add(executable)
        return 0, executable

    def cuGraphUpload(self, executable: Any, stream: Any) -> tuple[int]:
        assert executable in self.alive
        return (self._asked("cuGraphUpload"),)

    def cuGraphLaunch(self, executable: Any, stream: Any) -> tuple[int]:
        assert executable in self.alive
        error = self._asked("cuGraphLaunch")
        if not error:
            self.log += executable.calls
        return (error,)

    def cuGraphExecUpdate(self, executable: Any, graph: FakeGraph) -> tuple[int, Any]:
        assert executable in self.alive and graph in self.alive
        if error := self._asked("cuGraphExecUpdate"):
            return error, None
        if executable.shape != graph.shape():
            return Result.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, None
        executable.calls = [node.call for node in graph.nodes]
        return 0, None

    def cuGraphExecDestroy(self, executable: Any) -> tuple[int]:
        self.alive.remove(executable)
        return (self._asked("cuGraphExecDestroy"),)

    def cuGraphDestroy(self, graph: Any) -> tuple[int]:
        self.alive.remove(graph)
        return (self._asked("cuGraphDestroy"),)

    # single nodes -----------------------------------------------------------------------------

    def cuGraphKernelNodeGetParams(self, node: FakeNode) -> tuple[int, Any]:
        if _kind(node.call) != "kernel":
            return Result.CUDA_ERROR_INVALID_VALUE, None
        function, (x, y, z), *_ = node.call.args
        return 0, SimpleNamespace(func=function, gridDimX=x, gridDimY=y, gridDimZ=z, kernelParams=0)

    def cuGraphExecKernelNodeSetParams(
        self, executable: Any, node: FakeNode, params: Any
    ) -> tuple[int]:
        if error := self._asked("cuGraphExecKernelNodeSetParams"):
            return (error,)
        number = executable.graph.nodes.index(node)
        function, args = executable.calls[number]
        args = (*args[:5], *kernel_params(params.kernelParams))
        executable.calls[number] = Call(function, args)
        return (0,)

    def cuGraphMemcpyNodeGetParams(self, node: FakeNode) -> tuple[int, Any]:
        if node.call.function not in COPIES:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        to_host, from_host = (node.call.function == f"cuMemcpy{x}Async" for x in ("DtoH", "HtoD"))
        made = SimpleNamespace(
            dstMemoryType=HOST if to_host else DEVICE, srcMemoryType=HOST if from_host else DEVICE
        )
        return 0, made

    def cuGraphExecMemcpyNodeSetParams(
        self, executable: Any, node: FakeNode, params: Any, context: Any
    ) -> tuple[int]:
        if error := self._asked("cuGraphExecMemcpyNodeSetParams"):
            return (error,)
        number = executable.graph.nodes.index(node)
        function, given = executable.calls[number]
        args = list(given)
        for place, end in zip(COPIES[function], ("dst", "src"), strict=True):
            on_host = getattr(params, f"{end}MemoryType") == HOST
            args[place] = int(getattr(params, f"{end}{'Host' if on_host else 'Device'}"))
        executable.calls[number] = Call(function, tuple(args))
        return (0,)
